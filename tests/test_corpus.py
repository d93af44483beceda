"""Preparing a corpus end to end: counts, errors, options, keys, the stage process."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as templates
import numpy as np
import pytest
from small_store import make_store

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus, corpus_files, peek, prepare, render, row_hash
from dflash_offline.corpus.__main__ import with_codec
from dflash_offline.corpus.preparation import split_heldout
from dflash_offline.errors import CorpusError, DFlashError
from dflash_offline.layout import Layout
from dflash_offline.progress import Progress

RunFile = Callable[..., Path]


def prepared(path: Path) -> Corpus:
    config = RunConfig.load(path)
    key = keys.corpus_key(config)
    return prepare(config, Layout(config.root_dir).corpus(key), key, Progress(None))


def write_rows(path: Path, rows: list[Any]) -> None:
    """Put rows (or raw lines) in place of a run file's corpus."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path.parent / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def chat(question: str, answer: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **fields}


def test_rows_are_what_the_template_gives(run_file: RunFile, conversations: list[dict[str, Any]], tiny_target: Path) -> None:
    from transformers import AutoTokenizer

    path = run_file(rows=24, corpus={"max_length": 1000, "bucket_edges": [256, 512, 1001]})
    corpus, tokenizer = prepared(path), AutoTokenizer.from_pretrained(tiny_target)
    used = [i for i in range(24) if i in {int(line) - 1 for line in corpus.line}]
    assert len(corpus) == len(used) > 20
    for index, number in enumerate(used):
        row, source = corpus.row(index), conversations[number]
        ids = tokenizer.apply_chat_template(source["messages"], return_dict=True)["input_ids"][:1000]
        assert row.input_ids.tolist() == ids[: len(row.input_ids)]
        assert row.input_ids.dtype == np.int32 and row.loss_mask.dtype == np.uint8 and row.loss_mask[-1] == 1
        assert row.sha256 == row_hash(row.input_ids, row.loss_mask) and row.index == index
        assert corpus.bucket_edges[row.bucket] > len(row.input_ids)
        assert bool(corpus.truncated[index]) == (source["finish_reason"] == "length" or len(ids) == 1000)
        assert corpus.origin(index) == f"{path.parent / 'corpus.jsonl'}:{number + 1}"
        assert corpus.sources[corpus.source_index[index]] == source["source"]
    assert corpus.offsets[0] == 0 and np.array_equal(np.diff(corpus.offsets), corpus.lengths)
    with pytest.raises(IndexError, match="there is no row 99"):
        corpus.row(99)


def test_bad_rows_are_counted_and_counts_add_up(run_file: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file()
    good = [chat(f"What is {i}?", f"It is {i}, of course.", source="numbers") for i in range(10)]
    bad = [
        '{"messages": [',
        "",
        '{"messages": []}',
        chat("q", ""),
        {"text": "x"},
        chat("only", "x" * 2000),
        {**chat("q", "a b c"), "images": ["x"]},
    ]
    write_rows(path, [*good[:5], *bad, *good[5:], *bad[:1]])
    path.write_text(path.read_text().replace("[corpus]\n", '[corpus]\ntoo_long = "drop"\n'))
    corpus = prepared(path)
    counts, rejected = corpus.manifest["counts"], corpus.manifest["rejected"]
    assert rejected == {
        "invalid JSON": 2,
        "empty conversation": 1,
        "no answer to train on": 1,
        "no messages": 1,
        "too long": 1,
        "multimodal": 1,
    }
    assert counts["records"] == 17 and counts["conversations"] == 10 and counts["rejected"] == 7 and counts["blank_lines"] == 1
    printed = capsys.readouterr().out
    assert "Read 17 conversations from 1 file: 10 used, 7 rejected" in printed
    assert f"{path.parent / 'corpus.jsonl'}:6: Expecting value" in printed and "corpus.jsonl:18" in printed
    assert "Bucket 0 [   0, 128):" in printed and "% supervised (answers by mask method: prefix 10)" in printed


def test_strict_refuses_the_first_bad_row(run_file: RunFile) -> None:
    path = run_file(corpus={"strict": True})
    write_rows(path, [chat("q", "an answer"), '{"messages": [{"role"', chat("r", "an answer")])
    with pytest.raises(CorpusError, match=r"corpus.jsonl:2: invalid JSON .*strict = true"):
        prepared(path)
    write_rows(path, [chat("q", "an answer"), "", chat("r", "an answer")])
    assert len(prepared(path)) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat("q", ""), chat("r", " ")], "no conversation can be used: 2 x no answer to train on; the first: .*corpus.jsonl:1"),
        (["", " "], "hold no conversation at all"),
        (['{"messages": ['], "no conversation can be used: 1 x invalid JSON"),
    ],
)
def test_nothing_left_is_an_error(run_file: RunFile, rows: list[Any], message: str) -> None:
    path = run_file()
    write_rows(path, rows)
    with pytest.raises(CorpusError, match=message):
        prepared(path)
    assert not list((path.parent / "out").rglob("manifest.json"))


def test_all_supervised_is_an_error_that_names_the_template(run_file: RunFile) -> None:
    path = run_file(corpus={"chat_template": "all.jinja"})
    (path.parent / "all.jinja").write_text(templates.EVERYTHING)
    with pytest.raises(CorpusError, match=r"all.jinja: 100 % of the tokens would be supervised"):
        prepared(path)


def test_a_wrong_template_shows_early(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_offline.corpus.preparation._EARLY_RECORDS", 3)
    monkeypatch.setattr("dflash_offline.corpus.reading.BLOCK_BYTES", 500)
    path = run_file(corpus={"chat_template": "all.jinja", "workers": 1})
    (path.parent / "all.jinja").write_text(templates.EVERYTHING)
    write_rows(path, [chat(f"question {i}", "an answer " * 20) for i in range(20)])
    with pytest.raises(CorpusError, match="100 % of the tokens"):
        prepared(path)
    lengths = list((path.parent / "out").rglob("lengths.bin"))
    assert lengths and lengths[0].stat().st_size // 4 < 20


def test_none_supervised_is_an_error_that_names_the_template(run_file: RunFile) -> None:
    path = run_file(corpus={"chat_template": "none.jinja"})
    # prints the beginning of every text only, and no prompt that an answer continues
    text = "{% for m in messages %}{{ m['content'][:4] }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    (path.parent / "none.jinja").write_text(text)
    with pytest.raises(CorpusError, match=r"answer not found.*none.jinja was used, which left 0 % supervised"):
        prepared(path)


def test_a_row_with_a_single_supervised_token_is_rejected(run_file: RunFile) -> None:
    path = run_file()
    write_rows(path, [chat("q", "x", finish_reason="length"), chat("q", "x"), chat("r", "a longer answer")])
    corpus = prepared(path)
    assert corpus.manifest["rejected"] == {"fewer than two supervised tokens in a row": 1}
    assert [int(mask.sum()) >= 2 for mask in (corpus.row(0).loss_mask, corpus.row(1).loss_mask)] == [True, True]


def two_turns() -> dict[str, Any]:
    return {
        "messages": [
            *chat("first question " * 6, "first answer " * 6)["messages"],
            *chat("second question", "second answer " * 30)["messages"],
        ]
    }


def test_length_policies(run_file: RunFile) -> None:
    for policy in ("cut", "cut_turn", "drop"):
        path = run_file(corpus={"max_length": 199, "bucket_edges": [64, 200], "too_long": policy})
        write_rows(path, [two_turns(), chat("short", "enough")])
        corpus = prepared(path)
        if policy == "drop":
            assert len(corpus) == 1 and corpus.manifest["rejected"] == {"too long": 1}
            continue
        text = "".join(part for part, wanted in render(RunConfig.load(path), corpus, 0) if wanted)
        assert len(corpus) == 2
        if policy == "cut":
            assert len(corpus.row(0).input_ids) == 199 and corpus.truncated[0]
            assert text.startswith("first answer") and "<|im_end|>second answer" in text and not text.endswith("<|im_end|>")
        else:
            assert text == "first answer " * 6 + "<|im_end|>" and not corpus.truncated[0]


def test_rows_of_exactly_max_length_and_one_more(run_file: RunFile) -> None:
    path = run_file()
    write_rows(path, [two_turns()])
    length = len(prepared(path).row(0).input_ids)
    for limit, kept in ((length, True), (length - 1, False)):
        path = run_file(corpus={"max_length": limit, "bucket_edges": [limit, limit + 1], "too_long": "drop"})
        write_rows(path, [two_turns(), chat("short", "enough")])
        corpus = prepared(path)
        assert (len(corpus) == 2) == kept
        assert not kept or corpus.row(0).bucket == 1


def test_a_giant_conversation_is_cut_without_encoding_all_of_it(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_offline.corpus.template import ChatTemplate

    seen = []
    encode = ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda self, text, mark: seen.append(len(text)) or encode(self, text, mark))
    path = run_file(corpus={"workers": 1})
    write_rows(path, [chat("q", "many words " * 200_000), chat("r", "few words")])
    corpus = prepared(path)
    assert corpus.lengths.tolist() == [511, len(corpus.row(1).input_ids)] and corpus.truncated[0]
    assert max(seen) < 100_000


def test_heldout_split_goes_by_prompt_and_does_not_move(run_file: RunFile, conversations: list[dict[str, Any]]) -> None:
    path = run_file(corpus={"heldout_fraction": 0.3, "max_length": 1000, "bucket_edges": [1001]})
    write_rows(path, conversations[:60])
    before = prepared(path)
    write_rows(path, conversations[60:] + conversations[:60])
    after = prepared(path)
    side = {after.hashes[i].tobytes(): bool(after.heldout[i]) for i in range(len(after))}
    assert all(side[before.hashes[i].tobytes()] == bool(before.heldout[i]) for i in range(len(before)))
    assert 0.1 < before.heldout.mean() < 0.5
    write_rows(path, [chat(f"question {i % 20}", f"answer {i}") for i in range(60)])
    same = prepared(path)
    for i in range(20):
        assert len({bool(same.heldout[j]) for j in range(60) if (same.line[j] - 1) % 20 == i}) == 1


def test_small_corpora_have_something_on_both_sides() -> None:
    hashes = np.array([5, 2**63, 7], dtype=np.uint64)
    assert split_heldout(hashes, 0.0).tolist() == [False] * 3
    assert split_heldout(hashes, 0.25).tolist() == [True, False, True]
    assert split_heldout(np.array([2**63, 2**62 + 1], dtype=np.uint64), 0.01).tolist() == [False, True]
    assert split_heldout(hashes[[0, 2]], 0.5).tolist() == [True, False]
    assert split_heldout(hashes[:1], 0.9).tolist() in ([True], [False])


def test_auto_edges_and_options_are_recorded(run_file: RunFile) -> None:
    path = run_file(corpus={"bucket_edges": "auto", "num_buckets": 3, "chat_template_kwargs": {"enable_thinking": False}})
    corpus = prepared(path)
    assert len(corpus.bucket_edges) == 3 and corpus.bucket_edges[-1] == 512
    assert corpus.manifest["chat_template_kwargs"] == {"enable_thinking": False}
    assert corpus.manifest["template"]["end_markers"] == ["<|im_end|>"] and corpus.manifest["mask_methods"]["prefix"] > 0


def test_key_follows_content_and_options(run_file: RunFile) -> None:
    path = run_file()
    key = keys.corpus_key(RunConfig.load(path))
    text, lines = path.read_text(), (path.parent / "corpus.jsonl").read_text()
    for change in ("strict = true", "workers = 2"):
        path.write_text(text.replace("[corpus]\n", f"[corpus]\n{change}\n"))
        assert keys.corpus_key(RunConfig.load(path)) == key
    for change in ('supervise = "last"', "supervise_thinking = false", 'too_long = "drop"', "chat_template_kwargs = { a = 1 }"):
        path.write_text(text.replace("[corpus]\n", f"[corpus]\n{change}\n"))
        assert keys.corpus_key(RunConfig.load(path)) != key
    path.write_text(text)
    edited = lines.replace("the", "teh", 1)
    assert edited != lines and len(edited) == len(lines)
    (path.parent / "corpus.jsonl").write_text(edited)
    assert keys.corpus_key(RunConfig.load(path)) != key
    moved = path.parent / "moved"
    moved.mkdir()
    for name in ("run.toml", "corpus.jsonl"):
        shutil.copy(path.parent / name, moved / name)
    (moved / "corpus.jsonl").write_text(lines)
    (moved / "run.toml").write_text(text.replace(str(path.parent), str(moved)))
    assert keys.corpus_key(RunConfig.load(moved / "run.toml")) == key


def test_files_folders_and_globs(
    run_file: RunFile, conversations: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data set % ü"
    (folder / "deeper").mkdir(parents=True)
    (folder / "README.md").write_text("# not data")
    (folder / "b.jsonl").write_text(json.dumps(conversations[1]))
    (folder / "a.jsonl").write_text(json.dumps(conversations[0]))
    (folder / "deeper" / "c.json").write_text(json.dumps(conversations[2:4]))
    (folder / "empty.jsonl").write_text("")
    path = run_file()
    path.write_text(path.read_text().replace(json.dumps(str(tmp_path / "corpus.jsonl")), '"data set % ü", "data*/a.jsonl"'))
    names = [file.name for file in corpus_files(RunConfig.load(path))]
    assert names == ["a.jsonl", "b.jsonl", "c.json", "empty.jsonl", "a.jsonl"]
    corpus = prepared(path)
    assert corpus.manifest["counts"]["records"] == 5 and corpus.manifest["counts"]["duplicate_rows"] == 1
    printed = capsys.readouterr().out
    assert "a.jsonl is named more than once" in printed and "empty.jsonl is empty" in printed


@pytest.mark.parametrize(
    ("rows", "fraction", "said"),
    [
        (4, 0.0, "Warning: no conversation is held out, so there will be no tau_replay; raise [corpus] heldout_fraction"),
        (1, 0.1, "Warning: no conversation is held out, since all have one prompt"),
        (4, 0.1, None),
    ],
)
def test_a_corpus_with_nothing_held_out_says_so(
    run_file: RunFile, capsys: pytest.CaptureFixture[str], rows: int, fraction: float, said: str | None
) -> None:
    corpus = prepared(run_file(rows=rows, corpus={"heldout_fraction": fraction}))
    printed = capsys.readouterr().out
    assert corpus.heldout.any() == (said is None) == ("no conversation is held out" not in printed)
    assert said is None or said in printed


def test_ids_beyond_the_embedding_are_refused(run_file: RunFile, tiny_target: Path, tmp_path: Path) -> None:
    path = run_file()
    folder = tmp_path / "small"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    path.write_text(path.read_text().replace(str(tiny_target), str(folder)))
    with pytest.raises(CorpusError, match="but the target has 300 embedding rows"):
        prepared(path)


def test_complete_corpora_are_not_made_again_and_damaged_ones_are_noticed(run_file: RunFile) -> None:
    path = run_file()
    corpus = prepared(path)
    stamp = (corpus.folder / "manifest.json").stat().st_mtime_ns
    assert prepared(path).folder == corpus.folder and (corpus.folder / "manifest.json").stat().st_mtime_ns == stamp
    with (corpus.folder / "input_ids.bin").open("ab") as file:
        file.write(b"\0\0\0\0")
    with pytest.raises(CorpusError, match="input_ids.bin: .* bytes, manifest says"):
        Corpus.open(corpus.folder)
    (corpus.folder / "manifest.json").unlink()
    with pytest.raises(DFlashError, match="not complete"):
        Corpus.open(corpus.folder)
    again = prepared(path)  # what a killed run left behind is written over
    assert np.array_equal(again.hashes, corpus.hashes)


def test_workers_make_the_same_corpus(run_file: RunFile, conversations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_offline.corpus.reading.BLOCK_BYTES", 20_000)
    path = run_file()
    write_rows(path, conversations * 2 + ["broken"])
    one = prepared(path)
    path.write_text(path.read_text().replace("[corpus]\n", "[corpus]\nworkers = 2\n"))
    shutil.move(one.folder, path.parent / "kept")
    two, one = prepared(path), Corpus.open(path.parent / "kept")
    for name in ("hashes", "line", "heldout", "buckets", "source_index", "truncated", "lengths"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    assert {k: v for k, v in one.manifest.items() if k not in ("digest", "files")} == {
        k: v for k, v in two.manifest.items() if k not in ("digest", "files")
    }


def test_render_marks_what_is_supervised(run_file: RunFile) -> None:
    path = run_file()
    write_rows(path, [chat("Hi there", "Hello \N{GRINNING FACE}!"), chat("second", "row here")])
    corpus = prepared(path)
    assert render(RunConfig.load(path), corpus, 0) == [
        (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("Hello \N{GRINNING FACE}!<|im_end|>", True),
    ]


def test_peek_estimates_without_preparing(run_file: RunFile, conversations: list[dict[str, Any]]) -> None:
    path = run_file()
    write_rows(path, conversations)
    found, config = peek(RunConfig.load(path), 30), RunConfig.load(path)
    assert found.records == 30 and 0.1 < found.share_read < 0.5
    corpus = prepared(path)
    assert found.lengths.tolist() == corpus.lengths[: len(found.lengths)].tolist()
    assert abs(found.estimated_tokens / corpus.manifest["counts"]["tokens"] - 1) < 0.3
    whole = peek(config, 10_000)
    assert whole.estimated_tokens == corpus.manifest["counts"]["tokens"] and whole.share_read == 1.0


def run_stage(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_offline.corpus", "--config", str(path), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONWARNINGS": "error", **environment}
    )


def test_the_stage_prepares_and_plans(run_file: RunFile) -> None:
    path = run_file()
    config = RunConfig.load(path)
    key = keys.corpus_key(config)
    done = run_stage(path, "--key", key)
    assert done.returncode == 0, done.stderr
    assert "Capture plan:" in done.stdout and "Bucket 0" in done.stdout
    layout = Layout(config.root_dir)
    assert len(Corpus.open(layout.corpus(key))) > 0 and layout.plan(keys.capture_key(config), key).is_file()
    assert "with codec" not in done.stdout
    make_store(layout.store(keys.capture_key(with_codec(config, "int8"))), "int8", parts=1)
    assert 'with codec "int8" already' in run_stage(path).stdout, "nobody should capture the same states twice unasked"
    told = path.parent / "corpus.progress.json"
    assert run_stage(path, DFLASH_PROGRESS=str(told)).returncode == 0
    assert json.loads(told.read_text())["text"] == "corpus and capture plan are complete", "also where nothing was to be done"
    (path.parent / "corpus.jsonl").write_text("not a conversation\n")
    failed = run_stage(path)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1
    assert "no known format" in failed.stderr
    write_rows(path, [chat("q", "an answer"), "{}"])
    failed = run_stage(path, "--strict")
    assert failed.returncode == 1 and "corpus.jsonl:2: no messages" in failed.stderr

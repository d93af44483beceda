"""Regeneration by the target loaded here: the same text as transformers' own generate, parts, resume, and the corpus after it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_target, write_run_file

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus, RowRejected, prepare
from dflash_offline.corpus.template import load_template
from dflash_offline.errors import ConfigError, RegenerateError
from dflash_offline.estimate import estimate
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest
from dflash_offline.progress import Progress
from dflash_offline.regenerate import answer_files, parse_turns, regenerate
from dflash_offline.regenerate.local import Speaker
from dflash_offline.regenerate.parts import Journal

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [
    {"id": "a", "source": "sums", "messages": [{"role": "user", "content": "What is 2 + 2?"}]},
    {"id": 2, "messages": [{"role": "user", "content": "Name a colour."}, {"role": "user", "content": "And another one, please."}]},
    {"messages": [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Tell me a story about a boat " * 4}]},
    {"id": "d", "prompt": "Hi"},
    *({"id": f"more {i}", "prompt": f"Count to {i}. " * (1 + i % 3)} for i in range(8)),
    *({"id": f"two {i}", "messages": [{"role": "user", "content": f"{text} {i}"} for text in ("Say", "Again")]} for i in range(8)),
]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path) -> Path:
    """A tiny target that never says a control token but its end token, now and then."""
    from transformers import LlamaForCausalLM

    folder = make_tiny_target(tmp_path_factory.mktemp("talker") / "model", tiny_tokenizer_dir)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[[0, 1, *range(500, 512)]] = 0
        model.lm_head.weight[2] *= 2.2
    model.save_pretrained(folder)
    return folder


class Run:
    """A run file with [regenerate], and what came out."""

    def __init__(self, folder: Path, model: Path, prompts: list[Any] | None = None, **sections: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in (PROMPTS if prompts is None else prompts)), encoding="utf-8")
        section = {"prompts": ["prompts.jsonl"], "max_new_tokens": 12, "batch": 4, "gpus": "cpu"} | sections.pop("regenerate", {})
        self.path = write_run_file(folder, model=model, files=[], regenerate=section, **sections)
        self.config = RunConfig.load(self.path)
        self.key = keys.regenerate_key(self.config)
        self.out = Layout(self.config.root_dir).regeneration(self.key)
        self.lines: list[str] = []

    def go(self, **options: Any) -> list[dict[str, Any]]:
        progress = Progress(None)
        progress.say = self.lines.append
        regenerate(self.config, self.key, progress, **options)
        return self.rows()

    def start(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dflash_offline.regenerate", "--config", str(self.path), "--key", self.key, *options]
        return subprocess.Popen(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for path in answer_files(self.config) for line in path.read_text(encoding="utf-8").splitlines()]


def generated(config: RunConfig, folder: Path, most: int) -> Callable[[list[dict[str, str]]], tuple[str, str]]:
    """transformers' own greedy answer to a history, one at a time: text and finish reason."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    template = load_template(config)

    def answer(messages: list[dict[str, str]]) -> tuple[str, str]:
        ids = template.encode(template.render(messages, generation_prompt=True), "").ids
        with torch.inference_mode():
            output = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, eos_token_id=2, pad_token_id=2)
        said = output[0, len(ids) :].tolist()
        stopped = said[-1] == 2
        text = template.decode(said[:-1] if stopped else said)
        return (text, "stop") if stopped else (text.rstrip("\ufffd"), "length")

    return answer


def expected(prompt: dict[str, Any], answer: Callable[[list[dict[str, str]]], tuple[str, str]]) -> dict[str, Any] | None:
    messages: list[dict[str, str]] = []
    finish = "stop"
    for turn in parse_turns(prompt):
        messages += turn
        text, finish = answer(messages)
        if not text.strip():
            return None
        messages.append({"role": "assistant", "content": text})
        if finish == "length":
            break
    own = {name: prompt[name] for name in ("id", "source") if name in prompt}
    return {**own, "messages": messages, "finish_reason": finish}


def test_answers_are_the_targets_own_greedy_text_in_order(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker, regenerate={"part_rows": 5, "max_new_tokens": 24})
    rows = run.go()
    answer = generated(run.config, talker, 24)
    wanted = [expected(prompt, answer) for prompt in PROMPTS]
    assert rows == [row for row in wanted if row is not None]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}, "the tiny target does both"
    assert any(len(row["messages"]) > 3 for row in rows), "one conversation has two answers"
    manifest = read_manifest(run.out, kind="regeneration")
    assert manifest["counts"]["conversations"] == len(rows) and manifest["counts"]["prompts"] == len(PROMPTS)
    assert manifest["sampling"]["temperature"] == 0 and manifest["target"]["weights"]
    assert manifest["by"][0]["device"] == "cpu" and len(manifest["by"]) == 4
    assert any("logits are at most" in line for line in run.lines)


def test_draws_do_not_depend_on_batch_or_parts(tmp_path: Path, talker: Path) -> None:
    settings = {"temperature": 0.9, "top_p": 0.8, "seed": 3, "max_new_tokens": 7}
    one = Run(tmp_path / "one", talker, regenerate=settings).go()
    two = Run(tmp_path / "two", talker, regenerate=settings | {"batch": 1, "part_rows": 2}).go()
    other = Run(tmp_path / "three", talker, regenerate=settings | {"seed": 4}).go()
    assert one == two and one != other
    twice = [{"prompt": "Say something."}] * 3
    texts = {row["messages"][1]["content"] for row in Run(tmp_path / "four", talker, twice, regenerate=settings).go()}
    assert len(texts) == 3, "the same prompt three times is drawn three times"


def test_a_killed_process_loses_nothing_that_was_answered(tmp_path: Path, talker: Path) -> None:
    prompts = [{"id": i, "prompt": f"Question number {i}?"} for i in range(64)]
    run = Run(tmp_path, talker, prompts, regenerate={"max_new_tokens": 32, "part_rows": 16, "batch": 4})
    whole = Run(tmp_path / "whole", talker, prompts, regenerate={"max_new_tokens": 32})
    process = run.start("--replica", "0", "--replicas", "2")
    journals = run.out / "journals"
    end = time.monotonic() + 120
    while not (journals.is_dir() and sum(path.read_bytes().count(b"\n") for path in journals.iterdir()) >= 6):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert len(read_json(run.out / "plan.json")["parts"]) == 8, "so many that two replicas end together"
    kept = {path.stem: path.read_bytes().count(b"\n") for path in journals.iterdir()}
    assert not (run.out / "manifest.json").exists()
    rows = run.go()
    assert any(" answers are there" in line for line in run.lines)
    assert rows == whole.go(), "an interrupted run gives what an undisturbed one gives"
    by = {part["part"]: part for part in read_manifest(run.out)["by"]}
    assert all(by[name]["resumed_answers"] == count for name, count in kept.items())


def test_prompts_that_do_not_fit_are_left_out(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    small = make_tiny_target(tmp_path / "model", tiny_tokenizer_dir, max_position_embeddings=96)
    run = Run(tmp_path / "run", small, [{"id": "long", "prompt": "word " * 200}, {"id": "short", "prompt": "ok"}])
    rows = run.go()
    manifest = read_manifest(run.out)
    assert manifest["left_out_rows"][0]["id"] == "long" and manifest["left_out_rows"][0]["reason"] == "too long for the target"
    assert [row["id"] for row in rows] in (["short"], [])


def test_control_tokens_in_an_answer_leave_the_row_out(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker)
    speaker = Speaker(load_template(run.config), stop_ids=[2], max_new_tokens=9, context=100)
    assert speaker.answer([50, 51, 2]).finish_reason == "stop" and speaker.answer([50, 51, 2]).tokens == 3
    assert speaker.answer([50, 51]).finish_reason == "length"
    for tokens in ([50, 1, 51, 2], [50, 505]):
        with pytest.raises(RowRejected, match="control tokens"):
            speaker.answer(tokens)


def test_targets_with_sliding_windows_answer_the_slow_way(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "model"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8, initializer_range=0.3, eos_token_id=2, bos_token_id=1)
    model = MistralForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[[0, 1, *range(500, 512)]] = 0
    model.save_pretrained(folder)
    for path in tiny_tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)
    run = Run(tmp_path / "run", folder)
    rows = run.go()
    assert any("transformers' own generate" in line for line in run.lines)
    answer = generated(run.config, folder, 12)
    assert rows == [row for row in (expected(prompt, answer) for prompt in PROMPTS) if row is not None]


# ---------------------------------------------------------------- prompts, parts, settings


def texts(row: Any, **options: Any) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in turn] for turn in parse_turns(row, **options)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_of_rows_of_every_shape() -> None:
    assistant = {"role": "assistant", "content": "old"}
    assert texts({"prompt": "p", "system": "s"}) == [[("system", "s"), ("user", "p")]]
    assert texts([user("a"), user("b")]) == [[("user", "a")], [("user", "b")]]
    assert texts({"messages": [user("a"), assistant]}) == [[("user", "a")]]
    assert texts({"messages": [user("a"), user("b"), assistant, user("c")]}) == [[("user", "a"), ("user", "b")], [("user", "c")]]
    late = {"role": "system", "content": "now"}
    assert texts({"messages": [assistant, user("a"), late, assistant, user("b")]}) == [[("user", "a"), ("system", "now")], [("user", "b")]]
    assert texts({"messages": [{"role": "pupil", "content": "a"}]}, roles={"pupil": "user"}) == [[("user", "a")]]
    for row, reason in (
        ({"messages": [assistant]}, "no user turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
        ({"messages": [user("a"), assistant, {"role": "tool", "content": "4"}]}, "needs tools"),
        ({"messages": [user("a")], "tools": [{"name": "f"}]}, "needs tools"),
        ({"messages": [user("a"), user(" \n")]}, "empty user turn"),
        ({"text": "a"}, "no messages"),
    ):
        with pytest.raises(RowRejected) as caught:
            parse_turns(row)
        assert caught.value.reason == reason


def test_journal_takes_off_a_cut_line_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "journals" / "part-00000.jsonl"
    journal = Journal(path)
    records = [{"prompt": i, "turn": 0, "content": "a\u2028b\r\n\x85"} for i in range(3)]
    for record in records:
        journal.append(record)
    journal.close()
    whole = path.read_bytes()
    for cut in (1, 9):
        path.write_bytes(whole + whole[:cut])
        journal = Journal(path)
        assert journal.records == records
        journal.close()
        assert path.read_bytes() == whole
    path.write_bytes(b"{]\n" + whole)
    with pytest.raises(RegenerateError, match="damaged .*; delete the file"):
        Journal(path)


def test_nothing_to_ask_is_one_line(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker, [{"messages": []}, {"text": "x"}])
    with pytest.raises(
        RegenerateError, match="no row asks anything: 1 x empty conversation, 1 x no messages; the first: .*prompts.jsonl:1"
    ):
        run.go()


def test_only_the_first_prompts(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker, regenerate={"max_prompts": 3, "max_new_tokens": 2})
    run.go()
    assert read_json(run.out / "plan.json")["prompts"] == 3


def test_corpus_is_made_of_the_answers(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker, regenerate={"part_rows": 5})
    corpus_key = keys.corpus_key(run.config)
    with pytest.raises(RegenerateError, match="answers of .* are not there yet; run `luigi --module pipelines RegenerateResponses`"):
        prepare(run.config, Layout(run.config.root_dir).corpus(corpus_key), corpus_key, Progress(None))
    rows = run.go()
    assert keys.corpus_key(run.config) == corpus_key, "known before the answers are"
    corpus = prepare(run.config, Layout(run.config.root_dir).corpus(corpus_key), corpus_key, Progress(None))
    assert isinstance(corpus, Corpus) and corpus.manifest["counts"]["conversations"] == len(rows)
    assert corpus.manifest["counts"]["truncated_rows"] == sum(row["finish_reason"] == "length" for row in rows)


def test_plan_counts_answers_that_are_not_written_yet_as_long_as_they_may_become(tmp_path: Path, talker: Path) -> None:
    run = Run(tmp_path, talker)
    bound = estimate(run.config)
    assert not bound.is_exact and any(
        "max_new_tokens = 12), so tokens, bytes and times are upper bounds" in line for line in bound.warnings
    )
    run.go()
    known = estimate(run.config)
    assert not any("upper bounds" in line for line in known.warnings)
    assert known.rows <= bound.rows <= len(PROMPTS) and known.tokens <= bound.tokens <= known.tokens + 12 * 8 * bound.rows
    few = Run(tmp_path / "few", talker, regenerate={"max_prompts": 3})
    assert estimate(few.config).rows <= 3


def test_keys_follow_what_changes_answers(tmp_path: Path, talker: Path, run_file: Callable[..., Path]) -> None:
    base = Run(tmp_path, talker)
    corpus, capture = keys.corpus_key(base.config), keys.capture_key(base.config)
    for setting in ({"batch": 9}, {"part_rows": 7}, {"gpus": "cpu", "replicas": 3}, {"retries": 1}, {"timeout_s": 3.0}):
        assert Run(tmp_path, talker, regenerate=setting).key == base.key
    for setting in ({"temperature": 0.5}, {"max_new_tokens": 13}, {"max_turns": 1}, {"seed": 1}, {"max_prompts": 2}):
        changed = Run(tmp_path, talker, regenerate=setting)
        assert changed.key != base.key and keys.corpus_key(changed.config) != corpus and keys.capture_key(changed.config) == capture
    assert Run(tmp_path, talker, PROMPTS[:3]).key != base.key
    server = {"backend": "server", "base_urls": ["http://one:1/v1"]}
    asked = Run(tmp_path, talker, regenerate=server)
    assert asked.key != base.key
    assert (
        Run(tmp_path, talker, regenerate=server | {"base_urls": ["http://two:2/v1"], "api_key_env": "K", "concurrency": 3}).key == asked.key
    )
    assert Run(tmp_path, talker, regenerate=server | {"model": "m"}).key != asked.key
    plain = RunConfig.load(run_file())
    assert not plain.regenerates
    with pytest.raises(ConfigError, match="nothing to regenerate"):
        regenerate(plain, "k", Progress(None))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "[regenerate] prompts names no file"),
        ('prompts = ["p"]\nbackend = "server"', 'backend = "server" needs base_urls'),
        ('prompts = ["p"]\nbase_urls = ["http://h/v1"]', 'base_urls has no effect with backend = "transformers"'),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["h:80"]', "'h:80' is no plain http(s)://host:port/path"),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["http://me:pw@h/v1"]', "'http://...@h/v1' is no plain"),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["http://me:p/w@h/v1"]', "base_urls: 'http://...@h/v1' is no plain"),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["me:pw@h/v1"]', "base_urls: '...@h/v1' is no plain"),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["http://h/v1?token=k#k"]', "base_urls: 'http://h/v1?...' is no plain"),
        ('prompts = ["p"]\nbackend = "server"\nbase_urls = ["http://h/v1"]\napi_key_env = "sk-123"', "never write the key itself"),
        ('prompts = ["p"]\ntop_p = 0', "top_p = 0: must be a number above 0 and at most 1"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[target]\nmodel = "x"\n[corpus]\n[regenerate]\n{lines}\n')
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "sk-123" not in str(caught.value) and "pw" not in str(caught.value)


def test_files_and_prompts_together_are_refused_and_neither_is_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[target]\nmodel = "x"\n[corpus]\nfiles = ["a"]\n[regenerate]\nprompts = ["p"]\n')
    with pytest.raises(ConfigError, match="are both given; remove files"):
        RunConfig.load(path)
    path.write_text('[target]\nmodel = "x"\n[corpus]\n')
    with pytest.raises(ConfigError, match="files names no file; name conversation files, or prompts in"):
        RunConfig.load(path)


def test_written_run_file_has_the_section_as_a_comment_that_can_be_taken_off(tmp_path: Path) -> None:
    from dflash_offline.reference import commented_run_file

    lines = commented_run_file().split("\n")
    begin = lines.index("# [regenerate]")
    end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith("["))
    assert all(line == "" or line.startswith("# ") for line in lines[begin:end])
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines))
    assert not RunConfig.load(path).regenerates
    lines[begin], lines[begin + 3] = lines[begin][2:], lines[begin + 3][2:]
    assert lines[begin + 3].startswith("prompts = ")
    path.write_text("\n".join(line for line in lines if not line.startswith("files = ")))
    assert RunConfig.load(path).regenerates

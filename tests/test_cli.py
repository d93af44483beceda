"""The command line without a run: help, errors in one line, init, doctor, plan, smoke's run file."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import small_store
from click.testing import CliRunner, Result

from dflash_offline import estimate, reference, smoke, store
from dflash_offline.cli import main
from dflash_offline.cli.group import Commands
from dflash_offline.cli.options import load_run
from dflash_offline.config import RunConfig
from dflash_offline.corpus import prepare
from dflash_offline.doctor import storage
from dflash_offline.errors import CorpusError, ProcessError
from dflash_offline.keys import capture_key, corpus_key
from dflash_offline.layout import Layout
from dflash_offline.plan import make_plan
from dflash_offline.progress import Progress


def run(*arguments: str, status: int = 0, **options: Any) -> Result:
    result = CliRunner().invoke(main, list(arguments), **options)
    assert result.exit_code == status, (result.output, result.exception)
    return result


def of_another_target(path: Path, model: str) -> Path:
    """The run file with another [target] model."""
    lines = [f'model = "{model}"' if line.startswith("model = ") else line for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines))
    return path


def test_every_command_has_help_that_fits_a_line() -> None:
    listed = run("--help").output
    assert list(main.commands)[:3] == ["init", "doctor", "plan"], "in the order of use"
    for name, command in main.commands.items():
        assert f"  {name} " in listed
        assert command.help and command.get_short_help_str(limit=200)
        run(name, "--help")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dflash_offline.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "sys.exit([name for name in ('torch', 'numpy', 'pydantic', 'zarr', 'luigi', 'rich', 'transformers') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_mistyped_command_finds_its_neighbour() -> None:
    assert "unknown command 'staus'; did you mean 'status'?" in run("staus", status=2).output
    assert "unknown command 'xyzzy'; known are init, doctor" in run("xyzzy", status=2).output


def test_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[target]\nmodel = "x"\ngpus = "foo"\n[corpus]\nfiles = ["a"]\n')
    done = subprocess.run([sys.executable, "-m", "dflash_offline.cli", "status"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == 'error: run.toml: [target]: gpus = \'foo\': must be a list of whole numbers, "all" or "cpu"\n'
    assert "no such run file" in run("plan", "--config", str(tmp_path / "absent.toml"), status=1).output


def test_without_a_run_file_the_embedded_one_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("status", "--json")
    assert "no run.toml in this folder: using the embedded run file" in result.stderr
    assert json.loads(result.stdout)["root"] == str(tmp_path / "dflash-run")


def test_the_embedded_run_file_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``show`` asks for the run file twice, for the store and for the tokenizer."""
    monkeypatch.chdir(tmp_path)

    def twice() -> None:
        assert load_run(None).source == load_run(None).source

    for _ in range(2):
        assert CliRunner().invoke(click.Command("twice", callback=twice)).stderr.count("no run.toml in this folder") == 1


def test_init_writes_a_run_file_for_eight_gpus(tmp_path: Path) -> None:
    text = run("init").output
    (tmp_path / "run.toml").write_text(text)
    config = RunConfig.load(tmp_path / "run.toml")
    assert config.target.gpus == [0, 1, 2, 3, 4] and config.train.gpus == [5, 6, 7]
    assert config.corpus.bucket_edges == [770, 1216, 1728, 2432, 3296, 8193]
    for name, field in RunConfig.model_fields.items():
        if name in ("root", "drafters", "hosts"):
            continue
        for key, inner in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert f"\n{key} = " in text or f"\n# {key} = " in text, f"[{name}] {key} is not in it"
            assert f"# {inner.description}\n" in text


def test_init_shows_every_default_as_it_is(tmp_path: Path) -> None:
    """With every commented setting that has a value switched on, the file still says the defaults."""
    lines, in_section = [], True
    for line in run("init").output.splitlines():
        if line.removeprefix("# ").startswith("["):
            in_section = line.startswith("[")  # a section that is commented out whole stays so
        body = line.removeprefix("# ")
        setting = line.startswith("# ") and " = " in body and body.split(" = ")[0].isidentifier() and "unset" not in body
        lines.append(body if setting and in_section else line)
    text = "\n".join(lines)
    plain, all_on = tomllib.loads(run("init").output), tomllib.loads(text)
    assert sum(len(section) for section in all_on.values() if isinstance(section, dict)) > 60
    (tmp_path / "run.toml").write_text(text)
    assert RunConfig.load(tmp_path / "run.toml").model_dump() == RunConfig.model_validate(plain).model_dump()


def test_init_demo_leads_to_the_demo_data_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, Path(reference.__file__).parent.parent):
        monkeypatch.chdir(folder)
        text = run("init", "--demo").output
        path = tmp_path / "demo.toml"
        path.write_text(text if folder == tmp_path else text.replace('"data/', f'"{folder}/data/'))
        config = RunConfig.load(path)
        assert config.files(config.corpus.files, where="files")[0].is_file()
        assert config.files(config.evaluate.prompts, where="prompts")[0].is_file()
        assert config.target.model == "demo:smollm2"


def test_reference_page_is_up_to_date() -> None:
    page = Path(reference.__file__).parent.parent / "docs" / "run-file.md"
    assert page.read_text(encoding="utf-8") == reference.reference_page(), "run: python -m dflash_offline.reference > docs/run-file.md"


def test_doctor_passes_here(run_file: Callable[..., Path]) -> None:
    path = run_file()
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json", "--config", str(path)).output)}
    assert {"python", "torch", "target", "disk", "file locks", "luigid", "[target] gpus"} <= set(checks)
    assert all(check["level"] in ("ok", "warn") for check in checks.values())
    assert list(path.parent.glob(".dflash-doctor*")) == []


def test_doctor_fails_with_what_to_do(run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = of_another_target(run_file(target={"gpus": [0]}), "absent/model/folder")
    result = run("doctor", "--json", "--config", str(path), status=1)
    failed = {check["name"]: check for check in json.loads(result.output) if check["level"] == "fail"}
    assert {"[target] gpus", "target"} <= set(failed)
    assert all(check["advice"] for check in failed.values())


def test_doctor_notices_locks_that_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.locks(tmp_path / "probe", "ext4").level == "ok"
    monkeypatch.setattr(storage.fcntl, "flock", lambda file, operation: None)
    assert storage.locks(tmp_path / "probe", "nfs").level == "fail"


def test_plan_without_a_usable_conversation_is_an_error(run_file: Callable[..., Path]) -> None:
    path = run_file()
    (path.parent / "corpus.jsonl").write_text('{"messages": []}\n' * 3)
    text = run("plan", "--config", str(path), status=1).output
    why = f"3 x empty conversation, the first in {path.parent / 'corpus.jsonl'}:1"
    rest = "; mend the rows, or name other files in [corpus] files\n"
    assert text == f"error: run.toml: no conversation can be trained on among the 3 rows read: {why}{rest}"
    (path.parent / "corpus.jsonl").write_text("")
    text = run("plan", "--config", str(path), status=1).output
    assert text == f"error: run.toml: no conversation can be trained on: {path.parent / 'corpus.jsonl'} is empty{rest}"


def test_plan_warns_when_nothing_is_held_out(run_file: Callable[..., Path]) -> None:
    path = str(run_file())
    assert "is held out" not in run("plan", "--config", path).stdout
    path = str(run_file(corpus={"heldout_fraction": 0.0}))
    text = run("plan", "--config", path).stdout
    assert "note: no conversation is held out, so there will be no tau_replay; raise [corpus] heldout_fraction\n" in text
    path = str(run_file(rows=1))
    (warning,) = json.loads(run("plan", "--json", "--config", path).stdout)["warnings"]
    assert warning.startswith("no conversation is held out, since all have one prompt")


def test_plan_refuses_prompts_that_the_evaluation_would_refuse(run_file: Callable[..., Path]) -> None:
    path = run_file(evaluate={"prompts": ["prompts.jsonl"]})
    assert "error: run.toml: [evaluate] prompts: 'prompts.jsonl' matches no file" in run("plan", "--config", str(path), status=1).output
    (path.parent / "prompts.jsonl").touch()
    text = run("plan", "--config", str(path), status=1).output
    assert text == f"error: run.toml: [evaluate] prompts: {path.parent / 'prompts.jsonl'}: holds no prompts\n"


def test_plan_tells_of_rows_that_cannot_be_used(run_file: Callable[..., Path]) -> None:
    path = run_file()
    file = path.parent / "corpus.jsonl"
    good = file.read_text().splitlines(keepends=True)
    file.write_text("".join([good[0], "{\n", *good[1:], '{"messages": []}\n']))
    said = f"conversations {len(good)} (2 of {len(good) + 2} rows cannot be used; preparing the corpus names them)"
    assert said in re.sub(" +", " ", run("plan", "--config", str(path)).stdout)
    sampled = run("plan", "--sample", "2", "--config", str(path)).stdout
    assert "(estimated from 2 rows; 1 of 2 rows cannot be used; " in sampled
    config = RunConfig.load(path)
    prepare(config, Layout(config.root_dir).corpus(corpus_key(config)), corpus_key(config), Progress(None))
    found = json.loads(run("plan", "--json", "--config", str(path)).stdout)
    assert (found["rows"], found["rows_read"], found["rows_rejected"]) == (len(good), len(good) + 2, 2)


def test_plan_before_and_after_the_corpus_is_prepared(run_file: Callable[..., Path]) -> None:
    path = run_file()
    before = json.loads(run("plan", "--json", "--config", str(path)).stdout)
    config = RunConfig.load(path)
    corpus = prepare(config, Layout(config.root_dir).corpus(corpus_key(config)), corpus_key(config), Progress(None))
    after = json.loads(run("plan", "--json", "--config", str(path)).stdout)
    assert after["is_exact"]
    assert (after["rows"], after["tokens"]) == (len(corpus), int(corpus.lengths.sum()))
    assert after["supervised_tokens"] == corpus.manifest["counts"]["supervised_tokens"]
    assert before["tokens"] == pytest.approx(after["tokens"], rel=0.05)
    assert before["rows"] == pytest.approx(after["rows"], rel=0.05)
    assert before["fits"] and before["capture_s"] is None
    path_of_plan = Layout(config.root_dir).plan(capture_key(config), corpus_key(config))
    made = make_plan(config, corpus, Layout(config.root_dir).store(capture_key(config)), path_of_plan)
    assert before["parts"] == after["parts"] == len(made.parts) > 1, "more parts than bytes alone ask for: replicas must not wait"
    assert json.loads(run("plan", "--json", "--config", str(path)).stdout)["parts"] == len(made.parts)
    text = run("plan", "--config", str(path)).stdout
    assert f"tokens in {len(made.parts)} parts" in text and "GPU memory" not in text


def test_plan_of_a_tiny_corpus_is_one_part(run_file: Callable[..., Path]) -> None:
    path = run_file(corpus={"tokens_per_batch": 1_000_000, "bucket_edges": [1024], "max_length": 1023})
    assert "tokens in 1 part\n" in re.sub(" +\n", "\n", run("plan", "--config", str(path)).stdout)


def test_plan_refuses_what_cannot_fit(run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(run_file())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda folder: usage._replace(free=1_000_000))
    result = run("plan", "--config", path, status=1)
    assert "the store needs" in result.stderr and "1.0 MB are free" in result.stderr
    assert "free disk" in result.stdout
    run("plan", "--config", path, "--force")


def test_plan_names_idle_gpus_and_times(run_file: Callable[..., Path]) -> None:
    path = run_file(target={"gpus": [0, 1, 2, 3, 4]}, train={"gpus": [5, 6, 7], "epochs": 2})
    found = json.loads(run("plan", "--json", "--config", str(path), "--capture-tokens-per-s", "10", "--train-tokens-per-s", "100").stdout)
    assert found["capture_s"] == pytest.approx(found["tokens"] / 50)
    assert found["idle_capture_gpu_h"] == pytest.approx(3 * found["capture_s"] / 3600)
    assert found["idle_train_gpu_h"] == pytest.approx(5 * found["train_s"] / 3600)
    assert "3 GPUs wait during capture and 5 during training" in found["warnings"][0]


@pytest.mark.parametrize("option", ["--capture-tokens-per-s", "--train-tokens-per-s"])
def test_plan_takes_no_rate_that_is_none(option: str) -> None:
    for value in ("-5", "0", "nan", "inf"):
        assert option in run("plan", option, value, status=2).stderr


def test_a_plot_that_cannot_be_written_is_refused_before_the_store_is_read(tmp_path: Path) -> None:
    for plot, message in (
        ("x.txt", "svg, png, pdf"),
        ("x", "svg, png, pdf"),
        ("absent/x.svg", f"there is no folder {tmp_path / 'absent'}"),
    ):
        error = run("stats", "--store", "s3://nowhere/none", "--plot", str(tmp_path / plot), status=1).stderr
        assert error.startswith(f"error: --plot {tmp_path / plot}: ") and message in error and error.count("\n") == 1


def test_bytes_of_the_published_sizes(run_file: Callable[..., Path], tmp_path: Path) -> None:
    """51,200 bytes a token as bfloat16 for five taps of a 27B target with hidden size 5120."""
    path = of_another_target(run_file(target={"capture_layer_ids": 5}), "wide")
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps({"num_hidden_layers": 64, "hidden_size": 5120}))
    sizes = estimate.token_bytes(RunConfig.load(path))
    assert sizes["bf16"] == 51_200 + 5
    assert sizes["int8"] <= 0.51 * 51_200 and sizes["int6"] <= 0.41 * 51_200 and sizes["int4"] <= 0.30 * 51_200


@pytest.mark.parametrize("codec", ["bf16", "int8", "int6", "int4", "lossless"])
def test_estimated_bytes_are_those_of_a_real_store(codec: str, tmp_path: Path, run_file: Callable[..., Path]) -> None:
    """Within 5 % for codecs of a fixed rate, an upper bound for lossless; hidden size 576 and five taps."""
    path = of_another_target(run_file(target={"capture_layer_ids": 5}), "real")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text(json.dumps({"num_hidden_layers": 30, "hidden_size": 576}))
    rows = small_store.rows([300, 211, 129], taps=5, hidden=576)
    store.create_or_open(tmp_path / "store", small_store.identity(codec))
    small_store.write_part(tmp_path / "store", "part-00000", rows, codec)
    written = sum(
        file.stat().st_size
        for file in (tmp_path / "store").rglob("*")
        if file.is_file() and file.name not in ("manifest.json", "index.json", "zarr.json") and "channel" not in str(file)
    )
    estimated = 640 * estimate.token_bytes(RunConfig.load(path))[codec] + 3 * estimate._SAMPLE_BYTES
    if codec == "lossless":
        assert 0.8 * estimated < written <= estimated
    else:
        assert written == pytest.approx(estimated, rel=0.05)


def test_smoke_keeps_target_and_settings_and_takes_fewer_rows(run_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    (tmp_path / "p.jsonl").write_text("{}\n")
    config = RunConfig.load(
        run_file(
            train={"lr": 5e-4, "max_steps": 7},
            corpus={"chat_template": "mine.jinja", "chat_template_kwargs": {"thinking": [1, "x"]}},
            evaluate={"prompts": ["p.jsonl"]},
            store={"url": f"file://{tmp_path}/objects", "cache_folder": "cache"},
        )
    )
    folder = tmp_path / "else where"
    folder.mkdir()
    rows = smoke.take_rows(config, 10, folder / "c.jsonl")
    assert rows == 10
    (folder / "run.toml").write_text(smoke.reduced_run_file(config, corpus=folder / "c.jsonl", rows=rows, steps=20))
    reduced = RunConfig.load(folder / "run.toml")
    assert reduced.root_dir == folder / "run"
    assert reduced.train.max_steps == 7 and reduced.train.lr == 5e-4
    assert reduced.corpus.heldout_fraction == pytest.approx(0.4)
    assert reduced.evaluate.max_prompts <= 2
    assert reduced.corpus.chat_template_kwargs == {"thinking": [1, "x"]}
    assert capture_key(reduced) == capture_key(config), "the same target, template, layers and codec"
    assert reduced.drafter == config.drafter
    assert re.fullmatch(rf"{re.escape(config.store.url)}/smoke-[0-9a-f]{{8}}", reduced.store.url), "the run's own store is another root's"
    assert reduced.store.cache_folder is None, "its blocks go with the folder"


def test_smoke_says_when_there_is_no_conversation(run_file: Callable[..., Path], tmp_path: Path) -> None:
    config = RunConfig.load(run_file())
    (tmp_path / "corpus.jsonl").write_text("\n\n")
    with pytest.raises(CorpusError, match="hold no conversation"):
        smoke.take_rows(config, 10, tmp_path / "c.jsonl")
    with pytest.raises(CorpusError, match="hold no conversation"):
        smoke.run_smoke(config, rows=10, steps=2, keep=False, say=print)
    assert not config.root_dir.exists(), "no empty folder is left"


@pytest.mark.parametrize(("keep", "task"), [(True, "DFlashAll"), (False, "WriteReport")])
def test_smoke_ends_with_no_path_that_it_deletes(
    run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, keep: bool, task: str
) -> None:
    """What it starts; the finished run that other tests look at was made by it."""
    commands: list[list[str]] = []
    failed = subprocess.CompletedProcess([], 30)
    monkeypatch.setattr(smoke.subprocess, "run", lambda command, **options: commands.append(command) or failed)
    with pytest.raises(ProcessError, match="exit status 30"):
        smoke.run_smoke(RunConfig.load(run_file()), rows=10, steps=2, keep=keep, say=print)
    assert commands[0][commands[0].index("pipelines") + 1] == task


@pytest.mark.parametrize("value", [1, 1.5, True, 'a"b\n', ["x", 2], {"k": [1]}, {"a.b c": "é 😀"}, {}, 123_456_789])
def test_toml_text_reads_back(value: Any) -> None:
    assert tomllib.loads(f"v = {reference.toml_text(value)}")["v"] == value


@pytest.mark.parametrize(("number", "said"), [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "No space left on device")])
def test_a_disk_that_cannot_be_written_is_one_line(number: int, said: str) -> None:
    group = Commands("group")

    @group.command()
    def fails() -> None:
        raise OSError(number, os.strerror(number), "/somewhere")

    result = CliRunner().invoke(group, ["fails"])
    assert (
        result.exit_code == 1
        and result.stderr.startswith(f"error: /somewhere: {said}; make it writable")
        and result.stderr.count("\n") == 1
    )

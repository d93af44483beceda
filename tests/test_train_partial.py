"""Training on the parts committed so far: a drafter of its own, never taken for the full one."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import training_runs as runs

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import TrainError
from dflash_offline.export import read_drafter
from dflash_offline.gpus import locked
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, read_manifest, write_manifest
from dflash_offline.status import read_status
from dflash_offline.tidy import prune_plan
from dflash_offline.train import partial


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations, captured=14)


def partial_folders(run_file: Path) -> list[Path]:
    return [mark.parent for mark in runs.drafter_folder(run_file).parent.glob(f"*/{partial.MARK}")]


def test_a_partial_drafter_is_its_own(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train={"max_steps": 2})
    with pytest.raises(TrainError, match="capture incomplete, 14/24 rows"):
        runs.train_here(run_file)
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "--partial", "--config", str(run_file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a drafter of 1 part, 14 of 24 conversations" in done.stdout and "the full one is still to be trained" in done.stdout
    (folder,) = partial_folders(run_file)
    full = runs.drafter_folder(run_file)
    assert folder != full and not (full / "manifest.json").exists()
    manifest = read_manifest(folder, kind="drafter")
    assert manifest["steps"] == 2 and manifest["key"] == folder.name
    assert manifest["partial"] == {"full_key": full.name, "parts": ["part-00000"], "rows": 14}
    read = read_drafter(folder / "drafter")
    assert read.form == "trained" and read.shape.to_dict() == read_json(folder / "drafter" / "shape.json")
    config = RunConfig.load(run_file)
    assert folder not in [path for removal in prune_plan([config]) for path in removal.paths]
    with pytest.raises(TrainError, match="a drafter was trained on the 1 part there is already"):
        runs.train_here(run_file, partial=True)
    full.mkdir(exist_ok=True)
    write_manifest(full, kind="drafter", key=full.name)
    with pytest.raises(TrainError, match=rf"{full}: the full drafter is trained already.*`dflash-offline evaluate`"):
        runs.train_here(run_file, partial=True)
    assert [removal.what for removal in prune_plan([config]) if folder in removal.paths] == [
        "drafter of some parts, whose full one is trained"
    ]


def test_a_stopped_run_goes_on_with_its_parts(tmp_path: Path, inputs: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target)
    config = RunConfig.load(run_file)
    key = keys.train_key(config)
    begun = partial.choose(config, key)
    assert read_json(Layout(config.root_dir).drafter(begun.key) / partial.MARK) == {"full_key": key, "parts": ["part-00000"]}
    monkeypatch.setattr("dflash_offline.store.committed_parts", lambda store: ["part-00000", "part-00001"])
    assert partial.choose(config, key) == begun
    other = RunConfig.load(runs.make_run(tmp_path, inputs, model=tiny_target, train={"seed": 3}))
    assert partial.choose(other, keys.train_key(other)).parts == ["part-00000", "part-00001"]
    monkeypatch.setattr("dflash_offline.store.committed_parts", lambda store: [])
    third = RunConfig.load(runs.make_run(tmp_path, inputs, model=tiny_target, train={"seed": 4}))
    with pytest.raises(TrainError, match=r"no part is committed yet; start the capture, or wait for its first part"):
        partial.choose(third, keys.train_key(third))


def test_a_refusal_is_said_once_and_is_no_failure_of_the_full_training(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    """Before any rank is started: while nothing is captured, and once all there is has been trained on."""
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train={"seed": 5})
    config = RunConfig.load(run_file)
    layout, key = Layout(config.root_dir), keys.train_key(config)
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "--partial", "--config", str(run_file)]

    def refused() -> str:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
        assert found.returncode == 1 and not list(layout.logs("train").glob("*.progress.json"))
        stage = next(stage for stage in read_status(config).stages if stage.name == "train")
        assert (stage.key, stage.state) == (key, "pending")
        return found.stdout + found.stderr

    (layout.root / "captures").rename(layout.root / "away")  # a link to what all tests here share
    store = layout.store(keys.capture_key(config))
    assert (
        refused()
        == f"error: {store}: no part is committed yet; start the capture, or wait for its first part (`dflash-offline status` shows it)\n"
    )
    (layout.root / "away").rename(layout.root / "captures")
    begun = layout.drafter(partial.choose(config, key).key)
    write_manifest(begun, kind="drafter", key=begun.name)
    said = refused()
    assert said.count("a drafter was trained on the 1 part there is already") == 1 and said.count("\n") == 1


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train={"epochs": 3000, "log_every": 1})
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "--partial", "--config", str(run_file)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(command, **streams)
    assert running.stdout is not None
    while "step=3 " not in (line := running.stdout.readline()):
        assert line, "it ended by itself"
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    (folder,) = partial_folders(run_file)
    last = sorted(path.name for path in folder.glob("checkpoints/step-*"))[-1]
    assert running.returncode == 130 and "Aborted" not in said
    assert said.splitlines()[-1] == f"stopped; {folder} keeps checkpoint {last}; the same command goes on from it, with the same 1 part"


def test_a_second_command_waits_for_the_first(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target)
    logs = Layout(RunConfig.load(run_file).root_dir).logs("train")
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "--partial", "--config", str(run_file)]
    with locked(logs / "train-partial.lock", "nobody", print):  # as the first one holds it
        second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline().startswith("waiting for another train --partial, held by pid")
        second.terminate()
        assert second.wait(30) == 143 and second.stdout.read() == "", "no rank was started"
        second.stdout.close()

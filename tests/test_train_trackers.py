"""wandb and trackio get the scalars of a run: the real packages, without a network."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import training_runs as runs

from dflash_offline.errors import TrainError
from dflash_offline.train import trackers

SECRET = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"
TRAIN = {"max_steps": 3, "log_every": 1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, conversations: list[dict[str, Any]]) -> Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"), model=tiny_target, conversations=conversations)


def train(run_file: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "dflash_offline.train", "--config", str(run_file)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "TRACKIO"))}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_wandb_offline(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    pytest.importorskip("wandb")
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train=TRAIN | {"trackers": ["wandb"], "tracker_project": "drafts"})
    said = train(run_file, WANDB_API_KEY=SECRET, WANDB_MODE="offline")
    folder = runs.drafter_folder(run_file)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert "wandb: offline, " in said and "send it later with `wandb sync`" in said
    found = file.read_bytes()  # records are not compressed
    for name in (b"train/loss", b"train/acc_per_slot/0", b"heldout/tau_replay", b"drafts"):
        assert name in found, name
    assert SECRET not in said and not any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_wandb_without_an_account_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not trackers._has_account()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {SECRET}\n")
    assert trackers._has_account()


def test_trackio(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    pytest.importorskip("trackio")
    run_file = runs.make_run(tmp_path, inputs, model=tiny_target, train=TRAIN | {"trackers": ["trackio"]})
    said = train(run_file, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert 'look at it with `trackio show --project "dflash-offline"`' in said
    with sqlite3.connect(tmp_path / "trackio" / "dflash-offline.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert {step for step, _ in rows} == {1, 2, 3} and "train/loss" in str(rows[0][1])


def test_a_missing_package_is_said_before_training(tmp_path: Path, inputs: Path, tiny_target: Path) -> None:
    if trackers.importlib.util.find_spec("trackio") is not None:
        pytest.skip("trackio is installed here")
    with pytest.raises(TrainError, match=r'\[train\] trackers names "trackio", which is not installed; run `pip install trackio`'):
        runs.train_here(runs.make_run(tmp_path, inputs, model=tiny_target, train={"trackers": ["trackio"]}))


def test_a_tracker_that_fails_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    made = trackers.Trackers([], project="p", run="r", folder=tmp_path, settings={}, say=said.append)

    def broken(scalars: object, step: int) -> None:
        raise ConnectionError("no route")

    made._open["wandb"] = (broken, lambda: None)
    made.log([("train/loss", 1.0)], step=1)
    made.log([("train/loss", 1.0)], step=2)
    assert said == ["warning: wandb failed and gets no more numbers (no route); training goes on"]

"""``status`` of runs whose processes are on several hosts and GPUs, and ``--watch``. What they told is in files, written here by hand."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import write_run_file
from terminal_screen import Terminal

from dflash_offline.cli import main
from dflash_offline.cli.following import number_text
from dflash_offline.config import RunConfig
from dflash_offline.keys import capture_key, corpus_key, train_key
from dflash_offline.layout import Layout
from dflash_offline.progress import sum_of_rates
from dflash_offline.status import read_status
from dflash_offline.watch.hosts import EVERY_S, STALE_S, Heartbeat, read_hosts

HERE = socket.gethostname()
GPU = {"gpu": "3", "uuid": "GPU-cc", "name": "NVIDIA H200", "busy": 0.97, "used_bytes": 41_200_000_000, "total_bytes": 150_000_000_000}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.load(write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"]))


def tell(config: RunConfig, stage: str, name: str, *, below: str = "", **state: Any) -> None:
    folder = Layout(config.root_dir).logs(stage) / below
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"done": 3, "total": 9, "text": "at work", "time": time.time(), "pid": os.getpid(), "host": HERE, "numbers": {}}
    (folder / f"{name}.progress.json").write_text(json.dumps(whole | state))


def tell_host(config: RunConfig, host: str, *, age_s: float = 1.0, **state: Any) -> None:
    folder = config.root_dir / "logs" / "hosts"
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"host": host, "time": time.time() - age_s, "cores": 8, "load": 1.0, "memory_bytes": 10**9, "gpus": [GPU], "gpu_note": ""}
    (folder / f"{host}.json").write_text(json.dumps(whole | state))


def status(config: RunConfig, *options: str) -> str:
    found = CliRunner().invoke(main, ["status", "--config", str(config.source), *options])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_processes_and_gpus_of_another_host(config: RunConfig) -> None:
    tell(config, "capture", "capture-0", numbers={"tokens_per_s": 1000.0, "eta_s": 60.0})
    numbers = {"tokens_per_s": 2000.0, "eta_s": 90.0, "gpu_bytes": 30e9, "writer_queue": 2, "writer_queue_limit": 3}
    tell(config, "capture", "capture-0", below="node7", host="node7", gpu="3", numbers=numbers)
    tell_host(config, "node7")
    tell_host(config, "node8", age_s=STALE_S + 5)
    found = json.loads(status(config, "--json"))
    assert [host["host"] for host in found["hosts"]] == [HERE, "node7"], "node8 has stopped"
    assert found["hosts"][1]["gpus"] == [GPU]
    assert [(process["host"], process["alive"], process["gpu"]) for process in found["processes"]] == [
        (HERE, True, None),
        ("node7", None, "3"),
    ]
    text = status(config)
    row = next(line for line in text.splitlines() if line.startswith("capture-0") and "node7" in line)
    assert "3: 30.0 GB own, 97% busy" in row and "to write=2" in row and "3 of 9 parts" in row
    gpu = next(line for line in text.splitlines() if line.startswith("node7"))
    assert "NVIDIA H200" in gpu and "97%" in gpu and "41.2 GB of 150.0 GB" in gpu
    if not found["hosts"][0]["gpus"]:
        assert f"GPU figures of {HERE} are left out: " in text


def test_rates_add_up_and_the_slowest_says_when() -> None:
    numbers = [{"tokens_per_s": 1000.0, "eta_s": 60.0, "loss": 3.0}, {"tokens_per_s": 2500.0, "eta_s": 90.0}, {}]
    assert number_text("reader_queue", 3) != number_text("reader_queue_bytes", 3)
    assert sum_of_rates(numbers) == {"tokens_per_s": 3500.0, "eta_s": 90.0}


def test_the_last_warnings_of_this_run_are_shown_with_their_time(config: RunConfig) -> None:
    for rank in range(3):
        told = [[1_000_000 + 1000 * rank + i, f"slow {rank}.{i}"] for i in range(3)]
        tell(config, "train", f"train-{rank}", warnings=told)
    shown = [warning for warning in read_status(config).warnings if "slow" in warning]
    assert [warning.split(": ")[-1] for warning in shown] == ["slow 1.1", "slow 1.2", "slow 2.0", "slow 2.1", "slow 2.2"]
    assert "train-2: slow 2.2" in status(config)


def test_an_error_is_shown_until_a_later_run_did_well(config: RunConfig) -> None:
    now = time.time()
    for rank in range(2):
        tell(config, "train", f"train-partial-{rank}", text="error: too slow", ended=True, time=now - 90, warnings=[[now - 95, "slow"]])
    tell(config, "train", "train-0", text="error: of the full one", ended=True, time=now - 100)
    told = " ".join(read_status(config).warnings)
    assert told.count("error: too slow") == 2 and told.count("error: of the full one") == 1 and told.count(": slow") == 2
    for text in ("stopped", "training"):  # the next one was stopped, or is under way
        tell(config, "train", "train-partial-0", text=text, ended=text == "stopped", time=now - 50)
        assert any("train-partial-1: error: too slow" in line for line in read_status(config).warnings)
    tell(config, "train", "train-partial-0", text="training", ended=True, time=now - 50)
    told = read_status(config).warnings
    assert not any("too slow" in line or ": slow" in line for line in told) and any("of the full one" in line for line in told)


@pytest.mark.parametrize(
    ("drafter", "process", "failed"),
    [
        ("", "train-partial-0", []),
        ("", "train-0", [""]),
        ("one", "train-partial-one-0", []),
        ("partial", "train-partial-partial-0", []),
        ("partial", "train-partial-0", ["partial"]),  # the full training of the drafter that is called so
    ],
)
def test_a_partial_training_that_failed_is_not_the_full_one(
    run_file: Callable[..., Path], drafter: str, process: str, failed: list[str]
) -> None:
    """Its processes have the full drafter's key."""
    path = run_file(4, train={"mode": "independent"} if drafter else {})
    if drafter:
        path.write_text(
            path.read_text() + "".join(f'\n[[drafters]]\nname = "{name}"\nlr = {lr}\n' for name, lr in (("one", 1e-4), ("partial", 2e-4)))
        )
    config = RunConfig.load(path)
    key = train_key(config.for_drafter(drafter) if drafter else config)
    tell(config, "train", process, text="error: too slow", ended=True, key=key)
    found = read_status(config)
    assert [stage.drafter for stage in found.stages if stage.state == "failed"] == failed
    assert f"{process}: error: too slow" in found.warnings
    tell(config, "train", process, text="training", key=key)
    found = read_status(config)
    assert [stage.drafter for stage in found.stages if stage.state == "running"] == failed, "nor is one at work"
    assert process in [each.name for each in found.processes]


def test_a_later_run_on_another_host_proves_nothing(config: RunConfig) -> None:
    """Its clock may be ahead."""
    now = time.time()
    tell(config, "train", "train-0", text="error: too slow", ended=True, time=now - 90)
    tell(config, "train", "train-0", below="node7", host="node7", text="training", ended=True, time=now - 50)
    assert any("train-0: error: too slow" in line for line in read_status(config).warnings)
    tell(config, "train", "train-1", text="training", ended=True, time=now - 50)
    assert not any("too slow" in line for line in read_status(config).warnings)


def test_an_error_of_capture_is_shown_until_this_corpus_is_captured(run_file: Callable[..., Path]) -> None:
    """Two run files on one root share the key of their captures: one that did well may be that of the other corpus."""
    config = RunConfig.load(run_file(4))
    layout, key, now = Layout(config.root_dir), capture_key(config), time.time()
    plan = layout.plan(key, corpus_key(config))
    plan.parent.mkdir(parents=True)
    plan.write_text(json.dumps({"parts": [{"name": "part-00001", "batches": [[0]], "tokens": 9}], "reused": ["part-00000"]}))
    tell(config, "capture", "capture-0", text="error: out of memory", ended=True, time=now - 90, key=key)
    tell(config, "capture", "capture-1", text="error: no key yet", ended=True, time=now - 90, key=None)
    tell(config, "capture", "capture-2", text="part-00000 done", ended=True, time=now - 50, key=key)
    for part in ("part-00000", "part-00001"):  # of the other corpus, which is complete; of this one
        told = " ".join(read_status(config).warnings)
        assert "capture-0: error: out of memory" in told and "capture-1: error: no key yet" in told
        (layout.store(key) / part).mkdir(parents=True)
        (layout.store(key) / part / "manifest.json").write_text("{}")
    assert [stage.state for stage in read_status(config).stages if stage.name == "capture"] == ["complete"]
    assert not any("error" in line for line in read_status(config).warnings)


def test_watch_prints_again_until_ctrl_c_and_leaves_quietly(config: RunConfig, tmp_path: Path) -> None:
    tell(config, "capture", "capture-0", text="first look")
    command = [sys.executable, "-m", "dflash_offline.cli", "status", "--config", str(config.source), "--watch", "--every", "0.2"]
    shown = Terminal(command, cwd=tmp_path, columns=120)
    try:
        shown.wait_for(lambda text: "first look" in text)
        tell(config, "capture", "capture-0", text="second look")
        screen = shown.wait_for(lambda text: "second look" in text)
        assert "first look" not in screen and screen.count("capture-0") == 1
        shown.press(b"\x03")
        assert shown.finish() == 0 and "Traceback" not in shown.everything and "Aborted" not in shown.everything
    finally:
        shown.close()


def test_every_without_watch_is_refused(config: RunConfig) -> None:
    from click.testing import CliRunner

    from dflash_offline.cli import main

    refused = CliRunner().invoke(main, ["status", "--every", "1", "--config", str(config.source)])
    assert refused.exit_code == 2 and "--every goes with --watch" in refused.output


def test_watch_as_json_is_one_line_a_look(config: RunConfig) -> None:
    command = [sys.executable, "-m", "dflash_offline.cli", "status", "--config", str(config.source), "--watch", "--json", "--every", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    looks = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors
    assert [look["root"] for look in looks] == [str(config.root_dir)] * 2


def test_a_host_tells_while_it_computes(tmp_path: Path) -> None:
    with Heartbeat(tmp_path):
        end = time.monotonic() + 20
        while not (found := read_hosts(tmp_path)):
            assert time.monotonic() < end
            time.sleep(0.02)
    (host,) = found
    assert host["host"] == HERE and host["cores"] >= 1 and host["memory_bytes"] > 0 and time.time() - host["time"] < EVERY_S
    assert bool(host["gpus"]) != bool(host["gpu_note"])
    (tmp_path / "hosts" / "torn.json").write_text("{")
    assert len(read_hosts(tmp_path)) == 1
    with Heartbeat(tmp_path / "absent"):  # the root was deleted: nothing is made, nothing stops
        time.sleep(0.1)
    assert not (tmp_path / "absent").exists()

"""The common start of a stage, in a real process: exit status, one-line errors, key check, lifeline, SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_run_file

from dflash_offline.progress import read_progress

PROBE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dflash_offline.errors import TrainError
from dflash_offline.stage import run_stage

def body(config, arguments, progress):
    mode = arguments.mode
    if mode == "ok":
        progress.say(f"key {arguments.key} epochs {config.train.epochs}")
        progress.update(done=1, total=1, text="finished")
    elif mode == "error":
        raise TrainError("the loss is\\nnot a number")
    elif mode == "crash":
        raise ValueError("own fault")
    elif mode == "deleted":
        config.root_dir.rename(config.root_dir.with_name("elsewhere"))
        (config.root_dir / "new").touch()
    elif mode == "missing":
        (config.root_dir / "absent").read_text()
    elif mode == "torch":
        print("torch" in sys.modules, "transformers" in sys.modules, "zarr" in sys.modules)
    elif mode == "wait":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            print(child.pid, flush=True)
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    elif mode == "own":
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
        print("ready", flush=True)
        while not stopped:
            time.sleep(0.01)
        print("checkpoint written", flush=True)
        raise SystemExit(143)

run_stage("probe", body, key=lambda config: f"k{config.train.epochs:.0f}", add_arguments=lambda p: p.add_argument("--mode"))
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """``start(mode, *arguments, lifeline=True)`` starts the probe stage on a small run file."""
    config = write_run_file(tmp_path, model=tmp_path / "model", files=[tmp_path / "none.jsonl"])
    script = tmp_path / "probe.py"
    script.write_text(PROBE)

    def run(mode: str, *arguments: str, lifeline: bool = False, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, str(script), "--config", str(config), "--mode", mode, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment} | ({"DFLASH_LIFELINE": "1"} if lifeline else {}),
        )

    return run


def test_success_and_progress_file(start: Start, tmp_path: Path) -> None:
    process = start("ok", "--key", "k1", DFLASH_PROGRESS=str(tmp_path / "p.json"))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "key k1 epochs 1.0\n", "")
    state = read_progress(tmp_path / "p.json")
    assert state is not None and state["text"] == "finished" and state["pid"] == process.pid


def test_key_is_filled_in_when_run_by_hand(start: Start) -> None:
    assert start("ok").communicate(timeout=30)[0].startswith("key k1 ")


def test_changed_run_file_is_refused(start: Start) -> None:
    process = start("ok", "--key", "k9")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    changed = "it, or a file it names, changed while the command ran (the key was k9 and is now k1)"
    assert err == f"error: run.toml: {changed}; run the same command again\n"


def test_mendable_error_is_one_line(start: Start, tmp_path: Path) -> None:
    process = start("error", DFLASH_PROGRESS=str(tmp_path / "p.json"))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (1, "", "error: the loss is not a number\n")
    assert read_progress(tmp_path / "p.json")["text"].startswith("error: the loss")  # type: ignore[index]


def test_own_fault_shows_a_traceback(start: Start) -> None:
    process = start("crash")
    err = process.communicate(timeout=30)[1]
    assert process.returncode == 1 and "Traceback" in err and err.rstrip().endswith("ValueError: own fault")


def test_a_root_that_was_deleted_meanwhile_is_one_line_and_any_other_missing_file_is_not(start: Start, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    err = start("deleted").communicate(timeout=30)[1]
    assert err == f"error: {tmp_path / 'out'}: the run's root was deleted or moved while this ran; what was in it will be made anew\n"
    (tmp_path / "out").mkdir()
    err = start("missing").communicate(timeout=30)[1]
    assert "Traceback" in err and "FileNotFoundError" in err


def test_starting_imports_no_model_library(start: Start) -> None:
    assert start("torch").communicate(timeout=30)[0] == "False False False\n"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_lifeline_end_kills_the_whole_group(start: Start) -> None:
    process = start("wait", lifeline=True)
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    assert _alive(child)
    process.stdin.close()
    assert process.wait(timeout=10) == -signal.SIGKILL
    end = time.monotonic() + 5
    while _alive(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _alive(child)
    process.stdout.close()
    process.stderr.close()  # type: ignore[union-attr]


def test_without_lifeline_stdin_does_not_matter(start: Start) -> None:
    process = start("wait")
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    process.stdin.close()
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.close()
    process.stderr.close()  # type: ignore[union-attr]


def test_sigterm_unwinds_the_body(start: Start, tmp_path: Path) -> None:
    process = start("wait", DFLASH_PROGRESS=str(tmp_path / "p.json"))
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.terminate()
    assert process.wait(timeout=30) == 143
    os.kill(child, signal.SIGKILL)  # it holds the pipe open, as a helper process would
    assert "cleaned up" in process.communicate(timeout=30)[0]
    assert read_progress(tmp_path / "p.json")["text"] == "stopped"  # type: ignore[index]


def test_body_may_handle_sigterm_itself(start: Start) -> None:
    process = start("own")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "checkpoint written\n")

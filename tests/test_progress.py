"""The progress file: whole at every moment, throttled, never in the way."""

import json
import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from dflash_offline.figures import Laps
from dflash_offline.progress import COMMAND, KEPT_WARNINGS, MIN_INTERVAL_S, Progress, read_progress


def test_file_has_the_documented_keys(tmp_path: Path) -> None:
    before = time.time()
    progress = Progress(tmp_path / "p.json")
    progress.update(done=3, total=10, text="parts", tokens_per_s=12.5)
    state = json.loads((tmp_path / "p.json").read_text())
    assert state.keys() == {"done", "total", "text", "time", "host", "pid", "command", "gpu", "key", "ended", "numbers", "warnings"}
    assert (state["done"], state["total"], state["text"], state["pid"]) == (3, 10, "parts", os.getpid())
    assert (state["host"], state["key"], state["ended"]) == (socket.gethostname(), None, False)
    assert state["numbers"] == {"tokens_per_s": 12.5}
    assert before <= state["time"] <= time.time()


def test_whose_it_is_and_on_which_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND, "1234")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    Progress(tmp_path / "p.json").flush()
    state = read_progress(tmp_path / "p.json")
    assert state is not None and (state["command"], state["gpu"]) == (1234, "3")
    monkeypatch.setenv(COMMAND, "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    state = Progress(None).state
    assert (state["command"], state["gpu"]) == (None, None)


def test_the_last_warnings_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(tmp_path / "p.json")
    for number in range(KEPT_WARNINGS + 2):
        progress.say(f"warning: slow {number}")
    progress.say("all is well")
    state = read_progress(tmp_path / "p.json")
    assert state is not None and [text for _, text in state["warnings"]] == [f"slow {number}" for number in range(2, KEPT_WARNINGS + 2)]
    assert "warning: slow 0\n" in capsys.readouterr().out


def test_updates_merge_and_zero_is_a_value(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.json")
    progress.update(done=5, total=10, text="a", loss=1.0, force=True)
    progress.update(done=0, lr=2.0, force=True)
    state = read_progress(tmp_path / "p.json")
    assert state is not None
    assert (state["done"], state["total"], state["text"], state["numbers"]) == (0, 10, "a", {"loss": 1.0, "lr": 2.0})


def test_at_most_twice_a_second_unless_forced(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.json")
    progress.update(done=1)
    progress.update(done=2)
    assert read_progress(tmp_path / "p.json")["done"] == 1  # type: ignore[index]
    progress.update(done=3, force=True)
    assert read_progress(tmp_path / "p.json")["done"] == 3  # type: ignore[index]
    time.sleep(MIN_INTERVAL_S)
    progress.update(done=4)
    assert read_progress(tmp_path / "p.json")["done"] == 4  # type: ignore[index]


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "p.json")
    progress.flush()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            progress.update(text="x" * 20000, force=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(read_progress(tmp_path / "p.json") is not None for _ in range(200))
    finally:
        stop.set()
        writer.join()


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    Progress(tmp_path / "missing" / "p.json").update(done=1, force=True)
    Progress(None).update(done=1, force=True)
    assert read_progress(tmp_path / "missing" / "p.json") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"done": 1}'])
def test_what_is_no_progress_file_reads_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    assert read_progress(tmp_path / "p.json") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"done": "x"},
        {"total": 1.5},
        {"text": {}},
        {"time": "z"},
        {"time": float("nan")},
        {"pid": "1"},
        {"pid": 10**20},
        {"pid": -1},
        {"numbers": []},
        {"warnings": 5},
        {"warnings": [[1]]},
        {"warnings": [["a", "b"]]},
        {"host": 7},
        {"key": [1]},
        {"gpu": {}},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_spoils_the_file(tmp_path: Path, wrong: dict[str, object]) -> None:
    progress = Progress(tmp_path / "p.json")
    progress.flush()
    assert read_progress(tmp_path / "p.json") is not None
    (tmp_path / "p.json").write_text(json.dumps(progress.state | wrong))
    assert read_progress(tmp_path / "p.json") is None


def test_say_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(None).say("Target 0 on cpu... loaded")
    assert capsys.readouterr().out == "Target 0 on cpu... loaded\n"


def test_what_a_start_took_is_told_by_part() -> None:
    laps = Laps()
    time.sleep(0.1)
    laps.end("imports")
    laps.end("kernels")
    whole, imports, kernels = map(float, re.fullmatch(r"([\d.]+)s \(imports ([\d.]+)s, kernels ([\d.]+)s\)", str(laps)).groups())
    assert 0.1 <= imports <= whole and kernels < 0.1

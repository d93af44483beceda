"""Progress at the bottom of a real terminal while the literal command runs; plain lines everywhere else.

The model processes of these tests only write progress files, as those of the pipeline do.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import write_run_file
from rich.text import Text
from terminal_screen import Terminal

from dflash_offline.watch.display import LOSSES, Follower
from dflash_offline.watch.lines import ASCII, bar, curve, stage_lines

WORKER = """
import json, os, pathlib, sys, time
from dflash_offline.progress import Progress
from dflash_offline.stage import PROGRESS, attach_lifeline
attach_lifeline()
progress = Progress(pathlib.Path(os.environ[PROGRESS]))
stage, seconds = sys.argv[1], float(os.environ["SECONDS"])
begin, step = time.monotonic(), 0
if stage == "train":
    progress.state["key"] = "k"
    folder = pathlib.Path("out/drafters/k"); folder.mkdir(parents=True, exist_ok=True)
    metrics = (folder / "metrics.jsonl").open("w")
while time.monotonic() - begin < seconds:
    step += 1
    if stage == "train":
        print(json.dumps({"step": step, "loss": 10 / step}), file=metrics, flush=True)
        progress.update(done=step, total=400, text="training", force=True, loss=10 / step, tau=1.25, tokens_per_s=2000.0, eta_s=90.0)
    else:
        progress.update(done=1, total=4, text="part-00001", force=True, part_rows_done=step % 50, part_rows=50, tokens_per_s=1500.0,
                        writer_queue=2, writer_queue_limit=3, eta_s=60.0)
    progress.say(f"line {step} of {stage} " + "x" * 40)
    time.sleep(0.1)
progress.end()
pathlib.Path(sys.argv[2]).touch()
"""
PIPELINE = """
import luigi
import pipelines
from dflash_offline.processes import Job
from pipelines.base import RunTask

class Stage(RunTask):
    task_key = staticmethod(lambda config: "key")

    def output(self):
        return [luigi.LocalTarget(str(self.layout.root / f"done-{name}")) for name in self.names]

    def jobs(self):
        return [Job(name, "worker", [self.stage, target.path]) for name, target in zip(self.names, self.output())]

class Capture(Stage):
    stage, names = "capture", ["capture-0", "capture-1"]

class Train(Stage):
    stage, names = "train", ["train-0"]

    def requires(self):
        return Capture(config=self.config)
"""
BAR = "\u2501"


def prepared(folder: Path, task: str = "Train") -> list[str]:
    """The command, and the folder to run it in filled."""
    (folder / "worker.py").write_text(WORKER)
    (folder / "few.py").write_text(PIPELINE)
    write_run_file(folder, model=folder / "model", files=[folder / "none.jsonl"])
    return [sys.executable, "-m", "luigi", "--module", "few", task]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """``terminal(seconds=..., columns=...)``: the command on a terminal; each of its processes works so long."""
    opened: list[Terminal] = []

    def start(*, seconds: float, task: str = "Train", columns: int = 100, rows: int = 24, **environment: str) -> Terminal:
        variables = {"PYTHONPATH": str(tmp_path), "SECONDS": str(seconds), **environment}
        opened.append(Terminal(prepared(tmp_path, task), cwd=tmp_path, columns=columns, rows=rows, **variables))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def bars(screen: str) -> list[str]:
    return [line for line in screen.splitlines() if re.match(r"(capture|train|  capture-\d) +[\u2501\u2500]+", line)]


def test_bars_stay_below_lines_that_scroll_and_go_when_all_is_done(terminal: Callable[..., Terminal]) -> None:
    shown = terminal(seconds=1.6, columns=120)
    screen = shown.wait_for(lambda text: len(bars(text)) == 3 and "line 5 of capture" in text)
    lines = screen.splitlines()
    assert lines[-3:] == bars(screen), "at the bottom, once"
    assert re.match(rf"capture +{BAR}+\u2500+  1 of 4 parts  3.0K tokens/s  ETA 60s$", lines[-3]), lines[-3]
    assert re.match(r"  capture-0 +\S+  part-00001  1.5K tokens/s  writing 2/3$", lines[-2]), lines[-2]
    screen = shown.wait_for(lambda text: "line 9 of train" in text and bool(bars(text)))
    (line,) = bars(screen)
    assert screen.splitlines()[-1] == line
    assert re.match(r"train +\S+  \d+ of 400 steps  loss \d\.\d\d \u2588\S+ +tau 1.25  2.0K tokens/s  ETA 90s$", line), line
    assert shown.finish() == 0
    assert bars(shown.everything) == [], "nothing of it stays"
    for stage in ("capture-0: line {} of capture", "train-0: line {} of train"):
        for number in range(1, 12):
            assert shown.everything.count(stage.format(number) + " ") == 1, "every line is there, once"


def test_a_window_of_another_size_shows_them_once_and_loses_no_line(terminal: Callable[..., Terminal]) -> None:
    shown = terminal(seconds=3.0)
    shown.wait_for(lambda text: len(bars(text)) == 3 and "line 2 " in text)
    shown.resize(58, 16)
    screen = shown.wait_for(lambda text: "line 9 " in text and len(bars(text)) == 3 and len(text.splitlines()) >= 14)
    assert screen.splitlines()[-3:] == bars(screen) and max(map(len, bars(screen))) <= 57
    assert "\u2026" in bars(screen)[0], "cut where the window ends"
    shown.resize(120, 30)
    screen = shown.wait_for(lambda text: "line 14 " in text and len(bars(text)) == 3)
    assert "ETA" in bars(screen)[0] and screen.splitlines()[-3:] == bars(screen)
    shown.resize(80, 4)
    screen = shown.wait_for(lambda text: "more lines: dflash-offline status" in text)
    assert len(bars(screen)) == 1, "a low window keeps room for what is printed"
    shown.press(b"\x03")
    assert shown.finish() != 0
    for number in range(1, 14):
        assert len(re.findall(rf"capture-0: line {number} of", shown.raw.decode())) == 1


def test_ctrl_c_leaves_a_clean_terminal_and_the_last_words(terminal: Callable[..., Terminal]) -> None:
    shown = terminal(seconds=60.0)
    shown.wait_for(lambda text: len(bars(text)) == 3)
    shown.press(b"\x03")
    assert shown.finish() == -signal.SIGINT
    assert bars(shown.text) == []
    assert "stopped by Ctrl-C; the same command goes on from here" in shown.text
    assert "Traceback" not in shown.everything
    assert shown.screen.cursor.x == 0 and not shown.screen.cursor.hidden
    assert subprocess.run(["pgrep", "-f", f"dflash_offline.watch.*{shown.process.pid}"], capture_output=True).returncode == 1


def test_ctrl_z_and_the_background_leave_the_terminal_to_the_shell(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    command = " ".join(prepared(tmp_path, "Capture"))
    variables = {"PYTHONPATH": str(tmp_path), "SECONDS": "30", "PS1": "PROMPT> "}
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"], cwd=tmp_path, columns=110, **variables)
    try:
        shell.wait_for(lambda text: "PROMPT>" in text)
        shell.press(command.encode() + b"\n")
        shell.wait_for(lambda text: len(bars(text)) == 3)
        shell.press(b"\x1a")
        screen = shell.wait_for(lambda text: "Stopped" in text and "PROMPT>" in text.splitlines()[-1])
        assert bars(screen) == []
        shell.press(b"bg\n")
        line = max(map(int, re.findall(r"line (\d+) of", shell.text)), default=0) + 4
        shell.wait_for(lambda text: f"line {line} of" in text)
        assert bars(shell.text) == []
        shell.press(b"fg\n")
        shell.wait_for(lambda text: len(bars(text)) == 3)
        shell.press(b"\x03")
        shell.wait_for(lambda text: text.endswith("PROMPT>"))
        assert bars(shell.text) == []
    finally:
        shell.close()


def test_drawing_that_is_killed_takes_nothing_with_it(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = terminal(seconds=1.8, task="Capture")
    shown.wait_for(lambda text: len(bars(text)) == 3)
    found = subprocess.run(["pgrep", "-f", f"dflash_offline.watch.*--command {shown.process.pid}"], capture_output=True, text=True)
    os.kill(int(found.stdout), signal.SIGKILL)
    assert shown.finish() == 0, shown.everything
    assert (tmp_path / "out" / "done-capture-1").exists()


@pytest.mark.parametrize(
    ("variables", "drawn", "coloured"), [({"TERM": "dumb"}, False, False), ({"NO_COLOR": "1"}, True, False), ({}, True, True)]
)
def test_plain_lines_on_a_dumb_terminal_and_no_colour_where_none_is_wanted(
    terminal: Callable[..., Terminal], variables: dict[str, str], drawn: bool, coloured: bool
) -> None:
    shown = terminal(seconds=1.0, task="Capture", **variables)
    assert shown.finish() == 0
    text = shown.raw.decode()
    assert (BAR in text) == drawn
    assert bool(re.search(r"\x1b\[[\d;]*(3[0-7]|9[0-7])m", text)) == coloured
    assert "\x1b" not in text or drawn
    assert "capture-0: line 3 of capture" in text


def test_plain_lines_in_a_pipe(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SECONDS": "0.5", "TERM": "xterm"}
    found = subprocess.run(prepared(tmp_path), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "\x1b" not in found.stdout + found.stderr and BAR not in found.stdout
    assert "capture-1: line 2 of capture" in found.stdout
    state = json.loads((tmp_path / "out" / "logs" / "train" / "train-0.progress.json").read_text())
    assert isinstance(state["command"], int), "whose process it was is noted everywhere"


# ---------------------------------------------------------------- lines


def test_curve_falls_with_the_loss() -> None:
    assert curve([8, 7, 6, 5, 4, 3, 2, 1]) == "\u2588\u2587\u2586\u2585\u2584\u2583\u2582\u2581"
    assert curve([]) == "" and curve([3.0]) == "\u2581" and curve([2.0, 2.0]) == "\u2581\u2581"
    assert len(curve([float(i) for i in range(1000)])) == 16
    assert curve([1, 2], look=ASCII) == "_^"


def test_bar_is_as_wide_as_it_is_told() -> None:
    assert bar(1, 4, width=8).plain == "\u2501" * 2 + "\u2500" * 6
    assert bar(None, None, width=4).plain == bar(3, 0, width=4).plain == "\u2500" * 4
    assert bar(9, 4, width=4).plain == "\u2501" * 4


def test_lines_of_every_stage_fit_the_window() -> None:
    state = {"done": 5, "total": 10, "text": "at work", "numbers": {"tokens_per_s": 10.0, "eta_s": 5.0}}
    for stage in ("regenerate", "corpus", "capture", "train", "export", "evaluate", "report"):
        for width in (20, 40, 79, 200):
            for states in ({"a": state}, {"a": state, "b": {**state, "done": None, "total": None}}):
                lines = stage_lines(stage, states, [3.0, 2.0], width=width)
                assert lines and all(isinstance(line, Text) and line.cell_len <= width for line in lines), (stage, width)
    assert "5 B of 10 B" in stage_lines("corpus", {"corpus": state})[0].plain
    two = stage_lines("train", {"train-0": state, "train-1": {**state, "text": "compiling"}})
    assert "2 ranks: at work, compiling" in two[1].plain


def test_losses_are_read_on_and_a_file_written_anew_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "drafters" / "k"
    folder.mkdir(parents=True)
    follower = Follower(tmp_path, 1)
    assert follower.losses("k") == [] and follower.losses(None) == []
    rows = [json.dumps({"step": i, "loss": float(i)}) + "\n" for i in range(LOSSES + 8)]
    (folder / "metrics.jsonl").write_text("".join(rows[:3]) + '{"step": 3, "he')
    assert follower.losses("k") == [0.0, 1.0, 2.0]
    (folder / "metrics.jsonl").write_text("".join(rows))
    assert follower.losses("k") == [float(i) for i in range(8, LOSSES + 8)]
    (folder / "metrics.jsonl").write_text(rows[1])
    assert follower.losses("k") == [1.0]


def test_only_what_descends_from_the_command_and_runs_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "capture"
    folder.mkdir(parents=True)
    state = {"done": 1, "total": 2, "text": "", "time": time.time(), "pid": os.getpid(), "numbers": {}}
    state |= {"host": socket.gethostname(), "command": 7}
    changes = {"ended": {"ended": True}, "other": {"command": 8}, "gone": {"pid": 2**22 + 1}, "far": {"host": "far"}}
    for name, change in {"capture-10": {}, "capture-9": {}, **changes}.items():
        (folder / f"{name}.progress.json").write_text(json.dumps(state | change))
    assert list(Follower(tmp_path, 7).states()["capture"]) == ["capture-9", "capture-10"]

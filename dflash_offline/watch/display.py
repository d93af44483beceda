"""The process that owns the terminal while a command runs: ``python -m dflash_offline.watch --root ROOT --command PID``.

Everything the command and its task processes print comes in on stdin and goes to the terminal unchanged, line by line;
below it stand the progress lines of the model processes that descend from the command, read from their progress files.
It is a process of its own because Luigi forks: a thread that draws would not get along with that. It never stops the
command: whatever goes wrong in drawing, lines are still passed on. It ends when nobody can print any more.
"""

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

REFRESH_S = 0.5
_POLL_S = 0.1
_READ_BYTES = 1 << 16
LOSSES = 512  # of the newest steps, in the curve of the loss


class Follower:
    """The progress lines of one command, from its files.

    Args:
        root: the run's.
        command: pid of the command.
    """

    def __init__(self, root: Path, command: int) -> None:
        self.root, self.command = root, command
        self._metrics: dict[str, Any] = {}

    def states(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Progress of the model processes that run now, by stage and name."""
        from dflash_offline.progress import UNITS, read_progress
        from dflash_offline.status import process_is_alive

        found: dict[str, dict[str, dict[str, Any]]] = {}
        for stage in UNITS:
            for path in sorted((self.root / "logs" / stage).rglob("*.progress.json"), key=_natural):
                state = read_progress(path)
                if state is None or state.get("command") != self.command or state.get("host") != socket.gethostname():
                    continue
                if not state.get("ended") and process_is_alive(state["pid"]):
                    found.setdefault(stage, {})[path.name.removesuffix(".progress.json")] = state
        return found

    def losses(self, key: str | None) -> list[float]:
        """Losses of the newest steps of a training run."""
        from dflash_offline.layout import Layout
        from dflash_offline.watch.metrics import MetricsTail

        if key is None:
            return []
        if key not in self._metrics:
            self._metrics[key] = MetricsTail(Layout(self.root).metrics(key), keep=("step", "loss"), newest=LOSSES)
        return [row["loss"] for row in self._metrics[key].read() if "loss" in row]

    def lines(self, *, width: int, unicode: bool) -> list[Any]:
        """What to show now."""
        from dflash_offline.watch.lines import ASCII, UNICODE, stage_lines

        found = []
        for stage, states in self.states().items():
            by_key: dict[str | None, dict[str, dict[str, Any]]] = {}
            known = {state.get("key") for state in states.values()} - {None}
            for name, state in states.items():
                key = next(iter(known)) if len(known) == 1 else state.get("key")  # a process that only starts does not know it yet
                by_key.setdefault(key, {})[name] = state
            for key, together in by_key.items():  # several drafters are trained at a time, each by ranks of its own
                title = stage if len(by_key) == 1 else next(iter(together)).removesuffix("-0")
                losses = self.losses(key) if stage == "train" else []
                found += stage_lines(stage, together, losses, title=title, width=width, look=UNICODE if unicode else ASCII)
        return found


def _natural(path: Path) -> tuple[int, str]:
    """capture-10 after capture-9."""
    return len(path.name), path.name


class Display:
    """Passes on what comes in from ``source`` to the terminal ``descriptor``, and keeps the progress lines below it."""

    def __init__(self, follower: Follower, *, source: int, descriptor: int, unicode: bool) -> None:
        from dflash_offline.watch.region import Region

        self._follower, self._source, self._unicode = follower, source, unicode
        self._region = Region(descriptor)
        self._rest = b""
        self._resized = False
        self._parent = os.getppid()

    def run(self) -> None:
        """Until the other end of ``source`` is closed by everybody, or the command is gone."""
        refreshed = 0.0
        while True:
            ready = bool(select.select([self._source], [], [], _POLL_S)[0])
            if ready and not self._pass_on():
                break
            if not ready and os.getppid() != self._parent:
                break
            if self._resized or time.monotonic() - refreshed >= REFRESH_S:
                refreshed, self._resized = time.monotonic(), False
                self._refresh()
        self._region.show([])
        if self._rest:
            self._region.print_above(self._rest)

    def resize(self, *_: Any) -> None:
        self._resized = True

    def suspend(self, *_: Any) -> None:
        """Ctrl-Z: leave a clean terminal to the shell."""
        self._region.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._resized = True

    def _pass_on(self) -> bool:
        content = os.read(self._source, _READ_BYTES)
        if not content:
            return False
        lines, newline, rest = (self._rest + content).rpartition(b"\n")
        self._rest = rest
        if newline:
            self._region.print_above(lines + newline)
        return True

    def _refresh(self) -> None:
        with contextlib.suppress(Exception):  # a progress file in a shape we do not know: the lines stay as they are
            self._region.show(self._follower.lines(width=self._region.size[0] - 1, unicode=self._unicode))


def copy(source: int, descriptor: int) -> None:
    """Pass on what comes in, without anything below it. A terminal that is gone does not stop it: the writers must not wait."""
    while content := os.read(source, _READ_BYTES):
        with contextlib.suppress(OSError):
            while content:
                content = content[os.write(descriptor, content) :]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_offline.watch", allow_abbrev=False)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--command", type=int, required=True)
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it has to outlive what the command says about them
        signal.signal(number, signal.SIG_IGN)
    try:
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        display = Display(Follower(arguments.root, arguments.command), source=0, descriptor=1, unicode=unicode)
        signal.signal(signal.SIGWINCH, display.resize)
        signal.signal(signal.SIGTSTP, display.suspend)
        display.run()
    except Exception:  # whatever it is: the command's lines are worth more than the bars
        copy(0, 1)

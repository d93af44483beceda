"""What a running stage tells the outside: a small JSON file for programs, lines on stdout for people.

The file is what ``dflash-offline status`` and the supervisor read; the lines land in the stage's log, from where
the supervisor forwards them to the terminal. Both are advisory: a full disk or a closed terminal never stops a run.

Keys of the file: ``done`` and ``total`` (units of the stage's own: rows, parts, steps; null when not known),
``text`` (what it is doing), ``time`` (unix seconds of the last update), ``host`` and ``pid``, ``command`` (pid of the command
that started it, null by hand), ``gpu`` (its physical id as the supervisor gave it, null on the CPU), ``key`` (the stage's content
key, null until it is known), ``ended`` (true once the process is done, whichever way), ``numbers`` (name -> number), ``warnings``
(the last few lines that began with "warning:", each with its time).
"""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_offline.errors import DFlashError
from dflash_offline.manifest import read_json, write_json

# stages in their order, and what ``done`` and ``total`` of their processes count
UNITS = {
    "regenerate": "conversations",
    "corpus": "bytes",
    "capture": "parts",
    "train": "steps",
    "export": "forms",
    "evaluate": "prompts",
    "report": "reports",
}
MIN_INTERVAL_S = 0.5
KEPT_WARNINGS = 5
COMMAND = "DFLASH_COMMAND"  # environment: pid of the command that all processes of a run descend from


class Progress:
    """Progress of one process.

    Args:
        path: the progress file; None (run by hand, in a notebook or a test) keeps the numbers in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.state: dict[str, Any] = {
            "done": None,
            "total": None,
            "text": "",
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "command": int(command) if (command := os.environ.get(COMMAND, "")).isdecimal() else None,
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
            "key": None,
            "ended": False,
            "numbers": {},
            "warnings": [],
        }
        self._written_at = float("-inf")

    def update(
        self, *, done: int | None = None, total: int | None = None, text: str | None = None, force: bool = False, **numbers: float
    ) -> None:
        """Merge what changed into the state and write it, at most twice a second unless ``force``."""
        for name, value in (("done", done), ("total", total), ("text", text)):
            if value is not None:
                self.state[name] = value
        self.state["numbers"].update(numbers)
        self.state["time"] = time.time()
        if force or time.monotonic() - self._written_at >= MIN_INTERVAL_S:
            self.flush()

    def end(self, text: str | None = None) -> None:
        """Note that the process is done, with a last word if there is one."""
        self.state["ended"] = True
        self.update(text=text, force=True)

    def flush(self) -> None:
        """Write the state as it is now."""
        self._written_at = time.monotonic()
        if self.path is not None:
            if (held := _gpu_bytes()) is not None:
                self.state["numbers"]["gpu_bytes"] = held
            with contextlib.suppress(OSError, DFlashError):
                write_json(self.path, self.state, durable=False)

    def say(self, text: str) -> None:
        """Print one line at once; it is seen in the log and on the terminal. One that begins with "warning:" is kept in the file."""
        if text.startswith("warning:"):
            self.state["warnings"] = [*self.state["warnings"], [time.time(), text.removeprefix("warning:").strip()]][-KEPT_WARNINGS:]
            self.flush()
        with contextlib.suppress(OSError):  # the reader may be gone: `luigi ... | head`
            print(text, flush=True)


def _gpu_bytes() -> int | None:
    """What torch holds of this process's GPU; None without one. Never the reason that torch is imported or a GPU touched."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", lambda: False)():
        return None
    return int(cuda.memory_reserved())


def read_progress(path: Path) -> dict[str, Any] | None:
    """The last state written to a progress file; None when there is none yet (or none that can be read)."""
    with contextlib.suppress(OSError, DFlashError):
        state = read_json(path)
        if (
            isinstance(state, dict)
            and state.keys() >= _NEEDED
            and all(_CHECKS[name](state[name]) for name in _CHECKS.keys() & state.keys())
        ):
            return state
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 63)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


# What is read may come from another version, or be damaged: a file with a value of the wrong kind counts as none
_NEEDED = {"done", "total", "text", "time", "pid", "numbers"}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "done": _is_count,
    "total": _is_count,
    "text": _is_text,
    "time": _is_number,
    "host": lambda value: isinstance(value, str),
    "pid": lambda value: isinstance(value, int) and 0 < value < 1 << 31,
    "command": _is_count,
    "gpu": _is_text,
    "key": _is_text,
    "numbers": lambda value: isinstance(value, dict),
    "warnings": lambda value: (
        isinstance(value, list)
        and all(isinstance(line, list) and len(line) == 2 and _is_number(line[0]) and isinstance(line[1], str) for line in value)
    ),
}


def sum_of_rates(numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of the numbers of several processes: rates (``..._per_s``) add up, the time left (``eta_s``) is that of the slowest."""
    total: dict[str, float] = {}
    for each in numbers:
        for name, value in each.items():
            if name.endswith("_per_s"):
                total[name] = total.get(name, 0.0) + value
            elif name == "eta_s":
                total[name] = max(total.get(name, 0.0), value)
    return total

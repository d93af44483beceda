"""Progress at the bottom of a terminal while the command runs; plain lines everywhere else.

Once the first task turns out to be incomplete, stdout and stderr of the command, and of all that it forks, are led through a
process that draws (``dflash_offline/watch/display.py``), and given back before the command's last words. Neither happens unless
stdout is a terminal that can move its cursor: in a pipe, a file, a batch job or with TERM=dumb the lines go straight out.
"""

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from dflash_offline.progress import COMMAND

END_S = 3.0  # the drawing process gets to print what is on its way
CLEAR_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def can_draw() -> bool:
    """Whether stdout is a terminal with a cursor."""
    return os.isatty(1) and os.environ.get("TERM", "") not in ("", "dumb")


@functools.lru_cache
def follow(root: Path) -> None:
    """Note this command as the one whose processes follow; on a terminal, show their progress. Once; before anything forks."""
    os.environ[COMMAND] = str(os.getpid())
    if can_draw():
        with contextlib.suppress(OSError):  # out of processes or descriptors: plain lines then
            _Drawing(root)


class _Drawing:
    """The drawing process, and the descriptors that it stands in for."""

    def __init__(self, root: Path) -> None:
        self._owner = os.getpid()
        taken = [1, 2] if _same_terminal(1, 2) else [1]
        sys.stdout.flush()
        sys.stderr.flush()
        source, sink = os.pipe()
        command = [sys.executable, "-m", "dflash_offline.watch", "--root", str(root), "--command", str(self._owner)]
        # held back, not ignored: a Ctrl-C of this moment still reaches the command, and never the drawing process
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(command, stdin=source, stderr=subprocess.DEVNULL)
        except OSError:
            os.close(sink)
            raise
        finally:
            os.close(source)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._saved = {number: os.dup(number) for number in taken}
        for number in taken:
            os.dup2(sink, number)
        os.close(sink)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, _suspend)
        atexit.register(self.end)  # runs before what was registered earlier: the last words of the outcome

    def end(self) -> None:
        """Give the terminal back."""
        if os.getpid() != self._owner or not self._saved:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number, saved in self._saved.items():
            os.dup2(saved, number)
            os.close(saved)
        self._saved = {}
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:  # a process that was left behind still holds the pipe
            self._process.kill()
            self._process.wait()


def _suspend(number: int, frame: FrameType | None) -> None:
    """Ctrl-Z: the shell takes the terminal as soon as this process stops, so let the drawing one clear its lines first."""
    time.sleep(CLEAR_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def _same_terminal(first: int, second: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(second) and os.fstat(first).st_rdev == os.fstat(second).st_rdev
    return False

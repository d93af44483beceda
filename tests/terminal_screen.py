"""A command on a real pseudo-terminal, and what a person would see on it (pyte emulates the terminal)."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte


class Terminal:
    """Runs a command as the foreground job of a terminal of its own."""

    def __init__(self, command: list[str], *, cwd: Path, columns: int = 100, rows: int = 24, **environment: str) -> None:
        self.raw = b""
        self.screen = pyte.HistoryScreen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)

        def take_terminal() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        variables = {"TERM": "xterm-256color", **environment}
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=take_terminal,
            env={**inherited, **variables},
        )  # fmt: skip
        os.close(slave)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """As dragging the window does: the kernel tells the foreground job."""
        self.read(0.0)
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self, seconds: float) -> bool:
        """Take in what is printed within so many seconds; False once the terminal is closed on the other side."""
        end = time.monotonic() + seconds
        while True:
            ready = select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                return True
            try:
                content = os.read(self._master, 1 << 16)
            except OSError:
                content = b""
            if not content:
                return False
            self.raw += content
            self._stream.feed(content)

    def wait_for(self, seen: Callable[[str], bool], *, seconds: float = 30.0) -> str:
        """The screen, once it is as wanted."""
        end = time.monotonic() + seconds
        while not seen(self.text):
            assert time.monotonic() < end, f"not seen; the screen is\n{self.text}"
            assert self.read(0.05), f"the command ended; the screen is\n{self.text}"
        return self.text

    def finish(self, *, seconds: float = 30.0) -> int:
        """Exit status, once everything printed is taken in."""
        end = time.monotonic() + seconds
        while self.read(0.1) and self.process.poll() is None:
            assert time.monotonic() < end, self.text
        while select.select([self._master], [], [], 0.2)[0] and self.read(0.1):
            pass
        return self.process.wait(timeout=5)

    @property
    def text(self) -> str:
        """What is on the screen, without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def everything(self) -> str:
        """What has scrolled out at the top, and the screen."""
        top = ["".join(row[column].data for column in range(self.screen.columns)).rstrip() for row in self.screen.history.top]
        return "\n".join([*top, self.text])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

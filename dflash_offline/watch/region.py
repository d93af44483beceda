"""Lines that stay at the bottom of a terminal while others scroll above them.

The cursor rests at the *first* column of the first of these lines. What is below is erased from there before anything
else is printed, so a window that was made narrower in the meantime, and has wrapped the lines, leaves nothing behind:
terminals that wrap anew keep the cursor with its text. Nothing is ever read from the terminal, and nothing in it is
set that would have to be set back: a process that is killed leaves a usable terminal.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

_ERASE_BELOW = b"\r\x1b[J"


class Region:
    """Draws on the terminal behind a file descriptor.

    Args:
        descriptor: open for writing. A terminal that is gone is no error: what is written is lost.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = False
        self._lines: list[Text] = []

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the window now."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._descriptor)
            if columns and rows:
                return columns, rows
        return shutil.get_terminal_size()

    @property
    def in_foreground(self) -> bool:
        """Whether this job has the terminal. One that was sent to the background prints lines only."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not our controlling terminal: nobody can take it from us
            return True

    def show(self, lines: Sequence[Text]) -> None:
        """These lines are what stays at the bottom from now on."""
        self._lines = list(lines)
        self._write(self._erase() + self._drawn())

    def print_above(self, content: bytes) -> None:
        """Print whole lines above them."""
        self._write(self._erase() + content + self._drawn())

    def leave(self) -> None:
        """Take the lines away until they are shown again; where the shell was quicker, its prompt stands there, and they are left."""
        if self.in_foreground:
            self._write(self._erase())
        self._shown = False

    def _erase(self) -> bytes:
        shown, self._shown = self._shown, False
        return _ERASE_BELOW if shown else b""

    def _drawn(self) -> bytes:
        if not self._lines or not self.in_foreground:
            return b""
        columns, rows = self.size
        lines = [line.copy() for line in self._lines]
        if len(lines) > max(1, rows - 2):
            hidden = len(lines) - max(1, rows - 3)
            lines = [*lines[: max(1, rows - 3)], Text(f"... {hidden} more lines: dflash-offline status", no_wrap=True)][: max(1, rows - 1)]
        for line in lines:  # one column is left free: some terminals wrap a full line at once
            line.truncate(max(1, columns - 1), overflow="ellipsis" if line.cell_len > columns - 1 else None)
        console = Console(force_terminal=True, width=max(1, columns), height=rows, legacy_windows=False, highlight=False)
        with console.capture() as capture:
            for line in lines:
                console.print(line, end="\n", no_wrap=True, crop=True, soft_wrap=False)
        text = capture.get().rstrip("\n")
        self._shown = True
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        return (text + up + "\r").encode(console.encoding, errors="replace")

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(OSError):
            while content:
                content = content[os.write(self._descriptor, content) :]

"""Read a ``metrics.jsonl``, also while it grows: each look reads only what came since the last one."""

import contextlib
import json
from pathlib import Path
from typing import Any


class MetricsTail:
    """Rows of one file, as they come.

    Args:
        keep: the fields kept of each row; all of them when left out.
        newest: at most so many rows are kept.
    """

    def __init__(self, path: Path, *, keep: tuple[str, ...] | None = None, newest: int | None = None) -> None:
        self.path, self._keep, self._newest = path, keep, newest
        self._file, self._offset = 0, 0  # inode: a run that resumes writes the file anew
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All rows so far; a last line that is still being written comes next time."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self._file or status.st_size < self._offset:
                self._file, self._offset, self._rows = status.st_ino, 0, []
            file.seek(self._offset)
            content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict) and "step" in row:
                        self._rows.append(row if self._keep is None else {name: row[name] for name in self._keep if name in row})
            if self._newest is not None:
                del self._rows[: -self._newest]
        return self._rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a ``metrics.jsonl``; none when there is no such file."""
    return MetricsTail(path).read()

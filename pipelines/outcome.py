"""What a run of Luigi has come to, shared between its main process and the task processes it forks.

Luigi hands a failure from one task to another only after everything that runs has ended, and prints its own summary
last. Here each task sees at once what the others came to (so that replicas stop when one of them fails), and the last
lines of the command say what matters: where the results are, or which stage failed, why, and its log.
"""

import atexit
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["result", "failed", "stopped"]


@dataclass(frozen=True)
class Entry:
    kind: Kind
    task: str  # task family, and the drafter where there are several
    text: str


class Outcome:
    """An unnamed temporary file that a process shares with all it forks; entries are lines of JSON, only ever appended."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - lives as long as the process
        self._owner = os.getpid()
        self.when_failed: Callable[[], str] = str  # what there is nevertheless
        atexit.register(self._last_words)

    def add(self, kind: Kind, task: str, text: str) -> None:
        self._file.write((json.dumps(asdict(Entry(kind, task, text))) + "\n").encode())

    def entries(self) -> list[Entry]:
        descriptor = self._file.fileno()
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # leaves the shared file position alone
        return [Entry(**json.loads(line)) for line in content.splitlines()]

    def failure(self, task: str) -> str | None:
        """Why a task of this family failed; None if none has."""
        return next((entry.text for entry in self.entries() if entry.kind == "failed" and entry.task == task), None)

    def _last_words(self) -> None:
        if os.getpid() != self._owner:
            return
        entries = self.entries()
        for entry in entries:
            if entry.kind == "result":
                print(entry.text, flush=True)
        if any(entry.kind == "failed" for entry in entries) and (text := self.when_failed()):
            print(text, flush=True)
        for entry in entries:
            if entry.kind == "failed":
                print(f"luigi: error: {entry.task}: {entry.text}", file=sys.stderr, flush=True)
        self._file.close()

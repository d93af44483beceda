"""What each host tells the others about itself: ``logs/hosts/HOST.json``, written every few seconds while it computes.

Keys: ``host``, ``time`` (unix seconds), ``cores``, ``load`` (mean of the last minute), ``memory_bytes`` (available), ``gpus``
(``GpuState`` each) and ``gpu_note`` (why there are none). A file that is older than a minute is of a host that has stopped.
"""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from dflash_offline.errors import DFlashError
from dflash_offline.manifest import read_json, write_json
from dflash_offline.watch.gpus import GpuReader

FOLDER = "hosts"
EVERY_S = 5.0
STALE_S = 60.0


def state(reader: GpuReader) -> dict[str, Any]:
    """This host now."""
    gpus = [gpu.to_dict() for gpu in reader.read()]
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_bytes": available_bytes(),
        "gpus": gpus,
        "gpu_note": reader.note,
    }


def available_bytes() -> int:
    """Memory that new processes can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class Heartbeat:
    """Writes this host's file in a thread, until the block ends. Advisory: it never stops or delays what it tells of.

    Args:
        logs: the folder ``ROOT/logs``.
    """

    def __init__(self, logs: Path) -> None:
        self._path = logs / FOLDER / f"{socket.gethostname()}.json"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()  # not joined: a shared file system that hangs would hold up the command

    def _beat(self) -> None:
        reader = GpuReader()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        while True:
            with contextlib.suppress(OSError, DFlashError):
                write_json(self._path, state(reader), durable=False)
            if self._stop.wait(EVERY_S):
                return


def read_hosts(logs: Path) -> list[dict[str, Any]]:
    """The files of all hosts that still write theirs, by name."""
    found = []
    for path in sorted((logs / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, DFlashError):
            content = read_json(path)
            if isinstance(content, dict) and {"host", "time", "gpus"} <= content.keys() and time.time() - content["time"] < STALE_S:
                found.append(content)
    return found

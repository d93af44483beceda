"""Processes that compile the same kernels: one alone, then the others beside each other."""

import json
import subprocess
import sys
import time
from pathlib import Path

PROCESS = """
import json, sys, time
from pathlib import Path
from dflash_offline.train.kernels import compiling

folder, ready, go = (Path(each) for each in sys.argv[1:])
ready.touch()
while not go.exists():
    time.sleep(0.01)
with compiling(folder, {"shape": 1}) as first:
    began = time.time()
    time.sleep(0.7)
    print(json.dumps([first, began, time.time()]))
"""


def run_together(folder: Path, count: int) -> list[tuple[bool, float, float]]:
    """(first, began, ended) of each process, by when it began."""
    go, readies = folder / "go", [folder / f"ready{number}" for number in range(count)]
    go.unlink(missing_ok=True)
    for ready in readies:
        ready.unlink(missing_ok=True)
    command = [sys.executable, "-c", PROCESS, str(folder / "cache")]
    started = [subprocess.Popen([*command, str(ready), str(go)], stdout=subprocess.PIPE, text=True) for ready in readies]
    while not all(ready.exists() for ready in readies):
        assert all(process.poll() is None for process in started)
        time.sleep(0.02)
    go.touch()
    return sorted((tuple(json.loads(process.communicate(timeout=60)[0])) for process in started), key=lambda each: each[1])


def test_one_process_compiles_and_the_others_load_at_the_same_time(tmp_path: Path) -> None:
    compiler, *loaders = run_together(tmp_path, 3)
    assert compiler[0] and not any(first for first, _, _ in loaders)
    assert all(began >= compiler[2] for _, began, _ in loaders), "they waited for the one that compiled"
    assert max(began for _, began, _ in loaders) < min(ended for _, _, ended in loaders), "not for each other"


def test_with_a_warm_cache_nobody_waits(tmp_path: Path) -> None:
    run_together(tmp_path, 1)
    found = run_together(tmp_path, 3)
    assert not any(first for first, _, _ in found)
    assert max(began for _, began, _ in found) < min(ended for _, _, ended in found)

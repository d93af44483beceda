"""The embedded run, timed: what README's first screen quotes.

    python benchmarks/demo.py

Runs `luigi --module pipelines DFlashAll` with the embedded run file in an empty folder and writes
benchmarks/results/demo.json: wall seconds (``with_conversion``: the demo model was converted in this run), peak memory of
all processes together, acceptance length with its interval, equality with the target's own output, and the seconds
of the same command given again. Linux; needs psutil.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from dflash_offline.config import EMBEDDED
from dflash_offline.demo import converted_folder
from dflash_offline.environment import environment
from dflash_offline.manifest import write_json

RESULT = Path(__file__).resolve().parent / "results" / "demo.json"
COMMAND = [sys.executable, "-m", "luigi", "--module", "pipelines", "DFlashAll", "--config", str(EMBEDDED)]


class PeakMemory(threading.Thread):
    """Samples the proportional set size of a process and all below it, twice a second: shared pages count once."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.process, self.peak_bytes = process, 0

    def run(self) -> None:
        while self.process.poll() is None:
            total = 0
            try:
                parent = psutil.Process(self.process.pid)
                for each in [parent, *parent.children(recursive=True)]:
                    total += each.memory_full_info().pss
            except psutil.Error:
                pass  # a process ended between listing and reading
            self.peak_bytes = max(self.peak_bytes, total)
            time.sleep(0.5)


def timed(folder: str) -> tuple[float, int]:
    """Run the command in ``folder``; seconds and peak bytes."""
    began = time.perf_counter()
    with subprocess.Popen(COMMAND, cwd=folder) as process:
        memory = PeakMemory(process)
        memory.start()
        if process.wait() != 0:
            sys.exit(f"the run failed with status {process.returncode}")
    return time.perf_counter() - began, memory.peak_bytes


def main() -> None:
    load, with_conversion = os.getloadavg()[0], not converted_folder().exists()
    with tempfile.TemporaryDirectory() as folder:
        seconds, peak = timed(folder)
        again, _ = timed(folder)
        (found,) = Path(folder).glob("dflash-run/evaluations/*/results.json")
        results: dict[str, Any] = json.loads(found.read_text())
    (dataset,) = results["datasets"].values()
    figures = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": round(load, 2),
        "wall_s": round(seconds, 1),
        "with_conversion": with_conversion,
        "again_s": round(again, 1),
        "peak_gib": round(peak / 2**30, 2),
        "acceptance_length": results["overall"]["acceptance_length"],
        **{name: dataset[name] for name in ("interval", "prompts", "tokens", "steps", "identical", "near_ties", "different")},
        "tau_replay": results["tau_replay"]["tau"],
        "environment": environment(),
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    write_json(RESULT, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

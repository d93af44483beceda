"""Inputs of training tests: a prepared corpus and a captured store, made once, and ranks started as real processes."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conftest import write_run_file

from dflash_offline import identity, keys, store
from dflash_offline.config import RunConfig
from dflash_offline.corpus import Corpus, prepare
from dflash_offline.drafter import planned_shape
from dflash_offline.layout import Layout
from dflash_offline.progress import Progress
from dflash_offline.target import facts as target_facts
from dflash_offline.target import load_target

NUM_ROWS = 24
CORPUS = {"heldout_fraction": 0.25}


def make_inputs(
    folder: Path, *, model: Path, conversations: list[dict[str, Any]], captured: int | None = None, last_hidden: bool = False
) -> Path:
    """Prepare the corpus of NUM_ROWS conversations and capture it (only its first ``captured`` rows) under FOLDER/out."""
    corpus_file = folder / "corpus.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    corpus_file.write_text("".join(json.dumps(row) + "\n" for row in conversations[:NUM_ROWS]), encoding="utf-8")
    store_section = {"codec": "lossless", "store_last_hidden": last_hidden}
    config = RunConfig.load(write_run_file(folder, model=model, files=[corpus_file], corpus=CORPUS, store=store_section))
    layout, key = Layout(config.root_dir), keys.corpus_key(config)
    layout.root.mkdir(exist_ok=True)
    planned_shape(config, model)  # as the corpus stage does, which so leaves it in the cache
    corpus = prepare(config, layout.corpus(key), key, Progress(None))
    path, layers = layout.store(keys.capture_key(config)), identity.capture_layer_ids(config)
    if last_hidden:
        layers = [*layers, identity.num_target_layers(config) - 1]
    store.create_or_open(path, keys.store_identity(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(model, dtype=torch.float32, device=device, attention="sdpa", layer_ids=layers)
    rows = [corpus.row(i) for i in range(len(corpus) if captured is None else captured)]
    with store.PartWriter(
        path,
        "part-00000",
        store_settings=config.store,
        num_taps=len(layers),
        hidden_size=target_facts(model).hidden_size,
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_samples=len(rows),
    ) as writer:
        for row in rows:
            ids = torch.from_numpy(row.input_ids.astype("int64"))[None]
            hidden = target.capture(ids, torch.tensor([ids.shape[1]]))[0].to(torch.bfloat16)
            writer.append(row.index, row.sha256, row.bucket, row.input_ids, row.loss_mask, hidden)
        writer.commit({})
    return folder


def make_run(folder: Path, inputs: Path, *, model: Path, **sections: dict[str, Any]) -> Path:
    """A run file in ``folder`` that shares corpus, store and cache with ``inputs`` and has drafters of its own."""
    run_file = write_run_file(folder, model=model, files=[inputs / "corpus.jsonl"], corpus=CORPUS, **sections)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    for name in ("corpora", "captures", "cache"):
        if not (out / name).exists():
            (out / name).symlink_to(inputs / "out" / name)
    return run_file


def drafter_folder(run_file: Path) -> Path:
    config = RunConfig.load(run_file)
    return Layout(config.root_dir).drafter(keys.train_key(config))


def open_corpus(run_file: Path) -> Corpus:
    config = RunConfig.load(run_file)
    return Corpus.open(Layout(config.root_dir).corpus(keys.corpus_key(config)))


def train_here(run_file: Path, *, partial: bool = False) -> Path:
    """Train in this process, as the only rank; returns the drafter's folder."""
    from dflash_offline.train import train

    config = RunConfig.load(run_file)
    train(config, argparse.Namespace(key=keys.train_key(config), partial=partial), Progress(None))
    return drafter_folder(run_file)


def metrics(run_file: Path) -> list[dict[str, Any]]:
    path = drafter_folder(run_file) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def losses(run_file: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run_file) if "loss" in row]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RankProcesses:
    """Ranks as real processes, one for each run file (usually the same), stopped at the end of the block."""

    def __init__(self, *run_files: Path) -> None:
        port = str(free_port())
        self.run_file = run_files[0]
        self.processes = []
        for rank, run_file in enumerate(run_files):
            place = {"RANK": str(rank), "WORLD_SIZE": str(len(run_files)), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            environment = os.environ | place | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "dflash_offline.train", "--config", str(run_file)]
            self.processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
            )

    def wait_for_step(self, step: int, *, timeout_s: float = 90) -> None:
        """Until ``metrics.jsonl`` has a row of that step."""
        until = time.monotonic() + timeout_s
        while not any(row["step"] >= step for row in metrics(self.run_file)):
            assert time.monotonic() < until, "no such step in time"
            assert all(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def output(self, timeout_s: float = 90) -> list[tuple[int, str, str]]:
        """(exit status, stdout, stderr) of each rank, once all have ended."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=timeout_s)
            found.append((process.returncode, out, err))
        return found

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

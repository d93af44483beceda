"""Real training on one GPU and on two: rate, and how long ranks wait for data.

    python benchmarks/train_wait.py --ranks 1,2                      # H200s; about two minutes, 11 GB of disk, 2.5 GB of /dev/shm
    python benchmarks/train_wait.py --ranks 1 --shape smollm2 --reader threads --out FILE  # a small drafter: short steps, much to read
    python benchmarks/train_wait.py --ranks 1,2 --device cpu --shape tiny  # the same code on a tiny shape, to see that it runs

Every number of ranks trains the same drafter, from the same int8 store of random rows, with the same global batch, by
the command that the pipeline runs. The store's pages are dropped from memory first (not with ``--cached``), so that
rows come from the disk. No target is needed: the folder holds a configuration and a random embedding and head.

Writes benchmarks/results/train_scaling.json. Rates are of the steps after the first quarter; the run is killed before
it would write its drafter. ``peak_gib`` is what torch reserved on the fullest GPU (of a process on a CPU: resident).
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_offline import keys, store
from dflash_offline.codecs import ChannelStatistics
from dflash_offline.config import RunConfig
from dflash_offline.drafter import DrafterShape
from dflash_offline.layout import Layout

sys.path.insert(0, str(Path(__file__).resolve().parent))
from made_corpus import write_corpus  # noqa: E402
from train_work import QWEN3_8B, TINY, WORKS  # noqa: E402

RESULT = Path(__file__).resolve().parent / "results" / "train_scaling.json"


@dataclass(frozen=True)
class Size:
    """What is trained: micro-batches of ``packed`` rows of ``length`` tokens with ``anchors`` blocks each."""

    shape: DrafterShape
    length: int
    anchors: int
    steps: int
    packed: int = 1
    micro_batches: int = 8  # of a step, over all ranks: 24,576 tokens of the largest, a small batch for a drafter of this size

    @property
    def rows(self) -> int:
        return self.steps * self.micro_batches * self.packed


SIZES = {
    "qwen3-8b": Size(QWEN3_8B, 3072, 512, 20),
    "smollm2": Size(next(work.shape for work in WORKS if work.name == "smollm2-135m"), 320, 128, 400, packed=16, micro_batches=2),
    "tiny": Size(TINY.shape, 96, 12, 24),
}


def write_target(folder: Path, shape: DrafterShape, device: str) -> None:
    """A configuration, a tokenizer of one word, and a random embedding and head."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    Qwen3Config(
        hidden_size=shape.hidden_size, num_hidden_layers=shape.num_target_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size, max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(folder)
    generator = torch.Generator(device).manual_seed(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tables = {}
    for name in names:
        table = torch.empty(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=device)
        tables[name] = table.normal_(0, 0.02, generator=generator).cpu()
    save_file(tables, folder / "model.safetensors", metadata={"format": "pt"})


def write_run_file(folder: Path, target: Path, size: Size, *, ranks: int, device: str, reader: str) -> Path:
    """The run file of one number of ranks."""
    shape, cpu = size.shape, device == "cpu"
    sections: dict[str, dict[str, Any]] = {
        "target": {"model": str(target), "dtype": "bfloat16", "capture_layer_ids": list(shape.target_layer_ids)},
        "corpus": {"files": ["rows.jsonl"], "bucket_edges": [size.length + 1], "max_length": size.length, "heldout_fraction": 0.0},
        "store": {"codec": "int8", "verify": "sizes"},
        "drafter": {"layers": shape.num_layers, "block_size": shape.block_size, "mask_token_id": shape.mask_token_id},
        "train": {
            "gpus": "cpu" if cpu else list(range(ranks)), "ranks": ranks, "dtype": "float32" if cpu else "bfloat16",
            "epochs": 1, "max_steps": size.steps, "anchors": size.anchors, "tokens_per_batch": size.length * size.packed,
            "slots_per_batch": size.anchors * size.packed * shape.block_size, "micro_batches_per_step": size.micro_batches,
            "log_every": 2, "reader": reader,
            "checkpoint_every": 10**6, "checkpoint_minutes": 1e6, "evaluate_every": 10**6,
        },
    }  # fmt: skip
    path = folder / f"run{ranks}.toml"
    lines = [f'root = "out{ranks}"']
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")
    (folder / "rows.jsonl").write_text("{}\n")
    return path


def write_rows(run_file: Path, size: Size, device: str) -> None:
    """Corpus and store of random rows, where the run file wants them."""
    config = RunConfig.load(run_file)
    layout, key = Layout(config.root_dir), keys.corpus_key(config)
    random, count = np.random.default_rng(0), size.rows
    mask = (np.arange(size.length) >= size.length // 8).astype(np.uint8)
    rows = [random.integers(0, size.shape.vocab_size - 2, size.length, dtype=np.int32) for _ in range(count)]
    hashes = write_corpus(layout.corpus(key), rows, [mask] * count, key=key)
    path = layout.store(keys.capture_key(config))
    store.create_or_open(path, keys.store_identity(config))
    taps, hidden_size = len(size.shape.target_layer_ids), size.shape.hidden_size
    generator = torch.Generator(device).manual_seed(1)

    def states() -> torch.Tensor:
        return torch.randn(size.length, taps, hidden_size, device=device, generator=generator, dtype=torch.float32).bfloat16()

    with store.PartWriter(
        path, "part-00000", store_settings=config.store, num_taps=taps, hidden_size=hidden_size, num_tokens=count * size.length,
        num_samples=count, statistics=ChannelStatistics.from_rows([states()]), threads=4 if device != "cpu" else 1,
    ) as part:  # fmt: skip
        for index, row in enumerate(rows):
            part.append(index, hashes[index], 0, row, mask, states())
        part.commit({})


def drop_pages(folder: Path) -> None:
    """Have the next reader read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Whole rows of training steps so far."""
    found = []
    with contextlib.suppress(OSError):
        for line in metrics.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [row for row in found if "loss" in row]


def peak_bytes(process: subprocess.Popen[bytes], progress: Path, device: str) -> int:
    """What a rank holds now; its peak on a CPU."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        if device != "cpu":
            return int(json.loads(progress.read_text())["numbers"]["gpu_bytes"])
        return int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    return 0


def measure(run_file: Path, size: Size, *, ranks: int, device: str, limit_s: float) -> dict[str, Any]:
    """Train until the last steps; one case of the result."""
    config = RunConfig.load(run_file)
    metrics = Layout(config.root_dir).drafter(keys.train_key(config)) / "metrics.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    began, processes, first_step_s, peak = time.monotonic(), [], None, 0
    logs = [run_file.with_name(f"rank{rank}of{ranks}.log") for rank in range(ranks)]
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {"CUDA_VISIBLE_DEVICES": "" if device == "cpu" else str(rank), "DFLASH_PROGRESS": f"{logs[rank]}.json"}
            command = [sys.executable, "-m", "dflash_offline.train", "--config", str(run_file)]
            with logs[rank].open("wb") as log:
                processes.append(subprocess.Popen(command, env=os.environ | place, stdout=log, stderr=log, start_new_session=True))
        while not (found := rows_of(metrics)) or found[-1]["step"] < size.steps - 2:
            if found and first_step_s is None:
                first_step_s = time.monotonic() - began
            peak = max([peak, *(peak_bytes(each, Path(f"{log}.json"), device) for each, log in zip(processes, logs, strict=True))])
            if any(each.poll() is not None for each in processes) or time.monotonic() - began > limit_s:
                said = "; ".join(log.read_text(errors="replace")[-600:] for log in logs)
                raise RuntimeError(f"{ranks} ranks did not get to their end: {said}")
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    counted = [row for row in found if row["step"] > size.steps // 4]
    first, last = counted[0], counted[-1]
    return {
        "ranks": ranks,
        "ctx_tokens_per_s": round((last["tokens"] - first["tokens"]) / (last["elapsed_s"] - first["elapsed_s"])),
        "wait_share": round(sum(row["wait_share"] for row in counted[1:]) / len(counted[1:]), 4),
        "recompiles": last["recompiles"],
        "first_step_s": round(first_step_s or 0.0, 1),
        "peak_gib": round(peak / 2**30, 2),
        "read_gb_per_s": round(sum(row["read_bytes_per_s"] for row in counted[1:]) / len(counted[1:]) / 1e9, 3),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, by commas")
    parser.add_argument("--shape", default="qwen3-8b", choices=SIZES)
    parser.add_argument("--reader", default="auto", choices=["auto", "process", "threads"], help="[train] reader of the run file")
    parser.add_argument("--steps", type=int, help="optimiser steps")
    parser.add_argument("--cached", action="store_true", help="leave the store's pages in memory")
    parser.add_argument("--folder", type=Path, help="where corpus and store are made; a temporary folder when left out")
    parser.add_argument("--limit-s", type=float, default=150.0, help="most seconds of one number of ranks")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    size, device = SIZES[arguments.shape], arguments.device
    if arguments.steps:
        size = replace(size, steps=arguments.steps)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    result: dict[str, Any] = {
        "device": device if device == "cpu" else torch.cuda.get_device_name(), "torch": torch.__version__,
        "cold_disk": not arguments.cached,
        "shape": arguments.shape, "reader": arguments.reader,
        "micro_batches_per_step": size.micro_batches, "tokens_per_micro_batch": size.length * size.packed, "cases": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=memory) as target, tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        began = time.monotonic()
        write_target(Path(target), size.shape, device)
        numbers = [int(each) for each in arguments.ranks.split(",")]
        settings = {"device": device, "reader": arguments.reader}
        files = {ranks: write_run_file(Path(place), Path(target), size, ranks=ranks, **settings) for ranks in numbers}
        write_rows(files[numbers[0]], size, device)
        first = Path(place) / f"out{numbers[0]}"
        for ranks in numbers[1:]:
            (Path(place) / f"out{ranks}").mkdir()
            for name in ("corpora", "captures"):
                (Path(place) / f"out{ranks}" / name).symlink_to(first / name)
        if device != "cpu":
            torch.cuda.empty_cache()
        result["made_in_s"] = round(time.monotonic() - began, 1)
        print(f"corpus, store and target made in {result['made_in_s']} s", flush=True)
        for ranks in numbers:
            if device != "cpu" and ranks > torch.cuda.device_count():
                print(f"{ranks} ranks: left out, there are {torch.cuda.device_count()} GPUs", flush=True)
                continue
            if not arguments.cached:
                drop_pages(first / "captures")
            result["cases"].append(measure(files[ranks], size, ranks=ranks, device=device, limit_s=arguments.limit_s))
            print("CASE", json.dumps(result["cases"][-1]), flush=True)
            said = files[ranks].with_name(f"rank0of{ranks}.log").read_text(errors="replace")
            print("\n".join(line for line in said.splitlines() if "kernels" in line or "ready after" in line), flush=True)
    rates = {case["ranks"]: case["ctx_tokens_per_s"] for case in result["cases"]}
    if 1 in rates and 2 in rates:
        result["ratio_2_over_1"] = round(rates[2] / rates[1], 3)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print({name: value for name, value in result.items() if name != "cases"}, flush=True)


if __name__ == "__main__":
    main()

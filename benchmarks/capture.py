"""Speed of capture on one GPU, beside transformers' own forward, with rows written to a real store.

    python benchmarks/capture.py                      # one H200: Qwen3-8B shape, 27B shape, SmolLM2 if installed
    python benchmarks/capture.py --device cpu --tiny  # the same code on a tiny model, to see that it runs

Writes benchmarks/results/capture_h200.json: ``matmul_tflops`` (8192^3 in bf16), ``cases``, ``ratio_vs_hf`` (tokens/s of
capture with the store over transformers' ``output_hidden_states=True`` with logits, the same batches) and
``fraction_of_matmul``. Tokens and FLOP count real tokens only; padding counts as lost time. Lengths follow the mix of
a real 27,867-batch training set: shares of batches by bucket, lengths even inside a bucket.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_offline.buckets import buckets_of
from dflash_offline.capture.forward import Forwarder
from dflash_offline.capture.job import Backlog, PartJob, run_batches
from dflash_offline.config import StoreConfig
from dflash_offline.corpus import CorpusRow, row_hash
from dflash_offline.identity import default_layer_ids
from dflash_offline.leases import Leases
from dflash_offline.plan import PlannedPart, plan_parts
from dflash_offline.store import PartWriter, create_or_open
from dflash_offline.target import Target, load_target
from dflash_offline.target.load import truncated

EDGES = [770, 1216, 1728, 2432, 3296, 8193]
BATCH_SHARES = [0.039, 0.074, 0.105, 0.150, 0.166, 0.466]
SHORTEST = 96
TAPS = 5
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
SHAPE_27B = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "vocab_size": 248320}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "vocab_size": 512}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Rows:
    """Rows of random tokens with the interface of a corpus."""

    ids: list[np.ndarray]
    edges: list[int]
    files: list[str] = field(default_factory=lambda: ["random"])

    def __post_init__(self) -> None:
        self.lengths = np.array([len(row) for row in self.ids])
        self.buckets = buckets_of(self.lengths, self.edges)
        self.file_index = self.line = np.zeros(len(self.ids), dtype=np.int64)
        self.masks = [np.ones(len(row), dtype=np.uint8) for row in self.ids]
        self.hashes = [row_hash(row, mask) for row, mask in zip(self.ids, self.masks, strict=True)]

    def row(self, index: int) -> CorpusRow:
        return CorpusRow(index, self.ids[index], self.masks[index], self.hashes[index], int(self.buckets[index]), False)


class Bench:
    """Collects cases; times on the device it runs on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.cases: list[dict[str, Any]] = []

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def fresh(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def time(self, function: Callable[[], Any]) -> float:
        self.sync()
        start = time.perf_counter()
        function()
        self.sync()
        return time.perf_counter() - start

    def add(self, name: str, seconds: float, tokens: int, flop: float, **more: Any) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else 0.0
        case = {
            "name": name,
            "tokens_per_s": round(tokens / seconds, 1),
            "tflops": round(flop / seconds / 1e12, 3),
            "peak_gib": round(peak, 2),
            "seconds": round(seconds, 3),
        } | more
        self.cases.append(case)
        print(json.dumps(case), flush=True)
        return case


def make_rows(num_batches: int, tokens_per_batch: int, vocab_size: int, *, scale: float) -> Rows:
    """Rows that make about ``num_batches`` full batches, shared over the buckets as in the real set."""
    generator, edges = np.random.default_rng(0), [max(2, int(edge * scale)) for edge in EDGES]
    ids: list[np.ndarray] = []
    for bucket, share in enumerate(BATCH_SHARES):
        low, high = (max(2, int(SHORTEST * scale)) if bucket == 0 else edges[bucket - 1]), edges[bucket]
        wanted = max(1, round(share * num_batches)) * tokens_per_batch
        filled = 0
        while filled < wanted:
            length = int(generator.integers(low, high))
            ids.append(generator.integers(0, vocab_size, length, dtype=np.int32))
            filled += length
    return Rows(ids, edges)


def layer_flop(config: Any, lengths: np.ndarray, num_layers: int) -> float:
    """FLOP of ``num_layers`` decoder layers on these rows: products of the weights, and causal attention (half the square)."""
    heads = config.num_attention_heads * config.head_dim
    weights = (
        config.hidden_size * (2 * heads + 2 * config.num_key_value_heads * config.head_dim)
        + 3 * config.hidden_size * config.intermediate_size
    )
    return num_layers * (2.0 * weights * lengths.sum() + 2.0 * heads * (lengths.astype(float) ** 2).sum())


def make_config(sizes: dict[str, Any], heads: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(**sizes, **heads, max_position_embeddings=40960, tie_word_embeddings=False)
    config._attn_implementation = "sdpa"
    return config


def build(cls: type[nn.Module], config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Random weights, made where they are used."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return cls(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def make_target(config: Any, device: torch.device, dtype: torch.dtype) -> Target:
    """A target as ``load_target`` would give it: layers up to the last tap, no norm, no head."""
    from transformers import Qwen3Model

    ids = default_layer_ids(config.num_hidden_layers, TAPS)
    model = build(truncated(Qwen3Model, max(ids) + 1, Path("random")), config, device, dtype)
    return Target(model, layers=model.layers, layer_ids=ids, num_layers=config.num_hidden_layers, device=device, dtype=dtype)


def padded(rows: Rows, batch: list[int], device: torch.device) -> torch.Tensor:
    ids = torch.zeros(len(batch), int(rows.lengths[batch].max()), dtype=torch.long)
    for b, row in enumerate(batch):
        ids[b, : rows.lengths[row]] = torch.from_numpy(rows.ids[row].astype(np.int64))
    return ids.to(device)


def first_of_each_bucket(rows: Rows, parts: list[PlannedPart]) -> list[list[int]]:
    """Batches after which every graph and every kernel choice exists: the first of each bucket, and a single row."""
    batches = [batch for part in parts for batch in part.batches]
    firsts = {int(rows.buckets[batch[0]]): batch for batch in reversed(batches)}
    return [*firsts.values(), batches[0][:1]]


def hf_cases(bench: Bench, name: str, config: Any, dtype: torch.dtype, rows: Rows, parts: list[PlannedPart]) -> float:
    """transformers' own forward, whole model, with all logits and with one; tokens/s of the first."""
    from transformers import Qwen3ForCausalLM

    bench.fresh()
    model = build(Qwen3ForCausalLM, config, bench.device, dtype)
    batches = [batch for part in parts for batch in part.batches]
    flop = layer_flop(config, rows.lengths, config.num_hidden_layers)
    results = []
    for label, options in (("", {}), (", logits_to_keep=1", {"logits_to_keep": 1})):

        def forward(batch: list[int], options: dict[str, Any] = options) -> None:
            with torch.inference_mode():
                model(padded(rows, batch, bench.device), output_hidden_states=True, use_cache=False, **options)

        for batch in first_of_each_bucket(rows, parts):
            forward(batch)
        bench.fresh()
        seconds = bench.time(lambda: [forward(batch) for batch in batches])  # noqa: B023
        head = 0.0 if options else 2.0 * config.hidden_size * config.vocab_size * int(rows.lengths.sum())
        results.append(bench.add(f"{name}: transformers output_hidden_states=True{label}", seconds, int(rows.lengths.sum()), flop + head))
    return results[0]["tokens_per_s"]


def capture_case(
    bench: Bench,
    name: str,
    forwarder: Forwarder,
    rows: Rows,
    parts: list[PlannedPart],
    flop: float,
    *,
    folder: Path | None,
    codec: str = "lossless",
) -> dict[str, Any]:
    """Every part through the target; with ``folder``, into a store there, committed."""
    for batch in first_of_each_bucket(rows, parts):
        list(forwarder.run([rows.ids[row] for row in batch], int(rows.buckets[batch[0]])))
    bench.fresh()
    graphs, before = forwarder.num_graphs, (forwarder.tokens, forwarder.padded_tokens)
    backlog = Backlog(3)
    if folder is None:
        seconds = bench.time(lambda: [forward_only(forwarder, rows, part) for part in parts])
    else:
        seconds = bench.time(lambda: to_store(forwarder, rows, parts, folder, codec, backlog))
    tokens, computed = forwarder.tokens - before[0], forwarder.padded_tokens - before[1]
    more: dict[str, Any] = {
        "padding": round(1 - tokens / computed, 5),
        "recompilations": forwarder.num_graphs - graphs,
        "graphs": forwarder.num_graphs,
    }
    if folder is not None:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        more |= {
            "store": str(folder.parent.parent),
            "store_gb": round(size / 1e9, 3),
            "waited_for_the_writer_s": round(backlog.waited_s, 2),
        }
        shutil.rmtree(folder)
    return bench.add(name, seconds, tokens, flop, **more)


def forward_only(forwarder: Forwarder, rows: Rows, part: PlannedPart) -> None:
    for batch in part.batches:
        for _ in forwarder.run([rows.ids[row] for row in batch], int(rows.buckets[batch[0]])):
            pass


def to_store(forwarder: Forwarder, rows: Rows, parts: list[PlannedPart], folder: Path, codec: str, backlog: Backlog) -> None:
    target, settings = forwarder.target, StoreConfig(codec=codec)
    store = folder / "hidden_states.zarr"
    folder.mkdir(parents=True)
    create_or_open(store, {"benchmark": True, "codec": codec, "layer_ids": target.layer_ids})
    leases, jobs = Leases(folder / "leases"), []
    for part in parts:
        writer = PartWriter(
            store,
            part.name,
            store_settings=settings,
            num_taps=len(target.layer_ids),
            hidden_size=target.model.config.hidden_size,
            num_tokens=part.tokens,
            num_samples=len(part.rows),
            threads=max(1, min(8, os.cpu_count() or 1)),
        ).__enter__()
        job = PartJob(writer, leases.claim(part.name), rows, backlog, layer_ids=target.layer_ids, device=target.device)
        jobs.append(job)
        run_batches(part, job, forwarder, rows)
        job.finish({})
        if len(jobs) > 1:
            jobs[-2].wait()
    for job in jobs:
        job.wait()
        if job.error is not None:
            raise job.error
    leases.close()


def matmul_tflops(bench: Bench, dtype: torch.dtype) -> float:
    n = 8192 if bench.is_cuda else 512
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    for _ in range(5):
        a @ b
    rates = [2 * n**3 * 20 / bench.time(lambda: [a @ b for _ in range(20)]) / 1e12 for _ in range(5)]
    return sorted(rates)[2]


def startup(bench: Bench, sizes: dict[str, Any], heads: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Seconds from a loaded target to the end of its first batch. Run in a process of its own; the first compilation of any kind apart."""
    unrelated = bench.time(lambda: torch.compile(lambda x: (x.sin() * 2).sum(-1))(torch.randn(64, 64, device=bench.device)))
    config = make_config(sizes, heads)
    target = make_target(config, bench.device, dtype)
    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=config.vocab_size, say=print)
    ids = [np.arange(length) % config.vocab_size for length in ((2700, 2690, 2650, 2600) if bench.is_cuda else (27, 26, 25, 20))]
    first = bench.time(lambda: list(forwarder.run(ids, 0)))
    single = bench.time(lambda: list(forwarder.run(ids[:1], 0)))
    return {"unrelated_compilation_s": round(unrelated, 2), "first_batch_s": round(first, 2), "first_single_row_s": round(single, 2)}


def measure_startup(arguments: argparse.Namespace) -> dict[str, Any]:
    """Twice in fresh processes with one compile cache: cold, then warm."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            command = [sys.executable, __file__, "--startup", "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
            environment = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / "inductor"),
                "TRITON_CACHE_DIR": str(Path(cache) / "triton"),
            }
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            if result.returncode:
                raise SystemExit(f"startup measurement failed:\n{result.stderr[-3000:]}")
            found[label] = json.loads(result.stdout.splitlines()[-1])
            print("startup", label, found[label], flush=True)
    return found


def loading(bench: Bench, config: Any, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """A checkpoint on disk, loaded for capture and whole: seconds and GB of each."""
    from transformers import Qwen3ForCausalLM

    bench.fresh()
    model = build(Qwen3ForCausalLM, config, bench.device, dtype)
    model.save_pretrained(folder)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    bench.fresh()
    found: dict[str, Any] = {"checkpoint_gb": round(whole / 1e9, 2)}
    for label, keep_head in (("whole", True), ("for_capture", False), ("for_capture_again", False)):
        held: list[Target] = []
        ids = default_layer_ids(config.num_hidden_layers, TAPS)
        options = {"dtype": dtype, "device": bench.device, "attention": "sdpa", "layer_ids": ids, "keep_head": keep_head}
        seconds = bench.time(lambda: held.append(load_target(folder, **options)))  # noqa: B023
        found[label] = {"seconds": round(seconds, 2), "gb": round(held[0].num_bytes / 1e9, 2)}
        held.clear()
        bench.fresh()
    shutil.rmtree(folder)
    print("loading", found, flush=True)
    return found


def shape_cases(
    bench: Bench,
    name: str,
    config: Any,
    dtype: torch.dtype,
    arguments: argparse.Namespace,
    *,
    num_batches: int,
    thorough: bool,
) -> dict[str, Any]:
    """All cases of one shape. Returns tokens/s and TFLOP/s of the best capture into a store, and tokens/s of transformers."""
    budget = 16384 if not arguments.tiny else 128
    rows = make_rows(num_batches, budget, config.vocab_size, scale=0.01 if arguments.tiny else 1.0)
    token_bytes = TAPS * config.hidden_size * 2 * 0.7
    parts = plan_parts(
        np.arange(len(rows.ids)),
        rows.lengths,
        rows.buckets,
        tokens_per_batch=budget,
        tokens_per_part=int(2e9 / token_bytes),
        min_parts=2,
        first_number=0,
    )
    reference = hf_cases(bench, name, config, dtype, rows, parts)
    bench.fresh()
    target = make_target(config, bench.device, dtype)
    flop = layer_flop(config, rows.lengths, max(target.layer_ids) + 1)
    quiet = {"is_hybrid": False, "vocab_size": config.vocab_size, "say": lambda line: print(line, flush=True)}
    if thorough:
        eager = Forwarder(target, compile_layers=False, **quiet)
        capture_case(bench, f"{name}: capture, eager layers, no store", eager, rows, parts, flop, folder=None)
    forwarder = Forwarder(target, compile_layers=True, **quiet)
    capture_case(bench, f"{name}: capture, compiled layers, no store", forwarder, rows, parts, flop, folder=None)
    best: dict[str, Any] = {"tokens_per_s": 0.0, "tflops": 0.0}
    for where in arguments.store_dir:
        if shutil.disk_usage(where).free < 1.5 * rows.lengths.sum() * TAPS * config.hidden_size * 2:
            print(f"{name}: {where} is left out, too little space there", flush=True)
            continue
        for codec in ("lossless", "bf16") if thorough else ("lossless",):
            folder = Path(tempfile.mkdtemp(prefix="capture-benchmark-", dir=where)) / "run"
            case = capture_case(bench, f"{name}: capture into a {codec} store", forwarder, rows, parts, flop, folder=folder, codec=codec)
            folder.parent.rmdir()
            best = max(best, case, key=lambda found: found["tokens_per_s"])
    if thorough and bench.is_cuda:
        del forwarder, target
        torch._dynamo.reset()
        bench.fresh()
        target = make_target(config, bench.device, dtype)
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            other = Forwarder(target, compile_layers=True, **quiet)
            capture_case(bench, f"{name}: capture, compiled layers, cuDNN attention first, no store", other, rows, parts, flop, folder=None)
    return {
        "tokens_per_s": best["tokens_per_s"],
        "tflops": best["tflops"],
        "hf_tokens_per_s": reference,
        "case": f"{best.get('name')} in {best.get('store')}",
    }


def smollm2_case(bench: Bench, dtype: torch.dtype, arguments: argparse.Namespace, folder: Path) -> None:
    """Real weights of a small model: bound by launches rather than by products."""
    target = load_target(folder, dtype=dtype, device=bench.device, attention="sdpa", layer_ids=[1, 8, 14, 20, 27])
    config = target.model.config
    rows = make_rows(24 if bench.is_cuda else 2, 16384 if bench.is_cuda else 256, config.vocab_size, scale=0.5 if bench.is_cuda else 0.02)
    parts = plan_parts(
        np.arange(len(rows.ids)),
        rows.lengths,
        rows.buckets,
        tokens_per_batch=16384 if bench.is_cuda else 256,
        tokens_per_part=200_000,
        min_parts=2,
        first_number=0,
    )
    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=config.vocab_size, say=print)
    flop = layer_flop(config, rows.lengths, len(target.layers))
    capture_case(bench, "SmolLM2-135M: capture, compiled layers, no store", forwarder, rows, parts, flop, folder=None)
    where = Path(tempfile.mkdtemp(prefix="capture-benchmark-", dir=arguments.store_dir[-1])) / "run"
    capture_case(bench, "SmolLM2-135M: capture into a lossless store", forwarder, rows, parts, flop, folder=where)
    where.parent.rmdir()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the real shapes")
    parser.add_argument("--batches", type=int, default=28, help="batches of the 8B shape")
    parser.add_argument("--skip", nargs="*", default=[], choices=["27b", "smollm2", "startup", "loading"], help="leave these out")
    parser.add_argument("--smollm2", type=Path, help="folder of the converted SmolLM2; found by itself where the demo model is installed")
    parser.add_argument(
        "--store-dir", nargs="*", help="folders to write stores into; by default the temporary folder, and memory where there is /dev/shm"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "capture_h200.json")
    parser.add_argument("--startup", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.store_dir:
        arguments.store_dir = [tempfile.gettempdir(), *(["/dev/shm"] if os.access("/dev/shm", os.W_OK) else [])]
    return arguments


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(1)
    bench = Bench(device)
    sizes, heads = (TINY, TINY_HEADS) if arguments.tiny else (QWEN3_8B, HEADS)
    if arguments.startup:
        print(json.dumps(startup(bench, sizes, heads, dtype)))
        return
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if bench.is_cuda else "cpu",
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
    }
    if "startup" not in arguments.skip:
        result["startup"] = measure_startup(arguments)
    result["matmul_tflops"] = round(matmul_tflops(bench, dtype), 1 if bench.is_cuda else 4)
    print("matmul", result["matmul_tflops"], "TFLOP/s", flush=True)
    config = make_config(sizes, heads)
    if "loading" not in arguments.skip:
        result["loading"] = loading(bench, config, dtype, Path(tempfile.mkdtemp(prefix="capture-benchmark-")) / "model")
    name = "tiny" if arguments.tiny else "Qwen3-8B shape"
    main_case = shape_cases(bench, name, config, dtype, arguments, num_batches=arguments.batches, thorough=True)
    result |= {
        "ratio_vs_hf": round(main_case["tokens_per_s"] / main_case["hf_tokens_per_s"], 3),
        "fraction_of_matmul": round(main_case["tflops"] / result["matmul_tflops"], 3),
        "headline": main_case["case"],
        "cases": bench.cases,
    }

    def save() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    save()  # what comes below may not fit this machine
    if "27b" not in arguments.skip and not arguments.tiny:
        torch._dynamo.reset()
        found = shape_cases(bench, "27B shape", make_config(SHAPE_27B, HEADS), dtype, arguments, num_batches=8, thorough=False)
        result["27b"] = {
            "ratio_vs_hf": round(found["tokens_per_s"] / found["hf_tokens_per_s"], 3),
            "fraction_of_matmul": round(found["tflops"] / result["matmul_tflops"], 3),
        }
        save()
    if "smollm2" not in arguments.skip:
        torch._dynamo.reset()
        folder = arguments.smollm2
        if folder is None:
            from dflash_offline import demo
            from dflash_offline.errors import TargetError

            try:
                folder = demo.ensure_converted()
            except TargetError as error:
                print(f"SmolLM2 left out: {error}", flush=True)
        if folder is not None:
            smollm2_case(bench, dtype, arguments, folder)
            save()
    print(json.dumps({name: value for name, value in result.items() if name != "cases"}, indent=1))


if __name__ == "__main__":
    main()

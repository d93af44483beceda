"""What the capture benchmark works on: rows of random tokens with a real length mix, targets with random weights, FLOP.

Lengths follow a real 27,867-batch training set: shares of batches by bucket, lengths even inside a bucket.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash_offline.buckets import buckets_of
from dflash_offline.corpus import CorpusRow, row_hash
from dflash_offline.identity import default_layer_ids
from dflash_offline.plan import PlannedPart, plan_parts
from dflash_offline.target import Target
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
    """Collects cases; times on the device it runs on. ``save`` is called after each case: a run may be cut short."""

    def __init__(self, device: torch.device, save: Callable[[], None] = lambda: None) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self.cases: list[dict[str, Any]] = []
        self.save, self.began = save, time.perf_counter()
        self.measured = time.strftime("%Y-%m-%d %H:%M", time.gmtime())

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

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def add(self, name: str, seconds: float, tokens: int, flop: float, **more: Any) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else 0.0
        case = {
            "name": name,
            "tokens_per_s": round(tokens / seconds, 1),
            "tflops": round(flop / seconds / 1e12, 3),
            "peak_gib": round(peak, 2),
            "seconds": round(seconds, 3),
            "measured": self.measured,
        } | more
        self.cases.append(case)
        self.say(json.dumps(case))
        self.save()
        return case


def make_rows(num_batches: int, tokens_per_batch: int, vocab_size: int, *, scale: float) -> Rows:
    """Rows that make about ``num_batches`` full batches, shared over the buckets as in the real set."""
    generator, edges = np.random.default_rng(0), [max(2, int(edge * scale)) for edge in EDGES]
    ids: list[np.ndarray] = []
    for bucket, share in enumerate(BATCH_SHARES):
        low, high = (max(2, int(SHORTEST * scale)) if bucket == 0 else edges[bucket - 1]), edges[bucket]
        wanted, filled = max(1.0, share * num_batches) * tokens_per_batch, 0
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


def plan(rows: Rows, *, budget: int, packed: bool, token_bytes: float) -> list[PlannedPart]:
    """Parts as a real plan would cut them."""
    return plan_parts(
        np.arange(len(rows.ids)),
        rows.lengths,
        rows.buckets,
        tokens_per_batch=budget,
        tokens_per_part=int(2e9 / token_bytes),
        min_parts=2,
        first_number=0,
        packed=packed,
    )


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


def kernel_times(bench: Bench, function: Callable[[], Any], *, most: int = 14) -> list[dict[str, Any]]:
    """Where the GPU's time goes while ``function`` runs: kernels by their share of all kernels' time."""
    if not bench.is_cuda:
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = bench.time(function)
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events)
    events.sort(key=lambda event: -event.self_device_time_total)
    table = [{"kernel": "all", "ms": round(total / 1e3, 2), "wall_ms": round(1e3 * seconds, 2)}]
    for event in events[:most]:
        share = event.self_device_time_total / total
        table.append(
            {"kernel": event.key[:90], "ms": round(event.self_device_time_total / 1e3, 2), "share": round(share, 4), "calls": event.count}
        )
    for line in table:
        bench.say(json.dumps(line))
    return table


def attention_rates(bench: Bench, config: Any, dtype: torch.dtype) -> list[dict[str, Any]]:
    """TFLOP/s of attention kernels on batches of 16,384 tokens: the packed one that capture uses, and others for the same rows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dflash_offline.target import packed

    packed.register()
    heads, groups, size, found = config.num_attention_heads, config.num_key_value_heads, config.head_dim, []
    for lengths in ((8192, 8192), (4096,) * 4, (1024,) * 16) if bench.is_cuda else ((64, 64),):
        total, flop = sum(lengths), 2.0 * heads * size * sum(length**2 for length in lengths)
        q = torch.randn(total, heads, size, device=bench.device, dtype=dtype)
        k, v = (torch.randn(total, groups, size, device=bench.device, dtype=dtype) for _ in range(2))
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=bench.device)
        edges = bounds.cpu()
        dense = [x.view(len(lengths), lengths[0], -1, size).transpose(1, 2) for x in (q, k, v)]
        repeated = [q, k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)]

        def ours(q: Any = q, k: Any = k, v: Any = v, bounds: Any = bounds, edges: Any = edges, longest: int = max(lengths)) -> Any:
            return torch.ops.dflash_offline.rows_attention(q, k, v, bounds, edges, longest, size**-0.5, 0)

        def padded_by(backend: SDPBackend, dense: Any = dense) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

        def cudnn_packed(three: Any = repeated, bounds: Any = bounds, n: int = max(lengths)) -> Any:
            return torch.ops.aten._cudnn_attention_forward(*three, None, bounds, bounds, n, n, True, 0.0, True, False, scale=size**-0.5)

        more = torch.cat([bounds, bounds[-1:].expand(33 - len(bounds))])  # rows without tokens: one shape for any number of rows

        def cudnn_one_shape(three: Any = repeated, bounds: Any = more) -> Any:
            return torch.ops.aten._cudnn_attention_forward(
                *three, None, bounds, bounds, 8192, 8192, True, 0.0, True, False, scale=size**-0.5
            )

        kernels = {"packed, flash (in use)": ours}
        if bench.is_cuda:
            kernels |= {
                "padded, flash": lambda: padded_by(SDPBackend.FLASH_ATTENTION),
                "padded, cuDNN": lambda: padded_by(SDPBackend.CUDNN_ATTENTION),
                "packed, cuDNN": cudnn_packed,
                "packed, cuDNN, 32 rows of up to 8192": cudnn_one_shape,
            }
        want = ours().float()
        for name, kernel in kernels.items():
            try:
                began = time.perf_counter()
                got = kernel()
                bench.sync()
                first = time.perf_counter() - began
                for _ in range(3):
                    kernel()
                seconds = bench.time(lambda: [kernel() for _ in range(10)]) / 10  # noqa: B023
            except Exception as error:  # a kernel that this machine lacks is a result too
                found.append({"kernel": name, "rows": list(lengths), "error": str(error).splitlines()[0][:160]})
            else:
                got = got if isinstance(got, torch.Tensor) else got[0]
                got = got.transpose(1, 2) if got.dim() == 4 else got
                found.append(
                    {
                        "kernel": name,
                        "rows": list(lengths),
                        "ms": round(1e3 * seconds, 3),
                        "tflops": round(flop / seconds / 1e12, 1),
                        "first_call_s": round(first, 3),
                        "largest_difference": round(float((got.float().reshape(want.shape) - want).abs().max()), 5),
                    }
                )
            bench.say(json.dumps(found[-1]))
    return found

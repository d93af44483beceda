"""Check and time the parts of a training step on one GPU: attention paths and their tiles, the head, the products.

    python benchmarks/attention_kernels.py [--out FILE] [--sections check,tiles,flex,head,products]

For tuning: it says where the time of ``train_step.py`` goes and which tiles of the attention kernels are fastest. Kernels
are compiled by several processes at once beforehand, so that a sweep takes minutes, not tens of them. A short table
comes last; everything goes to FILE as JSON.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from dflash_offline.attention import BlockLayout, make_attention, prove
from dflash_offline.attention.flex import FlexAttention
from dflash_offline.attention.intervals import (
    IntervalAttention,
    Tiles,
    launch_block_gradient,
    launch_context_gradient,
    launch_forward,
    launch_query_gradient,
)
from dflash_offline.attention.proof import random_states, small_case
from dflash_offline.objective import FrozenHead

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_work import WORKS, Work, make_batches, make_tensors  # noqa: E402

# rows, keys, warps, stages (and splits)
FORWARD = [
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 4, 2),
    (64, 128, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (128, 32, 4, 3),
]
QUERY = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3)]
CONTEXT = [
    (64, 128, 8, 3, 2), (64, 128, 8, 2, 2), (64, 128, 8, 3, 1), (64, 128, 8, 3, 4), (32, 128, 8, 3, 2), (32, 128, 4, 3, 2),
    (64, 64, 4, 2, 2), (64, 64, 4, 3, 1), (64, 64, 4, 3, 2), (32, 64, 4, 3, 1), (128, 128, 8, 2, 2), (128, 64, 8, 2, 1),
]  # fmt: skip
FLEX = [
    None,
    {"BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32},
    {"BLOCK_M1": 64, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 64, "bwd_num_warps": 8, "bwd_num_stages": 2},
    {"BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32, "bwd_num_warps": 8, "bwd_num_stages": 3},
]
GEOMETRIES = [(32, 8, 128, 16), (9, 3, 64, 16), (40, 8, 128, 16), (8, 8, 64, 8), (10, 2, 80, 10), (16, 2, 128, 16)]


def tiles_of(kernel: str, setting: tuple[int, ...], base: Tiles | None = None) -> Tiles:
    """``base`` (the default tiles) with those of one kernel replaced."""
    name = {"forward": "forward", "query": "query", "context": "key"}[kernel]
    fields = ["rows", "keys", "warps", "stages", "splits"][: len(setting)]
    return replace(base or Tiles(), **{f"{name}_{field}": value for field, value in zip(fields, setting, strict=True)})


def sweep() -> Iterator[tuple[str, tuple[int, ...]]]:
    for kernel, settings in (("forward", FORWARD), ("query", QUERY), ("context", CONTEXT)):
        yield from ((kernel, setting) for setting in settings)


class Launches:
    """The four kernels on one case, each callable alone."""

    def __init__(self, blocks: BlockLayout, heads: int, kv_heads: int, width: int) -> None:
        self.blocks, self.device = blocks, torch.device("cuda")
        self.states = random_states(blocks, heads, kv_heads, width, torch.bfloat16, self.device)
        self.gradient = torch.randn_like(self.states[0])
        plan = IntervalAttention().plan(blocks, None)
        self.out, self.normaliser = launch_forward(self.states, plan, Tiles())
        self.delta = launch_query_gradient(self.states, self.out, self.gradient, self.normaliser, plan, Tiles())[1]

    def kernel(self, name: str, tiles: Tiles) -> Callable[[], Any]:
        plan, backward = IntervalAttention(tiles).plan(self.blocks, None), (self.gradient, self.normaliser)
        return {
            "forward": lambda: launch_forward(self.states, plan, tiles),
            "query": lambda: launch_query_gradient(self.states, self.out, *backward, plan, tiles),
            "context": lambda: launch_context_gradient(self.states, *backward, self.delta, plan, tiles),
            "block": lambda: launch_block_gradient(self.states, *backward, self.delta, plan),
        }[name]


def compile_one(task: tuple[str, tuple[int, ...]]) -> str:
    """In a process of its own: compile one kernel on a small case; the shared cache keeps it."""
    try:
        launches = Launches(small_case(16).to("cuda"), 32, 8, 128)
        launches.kernel(task[0], tiles_of(*task))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def milliseconds(call: Callable[[], Any], *, repeats: int = 12) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def tried(call: Callable[[], Any]) -> Any:
    """The result, or the reason why there is none."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def check_one(task: tuple[str, tuple[int, ...], bool]) -> str:
    """In a process of its own: relative errors of one path on one head geometry."""
    path, (heads, kv_heads, width, size), real = task
    sizes = {"num_context": 3072, "num_blocks": 512} if real else {}
    windows = {None, 70} if path == "triton" and size == 16 else {None}
    proof = functools.partial(
        prove, make_attention(path), heads=heads, kv_heads=kv_heads, head_dim=width, block_size=size, windows=windows,
        dtype=torch.bfloat16, device=torch.device("cuda"), **sizes,
    )  # fmt: skip
    return str(tried(proof))


def check(work: Work) -> dict[str, Any]:
    """Both GPU paths against the dense reference, over head geometries and windows; exact repeats; speed of the real shape."""
    tasks = [("triton", geometry, False) for geometry in GEOMETRIES] + [("flex", geometry, False) for geometry in GEOMETRIES[:2]]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(check_one, tasks))
    for path in ("triton", "flex"):
        tasks.append((path, GEOMETRIES[0], True))
        outcomes.append(check_one(tasks[-1]))
    found: dict[str, Any] = {" ".join(map(str, task)): said for task, said in zip(tasks, outcomes, strict=True)}
    launches = work_launches(work)
    for kernel in ("forward", "query", "context", "block"):
        first, again = launches.kernel(kernel, Tiles())(), launches.kernel(kernel, Tiles())()
        found[f"{kernel} repeats to the last bit"] = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return found


def work_launches(work: Work) -> Launches:
    """The kernels on the attention case of ``work``."""
    shape = work.shape
    light = replace(work, shape=replace(shape, vocab_size=64, hidden_size=8))  # the blocks do not depend on these
    blocks = make_batches(light, make_tensors(light, "cpu", torch.float32), 1)[0].blocks
    return Launches(blocks.to("cuda"), shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)


def pair_flops(work: Work, blocks: BlockLayout) -> float:
    """Operations of one product over all visible pairs of query and key."""
    shape = work.shape
    visible = (blocks.context_end - blocks.context_start).sum().item() + blocks.num_live * shape.block_size
    return 2.0 * visible * shape.block_size * shape.num_attention_heads * shape.head_dim


def tiles(work: Work) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of every tile setting of every kernel, and of the whole with the best ones."""
    tasks = list(sweep())
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        reasons = dict(zip(tasks, pool.map(compile_one, tasks), strict=True))
    launches = work_launches(work)
    products, found, best = {"forward": 2, "query": 3, "context": 4}, {}, {}
    flops = pair_flops(work, launches.blocks)
    for kernel, setting in tasks:
        name = f"{kernel} {setting}"
        if reasons[kernel, setting]:
            found[name] = reasons[kernel, setting]
            continue
        taken = tried(lambda kernel=kernel, setting=setting: milliseconds(launches.kernel(kernel, tiles_of(kernel, setting))))
        found[name] = taken if isinstance(taken, str) else {"ms": round(taken, 3), "tflops": round(products[kernel] * flops / taken / 1e9)}
        if not isinstance(taken, str) and taken < best.get(kernel, (1e9, ()))[0]:
            best[kernel] = (taken, setting)
    found["block"] = {"ms": round(milliseconds(launches.kernel("block", Tiles())), 3)}
    for label, chosen in (
        ("default tiles", Tiles()),
        ("best tiles", best_tiles({kernel: setting for kernel, (_, setting) in best.items()})),
    ):
        found[f"forward and backward, {label}"] = {"ms": round(both_passes(IntervalAttention(chosen), launches), 3), "tiles": str(chosen)}
    return found


def best_tiles(best: dict[str, tuple[int, ...]]) -> Tiles:
    """All kernels with the settings found fastest."""
    chosen = Tiles()
    for kernel, setting in best.items():
        chosen = tiles_of(kernel, setting, chosen)
    return chosen


def both_passes(attention: Any, launches: Launches) -> float:
    plan, leaves = attention.plan(launches.blocks, None), [state.clone().requires_grad_() for state in launches.states]
    return milliseconds(lambda: torch.autograd.grad(attention.attend(*leaves, plan), leaves, launches.gradient))


def flex(work: Work) -> dict[str, Any]:
    """flex_attention on the same case, forward alone and both passes."""
    launches, found = work_launches(work), {}
    for options in FLEX:
        attention = FlexAttention(options)
        plan = attention.plan(launches.blocks, None)
        forward = tried(lambda attention=attention, plan=plan: milliseconds(lambda: attention.attend(*launches.states, plan)))
        both = tried(lambda attention=attention: both_passes(attention, launches))
        found[f"flex {options or 'defaults'}"] = {"forward_ms": forward, "ms": both}
    found["plan of flex"] = {"ms": round(milliseconds(lambda: FlexAttention().plan(launches.blocks, None)), 3)}
    found["plan of triton"] = {"ms": round(milliseconds(lambda: IntervalAttention().plan(launches.blocks, None)), 3)}
    return found


def head(work: Work) -> dict[str, Any]:
    """The head's products and the kernels over the logits, for several chunk sizes; milliseconds for all rows of a step."""
    shape, total = work.shape, work.anchors * (work.shape.block_size - 1)
    weight = torch.randn(shape.vocab_size, shape.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    transposed, fp8 = weight.t().contiguous(), FrozenHead(weight, precision="fp8")
    return {f"head in {parts} chunks": head_chunk(total // parts, parts, weight, transposed, fp8) for parts in (1, 2, 4, 8)}


def head_chunk(rows: int, parts: int, weight: torch.Tensor, transposed: torch.Tensor, fp8: FrozenHead) -> dict[str, Any]:
    from dflash_offline.objective import kernels

    hidden = torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    logits, out = hidden @ weight.t(), torch.empty_like(hidden)
    labels, weights = torch.randint(0, weight.shape[0], (rows,), device="cuda"), torch.rand(rows, device="cuda")
    stats = kernels.statistics(logits, labels)
    by8, scale = kernels.gradient(logits, stats, labels, weights, None, 0.0, fp8=True)
    calls = {
        "logits": lambda: torch.mm(hidden, weight.t(), out=logits),
        "logits, transposed copy": lambda: torch.mm(hidden, transposed, out=logits),
        "input gradient": lambda: torch.mm(logits, weight, out=out),
        "input gradient, transposed copy": lambda: torch.mm(logits, transposed.t(), out=out),
        "statistics": lambda: kernels.statistics(logits, labels),
        "gradient": lambda: kernels.gradient(logits, stats, labels, weights, None, 0.0, fp8=False),
        "fp8 logits": lambda: fp8.logits(hidden),
        "fp8 gradient": lambda: kernels.gradient(logits, stats, labels, weights, None, 0.0, fp8=True),
        "fp8 input gradient": lambda: fp8.input_gradient(by8, scale, out),
    }
    times = {name: tried(functools.partial(milliseconds, call)) for name, call in calls.items()}
    return {name: value if isinstance(value, str) else round(value * parts, 2) for name, value in times.items()}


def products(work: Work) -> dict[str, Any]:
    """Every matrix product of the step alone: ms and TFLOP/s, forward, input gradient, weight gradient."""
    shape, found = work.shape, {}
    slots, hidden = work.anchors * shape.block_size, shape.hidden_size
    kv_width, width = shape.num_key_value_heads * shape.head_dim, shape.num_attention_heads * shape.head_dim
    sizes = {
        "query": (slots, hidden, width), "key or value": (slots, hidden, kv_width), "context key or value": (3072, hidden, kv_width),
        "context key and value, all layers": (3072, hidden, 2 * shape.num_layers * kv_width), "output": (slots, width, hidden),
        "gate or up": (slots, hidden, shape.intermediate_size), "gate and up": (slots, hidden, 2 * shape.intermediate_size),
        "down": (slots, shape.intermediate_size, hidden), "fc": (3072, len(shape.target_layer_ids) * hidden, hidden),
        "square 8192": (8192, 8192, 8192),
    }  # fmt: skip
    for name, (rows, inner, columns) in sizes.items():
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
        y = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        calls = {"forward": lambda x=x, w=weight: x @ w.t(), "input": lambda y=y, w=weight: y @ w, "weight": lambda x=x, y=y: y.t() @ x}
        times = {which: milliseconds(call) for which, call in calls.items()}
        flops = 2 * rows * inner * columns
        found[f"product {name}"] = {which: f"{ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s" for which, ms in times.items()}
    return found


SECTIONS: dict[str, Callable[[Work], dict[str, Any]]] = {"check": check, "tiles": tiles, "flex": flex, "head": head, "products": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--work", default="qwen3-8b", choices=[work.name for work in WORKS])
    parser.add_argument("--out", type=Path, default=Path("attention_kernels.json"))
    arguments = parser.parse_args()
    work = next(work for work in WORKS if work.name == arguments.work)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "work": work.name}
    for name in arguments.sections.split(","):
        result[name] = tried(lambda name=name: SECTIONS[name](work))
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
        print(f"== {name}", flush=True)
        for key, value in result[name].items() if isinstance(result[name], dict) else [("failed", result[name])]:
            print(f"{key:44} {value}", flush=True)


if __name__ == "__main__":
    main()

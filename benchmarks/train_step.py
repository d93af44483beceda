"""Speed of one drafter training step on one GPU, beside SpecForge and speculators, on identical tensors.

    python benchmarks/train_step.py --peers PEERS          # one H200; PEERS: folder with specforge (and speculators)
    python benchmarks/train_step.py --device cpu --tiny    # the same code on a tiny shape, to see that it runs

Forward and backward pass, no optimiser, bf16. Writes benchmarks/results/train_h200.json: ``cases`` (ms a step, context
tokens/s, TFLOP/s by the count of :func:`step_flops`, peak memory, seconds to the first step), ``ratio_vs_specforge``
and ``fraction_of_matmul`` of the main case, and the same step's first run in fresh processes with a cold and a warm
compile cache. A peer that does not run here is listed under ``failed`` with the reason. The package never imports one.

Peers: ``pip install --no-deps --target PEERS specforge==0.2.0 speculators==0.9.0`` and what they need.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_offline.attention.proof import random_states, small_case
from dflash_offline.drafter import Drafter
from dflash_offline.objective import FrozenHead, Objective, block_loss

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dflash_peers  # noqa: E402
from matrix_rate import matrix_rates  # noqa: E402
from train_work import TINY, WORKS, Tensors, Work, make_batches, make_tensors, step_flops  # noqa: E402

Step = Callable[[int], Any]
Made = tuple[Step, nn.Module]  # a step and the model it trains
RESULT = Path(__file__).resolve().parent / "results" / "train_h200.json"


@dataclass(frozen=True)
class Ours:
    """One way to run this project's step."""

    name: str
    attention: str = "triton"
    head_precision: str = "bf16"


def variations(work: Work, device: str) -> list[Ours]:
    """The ways to time; the first is the one that counts."""
    if device == "cpu":
        return [Ours("sdpa", attention="sdpa")]
    if work.name != "qwen3-8b":
        return [Ours("triton"), Ours("triton, fp8 head", head_precision="fp8")]
    return [
        Ours("triton"),
        Ours("triton, fp8 head", head_precision="fp8"),
        Ours("flex", attention="flex"),
    ]


def our_step(work: Work, tensors: Tensors, ours: Ours, *, compiled: bool) -> Made:
    """``step(i)`` runs a forward and a backward pass on the i-th micro-batch."""
    device, dtype = tensors.hidden.device, tensors.hidden.dtype
    with torch.device(device):
        drafter = Drafter(work.shape, attention=ours.attention).to(dtype)
    if compiled:
        drafter.compile_layers()
        if drafter.attention.name == "triton":  # as training does before its first step
            blocks, shape = small_case(work.shape.block_size).to(device), work.shape
            sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
            drafter.attention.compile_kernels(random_states(blocks, *sizes, dtype, device), blocks, set(shape.layer_windows))
    head, objective = FrozenHead(tensors.head, precision=ours.head_precision), Objective()
    batches = make_batches(work, tensors, 4)
    mask_row = tensors.embedding[work.shape.mask_token_id]

    def step(index: int) -> Tensor:
        drafter.zero_grad(set_to_none=True)
        batch = batches[index % len(batches)]
        blocks = batch.blocks.to(device, non_blocking=True)
        labels, supervised = (values.to(device, non_blocking=True) for values in (batch.labels, batch.supervised))
        anchors = tensors.embedding[tensors.input_ids[blocks.context_end]]
        hidden = drafter(tensors.hidden, anchors, blocks, mask_embedding=mask_row, trained_slots_only=True)
        out = block_loss(hidden, head, labels, supervised, objective=objective, num_live=blocks.num_live)
        (out.loss_sum / out.weight_sum).backward()
        return out.loss_sum.detach() / out.weight_sum

    return step, drafter


def seconds_of(step: Step, device: str, *, repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` steps, one after the other as in training: the host never waits between them."""
    if device == "cpu":
        found = []
        for index in range(repeats):
            begin = time.perf_counter()
            step(index)
            found.append(time.perf_counter() - begin)
        return found
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for index in range(repeats):
        step(index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]


@contextlib.contextmanager
def released(device: str) -> Iterator[None]:
    """Run with empty caches, and leave none."""
    for _ in range(2):
        gc.collect()
        torch._dynamo.reset()
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    yield


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """
    Raises:
        TimeoutError: the block is not done after so many seconds (a peer whose compilation does not end, say).
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def release(model: nn.Module) -> None:
    """Give back the memory of a model that caches of the compiler may still refer to; frozen tables are the benchmark's."""
    for parameter in model.parameters():
        parameter.grad = None
        if parameter.requires_grad:
            parameter.untyped_storage().resize_(0)


def measure(name: str, work: Work, device: str, make: Callable[[], Made], *, repeats: int) -> dict[str, Any]:
    """One case of the result."""
    with released(device):
        begin = time.perf_counter()
        step, model = make()
        first_loss = float(step(0))
        first_step_s = time.perf_counter() - begin
        seconds_of(step, device, repeats=4)
        seconds = statistics.median(seconds_of(step, device, repeats=repeats))
        peak = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
        release(model)
    case = {
        "name": name, "work": work.name, "ms": round(seconds * 1e3, 2), "ctx_tokens_per_s": round(sum(work.lengths) / seconds),
        "tflops": round(step_flops(work) / seconds / 1e12, 1), "peak_gib": round(peak / 2**30, 2), "first_step_s": round(first_step_s, 1),
        "first_loss": round(first_loss, 4),
    }  # fmt: skip
    print("CASE", json.dumps(case), flush=True)
    return case


def warm_up_compiler(device: str) -> float:
    """Seconds of a tiny unrelated compilation: the first one on a fresh machine can take minutes by itself."""
    begin = time.perf_counter()
    if device != "cpu":
        torch.compile(lambda x: (x.sin() + 1).sum())(torch.ones(64, device=device, requires_grad=True)).backward()
    return time.perf_counter() - begin


def first_steps(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first step of the main case in fresh processes: cold compile cache, then warm.

    ``*_cache_s``: from the model's making on; ``*_process_s``: from the process's start, with imports and tensors, but without the
    unrelated first compilation, ``*_unrelated_s``.
    """
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name in ("cold", "warm"):
            command = [sys.executable, __file__, "--device", arguments.device, "--first-step-only", *(["--tiny"] if arguments.tiny else [])]
            begin = time.perf_counter()
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
            if ran.returncode:
                print(f"first step, {name} cache: failed: {ran.stderr[-500:]}", flush=True)
                continue
            step_s, unrelated_s = map(float, ran.stdout.split("FIRST_STEP_S")[1].split()[:2])
            found[f"{name}_cache_s"], found[f"{name}_unrelated_s"] = step_s, unrelated_s
            found[f"{name}_process_s"] = round(time.perf_counter() - begin - unrelated_s, 1)
    return found


def profile(step: Step, file: Path) -> None:
    """Write the kernels of one step, by time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as seen:
        step(0)
        torch.cuda.synchronize()
    table = seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=100)
    file.write_text(table)
    print("\n".join(line[:101] + line[-60:] for line in table.splitlines()[:26]), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape")
    parser.add_argument("--peers", type=Path, help="folder with the peers' packages")
    parser.add_argument("--works", help="comma-separated names, or none; all when left out")
    parser.add_argument("--only", help="run only what has a name that contains one of these, by commas")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=120.0, help="most seconds of one case, compilation included")
    parser.add_argument("--skip-first-steps", action="store_true", help="leave out the fresh processes")
    parser.add_argument("--profile", type=Path, help="file for the kernel table of the main case")
    parser.add_argument(
        "--merge", type=Path, nargs="*", default=[], help="results of other calls to take in; with --works none, into --out as it is"
    )
    parser.add_argument("--first-step-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="result file; when left out, none is written for a tiny shape or a CPU")
    arguments = parser.parse_args(argv)
    if arguments.out is None and arguments.device != "cpu" and not arguments.tiny:
        arguments.out = RESULT
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    device, dtype = arguments.device, torch.float32 if arguments.device == "cpu" else torch.bfloat16
    works = [TINY] if arguments.tiny else [work for work in WORKS if arguments.works is None or work.name in arguments.works.split(",")]
    if device == "cpu":
        torch.set_num_threads(1)  # two threads on shared cores run several times slower than one
    if arguments.first_step_only:
        unrelated = warm_up_compiler(device)
        begin = time.perf_counter()
        step, _ = our_step(works[0], make_tensors(works[0], device, dtype), variations(works[0], device)[0], compiled=device != "cpu")
        float(step(0))
        print("FIRST_STEP_S", round(time.perf_counter() - begin, 1), round(unrelated, 1))
        return
    if not works and arguments.merge:
        result = json.loads(arguments.out.read_text())
        merge(result, arguments.merge)
        save(result, arguments.out)
        return
    result: dict[str, Any] = {
        "device": device if device == "cpu" else torch.cuda.get_device_name(), "torch": torch.__version__,
        "tiny_compile_s": round(warm_up_compiler(device), 1), **matrix_rates(device, dtype),
        "cases": [], "failed": {},
    }  # fmt: skip
    print({name: value for name, value in result.items() if name not in ("cases", "failed")}, flush=True)
    merge(result, arguments.merge)
    for work in works:
        run_work(work, arguments, dtype, result)
    if not arguments.skip_first_steps:
        result["first_step"] = first_steps(arguments)
    save(result, arguments.out)
    print_table(result)


def run_work(work: Work, arguments: argparse.Namespace, dtype: torch.dtype, result: dict[str, Any]) -> None:
    """Time every implementation on one piece of work; adds to ``result``."""
    device, tensors = arguments.device, make_tensors(work, arguments.device, dtype)
    runs: dict[str, Callable[[], Made]] = {}
    for ours in variations(work, device):
        runs[ours.name] = functools.partial(our_step, work, tensors, ours, compiled=device != "cpu")
    for name, make in dflash_peers.PEERS.items() if arguments.peers else ():
        runs[name] = functools.partial(make, arguments.peers, work, tensors)
    for name, make in runs.items():
        if arguments.only and not any(part in name for part in arguments.only.split(",")):
            continue
        try:
            with at_most(arguments.limit_s):
                result["cases"].append(measure(name, work, device, make, repeats=arguments.repeats))
            if arguments.profile and len(result["cases"]) == 1:
                with released(device):
                    step, model = make()
                    seconds_of(step, device, repeats=3)
                    profile(step, arguments.profile)
                    release(model)
        except Exception as error:  # a peer, or a variation, that does not run here is a result too
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            result["failed"][f"{work.name}: {name}"] = reason
            print("FAILED", work.name, name, reason, flush=True)
        save(result, arguments.out)


def summarise(result: dict[str, Any]) -> None:
    """Ratios against SpecForge on each piece of work; of the main one also the share of the matrix rate.

    This project is its first variation: bf16, exact, default settings.
    """
    found: dict[str, dict[str, Any]] = {}
    for case in result["cases"]:
        found.setdefault(case["work"], {})[case["name"]] = case
    ours, theirs = variations(WORKS[0], "cpu" if result["device"] == "cpu" else "cuda")[0].name, "specforge-0.2.0"
    both = {work: cases for work, cases in found.items() if ours in cases and theirs in cases}
    result["ratios_vs_specforge"] = {
        work: {name: round(cases[theirs]["ms"] / case["ms"], 3) for name, case in cases.items() if name != theirs}
        for work, cases in both.items()
    }
    for work in [each for each in (*WORKS, TINY) if ours in found.get(each.name, {})][:1]:
        main_case = found[work.name][ours]
        result["floor_ms"] = round(step_flops(work) / result["matmul_tflops"] / 1e9, 1)
        result["fraction_of_matmul"] = round(main_case["tflops"] / result["matmul_tflops"], 3)
        result["fraction_of_sustained_matmul"] = round(main_case["tflops"] / result["matmul_sustained_tflops"], 3)
        if work.name in both:
            result["ratio_vs_specforge"] = result["ratios_vs_specforge"][work.name][ours]


def save(result: dict[str, Any], path: Path | None) -> None:
    """After every case: a run that is cut short keeps what it has measured."""
    summarise(result)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def merge(result: dict[str, Any], others: list[Path]) -> None:
    """Take in what other calls on this kind of device measured: cases of other pieces of work, first steps."""
    for path in others:
        other = json.loads(path.read_text())
        if other["device"] != result["device"]:
            sys.exit(f"--merge {path}: measured on {other['device']}, not on {result['device']}")
        result["cases"] += other["cases"]
        result["failed"] |= other["failed"]
        result |= {"first_step": other["first_step"]} if "first_step" in other else {}


def print_table(result: dict[str, Any]) -> None:
    for case in result["cases"]:
        print(
            f"{case['work']:16} {case['name']:24} {case['ms']:9.1f} ms {case['ctx_tokens_per_s'] / 1e3:8.1f} Kctx/s"
            f" {case['tflops']:7.1f} TFLOP/s {case['peak_gib']:6.1f} GiB  first {case['first_step_s']:6.1f} s  loss {case['first_loss']}"
        )
    for name, reason in result["failed"].items():
        print("failed:", name, reason[:200])
    print({name: value for name, value in result.items() if name not in ("cases", "failed")})


if __name__ == "__main__":
    main()

"""Speed of capture on one GPU, beside transformers' own forward, with rows written to a real store.

    python benchmarks/capture.py                             # one H200: Qwen3-8B shape, 27B shape, SmolLM2 if installed
    python benchmarks/capture.py --only main attention       # the main case, about three minutes
    python benchmarks/capture.py --device cpu --tiny         # the same code on a tiny model, to see that it runs

Writes benchmarks/results/capture_h200.json after every case: ``matmul_tflops`` (8192^3 in bf16, see matrix_rate.py), ``cases``,
``ratio_vs_hf`` (tokens/s of capture with the store over transformers' ``output_hidden_states=True`` with logits, the same
rows in bucketed, padded batches) and ``fraction_of_matmul``. Tokens and FLOP count real tokens only, of the layers that
ran; padding counts as lost time. Seconds of a case with a store end when its last part is committed. Cases and sections
that are left out keep what the file says of them; ``measured`` tells runs apart.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture_work import (
    HEADS,
    QWEN3_8B,
    SHAPE_27B,
    TAPS,
    TINY,
    TINY_HEADS,
    Bench,
    Rows,
    attention_rates,
    build,
    first_of_each_bucket,
    kernel_times,
    layer_flop,
    make_config,
    make_rows,
    make_target,
    padded,
    plan,
)
from matrix_rate import matrix_rates

from dflash_offline.capture.forward import Forwarder
from dflash_offline.capture.job import Backlog, PartJob, run_batches
from dflash_offline.codecs import NEEDS_STATISTICS, ChannelStatistics
from dflash_offline.config import StoreConfig
from dflash_offline.identity import default_layer_ids
from dflash_offline.leases import Leases
from dflash_offline.plan import PlannedPart
from dflash_offline.store import PartWriter, create_or_open
from dflash_offline.target import Target, load_target

SECTIONS = ["main", "attention", "startup", "loading", "27b", "smollm2"]


def hf_cases(bench: Bench, name: str, config: Any, dtype: torch.dtype, rows: Rows, parts: list[PlannedPart], *, thorough: bool) -> float:
    """transformers' own forward, whole model, with all logits and with one; tokens/s of the first.

    Every second batch (with one logit: every sixth) in the order of the plan, longest first: the same mix of lengths.
    """
    from transformers import Qwen3ForCausalLM

    bench.fresh()
    model = build(Qwen3ForCausalLM, config, bench.device, dtype)
    every = [batch for part in parts for batch in part.batches]
    variants: list[tuple[str, dict[str, Any], int]] = [("", {}, 2)]
    variants += [(", logits_to_keep=1", {"logits_to_keep": 1}, 6)] if thorough else []
    results = []
    for label, options, one_in in variants:
        batches = every[::one_in]
        lengths = rows.lengths[np.concatenate(batches)]

        def forward(batch: list[int], options: dict[str, Any] = options) -> None:
            with torch.inference_mode():
                model(padded(rows, batch, bench.device), output_hidden_states=True, use_cache=False, **options)

        for batch in first_of_each_bucket(rows, parts):
            forward(batch)
        bench.fresh()
        seconds = bench.time(lambda: [forward(batch) for batch in batches])  # noqa: B023
        flop = layer_flop(config, lengths, config.num_hidden_layers)
        flop += 0.0 if options else 2.0 * config.hidden_size * config.vocab_size * int(lengths.sum())
        waste = 1 - lengths.sum() / sum(int(rows.lengths[batch].max()) * len(batch) for batch in batches)
        case = f"{name}: transformers output_hidden_states=True{label}"
        results.append(bench.add(case, seconds, int(lengths.sum()), flop, padding=round(float(waste), 5), batches=len(batches)))
    return results[0]["tokens_per_s"]


def capture_case(
    bench: Bench,
    name: str,
    forwarder: Forwarder,
    rows: Rows,
    parts: list[PlannedPart],
    flop: float,
    *,
    where: str | None = None,
    codec: str = "lossless",
) -> dict[str, Any]:
    """Every part through the target; with ``where``, into a store below that folder, committed."""
    firsts = first_of_each_bucket(rows, parts)
    for batch in firsts:
        list(forwarder.run([rows.ids[row] for row in batch], int(rows.buckets[batch[0]])))
    statistics = None
    if where is not None and codec in NEEDS_STATISTICS:
        statistics = ChannelStatistics.from_rows(batch.hidden(0) for i in range(4) for _, batch in forwarder.run([rows.ids[i]], 0))
    folder = Path(tempfile.mkdtemp(prefix="capture-benchmark-", dir=where)) if where is not None else None
    if folder is not None:  # kernels and pinned memory of the way out
        warm = [PlannedPart(parts[0].name, firsts, int(sum(rows.lengths[batch].sum() for batch in firsts)))]
        to_store(forwarder, rows, warm, folder / "warm", codec, statistics, Backlog(3))
        shutil.rmtree(folder / "warm")
    bench.fresh()
    graphs, before, backlog = forwarder.num_graphs, (forwarder.tokens, forwarder.padded_tokens), Backlog(3)
    tail: list[float] = []
    if folder is None:
        seconds = bench.time(lambda: [forward_only(forwarder, rows, part) for part in parts])
    else:
        seconds = bench.time(lambda: tail.append(to_store(forwarder, rows, parts, folder / "run", codec, statistics, backlog)))
    tokens, computed = forwarder.tokens - before[0], forwarder.padded_tokens - before[1]
    more: dict[str, Any] = {
        "padding": round(1 - tokens / computed, 5),
        "recompilations": forwarder.num_graphs - graphs,
        "graphs": forwarder.num_graphs,
        "batches": sum(len(part.batches) for part in parts),
    }
    if folder is not None:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        more |= {
            "store": where,
            "store_gb": round(size / 1e9, 3),
            "waited_for_the_writer_s": round(backlog.waited_s, 2),
            "after_the_last_batch_s": round(tail[0], 2),
        }
        shutil.rmtree(folder)
    return bench.add(name, seconds, tokens, flop, **more)


def forward_only(forwarder: Forwarder, rows: Rows, part: PlannedPart) -> None:
    for batch in part.batches:
        for _ in forwarder.run([rows.ids[row] for row in batch], int(rows.buckets[batch[0]])):
            pass


def to_store(
    forwarder: Forwarder,
    rows: Rows,
    parts: list[PlannedPart],
    folder: Path,
    codec: str,
    statistics: ChannelStatistics | None,
    backlog: Backlog,
) -> float:
    """The parts into a store, committed. Returns the seconds between the last batch computed and the last commit."""
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
            statistics=statistics,
            threads=max(1, min(8, os.cpu_count() or 1)),
        ).__enter__()
        job = PartJob(writer, leases.claim(part.name), rows, backlog, layer_ids=target.layer_ids, device=target.device)
        jobs.append(job)
        run_batches(part, job, forwarder, rows)
        job.finish({})
        if len(jobs) > 1:
            jobs[-2].wait()
    if target.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    computed = time.perf_counter()
    for job in jobs:
        job.wait()
        if job.error is not None:
            raise job.error
    leases.close()
    return time.perf_counter() - computed


def shape_cases(
    bench: Bench, name: str, config: Any, dtype: torch.dtype, arguments: argparse.Namespace, *, num_batches: int, thorough: bool
) -> dict[str, Any]:
    """All cases of one shape. Returns the best capture into a store, and tokens/s of transformers."""
    budget = 16384 if not arguments.tiny else 128
    rows = make_rows(num_batches, budget, config.vocab_size, scale=0.01 if arguments.tiny else 1.0)
    token_bytes = TAPS * config.hidden_size * 2 * 0.7
    parts, padded_parts = (plan(rows, budget=budget, packed=packed, token_bytes=token_bytes) for packed in (True, False))
    reference = hf_cases(bench, name, config, dtype, rows, padded_parts, thorough=thorough)
    bench.fresh()
    target = make_target(config, bench.device, dtype)

    def flop_of(parts: list[PlannedPart]) -> float:
        return layer_flop(config, rows.lengths[[row for part in parts for row in part.rows]], max(target.layer_ids) + 1)

    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=config.vocab_size, say=bench.say, packed=True)
    assert forwarder.packs, "the benchmark is about packed batches"
    bench.say(f"attention plans of cuDNN built in {bench.time(lambda: forwarder.prepare(rows.lengths.tolist())):.1f} s")
    capture_case(bench, f"{name}: capture, packed, no store", forwarder, rows, parts[::2], flop_of(parts[::2]))
    found: dict[str, Any] = {"hf_tokens_per_s": reference}
    if thorough:
        some = parts[len(parts) // 2]
        one = PlannedPart(some.name, some.batches[:2], 0)
        found["kernels"] = kernel_times(bench, lambda: forward_only(forwarder, rows, one))
    cases = []
    for where in arguments.store_dir:
        if shutil.disk_usage(where).free < 1.5 * rows.lengths.sum() * TAPS * config.hidden_size * 2:
            bench.say(f"{name}: {where} is left out, too little space there")
            continue
        for codec in arguments.codecs if thorough and not cases else ("int8",):
            label = f"{name}: capture into a {codec} store"
            some = parts if codec == "int8" else parts[::2]
            cases.append(capture_case(bench, label, forwarder, rows, some, flop_of(some), where=where, codec=codec))
    if thorough and "padded" not in arguments.without:
        forwarder.packs = False
        some = padded_parts[::3]
        capture_case(bench, f"{name}: capture, padded, no store", forwarder, rows, some, flop_of(some))
    best = max(cases, key=lambda case: case["tokens_per_s"], default={"tokens_per_s": 0.0, "tflops": 0.0})
    return found | {"best": best}


def smollm2_case(bench: Bench, dtype: torch.dtype, arguments: argparse.Namespace, folder: Path) -> None:
    """Real weights of a small model: bound by launches rather than by products."""
    target = load_target(folder, dtype=dtype, device=bench.device, attention="sdpa", layer_ids=[1, 8, 14, 20, 27])
    config = target.model.config
    budget = 16384 if bench.is_cuda else 256
    rows = make_rows(48 if bench.is_cuda else 2, budget, config.vocab_size, scale=0.5 if bench.is_cuda else 0.02)
    parts = plan(rows, budget=budget, packed=True, token_bytes=TAPS * config.hidden_size)
    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=config.vocab_size, say=bench.say, packed=True)
    flop = layer_flop(config, rows.lengths, len(target.layers))
    capture_case(bench, "SmolLM2-135M: capture, packed, no store", forwarder, rows, parts, flop)
    for codec in ("int8", "lossless"):
        label = f"SmolLM2-135M: capture into a {codec} store"
        capture_case(bench, label, forwarder, rows, parts, flop, where=arguments.store_dir[0], codec=codec)


def startup(bench: Bench, sizes: dict[str, Any], heads: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Seconds from a loaded target to the end of its first batch. Run in a process of its own; the first compilation of any kind apart."""
    unrelated = bench.time(lambda: torch.compile(lambda x: (x.sin() * 2).sum(-1))(torch.randn(64, 64, device=bench.device)))
    config = make_config(sizes, heads)
    target = make_target(config, bench.device, dtype)
    made: list[Forwarder] = []
    options = {"compile_layers": True, "is_hybrid": False, "vocab_size": config.vocab_size, "say": print, "packed": True}
    prepare = bench.time(lambda: made.append(Forwarder(target, **options)))
    prepare += bench.time(lambda: made[0].prepare(list(range(256, 8192, 256))))
    ids = [np.arange(length) % config.vocab_size for length in ((2700, 2690, 2650, 2600) if bench.is_cuda else (27, 26, 25, 20))]
    first = bench.time(lambda: list(made[0].run(ids, 0)))
    second = bench.time(lambda: list(made[0].run(ids[:1], 0)))
    return {
        "unrelated_compilation_s": round(unrelated, 2),
        "checks_s": round(prepare, 2),
        "first_batch_s": round(first, 2),
        "second_batch_s": round(second, 2),
    }


def measure_startup(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
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
            bench.say(f"startup {label} {found[label]}")
    return found


def loading(bench: Bench, config: Any, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """A checkpoint on disk, loaded for capture and whole: seconds and GB of each."""
    from transformers import Qwen3ForCausalLM

    bench.fresh()
    model = build(Qwen3ForCausalLM, config, bench.device, dtype)
    model.save_pretrained(folder)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    found: dict[str, Any] = {"checkpoint_gb": round(whole / 1e9, 2)}
    for label, keep_head in (("whole", True), ("for_capture", False), ("for_capture_again", False)):
        bench.fresh()
        held: list[Target] = []
        ids = default_layer_ids(config.num_hidden_layers, TAPS)
        options = {"dtype": dtype, "device": bench.device, "attention": "sdpa", "layer_ids": ids, "keep_head": keep_head}
        seconds = bench.time(lambda: held.append(load_target(folder, **options)))  # noqa: B023
        found[label] = {"seconds": round(seconds, 2), "gb": round(held[0].num_bytes / 1e9, 2)}
        held.clear()
    shutil.rmtree(folder)
    bench.say(f"loading {found}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the real shapes")
    parser.add_argument("--codecs", nargs="*", default=["int8", "bf16", "lossless"], help="of the stores of the main case")
    parser.add_argument("--without", nargs="*", default=[], choices=["padded"], help="leave out of the main case")
    parser.add_argument("--batches", type=int, default=48, help="batches of the 8B shape")
    parser.add_argument("--only", nargs="*", default=SECTIONS, choices=SECTIONS, help="sections to run; all by default")
    parser.add_argument("--smollm2", type=Path, help="folder of the converted SmolLM2; found by itself where the demo model is installed")
    parser.add_argument(
        "--store-dir",
        nargs="*",
        help="folders to write stores into, the first one with every codec; memory where there is /dev/shm, by default",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "capture_h200.json")
    parser.add_argument("--startup", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.store_dir:
        arguments.store_dir = ["/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()]
    return arguments


def demo_folder(bench: Bench) -> Path | None:
    from dflash_offline import demo
    from dflash_offline.errors import TargetError

    try:
        return demo.ensure_converted()
    except TargetError as error:
        bench.say(f"SmolLM2 left out: {error}")
        return None


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes, heads = (TINY, TINY_HEADS) if arguments.tiny else (QWEN3_8B, HEADS)
    if arguments.startup:
        print(json.dumps(startup(Bench(device), sizes, heads, dtype)))
        return
    kept = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
    }
    result = {**kept, **result} if kept.get("device") == result["device"] else result

    def save() -> None:
        names = {(case["name"], case.get("store")) for case in bench.cases}
        others = [case for case in kept.get("cases", []) if (case["name"], case.get("store")) not in names]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result | {"cases": [*bench.cases, *others]}, indent=1) + "\n")

    bench = Bench(device, save)
    seconds = bench.time(lambda: torch.compile(lambda x: (x.sin() * 2).sum(-1))(torch.randn(64, 64, device=device)))
    bench.say(f"an unrelated first compilation: {seconds:.1f} s")
    if "startup" in arguments.only:
        result["startup"] = measure_startup(bench, arguments)
    rates = matrix_rates(device, dtype)
    if "main" in arguments.only or "matmul_tflops" not in result:
        result |= rates
    bench.say(f"matrix products: {rates}")
    config = make_config(sizes, heads)
    if "main" in arguments.only:
        name = "tiny" if arguments.tiny else "Qwen3-8B shape"
        found = shape_cases(bench, name, config, dtype, arguments, num_batches=arguments.batches, thorough=True)
        result |= verdict(found, rates) | {"kernels": found["kernels"]}
    if "attention" in arguments.only:
        bench.fresh()
        result["attention"] = attention_rates(bench, config, dtype)
    save()
    if "loading" in arguments.only:
        result["loading"] = loading(bench, config, dtype, Path(tempfile.mkdtemp(prefix="capture-benchmark-")) / "model")
        save()
    if "smollm2" in arguments.only and (folder := arguments.smollm2 or demo_folder(bench)) is not None:
        torch._dynamo.reset()
        smollm2_case(bench, dtype, arguments, folder)
    if "27b" in arguments.only and not arguments.tiny:  # last: it may not fit this machine
        torch._dynamo.reset()
        found = shape_cases(bench, "27B shape", make_config(SHAPE_27B, HEADS), dtype, arguments, num_batches=10, thorough=False)
        result["27b"] = verdict(found, rates)
    save()
    bench.say(json.dumps({name: value for name, value in result.items() if name not in ("cases", "kernels", "attention")}, indent=1))


def verdict(found: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    best = found["best"]
    return {
        "ratio_vs_hf": round(best["tokens_per_s"] / found["hf_tokens_per_s"], 3),
        "fraction_of_matmul": round(best["tflops"] / rates["matmul_tflops"], 3),
        "fraction_of_sustained_matmul": round(best["tflops"] / rates["matmul_sustained_tflops"], 3),
        "headline": f"{best.get('name')} in {best.get('store')}",
    }


if __name__ == "__main__":
    main()

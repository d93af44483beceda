"""Bytes, errors and speed of the hidden-state store, beside the ways other trainers keep hidden states.

    python benchmarks/store.py                     # all sections; on a GPU host this also times encoding and decoding there
    python benchmarks/store.py --gigabytes 0.2     # a quick look
    python benchmarks/store.py --rows rows.pt      # real hidden states saved by --save-rows on another machine

Sections:

codecs   on real hidden states (SmolLM2, conversations of the demo): stored bytes over bf16 bytes, relative L2 error of a token's
         vector (median; worst tapped layer; the 8 channels with most energy left out, which would hide all else), and the same
         figure of a bf16 forward pass against an fp32 one: an error below that is lost in it
files    the Qwen3-8B shape (5 taps of 4096), lengths of a realistic mix, values made of the real ones: writing, then reading whole
         samples in random order into memory (pinned where there is a GPU), page cache warm and cold
memory   writing the same into a folder in memory: what the writer does when no disk holds it back
device   encoding and decoding kernels, GB/s of bf16 taken or produced

Peers, on the same values: ``torch.save`` per sample read with ``mmap=True`` (SpecForge), the same gzipped (its option, at 0.02
GB/s: the first samples only), safetensors per sample (speculators). And the store's own files through zarr-python and zarrs, and as
training on a GPU reads them, by processes.

Writes benchmarks/results/store.json, one entry a machine.
"""

import argparse
import functools
import gzip
import importlib.util
import io
import itertools
import json
import os
import platform
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import store_processes
import torch
import zarr

from dflash_offline import manifest, store
from dflash_offline.codecs import CODECS, ChannelStatistics, make_codec
from dflash_offline.config import StoreConfig
from dflash_offline.plan import CODEC_SHARE

RESULTS = Path(__file__).parent / "results" / "store.json"
TAPS, HIDDEN = 5, 4096
REAL_LAYERS = (1, 8, 14, 20, 27)
GZIP_GIGABYTES = 0.4  # of bf16
IN_FLIGHT = (1, 2, 4)  # batches read at a time
CUDA = torch.cuda.is_available()


# -- real hidden states ------------------------------------------------------------------------------------------------


def real_rows(path: Path | None, tokens: int = 6000) -> dict[str, Any]:
    """``rows``: bf16 [T, K, H] of real conversations from an fp32 forward; ``noise``: the same tokens of a bf16 one, a few rows."""
    if path is not None:
        return torch.load(path, weights_only=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dflash_offline import demo

    folder = demo.ensure_converted()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with gzip.open(Path(__file__).parents[1] / "data" / "demo-conversations.jsonl.gz", "rt", encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]

    def forward(dtype: torch.dtype, limit: int) -> list[torch.Tensor]:
        model, found, total = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), [], 0
        for messages in conversations:
            ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"][:, :512]
            with torch.no_grad():
                states = model.model(ids, output_hidden_states=True).hidden_states
            found.append(torch.stack([states[i + 1][0] for i in REAL_LAYERS], 1).float())
            total += ids.shape[1]
            if total >= limit:
                break
        return found

    exact = forward(torch.float32, tokens)
    noisy = forward(torch.bfloat16, 600)
    return {"rows": [row.bfloat16() for row in exact], "exact": exact[: len(noisy)], "noise": noisy}


def relative_error(values: torch.Tensor, exact: torch.Tensor, energy: torch.Tensor) -> float:
    """Median over tokens of |values - exact| / |exact| without the 8 channels of most energy; the worst tap."""
    left_out = torch.zeros(energy.shape, dtype=torch.bool).scatter_(1, energy.topk(8, -1).indices, True)
    error = (values.float() - exact.float()).masked_fill(left_out, 0).norm(dim=-1)
    return float((error / exact.float().masked_fill(left_out, 0).norm(dim=-1)).median(0).values.max())


def codecs_section(real: dict[str, Any]) -> dict[str, Any]:
    rows = real["rows"]
    calibration, tested = rows[: len(rows) // 3], rows[len(rows) // 3 :]
    energy = torch.cat(rows).double().square().mean(0)
    statistics = ChannelStatistics.from_rows(calibration)
    _, taps, hidden = rows[0].shape
    result: dict[str, Any] = {"tokens": sum(map(len, rows)), "hidden_size": hidden, "bf16_forward_noise": None}
    if "noise" in real:
        result["bf16_forward_noise"] = relative_error(torch.cat(real["noise"]), torch.cat(real["exact"]), energy)
    with tempfile.TemporaryDirectory() as folder:
        for name in CODECS:
            for zstd in (False, True) if name.startswith("int") else (False,):
                root = Path(folder) / f"{name}-{zstd}"
                write_store(root, name, tested, statistics, zstd=zstd)
                decoded = [store.HiddenStateStore(root)[i].hidden_states() for i in range(len(tested))]
                found = {
                    "bytes_over_bf16": round(store.summary(root)["ratio"], 4),
                    "relative_l2": round(relative_error(torch.cat(decoded), torch.cat(tested), energy), 5),
                }
                result[name + ("+zstd" if zstd else "")] = found
    return result


# -- files ---------------------------------------------------------------------------------------------------------------


def made_samples(real: list[torch.Tensor], gigabytes: float) -> Iterator[torch.Tensor]:
    """bf16 [T, 5, 4096] made of real rows laid side by side, until ``gigabytes`` of bf16; the same ones each time."""
    pool, generator = torch.cat(real)[:, :TAPS], np.random.default_rng(0)
    copies, left = -(-HIDDEN // pool.shape[-1]), gigabytes * 1e9
    wide = torch.cat([pool.roll(977 * i, 0) for i in range(copies)], -1)[..., :HIDDEN].contiguous()
    edges = [128, 770, 1216, 1728, 2432, 3296, 4096]
    while left > 0:
        bucket = generator.choice(6, p=[0.12, 0.16, 0.18, 0.18, 0.16, 0.20])
        length = int(generator.integers(edges[bucket], edges[bucket + 1]))
        start = int(generator.integers(0, len(wide)))
        yield wide[torch.arange(start, start + length) % len(wide)]
        left -= 2 * length * TAPS * HIDDEN


def write_store(root: Path, codec: str, samples: list[torch.Tensor], statistics: ChannelStatistics, *, zstd: bool = False) -> None:
    store.create_or_open(root, {"codec": codec, "zstd": zstd, "layer_ids": list(range(samples[0].shape[1]))})
    settings = StoreConfig(codec=codec, zstd=zstd)
    codec_bytes = CODEC_SHARE[codec] * 2 * samples[0].shape[1] * samples[0].shape[2]  # as the capture plan cuts parts
    number, begin = 0, 0
    while begin < len(samples):
        end, total = begin, 0
        while end < len(samples) and total < settings.part_bytes:
            total += len(samples[end]) * codec_bytes
            end += 1
        group = samples[begin:end]
        with store.PartWriter(
            root,
            f"part-{number:05d}",
            store_settings=settings,
            num_taps=group[0].shape[1],
            hidden_size=group[0].shape[2],
            num_tokens=sum(map(len, group)),
            num_samples=len(group),
            statistics=statistics,
            threads=min(8, os.cpu_count() or 1),
        ) as part:
            for i, hidden in enumerate(group):
                ids = np.arange(len(hidden), dtype=np.int32)
                part.append(begin + i, (begin + i).to_bytes(32, "little"), 0, ids, np.ones(len(ids), np.uint8), hidden)
            part.commit()
        number, begin = number + 1, end


def torch_save(folder: Path, samples: list[torch.Tensor], *, zipped: bool) -> None:
    for i, hidden in enumerate(samples):
        content = {
            "input_ids": torch.arange(len(hidden)),
            "loss_mask": torch.ones(len(hidden)),
            "aux_hidden_state": hidden.flatten(1).cpu(),
        }
        if zipped:
            buffer = io.BytesIO()
            torch.save(content, buffer)
            with gzip.open(folder / f"{i}.ckpt.gz", "wb", compresslevel=1) as file:
                file.write(buffer.getvalue())
        else:
            torch.save(content, folder / f"{i}.ckpt")


def safetensors_save(folder: Path, samples: list[torch.Tensor]) -> None:
    for i, hidden in enumerate(samples):
        content = {"input_ids": torch.arange(len(hidden)), "hidden_states": hidden.cpu().contiguous()}
        safetensors.torch.save_file(content, folder / f"{i}.safetensors")


def drop_cache(folder: Path) -> None:
    """Ask the system to forget the pages of these files; works without root, and does nothing on a tmpfs."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def into_memory(pieces: list[torch.Tensor]) -> torch.Tensor:
    """What a trainer does with loaded samples: one batch in (pinned) memory."""
    out = torch.empty((sum(map(len, pieces)), pieces[0].shape[1]), dtype=pieces[0].dtype, pin_memory=CUDA)
    return torch.cat(pieces, out=out)


def readers(folders: dict[str, Path]) -> dict[str, Callable[[list[int]], Any]]:
    """``{way: read}``; ``read`` takes sample numbers and brings their hidden states into memory as one batch."""

    def load(path: Path) -> torch.Tensor:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                return torch.load(io.BytesIO(file.read()), weights_only=False)["aux_hidden_state"]
        return torch.load(path, weights_only=False, mmap=True)["aux_hidden_state"]

    def through_zarr(root: Path, pipeline: str) -> Callable[[list[int]], Any]:
        opened = store.HiddenStateStore(root, verify="off")
        zarr.config.set({"codec_pipeline.path": pipeline, "codec_pipeline.strict": True})
        arrays = {part: [zarr.open_array(root / part / a.name, mode="r") for a in opened.codec.arrays] for part in opened.parts}

        def read(numbers: list[int]) -> list[Any]:
            found = []
            for number in numbers:
                part, index = opened.locate(number)
                first, last = zarr.open_array(root / part / "sample_offsets", mode="r")[index : index + 2]
                found.append([array[int(first) : int(last)] for array in arrays[part]])
            return found

        return read

    ways: dict[str, Callable[[list[int]], Any]] = {}
    for name, folder in folders.items():
        if name == "torch.save":
            ways[name] = lambda numbers, folder=folder: into_memory([load(folder / f"{i}.ckpt") for i in numbers])
        elif name == "torch.save+gzip":
            ways[name] = lambda numbers, folder=folder: into_memory([load(folder / f"{i}.ckpt.gz") for i in numbers])
        elif name == "safetensors":
            ways[name] = lambda numbers, folder=folder: into_memory(
                [safetensors.torch.load_file(folder / f"{i}.safetensors")["hidden_states"].flatten(1) for i in numbers]
            )
        else:
            ways[name] = store.HiddenStateStore(folder, verify="off").read_encoded
    pipelines = {"zarr-python": "zarr.core.codec_pipeline.BatchedCodecPipeline"}
    if importlib.util.find_spec("zarrs"):
        pipelines["zarrs"] = "zarrs.ZarrsCodecPipeline"
    for name, (library, pipeline) in itertools.product(("int8", "lossless"), pipelines.items()):
        ways[f"{name} through {library}"] = through_zarr(folders[name], pipeline)
    return ways


def timed_reads(read: Callable[[list[int]], Any], count: int, seconds: float, *, in_flight: int = 1, again: bool = False) -> float:
    """Samples a second, batches of 4 in random order, so many at a time, for ``seconds`` or, unless ``again``, all samples once."""
    order, done = np.random.default_rng(1).permutation(count).tolist(), 0
    batches: Iterator[list[int]] = iter([order[i : i + 4] for i in range(0, count, 4)])
    if again:
        batches = itertools.cycle(batches)
    with ThreadPoolExecutor(in_flight) as pool:
        begun = time.perf_counter()
        reading = deque((len(batch), pool.submit(read, batch)) for batch in itertools.islice(batches, in_flight))
        while reading:
            size, batch = reading.popleft()
            batch.result()
            done += size
            if time.perf_counter() - begun < seconds:
                reading += ((len(batch), pool.submit(read, batch)) for batch in itertools.islice(batches, 1))
        return done / (time.perf_counter() - begun)


def placed(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """On the GPU, where capture has them."""
    return [sample.cuda() for sample in samples] if CUDA and sum(sample.nbytes for sample in samples) < 60e9 else samples


def timed_write(write: Callable[[Path], None], folder: Path, bf16_bytes: int) -> dict[str, float]:
    folder.mkdir()
    begun, used = time.perf_counter(), time.process_time()
    write(folder)
    wall, cpu = time.perf_counter() - begun, time.process_time() - used
    return {"write_gb_per_s_bf16": round(bf16_bytes / 1e9 / wall, 2), "write_cores": round(cpu / wall, 2)}


def files_and_bytes(folder: Path, bf16_bytes: int) -> dict[str, float]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in files)
    return {"bytes_over_bf16": round(stored / bf16_bytes, 4), "files_per_gb": round(len(files) / (stored / 1e9), 1)}


def warm_up_writing(folder: Path, samples: list[torch.Tensor], statistics: ChannelStatistics) -> None:
    """Have the codecs' kernels compiled and pinned memory taken, which is no part of a rate."""
    for name in CODECS:
        write_store(folder / "warm-up", name, [samples[0][:256]], statistics)
        shutil.rmtree(folder / "warm-up")


def memory_section(real: list[torch.Tensor], gigabytes: float, folder: Path) -> dict[str, Any]:
    samples = list(made_samples(real, gigabytes))
    statistics = ChannelStatistics.from_rows([samples[0][:512]])
    bf16_bytes, here, result = sum(sample.nbytes for sample in samples), placed(samples), {}
    warm_up_writing(folder, here, statistics)
    for name in CODECS:
        result[name] = timed_write(lambda path, name=name: write_store(path, name, here, statistics), folder / name, bf16_bytes)
        result[name] |= files_and_bytes(folder / name, bf16_bytes)
        shutil.rmtree(folder / name)
        print("in memory:", name, result[name], flush=True)
    return {"bf16_gb": round(bf16_bytes / 1e9, 2), "ways": result}


def files_section(real: list[torch.Tensor], gigabytes: float, folder: Path, seconds: float) -> dict[str, Any]:
    samples = list(made_samples(real, gigabytes))
    statistics = ChannelStatistics.from_rows([samples[0][:512]])
    here, result = placed(samples), {}
    warm_up_writing(folder, here, statistics)
    counts = {"torch.save+gzip": max(4, int(len(samples) * GZIP_GIGABYTES / gigabytes))}
    ways: dict[str, Callable[[Path], None]] = {
        "torch.save": lambda path: torch_save(path, samples, zipped=False),
        "torch.save+gzip": lambda path: torch_save(path, samples[: counts["torch.save+gzip"]], zipped=True),
        "safetensors": lambda path: safetensors_save(path, samples),
        **{name: lambda path, name=name: write_store(path, name, here, statistics) for name in CODECS},
    }
    for name, write in ways.items():
        bf16_bytes = sum(sample.nbytes for sample in samples[: counts.get(name)])
        written = timed_write(write, folder / name, bf16_bytes)
        result[name] = files_and_bytes(folder / name, bf16_bytes) | written
        print(name, result[name], flush=True)
    store_processes.write_rows(folder / "corpus", [len(sample) for sample in samples])
    all_readers = readers({name: folder / name for name in ways})
    all_readers |= store_processes.readers({name: folder / name for name in ("lossless", "int8")}, folder / "corpus")
    for name, read in all_readers.items():
        place, count = result.setdefault(name, {}), min(counts.get(name, len(samples)), len(samples))
        drop_cache(folder / name.split(" ")[0])
        place["read_cold_samples_per_s"] = round(timed_reads(read, count, seconds), 2)
        read(list(range(min(8, count))))
        timed_reads(read, count, seconds, again=True)
        # trainers read some batches ahead at a time: each way gets the number that suits it best
        at_once = (1,) if "gzip" in name or "through" in name else IN_FLIGHT
        rates = {number: max(timed_reads(read, count, seconds, in_flight=number, again=True) for _ in range(2)) for number in at_once}
        place["read_warm_samples_per_s"] = round(max(rates.values()), 2)
        place["read_warm_in_flight"] = {str(number): round(rate, 2) for number, rate in rates.items()}
        if isinstance(read, store_processes.TrainingReader):
            place["processes"] = read.processes
            read.close()
        print(name, place, flush=True)
    base = result["torch.save"]
    for place in result.values():
        for kind in ("cold", "warm"):
            place[f"{kind}_over_torch.save"] = round(place[f"read_{kind}_samples_per_s"] / base[f"read_{kind}_samples_per_s"], 2)
    return {
        "samples": len(samples),
        "bf16_gb": round(sum(sample.nbytes for sample in samples) / 1e9, 2),
        "threads": store.HiddenStateStore(folder / "int8").threads,
        "ways": result,
    }


# -- kernels -------------------------------------------------------------------------------------------------------------


def rate(action: Callable[[], Any], gigabytes: float) -> float:
    """GB/s of an action on the device."""
    repeats = 20 if CUDA else 2
    for timed in (False, True):
        begun = time.perf_counter()
        for _ in range(repeats if timed else 2):
            action()
        if CUDA:
            torch.cuda.synchronize()
    return round(repeats * gigabytes / (time.perf_counter() - begun), 2)


def device_section(real: list[torch.Tensor]) -> dict[str, Any]:
    device = torch.device("cuda" if CUDA else "cpu")
    hidden = torch.cat(list(made_samples(real, 0.35 if CUDA else 0.02)))[: 8192 if CUDA else 512].to(device)
    result = {}
    for name in CODECS:
        codec = make_codec(name, num_taps=TAPS, hidden_size=HIDDEN, statistics=ChannelStatistics.from_rows([hidden[:256]]))
        encoded, gigabytes = codec.encode(hidden), hidden.nbytes / 1e9
        encode, decode = functools.partial(codec.encode, hidden), functools.partial(codec.decode, encoded)
        result[name] = {"encode_gb_per_s": rate(encode, gigabytes), "decode_gb_per_s": rate(decode, gigabytes)}
        print(name, result[name], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=20.0 if CUDA else 1.0, help="bf16 bytes of the files section")
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time of one read measurement")
    parser.add_argument("--rows", type=Path, help="real hidden states saved by --save-rows")
    parser.add_argument("--save-rows", type=Path, help="save 1500 tokens of real hidden states here, and stop")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--sections", default="codecs,device,memory,files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1 if not CUDA else 8)
    real = real_rows(options.rows, 1500 if options.save_rows else 6000)
    if options.save_rows:
        torch.save({"rows": real["rows"]}, options.save_rows)
        return
    sections = options.sections.split(",")
    load = round(os.getloadavg()[0], 1)  # above the number of cores, the rates below are those of a machine shared with others
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": load,
        "environment": {k: v for k, v in manifest.environment().items() if k != "platform"},
    }
    machine = torch.cuda.get_device_name() if CUDA else f"{platform.machine()} CPU, {os.cpu_count()} cores"

    def keep(section: str, found: dict[str, Any]) -> None:
        result[section] = found
        everything = json.loads(options.out.read_text()) if options.out.exists() else {}
        everything[machine] = {**everything.get(machine, {}), **result}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(everything, indent=1) + "\n")

    if "codecs" in sections:
        keep("codecs", codecs_section(real))
        print(json.dumps(result["codecs"], indent=1), flush=True)
    if "device" in sections:
        keep("device", device_section(real["rows"]))
    if "files" in sections:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            keep("files", files_section(real["rows"], options.gigabytes, folder, options.seconds))
        finally:
            shutil.rmtree(folder)
    if "memory" in sections:
        shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=shared) as memory:
            keep("memory", memory_section(real["rows"], options.gigabytes, Path(memory)))


if __name__ == "__main__":
    main()

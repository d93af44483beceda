"""Resident memory: under three Zarr shards when writing, under two batches when reading."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from small_store import folder_in_memory, identity, settings

from dflash_offline import store

FORKSERVER = multiprocessing.get_context("forkserver")
TAPS, HIDDEN, TOKENS, SAMPLES = 4, 1024, 500, 60
SHARD = 64_000_000


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _peak(action) -> int:
    """Bytes that ``action`` had resident at most beyond what there was before it; files in memory not counted."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _hidden() -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.randn(TOKENS, TAPS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()


def _writer(root, codec: str) -> store.PartWriter:
    fields = {"store_settings": settings(codec, shard_bytes=SHARD), "num_taps": TAPS, "hidden_size": HIDDEN, "num_samples": SAMPLES}
    return store.PartWriter(root, "part-00000", num_tokens=TOKENS * SAMPLES, **fields)


def _write(root, codec, peak) -> None:
    hidden = _hidden()

    def write() -> None:
        with _writer(root, codec) as part:
            for i in range(SAMPLES):
                part.append(i, i.to_bytes(32, "little"), 0, [1] * TOKENS, [1] * TOKENS, hidden)
            part.commit()

    with torch.no_grad():
        store.create_or_open(root.with_name("warm"), identity(codec))
        with store.PartWriter(
            root.with_name("warm"),
            "part-00000",
            store_settings=settings(codec),
            num_taps=TAPS,
            hidden_size=HIDDEN,
            num_tokens=TOKENS,
            num_samples=1,
        ) as part:  # imports and allocators, once
            part.append(0, bytes(32), 0, [1] * TOKENS, [1] * TOKENS, hidden)
            part.commit()
        peak.value = _peak(write)


def _read(root, peak, batch_bytes) -> None:
    torch.set_num_threads(1)
    opened = store.HiddenStateStore(root)
    opened.read_encoded([0])

    def read() -> None:
        for start in range(0, SAMPLES - 10, 10):
            batch = opened.read_encoded(list(range(start, start + 10)))
            batch_bytes.value = sum(array.nbytes for array in batch.arrays.values())
            del batch

    peak.value = _peak(read)


@pytest.mark.parametrize("codec", ["bf16", "lossless"])
def test_memory_of_writer_and_reader(codec):
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity(codec, layer_ids=[1, 2, 3, 4]))
        peak, batch_bytes = FORKSERVER.Value("q"), FORKSERVER.Value("q")
        child = FORKSERVER.Process(target=_write, args=(folder / "s", codec, peak))
        child.start()
        child.join(300)
        shards = 1 if codec == "bf16" else 2  # high and low fill side by side
        assert child.exitcode == 0 and peak.value < 3 * shards * SHARD, f"{peak.value / SHARD:.2f} shards"
        child = FORKSERVER.Process(target=_read, args=(folder / "s", peak, batch_bytes))
        child.start()
        child.join(300)
        assert child.exitcode == 0 and peak.value < 2 * batch_bytes.value + (8 << 20), f"{peak.value / batch_bytes.value:.2f} batches"

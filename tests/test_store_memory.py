"""Resident memory: under three Zarr shards when writing, under two batches when reading."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from small_store import folder_in_memory, identity, make_store, rows, settings, write_part

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


def test_memory_of_a_batch_is_used_again_only_when_nothing_lies_in_it():
    with folder_in_memory() as folder:
        everything = make_store(folder / "s", "bf16", parts=1)
        opened = store.HiddenStateStore(folder / "s")
        first = opened.read_encoded([1, 7])
        kept, where = first.arrays["hidden_states"][0], first.arrays["hidden_states"].data_ptr()
        del first
        second = opened.read_encoded([7, 1])
        assert second.arrays["hidden_states"].data_ptr() != where, "a view of the first batch is still there"
        assert torch.equal(kept, torch.cat([everything[1].hidden, everything[7].hidden])[:, 0].view(torch.int16))
        del kept
        assert opened.read_encoded([1, 7]).arrays["hidden_states"].data_ptr() == where
        decoded = opened.read_encoded([7], [2]).decode()  # bf16 of one tap: decoding copies nothing
        opened.read_encoded([1, 7]), opened.read_encoded([1, 1])
        assert torch.equal(decoded.view(torch.int16), everything[7].hidden[:, 2].view(torch.int16))


@pytest.mark.parametrize("codec", ["bf16", "lossless", "int4"])
def test_pieces_of_a_long_sample_are_its_chunks_once_each(codec, monkeypatch):
    """Threads read pieces of a sample side by side; together they read what one does."""
    with folder_in_memory() as folder:
        store.create_or_open(folder, identity(codec))
        samples = rows([70, 1500, 333])
        write_part(folder, "part-00000", samples, codec, shard_bytes=200_000)
        alone = store.HiddenStateStore(folder, threads=1).read_encoded([1, 0, 2])
        monkeypatch.setattr("dflash_offline.store.shards._SPAN_BYTES", 1)
        together = store.HiddenStateStore(folder, threads=3).read_encoded([1, 0, 2])
        assert together.num_bytes == alone.num_bytes
        assert all(torch.equal(together.arrays[name], array) for name, array in alone.arrays.items())

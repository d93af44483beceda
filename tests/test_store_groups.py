"""Samples added many at a time and chunks written many at a time make the files that one at a time make."""

import itertools
import os
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_store import LENGTHS, append, content, folder_in_memory, identity, rows, same_bits, write_part, writer

from dflash_offline import store
from dflash_offline.capture.forward import Batch
from dflash_offline.capture.job import Backlog, PartJob
from dflash_offline.errors import StoreError
from dflash_offline.leases import Leases
from dflash_offline.store import NewSample, shard_writing


def add(part, samples, check=None):
    """As one group."""
    named = [NewSample(row.sample_id, row.sha256, row.bucket, row.input_ids, row.loss_mask, check) for row in samples]
    part.append_group(named, torch.cat([row.hidden for row in samples]))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("codec", ["bf16", "lossless", "int8", "int6", "int4"])
def test_groups_make_the_files_that_single_samples_make(codec, chunk_tokens):
    samples, fields = rows(), {"chunk_tokens": chunk_tokens, "shard_bytes": 30_000}
    with folder_in_memory() as folder:
        for name in ("single", "whole", "uneven"):
            store.create_or_open(folder / name, identity(codec))
        write_part(folder / "single", "part-00000", samples, codec, **fields)
        for name, edges in (("whole", [0, len(samples)]), ("uneven", [0, 1, 4, len(samples)])):
            with writer(folder / name, "part-00000", samples, codec, **fields) as part:
                for first, last in itertools.pairwise(edges):
                    add(part, samples[first:last])
                part.commit({"replica": 0})
            assert content(folder / name) == content(folder / "single")
            assert store.verify(folder / name, values=True) == []


def test_a_group_goes_on_in_the_middle_of_its_first_sample():
    samples = rows()
    with folder_in_memory() as folder:
        for name in ("single", "s"):
            store.create_or_open(folder / name, identity())
        write_part(folder / "single", "part-00000", samples)
        with pytest.raises(KeyboardInterrupt), writer(folder / "s", "part-00000", samples) as part:
            add(part, samples[:5])
            raise KeyboardInterrupt
        with writer(folder / "s", "part-00000", samples) as part:
            assert 0 < part.resume_sample < 5 and part._skip
            add(part, samples[part.resume_sample :])
            part.commit({"replica": 0})
        assert content(folder / "s") == content(folder / "single")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_that_is_refused_takes_none_before_it_along(value):
    samples, seen = rows(), []
    samples[6].hidden[20, 1, 3] = value
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity())
        with writer(folder / "s", "part-00000", samples) as part:
            with pytest.raises(StoreError, match="sample 106: .* not finite at token 20, captured layer number 1"):
                add(part, samples, check=lambda rms: seen.append(len(rms)))
            assert seen == LENGTHS[:7], "asked of each sample up to the one that is refused"
            assert part._position == sum(LENGTHS[:6]) and part._samples == 6
        with writer(folder / "s", "part-00000", samples) as part:
            assert 0 < part.resume_sample <= 6


def test_a_token_of_zeros_is_the_callers_to_judge():
    samples, seen = rows(), []
    samples[2].hidden[5, 1] = 0
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity())
        with writer(folder / "s", "part-00000", samples) as part:
            add(part, samples[:2], check=lambda rms: pytest.fail("these values are sound"))
            add(part, samples[2:4], check=lambda rms: seen.append(np.argwhere(rms == 0).tolist()))
    assert seen == [[[5, 1]], []]


def test_small_chunks_are_checked_hashed_and_written_many_at_a_time(tmp_path, monkeypatch):
    """Each call gives the interpreter's lock away, and the thread that feeds the GPU waits for it."""
    writes = []
    chunks = np.zeros((2000, 5, shard_writing.place_bytes(640, None)), np.uint8)
    monkeypatch.setattr(
        shard_writing.os, "write", lambda descriptor, view, write=os.write: writes.append(len(view)) or write(descriptor, view)
    )
    size, _ = shard_writing.write_shard(tmp_path / "raw", chunks, shard_chunks=2000, zstd=None)
    assert size == sum(writes) == (tmp_path / "raw").stat().st_size and len(writes) == 1 + -(-chunks.nbytes // shard_writing._GROUP_BYTES)


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    chunks = np.arange(40 * 3 * 104, dtype=np.uint32).astype(np.uint8).reshape(40, 3, 104)
    whole = shard_writing.write_shard(tmp_path / "whole", chunks, shard_chunks=50, zstd=None)
    monkeypatch.setattr(shard_writing.os, "write", lambda descriptor, view, write=os.write: write(descriptor, view[:1000]))
    assert shard_writing.write_shard(tmp_path / "short", chunks, shard_chunks=50, zstd=None) == whole
    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


def test_compressing_chunk_by_chunk_makes_the_same_file(tmp_path, monkeypatch):
    """The library compresses many chunks in one call with one of its backends only."""
    chunks = np.random.default_rng(0).normal(0, 4, (30, 3, 6400)).astype(np.int8).view(np.uint8)
    many = shard_writing.write_shard(tmp_path / "many", chunks, shard_chunks=32, zstd=1)
    compressor = shard_writing._compressor(1)
    monkeypatch.setattr(shard_writing, "_compressor", lambda level: SimpleNamespace(compress=compressor.compress))
    assert shard_writing.write_shard(tmp_path / "single", chunks, shard_chunks=32, zstd=1) == many
    assert (tmp_path / "single").read_bytes() == (tmp_path / "many").read_bytes()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("most", [64, 300, 10_000])
def test_a_batch_goes_to_the_writer_in_as_few_groups_as_fit(packed, most, monkeypatch):
    samples, groups = rows(), []
    longest = max(LENGTHS)
    starts = [0, *np.cumsum(LENGTHS[:-1]).tolist()] if packed else [b * longest for b in range(len(LENGTHS))]
    taps = torch.full((samples[0].hidden.shape[1], starts[-1] + longest, samples[0].hidden.shape[2]), float("nan")).bfloat16()
    for row, start in zip(samples, starts, strict=True):
        taps[:, start : start + len(row.input_ids)] = row.hidden.transpose(0, 1)

    def counted(part, new, hidden, append_group=store.PartWriter.append_group):
        groups.append(len(hidden))
        append_group(part, new, hidden)

    corpus = SimpleNamespace(buckets=np.zeros(len(samples), np.int64), row=samples.__getitem__)
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity())
        part = writer(folder / "s", "part-00000", samples)
        monkeypatch.setattr(store.PartWriter, "group_tokens", most)
        monkeypatch.setattr(store.PartWriter, "append_group", counted)
        leases = Leases(folder / "leases")
        job = PartJob(part.__enter__(), leases.claim("part-00000"), corpus, Backlog(1), layer_ids=[1, 2, 3], device=torch.device("cpu"))
        job.put(list(range(len(samples))), Batch(LENGTHS, starts, list(taps)))
        job.finish({})
        job.wait()
        leases.close()
        assert job.error is None and job.tokens == sum(LENGTHS)
        assert groups == {64: LENGTHS, 300: [268, 259, 300, 97], 10_000: [sum(LENGTHS)]}[most]
        with store.HiddenStateStore(folder / "s") as found:
            assert all(same_bits(found[i].hidden_states(), row.hidden) for i, row in enumerate(samples))


def test_samples_one_by_one_after_a_group():
    samples = rows()
    with folder_in_memory() as folder:
        for name in ("single", "s"):
            store.create_or_open(folder / name, identity())
        write_part(folder / "single", "part-00000", samples)
        with writer(folder / "s", "part-00000", samples) as part:
            add(part, samples[:3])
            for row in samples[3:]:
                append(part, row)
            part.commit({"replica": 0})
        assert content(folder / "s") == content(folder / "single")


def test_rows_wait_for_their_shard_in_memory_it_had_from_the_beginning():
    """Kept one by one they lie scattered in the heap: gaps between them grew to three more shards now and then."""
    samples = rows([500] * 100)
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity("int8"))
        with writer(folder / "s", "part-00000", samples, "int8", shard_bytes=10**8) as part:
            tracemalloc.start()
            try:
                add(part, samples[:10])
                before = tracemalloc.get_traced_memory()[0]
                for first in range(10, 100, 3):
                    add(part, samples[first : first + 3])
                grown = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
    assert grown < 100_000, grown  # their ids, masks and scales are 500,000 bytes

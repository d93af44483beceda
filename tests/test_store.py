"""The store: what is written is read, resumed, refused; plain Zarr opens it; ranges read only their chunks."""

import multiprocessing
import os
import threading
import warnings

import numpy as np
import pytest
import torch
import zarr
from small_store import (
    LENGTHS,
    H,
    K,
    append,
    content,
    folder_in_memory,
    identity,
    make_store,
    rows,
    same_bits,
    settings,
    statistics_for,
    write_part,
    writer,
)

from dflash_offline import store
from dflash_offline.codecs import CODECS, make_codec
from dflash_offline.errors import StoreBusyError, StoreDamagedError, StoreError, StoreIdentityError
from dflash_offline.store.shards import ShardedArray


@pytest.fixture
def tmp_path():
    with folder_in_memory() as folder:
        yield folder


def expected(codec: str, row) -> torch.Tensor:
    made = make_codec(codec, num_taps=K, hidden_size=H, statistics=statistics_for(codec))
    return made.decode(made.encode(row.hidden))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_is_read(tmp_path, codec, threads):
    everything = make_store(tmp_path / "s", codec)
    with store.HiddenStateStore(tmp_path / "s", verify="deep", threads=threads) as opened:
        assert len(opened) == len(everything) and opened.parts == ["part-00000", "part-00001"]
        assert opened.num_taps == K and opened.hidden_size == H and opened.layer_ids == [1, 2, 3]
        assert opened.lengths.tolist() == [len(row.input_ids) for row in everything] and opened.offsets[-1] == sum(LENGTHS) * 2
        for i, row in enumerate(everything):
            sample = opened[i]
            assert (sample.sample_id, sample.sha256, sample.bucket, sample.number) == (row.sample_id, row.sha256, row.bucket, i)
            assert np.array_equal(sample.input_ids, row.input_ids) and np.array_equal(sample.loss_mask, row.loss_mask)
            assert same_bits(sample.hidden_states(), expected(codec, row))
            assert opened.find(row.sha256) == i
        with pytest.raises(KeyError):
            opened.find(bytes(32))
        order, layers = [17, 3, 8, 0], [2, 0]
        batch = opened.read_encoded(order, layers)
        assert same_bits(batch.decode(), torch.cat([expected(codec, everything[i])[:, layers].flatten(1) for i in order]))
        assert np.array_equal(batch.input_ids, np.concatenate([everything[i].input_ids for i in order]))
        assert np.array_equal(batch.loss_mask, np.concatenate([everything[i].loss_mask for i in order]))
        assert batch.offsets.tolist() == [0, 300, 364, 371, 376]
        assert opened.read_encoded([]).decode().shape == (0, K * H)


def test_slices_and_negative_numbers(tmp_path):
    everything = make_store(tmp_path / "s")
    opened = store.HiddenStateStore(tmp_path / "s")
    hidden = everything[7].hidden
    assert same_bits(opened[7][60:130], hidden[60:130]) and same_bits(opened[7][-3:], hidden[-3:])
    assert opened[7][10:10].shape == (0, K, H) and opened[7][20:10].shape == (0, K, H)
    assert opened[-1].sha256 == everything[-1].sha256 and opened[-1].number == len(everything) - 1
    assert same_bits(opened[7].hidden_states(layers=[1], tokens=slice(299, 300)), hidden[299:, [1]])
    with pytest.raises(IndexError):
        opened[len(everything)]
    with pytest.raises(StoreError, match="step"):
        opened[7][::2]
    with pytest.raises(StoreError, match=r"layers = \[3\] are positions along the 3 captured"):
        opened[7].hidden_states(layers=[3])
    assert opened.positions([3, 1]) == [2, 0]
    with pytest.raises(StoreError, match=r"layer 9 was not captured; captured are \[1, 2, 3\]"):
        opened.positions([9])


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_ranges_read_only_their_chunks(tmp_path, codec):
    make_store(tmp_path / "s", codec, parts=1)
    opened = store.HiddenStateStore(tmp_path / "s")
    start = int(opened.offsets[7])  # sample 7 has 300 tokens from token 527 on
    assert (start, LENGTHS[7]) == (527, 300)
    arrays = [ShardedArray(tmp_path / "s" / "part-00000" / array.name) for array in opened.codec.arrays]
    one_chunk = sum(array.chunk_bytes + 4 for array in arrays)

    def bytes_read(first: int, last: int, layers: list[int]) -> int:
        out = [np.empty((len(layers), last - first, array.chunk_bytes // 64), np.uint8) for array in arrays]
        return sum(array.read(first, last, layers, view) for array, view in zip(arrays, out, strict=True))

    assert bytes_read(527, 528, [0]) == one_chunk
    assert bytes_read(527, 577, [0, 2]) == 2 * 2 * one_chunk  # tokens 512-575 and 576-639
    assert bytes_read(527, 827, [0, 1, 2]) == 3 * 5 * one_chunk
    assert opened.read_encoded([7], [1]).num_bytes == 5 * one_chunk


@pytest.mark.parametrize("codec", CODECS)
def test_plain_zarr_and_a_few_lines_decode_it(tmp_path, codec):
    everything = make_store(tmp_path / "s", codec, parts=1)
    group = zarr.open(tmp_path / "s", mode="r")["part-00000"]
    a, b = group["sample_offsets"][1:3]
    assert np.array_equal(group["input_ids"][a:b], everything[1].input_ids)
    if codec == "bf16":
        bits = group["hidden_states"][a:b]
        assert group["hidden_states"].attrs["view_dtype"] == "bfloat16" and group["hidden_states"].fill_value == 0x7FC0
    elif codec == "lossless":
        packed, rest = group["exponents"][a:b], group["sign_mantissa"][a:b]
        low, high = packed[..., : H // 2], packed[..., H // 2 : -1]
        below = np.stack([low & 15 | high << 4, low >> 4 | high & 240], -1).reshape(rest.shape)
        bits = (rest & 128).astype("u2") << 8 | (packed[..., -1:] - below).astype("u2") << 7 | rest & 127
    else:
        codes, n, bits = group["codes"][a:b], group.attrs["rotation"], group.attrs["bits"]
        if bits < 8:
            low = np.stack([codes[..., : H // 2] & 15, codes[..., : H // 2] >> 4], -1).reshape(b - a, K, H)
            high = 0 if bits == 4 else np.stack([codes[..., H // 2 :] >> s & 3 for s in (0, 2, 4, 6)], -1).reshape(b - a, K, H) << 4
            codes = (low | high).astype("i2") - (1 << (bits - 1))
        hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
        values = (codes.reshape(b - a, K, -1, n) @ hadamard).reshape(b - a, K, -1, group.attrs["block"])
        scales = (group["scales"][a:b].astype("u4") << 16).view("f4") / n
        x = ((values * scales[..., None]).astype("f4").reshape(b - a, K, H) * group["channel_scale"][...]).view("u4")
        bits = ((x + 0x7FFF + (x >> 16 & 1)) >> 16).astype("u2")
        if "outliers" in group:
            np.put_along_axis(
                bits,
                np.broadcast_to(group["outlier_channels"][...].astype(int), (b - a, *group["outlier_channels"].shape)),
                group["outliers"][a:b],
                -1,
            )
    assert same_bits(torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16), expected(codec, everything[1]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("stop_at", [1, 4, 8])
def test_a_part_left_unfinished_is_resumed(tmp_path, codec, stop_at):
    samples = rows()
    for root in (tmp_path / "whole", tmp_path / "resumed"):
        store.create_or_open(root, identity(codec))
    write_part(tmp_path / "whole", "part-00000", samples, codec)
    with pytest.raises(RuntimeError), writer(tmp_path / "resumed", "part-00000", samples, codec) as part:
        for row in samples[:stop_at]:
            append(part, row)
        raise RuntimeError("as if killed")
    assert store.committed_parts(tmp_path / "resumed") == [] and store.unfinished(tmp_path / "resumed") == ["part-00000"]
    with writer(tmp_path / "resumed", "part-00000", samples, codec) as part:
        assert part.resume_sample <= stop_at and (part.resume_sample > 0) == (stop_at > 1)
    write_part(tmp_path / "resumed", "part-00000", samples, codec)
    assert content(tmp_path / "resumed") == content(tmp_path / "whole")
    assert store.verify(tmp_path / "resumed", values=True) == []


def test_other_settings_begin_afresh(tmp_path):
    samples = rows()
    store.create_or_open(tmp_path, identity())
    with writer(tmp_path, "part-00000", samples) as part:
        for row in samples[:6]:
            append(part, row)
    write_part(tmp_path, "part-00000", samples[:5])
    assert len(store.HiddenStateStore(tmp_path)) == 5 and store.verify(tmp_path) == []


def test_a_committed_part_is_not_written_again(tmp_path):
    samples = rows()
    make_store(tmp_path / "s", parts=1)
    with writer(tmp_path / "s", "part-00000", samples) as part:
        assert part.already_committed and part.resume_sample == len(samples)
        part.commit()
    assert store.verify(tmp_path / "s") == []


def test_killed_between_manifest_and_rename(tmp_path):
    make_store(tmp_path / "s", parts=1)
    (tmp_path / "s" / "part-00000").rename(tmp_path / "s" / "part-00000.partial")
    assert store.committed_parts(tmp_path / "s") == [] and len(store.HiddenStateStore(tmp_path / "s")) == 0
    assert "not yet renamed" in str(store.verify(tmp_path / "s")[0])
    write_part(tmp_path / "s", "part-00000", rows())
    assert store.committed_parts(tmp_path / "s") == ["part-00000"] and store.verify(tmp_path / "s") == []


def test_second_writer_of_a_part_is_refused(tmp_path):
    samples = rows()
    store.create_or_open(tmp_path, identity())
    with writer(tmp_path, "part-00000", samples) as part:
        with (
            pytest.raises(StoreBusyError, match=r"part-00000\.partial: another process is writing this part"),
            writer(tmp_path, "part-00000", samples),
        ):
            pass
        for row in samples:
            append(part, row)
        part.commit()
    assert store.verify(tmp_path) == [] and not list(tmp_path.glob(".part*"))


def _write_some(root, names):
    for name in names:
        write_part(root, name, rows(LENGTHS[:4], seed=int(name[-5:])))


def test_several_processes_write_parts_of_one_store(tmp_path):
    store.create_or_open(tmp_path, identity())
    context = multiprocessing.get_context("forkserver")
    children = [context.Process(target=_write_some, args=(tmp_path, [f"part-{i:05d}" for i in range(first, 8, 2)])) for first in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    assert store.committed_parts(tmp_path) == [f"part-{i:05d}" for i in range(8)] and store.verify(tmp_path) == []
    opened = store.HiddenStateStore(tmp_path)
    for i in range(8):
        for j, row in enumerate(rows(LENGTHS[:4], seed=i)):
            assert same_bits(opened[4 * i + j].hidden_states(), row.hidden)


def test_readers_share_a_store_between_threads(tmp_path):
    everything = make_store(tmp_path / "s", "int8")
    opened, wrong = store.HiddenStateStore(tmp_path / "s"), []

    def read(seed: int) -> None:
        for i in np.random.default_rng(seed).permutation(len(everything)):
            if not same_bits(opened[int(i)].hidden_states(), expected("int8", everything[i])):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _read_all(opened, everything):
    batch = opened.read_encoded(list(range(len(everything)))).decode()
    assert same_bits(batch, torch.cat([row.hidden.flatten(1) for row in everything]))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_worker_processes_read_what_the_parent_has_open(tmp_path, method):
    everything = make_store(tmp_path / "s")
    with store.HiddenStateStore(tmp_path / "s", threads=2) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking with threads; that is what is tried here
        _read_all(opened, everything)
        children = [multiprocessing.get_context(method).Process(target=_read_all, args=(opened, everything)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
            assert child.exitcode == 0


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
def test_codes_compressed_as_well(tmp_path, codec):
    everything = make_store(tmp_path / "s", codec, zstd=True)
    assert zarr.open_array(tmp_path / "s" / "part-00000" / "codes", mode="r").shape[0] == sum(LENGTHS)
    opened = store.HiddenStateStore(tmp_path / "s")
    for i, row in enumerate(everything):
        assert same_bits(opened[i].hidden_states(), expected(codec, row))
    assert next(array for array in store.summary(opened)["arrays"] if array["name"] == "codes")["zstd"]


def test_a_lost_index_is_made_again_from_whole_parts(tmp_path):
    make_store(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(StoreDamagedError, match="index.json is missing and parts are there"):
        store.create_or_open(tmp_path, identity())
    path = tmp_path / "part-00001" / "buckets" / "c" / "0"
    whole = path.read_bytes()
    path.write_bytes(whole[::-1])
    assert store.rebuild_index(tmp_path) == ["part-00000"]
    path.write_bytes(whole)
    assert store.rebuild_index(tmp_path) == ["part-00000", "part-00001"] and store.verify(tmp_path) == []


def test_committed_hashes_name_part_and_index(tmp_path):
    assert store.committed_hashes(tmp_path / "none") == {} and store.committed_parts(tmp_path / "none") == []
    everything = make_store(tmp_path / "s")
    found = store.committed_hashes(tmp_path / "s")
    assert len(found) == len(everything)
    assert [found[row.sha256] for row in everything] == [(f"part-{i // 10:05d}", i % 10) for i in range(20)]


def test_another_identity_is_refused_by_field(tmp_path):
    store.create_or_open(tmp_path, identity())
    store.create_or_open(tmp_path, identity())
    with pytest.raises(StoreIdentityError, match="codec is 'lossless', wanted 'int8'.*layer_ids is"):
        store.create_or_open(tmp_path, identity("int8", layer_ids=[4]))
    with pytest.raises(StoreIdentityError, match="tokenizer is None, wanted 'x'"):
        store.create_or_open(tmp_path, identity(tokenizer="x"))


def test_foreign_folders_are_left_alone(tmp_path):
    notes = tmp_path / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes\.txt' and is not a store; nothing was touched"):
        store.create_or_open(notes.parent, identity())
    assert list(notes.parent.iterdir()) == [notes]
    with pytest.raises(StoreError, match="is a file"):
        store.create_or_open(notes, identity())
    with pytest.raises(StoreError, match="no hidden-state store here"):
        store.HiddenStateStore(tmp_path / "mine")
    group = tmp_path / "group"
    zarr.open_group(group, mode="w", attributes={"a": 1})
    with pytest.raises(StoreError, match="not a hidden-state store"):
        store.HiddenStateStore(group)


def test_foreign_files_inside_survive_and_are_named(tmp_path):
    samples = rows()
    store.create_or_open(tmp_path, identity())
    with writer(tmp_path, "part-00000", samples) as part:
        append(part, samples[0])
    notes = tmp_path / "part-00000.partial" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(StoreError, match=r"notes\.txt: not written by this program"):
        write_part(tmp_path, "part-00000", samples[:4])
    assert notes.read_text() == "mine"
    notes.rename(tmp_path / "notes.txt")
    write_part(tmp_path, "part-00000", samples)
    assert [str(problem) for problem in store.verify(tmp_path)] == ["notes.txt: not a file of this store"]
    (tmp_path / "part-00007").mkdir()
    with pytest.raises(StoreError, match="exists without a manifest"):
        write_part(tmp_path, "part-00007", samples)


def test_symlinked_root(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    everything = make_store(tmp_path / "link" / "s", parts=1)
    assert same_bits(store.HiddenStateStore(tmp_path / "disk" / "s")[3].hidden_states(), everything[3].hidden)
    assert (tmp_path / "link").is_symlink() and store.verify(tmp_path / "link" / "s") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_one_line(tmp_path):
    make_store(tmp_path / "s", parts=1)
    for path in (tmp_path / "s", tmp_path):
        path.chmod(0o555)
    try:
        assert len(store.HiddenStateStore(tmp_path / "s", verify="deep")) == len(LENGTHS)
        with pytest.raises(StoreError, match="cannot be written"):
            write_part(tmp_path / "s", "part-00009", rows())
        with pytest.raises(StoreError, match="cannot be written"):
            store.create_or_open(tmp_path / "other", identity())
    finally:
        for path in (tmp_path, tmp_path / "s"):
            path.chmod(0o755)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_refused(tmp_path, value):
    samples = rows()
    store.create_or_open(tmp_path, identity())
    samples[3].hidden[9, 2, 5] = value
    with pytest.raises(StoreError, match="sample 103: hidden states are not finite at token 9, captured layer number 2"):
        write_part(tmp_path, "part-00000", samples)
    assert store.committed_parts(tmp_path) == []


def test_a_layer_of_zeros_is_refused_and_a_zero_token_is_not(tmp_path):
    samples = rows()
    store.create_or_open(tmp_path, identity())
    samples[2].hidden[5:] = 0
    write_part(tmp_path, "part-00000", samples)
    assert store.verify(tmp_path, values=True) == []
    samples[4].hidden[:, 1] = 0
    with pytest.raises(StoreError, match="sample 104: hidden states are all zero at captured layer number 1"):
        write_part(tmp_path, "part-00001", samples)


@pytest.mark.parametrize("codec", CODECS)
def test_few_files(tmp_path, codec):
    """A part is as many files as shards and some fixed ones: with a gigabyte of codes in eight shards, under 40."""
    make_store(tmp_path / "s", codec, parts=1, shard_bytes=10**9)
    files = sum(path.is_file() for path in (tmp_path / "s" / "part-00000").rglob("*"))
    bulk = sum(array.bulk for array in make_codec(codec, num_taps=K, hidden_size=H, statistics=statistics_for(codec)).arrays)
    assert files + 7 * bulk < 40


def test_zarrs_reads_the_same(tmp_path):
    pytest.importorskip("zarrs", reason="zarrs is not installed")
    make_store(tmp_path / "s", "int8", parts=1)
    folder = tmp_path / "s" / "part-00000"
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}):
        through_zarrs = {name: zarr.open_array(folder / name, mode="r")[...] for name in ("codes", "scales", "input_ids", "sample_hashes")}
    for name, array in through_zarrs.items():
        assert np.array_equal(array, zarr.open_array(folder / name, mode="r")[...])


def test_a_sample_of_very_many_chunks(tmp_path):
    """More chunks side by side than one system call takes buffers."""
    samples = rows([5, 26_000])
    store.create_or_open(tmp_path / "s", identity("bf16"))
    write_part(tmp_path / "s", "part-00000", samples, "bf16", shard_bytes=10**9)
    assert same_bits(store.HiddenStateStore(tmp_path / "s")[1].hidden_states(), samples[1].hidden)


def test_names_of_parts(tmp_path):
    store.create_or_open(tmp_path, identity())
    with pytest.raises(StoreError, match="no name of a part"):
        writer(tmp_path, "../part-00000", rows())
    assert settings().codec == "lossless"

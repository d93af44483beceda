"""Nothing that happens to a store's files goes unnoticed, and what is said names part, file and samples."""

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from crc32c import crc32c
from small_store import LENGTHS, folder_in_memory, identity, make_store, rows, same_bits, write_part

from dflash_offline import manifest, store
from dflash_offline.errors import StoreDamagedError, StoreError, StoreIdentityError
from dflash_offline.store.schema import write_index


@pytest.fixture(scope="module", params=["lossless", "int4"])
def intact(request):
    """Two parts, shards of 128 tokens, read-only for all tests."""
    with folder_in_memory() as folder:
        make_store(folder / "s", request.param)
        yield folder / "s"


@pytest.fixture
def damaged(intact):
    with folder_in_memory() as folder:
        shutil.copytree(intact, folder / "s")
        yield folder / "s"


def flip(path, offset, bit):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def said(root, **options):
    return [str(problem) for problem in store.verify(root, **options)]


def test_intact(intact):
    progress = []
    assert store.verify(intact, values=True, progress=lambda done, total: progress.append((done, total))) == []
    assert progress[-1][0] == progress[-1][1] > 0


def test_every_flipped_bit_is_found(damaged):
    """Every file, metadata included, at random offsets and at both ends."""
    random.seed(0)
    files = [path for path in sorted(damaged.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 50
    for path in files:
        whole = path.read_bytes()
        for offset in {0, len(whole) - 1, *(random.randrange(len(whole)) for _ in range(6))}:
            flip(path, offset, random.randrange(8))
            problems = said(damaged)
            name = str(path.relative_to(damaged))
            assert any(problem.startswith(name) for problem in problems), (name, offset, problems)
            path.write_bytes(whole)
    assert said(damaged) == []


def test_truncated_emptied_and_missing_files_are_found(damaged):
    for path in [path for path in sorted(damaged.rglob("*")) if path.is_file() and path.stat().st_size]:
        whole, name = path.read_bytes(), str(path.relative_to(damaged))
        for shorter in (whole[:-1], b""):
            path.write_bytes(shorter)
            assert any(problem.startswith(name) for problem in said(damaged, deep=False)), name
        path.unlink()
        if name == "zarr.json":
            assert any(problem.startswith(name) for problem in said(damaged)), name
        else:
            assert any(problem.startswith(name.split("/")[0]) for problem in said(damaged, deep=False)), name
        path.write_bytes(whole)
    assert said(damaged) == []


def test_what_is_no_file_any_more_is_named(damaged):
    array = "sign_mantissa" if (damaged / "part-00001" / "sign_mantissa").exists() else "codes"
    shard = damaged / "part-00001" / array / "c" / "1" / "0" / "0"
    opened = store.HiddenStateStore(damaged, verify="off")
    number = len(opened) - 1
    for make in (shard.mkdir, lambda: shard.symlink_to(shard)):  # as restoring from a backup may leave it
        shard.unlink() if shard.is_file() else shard.rmdir()
        make()
        with pytest.raises(StoreError, match=f"{shard}.*tokens .* cannot be read"):
            opened.read_encoded(range(number))
        with pytest.raises(StoreError, match="part-00001"):
            store.HiddenStateStore(damaged, verify="sizes").read_encoded(range(number))
        assert said(damaged, deep=False)


def test_problems_name_the_samples(damaged):
    array = "sign_mantissa" if (damaged / "part-00001" / "sign_mantissa").exists() else "codes"
    flip(damaged / "part-00001" / array / "c" / "1" / "0" / "0", 5, 1)  # one shard of some tokens
    (problem,) = store.verify(damaged)
    edges, shard_tokens = np.concatenate([[0], np.cumsum(LENGTHS)]), 128 if array == "sign_mantissa" else 256
    tokens = range(shard_tokens, min(2 * shard_tokens, edges[-1]))
    touched = [i for i in range(len(LENGTHS)) if edges[i] < tokens.stop and edges[i + 1] > tokens.start]
    assert problem.samples == (touched[0], touched[-1]) and problem.part == "part-00001"
    assert str(problem) == (
        f"part-00001/{array}/c/1/0/0: content differs from its checksum (samples {touched[0]} to {touched[-1]} of the part)"
    )
    with (
        store.HiddenStateStore(damaged, verify="off") as opened,
        pytest.raises(StoreDamagedError, match=rf"{array}/c/1/0/0.*(checksum|damaged)"),
    ):
        for i in range(10, 20):
            opened[i].hidden_states()


def test_reading_names_the_one_damaged_chunk_among_those_read_at_once(damaged):
    """Chunks side by side are checked in one go; every chunk, and every place in it, must still be found and named."""
    names = [name for name in ("sign_mantissa", "exponents", "codes", "scales") if (damaged / "part-00000" / name).exists()]
    for name in names:
        shard = damaged / "part-00000" / name / "c" / "0" / "0" / "0"
        whole, array = shard.read_bytes(), zarr_json(shard)
        chunks = array["shape"][1] * (array["shard"] // array["chunk"])
        index = np.frombuffer(whole[-16 * chunks - 4 : -4], "<u8").reshape(-1, array["shape"][1], 2)
        with store.HiddenStateStore(damaged, verify="off") as opened:
            wanted = opened.read_encoded(range(10))
            for chunk, tap in np.ndindex(index.shape[:2]):
                offset, size = index[chunk, tap].tolist()
                if offset == 2**64 - 1:
                    continue
                for place in (offset, offset + size // 2, offset + size - 5, offset + size - 4, offset + size - 1):
                    flip(shard, place, random.randrange(8))
                    with pytest.raises(
                        StoreDamagedError, match=rf"{name}/c/0/0/0: the chunk of tap {tap}, tokens from {chunk * array['chunk']} "
                    ):
                        opened.read_encoded(range(10))
                    shard.write_bytes(whole)
            found = opened.read_encoded(range(10))
            assert all(torch.equal(found.arrays[key], wanted.arrays[key]) for key in wanted.arrays)


@pytest.mark.parametrize(("column", "value"), [(0, 1), (0, 2**63), (0, 2**64 - 2), (1, 2**62), (1, 2**40), (1, 0), (1, 3)])
def test_an_index_that_does_not_fit_its_file_is_damage_whatever_its_checksum_says(damaged, column, value):
    array = "exponents" if (damaged / "part-00000" / "exponents").exists() else "codes"
    shard = damaged / "part-00000" / array / "c" / "0" / "0" / "0"
    whole, meta = shard.read_bytes(), zarr_json(shard)
    chunks = meta["shape"][1] * (meta["shard"] // meta["chunk"])
    index = np.frombuffer(whole[-16 * chunks - 4 : -4], "<u8").reshape(-1, 2).copy()
    for chunk in range(chunks):
        changed = index.copy()
        changed[chunk, column] = value
        if (changed == index).all() or index[chunk, 0] == 2**64 - 1:
            continue
        raw = changed.tobytes()
        shard.write_bytes(whole[: -16 * chunks - 4] + raw + crc32c(raw).to_bytes(4, "little"))
        with (
            store.HiddenStateStore(damaged, verify="off") as opened,
            pytest.raises(StoreDamagedError, match=rf"{array}/c/0/0/0: the shard's chunk index does not fit the file"),
        ):
            opened.read_encoded(range(10))


def zarr_json(shard):
    """Shape, tokens of a shard and of a chunk, as the array's metadata has them."""
    raw = json.loads((shard.parents[3] / "zarr.json").read_bytes())
    sharding = raw["codecs"][0]["configuration"]
    return {"shape": raw["shape"], "shard": raw["chunk_grid"]["configuration"]["chunk_shape"][0], "chunk": sharding["chunk_shape"][0]}


def test_extra_files(damaged):
    for name in ("part-00001/extra", "part-00000/input_ids/c/1", "notes.txt", "part-00009/x"):
        (damaged / name).parent.mkdir(exist_ok=True)
        (damaged / name).write_bytes(b"")
    assert [problem.split(":")[0] for problem in said(damaged, deep=False)] == [
        "notes.txt",
        "part-00009",
        "part-00000/input_ids/c/1",
        "part-00001/extra",
    ]


def test_swapped_shards_and_parts(damaged):
    array = next(name for name in ("sign_mantissa", "codes") if (damaged / "part-00001" / name).exists())
    one, other = (damaged / part / array / "c" / "0" / "0" / "0" for part in ("part-00000", "part-00001"))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert [problem.split(":")[0] for problem in said(damaged)] == [f"part-0000{i}/{array}/c/0/0/0" for i in (0, 1)]
    with store.HiddenStateStore(damaged, verify="deep") as opened, pytest.raises(StoreDamagedError, match=f"{array}/c/0/0/0"):
        opened[0].hidden_states()
    one.write_bytes(first)
    other.write_bytes(second)
    (damaged / "part-00000").rename(damaged / "x")
    (damaged / "part-00001").rename(damaged / "part-00000")
    (damaged / "x").rename(damaged / "part-00001")
    assert any("swapped" in problem for problem in said(damaged, deep=False))
    with pytest.raises(StoreDamagedError, match="part-00000: not the part that index.json lists"):
        store.HiddenStateStore(damaged)


def test_edited_manifests(damaged):
    path = damaged / "part-00000" / "manifest.json"
    whole = json.loads(path.read_text())
    for edit in ({"samples": 3}, {"files": {}}, {"key": "other"}, {"digest": "0"}, {"extra": {}}):
        path.write_text(json.dumps({**whole, **edit}))
        assert any(problem.startswith("part-00000/manifest.json") for problem in said(damaged, deep=False)), edit
        with pytest.raises(StoreDamagedError):
            store.HiddenStateStore(damaged)
    content = {name: value for name, value in whole.items() if name != "digest"} | {"samples": 3}
    path.write_text(json.dumps({**content, "digest": manifest.digest(content)}))  # a digest made anew does not help
    assert any("index lists" in problem for problem in said(damaged, deep=False))


def test_missing_part_is_named_and_captured_again(damaged):
    codec = "lossless" if (damaged / "part-00000" / "sign_mantissa").exists() else "int4"
    shutil.rmtree(damaged / "part-00000")
    assert said(damaged) == ["part-00000: the part's folder is missing"]
    with pytest.raises(StoreDamagedError, match="part-00000.*folder is missing; capture again"):
        store.HiddenStateStore(damaged)
    assert store.committed_parts(damaged) == ["part-00001"]
    write_part(damaged, "part-00000", rows(), codec)
    assert said(damaged) == [] and len(store.HiddenStateStore(damaged)) == 20


@pytest.mark.parametrize("mode", ["sizes", "deep"])
def test_training_refuses_a_truncated_file_when_it_opens(damaged, mode):
    path = damaged / "part-00001" / "loss_mask" / "c" / "0"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StoreDamagedError, match=r"part-00001: loss_mask/c/0: .* bytes, manifest says"):
        store.HiddenStateStore(damaged, verify=mode)


def test_deleted_chunk_never_reads_as_zeros(damaged):
    for path in sorted((damaged / "part-00000").glob("*/c/**/*")):
        if path.is_file():
            whole = path.read_bytes()
            path.unlink()
            with pytest.raises(StoreDamagedError, match=path.relative_to(damaged / "part-00000").parts[0]):
                opened = store.HiddenStateStore(damaged, verify="off")
                for i in range(10):
                    opened[i].hidden_states()
            path.write_bytes(whole)


def test_absent_array_attribute_and_codec_are_named(damaged):
    group = damaged / "part-00000" / "zarr.json"
    whole = group.read_text()
    group.write_text(whole.replace('"num_taps"', '"taps"'))
    with pytest.raises(StoreDamagedError, match=r"attribute 'num_taps' is missing \(every format version has it\)"):
        store.HiddenStateStore(damaged, verify="off")[0].hidden_states()
    group.write_text(whole)
    shutil.move(damaged / "part-00000" / "input_ids", damaged / "ids")
    with pytest.raises(StoreDamagedError, match="array 'input_ids' is missing"):
        store.HiddenStateStore(damaged, verify="off")[0]
    shutil.move(damaged / "ids", damaged / "part-00000" / "input_ids")
    array = "sign_mantissa" if (damaged / "part-00000" / "sign_mantissa").exists() else "codes"
    meta = damaged / "part-00000" / array / "zarr.json"
    meta.write_text(meta.read_text().replace('"crc32c"', '"crc99"'))
    with pytest.raises(StoreDamagedError, match=f"array '{array}' is stored with codec 'crc99'"):
        store.HiddenStateStore(damaged, verify="off")[0].hidden_states()


def test_newer_format_is_refused_with_the_release_needed(damaged):
    group = damaged / "zarr.json"
    raw = json.loads(group.read_text())
    raw["attributes"] |= {"format_version": 3, "reader_needed": "3.1"}
    group.write_text(json.dumps(raw))
    assert said(damaged)[0].startswith("zarr.json: content differs")
    index = json.loads((damaged / "index.json").read_text())
    write_index(damaged, {**index, "group": [group.stat().st_size, manifest.checksum(group)]})
    for use in (store.HiddenStateStore, store.verify, lambda path: store.create_or_open(path, {})):
        with pytest.raises(StoreError, match="store format version 3; this release reads up to 2. Install dflash_offline 3.1 or later"):
            use(damaged)


@pytest.mark.parametrize("attributes", [[1], {"identity": None}, {"identity": ["codec"]}])
def test_attributes_that_are_no_object_are_named(damaged, attributes):
    group = damaged / "zarr.json"
    raw = json.loads(group.read_text())
    raw["attributes"] = raw["attributes"] | attributes if isinstance(attributes, dict) else attributes
    group.write_text(json.dumps(raw))
    wrong = "attribute identity" if isinstance(attributes, dict) else "attributes is"
    for use in (store.HiddenStateStore, lambda path: store.create_or_open(path, {})):
        with pytest.raises(StoreDamagedError, match=rf"zarr\.json: not valid \({wrong} .*no object\); it has been damaged$"):
            use(damaged)


def test_damaged_index_still_checks_the_parts(damaged):
    (damaged / "index.json").write_text("{")
    flip(damaged / "part-00001" / "loss_mask" / "c" / "0", 3, 0)
    problems = said(damaged)
    assert problems[0].startswith("index.json: ") and any(problem.startswith("part-00001/loss_mask/c/0") for problem in problems)
    with pytest.raises(StoreDamagedError, match=r"index\.json"):
        store.HiddenStateStore(damaged)


def test_zeros_that_belong_are_no_alarm():
    with folder_in_memory() as folder:
        store.create_or_open(folder, {"layer_ids": [1, 2, 3]})
        samples = rows()
        for row in samples:
            row.hidden[2:] = 0
            row.loss_mask[:] = 0
            row.input_ids[:] = 0
        write_part(folder, "part-00000", samples, "bf16")
        assert said(folder) == [] and same_bits(store.HiddenStateStore(folder)[7].hidden_states(), samples[7].hidden)


def test_values_that_were_wrong_before_they_were_written(monkeypatch):
    with folder_in_memory() as folder:
        store.create_or_open(folder, {"layer_ids": [1, 2, 3]})
        samples = rows()
        samples[1].hidden[3, 1, 2] = np.nan
        samples[2].hidden[3, 1, 2] = np.inf
        samples[3].hidden[:, 2] = 0
        samples[4].hidden = samples[4].hidden[:1].repeat(65, 1, 1)
        samples[9].hidden, samples[9].input_ids = samples[7].hidden[:90], samples[9].input_ids
        samples[7] = type(samples[7])(
            107, samples[7].sha256, 0, samples[7].input_ids[:90], samples[7].loss_mask[:90], samples[7].hidden[:90]
        )
        monkeypatch.setattr("dflash_offline.store.writer.check_values", lambda *_: None)
        write_part(folder, "part-00000", samples)
        assert store.verify(folder) == []
        assert said(folder, values=True) == [
            "part-00000: hidden states are not finite (samples 1 to 1 of the part)",
            "part-00000: hidden states are not finite (samples 2 to 2 of the part)",
            "part-00000: hidden states of a layer are all zero (samples 3 to 3 of the part)",
            "part-00000: same hidden states as sample 7 of the store, whose ids differ (samples 9 to 9 of the part)",
        ]


def test_parts_with_other_channel_statistics_are_refused():
    with folder_in_memory() as folder:
        make_store(folder / "s", "int8", parts=1)
        from small_store import settings

        from dflash_offline.codecs import ChannelStatistics

        samples = rows(seed=4)
        other = ChannelStatistics.from_rows([samples[0].hidden])
        part = store.PartWriter(
            folder / "s",
            "part-00001",
            store_settings=settings("int8"),
            num_taps=3,
            hidden_size=64,
            num_tokens=5,
            num_samples=1,
            statistics=other,
        )
        with pytest.raises(StoreIdentityError, match="part-00000 was written with other channel statistics"), part:
            pass


@pytest.mark.parametrize("hidden", [1025, 9024, 1023, 512])
def test_a_part_whose_width_was_edited_is_refused_before_a_byte_is_read_to_memory(tmp_path, hidden):
    """Chunks are read to addresses that follow from it. Checksums of so small a file are compared by ``deep`` only."""
    store.create_or_open(tmp_path / "s", identity("bf16", layer_ids=list(range(8))))
    write_part(tmp_path / "s", "part-00000", rows([500, 300], taps=8, hidden=1024), "bf16", shard_bytes=1 << 28)
    part = tmp_path / "s" / "part-00000"
    part_group, array = part / "zarr.json", part / "hidden_states" / "zarr.json"
    for path, old, new in (
        (part_group, '"hidden_size": 1024', f'"hidden_size": {hidden}'),
        (part_group, '"num_taps": 8', '"num_taps": 9'),
        (part_group, '"codec": "bf16"', '"codec": "int8"'),
        (array, "1024", str(hidden)),
        (array, "64", "78"),
        (array, "uint16", "uint32"),
    ):
        whole = path.read_text()
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(StoreDamagedError, match=r"zarr\.json|metadata"):
            store.HiddenStateStore(tmp_path / "s", verify="off").read_encoded([1])
        path.write_text(whole)
    assert store.HiddenStateStore(tmp_path / "s").read_encoded([1]).offsets.tolist() == [0, 300]


def test_a_part_that_says_it_has_no_outlier_channels_is_not_read_without_them(tmp_path):
    make_store(tmp_path / "s", "int4", parts=1)
    group = tmp_path / "s" / "part-00000" / "zarr.json"
    attributes = json.loads(group.read_text())
    assert attributes["attributes"]["outlier_channels"] > 0
    attributes["attributes"]["outlier_channels"] = 0
    group.write_text(json.dumps(attributes))
    with pytest.raises(StoreDamagedError, match="does not fit the part's manifest"):
        store.HiddenStateStore(tmp_path / "s", verify="off").read_encoded([1])


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_files_of_another_user_are_named_and_not_called_damaged():
    code = """
import os, sys
import dflash_offline.store.batch  # while this user may read the libraries
from dflash_offline import store
from dflash_offline.errors import StoreError
os.setuid(65534)
for problem in store.verify(sys.argv[1]):
    print("problem", problem)
for verify in ("deep", "off"):
    try:
        store.HiddenStateStore(sys.argv[1], verify).read_encoded([1])
    except StoreError as error:
        print(type(error).__name__, error)
"""
    with folder_in_memory() as folder:
        folder.chmod(0o755)
        make_store(folder / "s", "lossless", parts=2)
        named = ["part-00000/exponents/c/0/0/0", "part-00001/input_ids/zarr.json"]
        for name in named:
            (folder / "s" / name).chmod(0)
        ran = subprocess.run([sys.executable, "-c", code, str(folder / "s")], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    problems = [line for line in ran.stdout.splitlines() if line.startswith("problem")]
    refused = ran.stdout.splitlines()[len(problems) :]
    assert len(problems) == 2 and all("cannot be read (Permission denied)" in line for line in problems), problems
    assert all(name in line.replace(": ", "/") for name, line in zip(named, problems, strict=True)), problems
    assert len(refused) == 2 and all(line.startswith("StoreError ") and "Permission denied" in line for line in refused), refused
    assert all(named[0] in line for line in refused)


def test_a_frame_that_says_it_is_huge_is_damage_where_only_part_of_it_is_wanted(tmp_path):
    """A right checksum over 2^40 bytes that are not there."""
    make_store(tmp_path / "s", "lossless", parts=1)
    array = tmp_path / "s" / "part-00000" / "exponents"
    shard = array / "c" / "0" / "0" / "0"
    raw, chunks = shard.read_bytes(), zarr_json(shard)
    chunks = chunks["shape"][1] * (chunks["shard"] // chunks["chunk"])
    index = np.frombuffer(raw[-16 * chunks - 4 : -4], "<u8").reshape(-1, 2)
    size = int(index[0, 1])
    frame = b"\x28\xb5\x2f\xfd\xc0" + b"\x00" + (1 << 40).to_bytes(8, "little")
    frame = frame.ljust(size - 4, b"\x00")
    shard.write_bytes(frame + crc32c(frame).to_bytes(4, "little") + raw[size:])
    with pytest.raises(StoreDamagedError, match=r"what is compressed in tap 0, tokens from 0 cannot be read"):
        store.HiddenStateStore(tmp_path / "s", verify="off").read_tokens(0, 0, 3)

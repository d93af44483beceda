"""What is damaged while a part is being written is never committed, and the next run makes it anew."""

import dataclasses
import errno
import os
import shutil

import numpy as np
import pytest
from small_store import append, content, folder_in_memory, identity, rows, same_bits, write_part, writer

from dflash_offline import manifest, store
from dflash_offline.corpus import row_hash
from dflash_offline.errors import StoreError


def flip(path, offset, bit):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def hashed_rows():
    """Rows that go by their true hash, as those of a corpus do."""
    return [dataclasses.replace(row, sha256=row_hash(row.input_ids, row.loss_mask)) for row in rows()]


@pytest.fixture(scope="module", params=["lossless", "int4"])
def undisturbed(request):
    """Codec, rows, and the store that they make when nothing happens."""
    samples = hashed_rows()
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity(request.param))
        write_part(folder / "s", "part-00000", samples, request.param)
        yield request.param, samples, folder / "s"


@pytest.fixture
def begun(undisturbed):
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity(undisturbed[0]))
        yield folder / "s"


def run(root, samples, codec, damage=None):
    """A run that captures what is missing of the part and commits it; ``damage`` is done just before the commit."""
    with writer(root, "part-00000", samples, codec) as part:
        begin = part.resume_sample
        for row in samples[begin:]:
            append(part, row)
        if damage is not None:
            part._wait_for_shards(leave=0)
            damage(part.partial, part.journal.folder)
        part.commit({"replica": 0})
    return begin


def assert_as_undisturbed(root, undisturbed):
    codec, samples, whole = undisturbed
    assert content(root) == content(whole) and store.verify(root, values=True) == []
    with store.HiddenStateStore(root, verify="deep") as opened, store.HiddenStateStore(whole) as expected:
        for i, row in enumerate(samples):
            assert np.array_equal(opened[i].input_ids, row.input_ids) and np.array_equal(opened[i].loss_mask, row.loss_mask)
            assert same_bits(opened[i].hidden_states(), expected[i].hidden_states())


def shard(partial, number):
    return partial / ("exponents" if (partial / "exponents").exists() else "codes") / "c" / str(number) / "0" / "0"


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def link(path):
    path.symlink_to("/nonexistent")


REFUSED = {
    "a byte of the first shard": (lambda p, w: flip(shard(p, 0), 900, 3), r"c/0/0/0: content differs .* anew from shard 0 on"),
    "a byte of a later shard": (lambda p, w: flip(shard(p, 2), 900, 3), r"c/2/0/0: content differs .* anew from shard 2 on"),
    "a later shard cut": (lambda p, w: cut(shard(p, 1)), r"c/1/0/0: [\d,]+ bytes, [\d,]+ were written; .* anew from shard 1 on"),
    "a shard deleted": (lambda p, w: shard(p, 0).unlink(), r"c/0/0/0: missing; .* anew from shard 0 on"),
    "an array deleted": (
        lambda p, w: shutil.rmtree(shard(p, 0).parents[3]),
        r"c/0/0/0: missing \(and \d more of its files\); .* shard 0 on",
    ),
    "a token's id": (
        lambda p, w: flip(w / "input_ids.spool", 4 * 240, 2),
        r"input_ids\.spool: differs .* sample 2 \(corpus row 102\) of part-00000; .* anew from shard [01] on",
    ),
    "a mask bit": (
        lambda p, w: flip(w / "loss_mask.spool", 6, 0),
        r"loss_mask\.spool: differs .* sample 1 \(corpus row 101\) of part-00000; .* anew from shard 0 on",
    ),
    "ids cut": (lambda p, w: os.truncate(w / "input_ids.spool", 40), r"input_ids\.spool: differs .* of part-00000; .* shard 0 on"),
    "ids deleted": (lambda p, w: (w / "input_ids.spool").unlink(), r"input_ids\.spool: .* of part-00000; .* shard 0 on"),
    "samples": (lambda p, w: flip(w / "samples.spool", 3, 0), r"samples\.spool: differs .* the samples of shard 0 of part-00000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_damaged_before_the_commit_is_made_anew(case, undisturbed, begun):
    damage, message = REFUSED[case]
    codec, samples, _ = undisturbed
    with pytest.raises(StoreError, match=message) as refused:
        run(begun, samples, codec, damage)
    assert "\n" not in str(refused.value) and "run the same command again" in str(refused.value)
    assert store.committed_parts(begun) == [] and not (begun / "part-00000.partial" / "manifest.json").exists()
    begin = run(begun, samples, codec)
    assert (begin > 0) == ("shard 0" not in str(refused.value)) and begin < len(samples)
    assert_as_undisturbed(begun, undisturbed)


@pytest.mark.parametrize("name", ["scales", "outliers"])
def test_spooled_rows_of_the_codec_are_compared_too(name):
    samples = hashed_rows()
    with folder_in_memory() as folder:
        for root in ("whole", "s"):
            store.create_or_open(folder / root, identity("int4"))
        with pytest.raises(StoreError, match=rf"{name}\.spool: differs .* samples 0 to \d \(corpus row 100 to 10\d\)"):
            run(folder / "s", samples, "int4", lambda p, w: flip(w / f"{name}.spool", 11, 4))
        for root in ("whole", "s"):
            run(folder / root, samples, "int4")
        assert_as_undisturbed(folder / "s", ("int4", samples, folder / "whole"))


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), cut, lambda path: flip(path, 40, 1)])
def test_metadata_is_written_again_by_the_commit(damage, undisturbed, begun):
    codec, samples, _ = undisturbed

    def all_of_it(partial, _):
        for path in [partial / "zarr.json", *partial.glob("*/zarr.json")]:
            damage(path)

    run(begun, samples, codec, all_of_it)
    assert_as_undisturbed(begun, undisturbed)


@pytest.mark.parametrize("name", ["extra.bin", "input_ids/extra.bin", "notes/mine.txt"])
@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"x"), link])
def test_a_foreign_file_is_named_and_costs_nothing(make, name, undisturbed, begun):
    codec, samples, _ = undisturbed
    foreign = begun / "part-00000.partial" / name

    def put(partial, _):
        foreign.parent.mkdir(exist_ok=True)
        make(foreign)

    for damage in (put, None):
        with pytest.raises(StoreError, match=rf"{foreign}: not written by this program, .* move it away and run the same command again"):
            run(begun, samples, codec, damage)
    foreign.unlink()
    assert run(begun, samples, codec) == len(samples)
    assert_as_undisturbed(begun, undisturbed)


@pytest.fixture
def misread(monkeypatch):
    """Makes the first ``times`` reads of a file go wrong: another checksum, or an error."""

    def arrange(ending, *, times, error=None):
        real, left = manifest.checksum, [times]

        def checksum(path):
            if not str(path).endswith(ending) or not left[0]:
                return real(path)
            left[0] -= 1
            if error is not None:
                raise OSError(error, os.strerror(error), str(path))
            return "0" * 32

        monkeypatch.setattr(manifest, "checksum", checksum)

    return arrange


@pytest.mark.parametrize("error", [None, errno.EIO])
@pytest.mark.parametrize("file", ["c/0/0/0", "input_ids/c/0", "zarr.json"])
def test_a_file_misread_once_is_no_damage(file, error, misread, undisturbed, begun):
    codec, samples, _ = undisturbed
    misread(file, times=1, error=error)
    run(begun, samples, codec)
    assert_as_undisturbed(begun, undisturbed)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_read_back(error, misread, undisturbed, begun):
    codec, samples, _ = undisturbed
    misread("c/1/0/0", times=2, error=error)
    with pytest.raises(StoreError, match=rf"c/1/0/0: cannot be read back \({os.strerror(error)}\); nothing was committed"):
        run(begun, samples, codec)
    assert not (begun / "part-00000.partial" / "manifest.json").exists()
    misread("c/1/0/0", times=1, error=error)
    with pytest.raises(StoreError, match=r"c/1/0/0: cannot be read back"):
        run(begun, samples, codec)
    assert run(begun, samples, codec) == len(samples)
    assert_as_undisturbed(begun, undisturbed)


def with_true_sums(partial, edit=None):
    """The manifest as a release made it that believed what lies there: sums of the files as they are, its digest made anew."""
    found = manifest.read_json(partial / "manifest.json")
    sums = {file: [(partial / file).stat().st_size, manifest.checksum(partial / file)] for file in found["files"]}
    written = {name: value for name, value in found.items() if name != "digest"} | {"files": sums} | (edit or {})
    manifest.write_json(partial / "manifest.json", {**written, "digest": manifest.digest(written)})


UNLISTED = {
    "as it was": (lambda p: None, True),
    "shard damaged": (lambda p: (flip(shard(p, 1), 900, 3), with_true_sums(p)), False),
    "id damaged": (lambda p: (flip(p / "input_ids" / "c" / "0", 40, 0), with_true_sums(p)), True),
    "metadata damaged": (lambda p: (cut(shard(p, 0).parents[3] / "zarr.json"), with_true_sums(p)), True),
    "files left out": (lambda p: with_true_sums(p, {"files": {}}), True),
    "edited": (lambda p: flip(p / "manifest.json", 50, 1), None),
    "emptied": (lambda p: (p / "manifest.json").write_bytes(b""), None),
}


@pytest.mark.parametrize("case", UNLISTED)
def test_a_manifest_that_is_not_yet_listed_is_not_believed(case, undisturbed, begun, monkeypatch):
    """Killed right after the manifest: the next writer compares everything with the journal before it gives the part its name."""
    damage, at_once = UNLISTED[case]
    codec, samples, _ = undisturbed

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store.PartWriter, "_publish", killed)
        run(begun, samples, codec)
    damage(begun / "part-00000.partial")
    with writer(begun, "part-00000", samples, codec) as part:
        assert part.already_committed == bool(at_once) and (part.resume_sample == len(samples)) == (at_once is not False)
        for row in samples[part.resume_sample :]:
            append(part, row)
        part.commit({"replica": 1})
    assert_as_undisturbed(begun, undisturbed)
    assert manifest.read_json(begun / "part-00000" / "manifest.json")["extra"] == {"replica": 0 if at_once else 1}


def test_a_listed_part_whose_shards_are_in_an_object_store_only_gets_its_name():
    """Killed right before the rename: nothing is left here to make the part anew from, and nothing needs to be."""
    samples = hashed_rows()
    with folder_in_memory() as folder:
        root = folder / "here" / "s"
        store.create_or_open(root, identity(), url=(folder / "there").as_uri())
        write_part(root, "part-00000", samples)
        assert not any(path.is_file() for path in root.glob("part-00000/exponents/c/**/*"))
        (root / "part-00000").rename(root / "part-00000.partial")
        with writer(root, "part-00000", samples) as part:
            assert part.already_committed
        with store.HiddenStateStore(root) as opened:
            assert store.verify(root) == [] and same_bits(opened[7].hidden_states(), samples[7].hidden)


def test_what_nfs_leaves_of_an_open_file_is_not_foreign(undisturbed, begun):
    codec, samples, _ = undisturbed
    run(begun, samples, codec, lambda partial, _: (partial / ".nfs0000000000a1b2c3").write_bytes(b"deleted while open"))
    with store.HiddenStateStore(begun) as opened:
        assert opened.parts == ["part-00000"]

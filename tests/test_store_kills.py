"""SIGKILL while writing, a full disk: nothing partial counts, and the next run finishes what was begun."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from small_store import append, content, folder_in_memory, identity, rows, write_part, writer

from dflash_offline import store
from dflash_offline.environment import environment
from dflash_offline.errors import StoreFullError

LENGTHS = [40, 333, 64, 129, 5] * 12
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["zarr", "dflash_offline.store", "small_store"])  # children start in a moment, not in seconds


def _write(root, codec, started):
    """As a capture process does it: shards of 64 tokens, so that most moments are inside a write."""
    samples = rows(LENGTHS)
    started.set()
    for name in ("part-00000", "part-00001"):
        write_part(root, name, samples, codec, shard_bytes=1)


def _start(root, codec):
    started = FORKSERVER.Event()
    child = FORKSERVER.Process(target=_write, args=(root, codec, started))
    child.start()
    assert started.wait(120)
    return child


def kill_and_finish(tmp_path, codec: str, kills: int, seed: int) -> int:
    """Kill the writer at ``kills`` random moments, each time going on with what is there; returns how many hit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for root in (whole, killed):
        store.create_or_open(root, identity(codec))
    child = _start(whole, codec)
    begun = time.perf_counter()
    child.join(300)
    duration, hits, chance = time.perf_counter() - begun, 0, random.Random(seed)
    for _ in range(kills):
        child = _start(killed, codec)
        time.sleep(chance.uniform(0, duration / max(1, kills) * 2))
        child.kill()
        child.join()
        hits += child.exitcode == -signal.SIGKILL
        assert {*store.committed_parts(killed)} <= {"part-00000", "part-00001"}
        with store.HiddenStateStore(killed, verify="deep") as opened:  # what counts is whole at every moment
            for i in range(0, len(opened), 17):
                opened[i].hidden_states()
    child = _start(killed, codec)
    child.join(300)
    assert child.exitcode == 0
    assert content(killed) == content(whole)
    assert store.verify(killed) == [] and not list(killed.glob(".part*")) and not list(killed.glob("*.partial"))
    return hits


@pytest.mark.parametrize(("codec", "kills"), [("lossless", 5), pytest.param("int4", 5, marks=pytest.mark.long)])
def test_killed_writers_leave_the_same_store(codec, kills):
    with folder_in_memory() as folder:
        assert kill_and_finish(folder, codec, kills, seed=1) > 0


def test_killed_after_the_last_shard(tmp_path):
    """All tokens are safe, the part is not committed: what is there must not be written over."""
    samples = rows(LENGTHS[:3])
    for name in ("killed", "whole"):
        store.create_or_open(tmp_path / name, identity())
    with writer(tmp_path / "killed", "part-00000", samples) as part:
        for row in samples:
            append(part, row)
        part._finish_shard()
    with writer(tmp_path / "killed", "part-00000", samples) as part:
        assert part.resume_sample == 3
        part.commit()
    write_part(tmp_path / "whole", "part-00000", samples)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_temporary_files_of_a_killed_writer_do_not_stay(tmp_path):
    """Found by the fifty kills: one inside the writing of metadata left a file that became part of the part."""
    samples = rows(LENGTHS[:3])
    for name in ("killed", "whole"):
        store.create_or_open(tmp_path / name, identity())
    with writer(tmp_path / "killed", "part-00000", samples) as part:
        append(part, samples[0])
    partial = tmp_path / "killed" / "part-00000.partial"
    planted = [
        partial / "sign_mantissa" / ".zarr.json.51-1400.tmp",
        partial / ".manifest.json.51.tmp",
        tmp_path / "killed" / ".index.json.51-1400.tmp",
    ]
    for path in planted:
        path.write_text("{")
    for name in ("killed", "whole"):
        write_part(tmp_path / name, "part-00000", samples)
    assert content(tmp_path / "killed") == content(tmp_path / "whole") and store.verify(tmp_path / "killed") == []
    assert not any(path.exists() for path in planted)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["bf16", "lossless", "int8", "int6", "int4"])
def test_killed_fifty_times(tmp_path, codec):
    """What came of it goes into the file that STORE_KILLS_RESULTS names, if one is named."""
    began = time.monotonic()
    hits = sum(kill_and_finish(tmp_path / str(seed), codec, 5, seed) for seed in range(2, 12))
    assert hits > 30
    if results := os.environ.get("STORE_KILLS_RESULTS"):
        path = Path(results)
        known = json.loads(path.read_text()) if path.is_file() else {}
        codecs = known.get("codecs", {}) | {
            codec: {"kills": 50, "while_writing": hits, "stores_equal": 10, "seconds": round(time.monotonic() - began, 1)}
        }
        told = {
            "what": "SIGKILL at random moments of a capture-like writer, five to a store, each time resumed from what was there; then "
            "every file compared with an undisturbed store",
            "environment": {name: value for name, value in environment().items() if name != "platform"},
            "codecs": codecs,
        }
        path.write_text(json.dumps(told, indent=1) + "\n")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip() or 'no permission'}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("codec", ["lossless", "int4"])
def test_full_disk_at_twenty_points(small_disk, codec):
    samples = rows(LENGTHS[:20])
    with folder_in_memory() as folder:
        store.create_or_open(folder / "s", identity(codec))
        write_part(folder / "s", "part-00000", samples, codec, shard_bytes=1)
        needed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for point in range(20):
            root, ballast = small_disk / "s", small_disk / "ballast"
            store.create_or_open(root, identity(codec))
            free = needed * point // 20 // 4096 * 4096
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * 4096 - free)
            with pytest.raises(StoreFullError, match=r"the disk is full; this part needs up to [1-9][\d,]+ bytes more"):
                write_part(root, "part-00000", samples, codec, shard_bytes=1)
            assert store.committed_parts(root) == [] and store.verify(root) == []
            ballast.unlink()
            with writer(root, "part-00000", samples, codec, shard_bytes=1) as part:
                for row in samples[part.resume_sample :]:
                    append(part, row)
                part.commit()
            assert content(root) == content(folder / "s") and store.verify(root) == []
            subprocess.run(["rm", "-r", str(root)], check=True)

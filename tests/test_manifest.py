"""Whole-file writes and manifests: complete or absent, damage named, nothing half-written after a kill."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_offline import manifest as manifests
from dflash_offline.errors import DFlashError, StoreFullError
from dflash_offline.manifest import MANIFEST, damaged_files, read_json, read_manifest, write_bytes, write_json, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "sub" / "b.txt").write_text("hello")
    (tmp_path / "empty").touch()
    return tmp_path


def test_round_trip(folder: Path) -> None:
    written = write_manifest(folder, kind="corpus", key="0123", counts={"rows": 3}, note="Größe")
    found = read_manifest(folder, kind="corpus")
    assert found == written
    assert set(found["files"]) == {"a.bin", "sub/b.txt", "empty"}
    assert (found["key"], found["counts"], found["note"]) == ("0123", {"rows": 3}, "Größe")
    assert damaged_files(folder, found, deep=True) == []


def test_content_that_json_changes_still_fits_its_digest(folder: Path) -> None:
    # 10 sorts after 2 as a number and before it as text
    write_manifest(folder, kind="x", key="k", by_number={10: 1, 2: 1, 1: 1}, pair=(1, 2), exact=0.1 + 0.2)
    assert read_manifest(folder)["by_number"] == {"1": 1, "2": 1, "10": 1}


def test_records_what_made_it(folder: Path) -> None:
    environment = write_manifest(folder, kind="x", key="k")["environment"]
    assert environment["python"].startswith("3.")
    assert environment["torch"][0].isdigit()
    assert "dflash_offline" in environment and "zarr" in environment and "transformers" in environment


def test_environment_does_not_load_torch() -> None:
    code = "import sys; from dflash_offline.manifest import environment; environment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_manifest_means_not_complete(folder: Path) -> None:
    with pytest.raises(DFlashError, match="not complete; run the stage"):
        read_manifest(folder)


def test_wrong_kind_is_refused(folder: Path) -> None:
    write_manifest(folder, kind="corpus", key="k")
    with pytest.raises(DFlashError, match="holds a 'corpus', wanted a 'drafter'"):
        read_manifest(folder, kind="drafter")


@pytest.mark.parametrize("edit", [{"key": "other"}, {"extra": 1}, {"digest": "0"}, {"files": {}}])
def test_every_edit_is_noticed(folder: Path, edit: dict[str, object]) -> None:
    found = write_manifest(folder, kind="corpus", key="k")
    (folder / MANIFEST).write_text(json.dumps(found | edit))
    with pytest.raises(DFlashError, match="edited or damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_a_manifest_that_is_none(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DFlashError, match=MANIFEST):
        read_manifest(folder)


def test_single_flipped_bits_of_the_manifest_are_noticed(folder: Path) -> None:
    write_manifest(folder, kind="corpus", key="k")
    whole = (folder / MANIFEST).read_bytes()
    chosen = random.Random(0)
    for _ in range(60):
        at = chosen.randrange(len(whole))
        flipped = bytearray(whole)
        flipped[at] ^= 1 << chosen.randrange(8)
        if bytes(flipped).split() == whole.split():
            continue  # white space is not content
        (folder / MANIFEST).write_bytes(flipped)
        with pytest.raises(DFlashError):
            read_manifest(folder)


def test_damage_is_named(folder: Path) -> None:
    found = write_manifest(folder, kind="x", key="k")
    (folder / "a.bin").write_bytes(b"\x01" + (folder / "a.bin").read_bytes()[1:])
    (folder / "sub" / "b.txt").write_text("hello!")
    (folder / "empty").unlink()
    assert damaged_files(folder, found, deep=False) == ["empty: missing", "sub/b.txt: 6 bytes, manifest says 5"]
    assert damaged_files(folder, found, deep=True) == [
        "a.bin: content differs from its checksum",
        "empty: missing",
        "sub/b.txt: 6 bytes, manifest says 5",
    ]


def test_only_named_files(folder: Path) -> None:
    assert set(write_manifest(folder, kind="x", key="k", files=["a.bin"])["files"]) == {"a.bin"}
    with pytest.raises(FileNotFoundError):
        write_manifest(folder, kind="x", key="k", files=["absent"])


def test_what_a_killed_write_left_is_not_listed(folder: Path) -> None:
    (folder / ".results.json.4711-1.tmp").write_text("{")
    assert set(write_manifest(folder, kind="x", key="k")["files"]) == {"a.bin", "sub/b.txt", "empty"}


def test_checksum_does_not_depend_on_the_read_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(os.urandom(10_000))
    whole = manifests.checksum(tmp_path / "x")
    monkeypatch.setattr(manifests, "_READ_BYTES", 7)
    assert manifests.checksum(tmp_path / "x") == whole


def test_files_read_by_several_threads_are_listed_alike(folder: Path) -> None:
    for i in range(9):
        (folder / f"shard-{i}").write_bytes(os.urandom(100_000 * i))  # an empty one too
    alone = write_manifest(folder, kind="corpus", key="k")
    with ThreadPoolExecutor(3) as executor:
        together = write_manifest(folder, kind="corpus", key="k", executor=executor)
        assert together == alone and list(together["files"]) == list(alone["files"]) and len(alone["files"]) > 9
        (folder / MANIFEST).unlink()
        with pytest.raises(FileNotFoundError):
            write_manifest(folder, kind="corpus", key="k", files=["shard-1", "gone"], executor=executor)
    assert not (folder / MANIFEST).exists()


def test_full_disk_says_so_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFullError, match="the disk is full; 2 bytes were needed"):
        write_json(path, 2)
    assert read_json(path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    path, faults = tmp_path / "x.json", []

    def write(number: int) -> None:
        try:
            for _ in range(50):
                write_json(path, [number] * 1000, durable=False)
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert len(set(read_json(path))) == 1
    assert not faults
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_killed_at_any_moment_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    code = f"""
from pathlib import Path
from dflash_offline.manifest import write_json
n = 0
while True:
    n += 1
    write_json(Path({str(path)!r}), [n] * 20_000)
"""
    for delay_s in (0.0, 0.013, 0.031):
        child = subprocess.Popen([sys.executable, "-c", code])
        try:
            deadline = time.monotonic() + 30
            before = path.stat().st_mtime_ns if path.exists() else None
            while not path.exists() or path.stat().st_mtime_ns == before:
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(delay_s)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        found = read_json(path)
        assert len(found) == 20_000 and len(set(found)) == 1


def test_read_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{'a': 1}")
    with pytest.raises(DFlashError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(DFlashError, match="cannot be read"):
        read_json(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")

"""Leases: one winner, heartbeats, takeover at once from the dead and after a while from the silent."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_offline.errors import StoreFullError
from dflash_offline.leases import Leases, machine_identity, process_start
from pipelines import places


def make_old(path: Path, seconds: float) -> None:
    stamp = path.stat().st_mtime - seconds
    os.utime(path, (stamp, stamp))


def test_a_lease_is_held_until_released(tmp_path: Path) -> None:
    first, second = Leases(tmp_path, what="replica 0"), Leases(tmp_path, host="elsewhere")
    lease = first.claim("part-00001")
    assert lease is not None and lease.is_held
    assert second.claim("part-00001") is None
    assert "replica 0" in str(second.holding("part-00001").owner)
    assert second.claim("part-00002") is not None
    lease.release()
    taken = second.claim("part-00001")
    assert taken is not None and taken.generation == 1
    assert not lease.is_held
    taken.discard()
    assert second.holding("part-00001") is None
    assert not list(tmp_path.glob("part-00001*"))


def test_one_of_many_wins(tmp_path: Path) -> None:
    claimants = [Leases(tmp_path, host=f"host{i}") for i in range(8)]
    for round_ in range(20):
        barrier = threading.Barrier(len(claimants))

        def claim(leases: Leases, name: str = f"part-{round_:05}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return leases.claim(name) is not None

        with ThreadPoolExecutor(len(claimants)) as pool:
            assert sum(pool.map(claim, claimants)) == 1


def test_silent_owner_on_another_host_expires_and_learns_of_it(tmp_path: Path) -> None:
    there, here = Leases(tmp_path, host="there"), Leases(tmp_path)
    lease = there.claim("part-00001")
    make_old(lease.path, 59)
    assert here.claim("part-00001") is None
    make_old(lease.path, 2)
    taken = here.claim("part-00001")
    assert taken is not None and taken.is_held and not lease.is_held
    lease.beat()  # too late: the higher generation counts
    assert there.claim("part-00001") is None and taken.is_held


def test_heartbeats_keep_it(tmp_path: Path) -> None:
    there = Leases(tmp_path, host="there", heartbeat_s=0.05)
    lease = there.claim("part-00001")
    make_old(lease.path, 1000)
    deadline = time.monotonic() + 10
    while Leases(tmp_path).holding("part-00001").is_free:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.02)
    there.close()
    assert Leases(tmp_path).holding("part-00001").is_free


def test_dead_process_of_this_machine_is_taken_over_at_once(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from dflash_offline.leases import Leases; import time; l = Leases(Path({str(tmp_path)!r}));"
        "l.claim('part-00001'); print('claimed', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"claimed\n"
    leases = Leases(tmp_path)
    assert leases.claim("part-00001") is None
    process.kill()
    process.wait()
    process.stdout.close()
    assert leases.claim("part-00001") is not None


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"machine": "another container"}])
def test_pid_says_nothing_about_another_machine(tmp_path: Path, change: dict[str, str]) -> None:
    leases = Leases(tmp_path)
    lease = leases.claim("part-00001")
    owner = json.loads(lease.path.read_text()) | {"pid": 2**22 + 1} | change
    lease.path.write_text(json.dumps(owner))
    assert not leases.holding("part-00001").is_free
    lease.path.write_text(json.dumps(owner | {"host": leases.owner.host, "machine": machine_identity()}))
    assert leases.holding("part-00001").is_free


def test_pid_used_again_is_another_process(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    lease = leases.claim("part-00001")
    assert process_start(os.getpid()) == leases.owner.started != ""
    lease.path.write_text(json.dumps(json.loads(lease.path.read_text()) | {"started": "1"}))
    assert leases.holding("part-00001").is_free


def test_empty_lease_file_counts_as_fresh(tmp_path: Path) -> None:
    """Between its creation and its content a lease has no owner to look at, and must not be taken for a dead one's."""
    leases = Leases(tmp_path)
    path = leases.path("part-00001", 0)
    path.touch()
    assert leases.claim("part-00001") is None
    make_old(path, 61)
    assert leases.claim("part-00001").generation == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk with no byte free: ``filled`` takes it all."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip() or 'no permission'}")
    (folder / "leases").mkdir()
    (folder / "logs").mkdir()
    with contextlib.suppress(OSError), (folder / "filled").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_in_a_line_and_leaves_nothing_that_holds_others_up(full_disk: Path) -> None:
    places.came_first.cache_clear()
    leases = Leases(full_disk / "leases", heartbeat_s=0.05)
    with pytest.raises(StoreFullError, match=r"part-0\.0\.lease: the disk is full\. Make space and run the same command again"):
        leases.claim("part-0")
    with pytest.raises(StoreFullError, match="first-host: the disk is full"):
        places.came_first(full_disk / "logs")
    assert not list((full_disk / "leases").glob("*.lease")) and not list((full_disk / "logs").iterdir())
    (full_disk / "filled").unlink()
    lease = leases.claim("part-0")
    assert lease is not None and lease.is_held and places.came_first(full_disk / "logs")
    leases.close()
    places.came_first.cache_clear()

"""The disk that the root is on: kind, space, locks, clock, and rates measured with a file of 128 MB; the object store, if any."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_offline.config import RunConfig
from dflash_offline.doctor.check import Check, existing

_PROBE_BYTES = 128 << 20
_REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "fuse.sshfs", "9p")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_FEW_BYTES = 10e9
_OBJECT_BYTES = 8 << 20
_SLOW_MB_PER_S = 100
_CLOCK_S = 5.0  # leases expire after 60 s of silence by the file server's clock; hosts must not differ by much


def disk(config: RunConfig) -> Iterator[Check]:
    folder = existing(config.root_dir)
    usage, kind = shutil.disk_usage(folder), file_system(folder.resolve())
    few, in_memory = usage.free < _FEW_BYTES, kind in _MEMORY_FILE_SYSTEMS
    advice = (
        "it is lost with the next restart: choose a root on a disk"
        if in_memory
        else "see `dflash-offline plan` for what the run needs"
        if few
        else ""
    )
    text = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.0f} on {folder} ({kind}{device_kind(folder)})"
    yield Check("disk", "warn" if few or in_memory else "ok", text, advice)
    if not os.access(folder, os.W_OK):
        yield Check("root", "fail", f"{folder} is not writable", "choose another root in the run file")
        return
    probe = folder / f".dflash-doctor-{os.getpid()}"
    try:
        yield locks(probe, kind)
        yield clock(probe)
        if usage.free > 4 * _PROBE_BYTES:
            yield _rates(probe)
    except OSError as error:
        yield Check("disk", "fail", f"{folder}: {error.strerror}", "choose another root in the run file")
    finally:
        probe.unlink(missing_ok=True)


def object_store(config: RunConfig) -> Iterator[Check]:
    """An object of 8 MB is put below ``[store] url``, read again and deleted. Whether what is fetched can be kept on this host."""
    if config.store.url is None:
        return
    if config.store.cache_folder is not None:
        folder = Path(config.store.cache_folder).expanduser()
        there = existing(folder)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            found = f"{folder} cannot be written: every epoch would fetch the whole store again"
            yield Check("cache folder", "warn", found, "make it writable for this user, or name another [store] cache_folder")
    from dflash_offline.errors import StoreError
    from dflash_offline.store import open_objects

    name, content = f".dflash-doctor-{os.getpid()}", os.urandom(_OBJECT_BYTES)
    try:
        objects = open_objects(config.store.url)
        begun = time.perf_counter()
        objects.put(name, content)
        put = time.perf_counter()
        same, read = objects.get(name) == content, time.perf_counter()
        objects.delete([name])
    except StoreError as error:
        where, _, what = str(error).partition(": ")
        yield Check("object store", "fail", f"{where}: {what}", "see `In an object store` in docs/store.md")
        return
    rates = f"one connection writes {len(content) / 1e6 / (put - begun):.0f} and reads {len(content) / 1e6 / (read - put):.0f} MB/s"
    text = f"{config.store.url}: {rates}" if same else f"{config.store.url}: what was read is not what was written"
    yield Check("object store", "ok" if same else "fail", text, "" if same else "choose another [store] url")


def file_system(path: Path) -> str:
    """Type of the file system a path lies on, from the longest mount point above it."""
    best, found = -1, "?"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        mount = mount.encode().decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) > best:
            best, found = len(mount), kind
    return found


def device_kind(path: Path, *, system: Path = Path("/sys/dev/block")) -> str:
    """``, NVMe``, ``, SSD``, ``, spinning disk`` or ``, virtual disk`` of a path on a local device; nothing where that is not told."""
    number = path.stat().st_dev
    with contextlib.suppress(OSError):
        device = (system / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
        for holder in (device, device.parent):  # a partition has its disk above it
            if (holder / "queue" / "rotational").is_file():
                if holder.name.startswith(("vd", "xvd")):
                    return ", virtual disk"  # what it is behind that is not told
                spins = (holder / "queue" / "rotational").read_text().strip() == "1"
                return ", NVMe" if holder.name.startswith("nvme") else ", spinning disk" if spins else ", SSD"
    return ""


def locks(probe: Path, kind: str) -> Check:
    """A second flock on a file must be refused; some network file systems grant it, and two runs would write one part."""
    with probe.open("w") as first, probe.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Check(
                "file locks", "fail", f"flock on {kind}: {error.strerror}", "mount the file system with locks (NFS: v4, or lockd running)"
            )
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            remote = kind in _REMOTE_FILE_SYSTEMS
            advice = "checked on this host only; for several hosts the server must hold the locks" if remote else ""
            return Check("file locks", "ok", f"work on {kind}", advice)
    return Check("file locks", "fail", f"flock on {kind} lets two writers in", "choose a root on a file system with locks")


def clock(probe: Path) -> Check:
    """Time stamps of the root's file server against this host's clock: who may take over a dead host's part is judged by them."""
    with probe.open("w") as file:
        file.write("x")
        file.flush()
        os.fsync(file.fileno())
    apart = abs(probe.stat().st_mtime - time.time())
    far = apart > _CLOCK_S
    advice = "set the clocks by NTP: a part could be taken over from a host that still works on it" if far else ""
    return Check("clock", "warn" if far else "ok", f"{apart:.1f} s from that of the disk's server", advice)


def _rates(probe: Path) -> Check:
    content = os.urandom(1 << 20)
    begin = time.perf_counter()
    with probe.open("wb", buffering=0) as file:
        for _ in range(_PROBE_BYTES >> 20):
            file.write(content)
        os.fsync(file.fileno())
        written_s = time.perf_counter() - begin
    with probe.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while file.read(1 << 20):
            pass
        read_s = time.perf_counter() - begin
    write, read = (_PROBE_BYTES / seconds / 1e6 for seconds in (written_s, read_s))
    slow = read < _SLOW_MB_PER_S
    advice = "training reads the store all the time; choose a faster disk if wait= in the status line is not near 0" if slow else ""
    return Check("disk rate", "warn" if slow else "ok", f"writes {write:,.0f} MB/s with fsync, reads {read:,.0f} MB/s (128 MB)", advice)

"""Which GPUs a stage runs on, and a lock on each so that two runs never share one.

Nothing here imports torch: GPUs are found with ``nvidia-smi``. The ``gpus`` of a run file index the caller's own
``CUDA_VISIBLE_DEVICES`` where that is set (numbers or UUIDs, as a batch system hands them out), else all GPUs of the
machine. A model process sees exactly one GPU, which it calls ``cuda:0``.

The lock is one ``flock`` per GPU of this host, in a folder that several users can share. The file descriptor is
handed to the model process, so that the GPU stays locked exactly as long as someone computes on it, and a crash of
any kind frees it.
"""

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_offline import nvidia
from dflash_offline.errors import ConfigError, ProcessError

if TYPE_CHECKING:
    from dflash_offline.config import TrainConfig

POLL_S = 0.25


@lru_cache
def _listed() -> dict[str, str]:
    """UUID of every GPU of this machine by its number; empty where there is none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return {index: uuid for index, uuid in nvidia.ask("index", "uuid")}
    return {}


@lru_cache
def _capabilities() -> dict[str, tuple[int, int]]:
    """Compute capability of every GPU of this machine by its UUID; none where the driver is too old to tell."""
    found: dict[str, tuple[int, int]] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for uuid, text in nvidia.ask("uuid", "compute_cap"):
            major, _, minor = text.partition(".")
            if major.isdecimal() and minor.isdecimal():  # else [N/A] or the like
                found[uuid] = int(major), int(minor)
    return found


def visible() -> list[str]:
    """Physical ids of the GPUs this process may use, in the order the run file counts them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(_listed())
    # like CUDA itself: everything from the first entry that is no GPU is ignored
    return list(takewhile(lambda entry: entry and entry != "-1", (entry.strip() for entry in given.split(","))))


def resolve(gpus: list[int] | str, count: int = 1, *, where: str = "gpus") -> list[str | None]:
    """``gpus`` of a run file -> the physical id for each process's ``CUDA_VISIBLE_DEVICES``; None stands for the CPU.

    Args:
        gpus: indices, ``"all"`` or ``"cpu"``.
        count: processes on the CPU (``replicas`` or ``ranks``); GPUs run one process each.
        where: how messages name the setting, for example ``"[target] gpus"``.

    Raises:
        ConfigError: this machine (or ``CUDA_VISIBLE_DEVICES``) does not have them.
    """
    if gpus == "cpu":
        return [None] * count
    found = visible()
    limited = "CUDA_VISIBLE_DEVICES" in os.environ
    have = f"CUDA_VISIBLE_DEVICES shows {len(found)}" if limited else f"this machine has {len(found)} NVIDIA GPUs"
    if gpus == "all":
        if not found:
            raise ConfigError(f'{where} = "all": {have}; set {where.split()[-1]} = "cpu" to run without')
        return list(found)
    assert isinstance(gpus, list)
    if missing := [gpu for gpu in gpus if gpu >= len(found)]:
        allowed = f"name GPUs from 0 to {len(found) - 1}" if found else 'set it to "cpu" to run without'
        raise ConfigError(f"{where} = {gpus}: {have}, so there is no GPU {missing[0]}; {allowed}")
    return [found[gpu] for gpu in gpus]


def check_settings(train: "TrainConfig", devices: Iterable[str | None], *, where: str = "[train]") -> None:
    """Refuse settings that a device cannot train with (physical ids; None: the CPU). A GPU that does not tell what it is passes.

    Raises:
        ConfigError: a setting, and what to use in its place.
    """
    if train.why_not((0, 0)) is None:
        return  # they run anywhere: no program has to be asked
    for device in devices:
        capability = None if device is None else _capabilities().get(lock_name(device))
        if (device is None or capability is not None) and (reason := train.why_not(capability)):
            raise ConfigError(f"{where} {reason}" if device is None else f"{where} {reason} (GPU {device})")


def lock_name(gpu: str) -> str:
    """One name for a GPU however it is written: number, UUID, or the start of a UUID."""
    listed = _listed()
    if gpu in listed:
        return listed[gpu]
    full = [uuid for uuid in listed.values() if uuid.startswith(gpu)]
    return full[0] if len(full) == 1 else f"gpu-{gpu}"


def lock_folder() -> Path:
    return Path(tempfile.gettempdir()) / "dflash-gpu-locks"


def open_shared(path: Path) -> int:
    """Open a lock file for every user of the machine, creating it and its folder where needed."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o777)
    while True:
        try:  # without O_CREAT first: Linux refuses O_CREAT on another user's file in a world-writable folder
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(descriptor, 0o666)  # whatever the umask
                return descriptor


@contextlib.contextmanager
def locked(path: Path, what: str, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock file ``path``; while somebody else does, say so once ("waiting for WHAT, held by pid N") and wait.

    Yields the file descriptor. Passed on to a child, it keeps the lock until the child has ended as well.
    """
    try:
        descriptor = open_shared(path)
    except OSError as error:
        raise ProcessError(f"{path}: the lock file cannot be opened ({error.strerror}); make it writable for this user") from None
    try:
        waiting = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                    say(f"waiting for {what}, held by pid {holder or '?'}")
                    waiting = True
                time.sleep(POLL_S)
            except OSError as error:
                raise ProcessError(f"{path}: this file system has no locks ({error.strerror}); put it on one that has") from None
        _name_holder(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lease(gpus: list[str], say: Callable[[str], None]) -> Iterator[list[int]]:
    """Hold the locks of several GPUs, taken in one order everywhere so that two runs cannot wait for each other."""
    with contextlib.ExitStack() as stack:
        names = sorted({lock_name(gpu): gpu for gpu in gpus}.items())
        yield [stack.enter_context(locked(lock_folder() / f"{name}.lock", f"GPU {gpu}", say)) for name, gpu in names]


@contextlib.contextmanager
def any_of(
    paths: dict[str, Path],
    count: int,
    say: Callable[[str], None],
    *,
    tick: Callable[[], None] = lambda: None,
    until: str | None = None,
) -> Iterator[dict[str, int]]:
    """Hold ``count`` of several lock files, whichever are free first; nothing is held while waiting.

    Args:
        paths: lock file by what it locks, for messages ("GPU 5").
        say: told once when there is something to wait for.
        tick: called about four times a second while waiting.
        until: what it waits for, in words; how many of which locks, when left out.

    Yields:
        The descriptor of each lock held, by what it locks.
    """
    assert 0 < count <= len(paths)
    waiting = False
    while True:
        with contextlib.ExitStack() as stack:
            held: dict[str, int] = {}
            for what, path in paths.items():
                if len(held) < count and (descriptor := stack.enter_context(try_locked(path))) is not None:
                    held[what] = descriptor
            if len(held) == count:
                yield held
                return
        if not waiting:
            say("queued: waits " + (until or f"for {count} of {', '.join(paths)}"))
            waiting = True
        tick()
        time.sleep(POLL_S)


@contextlib.contextmanager
def try_locked(path: Path) -> Iterator[int | None]:
    """Hold the lock file ``path`` if nobody else does; yields its descriptor, or None."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = open_shared(path)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stack.close()
            descriptor = None
        except OSError as error:
            raise ProcessError(
                f"{path}: cannot be locked ({error.strerror}); put it on a file system that has locks, writable for this user"
            ) from None
        if descriptor is not None:
            _name_holder(descriptor)
        yield descriptor


def _name_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

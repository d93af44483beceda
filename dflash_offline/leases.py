"""Who is writing which part: lease files in a folder that several processes, on several hosts, may share.

A lease on ``part-00012`` is the file ``part-00012.3.lease``, 3 being its generation; the highest generation counts.
Claiming creates the next generation exclusively (``O_EXCL``), so of any number of claimants one wins and nothing has to
be locked, renamed or deleted first. The file names its owner; its time stamp is the heartbeat, touched by a thread of
the owner. Ages are taken between two time stamps of the same file system (the observer touches a file of its own), so
hosts whose clocks differ agree.

A lease is free again when it was released (time stamp 0), when its heartbeat is older than ``expires_s``, or at once
when its owner ran on this very machine and is gone (its pid is free, or belongs to a process that started at another
time). An owner that lost its lease while it was stopped sees that a higher generation exists, and must stop writing.
"""

import contextlib
import json
import os
import re
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_offline.errors import StoreError, StoreFullError
from dflash_offline.manifest import disk_is_full

EXPIRES_S = 60.0
HEARTBEAT_S = 5.0
_NAME = re.compile(r"(?P<name>.+)\.(?P<generation>\d+)\.lease")


@dataclass(frozen=True)
class Owner:
    """A process: its host's name, what tells this machine (and container) from others, its pid and start time, a word about it."""

    host: str
    machine: str
    pid: int
    started: str
    what: str

    def is_gone(self, *, seen_by: "Owner") -> bool:
        """Whether it certainly no longer runs. Of another machine's process nothing is certain."""
        if (self.host, self.machine) != (seen_by.host, seen_by.machine):
            return False
        return process_start(self.pid) != self.started

    def __str__(self) -> str:
        return f"{self.what or 'a process'} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Holding:
    """The newest lease on a name: its generation, its owner if the file could be read, the heartbeat's age, whether it is free."""

    generation: int
    owner: Owner | None
    age_s: float
    is_free: bool


def machine_identity() -> str:
    """Tells machines and containers apart that have the same host name: boot id and pid namespace."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def process_start(pid: int) -> str:
    """When a process of this machine started, in the kernel's clock ticks since boot; empty when there is no such process.

    Together with the pid it names a process for good: pids are used again. Without /proc every live pid gives "alive".
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return ""
        return "alive"
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in parentheses may hold spaces
    return "" if fields[0] in ("Z", "X") else fields[19]


class Lease:
    """A name held by this process. Touched by a thread of its ``Leases`` until ``release``."""

    def __init__(self, leases: "Leases", name: str, generation: int) -> None:
        self.name, self.generation = name, generation
        self._leases = leases
        self.path = leases.path(name, generation)

    @property
    def is_held(self) -> bool:
        """False once another process took it over. Ask before every write that must not meet another writer's."""
        return self.path.exists() and not self._leases.path(self.name, self.generation + 1).exists()

    def beat(self) -> None:
        """Renew the heartbeat (the file server's clock, not this host's)."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def release(self) -> None:
        """Let others have it at once."""
        self._leases.forget(self)
        with contextlib.suppress(OSError):
            os.utime(self.path, (0, 0))

    def discard(self) -> None:
        """Remove every trace of the name: what it guarded is finished, and nobody will claim it again."""
        self._leases.forget(self)
        for generation in range(self.generation, -1, -1):
            with contextlib.suppress(OSError):
                self._leases.path(self.name, generation).unlink()


class Leases:
    """Leases of one folder, as one process sees and holds them.

    Args:
        folder: shared by all who claim; created.
        what: a word about this process for messages, for example "replica 2".
        expires_s: a heartbeat older than this means that the owner is gone.
        heartbeat_s: time between heartbeats.
        host: this host's name; given only to pretend to be another one.
    """

    def __init__(
        self, folder: Path, *, what: str = "", expires_s: float = EXPIRES_S, heartbeat_s: float = HEARTBEAT_S, host: str | None = None
    ) -> None:
        self.folder, self.expires_s, self.heartbeat_s = Path(folder), expires_s, heartbeat_s
        self.folder.mkdir(parents=True, exist_ok=True)
        self.owner = Owner(host or socket.gethostname(), machine_identity(), os.getpid(), process_start(os.getpid()), what)
        self._clock = self.folder / f".clock-{self.owner.host}-{self.owner.pid}"
        self._held: dict[str, Lease] = {}
        self._lock = threading.RLock()  # a signal handler may release what its own thread is claiming
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def path(self, name: str, generation: int) -> Path:
        return self.folder / f"{name}.{generation}.lease"

    def claim(self, name: str) -> Lease | None:
        """The lease on ``name`` if it is free and no other process was quicker, else None.

        Raises:
            StoreFullError: the disk is full.
            StoreError: the folder cannot be written.
        """
        holding = self.holding(name)
        if holding is not None and not holding.is_free:
            return None
        generation = holding.generation + 1 if holding else 0
        path = self.path(name, generation)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(asdict(self.owner), file)
            except BaseException:
                path.unlink(missing_ok=True)  # without its owner it would hold everyone up until it expires
                raise
        except FileExistsError:
            return None
        except OSError as error:
            if disk_is_full(error):
                raise StoreFullError(f"{path}: the disk is full. Make space and run the same command again") from None
            raise StoreError(f"{path}: {error.strerror or error}; the folder of leases must be writable") from None
        lease = Lease(self, name, generation)
        with self._lock:
            self._held[name] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="lease heartbeats", daemon=True)
                self._thread.start()
        return lease

    def holding(self, name: str) -> Holding | None:
        """Who holds ``name``, or held it last; None when nobody ever did (or it was discarded)."""
        return self.all([name]).get(name)

    def all(self, names: list[str] | None = None) -> dict[str, Holding]:
        """The newest lease on each of ``names`` (None: on every name), from one listing of the folder."""
        newest: dict[str, int] = {}
        for entry in os.scandir(self.folder):
            if found := _NAME.fullmatch(entry.name):
                name, generation = found["name"], int(found["generation"])
                if names is None or name in names:
                    newest[name] = max(generation, newest.get(name, -1))
        now = self._now() if newest else 0.0
        holdings = {}
        for name, generation in newest.items():
            path = self.path(name, generation)
            try:
                beat = path.stat().st_mtime
                owner = Owner(**json.loads(path.read_bytes()))
            except FileNotFoundError:  # discarded meanwhile
                continue
            except (OSError, ValueError, TypeError):  # created a moment ago, its owner's name not yet in it; or cut by a full disk
                owner = None
            free = beat == 0 or now - beat > self.expires_s or (owner is not None and owner.is_gone(seen_by=self.owner))
            holdings[name] = Holding(generation, owner, max(0.0, now - beat), free)
        return holdings

    def forget(self, lease: Lease) -> None:
        with self._lock:
            self._held.pop(lease.name, None)

    def close(self) -> None:
        """Release whatever is still held and stop the heartbeats."""
        self._stop.set()
        for lease in list(self._held.values()):
            lease.release()
        with contextlib.suppress(OSError):
            self._clock.unlink()

    def _now(self) -> float:
        """The time as the folder's file system has it."""
        with contextlib.suppress(OSError):
            self._clock.touch()
            os.utime(self._clock)
            return self._clock.stat().st_mtime
        return 0.0  # a folder that cannot be written: nothing counts as expired

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat_s):
            with self._lock:
                held = list(self._held.values())
            for lease in held:
                lease.beat()

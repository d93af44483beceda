"""Where the processes of a stage run: the GPUs of this host, and what several drafters share of them."""

import contextlib
import functools
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_offline.config import RunConfig, same_host
from dflash_offline.config.drafters import own_gpus
from dflash_offline.errors import ConfigError, StoreFullError
from dflash_offline.gpus import any_of, lock_folder, lock_name, resolve
from dflash_offline.manifest import disk_is_full


def host_folder() -> str:
    """This host's name, fit to be a folder's."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())


@functools.lru_cache
def came_first(logs: Path) -> bool:
    """Whether this host is the first that ran anything at a root; noted in the folder of its logs.

    Raises:
        StoreFullError: the disk is full.
        ConfigError: the folder cannot be written.
    """
    note, name = logs / "first-host", host_folder()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), note.open("x") as file:
            try:
                file.write(name)
                file.flush()
            except OSError:
                note.unlink()
                raise
        return note.read_text() == name
    except OSError as error:
        if disk_is_full(error):
            raise StoreFullError(f"{note}: the disk is full. Make space and run the same command again") from None
        raise ConfigError(f"{note}: {error.strerror or error}; logs of the run must be writable") from None


def capture_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each replica."""
    return resolve(config.target.gpus, config.target.replicas, where="[target] gpus")


def train_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each rank of this host."""
    return resolve(config.train.gpus, config.train.ranks, where="[train] gpus")


def regenerate_gpus(config: RunConfig) -> list[str | None]:
    """The GPU of each process that answers; servers are asked by one process."""
    section = config.regenerate
    if section.backend == "server":
        return [None]
    gpus, where = (config.target.gpus, "[target] gpus") if section.gpus is None else (section.gpus, "[regenerate] gpus")
    return resolve(gpus, section.replicas, where=where)


def evaluate_gpu(config: RunConfig) -> str | None:
    """The GPU of the evaluation."""
    where = "[train] gpus" if config.evaluate.gpus is None else "[evaluate] gpus"
    return resolve(config.evaluation_gpus, where=where)[0]


# ---- one of several drafters


@dataclass(frozen=True)
class Held:
    """Devices a drafter has now: the GPU of each of its processes (None: the CPU), and the locks on them."""

    gpus: list[str | None]
    descriptors: list[int]


@dataclass(frozen=True)
class Share:
    """Devices that one of several drafters may run on.

    Attributes:
        gpus: physical id by name ("GPU 5"); of a CPU one None for each drafter that may run at a time.
        count: how many of them it takes.
        processes: it runs on them.
        locks: folder of the lock files of a CPU's places.
        peers: processes that this host runs at a time when all places are taken.
    """

    gpus: dict[str, str | None]
    count: int
    processes: int
    locks: Path
    peers: int

    @contextlib.contextmanager
    def hold(self, say: Callable[[str], None], *, tick: Callable[[], None]) -> Iterator[Held]:
        """Wait until enough of the devices are free, and hold them."""
        paths = {
            name: self.locks / f"{host_folder()}-{name.replace(' ', '-')}.lock" if gpu is None else lock_folder() / f"{lock_name(gpu)}.lock"
            for name, gpu in self.gpus.items()
        }
        until = "until another drafter's processes leave the CPU cores" if None in self.gpus.values() else None
        with any_of(paths, self.count, say, tick=tick, until=until) as held:
            gpus = [self.gpus[name] for name in held]
            yield Held(gpus if len(gpus) == self.processes else gpus * self.processes, list(held.values()))


def training_share(config: RunConfig, name: str, *, locks: Path) -> Share:
    """What a drafter trains on: the GPUs of its entry, all of them; or its part of those in [train], any that are free.

    With fewer GPUs than drafters each takes one, and the last ones queue; else they are dealt out evenly.

    Raises:
        ConfigError: this host has not got them, or there is none left to share.
    """
    train = config.for_drafter(name).train
    entry = next(entry for entry in config.drafters if entry["name"] == name)
    sharing = [other for other in config.drafters if "gpus" not in other]
    if train.gpus == "cpu":
        return _cpu_share(config, train.ranks, locks=locks)
    if "gpus" in entry:
        mine = resolve(train.gpus, where=f"[[drafters]] {name}: gpus")
        return Share({f"GPU {gpu}": gpu for gpu in mine}, len(mine), len(mine), locks, len(mine))
    taken = set(resolve(list(own_gpus(config.drafters)), where="[[drafters]] gpus"))
    left = [gpu for gpu in train_gpus(config) if gpu not in taken]
    if not left:
        raise ConfigError(f"[train] gpus: every GPU of this host is named by an entry of [[drafters]], so {name} has none")
    count = max(1, len(left) // len(sharing))
    return Share({f"GPU {gpu}": gpu for gpu in left}, count, count, locks, len(left))


def evaluation_share(config: RunConfig, name: str, *, locks: Path) -> Share:
    """What a drafter is evaluated on: one GPU of [evaluate], any that is free, or of those it trains on."""
    gpus = config.for_drafter(name).evaluation_gpus
    if gpus == "cpu":
        return _cpu_share(config, 1, locks=locks)
    if config.evaluate.gpus is None:
        known = training_share(config, name, locks=locks).gpus
    else:
        known = {f"GPU {gpu}": gpu for gpu in resolve(gpus, where="[evaluate] gpus")}
    return Share(known, 1, 1, locks, len(known))


def _cpu_share(config: RunConfig, processes: int, *, locks: Path) -> Share:
    """As many drafters at a time as there are cores for their processes, at least one."""
    places = min(len(config.drafters), max(1, len(os.sched_getaffinity(0)) // processes))
    return Share({f"CPU place {i}": None for i in range(1, places + 1)}, 1, processes, locks, places * processes)


# ---- several nodes


@dataclass(frozen=True)
class Node:
    """This host's place among [train] nodes: its number, its first rank, and ranks in all."""

    number: int
    first_rank: int
    world_size: int
    address: str
    port: int


def node_of_this_host(config: RunConfig) -> Node | None:
    """Where this host stands in [train] nodes; None when it is not among them."""
    train, host = config.train, socket.gethostname()
    number = next((i for i, node in enumerate(train.nodes) if same_host(node, host)), None)
    if number is None:
        return None
    ranks = config.ranks_of_nodes()
    return Node(number, sum(ranks[:number]), sum(ranks), train.master_address or train.nodes[0], train.master_port)

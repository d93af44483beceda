"""One line of ``dflash-offline doctor``, and what puts all of them together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_offline.config import RunConfig

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """``advice`` is empty where nothing is to be done."""

    name: str
    level: Level
    found: str
    advice: str = ""


def examine(config: RunConfig) -> list[Check]:
    """All checks for a run file on this machine, in the order they are printed."""
    from dflash_offline.doctor import conversations, hosts, machine, scheduler, software, storage

    groups: list[Callable[[RunConfig], Iterator[Check]]] = [
        software.python,
        software.torch_build,
        software.compilers,
        machine.gpus,
        hosts.hosts,
        machine.target,
        conversations.conversations,
        machine.drafters,
        machine.limits,
        storage.disk,
        storage.object_store,
        scheduler.luigid,
    ]
    return [check for group in groups for check in group(config)]


def wants_gpu(config: RunConfig) -> bool:
    """Whether any of the run's models runs on one."""
    return config.target.gpus != "cpu" or config.train.gpus != "cpu" or config.evaluate.gpus not in (None, "cpu")


def existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path

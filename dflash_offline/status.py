"""Where a run stands, read from its files alone: any terminal, any host that sees the root, while it runs or after."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.figures import counted
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest
from dflash_offline.progress import UNITS, read_progress, sum_of_rates
from dflash_offline.watch import hosts as host_files
from dflash_offline.watch.gpus import GpuReader
from dflash_offline.watch.metrics import read_metrics

_SHOWN_WARNINGS = 5
_MADE = ("complete", "deleted")
_STALE_S = 600.0  # a progress file that is older belongs to a process that is gone or hangs


@dataclass(frozen=True)
class Process:
    """One model process as its progress file tells it.

    Attributes:
        alive: None for a process of another host.
        ended: it said so itself: done, stopped or failed; a process that is neither alive nor ended was killed.
        key: content key of its stage; None before it was known.
        of_this_run: False where the key is another one than the run file leads to now: a process of another run file.
        unit: what ``done`` and ``total`` count.
        host: where it runs; ``gpu``: the physical id of its GPU there, None on the CPU.
        warnings: its last ones, each with its time (unix seconds).
    """

    name: str
    stage: str
    pid: int
    alive: bool | None
    age_s: float
    done: int | None
    total: int | None
    text: str
    ended: bool = False
    key: str | None = None
    of_this_run: bool = True
    unit: str = ""
    host: str = ""
    gpu: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    warnings: list[tuple[float, str]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.text.startswith("error:")


@dataclass(frozen=True)
class Stage:
    """One stage of the run: ``state`` is complete, running, queued (for GPUs), failed, partial, pending, deleted (a store whose drafter is
    trained) or unknown (the run file does not say enough for its key). ``numbers``: rates of its processes together, and the
    time left. ``drafter``: its name where the run file has several."""

    name: str
    key: str | None
    folder: str | None
    state: str
    detail: str
    numbers: dict[str, float] = field(default_factory=dict)
    drafter: str = ""


@dataclass(frozen=True)
class Status:
    """All of it; ``to_dict`` for ``--json``.

    Attributes:
        hosts: this one, and the others that compute under the root now (``watch/hosts.py``).
        trainings: the last logged step by drafter (an empty name for the only one); ``training`` is that of the only one.
        warnings: faults of the run file, errors and the last warnings of its processes.
    """

    root: str
    stages: list[Stage]
    processes: list[Process]
    hosts: list[dict[str, Any]]
    training: dict[str, Any] | None
    trainings: dict[str, dict[str, Any]]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(config: RunConfig) -> Status:
    """Work out the keys of the run file as it is now and look what is there."""
    layout = Layout(config.root_dir)
    warnings: list[str] = []
    known: list[tuple[_Place, str | None]] = []
    for place in _places(layout, config):
        try:
            known.append((place, place.key_of(place.config)))
        except DFlashError as error:
            if str(error) not in warnings:  # the same fault of the run file mostly stops every stage
                warnings.append(str(error))
            known.append((place, None))
    keys_of = {name: {key for place, key in known if place.stage == name} for name in UNITS}
    processes = [replace(process, of_this_run=_is_of(process, keys_of)) for process in running_processes(layout)]
    corpus_key = next((key for place, key in known if place.stage == "corpus"), None)
    train_keys = [key for place, key in known if place.stage == "train" and key is not None]
    stages = []
    for place, key in known:
        mine = [
            process
            for process in processes
            if process.stage == place.stage
            and process.key in (key, None)
            and _seems_alive(process)
            and not _is_partial(process, place.config.name)
        ]
        stages.append(_stage(layout, place, key, mine, corpus_key=corpus_key, train_keys=train_keys, warnings=warnings))
    trainings = {
        place.config.name: row
        for place, key in known
        if place.stage == "train" and key is not None and (row := last_metrics(layout.metrics(key))) is not None
    }
    made: set[tuple[str, str | None]] = {(stage.name, stage.key) for stage in stages if stage.state in _MADE}
    made |= {(name, None) for name in UNITS if all(stage.state in _MADE for stage in stages if stage.name == name)}
    telling = [process for process in processes if process.of_this_run and not _made_good(process, processes, made)]
    failed = [process for process in telling if process.failed]
    warnings += [f"{process.name}: {process.text}" for process in failed]
    stages = [replace(stage, state="failed") if _has_failed(stage, failed) else stage for stage in stages]
    told = sorted((moment, process.name, text) for process in telling for moment, text in process.warnings)
    warnings += [f"{time.strftime('%d %b %H:%M', time.localtime(moment))} {name}: {text}" for moment, name, text in told[-_SHOWN_WARNINGS:]]
    only = next(iter(trainings.values())) if len(trainings) == 1 else None
    return Status(str(layout.root), stages, processes, _hosts(layout), only, trainings, warnings)


@dataclass(frozen=True)
class _Place:
    """Where a stage's result is, and by which run file: the whole one, or that of one of several drafters."""

    stage: str
    config: RunConfig
    key_of: Callable[[RunConfig], str]
    folder_of: Callable[[str], Path]


def _places(layout: Layout, config: RunConfig) -> list[_Place]:
    each = config.each_drafter()
    return [
        *([_Place("regenerate", config, keys.regenerate_key, layout.regeneration)] if config.regenerates else []),
        _Place("corpus", config, keys.corpus_key, layout.corpus),
        _Place("capture", config, keys.capture_key, layout.capture),
        *[_Place("train", one, keys.train_key, layout.drafter) for one in each],
        *[_Place("export", one, keys.export_key, layout.export) for one in each],
        *[_Place("evaluate", one, keys.evaluate_key, layout.evaluation) for one in each],
        _Place("report", config, keys.report_key, layout.report),
    ]


def _stage(
    layout: Layout,
    place: _Place,
    key: str | None,
    mine: list[Process],
    *,
    corpus_key: str | None,
    train_keys: list[str],
    warnings: list[str],
) -> Stage:
    """One stage: ``mine`` are its processes that run now."""
    if key is None:
        return Stage(place.stage, None, None, "unknown", "", drafter=place.config.name)
    folder, detail, complete = place.folder_of(key), "", False
    if place.stage == "capture":
        complete, detail = _capture_detail(layout, key, corpus_key)
    elif (folder / MANIFEST).exists():
        try:
            detail, complete = _detail(read_manifest(folder)), True
        except DFlashError as error:
            warnings.append(str(error))
    queued = bool(mine) and all(process.text.startswith("queued") for process in mine)
    begun = any(layout.store(key).glob("part-*")) if place.stage == "capture" else _has_content(folder)
    state = "complete" if complete else "queued" if queued else "running" if mine else "partial" if begun else "pending"
    gone = place.stage == "capture" and not mine and train_keys and all(store_was_deleted(layout, key, trained) for trained in train_keys)
    if gone:
        state, detail = "deleted", "store deleted (the drafter is trained)"
    told = mine[:1] if place.stage == "train" else mine  # every rank tells the rates of all ranks
    numbers = sum_of_rates(process.numbers for process in told)
    return Stage(place.stage, key, str(folder), state, detail, numbers, place.config.name)


@lru_cache
def _gpu_reader() -> GpuReader:
    return GpuReader()


def _hosts(layout: Layout) -> list[dict[str, Any]]:
    """This host as it is now, and the others as they last told."""
    others = [host for host in host_files.read_hosts(layout.all_logs) if host["host"] != socket.gethostname()]
    return [host_files.state(_gpu_reader()), *others]


def _is_of(process: Process, keys_of: dict[str, set[str | None]]) -> bool:
    """Whether a process works for one of these keys, by stage; where one is not known, it may."""
    wanted = keys_of.get(process.stage, {None})
    return process.key is None or process.key in wanted or None in wanted


def _made_good(process: Process, others: list[Process], made: set[tuple[str, str | None]]) -> bool:
    """Whether a process failed, and what it should have done is done: by its stage, or by a later run of its kind.

    ``made`` holds name and key of the stages that are complete; no key where all of that name are.
    Which run was later is known on one host only: clocks of two differ. Of captures it says nothing: their key does not tell
    the corpus, so the later one may have been that of another run file.
    """
    if not process.failed:
        return False
    if (process.stage, process.key) in made:
        return True
    if process.stage == "capture":
        return False
    return any(
        other.ended
        and not other.failed
        and other.text != "stopped"
        and other.age_s < process.age_s
        and (other.stage, other.key, other.host, _kind(other)) == (process.stage, process.key, process.host, _kind(process))
        for other in others
    )


def _has_failed(stage: Stage, failed: list[Process]) -> bool:
    """Whether a stage that is not done, and that nothing works at, was left by a process that failed."""
    return stage.state in ("partial", "pending") and any(
        (process.stage, process.key) == (stage.name, stage.key) and not _is_partial(process, stage.drafter) for process in failed
    )


def _is_partial(process: Process, drafter: str) -> bool:
    """Of ``train --partial``: with the full drafter's key, but it trains another one."""
    return _kind(process) == f"{Layout.partial_training(drafter)}-"


def _kind(process: Process) -> str:
    """Its name without its number: ``train-``, ``train-partial-``."""
    return process.name.rstrip("0123456789")


def _seems_alive(process: Process) -> bool:
    return process.alive is not False and not process.ended and process.age_s < _STALE_S


def store_was_deleted(layout: Layout, capture_key: str, train_key: str) -> bool:
    """Whether a store is gone and is not needed: the drafter was trained from it (``prune --store``)."""
    return not layout.store(capture_key).exists() and (layout.drafter(train_key) / MANIFEST).is_file()


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _capture_detail(layout: Layout, capture_key: str, corpus_key: str | None) -> tuple[bool, str]:
    """Parts of this corpus's plan that are committed."""
    store = layout.store(capture_key)
    committed = {entry.name for entry in store.glob("part-*") if (entry / MANIFEST).is_file()} if store.is_dir() else set()
    if corpus_key is None or not layout.plan(capture_key, corpus_key).is_file():
        return False, f"{counted(len(committed), 'part')} in the store, no plan for this corpus yet" if committed else ""
    plan = read_json(layout.plan(capture_key, corpus_key))
    new = [part["name"] for part in plan["parts"]]
    done = sum(name in committed for name in new)
    reused = f", {len(plan['reused'])} reused" if plan.get("reused") else ""
    missing_reused = [name for name in plan.get("reused", []) if name not in committed]
    return done == len(new) and not missing_reused, f"{done} of {counted(len(new), 'part')}{reused}"


def _detail(manifest: dict[str, Any]) -> str:
    """One line of numbers out of a stage's manifest, whichever of them are there."""
    parts = []
    for key, noun in (
        ("num_samples", "conversation"),
        ("num_rows", "conversation"),
        ("num_tokens", "token"),
        ("tokens", "token"),
        ("steps", "step"),
    ):
        if isinstance(value := manifest.get(key), int):
            parts.append(counted(value, noun))
    for key, text in (("seconds", "{:.0f} s"), ("formats", "{}")):
        value = manifest.get(key)
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        if value is not None and not isinstance(value, dict):
            with contextlib.suppress(ValueError):
                parts.append(text.format(value))
    overall = manifest.get("overall")
    if isinstance(overall, dict) and isinstance(overall.get("acceptance_length"), float):
        parts.append(f"acceptance length {overall['acceptance_length']:.2f}")
    return ", ".join(parts)


def running_processes(layout: Layout) -> list[Process]:
    """Every process that left a progress file under ``logs/``, in the order of the stages."""
    found = []
    logs = layout.all_logs
    for path in sorted(logs.rglob("*.progress.json")) if logs.is_dir() else []:
        state = read_progress(path)
        if state is None:
            continue
        name = path.name.removesuffix(".progress.json")
        numbers = {key: value for key, value in state["numbers"].items() if isinstance(value, int | float)}
        stage = path.relative_to(logs).parts[0]
        age_s = max(0.0, time.time() - state["time"])
        ended = bool(state.get("ended"))
        alive = None if state.get("host", socket.gethostname()) != socket.gethostname() else not ended and process_is_alive(state["pid"])
        found.append(
            Process(
                name,
                stage,
                state["pid"],
                alive,
                age_s,
                state["done"],
                state["total"],
                str(state["text"]),
                ended=ended,
                key=state.get("key"),
                unit=UNITS.get(stage, ""),
                host=str(state.get("host", "")),
                gpu=state.get("gpu"),
                numbers=numbers,
                warnings=[(float(moment), str(text)) for moment, text in state.get("warnings", [])],
            )
        )
    order = list(UNITS)
    return sorted(found, key=lambda process: order.index(process.stage) if process.stage in UNITS else len(order))


def process_is_alive(pid: int) -> bool:
    """Whether a process of this number is on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def last_metrics(path: Path) -> dict[str, Any] | None:
    """The last training step that ``metrics.jsonl`` holds; None when there is none yet."""
    rows = read_metrics(path)
    steps = [row for row in rows if "loss" in row]
    return steps[-1] if steps else None

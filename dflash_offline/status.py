"""Where a run stands, read from its files alone: any terminal, any host that sees the root, while it runs or after."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest
from dflash_offline.progress import read_progress

# what ``done`` and ``total`` of a stage's processes count
_UNITS = {
    "regenerate": "conversations",
    "corpus": "bytes",
    "capture": "parts",
    "train": "steps",
    "export": "forms",
    "evaluate": "prompts",
    "report": "reports",
}
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
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage of the run: ``state`` is complete, running, partial, pending, deleted (a store whose drafter is trained)
    or unknown (the run file does not say enough for its key)."""

    name: str
    key: str | None
    folder: str | None
    state: str
    detail: str


@dataclass(frozen=True)
class Status:
    """All of it; ``to_dict`` for ``--json``."""

    root: str
    stages: list[Stage]
    processes: list[Process]
    gpus: list[dict[str, Any]]
    training: dict[str, Any] | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(config: RunConfig) -> Status:
    """Work out the keys of the run file as it is now and look what is there."""
    layout = Layout(config.root_dir)
    processes = running_processes(layout)
    warnings: list[str] = []
    stages: list[Stage] = []
    capture_key = corpus_key = train_key = None
    for name, key_of, folder_of in _stages(layout, regenerates=config.regenerates):
        try:
            key = key_of(config)
        except DFlashError as error:
            if str(error) not in warnings:  # the same fault of the run file mostly stops every stage
                warnings.append(str(error))
            stages.append(Stage(name, None, None, "unknown", ""))
            continue
        folder = folder_of(key)
        detail, complete = "", False
        if name == "corpus":
            corpus_key = key
        if name == "capture":
            capture_key = key
            complete, detail = _capture_detail(layout, capture_key, corpus_key)
        else:
            if name == "train":
                train_key = key
            if (folder / MANIFEST).exists():
                try:
                    detail, complete = _detail(name, read_manifest(folder)), True
                except DFlashError as error:
                    warnings.append(str(error))
        processes = [_claimed(process, key) if process.stage == name else process for process in processes]
        mine = [process for process in processes if process.stage == name and process.of_this_run and _seems_alive(process)]
        state = "complete" if complete else "running" if mine else "partial" if _has_content(folder) else "pending"
        stages.append(Stage(name, key, str(folder), state, detail))
    stages = [_without_store(stage, layout, capture_key, train_key) if stage.name == "capture" else stage for stage in stages]
    training = last_metrics(layout.drafter(train_key) / "metrics.jsonl") if train_key else None
    for process in processes:
        if process.of_this_run and process.text.startswith("error:"):
            warnings.append(f"{process.name}: {process.text}")
    return Status(str(layout.root), stages, processes, _gpus(), training, warnings)


def _claimed(process: Process, key: str) -> Process:
    """A process with what is known of its key."""
    return replace(process, of_this_run=process.key in (None, key))


def _seems_alive(process: Process) -> bool:
    return process.alive is not False and not process.ended and process.age_s < _STALE_S


def store_was_deleted(layout: Layout, capture_key: str, train_key: str) -> bool:
    """Whether a store is gone and is not needed: the drafter was trained from it (``prune --store``)."""
    return not layout.store(capture_key).exists() and (layout.drafter(train_key) / MANIFEST).is_file()


def _without_store(stage: Stage, layout: Layout, capture_key: str | None, train_key: str | None) -> Stage:
    if capture_key is None or train_key is None or stage.state == "running" or not store_was_deleted(layout, capture_key, train_key):
        return stage
    return replace(stage, state="deleted", detail="store deleted (the drafter is trained)")


def _stages(layout: Layout, *, regenerates: bool) -> list[tuple[str, Callable[[RunConfig], str], Callable[[str], Path]]]:
    return [
        *([("regenerate", keys.regenerate_key, layout.regeneration)] if regenerates else []),
        ("corpus", keys.corpus_key, layout.corpus),
        ("capture", keys.capture_key, layout.capture),
        ("train", keys.train_key, layout.drafter),
        ("export", keys.export_key, layout.export),
        ("evaluate", keys.evaluate_key, layout.evaluation),
        ("report", keys.report_key, layout.report),
    ]


def _has_content(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _capture_detail(layout: Layout, capture_key: str, corpus_key: str | None) -> tuple[bool, str]:
    """Parts of this corpus's plan that are committed."""
    store = layout.store(capture_key)
    committed = {entry.name for entry in store.glob("part-*") if (entry / MANIFEST).is_file()} if store.is_dir() else set()
    if corpus_key is None or not layout.plan(capture_key, corpus_key).is_file():
        return False, f"{len(committed)} parts in the store, no plan for this corpus yet" if committed else ""
    plan = read_json(layout.plan(capture_key, corpus_key))
    new = [part["name"] for part in plan["parts"]]
    done = sum(name in committed for name in new)
    reused = f", {len(plan['reused'])} reused" if plan.get("reused") else ""
    missing_reused = [name for name in plan.get("reused", []) if name not in committed]
    return done == len(new) and not missing_reused, f"{done} of {len(new)} parts{reused}"


def _detail(name: str, manifest: dict[str, Any]) -> str:
    """One line of numbers out of a stage's manifest, whichever of them are there."""
    parts = []
    for key, text in (
        ("num_samples", "{:,} conversations"),
        ("num_rows", "{:,} conversations"),
        ("num_tokens", "{:,} tokens"),
        ("tokens", "{:,} tokens"),
        ("steps", "{:,} steps"),
        ("seconds", "{:.0f} s"),
        ("formats", "{}"),
    ):
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
    """Every process that left a progress file under ``logs/``, newest first."""
    found = []
    logs = layout.logs("x").parent
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
                unit=_UNITS.get(stage, ""),
                numbers=numbers,
            )
        )
    return found


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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``; a last line that is still being written is left out, a repeated step replaces the earlier one."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    rows.append(row)
    return rows


def _gpus() -> list[dict[str, Any]]:
    query = ["nvidia-smi", "--query-gpu=index,name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        for line in subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines():
            index, name, used_percent, used, total = [cell.strip() for cell in line.split(",")]
            found.append(
                {"gpu": index, "name": name, "utilisation_percent": used_percent, "memory_used_mib": used, "memory_total_mib": total}
            )
    return found

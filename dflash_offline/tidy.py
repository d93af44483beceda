"""Forget stages (``reset``) and delete what no run file needs any more (``prune``).

Only folders whose names are content keys and that hold what this program writes are ever touched; anything else under
the root is left alone. Links are not followed. With a store go its objects in an object store, those that this program put there.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import DFlashError
from dflash_offline.inputs import stdin_name
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json

if TYPE_CHECKING:
    from dflash_offline.store import Remote

_KEY = re.compile(r"[0-9a-f]{16}")
_STREAM = re.compile(r"stdin-[0-9a-f]{32}")
# folder under the root -> what marks an entry of it as ours
STAGE_FOLDERS: dict[str, set[str]] = {
    "regenerations": {MANIFEST, "plan.json", "parts"},
    "corpora": {MANIFEST, "input_ids.bin"},
    "captures": {"hidden_states.zarr", "plans", "leases"},
    "drafters": {MANIFEST, "checkpoints", "metrics.jsonl", "drafter", "tensorboard"},
    "exports": {MANIFEST, "zlab", "speculators"},
    "evaluations": {MANIFEST, "results.json"},
    "reports": {MANIFEST, "report.md", "report.html"},
}


@dataclass(frozen=True)
class Removal:
    """Something that would be deleted: paths with one reason."""

    what: str
    paths: list[Path]
    size_bytes: int

    @property
    def urls(self) -> list[str]:
        """Of the stores in an object store whose objects go too."""
        return [store.url for path in self.paths for store in _remote_stores(path)]


def _size(path: Path) -> int:
    if path.is_symlink() or path.is_file():
        return path.lstat().st_size
    here = sum(entry.lstat().st_size for entry in path.rglob("*") if entry.is_symlink() or entry.is_file())
    return here + sum(store.num_bytes for store in _remote_stores(path))


def _remote_stores(path: Path) -> list["Remote"]:
    """The store in an object store whose local folder ``path`` is, or holds."""
    folders = [folder for folder in (path, path / "hidden_states.zarr") if (folder / "remote.json").is_file()]
    if not folders:
        return []
    from dflash_offline.store import Remote

    return [remote for folder in folders if (remote := Remote.of(folder)) is not None]


def reset_plan(config: RunConfig, stage: str) -> list[Removal]:
    """What makes a stage of this run file incomplete again, with all its drafters: its manifest, so that it is made anew in its place.

    ``train`` also loses its checkpoints, else it would at once be complete again; ``capture`` loses the store and its
    plans, for every corpus that was captured into it; ``regenerate`` loses every answer.
    """
    layout = Layout(config.root_dir)
    if stage == "regenerate":
        paths = [layout.regeneration(keys.regenerate_key(config))] if config.regenerates else []
    elif stage == "corpus":
        paths = [layout.corpus(keys.corpus_key(config)) / MANIFEST]
    elif stage == "capture":
        paths = [layout.capture(keys.capture_key(config))]
    elif stage == "train":
        folders = [layout.drafter(keys.train_key(each)) for each in config.each_drafter()]
        paths = [folder / name for folder in folders for name in (MANIFEST, "checkpoints", "metrics.jsonl", "tensorboard")]
    elif stage == "export":
        paths = [layout.export(keys.export_key(each)) / MANIFEST for each in config.each_drafter()]
    elif stage == "evaluate":
        paths = [layout.evaluation(keys.evaluate_key(each)) / MANIFEST for each in config.each_drafter()]
    else:
        paths = [layout.report(keys.report_key(config)) / MANIFEST]
    there = [path for path in paths if path.exists() or path.is_symlink()]
    return [Removal(f"{stage} of {config.source.name}", there, sum(map(_size, there)))] if there else []


def _full_key(folder: Path) -> str:
    """Of the full drafter, where the one in ``folder`` was trained on some parts (``train --partial``); else ""."""
    from dflash_offline.train.partial import MARK

    return read_json(folder / MARK)["full_key"] if (folder / MARK).is_file() else ""


def prune_plan(configs: list[RunConfig], *, store: bool = False, checkpoints: bool = False) -> list[Removal]:
    """Every key folder under the root that none of the run files leads to.

    Args:
        configs: run files that share one root; what they need stays.
        store: also the stores they do need, for those whose drafter is trained.
        checkpoints: also the checkpoints of drafters that are trained.

    Raises:
        DFlashError: the run files have different roots.
    """
    layout = Layout(configs[0].root_dir)
    if any(config.root_dir != layout.root for config in configs):
        raise DFlashError("prune: the run files have different roots; name those of one root at a time")
    drafters = [each for config in configs for each in config.each_drafter()]
    needed: dict[str, set[str]] = {
        "regenerations": {keys.regenerate_key(config) for config in configs if config.regenerates},
        "corpora": {keys.corpus_key(config) for config in configs},
        "captures": {keys.capture_key(config) for config in configs},
        "drafters": {keys.train_key(each) for each in drafters},
        "exports": {keys.export_key(each) for each in drafters},
        "evaluations": {keys.evaluate_key(each) for each in drafters},
        "reports": {keys.report_key(config) for config in configs},
    }
    removals = []
    for kind, marks in STAGE_FOLDERS.items():
        parent = layout.root / kind
        for entry in sorted(parent.iterdir()) if parent.is_dir() and not parent.is_symlink() else []:
            if entry.is_symlink() or not entry.is_dir() or not _KEY.fullmatch(entry.name) or entry.name in needed[kind]:
                continue
            if any((entry / mark).exists() for mark in marks):
                what = f"{kind[:-1] if kind != 'corpora' else 'corpus'} of another key"
                if kind == "drafters" and (full := _full_key(entry)) in needed[kind]:
                    if not (parent / full / MANIFEST).is_file():
                        continue
                    what = "drafter of some parts, whose full one is trained"
                removals.append(Removal(what, [entry], _size(entry)))
    streams = [path for path in layout.inputs.glob("stdin-*") if _STREAM.fullmatch(path.name)] if not layout.inputs.is_symlink() else []
    if older := sorted(path for path in streams if path.name != stdin_name(layout)):
        removals.append(Removal("standard input of earlier runs", older, sum(map(_size, older))))
    trained = [each for each in drafters if (layout.drafter(keys.train_key(each)) / MANIFEST).is_file()]
    waiting = {layout.store(keys.capture_key(each)) for each in drafters if each not in trained}
    for path in dict.fromkeys(layout.store(keys.capture_key(each)) for each in trained):
        if store and path.is_dir() and path not in waiting and path not in [path for removal in removals for path in removal.paths]:
            removals.append(Removal("store whose drafter is trained", [path], _size(path)))
    for path in dict.fromkeys(layout.drafter(keys.train_key(each)) / "checkpoints" for each in trained):
        if checkpoints and path.is_dir():
            removals.append(Removal("checkpoints of a trained drafter", [path], _size(path)))
    return removals


def remove(removals: list[Removal]) -> None:
    """Delete, manifests first, so that what an interruption leaves is never taken for complete."""
    for removal in removals:
        for path in removal.paths:
            if path.is_symlink() or path.is_file():
                path.unlink()
                continue
            (path / MANIFEST).unlink(missing_ok=True)
            for store in _remote_stores(path):
                store.delete()
            shutil.rmtree(path)

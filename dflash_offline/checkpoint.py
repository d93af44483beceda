"""Checkpoints of a training run: written whole or not at all, the newest complete one wins.

::

    checkpoints/
      step-000500/            complete: it has a manifest
        state.safetensors     master weights, AdamW moments (and the average), flat float32
        state.json            step, seconds so far, key, seed, versions ...
        manifest.json         written last, with sizes and checksums of the other two
      step-001000.partial/    being written, or left by a kill; never read

The position in the data, the anchors and the noise are functions of the step, so a checkpoint holds no data loader
and no random state.
"""

import contextlib
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_offline.errors import CheckpointError, DFlashError, StoreFullError
from dflash_offline.manifest import (
    MANIFEST,
    damaged_files,
    disk_is_full,
    fsync_folder,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)

KIND = "checkpoint"
TENSORS = "state.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint.

    Attributes:
        folder: where it lies.
        state: content of ``state.json``; ``state["step"]`` steps were done when it was written.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def load_into(self, tensors: dict[str, torch.Tensor], *, numel: int, start: int = 0) -> None:
        """Copy the stored tensors into ``tensors``, in place.

        Args:
            numel: values of each stored tensor.
            start: the first of them that goes into ``tensors``, which may hold a share and be filled up at their end.

        Raises:
            CheckpointError: names or sizes differ, or the file cannot be read.
        """
        path = self.folder / TENSORS
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != set(tensors):
                    raise CheckpointError(f"{path}: holds {sorted(file.keys())}, wanted {sorted(tensors)}; it is another version's")
                for name, tensor in tensors.items():
                    stored = file.get_slice(name)
                    if (values := math.prod(stored.get_shape())) != numel:
                        raise CheckpointError(f"{path}: {name} has {values:,} values, this drafter {numel:,}")
                    part = stored[start : min(start + len(tensor), numel)]
                    tensor[: len(part)].copy_(part)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lies once complete."""
    return checkpoints / f"step-{step:06d}"


def save(checkpoints: Path, *, key: str, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int) -> Checkpoint:
    """Write one checkpoint and prune older ones.

    Args:
        checkpoints: the folder of all checkpoints of this run; made when missing.
        key: content key of the training stage.
        tensors: flat float32 tensors, on any device.
        state: JSON values; must hold ``step``.
        keep: complete checkpoints left afterwards, this one included.

    Raises:
        StoreFullError: the disk is full; earlier checkpoints are intact.
    """
    final = folder_of(checkpoints, state["step"])
    partial = final.with_name(final.name + ".partial")
    checkpoints.mkdir(parents=True, exist_ok=True)
    for stale in (partial, final):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir()
    try:
        save_file({name: tensor.detach().to("cpu") for name, tensor in tensors.items()}, partial / TENSORS, metadata={"format": "pt"})
        write_json(partial / STATE, state)
        write_manifest(partial, kind=KIND, key=key)
        partial.rename(final)
        fsync_folder(checkpoints)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if disk_is_full(error):
            raise StoreFullError(
                f"{final}: the disk is full; earlier checkpoints are intact. Make space, run the same command again"
            ) from None
        raise CheckpointError(f"{final}: cannot be written ({error})") from None
    prune(checkpoints, keep=keep)
    return Checkpoint(final, state)


def steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder under a final name, rising; complete or not."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(match[1]) for entry in checkpoints.iterdir() if (match := _NAME.fullmatch(entry.name)))


def newest(checkpoints: Path, *, key: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and one line for each newer one that had to be passed over.

    Checksums are verified: a checkpoint is read rarely, and a flipped bit in it would be trained on for days.

    Raises:
        CheckpointError: it is complete but belongs to another key.
    """
    passed_over = []
    for step in reversed(steps(checkpoints)):
        folder = folder_of(checkpoints, step)
        try:
            manifest = read_manifest(folder, kind=KIND)
            damage = damaged_files(folder, manifest, deep=True)
        except DFlashError as error:
            passed_over.append(str(error))
            continue
        if damage:
            passed_over.append(f"{folder}: {damage[0]}")
            continue
        if manifest["key"] != key:
            raise CheckpointError(f"{folder}: belongs to key {manifest['key']}, this run has {key}; remove {checkpoints} to start afresh")
        return Checkpoint(folder, read_json(folder / STATE)), passed_over
    return None, passed_over


def discard_after(checkpoints: Path, step: int) -> None:
    """Delete what is newer than ``step``: folders that ``newest`` passed over, which the run is going to write again."""
    for newer in steps(checkpoints):
        if newer > step:
            shutil.rmtree(folder_of(checkpoints, newer), ignore_errors=True)


def prune(checkpoints: Path, *, keep: int) -> None:
    """Delete all but the ``keep`` newest complete checkpoints, and what kills left half-written."""
    for entry in checkpoints.glob("step-*.partial"):
        shutil.rmtree(entry, ignore_errors=True)
    complete = [step for step in steps(checkpoints) if (folder_of(checkpoints, step) / MANIFEST).is_file()]
    for step in complete[:-keep]:
        folder = folder_of(checkpoints, step)
        with contextlib.suppress(FileNotFoundError):  # its manifest first: a half-deleted one must not look complete
            (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)

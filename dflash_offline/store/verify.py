"""Compares every byte of a store with its manifests, and says which part, file and samples are not as committed.

The chain: ``index.json`` (its own digest) lists the store's ``zarr.json`` and the digest of each part's manifest; a
manifest (its own digest) lists every file of the part with size and xxh3-128. Nothing is inferred from values that
were read: a deleted chunk reads as fill value in every Zarr library, an all-zero one may be legitimate.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dflash_offline import manifest
from dflash_offline.errors import DFlashError, StoreDamagedError, StoreError
from dflash_offline.store import schema
from dflash_offline.store.objects import MissingObjectError
from dflash_offline.store.reader import HiddenStateStore
from dflash_offline.store.remote import Remote, local_names
from dflash_offline.store.shards import read_meta, read_small


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was committed. ``samples`` are numbers within the part, last one included."""

    part: str | None
    file: str
    text: str
    samples: tuple[int, int] | None = None

    def __str__(self) -> str:
        place = "/".join(name for name in (self.part, self.file) if name)
        where = f" (samples {self.samples[0]} to {self.samples[1]} of the part)" if self.samples else ""
        return f"{place}: {self.text}{where}"


def verify(
    path: Path | str,
    *,
    deep: bool = True,
    values: bool = False,
    parts: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Everything that is wrong with a store; an empty list if nothing is.

    Args:
        deep: compare contents (about 1.2 GB/s from disk), not just names and sizes.
        values: decode every row as well; finds what was wrong before it was written: not finite, all zero, or two
            different conversations with the same hidden states.
        parts: look only at these.
        progress: called with bytes checked so far and bytes in all.

    Raises:
        StoreError: there is no store at ``path``, or a newer one than this release reads.
    """
    root = Path(path)
    problems: list[Problem] = []
    index = _root_problems(root, problems)
    remote = _remote(root, problems)
    names = sorted(index["parts"] if parts is None else parts, key=schema.part_key)
    total, done = sum(index["parts"].get(name, {}).get("bytes", 0) for name in names), 0
    for name in names:
        problems += _part_problems(root, name, index["parts"].get(name), deep=deep, identity=index["identity"], remote=remote)
        done += index["parts"].get(name, {}).get("bytes", 0)
        if progress is not None:
            progress(done, total)
    if values and not problems:
        problems += _value_problems(root, names)
    return problems


def _root_problems(root: Path, problems: list[Problem]) -> dict[str, Any]:
    """Check the store's own files; returns the index, or one made from what is there if it cannot be used."""
    if not root.is_dir():
        raise StoreError(f"{root}: no hidden-state store here; capture first, or check the path")
    group, identity, index = root / schema.GROUP_FILE, None, None
    try:
        index = schema.parse_index(root)
        if not _is_canonical(root / schema.INDEX):
            problems.append(Problem(None, schema.INDEX, "its bytes are not as they were written"))
    except DFlashError as error:
        if not group.exists():
            raise StoreError(f"{root}: no hidden-state store here; capture first, or check the path") from None
        problems.append(Problem(None, schema.INDEX, str(error)))
    if index is not None and not group.is_file():
        problems.append(Problem(None, schema.GROUP_FILE, "missing"))
    elif index is not None and [group.stat().st_size, manifest.checksum(group)] != index["group"]:
        problems.append(Problem(None, schema.GROUP_FILE, "content differs from its checksum in the index"))
    else:
        identity = schema.read_attributes(root)["identity"]
    if index is None:
        found = [p.name for p in root.iterdir() if schema.PART_NAME.fullmatch(p.name) and p.is_dir()]
        index = {"parts": {name: {} for name in found}}
    for entry in sorted(root.iterdir()):
        if entry.name not in index["parts"] and not schema.is_own(entry):
            what = "part is not in the index" if schema.PART_NAME.fullmatch(entry.name) else "not a file of this store"
            problems.append(Problem(None, entry.name, what))
    return {**index, "identity": identity}


def _is_canonical(path: Path) -> bool:
    """Whether a JSON file is byte for byte what ``manifest.write_json`` writes: its digest covers the values only."""
    raw = path.read_bytes()
    return raw == (json.dumps(json.loads(raw), indent=1, ensure_ascii=False) + "\n").encode()


def _part_problems(
    root: Path, name: str, entry: dict[str, Any] | None, *, deep: bool, identity: Any, remote: Remote | None
) -> list[Problem]:
    folder = root / name
    if not folder.is_dir():
        if (root / f"{name}.partial" / manifest.MANIFEST).exists():
            return [Problem(name, "", "written but not yet renamed; the next capture run finishes it")]
        return [Problem(name, "", "the part's folder is missing")]
    try:
        found = manifest.read_manifest(folder, kind=schema.PART_KIND)
        listed = dict(found["files"])
    except (DFlashError, KeyError, TypeError, ValueError) as error:
        return [Problem(name, manifest.MANIFEST, f"cannot be used ({error})")]
    problems = []
    if not _is_canonical(folder / manifest.MANIFEST):
        problems.append(Problem(name, manifest.MANIFEST, "its bytes are not as they were written"))
    if entry is None or (entry and entry["manifest"] != found["digest"]):
        problems.append(Problem(name, manifest.MANIFEST, "is not the manifest that the index lists; part or manifest was swapped"))
    if found["name"] != name:
        problems.append(Problem(name, manifest.MANIFEST, f"belongs to {found['name']}"))
    if identity is not None and found["key"] != manifest.digest(identity):
        problems.append(Problem(name, manifest.MANIFEST, "was captured with another identity than the store's"))
    damaged = (
        manifest.damaged_files(folder, found, deep=deep, name_unreadable=True) if remote is None else remote.damaged(name, found, deep=deep)
    )
    for text in damaged:
        file, _, reason = text.partition(": ")
        problems.append(Problem(name, file, reason, _samples_of(folder, file, found["samples"])))
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    extra = there - {*(listed if remote is None else local_names(listed).values()), manifest.MANIFEST}
    problems += [Problem(name, file, "not in the manifest") for file in sorted(extra)]
    if remote is not None:
        extra = remote.sizes(name).keys() - {*listed, manifest.MANIFEST}
        problems += [Problem(name, file, f"object in {remote.url} that is not in the manifest") for file in sorted(extra)]
    return problems


def _remote(root: Path, problems: list[Problem]) -> Remote | None:
    """Where the shard files are, if not in the local folder; the store's own objects are compared with its files."""
    try:
        remote = Remote.of(root)
    except StoreDamagedError as error:
        problems.append(Problem(None, schema.REMOTE, str(error)))
        return None
    for name in (schema.GROUP_FILE, schema.INDEX) if remote is not None else ():
        try:
            same = remote.objects.get(name) == (root / name).read_bytes()
        except (MissingObjectError, FileNotFoundError):
            same = False
        if not same:
            problems.append(Problem(None, name, f"the object in {remote.url} is missing or differs from the local file"))
    return remote


def _samples_of(folder: Path, file: str, samples: int) -> tuple[int, int]:
    """Samples with a token in a file: those of its Zarr shard, or all of the part."""
    pieces = file.split("/")
    try:
        meta, edges = read_meta(folder / pieces[0]), read_small(folder / "sample_offsets")
        if meta.sharded and len(pieces) == 5 and pieces[1] == "c":
            first = int(pieces[2]) * meta.shard[0]
            last = min(first + meta.shard[0], int(edges[-1])) - 1
            return tuple(int(i) - 1 for i in np.searchsorted(edges, [first, last], "right"))  # type: ignore[return-value]
    except (StoreError, OSError, ValueError, IndexError):
        pass  # what would say more is damaged too
    return 0, samples - 1


def _value_problems(root: Path, names: Sequence[str]) -> list[Problem]:
    import torch

    problems, seen = [], {}
    with HiddenStateStore(root, verify="off", parts=names) as store:
        for i in range(len(store)):
            sample, text = store[i], None
            hidden = sample.hidden_states()
            key = xxhash.xxh3_128(hidden.view(torch.int16).numpy()).digest()
            if not torch.isfinite(hidden).all():
                text = "hidden states are not finite"
            elif not hidden.any(-1).any(0).all():
                text = "hidden states of a layer are all zero"
            elif seen.setdefault(key, i) != i and not np.array_equal(store[seen[key]].input_ids, sample.input_ids):
                text = f"same hidden states as sample {seen[key]} of the store, whose ids differ"
            if text:
                problems.append(Problem(sample.part, "", text, (sample.index, sample.index)))
    return problems

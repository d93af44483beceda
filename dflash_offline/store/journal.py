"""What of a part is safely on disk while it is being written, so that a killed writer's successor goes on there.

``.part-00012.work/`` beside the part's ``.partial`` folder holds

``spec.json``
    what the part is to become; with another spec nothing of it is used
``journal.jsonl``
    one line for each finished Zarr shard: tokens and samples now safe, its files and spooled bytes with their checksums.
    Appended and synced after those files are
``*.spool``
    raw rows of the small arrays (ids, masks, scales ...), which become Zarr arrays when the part is whole: as
    shards of their own they would be many small files
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dflash_offline import manifest
from dflash_offline.errors import DFlashError, StoreError

TEMPORARY = re.compile(r"\.[\w.]+\.\d+(-\d+)?\.tmp")  # what ``manifest.write_bytes`` leaves when it is killed
SPEC, JOURNAL, SPOOL_SUFFIX = "spec.json", "journal.jsonl", ".spool"


@dataclass
class Journal:
    """Finished shards of one part. ``tokens`` and ``samples`` are those safely on disk, ``shards`` their number."""

    folder: Path
    partial: Path
    shards: int = 0
    tokens: int = 0
    samples: int = 0
    spooled: dict[str, int] = field(default_factory=dict)  # spool name -> bytes that are safe
    files: dict[str, list[Any]] = field(default_factory=dict)  # path in the part -> [bytes, checksum]
    statistics: dict[str, Any] = field(default_factory=dict)

    def start(self, spec: dict[str, Any]) -> bool:
        """Take up what a former writer of the same spec left; otherwise begin afresh. Returns whether it resumes."""
        if self._read_spec() == spec:
            self._recover()
            return True
        self.clear()
        self.folder.mkdir(exist_ok=True)
        manifest.write_json(self.folder / SPEC, spec)
        manifest.fsync_folder(self.folder.parent)
        return False

    def _read_spec(self) -> Any:
        try:
            return manifest.read_json(self.folder / SPEC)
        except (OSError, DFlashError):
            return None

    def _recover(self) -> None:
        """Believe journal lines in order until one whose files or spooled bytes are not as it says; forget the rest."""
        good = []
        path = self.folder / JOURNAL
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                break  # cut by the kill
            if not self._holds(entry):
                break
            self._take(entry)
            good.append(line + b"\n")
        manifest.write_bytes(path, b"".join(good))
        for spool in self.folder.glob(f"*{SPOOL_SUFFIX}"):
            os.truncate(spool, self.spooled.get(spool.stem, 0))
        for file in self.partial.rglob("*"):
            unfinished = file.parent != self.partial and "c" in file.relative_to(self.partial).parts[1:-1]
            if file.is_file() and (TEMPORARY.fullmatch(file.name) or unfinished) and str(file.relative_to(self.partial)) not in self.files:
                file.unlink()

    def _holds(self, entry: dict[str, Any]) -> bool:
        if manifest.damaged_files(self.partial, {"files": entry["files"]}, deep=True):
            return False
        for name, (begin, end, checksum) in entry["spooled"].items():
            path = self.folder / (name + SPOOL_SUFFIX)
            if begin != self.spooled.get(name, 0) or not path.exists():
                return False
            with path.open("rb") as file:
                file.seek(begin)
                if xxhash.xxh3_128(file.read(end - begin)).hexdigest() != checksum:
                    return False
        return True

    def _take(self, entry: dict[str, Any]) -> None:
        self.shards += 1
        self.tokens, self.samples, self.statistics = entry["tokens"], entry["samples"], entry["statistics"]
        self.files |= entry["files"]
        self.spooled |= {name: end for name, (_, end, _) in entry["spooled"].items()}

    def append(
        self, *, tokens: int, samples: int, files: dict[str, list[Any]], spools: dict[str, bytes], statistics: dict[str, Any]
    ) -> None:
        """Note a finished shard whose ``files`` are already durable; ``spools`` are the bytes to add to each spool."""
        spooled = {}
        for name, content in spools.items():
            with (self.folder / (name + SPOOL_SUFFIX)).open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            begin = self.spooled.get(name, 0)
            spooled[name] = [begin, begin + len(content), xxhash.xxh3_128(content).hexdigest()]
        entry = {"tokens": tokens, "samples": samples, "files": files, "spooled": spooled, "statistics": statistics}
        with (self.folder / JOURNAL).open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        manifest.fsync_folder(self.folder)
        self._take(entry)

    def spool(self, name: str, dtype: Any, row_shape: tuple[int, ...]) -> np.ndarray:
        """The rows of one spool, memory-mapped, ``[rows, *row_shape]``."""
        path, dtype = self.folder / (name + SPOOL_SUFFIX), np.dtype(dtype)
        rows = self.spooled.get(name, 0) // (int(np.prod(row_shape)) * dtype.itemsize)
        return np.memmap(path, dtype, "r", shape=(rows, *row_shape)) if rows else np.zeros((0, *row_shape), dtype)

    def clear(self) -> None:
        """Remove this part's unfinished files: only names that this module and the writer make.

        Raises:
            StoreError: something else lies among them.
        """
        if self.partial.exists():
            foreign = [
                p
                for p in self.partial.iterdir()
                if not (p.is_dir() and (p / "zarr.json").exists() or p.name in ("zarr.json", "manifest.json"))
            ]
            foreign = [p for p in foreign if not p.name.endswith((".tmp", ".partial")) and not (p.is_dir() and not any(p.iterdir()))]
            if foreign:
                raise StoreError(
                    f"{foreign[0]}: not written by this program, yet inside an unfinished part; move it away and run the same command again"
                )
            shutil.rmtree(self.partial)
        if self.folder.exists():
            for path in self.folder.iterdir():
                if path.name in (SPEC, JOURNAL) or path.name.endswith((SPOOL_SUFFIX, ".tmp")):
                    path.unlink()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()

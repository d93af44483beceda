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


class SpoolDamagedError(Exception):
    """Spooled rows are not those that were noted; for the part's writer, which says it in the user's words."""

    def __init__(self, path: Path, shard: int):
        super().__init__(str(path))
        self.path, self.shard = path, shard


TEMPORARY = re.compile(r"\.[\w.]+\.\d+(-\d+)?\.tmp")  # what ``manifest.write_bytes`` leaves when it is killed
SPEC, JOURNAL, SPOOL_SUFFIX = "spec.json", "journal.jsonl", ".spool"


def unreadable(path: Path, error: OSError) -> StoreError:
    """A read that failed, in one line; what cannot be read is made anew once it is deleted."""
    return StoreError(
        f"{error.filename or path}: cannot be read back ({error.strerror}); nothing was committed. Check the disk and run the same command "
        "again; if the file stays unreadable, delete it, and it is made anew"
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise unreadable(path, error) from error


@dataclass
class Journal:
    """Finished shards of one part. ``tokens`` and ``samples`` are those safely on disk, ``shards`` their number."""

    folder: Path
    partial: Path
    shards: int = 0
    tokens: int = 0
    samples: int = 0
    spooled: dict[str, int] = field(default_factory=dict)  # spool name -> bytes that are safe
    pieces: dict[str, list[list[Any]]] = field(default_factory=dict)  # spool name -> [begin, end, checksum] of each shard
    samples_after: list[int] = field(default_factory=list)  # samples that are whole after each shard
    shard_files: list[set[str]] = field(default_factory=list)  # paths of each shard
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
            try:
                if not self._holds(entry):
                    break
            except OSError as error:
                raise unreadable(self.partial, error) from error
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
        self.samples_after.append(entry["samples"])
        self.shard_files.append(set(entry["files"]))
        for name, piece in entry["spooled"].items():
            self.pieces.setdefault(name, []).append(piece)
        self.spooled |= {name: end for name, (_, end, _) in entry["spooled"].items()}

    def append(
        self, *, tokens: int, samples: int, files: dict[str, list[Any]], spools: dict[str, np.ndarray], statistics: dict[str, Any]
    ) -> None:
        """Note a finished shard whose ``files`` are already durable; ``spools`` are the rows to add to each spool."""
        spooled = {}
        for name, rows in spools.items():
            content = rows.reshape(-1).view(np.uint8)
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

    def forget(self, shard: int) -> None:
        """Drop a shard that turned out wrong, and those after it: the next writer goes on before it. Of no other use to this one."""
        path = self.folder / JOURNAL
        manifest.write_bytes(path, b"".join(line + b"\n" for line in path.read_bytes().split(b"\n")[:shard]))

    def spool(self, name: str, dtype: Any, row_shape: tuple[int, ...]) -> np.ndarray:
        """The rows of one spool, ``[rows, *row_shape]``, in memory and compared with what was noted of them.

        Raises:
            SpoolDamagedError: they differ, or are not there.
        """
        path, size = self.folder / (name + SPOOL_SUFFIX), self.spooled.get(name, 0)
        for last in (False, True):  # what is misread once is no damage
            content = _content(path) if size else b""
            wrong = self._wrong_piece(name, memoryview(content))
            if wrong is None:
                return np.frombuffer(content[:size], dtype).reshape(-1, *row_shape)
            if last:
                raise SpoolDamagedError(path, wrong)
        raise AssertionError

    def _wrong_piece(self, name: str, content: memoryview) -> int | None:
        for shard, (begin, end, checksum) in enumerate(self.pieces.get(name, [])):
            if xxhash.xxh3_128(content[begin:end]).hexdigest() != checksum:
                return shard
        return None

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

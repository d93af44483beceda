"""What a part must consist of, compared with what the disk holds, before a manifest says that it is whole."""

import os
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from dflash_offline import manifest
from dflash_offline.errors import StoreError
from dflash_offline.store.journal import Journal, unreadable


def refuse_foreign_files(folder: Path, own: Iterable[str]) -> None:
    """Nothing but the part's own files may lie in its folder. (A file that was deleted while open is one named ``.nfs*`` on NFS.)

    Raises:
        StoreError: naming the first other one.
    """
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if foreign := sorted(path for path in there - set(own) if not Path(path).name.startswith(".nfs")):
        raise StoreError(
            f"{folder / foreign[0]}: not written by this program, yet inside an unfinished part; "
            "move it away and run the same command again"
        )


def read_back(folder: Path, expected: dict[str, list[Any]], journal: Journal, *, executor: Executor | None) -> None:
    """Make every file and folder durable, and compare each file with what was written.

    A shard that differs is dropped from the journal, so that the next writer makes the part anew from there on.

    Args:
        expected: path in the part -> [bytes, checksum].
        executor: reads several files at a time.

    Raises:
        StoreError: a file is missing, differs or cannot be read.
    """
    found = list((executor.map if executor else map)(lambda file: _differs(folder / file, expected[file]), expected))
    wrong = {file: what for file, what in zip(expected, found, strict=True) if what is not None}
    if wrong:
        shards = [shard for shard, files in enumerate(journal.shard_files) if wrong.keys() & files]
        if shards:
            journal.forget(shards[0])
        first = min(wrong, key=lambda file: (not shards or file not in journal.shard_files[shards[0]], file))
        more = f" (and {len(wrong) - 1} more of its files)" if len(wrong) > 1 else ""
        raise StoreError(
            f"{folder / first}: {wrong[first]}{more}; the part was not committed. Check the disk and run the same command again: "
            + (f"it makes the part anew from shard {shards[0]} on" if shards else "it writes the file again")
        )
    for parent in {parent for file in expected for parent in (folder / file).parents if parent.is_relative_to(folder)}:
        manifest.fsync_folder(parent)


def _differs(path: Path, expected: list[Any]) -> str | None:
    """In what a file is not as it was written. A second look, past the page cache, decides: a misread is no damage."""
    problem = None
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            problem = "missing"
            continue
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            os.fsync(descriptor)  # what this raises is of the writing
            if problem is not None:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        try:
            found = [path.stat().st_size, manifest.checksum(path)]
        except OSError as error:
            problem = unreadable(path, error)
            continue
        if found == expected:
            return None
        problem = (
            f"{found[0]:,} bytes, {expected[0]:,} were written" if found[0] != expected[0] else "content differs from what was written"
        )
    if isinstance(problem, StoreError):
        raise problem
    return problem

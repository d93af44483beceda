"""Files that others read are written whole and renamed; a manifest written last marks a folder complete.

``manifest.json`` of a folder holds its content key, what was made (counts, versions), every file with its size and
xxh3-128 checksum, and a digest of itself, so that an edited manifest is noticed as well.
"""

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import xxhash

from dflash_offline.environment import environment
from dflash_offline.errors import DFlashError, StoreFullError

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp"
_READ_BYTES = 1 << 20  # stays in a core's own cache until it has been hashed


def fsync_folder(path: Path) -> None:
    """Make the entries of a folder durable (a rename is not, until its folder is synced)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_is_full(error: BaseException) -> bool:
    """Whether an error means ENOSPC or EDQUOT; safetensors says so in its text only."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in codes or any(f"os error {code})" in str(error) for code in codes)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file whole: temporary name beside it, fsync, rename, fsync of the folder.

    Raises:
        StoreFullError: no space is left on the device.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            fsync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if disk_is_full(error):
            raise StoreFullError(
                f"{path}: the disk is full; {len(content):,} bytes were needed. Make space and run the same command again"
            ) from error
        raise


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Write JSON whole (see ``write_bytes``)."""
    write_bytes(path, json_bytes(content), durable=durable)


def json_bytes(content: Any) -> bytes:
    """What ``write_json`` writes."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        DFlashError: the file is not JSON or may not be read; the text names it.
        FileNotFoundError: there is no such file.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DFlashError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DFlashError(
            f"{path}: not valid JSON ({error}); it was damaged, or not written by this program. Delete it, and its stage runs again"
        ) from None


def checksum(path: Path) -> str:
    """xxh3-128 of a file's bytes, hexadecimal (about 15 GB/s a core when cached)."""
    digest = xxhash.xxh3_128()
    with Path(path).open("rb", buffering=0) as file:
        block = memoryview(bytearray(min(_READ_BYTES, max(1, os.fstat(file.fileno()).st_size))))
        while length := file.readinto(block):
            digest.update(block[:length])
    return digest.hexdigest()


def digest(content: Any) -> str:
    """xxh3-128 of a JSON value in canonical form: keys sorted, no spaces."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(
    folder: Path,
    *,
    kind: str,
    key: str,
    files: Iterable[str] | Mapping[str, list[Any]] | None = None,
    executor: Executor | None = None,
    **content: Any,
) -> dict[str, Any]:
    """Commit ``folder``: fsync and checksum its files, then write ``manifest.json`` last.

    Args:
        kind: what the folder is, for example ``"corpus"``.
        key: its content key (``keys.py``).
        files: paths relative to the folder; None takes every file in it but what a killed ``write_bytes`` left. A mapping
            to ``[bytes, checksum]`` is of files that are durable and were compared already: they are not read again.
        executor: syncs and reads several files at a time.
        content: what else the manifest records, JSON values.
    """
    folder = Path(folder)
    if files is None:
        found = [path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST]
        left_over = {path for path in found if path.name.startswith(".") and path.name.endswith(_TEMPORARY)}
        files = sorted(path.relative_to(folder).as_posix() for path in found if path not in left_over)
    if isinstance(files, Mapping):
        listed = dict(files)
    else:
        names = list(files)
        listed = dict(zip(names, (executor.map if executor else map)(_synced, (folder / name for name in names)), strict=True))
    assert not {"kind", "key", "files", "environment", "digest"} & set(content), "names the manifest itself uses"
    # through JSON once, so that the digest is of what a reader will see (tuples, numbers as dictionary keys)
    manifest = json.loads(json.dumps({"kind": kind, "key": key, **content, "files": listed, "environment": environment()}))
    manifest["digest"] = digest(manifest)
    write_json(folder / MANIFEST, manifest)
    return manifest


def _synced(path: Path) -> list[Any]:
    """Size and checksum of a file that is durable now."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, checksum(path)]


def read_manifest(folder: Path, *, kind: str | None = None) -> dict[str, Any]:
    """Read and check a folder's manifest (its own digest, not the files).

    Raises:
        DFlashError: it is missing, is of another kind, or was edited.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise DFlashError(f"{folder}: no {MANIFEST}, so it is not complete; run the stage that makes it again")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("digest") != digest(
        {name: value for name, value in manifest.items() if name != "digest"}
    ):
        raise DFlashError(f"{path}: its digest does not fit its content: it was edited or damaged. Delete it, and its stage runs again")
    if kind is not None and manifest.get("kind") != kind:
        raise DFlashError(f"{path}: holds a {manifest.get('kind')!r}, wanted a {kind!r}")
    return manifest


def damaged_files(folder: Path, manifest: dict[str, Any], *, deep: bool, name_unreadable: bool = False) -> list[str]:
    """Name each file of a manifest that is missing, has another size or (``deep``) other content, with the reason.

    Args:
        name_unreadable: name also what the system cannot read, instead of raising its error: that file may be whole.

    Raises:
        OSError: a file cannot be read.
    """
    problems = []
    for name, (size, expected) in manifest["files"].items():
        path = Path(folder) / name
        try:
            if not path.is_file():
                problems.append(f"{name}: missing")
            elif path.stat().st_size != size:
                problems.append(f"{name}: {path.stat().st_size:,} bytes, manifest says {size:,}")
            elif deep and checksum(path) != expected:
                problems.append(f"{name}: content differs from its checksum")
        except OSError as error:
            if not name_unreadable:
                raise
            problems.append(f"{name}: cannot be read ({error.strerror})")
    return problems

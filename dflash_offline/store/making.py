"""Making a store, checking whose it is, and making a lost index anew."""

import contextlib
from pathlib import Path
from typing import Any

from dflash_offline import manifest
from dflash_offline.errors import DFlashError, StoreDamagedError, StoreError
from dflash_offline.store import schema
from dflash_offline.store.objects import open_objects
from dflash_offline.store.remote import REMOTE, Remote, claim, pull, read_remote, write_remote
from dflash_offline.store.schema import GROUP_FILE, INDEX, LOCK, PART_NAME


def create_or_open(store_path: Path | str, identity: dict[str, Any], *, url: str | None = None) -> None:
    """Make an empty store with this identity, or check that the one there has it. Safe to call from many processes.

    Args:
        url: where the hidden states are to lie in an object store. What is there already is taken over, if it has this
            identity and no other root writes there.

    Raises:
        StoreIdentityError: it holds something else; the text names the fields.
        StoreError: the folder is not a store, or cannot be written; or the URL is not the one it was made with.
    """
    root = Path(store_path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        own = (GROUP_FILE, INDEX, LOCK, REMOTE)
        foreign = sorted(path.name for path in root.iterdir() if path.name not in own and not path.name.endswith(".tmp"))
        if foreign and not ((root / GROUP_FILE).exists() or (root / REMOTE).exists()):
            raise StoreError(
                f"{root}: holds {foreign[0]!r} and is not a store; nothing was touched. Name another root, or move those files away"
            )
        with schema.locked(root / LOCK) if url or not (root / INDEX).exists() else contextlib.nullcontext():
            if url is not None:
                _create_remote(root, identity, url)
            elif not (root / INDEX).exists():
                if not (root / GROUP_FILE).exists():
                    (root / REMOTE).unlink(missing_ok=True)  # of a URL that could not be used: nothing was begun there
                _create(root, identity)
    except FileExistsError:
        raise StoreError(f"{root}: is a file, a store needs a folder; name another root") from None
    except PermissionError as error:
        raise StoreError(f"{root}: cannot be written ({error.strerror}); check the folder's owner and mode") from None
    except OSError as error:
        raise StoreError(f"{root}: cannot be made ({error.strerror})") from None
    if url is None and (remote := read_remote(root)) is not None:
        raise StoreError(f"{root}: this store is kept at {remote['url']}; set [store] url again, or use another root")
    schema.check_identity(root, identity)


def _create(root: Path, identity: dict[str, Any]) -> None:
    if any(PART_NAME.fullmatch(path.name) for path in root.iterdir()):
        raise StoreDamagedError(f"{root}: {INDEX} is missing and parts are there; {schema.REBUILD}")
    attributes = {
        "format": schema.FORMAT,
        "format_version": schema.FORMAT_VERSION,
        "reader_needed": schema.READER_NEEDED,
        "identity": identity,
    }
    manifest.write_json(root / GROUP_FILE, {"zarr_format": 3, "node_type": "group", "attributes": attributes})
    group = root / GROUP_FILE
    schema.write_index(root, {"group": [group.stat().st_size, manifest.checksum(group)], "parts": {}})


def _create_remote(root: Path, identity: dict[str, Any], url: str) -> None:
    there = read_remote(root)
    if there is None and (root / INDEX).exists():
        raise StoreError(f"{root}: this store was begun in the local folder; leave [store] url out, or use another root")
    if there is not None and there["url"] != url:
        if (root / GROUP_FILE).exists():
            raise StoreError(f"{root}: this store is kept at {there['url']}, the run file says {url}; set it back, or use another root")
        there = None  # that URL could not be used, and nothing was begun there
    objects = open_objects(url)
    claim(root, objects, (there or write_remote(root, url))["writer"])
    if (root / INDEX).exists():
        return
    if not pull(root, objects):
        _create(root, identity)
        objects.put(GROUP_FILE, root / GROUP_FILE)
        objects.put(INDEX, root / INDEX)


def rebuild_index(store_path: Path | str) -> list[str]:
    """Make the index anew from the parts whose every file is as its manifest says; returns their names.

    For a store whose index was lost or damaged. Parts that are not whole stay where they are and are captured again.

    Raises:
        StoreError: there is no store, or its ``zarr.json`` is lost too.
    """
    root = Path(store_path)
    identity = manifest.digest(schema.read_attributes(root)["identity"])
    remote = Remote.of(root)
    group, parts = root / GROUP_FILE, {}
    with schema.locked(root / LOCK):
        for folder in sorted(
            (path for path in root.iterdir() if PART_NAME.fullmatch(path.name)), key=lambda path: schema.part_key(path.name)
        ):
            with contextlib.suppress(DFlashError):
                found = manifest.read_manifest(folder, kind=schema.PART_KIND)
                if found["name"] != folder.name or found["key"] != identity:
                    continue
                damaged = (
                    manifest.damaged_files(folder, found, deep=True) if remote is None else remote.damaged(folder.name, found, deep=True)
                )
                if not damaged:
                    parts[folder.name] = schema.index_entry(found)
        schema.write_index(root, {"group": [group.stat().st_size, manifest.checksum(group)], "parts": parts})
        if remote is not None:
            remote.put_index()
    return list(parts)

"""Names, attributes and index of a store, and whose it is.

::

    hidden_states.zarr/
      zarr.json              group; attributes: format_version, identity
      index.json             every committed part with the digest of its manifest; digest of itself
      part-00012/            a committed part, see ``writer``
      part-00013.partial/    one being written; .part-00013.work/ and .part-00013.lock belong to it

Row ``j`` of a sample's arrays describes token ``j``: its id, its loss-mask bit, its hidden states, with no shift.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_offline import manifest
from dflash_offline.errors import DFlashError, StoreDamagedError, StoreError, StoreIdentityError

FORMAT = "dflash_offline hidden states"
FORMAT_VERSION = 2  # 1: lossless was upper and lower bytes; still read, and a store begun with it goes on with it
READER_NEEDED = "0.2"  # oldest release that reads this format version
GROUP_FILE = "zarr.json"
INDEX = "index.json"
LOCK = ".lock"
REMOTE = "remote.json"  # of a store in an object store, see ``remote``
CLAIM, STATISTICS = "writer.json", "channel_statistics.safetensors"  # in the object store itself, which may be a folder
PART_KIND = "hidden_states_part"
PART_NAME = re.compile(r"part-\d{5,}")
REBUILD = "`dflash-offline verify --rebuild-index` makes it anew from the parts that are whole"

# arrays of a part beside those of the codec: name, dtype, what they hold
TOKEN_ARRAYS = {"input_ids": "int32", "loss_mask": "uint8"}
SAMPLE_ARRAYS = {"sample_offsets": "int64", "sample_ids": "int64", "sample_hashes": "uint8", "buckets": "int16"}


def is_own(path: Path) -> bool:
    """Whether an entry of the store's folder, not a committed part, is one that this program makes."""
    name = path.name
    if name in (GROUP_FILE, INDEX, REMOTE, CLAIM, STATISTICS):
        return True
    if name == LOCK or re.fullmatch(r"\.part-\d{5,}\.lock", name):
        return path.is_file() and path.stat().st_size == 0
    return bool(re.fullmatch(r"part-\d{5,}\.partial|\.part-\d{5,}\.work|\.(zarr|index|remote)\.json\.\d+(-\d+)?\.tmp", name))


def part_key(name: str) -> tuple[int, str]:
    """Sort key: parts in the order of their numbers."""
    return len(name), name


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path`` (made if need be) while its index is read and rewritten."""
    with open_lock(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_attributes(root: Path) -> dict[str, Any]:
    """Attributes of the store's group; ``identity`` among them is an object.

    Raises:
        StoreError: there is no store, or a newer one than this release reads.
        StoreDamagedError: the file is not as it was written.
    """
    path = Path(root) / GROUP_FILE
    if not path.is_file():
        raise StoreError(f"{root}: no hidden-state store here ({GROUP_FILE} is missing); capture first, or check the path")
    try:
        attributes = manifest.read_json(path).get("attributes", {})
    except (DFlashError, AttributeError):
        raise StoreDamagedError(f"{path}: not valid; it has been damaged") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(attributes, dict):
        raise StoreDamagedError(f"{path}: not valid (attributes is no object); it has been damaged")
    if attributes.get("format") != FORMAT:
        raise StoreError(
            f"{root}: a Zarr group, but not a hidden-state store (attribute format is {attributes.get('format')!r}, wanted {FORMAT!r})"
        )
    version = attributes.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        needed = attributes.get("reader_needed", "a newer one")
        raise StoreError(
            f"{root}: store format version {version}; this release reads up to {FORMAT_VERSION}. Install dflash_offline {needed} or later"
        )
    if not isinstance(attributes.get("identity"), dict):
        raise StoreDamagedError(f"{path}: not valid (attribute identity is missing or no object); it has been damaged")
    return attributes


def check_identity(root: Path, identity: dict[str, Any]) -> None:
    """Refuse a store that holds another identity.

    Raises:
        StoreIdentityError: naming each field that differs, what is there and what was wanted.
    """
    stored, wanted = read_attributes(root)["identity"], manifest.json.loads(manifest.json.dumps(identity))
    differing = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
    if differing:
        facts = "; ".join(f"{name} is {stored.get(name)!r}, wanted {wanted.get(name)!r}" for name in differing)
        raise StoreIdentityError(f"{root}: holds other hidden states: {facts}. Use another root, or the settings it was made with")


def read_index(root: Path) -> dict[str, Any]:
    """``{"group": [bytes, checksum], "parts": {name: {"manifest", "samples", "tokens", "bytes", "constants"}}}``.

    Raises:
        StoreDamagedError: it is missing or does not fit its own digest.
    """
    read_attributes(root)
    return parse_index(root)


def parse_index(root: Path) -> dict[str, Any]:
    """``read_index`` without a look at the group's attributes."""
    path = Path(root) / INDEX
    try:
        index = manifest.read_json(path)
    except FileNotFoundError:
        raise StoreDamagedError(f"{path}: missing, so the store's parts are not known; {REBUILD}") from None
    except DFlashError:
        raise StoreDamagedError(f"{path}: not valid JSON; it has been damaged; {REBUILD}") from None
    if not isinstance(index, dict) or index.get("digest") != manifest.digest(
        {name: value for name, value in index.items() if name != "digest"}
    ):
        raise StoreDamagedError(f"{path}: its digest does not fit its content; it was edited or damaged; {REBUILD}")
    return index


def write_index(root: Path, index: dict[str, Any]) -> None:
    """Replace the index, its digest made anew. Call with ``locked(root / LOCK)`` held."""
    content = {name: value for name, value in index.items() if name != "digest"}
    for left in Path(root).glob(f".{INDEX}.*.tmp"):  # by a writer killed just here; it held this lock
        left.unlink()
    manifest.write_json(Path(root) / INDEX, {**content, "digest": manifest.digest(content)})


def index_entry(found: dict[str, Any]) -> dict[str, Any]:
    """What the index says of a part with this manifest."""
    num_bytes = sum(size for size, _ in found["files"].values())
    return {"manifest": found["digest"], "bytes": num_bytes, **{name: found[name] for name in ("samples", "tokens", "constants")}}


def check_constants(index: dict[str, Any], constants: str, root: Path) -> None:
    """Refuse a part whose channel scales are not those of the parts already there.

    Raises:
        StoreIdentityError: naming a part that has others.
    """
    for name, entry in index["parts"].items():
        if entry.get("constants", constants) != constants:
            raise StoreIdentityError(
                f"{root}: {name} was written with other channel statistics; restore those it was captured with, or use another root"
            )


def committed_parts(store_path: Path | str) -> list[str]:
    """Names of the parts that are whole, in order. An absent store has none.

    A part that the index lists and whose folder was removed is not among them: capture makes it again.
    """
    root = Path(store_path)
    if not (root / INDEX).exists():
        return []
    return sorted((name for name in read_index(root)["parts"] if (root / name / manifest.MANIFEST).exists()), key=part_key)

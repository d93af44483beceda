"""A store whose hidden states lie in an object store, and its local folder.

The objects below the URL are a whole store: the same names and bytes as a local one. The local folder keeps the tables
and manifests, so that planning, status and inspecting ask nobody; the shard files of the hidden states, which are nearly
all the bytes, are only there while their part is written::

    hidden_states.zarr/
      remote.json            the URL; who may write there; digest of itself
      part-00012/            as in ``part_files`` without shard files; zarr.json of their arrays is called array.json,
                             for zarr would read fill values where the shard files are missing

A part is whole when its manifest lies in the object store, which is put there last. Leases and index are those of the
local folder, which all hosts of a run share; ``writer.json`` in the object store keeps a second root from writing there.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash

from dflash_offline import manifest
from dflash_offline.errors import DFlashError, StoreDamagedError, StoreError
from dflash_offline.store import schema
from dflash_offline.store.cache import BlockCache
from dflash_offline.store.objects import MissingObjectError, Objects, open_objects
from dflash_offline.store.remote_shard import RemoteShard
from dflash_offline.store.shards import ARRAY_FILE
from dflash_offline.store_url import HOLDS_SECRETS, holds_secrets

REMOTE, CLAIM = schema.REMOTE, schema.CLAIM
STATISTICS = schema.STATISTICS  # put there by capture, for codecs that need them
DEFAULT_CACHE_BYTES = 50_000_000_000
_SHARD_FILE = re.compile(r"([^/]+)/c/\d+/\d+/\d+")  # of an array [T, K, W]
_OWN = re.compile(r"part-\d{5,}/(manifest\.json|zarr\.json|[a-z_]+/(zarr\.json|c(/\d+)+))")
_CHECK_BLOCKS = 4  # blocks read side by side while a file is compared


def is_shard_file(name: str) -> bool:
    return _SHARD_FILE.fullmatch(name) is not None


def local_names(files: Iterable[str]) -> dict[str, str]:
    """Files of a part that its local folder keeps, and what they are called there."""
    names = list(files)
    arrays = {found[1] for name in names if (found := _SHARD_FILE.fullmatch(name))}
    return {
        name: f"{name.partition('/')[0]}/{ARRAY_FILE}" if name.partition("/")[0] in arrays else name
        for name in names
        if not is_shard_file(name)
    }


def read_remote(root: Path) -> dict[str, Any] | None:
    """``{"url", "writer"}`` of a store in an object store, None of a local one.

    Raises:
        StoreDamagedError: the file was edited or damaged.
    """
    path = Path(root) / REMOTE
    if not path.is_file():
        return None
    with contextlib.suppress(DFlashError, AttributeError):
        found = manifest.read_json(path)
        if found.get("digest") == manifest.digest({name: value for name, value in found.items() if name != "digest"}):
            return found
    raise StoreDamagedError(f"{path}: its digest does not fit its content; it was edited or damaged. Delete it and run the capture again")


def write_remote(root: Path, url: str) -> dict[str, Any]:
    content = {"url": url, "writer": uuid.uuid4().hex}
    manifest.write_json(Path(root) / REMOTE, {**content, "digest": manifest.digest(content)})
    return content


def claim(root: Path, objects: Objects, writer: str) -> None:
    """Make this root the one that writes below the URL.

    Raises:
        StoreError: another root is.
    """
    mine = {"writer": writer, "host": socket.gethostname(), "folder": str(Path(root).absolute())}
    if objects.put(CLAIM, json.dumps(mine).encode(), create=True):
        return
    if (refused := refusal(objects, writer)) is not None:
        raise StoreError(refused)


def refusal(objects: Objects, writer: str | None) -> str | None:
    """Why the root with this mark (None: one without a store yet) must not write below the URL: another one does.

    Raises:
        MissingObjectError: none does.
    """
    try:
        there = json.loads(objects.get(CLAIM))
        same, who = there["writer"] == writer, f"{there['folder']} on {there['host']}"
    except (ValueError, KeyError, TypeError):
        same, who = False, "another root"
    if same:
        return None
    return (
        f"{objects.url} is written from {who}, and two roots must not write into one store. Choose another [store] url; "
        f"if that root is gone, delete the object {CLAIM} there and run the same command again"
    )


def pull(root: Path, objects: Objects) -> bool:
    """Bring tables and manifests of the store below the URL into ``root``, index last; False when there is no store.

    A part without manifest there is left out: it is not whole.
    """
    try:
        group = objects.get(schema.GROUP_FILE)
        index = json.loads(objects.get(schema.INDEX))
    except MissingObjectError:
        return False
    except ValueError:
        raise StoreDamagedError(f"{objects.url}/{schema.INDEX}: not valid JSON; it has been damaged") from None
    manifest.write_bytes(Path(root) / schema.GROUP_FILE, group)
    schema.read_attributes(root)  # refuses what is no store, or a newer one
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: _pull_part(root, objects, name, index["parts"][name]["manifest"]), index["parts"]))
    schema.write_index(root, index)
    return True


def mirror(url: str) -> Path:
    """Local folder of the store at ``url``, for reading: below the user's cache folder, brought up to date.

    That of a ``file://`` URL is the store itself, read in place.

    Raises:
        StoreError: there is no store, or the URL holds a secret.
    """
    if holds_secrets(url):
        raise StoreError(f"the URL of the store {HOLDS_SECRETS}")
    if url.startswith("file://"):
        there = Path(unquote(urlsplit(url).path))
        if not (there / schema.GROUP_FILE).is_file():
            raise StoreError(f"{url}: no hidden-state store here; name the folder that ends in hidden_states.zarr")
        return there
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = home / "dflash_offline" / "stores" / xxhash.xxh3_64_hexdigest(url.rstrip("/").encode()) / "hidden_states.zarr"
    objects = open_objects(url)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with schema.locked(root / schema.LOCK):
            if read_remote(root) is None:
                write_remote(root, objects.url)
            if not pull(root, objects):
                raise StoreError(f"{objects.url}: no hidden-state store here; name the URL that ends in hidden_states.zarr")
    except OSError as error:
        raise StoreError(f"{root}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can") from None
    return root


def _pull_part(root: Path, objects: Objects, name: str, digest: str) -> None:
    folder = Path(root) / name
    with contextlib.suppress(DFlashError):
        if manifest.read_manifest(folder)["digest"] == digest:
            return
    if folder.exists():
        shutil.rmtree(folder)  # made anew since
    try:
        content = objects.get(f"{name}/{manifest.MANIFEST}")
        files = json.loads(content)["files"]
    except MissingObjectError:
        return
    except (ValueError, KeyError, TypeError):
        raise StoreDamagedError(f"{objects.url}/{name}/{manifest.MANIFEST}: not valid; it has been damaged") from None
    for remote_name, local_name in local_names(files).items():
        path = folder / local_name
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_bytes(path, objects.get(f"{name}/{remote_name}"), durable=False)
    manifest.write_bytes(folder / manifest.MANIFEST, content)


@dataclass
class Remote:
    """The objects of the store whose local folder is ``root``, and the blocks of them that are kept here."""

    root: Path
    objects: Objects
    cache: BlockCache
    writer: str = ""
    url: str = ""
    _listing: dict[str, dict[str, int]] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, root: Path | str, *, cache_bytes: int | None = None, cache_folder: str | Path | None = None) -> "Remote | None":
        """None for a local store. The cache lies beside ``root`` unless ``cache_folder`` names a place, one folder a store there."""
        found = read_remote(Path(root))
        if found is None:
            return None
        folder = (
            Path(root).parent / "cache" if cache_folder is None else Path(cache_folder).expanduser() / Path(root).absolute().parent.name
        )
        objects = open_objects(found["url"])
        return cls(Path(root), objects, BlockCache(folder, cache_bytes or DEFAULT_CACHE_BYTES), found["writer"], objects.url)

    @property
    def num_bytes(self) -> int:
        """Bytes of the committed parts, by the index; nobody is asked. None before a store was made there."""
        if not (self.root / schema.INDEX).exists():
            return 0
        return sum(entry["bytes"] for entry in schema.read_index(self.root)["parts"].values())

    # -- reading ------------------------------------------------------------------------------------------------------

    def shard(self, part: str, found: dict[str, Any], file: str) -> RemoteShard:
        """A shard file of a part with manifest ``found``, to read ranges of."""
        if file not in found["files"]:
            raise StoreDamagedError(f"{self.url}/{part}/{file}: not in the part's manifest")
        return RemoteShard(self, f"{part}/{file}", self._key(part, found, file), found["files"][file][0])

    def _key(self, part: str, found: dict[str, Any], file: str = "") -> str:
        folder = f"{part}-{found['digest'][:16]}"  # a part made anew has another manifest
        return f"{folder}/{file.replace('/', '.')}" if file else folder

    def forget(self, part: str, found: dict[str, Any]) -> None:
        """Drop what is kept of a part."""
        self.cache.forget(self._key(part, found))

    def sizes(self, part: str) -> dict[str, int]:
        """Bytes of each object of a part; all parts are listed at once, the first time."""
        if self._listing is None:
            self._listing = {}
            for name, size in self.objects.sizes().items():
                folder, _, file = name.partition("/")
                self._listing.setdefault(folder, {})[file] = size
        return self._listing.get(part, {})

    def damaged(self, part: str, found: dict[str, Any], *, deep: bool, once: bool = False) -> list[str]:
        """``manifest.damaged_files`` of a part over its local files and its objects.

        Args:
            deep: compare contents too; objects are read through.
            once: of objects whose content was found right before through this cache, only sizes; what is read is kept.
        """
        names, files = local_names(found["files"]), found["files"]
        problems = manifest.damaged_files(self.root / part, {"files": {local: files[name] for name, local in names.items()}}, deep=deep)
        there = self.sizes(part)
        for name, (size, expected) in {**files, manifest.MANIFEST: (None, None)}.items():
            if name not in there:
                problems.append(f"{name}: the object is missing from {self.url}/{part}")
            elif size is not None and there[name] != size:
                problems.append(f"{name}: the object has {there[name]:,} bytes, manifest says {size:,}")
            elif deep and size is not None and not (once and name in names):
                mark = self.cache.mark(self._key(part, found, name), name="compared")
                if once and mark.exists():
                    continue
                if self._checksum(part, found, name, keep=once) != expected:
                    problems.append(f"{name}: the object's content differs from its checksum")
                elif once:
                    with contextlib.suppress(OSError):
                        mark.parent.mkdir(parents=True, exist_ok=True)
                        mark.touch()
        if deep and not once and manifest.MANIFEST in there:
            local = (self.root / part / manifest.MANIFEST).read_bytes()
            if self.objects.get(f"{part}/{manifest.MANIFEST}") != local:
                problems.append(f"{manifest.MANIFEST}: the object differs from the local file")
        return problems

    def _checksum(self, part: str, found: dict[str, Any], file: str, *, keep: bool) -> str:
        size, block = found["files"][file][0], self.cache.block_bytes
        hashed, edges = xxhash.xxh3_128(), [(start, min(start + block, size)) for start in range(0, size, block)]
        for first in range(0, len(edges), _CHECK_BLOCKS):
            group = edges[first : first + _CHECK_BLOCKS]
            for number, content in enumerate(self.objects.ranges(f"{part}/{file}", group), first):
                hashed.update(memoryview(content))
                if keep:
                    self.cache.keep(self._key(part, found, file), number, memoryview(content))
        return hashed.hexdigest()

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin(self, part: str) -> None:
        """A part is about to be written: what an earlier one of that name left must not pass for it."""
        self.objects.delete([f"{part}/{manifest.MANIFEST}"])

    def upload(self, part: str, folder: Path, file: str) -> None:
        """Put one file of a part."""
        self.objects.put(f"{part}/{file}", folder / file)

    def commit(self, part: str, folder: Path, *, uploaded: Iterable[str] = ()) -> None:
        """Put what is missing of a part, see that everything is there, then put its manifest. Again, it does nothing.

        Raises:
            StoreError: the store refuses, or an object is not as it was put.
        """
        content, name = (folder / manifest.MANIFEST).read_bytes(), f"{part}/{manifest.MANIFEST}"
        with contextlib.suppress(MissingObjectError):
            if self.objects.get(name) == content:
                return
        files = json.loads(content)["files"]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda file: self.upload(part, folder, file), files.keys() - set(uploaded)))
        there = {found.partition("/")[2]: size for found, size in self.objects.sizes(part).items()}
        if wrong := sorted(file for file, (size, _) in files.items() if there.get(file) != size):
            raise StoreError(f"{self.url}/{part}/{wrong[0]}: not there as it was put; run the same command again")
        self.objects.delete([f"{part}/{file}" for file in there.keys() - files.keys()])
        self.objects.put(name, content)

    def put_index(self) -> None:
        """Put the local index; with its lock held, so that they come in order."""
        self.objects.put(schema.INDEX, (self.root / schema.INDEX).read_bytes())

    def thin(self, part: str, folder: Path) -> None:
        """Remove a committed part's shard files from ``folder``; blocks of them are kept while there is room."""
        found = manifest.read_manifest(folder, kind=schema.PART_KIND)
        shards = [file for file in found["files"] if is_shard_file(file)]
        keep = self.cache.num_bytes + sum(found["files"][file][0] for file in shards) <= self.cache.max_bytes
        for file in shards:
            with contextlib.suppress(FileNotFoundError), (folder / file).open("rb") as opened:
                number = 0
                while keep and (block := opened.read(self.cache.block_bytes)):
                    self.cache.keep(self._key(part, found, file), number, block)
                    number += 1
            (folder / file).unlink(missing_ok=True)
        for name, local in local_names(found["files"]).items():
            if name != local and (folder / name).exists():
                (folder / name).replace(folder / local)

    def delete(self) -> None:
        """Delete every object that this program put below the URL; others stay, and all of them if another root writes there now."""
        with contextlib.suppress(MissingObjectError, ValueError, TypeError, KeyError):
            if json.loads(self.objects.get(CLAIM))["writer"] != self.writer:
                return
        names = [name for name in self.objects.sizes() if _OWN.fullmatch(name)]
        last = [schema.INDEX, schema.GROUP_FILE, STATISTICS, CLAIM]
        with ThreadPoolExecutor(16) as pool:  # manifests first, so that what an interruption leaves is never taken for whole
            for group in (
                [n for n in names if n.endswith(manifest.MANIFEST)],
                [n for n in names if not n.endswith(manifest.MANIFEST)],
                last,
            ):
                list(pool.map(lambda name: self.objects.delete([name]), group))

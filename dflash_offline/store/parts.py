"""One committed part, opened for reading: its tables at once, its arrays when they are first read."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from dflash_offline import manifest
from dflash_offline.codecs import Codec, codec_of_part
from dflash_offline.errors import DFlashError, StoreDamagedError
from dflash_offline.store import schema
from dflash_offline.store.remote import Remote
from dflash_offline.store.shards import ShardedArray, read_small, unreadable

Verify = Literal["deep", "sizes", "off"]


class StoredPart:
    """The tables of one part, read at once, and its arrays, opened when first read."""

    def __init__(self, root: Path, name: str, entry: dict[str, Any], verify: Verify, remote: Remote | None = None):
        self.folder, self.name, self.verify, self.remote = root / name, name, verify, remote
        try:
            self.manifest: dict[str, Any] = manifest.read_manifest(self.folder, kind=schema.PART_KIND)
        except DFlashError as error:
            raise StoreDamagedError(f"{error} ({name}); `verify` lists what is damaged") from None
        if verify != "off":
            if self.manifest["digest"] != entry["manifest"]:
                raise StoreDamagedError(
                    f"{self.folder}: not the part that {schema.INDEX} lists (another manifest); it was swapped or edited"
                )
            self._check(deep=False)
        self.offsets = read_small(self.folder / "sample_offsets")
        self.hashes = read_small(self.folder / "sample_hashes")
        self.sample_ids = read_small(self.folder / "sample_ids")
        self.buckets = read_small(self.folder / "buckets")
        if not len(self.offsets) - 1 == len(self.hashes) == len(self.sample_ids) == len(self.buckets) == self.manifest["samples"]:
            raise StoreDamagedError(f"{self.folder}: its tables differ in length; `verify` lists what is damaged")
        self._lock, self._verified = Lock(), verify != "deep"

    def check_content(self) -> None:
        """With ``verify="deep"``: compare every file with its checksum, once, before the first byte is used."""
        with self._lock:
            if not self._verified:
                self._check(deep=True)
                self._verified = True

    def _check(self, *, deep: bool) -> None:
        try:
            if self.remote is None:
                problems = manifest.damaged_files(self.folder, self.manifest, deep=deep)
            else:
                problems = self.remote.damaged(self.name, self.manifest, deep=deep, once=True)
        except OSError as error:
            raise unreadable(error.filename or self.folder, error) from None
        if problems:
            raise StoreDamagedError(f"{self.folder}: {problems[0]}; delete this part's folder and capture again, only it is made anew")

    def _opener(self, array: str) -> Callable[[str], Any] | None:
        if self.remote is None:
            return None
        return lambda name: self.remote.shard(self.name, self.manifest, f"{array}/{name}")

    @cached_property
    def attributes(self) -> dict[str, Any]:
        try:
            return manifest.read_json(self.folder / schema.GROUP_FILE)["attributes"]
        except (DFlashError, KeyError):
            where = self.folder / schema.GROUP_FILE
            raise StoreDamagedError(
                f"{where}: holds no attributes, or is no JSON; it was edited or damaged. `verify` lists what else is"
            ) from None

    @cached_property
    def codec(self) -> Codec:
        try:
            return codec_of_part(self.attributes, lambda name: read_small(self.folder / name))
        except KeyError as error:
            where = f"{self.folder / schema.GROUP_FILE}: attribute {error.args[0]!r}"
            raise StoreDamagedError(f"{where} is missing (every format version has it); it was edited or damaged") from None

    @cached_property
    def arrays(self) -> list[ShardedArray]:
        where = self.folder if self.remote is None else f"{self.remote.url}/{self.name}"
        codec, found = self.codec, self.manifest
        said = codec.name, codec.num_taps, codec.hidden_size, codec.constants_digest
        if said != (found["codec"], found["num_taps"], found["hidden_size"], found["constants"]):
            raise StoreDamagedError(f"{self.folder / schema.GROUP_FILE}: does not fit the part's manifest; it was edited or damaged")
        arrays = []
        for array in codec.arrays:
            opened = ShardedArray(self.folder / array.name, self._opener(array.name), f"{where}/{array.name}")
            opened.require(tokens=found["tokens"], taps=codec.num_taps, width=array.width, dtype=array.dtype)
            arrays.append(opened)
        return arrays

    @cached_property
    def input_ids(self) -> np.ndarray:
        return read_small(self.folder / "input_ids")

    @cached_property
    def loss_mask(self) -> np.ndarray:
        return read_small(self.folder / "loss_mask")

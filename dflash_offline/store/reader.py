"""Reads a store: samples by number or by content hash, and encoded batches for training.

T tokens of a sample, K taps, k selected taps, H hidden size.

>>> store = HiddenStateStore("hidden_states.zarr")
>>> sample = store[7]
>>> sample.input_ids, sample.loss_mask                # [T]
>>> sample.hidden_states()                            # bf16 [T, K, H], read now
>>> sample.hidden_states(layers=[0, 2], tokens=slice(10, 20))   # bf16 [10, 2, H], only those chunks are read
>>> batch = store.read_encoded([3, 9], layers=[0, 1, 2])        # codes, on the CPU
>>> batch.decode("cuda")                              # bf16 [T3 + T9, 3 * H]
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from dflash_offline import manifest
from dflash_offline.codecs import Codec
from dflash_offline.errors import StoreDamagedError, StoreError, StoreIdentityError
from dflash_offline.store import schema
from dflash_offline.store.memory import Blocks
from dflash_offline.store.parts import StoredPart, Verify
from dflash_offline.store.remote import Remote, mirror
from dflash_offline.store.sample import StoredSample
from dflash_offline.store.shards import ShardedArray, read_small
from dflash_offline.store.threads import Read, ReadingThreads

if TYPE_CHECKING:  # torch takes longer to import than tables to read: only what gives tensors imports it
    import torch

    from dflash_offline.store.batch import EncodedBatch


class HiddenStateStore:
    """A store opened for reading: ``len(store)`` samples over all committed parts, in part order.

    Args:
        path: the ``hidden_states.zarr`` folder, or its URL in an object store.
        verify: ``"sizes"`` compares manifests and file sizes now, ``"deep"`` also checksums a part's files before their
            first use, ``"off"`` neither. Chunk checksums are compared on every read in any case.
        parts: only these parts.
        threads: of a batch, read in parallel; None = 8, or as many as there are cores: more wait for the interpreter's lock; 16
            from an object store.
        cache_bytes, cache_folder: of a store in an object store: how much of it is kept on this host, and where; see ``remote``.

    Raises:
        StoreError: no store, or a newer format.
        StoreDamagedError: naming part and file.
    """

    def __init__(
        self,
        path: Path | str,
        verify: Verify = "sizes",
        *,
        parts: Sequence[str] | None = None,
        threads: int | None = None,
        cache_bytes: int | None = None,
        cache_folder: Path | str | None = None,
    ):
        if verify not in get_args(Verify):
            raise StoreError(f"{path}: verify = {verify!r}; known are {', '.join(map(repr, get_args(Verify)))}")
        self.path, self.verify = mirror(path) if isinstance(path, str) and "://" in path else Path(path), verify
        self._cache = {"cache_bytes": cache_bytes, "cache_folder": cache_folder}
        self.remote = Remote.of(self.path, **self._cache)
        self.threads = threads or (16 if self.remote else min(8, len(os.sched_getaffinity(0))))
        self.attributes = schema.read_attributes(self.path)
        self.identity: dict[str, Any] = self.attributes["identity"]
        entries = schema.read_index(self.path)["parts"]
        names = sorted(entries if parts is None else parts, key=schema.part_key)
        names = [name for name in names if (self.path / name).exists() or not self._unfinished(name)]
        if unknown := [name for name in names if name not in entries]:
            raise StoreError(f"{self.path}: no part {unknown[0]!r}")
        if missing := [name for name in names if not (self.path / name).exists()]:
            raise StoreDamagedError(
                f"{self.path / missing[0]}: {schema.INDEX} lists this part and its folder is missing; capture again, only it is made anew"
            )
        if names:
            schema.check_constants({"parts": entries}, entries[names[0]].get("constants"), self.path)
        self._parts = [StoredPart(self.path, name, entries[name], verify, self.remote) for name in names]
        expected = manifest.digest(self.identity)
        for part in self._parts:
            if part.manifest["key"] != expected:
                raise StoreIdentityError(f"{part.folder}: was captured with another identity than the store's; move it away")
        self._edges = np.cumsum([0, *(part.manifest["samples"] for part in self._parts)])
        self._blocks = Blocks()
        self._threads = ReadingThreads(self.threads)
        self._by_hash: dict[bytes, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self.opening(), ()  # a worker process opens it again

    def opening(self, *, checked: bool = False) -> Callable[[], "HiddenStateStore"]:
        """What opens this store in another process; ``checked``: with ``"deep"``, its content is not checked again there."""
        verify = "sizes" if checked and self.verify == "deep" else self.verify
        return partial(_open, self.path, verify, self.parts, self.threads, self._cache)

    def check_content(self, indices: Sequence[int]) -> None:
        """With ``verify="deep"``: compare the files of these samples' parts with their checksums, unless that was done before.

        Raises:
            StoreDamagedError: naming part and file.
        """
        _check_content(part for part, _ in map(self._locate, indices))

    def _unfinished(self, name: str) -> bool:
        return (self.path / f"{name}.partial" / manifest.MANIFEST).exists()  # about to be renamed by its writer

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[str]:
        """Names of the parts, in order."""
        return [part.name for part in self._parts]

    def manifests(self) -> Iterator["StoredPart"]:
        """Each part with its ``name``, ``folder`` and ``manifest``."""
        return iter(self._parts)

    def part_sizes(self) -> list[tuple[str, int]]:
        """Name and number of samples of each part."""
        return [(part.name, part.manifest["samples"]) for part in self._parts]

    @property
    def layer_ids(self) -> list[int]:
        """Layer ids along K; with ``store_last_hidden`` the last tap is the last layer's output and has no id here."""
        return list(self.identity["layer_ids"])

    @property
    def num_taps(self) -> int:
        return self._first.manifest["num_taps"]

    @property
    def hidden_size(self) -> int:
        return self._first.manifest["hidden_size"]

    @property
    def codec(self) -> Codec:
        return self._first.codec

    @property
    def _first(self) -> StoredPart:
        if not self._parts:
            raise StoreError(f"{self.path}: holds no committed part yet; capture first")
        return self._parts[0]

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 ``[n]``: tokens of each sample."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(part.offsets) for part in self._parts)])

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 ``[n + 1]``: edges of the samples over the whole store."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """int64 ``[n]``: corpus rows the samples were captured from."""
        return np.concatenate([np.zeros(0, np.int64), *(part.sample_ids for part in self._parts)])

    @cached_property
    def buckets(self) -> np.ndarray:
        """int16 ``[n]``: length buckets."""
        return np.concatenate([np.zeros(0, np.int16), *(part.buckets for part in self._parts)])

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint8 ``[n, 32]``: sha256 of each sample's ids and mask."""
        return np.concatenate([np.zeros((0, 32), np.uint8), *(part.hashes for part in self._parts)])

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __repr__(self) -> str:
        what = f"{self.codec.name}, layers {self.layer_ids}" if self._parts else "no committed part yet"
        return f"<HiddenStateStore {self.path}: {len(self)} samples, {int(self.lengths.sum())} tokens, {what}>"

    def find(self, sha256: bytes) -> int:
        """Number of the sample with this content.

        Raises:
            KeyError: it is not in the store.
        """
        if self._by_hash is None:
            rows = self.hashes
            self._by_hash = {rows[i].tobytes(): i for i in range(len(rows) - 1, -1, -1)}
        return self._by_hash[sha256]

    @property
    def layer_names(self) -> list[int | str]:
        """What ``positions`` knows: the layer ids and, with ``store_last_hidden``, ``"last"``."""
        ids: list[int | str] = [*self.layer_ids]
        return ids + ["last"] * (self.num_taps - len(ids) if self._parts else 0)

    def positions(self, layers: Sequence[int | str]) -> list[int]:
        """Positions along K of these layer ids, and of ``"last"`` where ``store_last_hidden`` was set.

        Raises:
            StoreError: one was not captured.
        """
        names = self.layer_names
        if missing := [layer for layer in layers if layer not in names]:
            raise StoreError(f"{self.path}: layer {missing[0]} was not captured; captured are [{', '.join(map(str, names))}]")
        return [names.index(layer) for layer in layers]

    def locate(self, number: int) -> tuple[str, int]:
        """Part and index in it of a sample."""
        part, index = self._locate(number)
        return part.name, index

    def _locate(self, number: int) -> tuple[StoredPart, int]:
        number = int(number)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        at = int(np.searchsorted(self._edges, number, "right")) - 1
        return self._parts[at], number - int(self._edges[at])

    def __getitem__(self, number: int) -> StoredSample:
        if isinstance(number, slice):
            raise StoreError(f"{self.path}: store[{number.start}:{number.stop}]: take one sample at a time, as store[{number.start or 0}]")
        part, index = self._locate(number)
        rows = slice(int(part.offsets[index]), int(part.offsets[index + 1]))
        return StoredSample(
            store=self,
            number=int(number) % max(1, len(self)),
            part=part.name,
            index=index,
            sample_id=int(part.sample_ids[index]),
            sha256=part.hashes[index].tobytes(),
            bucket=int(part.buckets[index]),
            input_ids=part.input_ids[rows],
            loss_mask=part.loss_mask[rows],
        )

    # -- hidden states ---------------------------------------------------------------------------------------------

    def read_tokens(self, number: int, start: int, stop: int, layers: Sequence[int] | None = None) -> "torch.Tensor":
        """bf16 ``[stop - start, k, H]`` of one sample, decoded on the CPU."""
        import torch

        taps = self._taps(layers)
        block = torch.from_numpy(self._read_block(number, start, stop, taps))
        return self.codec.decode(self.codec.views(block, len(taps), stop - start), taps)

    def read_tokens_numpy(self, number: int, start: int, stop: int, layers: Sequence[int] | None = None) -> np.ndarray:
        """float32 ``[stop - start, k, H]``: the numbers of ``read_tokens``, without torch."""
        taps = self._taps(layers)
        block = self._read_block(number, start, stop, taps)  # held until all is decoded: views do not keep it from being used again
        return self.codec.decode_numpy(self.codec.views_numpy(block, len(taps), stop - start), taps)

    def _read_block(self, number: int, start: int, stop: int, taps: Sequence[int]) -> np.ndarray:
        """uint8: some tokens of one sample as they are stored, laid out as ``codec.views`` finds them."""
        part, index = self._locate(number)
        block = self._blocks.take(self.codec.block_bytes(len(taps), stop - start))
        arrays = self.codec.views_numpy(block, len(taps), stop - start)
        first = int(part.offsets[index])
        self._read([(part, first + start, first + stop)], taps, [array.view(np.uint8) for array in arrays.values()])
        return block

    def read_encoded(self, indices: Sequence[int], layers: Sequence[int] | None = None) -> "EncodedBatch":
        """Read samples as they are stored, one after another.

        Args:
            indices: sample numbers.
            layers: positions along K, in the order wanted; None = all.
        """
        from dflash_offline.store.batch import EncodedBatch

        taps = self._taps(layers)
        located = [self._locate(i) for i in indices]
        lengths = [int(part.offsets[index + 1] - part.offsets[index]) for part, index in located]
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = int(edges[-1])
        arrays = self.codec.views(self.take_memory(self.codec.block_bytes(len(taps), tokens)), len(taps), tokens)
        ranges = [(part, int(part.offsets[index]), int(part.offsets[index + 1])) for part, index in located]
        num_bytes = self._read(ranges, taps, [_bytes(array) for array in arrays.values()])
        ids, masks = [], []
        for part, index in located:
            rows = slice(int(part.offsets[index]), int(part.offsets[index + 1]))
            ids.append(part.input_ids[rows])
            masks.append(part.loss_mask[rows])
        empty = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)]
        return EncodedBatch(self.codec, taps, arrays, edges, np.concatenate(ids or empty[0]), np.concatenate(masks or empty[1]), num_bytes)

    def _taps(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        if isinstance(layers, int | str):
            raise StoreError(f"{self.path}: layers = {layers!r}: give a list of positions along the {self.num_taps} captured layers")
        taps = tuple(range(self.num_taps)) if layers is None else tuple(int(i) for i in layers)
        if not taps or any(i not in range(self.num_taps) for i in taps):
            raise StoreError(
                f"{self.path}: layers = {list(taps)} are positions along the {self.num_taps} captured layers, "
                f"from 0 to {self.num_taps - 1}; of layer ids, which are {self.layer_ids}, store.positions([...]) makes them"
            )
        return taps

    def take_memory(self, size: int) -> "torch.Tensor":
        """uint8 ``[size]`` for the codes of one batch, page-locked where CUDA is used; given back whole when the batch is dropped."""
        import torch

        if torch.cuda.is_available():
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self._blocks.take(size))

    def _read(self, ranges: Sequence[tuple[StoredPart, int, int]], taps: Sequence[int], out: list[np.ndarray]) -> int:
        """Read token ranges of parts, one after another, into ``out``, uint8 ``[k, T, bytes]`` for each array; bytes read from files."""
        _check_content(part for part, _, _ in ranges)
        reads: list[Read] = []
        share = sum(array.nbytes for array in out) // self.threads
        order = sorted(range(len(out)), key=lambda i: not self.codec.arrays[i].zstd)  # what costs most first: threads end together
        for i in order:
            end = 0
            for part, start, stop in ranges:
                array, view, end = part.arrays[i], out[i][:, end : end + stop - start], end + stop - start
                if self.remote is None:
                    reads += array.reads(start, stop, taps, view, share=share)
                else:
                    reads += self._remote_reads(part, array, start, stop, taps, view)
        return self._threads.run(reads)

    def _remote_reads(
        self, part: StoredPart, array: ShardedArray, start: int, stop: int, taps: Sequence[int], out: np.ndarray
    ) -> Iterator[Read]:
        """Pieces of an array in an object store, where already looking into a shard's index takes time."""

        def read(first: int, last: int) -> int:
            view = out[:, first - start : last - start]
            try:
                return array.read(first, last, taps, view)
            except StoreDamagedError:
                self.remote.forget(part.name, part.manifest)  # nothing may be left of it: another thread met the same damage
            return array.read(first, last, taps, view)  # what was kept on this host may have been the damaged copy

        return (partial(read, first, last) for first, last in array.spans(start, stop, len(taps)))

    def close(self) -> None:
        """Stop the reading threads."""
        self._threads.close()

    def __enter__(self) -> "HiddenStateStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path, verify: Verify, parts: list[str], threads: int, cache: dict[str, Any]) -> HiddenStateStore:
    return HiddenStateStore(path, verify, parts=parts, threads=threads, **cache)


def _check_content(parts: Iterable[StoredPart]) -> None:
    for part in {part.name: part for part in parts}.values():
        part.check_content()


def _bytes(array: "torch.Tensor") -> np.ndarray:
    return array.numpy().view(np.uint8)


def committed_hashes(store_path: Path | str) -> dict[bytes, tuple[str, int]]:
    """Content hash of every stored row -> part and index in it. Reads one small table a part; an absent store has none."""
    root, found = Path(store_path), {}
    for name in schema.committed_parts(root):
        rows = read_small(root / name / "sample_hashes")
        for i in range(len(rows)):
            found.setdefault(rows[i].tobytes(), (name, i))
    return found

"""Zarr v3 arrays of one kind, written and read straight: ``[T, K, W]`` in shards of chunks ``[chunk_tokens, 1, W]``.

T tokens, K taps, k selected taps, W values per token and tap, C token chunks of a shard.

The files are ordinary Zarr (``sharding_indexed``, ``bytes``, optionally ``zstd``, ``crc32c``), made by ``zarr`` itself
as far as metadata goes, and any Zarr reader opens them. Chunk bytes are moved by the few lines here because
they are the hot path: a shard is written from the buffer that collected it, chunks are read into the (pinned) memory
that goes to the GPU, threads work outside the interpreter lock, and a sample's chunks, which lie side by side, are one
read. A shard file is its encoded chunks one after another, then ``C * K`` pairs (offset, bytes) uint64, then crc32c.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from zstandard import ZstdError, frame_content_size

from dflash_offline.errors import StoreDamagedError, StoreError
from dflash_offline.store import checksums, scatter
from dflash_offline.store.shard_chunks import Chunks, Run, ShardFile, decompressor, scratch
from dflash_offline.store.shard_writing import ABSENT, crc32c, crc32c_number
from dflash_offline.store.threads import Read

ARRAY_FILE = "array.json"  # zarr.json of an array whose shard files are elsewhere, see ``remote``
LEAST_READ_BYTES = 4 << 20  # where several threads share out a batch
READ_BYTES = 24 << 20  # most bytes in one read, unless a row of chunks has more
COMPRESSED_READ_BYTES = 4 << 20  # the same of compressed chunks: they are in a cache until they are decompressed
_METADATA = "its metadata, or that of its part, has been damaged; `verify` says which"
_SPAN_BYTES = 8 << 20  # of an array in an object store, fetched by one thread


def array_metadata(
    shape: Sequence[int],
    dtype: str,
    *,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    zstd: int | None = None,
    fill_value: int = 0,
    attributes: dict[str, Any] | None = None,
    dimension_names: Sequence[str] | None = None,
) -> bytes:
    """``zarr.json`` of an array, as ``zarr`` itself writes it. Without ``chunks`` the array is one chunk."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    memory: dict[str, Any] = {}
    compressors = [] if zstd is None else [ZstdCodec(level=zstd, checksum=False)]
    zarr.create_array(
        zarr.storage.MemoryStore(memory),
        shape=tuple(shape),
        dtype=dtype,
        chunks=tuple(chunks or shape),
        shards=None if shards is None else tuple(shards),
        compressors=[*compressors, Crc32cCodec()],
        fill_value=fill_value,
        attributes=attributes or {},
        dimension_names=dimension_names,
        zarr_format=3,
    )
    return memory["zarr.json"].to_bytes()


def small_array(name: str, array: np.ndarray, dimension_names: Sequence[str]) -> dict[str, bytes]:
    """The files of a whole one-chunk array, its metadata among them: path from the part's folder -> content."""
    raw = np.ascontiguousarray(array).tobytes()
    return {
        "/".join([name, "c", *["0"] * array.ndim]): raw + crc32c(raw),
        f"{name}/zarr.json": array_metadata(array.shape, array.dtype.name, dimension_names=dimension_names),
    }


@dataclass(frozen=True)
class ArrayMeta:
    """What ``zarr.json`` says of an array, as far as it is one of ours."""

    shape: tuple[int, ...]
    dtype: np.dtype
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    zstd: bool
    sharded: bool


def unreadable(path: Path | str, error: OSError) -> StoreError:
    """Of a file that the system does not read: it may be whole."""
    return StoreError(f"{path}: cannot be read ({error.strerror}); check the file's owner and mode, and the disk")


def read_meta(folder: Path) -> ArrayMeta:
    """Parse an array's ``zarr.json``.

    Raises:
        StoreDamagedError: it is missing, or names a codec or layout that this release does not write.
    """
    path = folder / "zarr.json"
    try:
        if not path.exists() and (folder / ARRAY_FILE).exists():
            path = folder / ARRAY_FILE
        raw = json.loads(path.read_bytes())
        shard = tuple(raw["chunk_grid"]["configuration"]["chunk_shape"])
        codecs, chunk, sharded = raw["codecs"], shard, False
        if codecs[0]["name"] == "sharding_indexed":
            configuration, sharded = codecs[0]["configuration"], True
            chunk, codecs = tuple(configuration["chunk_shape"]), configuration["codecs"]
        names = [codec["name"] for codec in codecs]
        if unknown := [name for name in names if name not in ("bytes", "zstd", "crc32c")]:
            raise StoreDamagedError(f"{folder}: array {folder.name!r} is stored with codec {unknown[0]!r}; known are bytes, zstd, crc32c")
        return ArrayMeta(tuple(raw["shape"]), np.dtype(raw["data_type"]).newbyteorder("<"), shard, chunk, "zstd" in names, sharded)
    except FileNotFoundError:
        raise StoreDamagedError(f"{folder}: array {folder.name!r} is missing from its part; `verify` says what else is") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StoreDamagedError(f"{path}: metadata of array {folder.name!r} cannot be read ({error!r}); it has been damaged") from None


def read_small(folder: Path) -> np.ndarray:
    """A one-chunk array, whole, its checksum checked."""
    meta = read_meta(folder)
    path = folder.joinpath("c", *["0"] * len(meta.shape))
    if 0 in meta.shape:
        return np.zeros(meta.shape, meta.dtype)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise StoreDamagedError(f"{path}: the chunk of array {folder.name!r} is missing") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if (
        meta.sharded
        or meta.zstd
        or meta.chunk != meta.shape
        or len(raw) != int(np.prod(meta.shape)) * meta.dtype.itemsize + 4
        or crc32c(raw[:-4]) != raw[-4:]
    ):
        raise StoreDamagedError(f"{path}: content of array {folder.name!r} does not fit its checksum; it has been damaged")
    return np.frombuffer(raw, meta.dtype, int(np.prod(meta.shape))).reshape(meta.shape)


class _LocalShard:
    def __init__(self, path: str):
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def preadv(self, buffers: Sequence[Any], offset: int) -> int:
        views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        return self.read_to(np.array([[view.ctypes.data, view.size] for view in views]), offset)

    def read_to(self, places: np.ndarray, offset: int) -> int:
        return scatter.read_to(self._descriptor, places, offset)

    def __str__(self) -> str:
        return self._path

    def __enter__(self) -> "_LocalShard":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class ShardedArray:
    """Reads token ranges of one ``[T, K, W]`` array. Thread-safe; a shard is open while one thread reads a few MB of it.

    Args:
        folder: of the array, with its metadata.
        opener: opens a shard by its path in the array, as a context manager; that file of ``folder`` when left out.
        where: what ``folder`` is called in messages, where its shards are elsewhere.
    """

    def __init__(self, folder: Path, opener: Callable[[str], Any] | None = None, where: str | None = None):
        self.folder, self.where, self.meta = folder, where or str(folder), read_meta(folder)
        self._is_local = opener is None
        self._open = opener or (lambda name: _LocalShard(f"{folder}/{name}"))
        if len(self.meta.shape) != 3 or not self.meta.sharded:
            raise StoreDamagedError(
                f"{folder}: array {folder.name!r} is not a sharded [tokens, taps, width] array; its metadata has been damaged"
            )
        self.chunk_tokens, self.shard_tokens = self.meta.chunk[0], self.meta.shard[0]
        self.chunk_bytes = self.chunk_tokens * self.meta.shape[2] * self.meta.dtype.itemsize
        self._indexes: dict[int, np.ndarray] = {}
        self._right = checksums.EqualChunks(self.chunk_bytes)

    def require(self, *, tokens: int, taps: int, width: int, dtype: str) -> None:
        """Refuse an array that is not the one its part's manifest and codec say.

        Raises:
            StoreDamagedError: naming what differs.
        """
        meta, chunk = self.meta, self.chunk_tokens
        right = {
            f"shape {list(meta.shape)}, not {[tokens, taps, width]}": meta.shape == (tokens, taps, width),
            f"type {meta.dtype.name}, not {dtype}": meta.dtype.name == dtype,
            f"chunks of {list(meta.chunk)} in shards of {list(meta.shard)}": chunk > 0 < self.shard_tokens
            and self.shard_tokens % chunk == 0
            and (meta.chunk[1:], meta.shard[1:]) == ((1, width), (taps, width)),
        }
        if wrong := [what for what, fits in right.items() if not fits]:
            raise StoreDamagedError(f"{self.where}: {wrong[0]}; {_METADATA}")

    def _index(self, shard: int, name: str) -> np.ndarray:
        index = self._indexes.get(shard)
        if index is None:
            with self._open(name) as file:
                index = self._indexes[shard] = self._read_index(file)
        return index

    def _read_index(self, file: ShardFile) -> np.ndarray:
        shape = (self.shard_tokens // self.chunk_tokens, self.meta.shape[1], 2)
        length = int(np.prod(shape)) * 8 + 4
        raw = bytearray(length)
        if file.preadv([raw], max(0, file.size - length)) != length or crc32c(bytes(raw[:-4])) != raw[-4:]:
            raise StoreDamagedError(f"{file}: the shard's chunk index is damaged")
        index = np.frombuffer(raw, "<u8", length // 8).reshape(shape)
        # as the writer lays them: one after another from the file's beginning to the index; absent ones come last
        present = index.reshape(-1, 2)[: np.count_nonzero(index[..., 0] != ABSENT)]
        ends = np.cumsum(present[:, 1])
        if (present[:, 0] != np.concatenate([[0], ends[:-1]])).any() or int(ends[-1:].sum()) != file.size - length:
            raise StoreDamagedError(f"{file}: the shard's chunk index does not fit the file; it has been damaged")
        return index

    def spans(self, start: int, stop: int, num_taps: int) -> Iterator[tuple[int, int]]:
        """Cut tokens ``[start, stop)`` into pieces of a few MB that share no chunk."""
        size = max(1, _SPAN_BYTES // (num_taps * self.chunk_bytes)) * self.chunk_tokens
        while start < stop:
            last = min(stop, (start // self.chunk_tokens) * self.chunk_tokens + size)
            yield start, last
            start = last

    def reads(self, start: int, stop: int, taps: Sequence[int], out: np.ndarray, *, share: int | None = None) -> Iterator[Read]:
        """What reads tokens ``[start, stop)`` of some taps, a few MB each, for any thread: each gives the bytes read from files.

        Args:
            out: uint8 ``[k, stop - start, W * itemsize]``, each tap's rows contiguous.
            share: bytes of all that one thread reads: pieces are no larger, so that every thread has one, and not much smaller, since
                of many small ones threads spend their time waiting for the interpreter's lock. None: as large as they may be.

        Raises:
            StoreDamagedError: a chunk is missing or, when called, fails its checksum; names file, tap and tokens.
        """
        size, shard_tokens = self.chunk_tokens, self.shard_tokens
        token_bytes = self.chunk_bytes // size
        if out.shape != (len(taps), stop - start, token_bytes) or (out.size and out.strides[1:] != (token_bytes, 1)):
            # chunks are read to addresses told from these: what does not fit would be written beside them
            raise StoreDamagedError(f"{self.where}: holds {token_bytes} bytes a token and tap, {out.shape[2]} are wanted; {_METADATA}")
        most = COMPRESSED_READ_BYTES if self.meta.zstd else READ_BYTES if share is None else min(max(share, LEAST_READ_BYTES), READ_BYTES)
        for shard in range(start // shard_tokens, -(-stop // shard_tokens)) if start < stop else ():
            first, last = max(start, shard * shard_tokens), min(stop, (shard + 1) * shard_tokens)
            name, base = f"c/{shard}/0/0", shard * shard_tokens
            begin, end = (first - base) // size, -(-(last - base) // size)
            try:
                wanted = self._index(shard, name)[begin:end, list(taps)]
            except OSError as error:
                raise self._cannot_read(name, first, last, error) from None
            chunks = Chunks(
                f"{self.where}/{name}", taps, base + begin * size, first, last, wanted, out[:, first - start : last - start],
                chunk_tokens=size, chunk_bytes=self.chunk_bytes, zstd=self.meta.zstd, most=most,
            )  # fmt: skip
            for run in chunks.runs():
                yield partial(self._read_run, name, chunks, run)

    def read(self, start: int, stop: int, taps: Sequence[int], out: np.ndarray) -> int:
        """All of ``reads``, here and now."""
        return sum(read() for read in self.reads(start, stop, taps, out))

    def _cannot_read(self, name: str, start: int, stop: int, error: OSError) -> StoreError:
        """An error of the system as one of a store."""
        where, what = f"{self.where}/{name}", f"tokens {start} to {stop} of its part cannot be read"
        if isinstance(error, FileNotFoundError):
            return StoreDamagedError(f"{where}: the file is missing; {what}")
        if error.errno in (errno.EMFILE, errno.ENFILE):
            next_step = "Raise the limit (`ulimit -n 4096`), or close what else is open"
        else:  # the disk fails, or something else than a file is there
            next_step = "If the disk is sound, `dflash-offline verify` says what else is damaged"
        return StoreError(f"{where}: {error.strerror or error}; {what}. {next_step}")

    def _read_run(self, name: str, chunks: Chunks, run: Run) -> int:
        """Read, check and copy chunks that lie side by side: few calls for all of them, since each lets go of the interpreter's lock."""
        try:
            with self._open(name) as file:
                whole = chunks.whole_rows(run) if self._is_local and not self.meta.zstd else range(0)
                if whole:
                    places, held = self._places(chunks, run, whole)
                    found = file.read_to(places, run.offset)
                else:
                    held = scratch(run.length)
                    found = file.preadv([held], run.offset)
        except OSError as error:
            raise self._cannot_read(name, chunks.start, chunks.stop, error) from None
        if found != run.length:
            raise StoreDamagedError(f"{chunks.where}: cut short before the end of {chunks.name(run, run.rows * run.taps - 1)}")
        if whole:
            self._check_straight(chunks, run, whole, held)
        else:
            (self._put_compressed if self.meta.zstd else self._put_raw)(chunks, run, held)
        return run.length

    def _places(self, chunks: Chunks, run: Run, whole: range) -> tuple[np.ndarray, np.ndarray]:
        """Whole chunks go straight to where they belong, with no memory between; rows that are cut, ``held``, by way of memory.

        Returns:
            int64 ``[n, 2]`` for ``read_to``; uint8 ``[cut rows, taps, chunk bytes]``.
        """
        places = chunks.places[run.row : run.row + run.rows, run.tap : run.tap + run.taps]
        cut = chunks.cut_rows(run)
        held = scratch(len(cut) * run.taps * self.chunk_bytes).reshape(len(cut), run.taps, self.chunk_bytes)
        if cut:
            places = places.copy()
            places[cut, :, 0, 0] = held.ctypes.data + np.arange(len(cut) * run.taps).reshape(len(cut), -1) * self.chunk_bytes
        return np.ascontiguousarray(places).reshape(-1, 2), held

    def _check_straight(self, chunks: Chunks, run: Run, whole: range, held: np.ndarray) -> None:
        """Whole chunks of a tap lie side by side now, and are checked by one pass over them."""
        checks = chunks.checks[run.row : run.row + run.rows, run.tap : run.tap + run.taps]
        content, rows = chunks.whole(run, whole), slice(whole.start, whole.stop)
        for tap, expected in enumerate(self._right.joined(checks[rows]).tolist()):
            if crc32c_number(content[tap]) != expected:
                pieces = content[tap].reshape(len(whole), -1)
                bad = next(row for row, piece in zip(whole, pieces, strict=True) if crc32c_number(piece) != checks[row, tap])
                raise chunks.damaged(run, bad * run.taps + tap)
        for row, contents in zip(chunks.cut_rows(run), held, strict=True):
            for tap, expected in enumerate(checks[row].tolist()):
                if crc32c_number(contents[tap]) != expected:
                    raise chunks.damaged(run, row * run.taps + tap)
            chunks.put(run, row * run.taps, contents)

    def _put_raw(self, chunks: Chunks, run: Run, held: np.ndarray) -> None:
        pieces = held.reshape(-1, self.chunk_bytes + 4)
        if crc32c_number(held) != self._right.of(len(pieces)):
            for number, piece in enumerate(pieces):
                if crc32c(piece[:-4]) != piece[-4:].tobytes():
                    raise chunks.damaged(run, number)
        chunks.put(run, 0, pieces[:, :-4])

    def _put_compressed(self, chunks: Chunks, run: Run, held: np.ndarray) -> None:
        """To where they belong, straight: memory for them between would be fresh, and a page fault for each 4 KB."""
        zstd = decompressor()
        sizes = chunks.sizes[run.row : run.row + run.rows, run.tap : run.tap + run.taps].reshape(-1).tolist()
        whole, begin, content = crc32c_number(held) == checksums.of_right_chunks(sizes), 0, held.data
        for number, size in enumerate(sizes):
            frame, begin = content[begin : begin + size - 4], begin + size
            if not whole and crc32c(frame) != content[begin - 4 : begin]:
                raise chunks.damaged(run, number)
            place = chunks.place(run, number)
            try:
                if frame_content_size(frame) != self.chunk_bytes:
                    raise ValueError("of another size")
                if place is None:
                    chunks.put(run, number, np.frombuffer(zstd.decompress(frame), np.uint8).reshape(1, self.chunk_bytes))
                elif zstd.stream_reader(frame).readinto(place) != self.chunk_bytes:
                    raise ValueError("shorter than it says")
            except (ValueError, ZstdError):
                what = f"what is compressed in {chunks.name(run, number)} cannot be read; it has been damaged"
                raise StoreDamagedError(f"{chunks.where}: {what}") from None

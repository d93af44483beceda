"""Zarr v3 arrays of one kind, written and read straight: ``[T, K, W]`` in shards of chunks ``[chunk_tokens, 1, W]``.

T tokens, K taps, k selected taps, W values per token and tap, C token chunks of a shard.

The files are ordinary Zarr (``sharding_indexed``, ``bytes``, optionally ``zstd``, ``crc32c``), made by ``zarr`` itself
as far as metadata goes, and any Zarr reader opens them. Chunk bytes are moved by the few lines here because
they are the hot path: a shard is written from the buffer that collected it, chunks are read into the (pinned) memory
that goes to the GPU, threads work outside the interpreter lock, and a sample's chunks, which lie side by side, are one
read. A shard file is its encoded chunks one after another, then ``C * K`` pairs (offset, bytes) uint64, then crc32c.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import zstandard

from dflash_offline.errors import StoreDamagedError, StoreError
from dflash_offline.store.shard_writing import ABSENT, crc32c, crc32c_number

ARRAY_FILE = "array.json"  # zarr.json of an array whose shard files are elsewhere, see ``remote``
_READ_BYTES = 4 << 20  # most bytes in one read, unless a row of chunks has more; they are in a cache until they are copied
_SPAN_BYTES = 8 << 20  # read by one thread at a time
_thread = threading.local()  # scratch memory of each thread


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
    if (
        meta.sharded
        or meta.zstd
        or meta.chunk != meta.shape
        or len(raw) != int(np.prod(meta.shape)) * meta.dtype.itemsize + 4
        or crc32c(raw[:-4]) != raw[-4:]
    ):
        raise StoreDamagedError(f"{path}: content of array {folder.name!r} does not fit its checksum; it has been damaged")
    return np.frombuffer(raw, meta.dtype, int(np.prod(meta.shape))).reshape(meta.shape)


class ShardFile(Protocol):
    """A shard file opened for reading; ``str`` of it is its name in messages."""

    size: int

    def preadv(self, buffers: Sequence[Any], offset: int) -> int:
        """Fill the buffers, one after another, from byte ``offset`` on; returns how many bytes were there."""


class _LocalShard:
    def __init__(self, path: Path):
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def preadv(self, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(self._descriptor, buffers, offset)

    def __str__(self) -> str:
        return str(self._path)

    def __enter__(self) -> "_LocalShard":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class ShardedArray:
    """Reads token ranges of one ``[T, K, W]`` array. Thread-safe; holds no open file.

    Args:
        folder: of the array, with its metadata.
        opener: opens a shard by its path in the array, as a context manager; that file of ``folder`` when left out.
    """

    def __init__(self, folder: Path, opener: Callable[[str], Any] | None = None):
        self.folder, self.meta = folder, read_meta(folder)
        self._open = opener or (lambda name: _LocalShard(folder / name))
        if len(self.meta.shape) != 3 or not self.meta.sharded:
            raise StoreDamagedError(
                f"{folder}: array {folder.name!r} is not a sharded [tokens, taps, width] array; its metadata has been damaged"
            )
        self.chunk_tokens, self.shard_tokens = self.meta.chunk[0], self.meta.shard[0]
        self.chunk_bytes = self.chunk_tokens * self.meta.shape[2] * self.meta.dtype.itemsize
        self._indexes: dict[int, np.ndarray] = {}
        self._checksums, self._learning = [0], threading.Lock()

    def _index(self, shard: int, file: ShardFile) -> np.ndarray:
        index = self._indexes.get(shard)
        if index is None:
            shape = (self.shard_tokens // self.chunk_tokens, self.meta.shape[1], 2)
            length = int(np.prod(shape)) * 8 + 4
            raw = bytearray(length)
            if file.preadv([raw], max(0, file.size - length)) != length or crc32c(bytes(raw[:-4])) != raw[-4:]:
                raise StoreDamagedError(f"{file}: the shard's chunk index is damaged")
            index = self._indexes[shard] = np.frombuffer(raw, "<u8", length // 8).reshape(shape)
        return index

    def spans(self, start: int, stop: int, num_taps: int) -> Iterator[tuple[int, int]]:
        """Cut tokens ``[start, stop)`` into pieces of a few MB that share no chunk."""
        size = max(1, _SPAN_BYTES // (num_taps * self.chunk_bytes)) * self.chunk_tokens
        while start < stop:
            last = min(stop, (start // self.chunk_tokens) * self.chunk_tokens + size)
            yield start, last
            start = last

    def read(self, start: int, stop: int, taps: Sequence[int], out: np.ndarray) -> int:
        """Read tokens ``[start, stop)`` of some taps.

        Args:
            out: uint8 ``[k, stop - start, W * itemsize]``, each tap's rows contiguous.

        Returns:
            Bytes read from files.

        Raises:
            StoreDamagedError: a chunk is missing or fails its checksum; names file, tap and tokens.
        """
        total, shard_tokens = 0, self.shard_tokens
        for shard in range(start // shard_tokens, -(-stop // shard_tokens)):
            first, last = max(start, shard * shard_tokens), min(stop, (shard + 1) * shard_tokens)
            total += self._read_shard(shard, first, last, taps, out[:, first - start : last - start])
        return total

    def _read_shard(self, shard: int, start: int, stop: int, taps: Sequence[int], out: np.ndarray) -> int:
        name, size = f"c/{shard}/0/0", self.chunk_tokens
        try:
            with self._open(name) as file:
                base = shard * self.shard_tokens
                begin, end = (start - base) // size, -(-(stop - base) // size)
                wanted = self._index(shard, file)[begin:end, list(taps)]
                chunks = _Chunks(self, file, taps, base + begin * size, start, stop, wanted, out)
                return sum(self._read_run(chunks, run) for run in chunks.runs())
        except FileNotFoundError:
            raise StoreDamagedError(
                f"{self.folder / name}: the file is missing; tokens {start} to {stop} of its part cannot be read"
            ) from None
        except OSError as error:  # the disk fails, or something else than a file is there
            raise StoreError(
                f"{self.folder / name}: {error.strerror or error}; tokens {start} to {stop} of its part cannot be read. "
                "If the disk is sound, `dflash-offline verify` says what else is damaged"
            ) from None

    def _read_run(self, chunks: "_Chunks", run: "_Run") -> int:
        """Read, check and copy chunks that lie side by side: few calls for all of them, since each lets go of the interpreter's lock."""
        offset, length = chunks.extent(run)
        held = _buffer(length)
        if chunks.file.preadv([held], offset) != length:
            raise StoreDamagedError(f"{chunks.file}: cut short before the end of {chunks.name(run.rows.stop - 1, run.taps.stop - 1)}")
        chunks.put(run, (self._decompressed if self.meta.zstd else self._checked)(chunks, run, held))
        return length

    def _checked(self, chunks: "_Chunks", run: "_Run", held: np.ndarray) -> np.ndarray:
        """Chunks as they lie in the file, uint8 ``[rows, taps, chunk bytes]``, checked in one go."""
        size = self.chunk_bytes + 4
        sizes = chunks.sizes[run.rows, run.taps]
        if (sizes != size).any():
            row, tap = np.argwhere(sizes != size)[0].tolist()
            what = f"the chunk of {chunks.name(run.rows.start + row, run.taps.start + tap)} has {sizes[row, tap]} bytes, not {size}"
            raise StoreDamagedError(f"{chunks.file}: {what}")
        pieces = held.reshape(*sizes.shape, size)
        if crc32c_number(held) != self._checksum_of(sizes.size):
            for row, tap in np.ndindex(sizes.shape):
                if crc32c(pieces[row, tap, :-4]) != pieces[row, tap, -4:].tobytes():
                    raise chunks.damaged(run.rows.start + row, run.taps.start + tap)
        return pieces[..., :-4]

    def _checksum_of(self, count: int) -> int:
        """crc32c of so many chunks side by side, each with its own behind it: where those are right, it depends on their length alone."""
        known = self._checksums
        if count >= len(known):
            with self._learning:
                chunk = bytes(self.chunk_bytes)
                chunk += crc32c(chunk)
                while count >= len(known):
                    known.append(crc32c_number(chunk, known[-1]))
        return known[count]

    def _decompressed(self, chunks: "_Chunks", run: "_Run", held: np.ndarray) -> np.ndarray:
        """Chunks uint8 ``[rows, taps, chunk bytes]``."""
        sizes = chunks.sizes[run.rows, run.taps].astype(np.int64)
        ends = np.cumsum(sizes.reshape(-1))
        frames = np.stack([ends - sizes.reshape(-1), sizes.reshape(-1) - 4], 1)
        for i, (first, size) in enumerate(frames.tolist()):
            # holding the interpreter's lock: passing it on would take longer than this
            if crc32c_number(held[first : first + size], 0, 0).to_bytes(4, "little") != held[first + size : first + size + 4].tobytes():
                raise chunks.damaged(run.rows.start + i // sizes.shape[1], run.taps.start + i % sizes.shape[1])
        wanted = np.full(len(frames), self.chunk_bytes, "<u8").tobytes()
        try:
            found = _decompressor().multi_decompress_to_buffer(
                zstandard.BufferWithSegments(held.data, frames.astype("<u8").tobytes()), decompressed_sizes=wanted, threads=1
            )
        except (zstandard.ZstdError, ValueError):
            found = None
        if found is None or found.size() != sizes.size * self.chunk_bytes:
            raise StoreDamagedError(f"{chunks.file}: chunks from {chunks.name(run.rows.start, run.taps.start)} on cannot be decompressed")
        return _side_by_side(found, self.chunk_bytes).reshape(*sizes.shape, self.chunk_bytes)


class _Run(NamedTuple):
    """Chunks side by side in a file: these token chunks of the wanted ones, of each these of the wanted taps."""

    rows: slice
    taps: slice


class _Chunks:
    """What is wanted of a shard: rows of chunks side by side along the tokens, of each row the taps in the order wanted.

    Args:
        token: first of the first row of chunks; start, stop: the tokens wanted.
        wanted: uint64 ``[rows, k, 2]`` offset and size of each in the file.
        out: uint8 ``[k, stop - start, bytes of a token]``, each tap's rows contiguous.
    """

    def __init__(
        self,
        array: ShardedArray,
        file: ShardFile,
        taps: Sequence[int],
        token: int,
        start: int,
        stop: int,
        wanted: np.ndarray,
        out: np.ndarray,
    ) -> None:
        self.array, self.file, self.taps = array, file, taps
        self.token, self.start, self.stop, self._out = token, start, stop, out
        self.offsets, self.sizes = wanted[..., 0], wanted[..., 1]
        if (self.offsets == ABSENT).any():
            row, tap = np.argwhere(self.offsets == ABSENT)[0].tolist()
            raise StoreDamagedError(f"{file}: no chunk for {self.name(row, tap)}; it has been damaged")

    def runs(self) -> Iterator[_Run]:
        """Each is one read. Rows together where all that is wanted lies together, else parts of a row."""
        offsets, sizes = self.offsets.reshape(-1), self.sizes.reshape(-1)
        rows, taps = self.offsets.shape
        follows = offsets[1:] == offsets[:-1] + sizes[:-1]
        if follows.all():
            begin, size = 0, 0
            for row, nbytes in enumerate(self.sizes.sum(1).tolist()):
                if size and size + nbytes > _READ_BYTES:
                    yield _Run(slice(begin, row), slice(0, taps))
                    begin, size = row, 0
                size += nbytes
            yield _Run(slice(begin, rows), slice(0, taps))
            return
        for row in range(rows):
            begin = 0
            for tap in range(1, taps + 1):
                if tap == taps or not follows[row * taps + tap - 1]:
                    yield _Run(slice(row, row + 1), slice(begin, tap))
                    begin = tap

    def extent(self, run: _Run) -> tuple[int, int]:
        """Offset and bytes of a run in the file."""
        first, sizes = int(self.offsets[run.rows.start, run.taps.start]), self.sizes[run.rows, run.taps]
        return first, int(sizes.sum())

    def put(self, run: _Run, chunks: np.ndarray) -> None:
        """Copy what is wanted of a run's chunks, uint8 ``[rows, taps, chunk bytes]``, to where it belongs."""
        size, out = self.array.chunk_tokens, self._out[run.taps]
        first, rows, taps = self.token + run.rows.start * size, len(chunks), len(out)
        begin, end = max(self.start, first) - first, min(self.stop, first + rows * size) - first  # tokens of the run
        at = first - self.start
        whole = slice(-(-begin // size), end // size)
        if whole.start < whole.stop:
            place = out[:, at + whole.start * size : at + whole.stop * size]
            place.reshape(taps, whole.stop - whole.start, -1)[...] = chunks[whole].swapaxes(0, 1)
        cut = {begin // size} if begin % size else set()
        for row in cut | ({end // size} if end % size else set()):
            low, high = max(begin, row * size), min(end, (row + 1) * size)
            out[:, at + low : at + high] = chunks[row].reshape(taps, size, -1)[:, low - row * size : high - row * size]

    def name(self, row: int, tap: int) -> str:
        return f"tap {self.taps[tap]}, tokens from {self.token + row * self.array.chunk_tokens}"

    def damaged(self, row: int, tap: int) -> StoreDamagedError:
        return StoreDamagedError(f"{self.file}: the chunk of {self.name(row, tap)} does not fit its checksum; it has been damaged")


def _buffer(length: int) -> np.ndarray:
    """This thread's scratch memory: fresh memory for every read would cost a page fault each 4 KB."""
    held = getattr(_thread, "buffer", None)
    if held is None or len(held) < length:
        held = _thread.buffer = np.empty(max(length, _READ_BYTES), np.uint8)
    return held[:length]


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's."""
    held = getattr(_thread, "decompressor", None)
    if held is None:
        held = _thread.decompressor = zstandard.ZstdDecompressor()
    return held


def _side_by_side(pieces: zstandard.BufferWithSegmentsCollection, size: int) -> np.ndarray:
    """Pieces of this size as one array uint8 ``[pieces * size]``: as they lie, for zstandard puts them into one allocation; else copied."""
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    starts = [array.__array_interface__["data"][0] for array in arrays]
    if starts == list(range(starts[0], starts[0] + size * len(starts), size)):
        return np.lib.stride_tricks.as_strided(arrays[0], (size * len(arrays),), (1,), writeable=False)
    return np.concatenate(arrays)

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
from typing import Any, Protocol

import numpy as np
from numcodecs.zstd import Zstd

from dflash_offline.errors import StoreDamagedError, StoreError
from dflash_offline.store.shard_writing import ABSENT, crc32c, crc32c_number

ARRAY_FILE = "array.json"  # zarr.json of an array whose shard files are elsewhere, see ``remote``
_READ_BYTES = 4 << 20  # most bytes in one read
_SPAN_BYTES = 8 << 20  # read by one thread at a time
_READ_CHUNKS = 500  # most chunks in one read: two buffers each, and the system takes 1024
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
                wanted = self._index(shard, file)[begin:end, list(taps)].reshape(-1, 2)
                chunks = _Chunks(self, file, taps, base + begin * size, start, stop, wanted, out)
                read = self._read_compressed if self.meta.zstd else self._read_raw
                return sum(read(chunks, first, last) for first, last in chunks.runs())
        except FileNotFoundError:
            raise StoreDamagedError(
                f"{self.folder / name}: the file is missing; tokens {start} to {stop} of its part cannot be read"
            ) from None
        except OSError as error:  # the disk fails, or something else than a file is there
            raise StoreError(
                f"{self.folder / name}: {error.strerror or error}; tokens {start} to {stop} of its part cannot be read. "
                "If the disk is sound, `dflash-offline verify` says what else is damaged"
            ) from None

    def _read_raw(self, chunks: "_Chunks", begin: int, end: int) -> int:
        """One read that scatters: whole chunks go straight to where they are wanted, the others by way of the scratch."""
        file, offset, length = chunks.file, *chunks.extent(begin, end)
        for number, nbytes in enumerate(chunks.sizes[begin:end], begin):
            if nbytes != self.chunk_bytes + 4:
                raise StoreDamagedError(f"{file}: the chunk of {chunks.name(number)} has {nbytes} bytes, not {self.chunk_bytes + 4}")
        checks, buffers = bytearray(4 * (end - begin)), []
        behind, spare = memoryview(checks), _buffer(2 * self.chunk_bytes * (1 + self.meta.shape[1]))
        bodies = list(chunks.whole(begin, end))
        cut = [i for i, body in enumerate(bodies) if body is None]
        for number, i in enumerate(cut):
            bodies[i] = spare[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]
        for i, body in enumerate(bodies):
            buffers += (body, behind[4 * i : 4 * i + 4])
        if file.preadv(buffers, offset) != length:
            raise StoreDamagedError(f"{file}: cut short before the end of {chunks.name(end - 1)}")
        for i, (body, check) in enumerate(zip(bodies, np.frombuffer(checks, "<u4").tolist(), strict=True)):
            if crc32c_number(body) != check:
                raise chunks.damaged(begin + i)
        for i in cut:
            chunks.put(begin + i, bodies[i])
        return length

    def _read_compressed(self, chunks: "_Chunks", begin: int, end: int) -> int:
        file, offset, length = chunks.file, *chunks.extent(begin, end)
        held = _buffer(length + self.chunk_bytes)
        buffer, spare = held[:length], held[length:]
        if file.preadv([buffer], offset) != length:
            raise StoreDamagedError(f"{file}: cut short before the end of {chunks.name(end - 1)}")
        at = 0
        for i, (body, size) in enumerate(zip(chunks.whole(begin, end), chunks.sizes[begin:end], strict=True)):
            raw, at = buffer[at : at + size], at + size
            if crc32c(raw[:-4]) != raw[-4:].tobytes():
                raise chunks.damaged(begin + i)
            chunk = spare if body is None else body
            try:
                Zstd().decode(raw[:-4], chunk)
            except (RuntimeError, ValueError):  # another size than ours
                raise chunks.damaged(begin + i) from None
            if body is None:
                chunks.put(begin + i, chunk)
        return length


class _Chunks:
    """What is wanted of a shard: chunks side by side along the tokens, of each the taps in the order wanted.

    Numbered token chunk by token chunk, tap by tap. Everything but the first and the last token chunk is wanted whole.

    Args:
        token: first of the first token chunk; start, stop: the tokens wanted.
        wanted: uint64 ``[n, 2]`` offset and size of each in the file.
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
        self.offsets, self.sizes = wanted[:, 0].tolist(), wanted[:, 1].tolist()
        if (wanted[:, 0] == ABSENT).any():
            raise StoreDamagedError(f"{file}: no chunk for {self.name(self.offsets.index(ABSENT))}; it has been damaged")

    def runs(self) -> Iterator[tuple[int, int]]:
        """Numbers [begin, end) of chunks that lie one after another in the file: each run is one read."""
        begin, size = 0, 0
        for i, (offset, nbytes) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size and (offset != self.offsets[begin] + size or i - begin == _READ_CHUNKS or size + nbytes > _READ_BYTES):
                yield begin, i
                begin, size = i, 0
            size += nbytes
        yield begin, len(self.sizes)

    def extent(self, begin: int, end: int) -> tuple[int, int]:
        """Offset and bytes of a run in the file."""
        return self.offsets[begin], self.offsets[end - 1] + self.sizes[end - 1] - self.offsets[begin]

    def _token(self, number: int) -> int:
        """First token of a chunk."""
        return self.token + number // len(self.taps) * self.array.chunk_tokens

    def _rows(self, number: int) -> tuple[int, int]:
        """Tokens [first, last) of a chunk that are wanted, counted from ``start``."""
        token = self._token(number)
        return max(self.start, token) - self.start, min(self.stop, token + self.array.chunk_tokens) - self.start

    def whole(self, begin: int, end: int) -> Iterator[np.ndarray | None]:
        """Where each chunk of a run belongs, uint8 [chunk bytes]; None where it is not wanted whole."""
        places, taps = self._out.reshape(len(self._out), -1), len(self.taps)
        width = places.shape[1] // max(1, self.stop - self.start)
        while begin < end:
            (first, last), tap = self._rows(begin), begin % taps
            count = min(taps - tap, end - begin)
            if last - first == self.array.chunk_tokens:
                yield from places[tap : tap + count, first * width : last * width]
            else:
                yield from [None] * count
            begin += count

    def put(self, number: int, chunk: np.ndarray) -> None:
        """Copy the wanted tokens of a chunk, uint8 [chunk bytes], to where they belong."""
        first, last = self._rows(number)
        skipped = self.start + first - self._token(number)
        self._out[number % len(self.taps), first:last] = chunk.reshape(self.array.chunk_tokens, -1)[skipped : skipped + last - first]

    def name(self, number: int) -> str:
        return f"tap {self.taps[number % len(self.taps)]}, tokens from {self._token(number)}"

    def damaged(self, number: int) -> StoreDamagedError:
        return StoreDamagedError(f"{self.file}: the chunk of {self.name(number)} does not fit its checksum; it has been damaged")


def _buffer(length: int) -> np.ndarray:
    """This thread's scratch memory: fresh memory for every read would cost a page fault each 4 KB."""
    held = getattr(_thread, "buffer", None)
    if held is None or len(held) < length:
        held = _thread.buffer = np.empty(max(length, _READ_BYTES), np.uint8)
    return held[:length]

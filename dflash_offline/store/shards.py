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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numcodecs.zstd import Zstd

from dflash_offline.errors import StoreDamagedError
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
            opened = self._open(name)
        except FileNotFoundError:
            raise StoreDamagedError(
                f"{self.folder / name}: the file is missing; tokens {start} to {stop} of its part cannot be read"
            ) from None
        with opened as file:
            index, base, pieces = self._index(shard, file), shard * self.shard_tokens, []
            chunks = range((start - base) // size, -(-(stop - base) // size))
            for c, entries in zip(chunks, index[chunks.start : chunks.stop, taps].tolist(), strict=True):
                token = base + c * size
                first, last = max(start, token), min(stop, token + size)
                for tap, (offset, nbytes), place in zip(taps, entries, out[:, first - start : last - start], strict=True):
                    piece = _Piece(file, tap, token, first, last, offset, nbytes, place)
                    if offset == ABSENT:
                        raise StoreDamagedError(f"{file}: no chunk for {piece}; it has been damaged")
                    pieces.append(piece)
            read = self._read_compressed if self.meta.zstd else self._read_raw
            return sum(read(file, run) for run in _adjacent(pieces))

    def _read_raw(self, file: ShardFile, run: list["_Piece"]) -> int:
        """One read that scatters: whole chunks go straight to where they are wanted, the others by way of the scratch."""
        checks, buffers, bodies = bytearray(4 * len(run)), [], []
        behind = memoryview(checks)
        spare = _buffer(2 * self.chunk_bytes * (1 + self.meta.shape[1]))
        for i, piece in enumerate(run):
            if piece.nbytes != self.chunk_bytes + 4:
                raise StoreDamagedError(f"{piece.file}: the chunk of {piece} has {piece.nbytes} bytes, not {self.chunk_bytes + 4}")
            if piece.last - piece.first < self.chunk_tokens:
                body, spare = spare[: self.chunk_bytes], spare[self.chunk_bytes :]
            else:
                body = piece.out.reshape(-1)
            bodies.append(body)
            buffers += [body, behind[4 * i : 4 * i + 4]]
        length = sum(piece.nbytes for piece in run)
        if file.preadv(buffers, run[0].offset) != length:
            raise StoreDamagedError(f"{run[0].file}: cut short before the end of {run[-1]}")
        for piece, body, check in zip(run, bodies, np.frombuffer(checks, "<u4").tolist(), strict=True):
            if crc32c_number(body) != check:
                raise piece.damaged()
            if piece.last - piece.first < self.chunk_tokens:
                piece.out[:] = body.reshape(self.chunk_tokens, -1)[piece.first - piece.token : piece.last - piece.token]
        return length

    def _read_compressed(self, file: ShardFile, run: list["_Piece"]) -> int:
        length = sum(piece.nbytes for piece in run)
        held = _buffer(length + self.chunk_bytes)
        buffer, spare = held[:length], held[length:]
        if file.preadv([buffer], run[0].offset) != length:
            raise StoreDamagedError(f"{run[0].file}: cut short before the end of {run[-1]}")
        for piece in run:
            raw, buffer = buffer[: piece.nbytes], buffer[piece.nbytes :]
            if crc32c(raw[:-4]) != raw[-4:].tobytes():
                raise piece.damaged()
            whole = piece.last - piece.first == self.chunk_tokens
            chunk = piece.out.reshape(-1) if whole else spare
            try:
                Zstd().decode(raw[:-4], chunk)
            except (RuntimeError, ValueError):  # another size than ours
                raise piece.damaged() from None
            if not whole:
                piece.out[:] = chunk.reshape(self.chunk_tokens, -1)[piece.first - piece.token : piece.last - piece.token]
        return length


class _Piece(NamedTuple):
    """What is wanted of one chunk: tokens ``first`` to ``last`` of a tap, into ``out``."""

    file: ShardFile
    tap: int
    token: int  # first of the chunk
    first: int
    last: int
    offset: int  # of the chunk in the file
    nbytes: int
    out: np.ndarray  # uint8 [last - first, bytes of a token]

    def __str__(self) -> str:
        return f"tap {self.tap}, tokens from {self.token}"

    def damaged(self) -> StoreDamagedError:
        return StoreDamagedError(f"{self.file}: the chunk of {self} does not fit its checksum; it has been damaged")


def _buffer(length: int) -> np.ndarray:
    """This thread's scratch memory: fresh memory for every read would cost a page fault each 4 KB."""
    held = getattr(_thread, "buffer", None)
    if held is None or len(held) < length:
        held = _thread.buffer = np.empty(max(length, _READ_BYTES), np.uint8)
    return held[:length]


def _adjacent(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Group chunks that lie one after another in the file: each group is one read."""
    run: list[_Piece] = []
    for piece in pieces:
        apart = run and piece.offset != run[-1].offset + run[-1].nbytes
        if apart or len(run) == _READ_CHUNKS or (run and piece.offset + piece.nbytes - run[0].offset > _READ_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run

"""Writes one shard file, from the buffer that collected it. What lies in it: see ``shards``.

K taps, C token chunks of a shard, n chunks of a group.

Chunks of a small model are some tens of KB, and every step out of the interpreter and back in, be it for microseconds,
makes the thread that feeds the GPU wait for the interpreter's lock. So each step is done for a group of chunks at once, and
chunks that are not compressed lie in the buffer as in the file, each followed by its check.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from crc32c import crc32c as crc32c_number  # lets other threads run meanwhile; the library zarr uses keeps the interpreter's lock

ABSENT = 2**64 - 1  # offset and size of a chunk that does not exist
CHECK_BYTES = 4  # crc32c behind each chunk
_thread = threading.local()  # a compressor of each thread
_GROUP_BYTES = 4 << 20  # of a group, before compression
_GROUPS_AHEAD = 8  # groups encoded ahead of the one being written, so that a shard is never held twice
_BRIEF_BYTES = 128 << 10  # to check fewer takes less time than giving the interpreter's lock away and getting it back
KEEP_LOCK, _LEND_LOCK = 0, -1  # of the library: the latter from 32 KB on

_Group = tuple[Any, list[int]]  # chunks with their checks as they lie in the file, a buffer; bytes of each


def crc32c(data: Any) -> bytes:
    return crc32c_number(data).to_bytes(CHECK_BYTES, "little")


def place_bytes(chunk_bytes: int, zstd: int | None) -> int:
    """Bytes of a chunk's place in the buffer of a shard: with its check, unless it is compressed on the way to the file."""
    return chunk_bytes + (CHECK_BYTES if zstd is None else 0)


def _check_in_place(chunks: np.ndarray) -> _Group:
    """uint8 ``[n, chunk bytes + 4]``: fills in the checks."""
    mode = KEEP_LOCK if chunks.shape[1] < _BRIEF_BYTES else _LEND_LOCK
    checks = [crc32c_number(chunk, 0, mode) for chunk in chunks[:, :-CHECK_BYTES]]
    chunks[:, -CHECK_BYTES:] = np.array(checks, "<u4").view(np.uint8).reshape(-1, CHECK_BYTES)
    return chunks.reshape(-1), [chunks.shape[1]] * len(chunks)


def _compress(level: int, chunks: np.ndarray) -> _Group:
    """uint8 ``[n, chunk bytes]``."""
    frames = _frames(_compressor(level), chunks)
    sizes = [len(frame) + CHECK_BYTES for frame in frames]
    memory, end = np.empty(sum(sizes), np.uint8), 0
    memory.fill(0)  # fresh pages are made here, where other threads may run
    content = memoryview(memory)
    for frame, size in zip(frames, sizes, strict=True):
        check = crc32c_number(frame, 0, KEEP_LOCK if size < _BRIEF_BYTES else _LEND_LOCK)
        begin, end = end, end + size
        content[begin : end - CHECK_BYTES] = frame
        content[end - CHECK_BYTES : end] = check.to_bytes(CHECK_BYTES, "little")
    return content, sizes


def _frames(compressor: zstandard.ZstdCompressor, chunks: np.ndarray) -> Any:
    """The chunks compressed one by one, in one call where the library has it (with its C backend)."""
    if not hasattr(compressor, "multi_compress_to_buffer"):
        return [compressor.compress(chunk) for chunk in chunks]
    number, size = chunks.shape
    segments = np.stack([np.arange(number) * size, np.full(number, size)], 1).astype("=u8")
    return compressor.multi_compress_to_buffer(zstandard.BufferWithSegments(chunks.reshape(-1), segments.reshape(-1).view(np.uint8)))


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """This thread's compressor. Chunks are noise of a skewed distribution: what compresses is the entropy coding.

    Repeats that zstd finds are chance and cost more than they save, so matches below 7 bytes are not looked for and the table of
    candidates is tiny. Measured on real exponent planes: 0.364 in place of 0.381 of the bytes, written and read three times
    as fast. Any zstd reads it.
    """
    held = getattr(_thread, "compressor", None)
    if held is None or held[0] != level:
        parameters = zstandard.ZstdCompressionParameters.from_level(level, min_match=7, hash_log=8, window_log=18)
        held = _thread.compressor = level, zstandard.ZstdCompressor(compression_params=parameters)
    return held[1]


def _groups(chunks: np.ndarray, level: int | None, executor: Executor | None) -> Iterator[_Group]:
    """Encoded chunks and their checks, in order, a group at a time; with an executor the next groups are made meanwhile."""
    flat = chunks.reshape(-1, chunks.shape[-1])
    size = max(1, _GROUP_BYTES // flat.shape[-1])
    groups = (flat[start : start + size] for start in range(0, len(flat), size))
    if level is None:  # a check alone is not worth a hand-over
        yield from map(_check_in_place, groups)
        return
    if executor is None:
        yield from (_compress(level, group) for group in groups)
        return
    waiting: deque[Future[_Group]] = deque()
    for group in groups:
        waiting.append(executor.submit(_compress, level, group))
        if len(waiting) > _GROUPS_AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _write_all(descriptor: int, content: Any) -> None:
    """A buffer of bytes to a file; a raw write may be short."""
    view = memoryview(content)
    while len(view):
        view = view[os.write(descriptor, view) :]


def write_shard(
    path: Path, chunks: np.ndarray, *, shard_chunks: int, zstd: int | None, executor: Executor | None = None
) -> tuple[int, str]:
    """Write one shard file and make it durable.

    Args:
        path: the shard's file; its folder is made.
        chunks: uint8 ``[c, K, place_bytes]``, contiguous, the chunks that exist, in order; c may be below ``shard_chunks`` in the
            last shard. Checks are filled in.
        shard_chunks: C, token chunks of a whole shard.
        zstd: compression level, or None.
        executor: compresses groups of chunks in parallel.

    Returns:
        Size in bytes, xxh3-128 of the bytes written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes, hashed = list[int](), xxhash.xxh3_128()
    index = np.full((shard_chunks, chunks.shape[1], 2), np.uint64(ABSENT), "<u8")
    with path.open("wb", buffering=0) as file:
        for content, group_sizes in _groups(chunks, zstd, executor):
            hashed.update(content)
            _write_all(file.fileno(), content)
            sizes += group_sizes
        ends = np.cumsum(sizes)
        index.reshape(-1, 2)[: len(sizes)] = np.stack([ends - sizes, sizes], 1)
        table = index.tobytes()
        table += crc32c(table)
        hashed.update(table)
        _write_all(file.fileno(), table)
        os.fsync(file.fileno())
    return int(ends[-1]) + len(table), hashed.hexdigest()

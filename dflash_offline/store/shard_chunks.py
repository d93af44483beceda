"""Chunks of one shard on their way from the file to where they are wanted.

What lies side by side in the file is a run: one read, one check, one copy. Each of them lets go of the interpreter's lock,
and getting it back from many reading threads takes longer than checking a chunk.

K taps, k selected taps, a row: the chunks of all selected taps for the same tokens.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from zstandard import ZstdDecompressor

from dflash_offline.errors import StoreDamagedError

_thread = threading.local()  # scratch memory of each thread


class ShardFile(Protocol):
    """A shard file opened for reading; ``str`` of it is its name in messages."""

    size: int

    def preadv(self, buffers: Sequence[Any], offset: int) -> int:
        """Fill the buffers, one after another, from byte ``offset`` on; returns how many bytes were there."""


class Run(NamedTuple):
    """Chunks side by side in a file: ``rows`` of the wanted token chunks from ``row`` on, of each ``taps`` from ``tap`` on."""

    row: int
    rows: int
    tap: int
    taps: int
    offset: int  # in the file
    length: int  # bytes


class Chunks:
    """What is wanted of a shard: rows of chunks side by side along the tokens, of each row the taps in the order wanted.

    Args:
        where: name of the file, for messages.
        token: first of the first row of chunks; start, stop: the tokens wanted.
        wanted: uint64 ``[rows, k, 2]`` offset and size of each in the file.
        out: uint8 ``[k, stop - start, bytes of a token]``, each tap's rows contiguous.
        chunk_bytes: before compression, without the check behind it.
        most: bytes in one read, unless a row of chunks has more.

    Attributes, of chunks that are not compressed:
        checks: uint32 ``[rows, k]`` what the file says of each chunk, once that is read.
        places: int64 ``[rows, k, 2, 2]`` address and bytes of where each chunk belongs, then of its check's place in ``checks``. Of a
            chunk that is not wanted whole they are not to be used: part of it would lie outside of what is wanted.

    Raises:
        StoreDamagedError: a chunk is absent, or of a size that it cannot have.
    """

    def __init__(
        self,
        where: str,
        taps: Sequence[int],
        token: int,
        start: int,
        stop: int,
        wanted: np.ndarray,
        out: np.ndarray,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        zstd: bool,
        most: int,
    ) -> None:
        self.where, self.taps, self._chunk_tokens = where, taps, chunk_tokens
        self.token, self.start, self.stop, self._out = token, start, stop, out
        self.offsets, self.sizes = wanted[..., 0].astype(np.int64), wanted[..., 1].astype(np.int64)  # ABSENT is -1
        if self.offsets.min() < 0:
            raise StoreDamagedError(f"{where}: no chunk for {self._name(self.offsets < 0)}; it has been damaged")
        self._most = most
        size = chunk_bytes + 4
        bad = self.sizes < 5 if zstd else self.sizes != size
        if bad.any():
            what = f"{self.sizes[bad][0]} bytes" + ("" if zstd else f", not {size}")
            raise StoreDamagedError(f"{where}: the chunk of {self._name(bad)} has {what}; it has been damaged")
        if not zstd:
            self.checks = np.empty(self.offsets.shape, "<u4")
            self.places = self._addresses()

    def runs(self) -> Iterator[Run]:
        """Each is one read. Rows together where all that is wanted lies together, else parts of a row."""
        offsets, sizes = self.offsets.reshape(-1), self.sizes.reshape(-1)
        rows, taps = self.offsets.shape
        follows = offsets[1:] == offsets[:-1] + sizes[:-1]
        if follows.all():
            begin, size, offset = 0, 0, int(offsets[0])
            for row, nbytes in enumerate(self.sizes.sum(1).tolist()):
                if size and size + nbytes > self._most:
                    yield Run(begin, row - begin, 0, taps, offset, size)
                    begin, offset, size = row, offset + size, 0
                size += nbytes
            yield Run(begin, rows - begin, 0, taps, offset, size)
            return
        for row in range(rows):
            begin = 0
            for tap in range(1, taps + 1):
                if tap == taps or not follows[row * taps + tap - 1]:
                    yield Run(row, 1, begin, tap - begin, int(self.offsets[row, begin]), int(self.sizes[row, begin:tap].sum()))
                    begin = tap

    def put(self, run: Run, number: int, chunks: np.ndarray) -> None:
        """Copy what is wanted of some chunks of a run, from its ``number``-th on, uint8 ``[n, chunk bytes]``, to where it belongs."""
        while len(chunks):
            row, tap = divmod(number, run.taps)
            rows, taps = len(chunks) // run.taps, run.taps
            if tap or not rows:  # not from the beginning of a row, or not to its end
                rows, taps = 1, min(run.taps - tap, len(chunks))
            self._put_rows(run.row + row, run.tap + tap, chunks[: rows * taps].reshape(rows, taps, -1))
            number, chunks = number + rows * taps, chunks[rows * taps :]

    def _put_rows(self, row: int, tap: int, chunks: np.ndarray) -> None:
        """uint8 ``[rows, taps, chunk bytes]``."""
        rows, taps, _ = chunks.shape
        size, out = self._chunk_tokens, self._out[tap : tap + taps]
        first = self.token + row * size
        begin, end = max(self.start, first) - first, min(self.stop, first + rows * size) - first  # tokens, from the first row on
        at, whole, whole_end = first - self.start, -(-begin // size), end // size
        if whole < whole_end:
            place = out[:, at + whole * size : at + whole_end * size].reshape(taps, whole_end - whole, -1)
            place[...] = chunks[whole:whole_end].swapaxes(0, 1)
        cut = {begin // size} if begin % size else set()
        for row in cut | ({end // size} if end % size else set()):
            low, high = max(begin, row * size), min(end, (row + 1) * size)
            out[:, at + low : at + high] = chunks[row].reshape(taps, size, -1)[:, low - row * size : high - row * size]

    def whole_rows(self, run: Run) -> range:
        """Rows of a run, from its first on, whose tokens are all wanted."""
        first, size = self.token + run.row * self._chunk_tokens - self.start, self._chunk_tokens
        return range(max(0, -(first // size)), max(0, min(run.rows, (self.stop - self.start - first) // size)))

    def cut_rows(self, run: Run) -> list[int]:
        """The other rows, where there are whole ones: the first or the last, or both."""
        whole = self.whole_rows(run)
        return [row for row in (0, run.rows - 1) if row not in whole]

    def _addresses(self) -> np.ndarray:
        rows, taps = self.offsets.shape
        out, checks, size = self._out, self.checks, self._chunk_tokens
        row_bytes = size * out.strides[1]
        first = out.ctypes.data + (self.token - self.start) * out.strides[1]
        places = np.empty((rows, taps, 2, 2), np.int64)
        places[..., 0, 0] = first + np.arange(rows)[:, None] * row_bytes + np.arange(taps) * out.strides[0]
        places[..., 0, 1] = row_bytes
        places[..., 1, 0] = checks.ctypes.data + np.arange(rows)[:, None] * checks.strides[0] + np.arange(taps) * checks.strides[1]
        places[..., 1, 1] = checks.itemsize
        return places

    def whole(self, run: Run, rows: range) -> np.ndarray:
        """Where some whole rows of a run belong: uint8 ``[taps, tokens, bytes of a token]``, of each tap contiguous."""
        at = self.token + (run.row + rows.start) * self._chunk_tokens - self.start
        return self._out[run.tap : run.tap + run.taps, at : at + len(rows) * self._chunk_tokens]

    def place(self, run: Run, number: int) -> np.ndarray | None:
        """uint8 ``[chunk bytes]`` where a chunk of a run belongs, contiguous; None: not all of it is wanted."""
        row, tap = divmod(number, run.taps)
        at = self.token + (run.row + row) * self._chunk_tokens - self.start
        if at < 0 or at + self._chunk_tokens > self.stop - self.start:
            return None
        return self._out[run.tap + tap, at : at + self._chunk_tokens].reshape(-1)

    def _name(self, which: np.ndarray) -> str:
        """Of the first of these: bool ``[rows, k]``."""
        row, tap = np.argwhere(which)[0].tolist()
        return f"tap {self.taps[tap]}, tokens from {self.token + row * self._chunk_tokens}"

    def name(self, run: Run, number: int) -> str:
        row, tap = divmod(number, run.taps)
        return f"tap {self.taps[run.tap + tap]}, tokens from {self.token + (run.row + row) * self._chunk_tokens}"

    def damaged(self, run: Run, number: int) -> StoreDamagedError:
        return StoreDamagedError(f"{self.where}: the chunk of {self.name(run, number)} does not fit its checksum; it has been damaged")


def scratch(length: int) -> np.ndarray:
    """This thread's scratch memory: fresh memory for every read would cost a page fault each 4 KB."""
    held = getattr(_thread, "buffer", None)
    if held is None or len(held) < length:
        held = _thread.buffer = np.empty(length, np.uint8)
    return held[:length]


def decompressor() -> ZstdDecompressor:
    """This thread's: a new one for every chunk would allocate its 150 KB, which many threads at once wait for."""
    if getattr(_thread, "zstd", None) is None:
        _thread.zstd = ZstdDecompressor()
    return _thread.zstd

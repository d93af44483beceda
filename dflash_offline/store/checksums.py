"""Checks of many chunks by one pass over all of them: each check alone would let go of the interpreter's lock and fetch it again.

A chunk in a file is followed by its crc32c. For a right one the crc32c of both is the same number whatever the chunk holds, and
to go on from one number over n bytes that are right alone is linear in that number. So what right chunks side by side come to
depends on their lengths only. (The linearity: W. W. Peterson and D. T. Brown, "Cyclic Codes for Error Detection", 1961.)
Chunks of one size need no table.
"""

import numpy as np
from crc32c import crc32c as crc32c_number

MOST_BYTES = 1 << 23  # of chunks side by side; the table has 4 bytes for each
_BYTES = np.arange(4)
_RIGHT = crc32c_number(bytes(4))  # of any chunk and its check: an empty one's check is four zeros
_table = np.array([_RIGHT], np.uint32)  # [n]: what a right chunk has become n bytes later


def _going_on(length: int) -> np.ndarray:
    """uint32 ``[32]``: what each bit of a crc32c becomes when it goes on over ``length`` bytes, those bytes' own share left out."""
    zeros = bytes(length)
    own = crc32c_number(zeros)
    return np.array([crc32c_number(zeros, 1 << bit) ^ own for bit in range(32)], np.uint32)


def _tables(columns: np.ndarray) -> list[np.ndarray]:
    """A linear map of 32 bits, given as what it makes of each bit, uint32 ``[32]``: what it makes of each value of the four bytes."""
    tables = []
    for byte in range(4):
        made = np.zeros(1, np.uint32)
        for column in columns[8 * byte : 8 * byte + 8]:
            made = np.concatenate([made, made ^ column])
        tables.append(made)
    return tables


def _apply(tables: list[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """The same map, of uint32 numbers."""
    found = np.zeros_like(numbers)
    for byte, made in enumerate(tables):
        found ^= made[numbers >> np.uint32(8 * byte) & np.uint32(255)]
    return found


def _table_for(length: int) -> np.ndarray:
    """The table with more than ``length`` entries, made as far as ever needed, by doubling.

    Without a lock: a process forked meanwhile would wait for one for ever. Two threads may both make it.
    """
    global _table
    columns, size, table = _going_on(1), 1, _table
    while size <= length:
        if len(table) == size:
            table = np.concatenate([table, _apply(_tables(columns), table)])
        columns, size = _apply(_tables(columns), columns), 2 * size
    _table = max(_table, table, key=len)
    return table


def of_right_chunks(sizes: list[int]) -> int | None:
    """crc32c of chunks of these many bytes side by side, checks included, if all are right. None: too long for that."""
    behind = np.cumsum([0, *sizes[:0:-1]])  # bytes after each, from the last one on
    length = int(behind[-1])
    if length >= MOST_BYTES:
        return None
    table = _table if length < len(_table) else _table_for(length)
    return int(np.bitwise_xor.reduce(table[behind]))


class EqualChunks:
    """The same for chunks of one size, that of each given without its check."""

    def __init__(self, chunk_bytes: int):
        self._chunk_bytes, self._known = chunk_bytes, [0]
        self._over = np.zeros((0, 4, 256), np.uint32)

    def of(self, count: int) -> int:
        """crc32c of so many right chunks side by side, checks included."""
        known = self._known
        if count >= len(known):
            chunk, known = bytes(self._chunk_bytes), list(known)  # a copy, not a lock: see ``_table_for``
            chunk += crc32c_number(chunk).to_bytes(4, "little")
            while count >= len(known):
                known.append(crc32c_number(chunk, known[-1]))
            self._known = known
        return known[count]

    def joined(self, checks: np.ndarray) -> np.ndarray:
        """crc32c of chunks side by side without their checks, uint32 ``[n]``, where these are those of n times r chunks, ``[r, n]``."""
        rows = len(checks)
        over = self._over
        if rows > len(over):
            over = self._over_chunks(rows)
        values = np.ascontiguousarray(checks, "<u4").view(np.uint8).reshape(rows, -1, 4)
        return np.bitwise_xor.reduce(over[np.arange(rows - 1, -1, -1)[:, None, None], _BYTES, values], axis=(0, 2))

    def _over_chunks(self, count: int) -> np.ndarray:
        """uint32 ``[count at least, 4, 256]``: what each value of the four bytes of a number becomes over 0, 1, 2, ... chunks."""
        over = list(self._over) or [np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]]
        one = _tables(_going_on(self._chunk_bytes))
        while len(over) < count:
            over.append(_apply(one, over[-1]))
        made = self._over = np.array(over)  # whole, without a lock: see ``_table_for``; another thread may put a shorter one there
        return made

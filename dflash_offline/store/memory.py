"""Memory of batches that were read, used again for later ones.

Memory fresh from the system is cleared page by page, which costs a third of what reading into it does. Page-locked
memory needs none of this: torch keeps what it once locked.
"""

import weakref
from collections import deque

import numpy as np


class Blocks:
    """``take`` gives memory; it comes back by itself once no tensor lies in it any more. At most one block waits here."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=1)  # its methods need no lock: a block may come back in any thread

    def take(self, size: int) -> np.ndarray:
        """uint8 ``[size]``, whatever lies in it. numpy asks for huge pages, with which fresh memory is filled four times as fast."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or not size <= len(memory) <= 2 * size:
            del memory
            memory = np.empty(size, np.uint8)
        given = memory[:size]
        weakref.finalize(given, self._free.append, memory).atexit = False
        return given

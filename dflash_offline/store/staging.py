"""Encodes a sample where it lies and brings the codes to the CPU, piece by piece.

On a GPU nothing waits but the thread that asks for the next piece, and that only while all slots of pinned memory are
taken: the kernels are queued on the current stream, the copies on a side stream, and only codes cross the bus. The
thread that places them into the shard waits for the copy, and gives the slot back.

T tokens, t tokens of a piece, K taps, H hidden size, W values per token and tap of one encoded array.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_offline.codecs import Codec
from dflash_offline.store.values import token_rms

SLOT_BYTES = 32 << 20  # of one piece; all slots have one size, so that pinned memory is asked for once and then passed on
SLOTS = 12
_ALIGNED = 256


@dataclass
class Piece:
    """Tokens ``start`` to ``stop`` of a sample on their way. ``wait`` or ``release`` must be called, and then ``release``.

    ``rms`` of ``wait``'s answer is that of the whole sample, float32 ``[T, K]``.
    """

    start: int
    stop: int
    wait: Callable[[], tuple[dict[str, np.ndarray], np.ndarray]]  # codes by array name, tap-major [K, t, W], and rms
    release: Callable[[], None]


class Slots:
    """Pinned memory of this process, passed from piece to piece and from part to part: asking for it stops the GPU for a moment."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._number, self._lock = 0, threading.Lock()

    def take(self) -> torch.Tensor:
        """A free slot; waits while all are on their way."""
        with self._lock:
            if self._free.empty() and self._number < SLOTS:
                self._number += 1
                return torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._free.get()

    def give(self, slot: torch.Tensor) -> None:
        self._free.put(slot)


_slots = Slots()


class Stager:
    """Encoder of one part's writer."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self.piece_tokens = max(1, (SLOT_BYTES - _ALIGNED * len(codec.arrays)) // codec.token_bytes)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pieces(self, hidden: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a sample, in order; on a CPU one.

        Args:
            hidden: bf16 ``[T, K, H]``. It may be overwritten as soon as work queued on its stream may.
        """
        rms = token_rms(hidden)
        if not hidden.is_cuda:
            encoded, norms = {name: array.numpy() for name, array in self.codec.encode(hidden).items()}, rms.numpy()
            yield Piece(0, len(hidden), lambda: (encoded, norms), lambda: None)
            return
        side = self._side_stream(hidden.device)
        norms_out = torch.empty(rms.shape, dtype=rms.dtype, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(side):
            norms_out.copy_(rms, non_blocking=True)
        rms.record_stream(side)
        for start in range(0, len(hidden), self.piece_tokens):
            stop = min(start + self.piece_tokens, len(hidden))
            yield self._piece(hidden[start:stop], side, start, stop, norms_out.numpy())

    def _piece(self, hidden: torch.Tensor, side: torch.cuda.Stream, start: int, stop: int, norms: np.ndarray) -> Piece:
        slot = _slots.take()
        encoded = self.codec.encode(hidden)
        side.wait_stream(torch.cuda.current_stream(hidden.device))
        copies, offset = {}, 0
        with torch.cuda.stream(side):
            for name, array in encoded.items():
                size = array.numel() * array.element_size()
                copies[name] = slot[offset : offset + size].view(array.dtype).view(array.shape).copy_(array, non_blocking=True)
                offset += -(-size // _ALIGNED) * _ALIGNED
            copied = torch.cuda.Event()
            copied.record(side)
        held = list(encoded.values())

        def wait() -> tuple[dict[str, np.ndarray], np.ndarray]:
            copied.synchronize()
            held.clear()  # until here: the copies read this memory
            return {name: array.numpy() for name, array in copies.items()}, norms

        def release() -> None:
            copied.synchronize()  # of a piece that was never waited for the copy may still be under way
            _slots.give(slot)

        return Piece(start, stop, wait, release)

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

"""Encodes a sample where it lies and brings the codes to the CPU.

On a GPU nothing waits: the kernels are queued on the current stream, the copies into pinned memory on a side stream,
and only codes cross the bus. The thread that places them into the shard waits for the copies.
"""

from collections.abc import Callable

import numpy as np
import torch

from dflash_offline.codecs import Codec
from dflash_offline.store.values import token_rms

# the codes by array name, tap-major [K, T, W], and the RMS of each token's vectors, float32 [T, K]
Encoded = tuple[dict[str, np.ndarray], np.ndarray]


class Stager:
    """``stage(hidden)`` returns at once; the function it returns waits and gives the codes."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stage(self, hidden: torch.Tensor) -> Callable[[], Encoded]:
        """Args: ``hidden`` bf16 ``[T, K, H]``. It may be overwritten as soon as work queued on its stream may."""
        encoded = {**self.codec.encode(hidden), "": token_rms(hidden)}
        if not hidden.is_cuda:
            return lambda: _split({name: array.numpy() for name, array in encoded.items()})
        if hidden.device not in self._streams:
            self._streams[hidden.device] = torch.cuda.Stream(hidden.device)
        side = self._streams[hidden.device]
        side.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(side):
            copies = {
                name: torch.empty(array.shape, dtype=array.dtype, pin_memory=True).copy_(array, non_blocking=True)
                for name, array in encoded.items()
            }
            copied = torch.cuda.Event()
            copied.record(side)

        def wait() -> Encoded:
            copied.synchronize()
            encoded.clear()  # until here: the copies read this memory
            return _split({name: array.numpy() for name, array in copies.items()})

        return wait


def _split(arrays: dict[str, np.ndarray]) -> Encoded:
    return {name: array for name, array in arrays.items() if name}, arrays[""]

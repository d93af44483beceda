"""What a codec is: named plain arrays per token and tap, and the way there and back.

T tokens, K taps, k selected taps, H hidden size, W values per token and tap of one encoded array.

An encoded array is tap-major in memory, ``[K, T, W]``, so that a Zarr chunk (64 tokens of one tap) is one contiguous
piece of it; on disk its shape is ``[T, K, W]``. 16-bit words that are not numbers to torch (``uint16`` on disk) are
``torch.int16`` in memory, bit for bit.

torch is imported by what works on tensors, and only when it does: a look into a store needs no more than the names and
sizes of its arrays and ``decode_numpy``, and torch takes longer to import than all of that.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch


def use_kernels(array: torch.Tensor) -> bool:
    """Whether the fused kernels apply: on a CUDA device with Triton. The plain operations give the same bits."""
    return array.is_cuda and _has_triton()


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class EncodedArray:
    """One array that a codec writes: ``width`` values of ``dtype`` for each token and tap."""

    name: str
    dtype: str
    width: int
    bulk: bool = True  # large: written Zarr shard by Zarr shard; else collected beside and written when the part is whole
    zstd: int | None = None  # compression level, None = stored as it is
    fill_value: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one tap, before compression."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return {"uint8": torch.uint8, "int8": torch.int8, "uint16": torch.int16}[self.dtype]


class Codec(ABC):
    """bf16 ``[T, K, H]`` to plain integer arrays and back.

    ``arrays`` are the arrays per token, ``constants`` those per store (``{name: numpy array [K, ...]}``), ``attributes``
    the numbers a reader needs. ``encode`` runs where its argument lies, ``decode`` where the encoded arrays lie; a CPU
    and a GPU give the same bits.
    """

    name: str
    arrays: tuple[EncodedArray, ...]
    constants: dict[str, np.ndarray]
    attributes: dict[str, Any]

    def __init__(self, num_taps: int, hidden_size: int):
        self.num_taps, self.hidden_size = num_taps, hidden_size
        self.constants, self.attributes = {}, {}

    @abstractmethod
    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """``hidden`` bf16 ``[T, K, H]`` -> ``{name: [K, T, W]}``, contiguous, on the same device."""

    @abstractmethod
    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        """``{name: [k, T, W]}`` -> bf16 ``[T, k, H]``, contiguous, on the same device.

        Args:
            taps: positions along K that the k encoded taps are; None = all of them in order.
        """

    @abstractmethod
    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        """``decode`` without torch: ``{name: [k, T, W]}`` -> float32 ``[T, k, H]``, the same numbers exactly."""

    @cached_property
    def constants_digest(self) -> str:
        """xxh3-128 of the constants: parts of one store must agree on it."""
        hashed = xxhash.xxh3_128()
        for name, array in sorted(self.constants.items()):
            hashed.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
        return hashed.hexdigest()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all taps, before any compression."""
        return self.num_taps * sum(array.token_bytes for array in self.arrays)

    def block_bytes(self, num_taps: int, tokens: int) -> int:
        """Bytes of a block of memory that holds the encoded arrays of so many tokens and taps, see ``views``."""
        return max(64, sum(_whole_lines(num_taps * tokens * array.token_bytes) for array in self.arrays))

    def views(self, block: torch.Tensor, num_taps: int, tokens: int) -> dict[str, torch.Tensor]:
        """``{name: [k, T, W]}`` laid out in ``block``, uint8 of ``block_bytes`` bytes, one array after another."""
        pieces = self._pieces(block, num_taps, tokens)
        return {array.name: piece.view(array.torch_dtype).view(num_taps, tokens, array.width) for array, piece in pieces}

    def views_numpy(self, block: np.ndarray, num_taps: int, tokens: int) -> dict[str, np.ndarray]:
        """``views`` of a numpy array, of the types on disk."""
        pieces = self._pieces(block, num_taps, tokens)
        return {array.name: piece.view(array.dtype).reshape(num_taps, tokens, array.width) for array, piece in pieces}

    def _pieces(self, block: Any, num_taps: int, tokens: int) -> Iterator[tuple[EncodedArray, Any]]:
        start = 0
        for array in self.arrays:
            size = num_taps * tokens * array.token_bytes
            yield array, block[start : start + size]
            start += _whole_lines(size)


def float_of_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 of bf16 numbers given as uint16: their upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _whole_lines(size: int) -> int:
    return -(-size // 64) * 64

"""Bit-exact codecs: bf16 as it is, and bf16 with its exponents apart.

T tokens, K taps, k selected taps, H hidden size.

A bf16 number is sign (1 bit), exponent (8), mantissa (7). Sign and mantissa are noise and stored raw; of the exponent about
2.6 bits are left once it is counted from the mean of its row. zstd takes as long for a byte of two exponents as for a byte
of one, so exponents are stored in pairs of four bits. The few farther than that from their row's mean have their upper four bits
in a second half of the row, which is nearly all zeros. Against the upper bytes of all numbers as they are (format version 1)
this is no larger and decompressed 12 to 22 % faster. NaN payloads and -0 survive: only bits are moved.

In numpy (bytes wrap around)::

    lower, upper, reference = exponents[..., : H // 2], exponents[..., H // 2 : -1], exponents[..., -1:]
    below = np.stack([lower & 15 | upper << 4, lower >> 4 | upper & 240], -1).reshape(sign_mantissa.shape)
    bits = (sign_mantissa & 128).astype("u2") << 8 | (reference - below).astype("u2") << 7 | sign_mantissa & 127
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.codecs.base import Codec, EncodedArray, float_of_bf16, use_kernels

if TYPE_CHECKING:
    import torch

ZSTD_LEVEL = 1  # higher levels gain nothing on exponents and write many times slower
_CACHED_VALUES = 1 << 18  # that a CPU encodes or decodes at a time
HEADROOM = 6  # of the reference above a row's mean exponent: from 9 below the mean to 6 above it four bits are enough


class Bf16Codec(Codec):
    """bf16 bits as uint16, nothing else."""

    name = "bf16"

    def __init__(self, num_taps: int, hidden_size: int):
        super().__init__(num_taps, hidden_size)
        # a quiet NaN as fill value: should a missing chunk ever be read as such, it cannot pass for data
        self.arrays = (EncodedArray("hidden_states", "uint16", hidden_size, fill_value=0x7FC0, attributes={"view_dtype": "bfloat16"}),)

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        return {"hidden_states": hidden.view(torch.int16).permute(1, 0, 2).contiguous()}

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        import torch

        return encoded["hidden_states"].permute(1, 0, 2).contiguous().view(torch.bfloat16)

    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        return float_of_bf16(encoded["hidden_states"]).transpose(1, 0, 2)


class LosslessCodec(Codec):
    """Exponents (zstd), and signs with mantissas (raw), in two uint8 arrays. The hidden size must be even."""

    name = "lossless"

    def __init__(self, num_taps: int, hidden_size: int):
        super().__init__(num_taps, hidden_size)
        holds = "how far each exponent is below the row's reference: lower four bits by pairs, upper four bits by pairs, the reference"
        self.arrays = (
            EncodedArray("exponents", "uint8", hidden_size + 1, zstd=ZSTD_LEVEL, attributes={"holds": holds}),
            EncodedArray("sign_mantissa", "uint8", hidden_size, attributes={"holds": "bit 15 and bits 6 to 0 of bfloat16"}),
        )

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        if use_kernels(hidden):
            from dflash_offline.codecs import kernels

            return kernels.encode_exponents(hidden)
        tokens, taps, width = hidden.shape
        found = {array.name: hidden.new_empty((taps, tokens, array.width), dtype=torch.uint8) for array in self.arrays}
        exponents, rest, half = found["exponents"], found["sign_mantissa"], width // 2
        for rows in self._pieces_in_cache(hidden):
            bits = hidden[rows].permute(1, 0, 2).contiguous().view(torch.int16)
            rest[:, rows] = (bits >> 8 & 128) | (bits & 127)
            exponent = (bits >> 7 & 255).to(torch.uint8)
            mean = (exponent.sum(-1, keepdim=True, dtype=torch.int32) + half) // width
            reference = (mean + HEADROOM & 255).to(torch.uint8)
            pairs = (reference - exponent).view(torch.int16)  # of an even channel (low byte) and an odd one
            exponents[:, rows, :half] = (pairs & 15) | (pairs >> 4 & 240)
            exponents[:, rows, half:width] = (pairs >> 4 & 15) | (pairs >> 8 & 240)
            exponents[:, rows, width:] = reference
        return found

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        import torch

        exponents, rest = encoded["exponents"], encoded["sign_mantissa"]
        if use_kernels(rest):
            from dflash_offline.codecs import kernels

            return kernels.decode_exponents(exponents, rest)
        exponents, rest = exponents.permute(1, 0, 2), rest.permute(1, 0, 2)
        found, half = torch.empty(rest.shape, dtype=torch.int16, device=rest.device), self.hidden_size // 2
        for rows in self._pieces_in_cache(rest):
            lower, upper, reference = exponents[rows].tensor_split([half, 2 * half], -1)
            lower, upper, other = lower.to(torch.int16), upper.to(torch.int16), rest[rows].to(torch.int16)
            pairs = (lower & 15) | (upper << 4 & 240) | (lower << 4 & 0xF00) | (upper << 8 & ~0xFFF)
            exponent = (reference - pairs.view(torch.uint8)).to(torch.int16)
            found[rows] = (other << 8 & ~0x7FFF) | (exponent << 7) | (other & 127)
        return found.view(torch.bfloat16)

    @staticmethod
    def _pieces_in_cache(rows: torch.Tensor) -> list[slice]:
        """Some tokens at a time: on a CPU what lies between would go through memory, several times as slow; a GPU takes all at once."""
        tokens = max(1, len(rows)) if rows.is_cuda else max(1, _CACHED_VALUES // (rows.shape[1] * rows.shape[2]))
        return [slice(start, min(start + tokens, len(rows))) for start in range(0, len(rows), tokens)]

    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        exponents, rest = encoded["exponents"], encoded["sign_mantissa"]
        lower, upper, reference = np.split(exponents, [self.hidden_size // 2, self.hidden_size], -1)
        below = np.stack([(lower & 15) | (upper << 4), (lower >> 4) | (upper & 240)], -1).reshape(rest.shape)
        bits = (rest & 128).astype(np.uint16) << 8 | (reference - below).astype(np.uint16) << 7 | rest & 127
        return float_of_bf16(bits).transpose(1, 0, 2)


class BytePlanesCodec(Codec):
    """``lossless`` of format version 1: upper bytes (zstd) and lower bytes (raw) in two uint8 arrays.

    Kept to read such stores, and to go on with one that was begun. In numpy: ``bits = high.astype("u2") << 8 | low``.
    """

    name = "lossless"

    def __init__(self, num_taps: int, hidden_size: int):
        super().__init__(num_taps, hidden_size)
        self.arrays = (
            EncodedArray("high", "uint8", hidden_size, zstd=ZSTD_LEVEL, attributes={"holds": "bits 15 to 8 of bfloat16"}),
            EncodedArray("low", "uint8", hidden_size, attributes={"holds": "bits 7 to 0 of bfloat16"}),
        )

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        planes = hidden.permute(1, 0, 2).contiguous().view(torch.uint8).unflatten(-1, (-1, 2))  # little-endian: low byte first
        return {"high": planes[..., 1].contiguous(), "low": planes[..., 0].contiguous()}

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        import torch

        planes = torch.stack([encoded["low"].permute(1, 0, 2), encoded["high"].permute(1, 0, 2)], -1)
        return planes.flatten(-2).view(torch.bfloat16)

    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        return float_of_bf16(encoded["high"].astype(np.uint16) << 8 | encoded["low"]).transpose(1, 0, 2)

"""Bit-exact codecs: bf16 as it is, and bf16 in two byte planes.

T tokens, K taps, k selected taps, H hidden size.

A bf16 number is sign (1 bit), exponent (8), mantissa (7). Its upper byte, sign and seven bits of the exponent, compresses to
about three bits on real residual streams; its lower byte is noise and stored raw. (Rotating the sign into the lower
byte, so that the upper one is the whole exponent, saves entropy but not bytes: 0.687 against 0.685 of bf16 after zstd.)
NaN payloads and -0 survive: only bits are moved.

In numpy: ``bits = high.astype("u2") << 8 | low``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.codecs.base import Codec, EncodedArray, float_of_bf16, use_kernels

if TYPE_CHECKING:
    import torch

ZSTD_LEVEL = 1  # higher levels gain nothing on upper bytes and write many times slower


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
    """Upper bytes (zstd) and lower bytes (raw) in two uint8 arrays."""

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

        if use_kernels(encoded["high"]):
            from dflash_offline.codecs import kernels

            return kernels.decode_planes(encoded["high"], encoded["low"])
        planes = torch.stack([encoded["low"].permute(1, 0, 2), encoded["high"].permute(1, 0, 2)], -1)
        return planes.flatten(-2).view(torch.bfloat16)

    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        return float_of_bf16(encoded["high"].astype(np.uint16) << 8 | encoded["low"]).transpose(1, 0, 2)

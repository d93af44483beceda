"""Bit-exact codecs: bf16 as it is, and bf16 in two byte planes.

T tokens, K taps, k selected taps, H hidden size.

A bf16 number is sign (1 bit), exponent (8), mantissa (7). Rotated left by one bit its upper byte is the exponent and
its lower byte mantissa and sign: the exponent is what compresses (2.5 of 8 bits on real residual streams), the rest
is noise and is stored raw. Cutting between the stored bytes instead would leave one exponent bit in the noise.
NaN payloads and -0 survive: only bits are moved.

In numpy: ``r = high.astype("u2") << 8 | low; bits = r >> 1 | r << 15``.
"""

from collections.abc import Sequence

import torch

from dflash_offline.codecs.base import Codec, EncodedArray

ZSTD_LEVEL = 1  # higher levels gain under 1 % on exponents and write many times slower


class Bf16Codec(Codec):
    """bf16 bits as uint16, nothing else."""

    name = "bf16"

    def __init__(self, num_taps: int, hidden_size: int):
        super().__init__(num_taps, hidden_size)
        # a quiet NaN as fill value: should a missing chunk ever be read as such, it cannot pass for data
        self.arrays = (EncodedArray("hidden_states", "uint16", hidden_size, fill_value=0x7FC0, attributes={"view_dtype": "bfloat16"}),)

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden_states": hidden.view(torch.int16).permute(1, 0, 2).contiguous()}

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        return encoded["hidden_states"].permute(1, 0, 2).contiguous().view(torch.bfloat16)


class LosslessCodec(Codec):
    """Exponents (zstd) and mantissas with signs (raw) in two uint8 arrays."""

    name = "lossless"

    def __init__(self, num_taps: int, hidden_size: int):
        super().__init__(num_taps, hidden_size)
        self.arrays = (
            EncodedArray("high", "uint8", hidden_size, zstd=ZSTD_LEVEL, attributes={"holds": "bits 14-7 of bfloat16: the exponent"}),
            EncodedArray("low", "uint8", hidden_size, attributes={"holds": "bits 6-0 (mantissa) << 1 | bit 15 (sign)"}),
        )

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        bits = hidden.permute(1, 0, 2).contiguous().view(torch.int16)
        rotated = (bits << 1) | ((bits >> 15) & 1)
        planes = rotated.view(torch.uint8).unflatten(-1, (-1, 2))  # little-endian: low byte first
        return {"high": planes[..., 1].contiguous(), "low": planes[..., 0].contiguous()}

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        if encoded["high"].is_cuda:
            from dflash_offline.codecs import kernels

            if kernels.AVAILABLE:
                return kernels.decode_planes(encoded["high"], encoded["low"])
        return self.decode_slowly(encoded)

    def decode_slowly(self, encoded: dict[str, torch.Tensor]) -> torch.Tensor:
        """``decode`` in plain torch operations, on any device."""
        planes = torch.stack([encoded["low"].permute(1, 0, 2), encoded["high"].permute(1, 0, 2)], -1)
        rotated = planes.flatten(-2).view(torch.int16)
        return (((rotated >> 1) & 0x7FFF) | (rotated << 15)).view(torch.bfloat16)

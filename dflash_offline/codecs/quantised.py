"""int8, int6 and int4: codes with a scale for each token and block of channels.

T tokens, K taps, k selected taps, H hidden size, n outlier channels, b channels of a block.

Decoding, for one tap (``codes`` unpacked to signed integers ``[T, H]``)::

    y = codes.reshape(T, H / b, b)
    if rotation > 1: y = hadamard(y) / rotation              # over groups of `rotation` channels; rotation <= b
    x = (y * scales[..., None]).reshape(T, H) * channel_scale
    x[:, outlier_channels] = outliers

Encoding goes the other way. What each step is for:

- ``channel_scale`` (``statistics``): residual streams have channels of very different size; static, so it costs nothing.
- outlier channels (int6, int4) hold half of the energy and are kept in bf16.
- the rotation (Hadamard matrix, entries +-1) spreads what is left evenly over its group.
- the scale is signed: the block's largest value, whatever its sign, becomes the lowest code -2^(bits-1), so that all codes are used. For
  int4 this is one level in sixteen: 12 % less error.

A CPU and a GPU give the same bits because no step depends on an order or on contraction: IEEE divisions, maxima,
rounding half to even, butterflies of the rotation in a fixed order without products; in decoding everything up
to the last product is exact in float32 (integers below 2^12 times an 8-bit scale).

Packing: int8 as it is. int4: ``code + 8``, even channel in the low half of the byte. int6: ``code + 32``; first ``H / 2``
bytes of lower four bits packed like int4, then ``H / 4`` bytes of upper two bits, first channel lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dflash_offline.codecs.base import Codec, EncodedArray, float_of_bf16, use_kernels
from dflash_offline.codecs.statistics import ChannelStatistics
from dflash_offline.errors import StoreError

if TYPE_CHECKING:
    import torch

ZSTD_LEVEL = 1
_SLICE = 64  # tokens at a time on a CPU: intermediate values stay in its caches, five times faster
TINY = 2.0**-100  # a block below it is stored as zeros, so that subnormal arithmetic, where devices differ, never happens
HUGE = 2.0**120  # larger values saturate; the rotation's sums stay finite
BF16_MAX = 2.0**128 - 2.0**120  # the largest finite bfloat16
OUTLIER_CHANNELS = 8


def scale_block(bits: int, hidden_size: int) -> int:
    """Channels that share a scale.

    int8: the largest divisor of H from 128 to 192, else 64, else the largest divisor below 192. int6, int4: 64 and 32,
    or the largest power of two in H below that.
    """
    if bits == 8:
        divisors = [b for b in range(1, 193) if hidden_size % b == 0]
        return divisors[-1] if divisors[-1] >= 128 or hidden_size % 64 else 64
    return min(64 if bits == 6 else 32, hidden_size & -hidden_size)


def hadamard(values: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply groups of ``size`` (a power of two) neighbours of the last axis by the Hadamard matrix, unscaled.

    log2(size) equal stages: sums of neighbours to the front half, differences to the back half.
    """
    import torch

    grouped = values.reshape(*values.shape[:-1], -1, size)
    for _ in range(size.bit_length() - 1):
        even, odd = grouped[..., 0::2], grouped[..., 1::2]
        grouped = torch.cat([even + odd, even - odd], -1)
    return grouped.reshape(values.shape)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes (any integer type) ``[..., H]`` -> int8 or packed uint8."""
    import torch

    if bits == 8:
        return codes.to(torch.int8)
    words = (codes + (1 << (bits - 1))).to(torch.uint8)
    nibbles = (words[..., 0::2] & 15) | ((words[..., 1::2] & 15) << 4)
    if bits == 4:
        return nibbles
    high = words >> 4
    return torch.cat([nibbles, high[..., 0::4] | (high[..., 1::4] << 2) | (high[..., 2::4] << 4) | (high[..., 3::4] << 6)], -1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``pack``, as float32 ``[..., H]``."""
    import torch

    if bits == 8:
        return packed.to(torch.float32)
    width = packed.shape[-1] if bits == 4 else packed.shape[-1] * 2 // 3
    nibbles = torch.stack([packed[..., :width] & 15, packed[..., :width] >> 4], -1).flatten(-2)
    if bits == 6:
        crumbs = packed[..., width:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
        nibbles = nibbles | ((crumbs & 3) << 4).flatten(-2)
    return nibbles.to(torch.float32) - (1 << (bits - 1))


def unpack_numpy(packed: np.ndarray, bits: int) -> np.ndarray:
    """``unpack`` without torch."""
    if bits == 8:
        return packed.astype(np.float32)
    width = packed.shape[-1] if bits == 4 else packed.shape[-1] * 2 // 3
    nibbles = np.stack([packed[..., :width] & 15, packed[..., :width] >> 4], -1).reshape(*packed.shape[:-1], 2 * width)
    if bits == 6:
        crumbs = packed[..., width:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
        nibbles |= (crumbs << 4).reshape(nibbles.shape)
    return nibbles.astype(np.float32) - (1 << (bits - 1))


class QuantisedCodec(Codec):
    """Codes of 8, 6 or 4 bits.

    Args:
        channel_scale: float32 ``[K, H]``, all above zero.
        outlier_channels: int32 ``[K, n]``, sorted; n may be 0.
        zstd: compress the codes too.

    Raises:
        StoreError: H does not fit the packing.
    """

    BITS: ClassVar[dict[str, int]] = {"int8": 8, "int6": 6, "int4": 4}

    def __init__(self, name: str, num_taps: int, hidden_size: int, *, channel_scale: np.ndarray, outlier_channels: np.ndarray, zstd: bool):
        super().__init__(num_taps, hidden_size)
        self.name, self.bits = name, self.BITS[name]
        if channel_scale.shape != (num_taps, hidden_size):
            raise StoreError(
                f"channel statistics are for {list(channel_scale.shape)} taps and channels; the target has {[num_taps, hidden_size]}"
            )
        self.block = scale_block(self.bits, hidden_size)
        self.rotation = 1 if self.bits == 8 else self.block
        self.num_outliers = outlier_channels.shape[1]
        self.constants = {"channel_scale": np.array(channel_scale, np.float32)}
        self.attributes = {"bits": self.bits, "block": self.block, "rotation": self.rotation, "outlier_channels": self.num_outliers}
        code_type = "int8" if self.bits == 8 else "uint8"
        arrays = [
            EncodedArray("codes", code_type, hidden_size * self.bits // 8, zstd=ZSTD_LEVEL if zstd else None),
            EncodedArray("scales", "uint16", hidden_size // self.block, bulk=False, attributes={"view_dtype": "bfloat16"}),
        ]
        if self.num_outliers:
            self.constants["outlier_channels"] = np.array(outlier_channels, np.int32)
            arrays.append(EncodedArray("outliers", "uint16", self.num_outliers, bulk=False, attributes={"view_dtype": "bfloat16"}))
        self.arrays = tuple(arrays)
        self._on_device: dict[tuple[torch.device, tuple[int, ...]], dict[str, torch.Tensor]] = {}

    @classmethod
    def of(cls, name: str, num_taps: int, hidden_size: int, *, statistics: ChannelStatistics | None, zstd: bool) -> QuantisedCodec:
        """The codec that a capture uses.

        int8 divides by the channels' RMS itself. int6 and int4 by its square root: after the rotation an error falls on all
        channels of its group alike, so evening them out fully would give the small ones the error of the large.
        """
        if statistics is None:
            raise StoreError(f"[store] codec = {name!r} needs channel statistics; measure them before the first part is written")
        rms = statistics.rms
        if cls.BITS[name] == 8:
            return cls(name, num_taps, hidden_size, channel_scale=rms, outlier_channels=np.zeros((len(rms), 0), np.int32), zstd=zstd)
        count = min(OUTLIER_CHANNELS, hidden_size // 64)
        largest = np.sort(np.argsort(-rms, axis=1, kind="stable")[:, :count], axis=1).astype(np.int32)
        return cls(name, num_taps, hidden_size, channel_scale=np.sqrt(rms), outlier_channels=largest, zstd=zstd)

    def on_device(self, device: torch.device, taps: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """The constants of some taps, kept there for the next batch. ``is_outlier`` bool ``[k, H]`` is one of them."""
        import torch

        key = device, tuple(range(self.num_taps) if taps is None else taps)
        if key not in self._on_device:
            found = {name: torch.from_numpy(array)[list(key[1])] for name, array in self.constants.items()}
            if self.rotation > 1:
                found["hadamard"] = hadamard(torch.eye(self.rotation), self.rotation)
            if self.num_outliers:
                slots = torch.full((len(key[1]), self.hidden_size), -1, dtype=torch.int32)
                order = torch.arange(self.num_outliers, dtype=torch.int32).expand(len(key[1]), -1)
                found["slots"] = slots.scatter_(
                    1, found["outlier_channels"].long(), order
                )  # channel -> its place among the outliers, or -1
            self._on_device[key] = {name: array.contiguous().to(device) for name, array in found.items()}
        return self._on_device[key]

    def encode(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        import torch

        if use_kernels(hidden):
            from dflash_offline.codecs import kernels

            return kernels.encode_quantised(self, hidden)
        pieces = [self.encode_plainly(piece) for piece in hidden.split(_SLICE)] or [self.encode_plainly(hidden)]
        return {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}

    def decode(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        import torch

        if use_kernels(encoded["codes"]):
            from dflash_offline.codecs import kernels

            return kernels.decode_quantised(self, encoded, taps)
        num_taps, num_tokens, _ = encoded["codes"].shape
        out = torch.empty((num_tokens, num_taps, self.hidden_size), dtype=torch.bfloat16, device=encoded["codes"].device)
        for start in range(0, num_tokens, _SLICE):
            out[start : start + _SLICE] = self.decode_plainly(
                {name: array[:, start : start + _SLICE] for name, array in encoded.items()}, taps
            )
        return out

    def encode_plainly(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """``encode`` in plain torch operations, on any device."""
        import torch

        constants, lowest = self.on_device(hidden.device, None), float(1 << (self.bits - 1))
        by_tap = hidden.permute(1, 0, 2)  # [K, T, H]
        values = (by_tap.to(torch.float32) / constants["channel_scale"][:, None]).clamp(-HUGE, HUGE)
        encoded = {}
        if self.num_outliers:
            values = values.masked_fill(constants["slots"][:, None] >= 0, 0.0)
            at = constants["outlier_channels"].long()[:, None].expand(-1, by_tap.shape[1], -1)
            encoded["outliers"] = by_tap.gather(2, at).view(torch.int16)
        if self.rotation > 1:
            values = hadamard(values, self.rotation)
        values = values.unflatten(-1, (-1, self.block))
        high, low = values.amax(-1), values.amin(-1)
        largest = torch.where(high >= -low, high, low)
        scales = (largest * (-1.0 / lowest)).to(torch.bfloat16)
        scales = torch.where(largest.abs() < TINY, torch.zeros_like(scales), scales)
        divisor = scales.to(torch.float32)
        divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        codes = (values / divisor[..., None]).round().clamp(-lowest, lowest - 1)
        codes = torch.where(scales[..., None] == 0, torch.zeros_like(codes), codes).flatten(-2).to(torch.int16)
        return {"codes": pack(codes, self.bits).contiguous(), "scales": scales.view(torch.int16), **encoded}

    def decode_plainly(self, encoded: dict[str, torch.Tensor], taps: Sequence[int] | None = None) -> torch.Tensor:
        """``decode`` in plain torch operations, on any device."""
        import torch

        constants = self.on_device(encoded["codes"].device, taps)
        values = unpack(encoded["codes"], self.bits)  # [k, T, H]
        if self.rotation > 1:
            values = (values.unflatten(-1, (-1, self.rotation)) @ constants["hadamard"]).flatten(-2)  # exact in any order: small integers
        scales = encoded["scales"].view(torch.bfloat16).to(torch.float32) * (1.0 / self.rotation)
        values = (values.unflatten(-1, (-1, self.block)) * scales[..., None]).flatten(-2)
        values = (values * constants["channel_scale"][:, None]).clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        if self.num_outliers:
            at = constants["outlier_channels"].long()[:, None].expand(-1, values.shape[1], -1)
            values.scatter_(2, at, encoded["outliers"].view(torch.bfloat16))
        return values.permute(1, 0, 2)

    def decode_numpy(self, encoded: dict[str, np.ndarray], taps: Sequence[int] | None = None) -> np.ndarray:
        constants = {name: array if taps is None else array[list(taps)] for name, array in self.constants.items()}
        values = unpack_numpy(encoded["codes"], self.bits)  # [k, T, H], in steps as in decode_plainly, each exact but the last product
        blocks = values.reshape(*values.shape[:-1], values.shape[-1] // self.block, self.block)
        if self.rotation > 1:
            blocks = blocks @ _hadamard_matrix(self.rotation)
        with np.errstate(over="ignore", invalid="ignore"):
            blocks *= (float_of_bf16(encoded["scales"]) * np.float32(1 / self.rotation))[..., None]
            values = blocks.reshape(values.shape)
            values *= constants["channel_scale"][:, None]
        bits = np.clip(values, -BF16_MAX, BF16_MAX, out=values).view(np.uint32)
        bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest bfloat16, half to even
        bits &= 0xFFFF0000
        if self.num_outliers:
            at = np.broadcast_to(constants["outlier_channels"][:, None], encoded["outliers"].shape)
            np.put_along_axis(values, at, float_of_bf16(encoded["outliers"]), -1)
        return values.transpose(1, 0, 2)


def _hadamard_matrix(size: int) -> np.ndarray:
    """float32 ``[size, size]``: what ``hadamard`` multiplies by."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix

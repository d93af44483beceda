"""The codecs' encoding and decoding fused into one pass each, in Triton, for a CUDA device.

T tokens, K taps, k selected taps, H hidden size, R channels of a rotated group (= the scale's block), n outlier channels.

Every function gives the bits of its plain counterpart in ``planes`` and ``quantised``: the same IEEE operations in the
same order (``div_rn``, no ``x / y``, which Triton makes approximate), sums nowhere mixed with products, so that contraction to
fused multiply-adds has nothing to act on. ``tests/test_codecs_gpu.py`` compares them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from dflash_offline.codecs.planes import HEADROOM

if TYPE_CHECKING:
    from dflash_offline.codecs.quantised import QuantisedCodec

_TINY = tl.constexpr(2.0**-100)  # quantised.TINY
_HUGE = tl.constexpr(2.0**120)  # quantised.HUGE
_BF16_MAX = tl.constexpr(3.3895313892515355e38)
# adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to an integer, half to even
_ROUNDER = tl.constexpr(12582912.0)
_ROTATIONS = (1, 16, 32, 64)  # smaller ones do not fill a tensor core; only toy models have them
_TILE_TOKENS = 32  # of the kernel that rotates forward
_DECODED_TOKENS = 128  # of the one that rotates back: it reads the rotation's R x R matrix once a tile
_ROW = 1024  # channels that a row kernel handles at a time


@triton.jit
def _clamp(value, LIMIT: tl.constexpr):
    return tl.minimum(tl.maximum(value, -LIMIT), LIMIT)


@triton.jit
def _decode_exponents(exponents, sign_mantissa, out, tokens, taps, hidden, PAIRS: tl.constexpr):
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, half = tap * tokens + token, hidden // 2
    stored, rest, target = exponents + row * (hidden + 1), sign_mantissa + row * hidden, out + (token * taps + tap) * hidden
    reference = tl.load(stored + hidden).to(tl.int32)
    for start in range(0, half, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        lower, upper = tl.load(stored + pair, pair < half, 0).to(tl.int32), tl.load(stored + half + pair, pair < half, 0).to(tl.int32)
        below = tl.reshape(tl.join((lower & 15) | ((upper & 15) << 4), (lower >> 4) | (upper & 240)), (2 * PAIRS,))
        channel = 2 * start + tl.arange(0, 2 * PAIRS)
        byte = tl.load(rest + channel, channel < hidden, 0).to(tl.int32)
        bits = ((byte & 128) << 8) | (((reference - below) & 255) << 7) | (byte & 127)
        tl.store(target + channel, bits.to(tl.int16), channel < hidden)


@triton.jit
def _encode_exponents(hidden_states, exponents, sign_mantissa, tokens, taps, hidden, HEADROOM: tl.constexpr, PAIRS: tl.constexpr):
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, half = tap * tokens + token, hidden // 2
    source, stored, rest = hidden_states + (token * taps + tap) * hidden, exponents + row * (hidden + 1), sign_mantissa + row * hidden
    sums = tl.zeros((2 * PAIRS,), tl.int32)
    for start in range(0, hidden, 2 * PAIRS):
        channel = start + tl.arange(0, 2 * PAIRS)
        sums += (tl.load(source + channel, channel < hidden, 0).to(tl.int32) >> 7) & 255
    reference = (tl.sum(sums, 0) + half) // hidden + HEADROOM
    tl.store(stored + hidden, (reference & 255).to(tl.uint8))
    for start in range(0, half, PAIRS):
        channel = 2 * start + tl.arange(0, 2 * PAIRS)
        bits = tl.load(source + channel, channel < hidden, 0).to(tl.int32)
        tl.store(rest + channel, (((bits >> 8) & 128) | (bits & 127)).to(tl.uint8), channel < hidden)
        even, odd = tl.split(tl.reshape((reference - ((bits >> 7) & 255)) & 255, (PAIRS, 2)))
        pair = start + tl.arange(0, PAIRS)
        tl.store(stored + pair, ((even & 15) | ((odd & 15) << 4)).to(tl.uint8), pair < half)
        tl.store(stored + half + pair, ((even >> 4) | (odd & 240)).to(tl.uint8), pair < half)


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be the tensor's."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        tensor = next(value for argument in arguments for value in _tensors(argument))
        with torch.cuda.device_of(tensor):
            return function(*arguments)

    return wrapped


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, dict):
        return list(argument.values())
    return [argument] if isinstance(argument, torch.Tensor) else []


@_on_its_device
def decode_exponents(exponents: torch.Tensor, sign_mantissa: torch.Tensor) -> torch.Tensor:
    """uint8 ``[k, T, H + 1]`` and ``[k, T, H]`` -> bf16 ``[T, k, H]``: ``LosslessCodec.decode`` on a CUDA device."""
    taps, tokens, hidden = sign_mantissa.shape
    out = torch.empty((tokens, taps, hidden), dtype=torch.int16, device=exponents.device)
    if tokens:
        arguments = exponents.contiguous(), sign_mantissa.contiguous(), out, tokens, taps, hidden
        _decode_exponents[(tokens, taps)](*arguments, PAIRS=_ROW // 2)
    return out.view(torch.bfloat16)


@_on_its_device
def encode_exponents(hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
    """bf16 ``[T, K, H]`` -> ``{name: [K, T, W]}``: ``LosslessCodec.encode`` on a CUDA device."""
    tokens, taps, hidden = hidden_states.shape
    make = functools.partial(torch.empty, dtype=torch.uint8, device=hidden_states.device)
    exponents, sign_mantissa = make((taps, tokens, hidden + 1)), make((taps, tokens, hidden))
    if tokens:
        arguments = hidden_states.contiguous().view(torch.int16), exponents, sign_mantissa, tokens, taps, hidden
        _encode_exponents[(tokens, taps)](*arguments, HEADROOM=HEADROOM, PAIRS=_ROW // 2)
    return {"exponents": exponents, "sign_mantissa": sign_mantissa}


@triton.jit
def _decode_rows(codes, scales, channel_scale, out, tokens, taps, hidden, BLOCK: tl.constexpr, ROW: tl.constexpr):
    """int8, no rotation: one token of one tap."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tap * tokens + token
    target = (token * taps + tap) * hidden
    for start in range(0, hidden, ROW):
        channel = start + tl.arange(0, ROW)
        inside = channel < hidden
        code = tl.load(codes + row * hidden + channel, inside, 0).to(tl.float32)
        scale = tl.load(scales + row * (hidden // BLOCK) + channel // BLOCK, inside, 0.0).to(tl.float32)
        value = (code * scale) * tl.load(channel_scale + tap * hidden + channel, inside, 0.0)
        value = _clamp(value, _BF16_MAX)
        tl.store(out + target + channel, value.to(tl.bfloat16), inside)


@triton.jit
def _decode_groups(
    codes,
    scales,
    outliers,
    slots,
    channel_scale,
    matrix,
    out,
    tokens,
    taps,
    hidden,
    num_outliers,
    BITS: tl.constexpr,
    R: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """int4 and int6: R channels of TILE tokens of one tap. The rotation is a product of small integers: exact on tensor cores."""
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tap, group = tl.program_id(1), tl.program_id(2)
    within = tl.arange(0, R)
    channel = group * R + within
    row = tap * tokens + token
    inside = (token < tokens)[:, None]
    packed = codes + row[:, None] * (hidden * BITS // 8)
    pair = tl.load(packed + (group * (R // 2) + tl.arange(0, R // 2))[None, :], inside, 0).to(tl.int32)
    code = tl.reshape(tl.join(pair & 15, pair >> 4), (TILE, R))
    if BITS == 6:
        upper = tl.load(packed + (hidden // 2 + group * (R // 4) + tl.arange(0, R // 4))[None, :], inside, 0).to(tl.int32)
        even, odd = tl.join(upper & 3, (upper >> 4) & 3), tl.join((upper >> 2) & 3, upper >> 6)
        code = code | (tl.reshape(tl.join(even, odd), (TILE, R)) << 4)
    signed = (code - (1 << (BITS - 1))).to(tl.float16)
    hadamard = tl.load(matrix + within[:, None] * R + within[None, :])
    scale = tl.load(scales + row * (hidden // R) + group, token < tokens, 0.0).to(tl.float32) * (1.0 / R)
    value = tl.dot(signed, hadamard) * scale[:, None]
    value = value * tl.load(channel_scale + tap * hidden + channel)[None, :]
    result = _clamp(value, _BF16_MAX).to(tl.bfloat16)
    if HAS_OUTLIERS:
        slot = tl.load(slots + tap * hidden + channel)
        kept = tl.load(outliers + row[:, None] * num_outliers + slot[None, :], inside & (slot >= 0)[None, :], 0.0)
        result = tl.where((slot >= 0)[None, :], kept, result)
    tl.store(out + (token[:, None] * taps + tap) * hidden + channel[None, :], result, inside)


@_on_its_device
def decode_quantised(codec: "QuantisedCodec", encoded: dict[str, torch.Tensor], taps: Sequence[int] | None) -> torch.Tensor:
    """``QuantisedCodec.decode`` on a CUDA device."""
    codes, scales = encoded["codes"].contiguous(), encoded["scales"].contiguous().view(torch.bfloat16)
    constants, hidden = codec.on_device(codes.device, taps), codec.hidden_size
    num_taps, tokens = codes.shape[:2]
    if codec.rotation not in _ROTATIONS:
        return codec.decode_plainly(encoded, taps).contiguous()
    out = torch.empty((tokens, num_taps, hidden), dtype=torch.bfloat16, device=codes.device)
    if not tokens:
        return out
    if codec.rotation == 1:
        arguments = codes, scales, constants["channel_scale"], out, tokens, num_taps, hidden
        _decode_rows[(tokens, num_taps)](*arguments, BLOCK=codec.block, ROW=_ROW)
        return out
    outliers = encoded["outliers"].contiguous().view(torch.bfloat16) if codec.num_outliers else scales
    slots = constants["slots"] if codec.num_outliers else codes
    grid = triton.cdiv(tokens, _DECODED_TOKENS), num_taps, hidden // codec.rotation
    _decode_groups[grid](
        codes,
        scales,
        outliers,
        slots,
        constants["channel_scale"],
        constants["hadamard"].to(torch.float16),
        out,
        tokens,
        num_taps,
        hidden,
        codec.num_outliers,
        BITS=codec.bits,
        R=codec.rotation,
        HAS_OUTLIERS=codec.num_outliers > 0,
        TILE=_DECODED_TOKENS,
    )
    return out


@triton.jit
def _signed_scale(high, low, LOWEST: tl.constexpr):
    """Scale of a block whose largest and lowest values are given, as bf16; zero for a block of (nearly) nothing."""
    largest = tl.where(high >= -low, high, low)
    scale = (largest * (-1.0 / LOWEST)).to(tl.bfloat16)
    return tl.where(tl.abs(largest) < _TINY, 0.0, scale.to(tl.float32))


@triton.jit
def _codes(values, scale, LOWEST: tl.constexpr):
    quotient = tl.div_rn(values, tl.where(scale == 0.0, 1.0, scale))
    rounded = (quotient + _ROUNDER) - _ROUNDER
    clamped = tl.minimum(tl.maximum(rounded, -LOWEST), LOWEST - 1.0)
    return tl.where(scale == 0.0, 0.0, clamped).to(tl.int32)


@triton.jit
def _encode_rows(hidden_states, channel_scale, codes, scales, tokens, taps, hidden, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """int8, no rotation: one token of one tap, block by block."""
    token, tap = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tap * tokens + token
    within = tl.arange(0, PADDED)
    inside = within < BLOCK
    for block in range(0, hidden // BLOCK):
        channel = block * BLOCK + within
        value = tl.load(hidden_states + (token * taps + tap) * hidden + channel, inside, 0.0).to(tl.float32)
        value = tl.div_rn(value, tl.load(channel_scale + tap * hidden + channel, inside, 1.0))
        value = _clamp(value, _HUGE)
        scale = _signed_scale(tl.max(value, 0), tl.min(value, 0), 128.0)
        tl.store(scales + row * (hidden // BLOCK) + block, scale.to(tl.bfloat16))
        tl.store(codes + row * hidden + channel, _codes(value, scale, 128.0).to(tl.int8), inside)


@triton.jit
def _butterflies(values, TILE: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr):
    """``quantised.hadamard``: sums of neighbours to the front half, differences to the back half, STAGES times."""
    for _ in tl.static_range(STAGES):
        even, odd = tl.split(tl.reshape(values, (TILE, R // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (TILE, R))
    return values


@triton.jit
def _encode_groups(
    hidden_states,
    channel_scale,
    slots,
    codes,
    scales,
    tokens,
    taps,
    hidden,
    BITS: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """int4 and int6: R channels of TILE tokens of one tap."""
    LOWEST: tl.constexpr = 1.0 * (1 << (BITS - 1))
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tap, group = tl.program_id(1), tl.program_id(2)
    channel = group * R + tl.arange(0, R)
    inside = (token < tokens)[:, None]
    value = tl.load(hidden_states + (token[:, None] * taps + tap) * hidden + channel[None, :], inside, 0.0).to(tl.float32)
    value = tl.div_rn(value, tl.broadcast_to(tl.load(channel_scale + tap * hidden + channel)[None, :], (TILE, R)))
    value = _clamp(value, _HUGE)
    if HAS_OUTLIERS:
        value = tl.where((tl.load(slots + tap * hidden + channel) >= 0)[None, :], 0.0, value)
    value = _butterflies(value, TILE, R, STAGES)
    scale = _signed_scale(tl.max(value, 1), tl.min(value, 1), LOWEST)
    row = tap * tokens + token
    tl.store(scales + row * (hidden // R) + group, scale.to(tl.bfloat16), token < tokens)
    word = _codes(value, tl.broadcast_to(scale[:, None], (TILE, R)), LOWEST) + (1 << (BITS - 1))
    packed = codes + row[:, None] * (hidden * BITS // 8)
    even, odd = tl.split(tl.reshape(word & 15, (TILE, R // 2, 2)))
    half = group * (R // 2) + tl.arange(0, R // 2)
    tl.store(packed + half[None, :], (even | (odd << 4)).to(tl.uint8), inside)
    if BITS == 6:
        even, odd = tl.split(tl.reshape(word >> 4, (TILE, R // 4, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        quarter = hidden // 2 + group * (R // 4) + tl.arange(0, R // 4)
        tl.store(packed + quarter[None, :], (first | (second << 2) | (third << 4) | (fourth << 6)).to(tl.uint8), inside)


@_on_its_device
def encode_quantised(codec: "QuantisedCodec", hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
    """``QuantisedCodec.encode`` on a CUDA device: bf16 ``[T, K, H]`` -> ``{name: [K, T, W]}``."""
    hidden_states, constants = hidden_states.contiguous(), codec.on_device(hidden_states.device, None)
    tokens, taps, hidden = hidden_states.shape
    if codec.rotation not in _ROTATIONS:
        return codec.encode_plainly(hidden_states)
    encoded = {a.name: torch.empty((taps, tokens, a.width), dtype=a.torch_dtype, device=hidden_states.device) for a in codec.arrays}
    if not tokens:
        return encoded
    scales = encoded["scales"].view(torch.bfloat16)
    if codec.rotation == 1:
        arguments = hidden_states, constants["channel_scale"], encoded["codes"], scales, tokens, taps, hidden
        _encode_rows[(tokens, taps)](*arguments, BLOCK=codec.block, PADDED=triton.next_power_of_2(codec.block), num_warps=1)
        return encoded
    _encode_groups[(triton.cdiv(tokens, _TILE_TOKENS), taps, hidden // codec.rotation)](
        hidden_states,
        constants["channel_scale"],
        constants["slots"] if codec.num_outliers else encoded["codes"],
        encoded["codes"],
        scales,
        tokens,
        taps,
        hidden,
        BITS=codec.bits,
        R=codec.rotation,
        STAGES=codec.rotation.bit_length() - 1,
        HAS_OUTLIERS=codec.num_outliers > 0,
        TILE=_TILE_TOKENS,
    )
    if codec.num_outliers:
        at = constants["outlier_channels"].long()[:, None].expand(-1, tokens, -1)
        encoded["outliers"] = hidden_states.permute(1, 0, 2).gather(2, at).view(torch.int16)
    return encoded

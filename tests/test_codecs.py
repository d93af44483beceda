"""Numeric codecs on the CPU: bit-exactness, a slow formula, sizes, errors, channel statistics."""

import numpy as np
import pytest
import torch
from small_store import residual_stream, same_bits

from dflash_offline.codecs import CODECS, ChannelStatistics, QuantisedCodec, make_codec
from dflash_offline.codecs.quantised import hadamard, pack, scale_block, unpack
from dflash_offline.errors import StoreDamagedError, StoreError

INT_CODECS = ("int8", "int6", "int4")


def made(name: str, taps: int, hidden: int, **options: bool):
    rows = [residual_stream(200, taps, hidden, torch.Generator().manual_seed(5))]
    return make_codec(name, num_taps=taps, hidden_size=hidden, statistics=ChannelStatistics.from_rows(rows), **options)


@pytest.mark.parametrize("name", ["bf16", "lossless"])
def test_every_bf16_bit_pattern_survives(name):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)  # NaN payloads, infinities, -0, subnormals
    hidden = bits.view(torch.bfloat16).reshape(64, 4, 256)
    codec = make_codec(name, num_taps=4, hidden_size=256)
    encoded = codec.encode(hidden)
    assert same_bits(codec.decode(encoded), hidden)
    for array in codec.arrays:
        assert encoded[array.name].shape == (4, 64, array.width) and encoded[array.name].dtype == array.torch_dtype
        assert encoded[array.name].is_contiguous()


def test_exponents_are_packed_as_the_formula_says():
    """The formula of ``planes``' docstring, one number at a time."""
    bits = (np.arange(6 * 2 * 10) * 40503 + 12345).astype(np.uint16).reshape(6, 2, 10)  # exponents far from each other
    bits[3:] = bits[3:] & 0x83FF | 0x3C00  # and near
    encoded = make_codec("lossless", num_taps=2, hidden_size=10).encode(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    exponents, rest = encoded["exponents"].numpy(), encoded["sign_mantissa"].numpy()
    assert exponents[:, :3, 5:-1].any() and not exponents[:, 3:, 5:-1].any()
    for token, tap in np.ndindex(6, 2):
        row = exponents[tap, token].tolist()
        for channel in range(10):
            shift = 4 * (channel % 2)
            below = (row[channel // 2] >> shift & 15) + 16 * (row[5 + channel // 2] >> shift & 15)
            byte = int(rest[tap, token, channel])
            assert bits[token, tap, channel] == (byte >> 7) << 15 | (row[10] - below) % 256 << 7 | byte % 128


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("taps", [None, [2, 0]])
def test_numpy_decodes_to_the_same_numbers(name, taps):
    codec = made(name, 3, 192)
    hidden = residual_stream(150, 3, 192, torch.Generator().manual_seed(6))
    for token, factor in enumerate([0.0, 1e-36, 1e30, 3e38]):
        hidden[token] *= factor
    encoded = {key: array if taps is None else array[taps].contiguous() for key, array in codec.encode(hidden.clamp(-3e38, 3e38)).items()}
    on_disk = {array.name: encoded[array.name].numpy().view(array.dtype) for array in codec.arrays}
    found, expected = codec.decode_numpy(on_disk, taps), codec.decode(encoded, taps).float().numpy()
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.array_equal(np.ascontiguousarray(found).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))
    block = np.arange(codec.block_bytes(2, 5)).astype(np.uint8)
    views = codec.views(torch.from_numpy(block), 2, 5)
    assert all(np.array_equal(view, views[key].numpy().view(view.dtype)) for key, view in codec.views_numpy(block, 2, 5).items())


def slow_decode(codec: QuantisedCodec, encoded: dict[str, torch.Tensor], token: int, tap: int) -> list[int]:
    """The formula of ``quantised``'s docstring, one number at a time, in numpy's float32; bf16 bits."""
    width, block, packed = codec.hidden_size, codec.block, encoded["codes"][tap, token].numpy()
    codes = []
    for c in range(width):
        if codec.bits == 8:
            codes.append(int(packed[c]))
            continue
        word = (int(packed[c // 2]) >> (4 * (c % 2))) & 15
        if codec.bits == 6:
            word |= ((int(packed[width // 2 + c // 4]) >> (2 * (c % 4))) & 3) << 4
        codes.append(word - (1 << (codec.bits - 1)))
    scales = encoded["scales"][tap, token].view(torch.bfloat16).float().numpy()
    result = []
    for c in range(width):
        if codec.rotation == 1:
            value = codes[c]
        else:
            start, row = c // codec.rotation * codec.rotation, c % codec.rotation
            value = sum(codes[start + j] * (-1) ** (row & j).bit_count() for j in range(codec.rotation))
        real = np.float32(value) * (scales[c // block] * np.float32(1 / codec.rotation)) * codec.constants["channel_scale"][tap, c]
        bits = int(np.float32(real).view(np.uint32))
        result.append((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)  # round half to even
    for slot in range(codec.num_outliers):
        result[int(codec.constants["outlier_channels"][tap, slot])] = int(encoded["outliers"][tap, token, slot]) & 0xFFFF
    return result


def slow_encode(codec: QuantisedCodec, hidden: torch.Tensor, token: int, tap: int) -> tuple[list[int], list[int]]:
    """Signed codes and bf16 scale bits of one vector, one number at a time."""
    values = [np.float32(v) / s for v, s in zip(hidden[token, tap].float().numpy(), codec.constants["channel_scale"][tap], strict=True)]
    if codec.num_outliers:
        for channel in codec.constants["outlier_channels"][tap]:
            values[channel] = np.float32(0)
    step = 1
    while step < codec.rotation:  # the usual in-place transform: bit by bit of the channel number, lowest first
        for start in range(0, len(values), 2 * step):
            for i in range(start, start + step):
                values[i], values[i + step] = values[i] + values[i + step], values[i] - values[i + step]
        step *= 2
    codes, scales, lowest = [], [], 1 << (codec.bits - 1)
    for start in range(0, len(values), codec.block):
        group = values[start : start + codec.block]
        largest = max(group) if max(group) >= -min(group) else min(group)
        bits = int(np.float32(largest * np.float32(-1 / lowest)).view(np.uint32))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        scale = np.uint32(bits).view(np.float32)
        scales.append(bits >> 16)
        codes += [int(min(max(np.rint(value / scale), -lowest), lowest - 1)) for value in group]
    return codes, scales


@pytest.mark.parametrize("name", INT_CODECS)
@pytest.mark.parametrize("hidden_size", [64, 96, 160, 576])
def test_int_codecs_equal_the_slow_formula(name, hidden_size):
    codec = made(name, 2, hidden_size)
    hidden = residual_stream(4, 2, hidden_size, torch.Generator().manual_seed(1))
    encoded, decoded = codec.encode(hidden), codec.decode(codec.encode(hidden))
    for token, tap in ((0, 0), (3, 1)):
        codes, scales = slow_encode(codec, hidden, token, tap)
        assert unpack(encoded["codes"][tap, token], codec.bits).int().tolist() == codes
        assert [bits & 0xFFFF for bits in encoded["scales"][tap, token].tolist()] == scales
        assert [bits & 0xFFFF for bits in decoded.view(torch.int16)[token, tap].tolist()] == slow_decode(codec, encoded, token, tap)


def test_hadamard_is_the_matrix_product_and_its_own_inverse():
    values = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)])
    expected = (values.unflatten(-1, (4, 32)) @ matrix).flatten(-2)
    torch.testing.assert_close(hadamard(values, 32), expected)
    torch.testing.assert_close(hadamard(hadamard(values, 32), 32) / 32, values)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_packing_round_trip(bits):
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.arange(low, high, dtype=torch.int16).repeat(8)
    assert torch.equal(unpack(pack(codes, bits), bits), codes.float())
    assert pack(codes, bits).numel() * 8 == codes.numel() * bits


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("lossless", {4096: 1.001}),  # before compression
        ("int8", {4096: 0.51, 5120: 0.51, 576: 0.51, 64: 0.52}),
        ("int6", {1024: 0.40, 576: 0.41}),
        ("int4", {1024: 0.29, 576: 0.30}),
    ],
)
def test_bytes_of_a_token(name, limits):
    for hidden_size, limit in limits.items():
        assert made(name, 2, hidden_size).token_bytes <= limit * 2 * 2 * hidden_size


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.01), ("int6", 0.03), ("int4", 0.11)])
def test_error_of_ordinary_channels(name, limit):
    """Relative L2 per token with the outlier channel left out, which would hide all else; the huge first token too."""
    codec, hidden = made(name, 2, 576), residual_stream(300, 2, 576, torch.Generator().manual_seed(2))
    decoded = codec.decode(codec.encode(hidden)).float()
    ordinary = [c for c in range(576) if c != 3]
    error = (decoded - hidden.float())[..., ordinary].norm(dim=-1) / hidden.float()[..., ordinary].norm(dim=-1)
    assert error.median() < limit and error[0].max() < 1.5 * limit


def test_outlier_channels_are_exact_and_the_largest():
    codec, hidden = made("int4", 2, 576), residual_stream(50, 2, 576, torch.Generator().manual_seed(3))
    channels = codec.constants["outlier_channels"]
    assert channels.shape == (2, 8) and all(3 in row for row in channels)
    decoded = codec.decode(codec.encode(hidden))
    for tap in range(2):
        assert same_bits(decoded[:, tap, channels[tap]].contiguous(), hidden[:, tap, channels[tap]])


@pytest.mark.parametrize("name", CODECS)
def test_some_taps_in_any_order(name):
    codec, hidden = made(name, 4, 64), residual_stream(30, 4, 64, torch.Generator().manual_seed(4))
    encoded = codec.encode(hidden)
    whole, taps = codec.decode(encoded), [2, 0]
    assert same_bits(codec.decode({key: array[taps] for key, array in encoded.items()}, taps), whole[:, taps])


@pytest.mark.parametrize("name", CODECS)
def test_long_rows_are_encoded_as_short_ones(name):
    """Rows do not depend on their neighbours: any slicing gives the same codes."""
    codec, hidden = made(name, 2, 64), residual_stream(150, 2, 64, torch.Generator().manual_seed(6))
    whole, pieces = codec.encode(hidden), [codec.encode(hidden[i : i + 7]) for i in range(0, 150, 7)]
    for key, array in whole.items():
        assert torch.equal(array, torch.cat([piece[key] for piece in pieces], 1))
    assert codec.decode({key: array[:, :0] for key, array in whole.items()}).shape == (0, 2, 64)


@pytest.mark.parametrize("name", INT_CODECS)
def test_extreme_values_stay_finite(name):
    codec = made(name, 1, 64)
    hidden = torch.zeros(4, 1, 64, dtype=torch.bfloat16)
    hidden[0] = torch.finfo(torch.bfloat16).max
    hidden[1] = 1e-39  # subnormal
    hidden[2, 0, 7] = -3e38
    decoded = codec.decode(codec.encode(hidden))
    assert torch.isfinite(decoded).all() and decoded.abs().max() > 1e35 and not decoded[3].any()
    outliers = codec.constants.get("outlier_channels", np.zeros((1, 0), int))[0]
    assert not np.delete(decoded[1, 0].float().numpy(), outliers).any()  # subnormal blocks become zero on every device


def test_scale_blocks():
    assert [scale_block(8, h) for h in (4096, 5120, 2880, 576, 2048, 64, 320, 100)] == [128, 160, 192, 192, 128, 64, 160, 100]
    assert [scale_block(6, h) for h in (4096, 2880, 576, 96, 36)] == [64, 64, 64, 32, 4]
    assert [scale_block(4, h) for h in (4096, 576, 36, 34)] == [32, 32, 4, 2]


def test_refusals():
    statistics = ChannelStatistics(np.ones((2, 66), np.float32), 1)
    with pytest.raises(StoreError, match="int6.*multiple of 4.*66"):
        make_codec("int6", num_taps=2, hidden_size=66, statistics=statistics)
    with pytest.raises(StoreError, match="needs channel statistics"):
        make_codec("int8", num_taps=2, hidden_size=64)
    with pytest.raises(StoreError, match=r"\[2, 66\].*\[3, 66\]"):
        make_codec("int8", num_taps=3, hidden_size=66, statistics=statistics)
    with pytest.raises(StoreError, match="'fp8' is not known; allowed: bf16"):
        make_codec("fp8", num_taps=2, hidden_size=64)
    with pytest.raises(StoreError, match=r"multiple of 2; the target.s is 65; use one of .bf16., .int8.$"):
        make_codec("lossless", num_taps=2, hidden_size=65)


def test_statistics_survive_saving_and_notice_damage(tmp_path):
    rows = [residual_stream(n, 2, 64, torch.Generator().manual_seed(n)) for n in (40, 90)]
    statistics = ChannelStatistics.from_rows(rows)
    path = tmp_path / "statistics.safetensors"
    statistics.save(path)
    loaded = ChannelStatistics.load(path)
    assert np.array_equal(loaded.rms, statistics.rms) and loaded.digest == statistics.digest and loaded.num_tokens == 130
    assert statistics.rms.shape == (2, 64) and (statistics.rms.argmax(1) == 3).all()
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreDamagedError, match="do not fit their digest"):
        ChannelStatistics.load(path)
    path.write_bytes(b"rubbish")
    with pytest.raises(StoreDamagedError, match="no channel statistics"):
        ChannelStatistics.load(path)
    with pytest.raises(StoreDamagedError, match="missing"):
        ChannelStatistics.load(tmp_path / "none")
    with pytest.raises(StoreError, match="at least one row"):
        ChannelStatistics.from_rows([])
    with pytest.raises(StoreError, match="not finite"):
        ChannelStatistics.from_rows([torch.full((2, 1, 4), torch.nan, dtype=torch.bfloat16)])


def test_first_token_does_not_decide_the_statistics():
    hidden = residual_stream(100, 1, 64, torch.Generator().manual_seed(0))
    louder = hidden.clone()
    louder[0] *= 100
    one, other = ChannelStatistics.from_rows([hidden]).rms, ChannelStatistics.from_rows([louder]).rms
    np.testing.assert_allclose(one, other, rtol=0.02)

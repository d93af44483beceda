"""The fused kernels against the plain operations on the CPU: the same bits, both ways."""

import pytest
import torch
from small_store import residual_stream, same_bits

from dflash_offline.codecs import CODECS, ChannelStatistics, make_codec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("tokens", "taps", "hidden"), [(1, 1, 64), (33, 3, 576), (70, 2, 2880), (257, 2, 4096), (5, 1, 5120), (9, 2, 96), (9, 2, 36)]
)
def test_gpu_and_cpu_give_the_same_bits(name, tokens, taps, hidden):
    generator = torch.Generator().manual_seed(tokens)
    values = residual_stream(tokens, taps, hidden, generator)
    if tokens > 3:
        values[1] = 0
        values[2] *= 1e-38  # subnormal
        values[3, 0] = torch.finfo(torch.bfloat16).max
    statistics = ChannelStatistics.from_rows([residual_stream(100, taps, hidden, generator)])
    codec = make_codec(name, num_taps=taps, hidden_size=hidden, statistics=statistics)
    here = codec.encode(values)
    there = codec.encode(values.cuda())
    for key, array in here.items():
        assert torch.equal(array, there[key].cpu()), key
    assert same_bits(codec.decode(here), codec.decode(there).cpu())
    chosen = [taps - 1]
    some = {key: array[chosen].contiguous() for key, array in there.items()}
    assert same_bits(codec.decode(here)[:, chosen], codec.decode(some, chosen).cpu())


@pytest.mark.parametrize("name", CODECS)
def test_every_quotient_rounds_alike(name):
    """A million values over twelve binary orders: one approximate division or fused product would show."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(512, 1, 2048, generator=generator) * torch.exp2(torch.randint(-6, 6, (512, 1, 2048), generator=generator))
    values = values.bfloat16()
    codec = make_codec(name, num_taps=1, hidden_size=2048, statistics=ChannelStatistics.from_rows([values[:64]]))
    here, there = codec.encode(values), codec.encode(values.cuda())
    for key, array in here.items():
        assert torch.equal(array, there[key].cpu()), key
    assert same_bits(codec.decode(here), codec.decode(there).cpu())


def test_kernels_are_what_runs(monkeypatch):
    from dflash_offline.codecs import QuantisedCodec

    values = residual_stream(40, 2, 576, torch.Generator().manual_seed(0))
    for name in ("int8", "int6", "int4"):
        codec = make_codec(name, num_taps=2, hidden_size=576, statistics=ChannelStatistics.from_rows([values]))
        monkeypatch.setattr(QuantisedCodec, "encode_plainly", None)
        monkeypatch.setattr(QuantisedCodec, "decode_plainly", None)
        codec.decode(codec.encode(values.cuda()))
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["lossless", "int8", "int6", "int4"])
def test_decoding_speed(name):
    """Over 200 GB/s of bf16 produced, the Qwen3-8B shape."""
    tokens, taps, hidden = 8192, 5, 4096
    values = torch.randn(tokens, taps, hidden, device="cuda").bfloat16()
    codec = make_codec(name, num_taps=taps, hidden_size=hidden, statistics=ChannelStatistics.from_rows([values[:256]]))
    encoded = codec.encode(values)
    for _ in range(3):
        codec.decode(encoded)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        codec.decode(encoded)
    end.record()
    torch.cuda.synchronize()
    rate = 10 * values.nbytes / 1e6 / start.elapsed_time(end)
    assert rate > 200, f"{rate:.0f} GB/s"


@pytest.mark.parametrize("name", CODECS)
def test_a_store_written_and_read_on_the_gpu(tmp_path, name):
    from small_store import append, identity, rows, writer

    from dflash_offline import store

    samples = rows()
    for folder, device in (("cpu", "cpu"), ("gpu", "cuda")):
        store.create_or_open(tmp_path / folder, identity(name))
        with writer(tmp_path / folder, "part-00000", samples, name) as part:
            for row in samples:
                row.hidden = row.hidden.to(device)
                append(part, row)
            part.commit()
    one, other = store.HiddenStateStore(tmp_path / "cpu"), store.HiddenStateStore(tmp_path / "gpu", verify="deep")
    for i in range(len(samples)):
        assert same_bits(one[i].hidden_states(), other[i].hidden_states())
    batch = other.read_encoded([3, 1, 7], [2, 0])
    assert all(array.is_pinned() for array in batch.arrays.values())
    assert same_bits(batch.decode("cuda").cpu(), one.read_encoded([3, 1, 7], [2, 0]).decode())


def test_a_refused_sample_from_the_gpu_stops_the_part(tmp_path):
    from small_store import append, identity, rows, writer

    from dflash_offline import store
    from dflash_offline.errors import StoreError

    samples = rows()
    store.create_or_open(tmp_path / "s", identity())
    with (
        pytest.raises(StoreError, match=f"sample {samples[2].sample_id}: .*not finite"),
        writer(tmp_path / "s", "part-00000", samples) as part,
    ):
        for i, row in enumerate(samples):
            row.hidden = row.hidden.cuda()
            if i == 2:
                row.hidden[4, 1, 3] = torch.nan
            append(part, row)
        part.commit()
    assert store.committed_parts(tmp_path / "s") == []

"""Capture on a GPU: compiled layers, one set of graphs for all shapes, rows through side streams into a store."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny_target, write_run_file
from test_capture import Run

from dflash_offline.capture import Forwarder, check_taps
from dflash_offline.config import StoreConfig
from dflash_offline.store import HiddenStateStore, PartWriter, create_or_open, staging
from dflash_offline.target import load_target, packed

pytestmark = pytest.mark.gpu


@pytest.fixture
def bigger_target(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    """Sizes that attention kernels and Triton like: head_dim 64, hidden 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "initializer_range": 0.05}
    return make_tiny_target(tmp_path / "bigger", tiny_tokenizer_dir, **sizes)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).median())


@pytest.mark.parametrize("packed", [True, False])
def test_compiled_layers_give_the_same_and_are_not_compiled_again(packed: bool, bigger_target: Path) -> None:
    torch._dynamo.reset()
    options = {"dtype": torch.bfloat16, "device": "cuda", "attention": "sdpa", "layer_ids": [0, 2, 4]}
    eager, target = load_target(bigger_target, **options), load_target(bigger_target, **options)
    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=512, say=print, packed=packed)
    assert forwarder.packs == packed
    generator = np.random.default_rng(0)
    graphs = []
    for rows, longest in ((4, 300), (1, 511), (7, 120), (16, 64), (2, 500), (1, 90)):
        ids = [generator.integers(3, 500, longest - i, dtype=np.int32) for i in range(rows)]
        for positions, batch in forwarder.run(ids, 0):
            for i in positions:
                got = batch.hidden(i)
                want = eager.capture(torch.from_numpy(ids[i].astype(np.int64))[None])[0]
                assert distance(got, want) < 0.02
                if len(graphs) < 2:
                    check_taps(target, torch.from_numpy(ids[i].astype(np.int64)), batch.row(i))
        graphs.append(forwarder.num_graphs)
    kinds = 1 if packed else 2
    assert graphs[kinds - 1 :] == [graphs[kinds - 1]] * (7 - kinds), "compiled again after the first batch of each kind"
    assert forwarder.padding == 0 or not packed


@pytest.mark.parametrize("codec", ["lossless", "bf16", "int8"])
def test_gpu_capture_into_a_store(codec: str, tmp_path: Path, bigger_target: Path, conversations: list[dict]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:24]), encoding="utf-8")
    store = {"codec": codec, "part_bytes": 2_000_000, "shard_bytes": 500_000}
    target = {"gpus": [0], "dtype": "bfloat16", "capture_layer_ids": [0, 2, 4]}
    made = Run(write_run_file(tmp_path / "run", model=bigger_target, files=[corpus], store=store, target=target))
    lines = made.capture()
    assert "cuda:0 (NVIDIA" in lines[0] and "GPU-" in lines[0]
    assert not any("padded" in line for line in lines) and made.extra(made.plan.parts[0].name)["packed"]
    eager = load_target(bigger_target, dtype=torch.bfloat16, device="cuda", attention="sdpa", layer_ids=[0, 2, 4])
    found = HiddenStateStore(made.store_path)
    assert len(found) == len(made.corpus)
    for i in range(len(found)):
        want = eager.capture(torch.from_numpy(np.asarray(found[i].input_ids, np.int64))[None])[0].cpu()
        assert distance(found[i].hidden_states(), want) < 0.03


@pytest.mark.parametrize("window", [None, 40])
def test_rows_attention_equals_attention_of_each_row(window: int | None) -> None:
    packed.register()
    lengths = [300, 1, 128, 77]
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(sum(lengths), 8, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    k, v = (torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    found = torch.ops.dflash_offline.rows_attention(q, k, v, bounds.cuda(), bounds, max(lengths), 0.125, window or 0)
    want = torch.ops.dflash_offline.rows_attention(*(x.cpu().float() for x in (q, k, v)), bounds, bounds, max(lengths), 0.125, window or 0)
    torch.testing.assert_close(found.cpu().float(), want, rtol=2e-2, atol=2e-2)


def test_long_rows_go_through_more_pieces_than_there_are_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", 1 << 14)
    monkeypatch.setattr(staging, "SLOTS", 2)
    monkeypatch.setattr(staging, "_slots", staging.Slots())
    path = tmp_path / "store.zarr"
    create_or_open(path, {"target": "none"})
    hidden = [torch.randn(length, 3, 256, device="cuda", dtype=torch.bfloat16) for length in (700, 5, 333)]
    settings = StoreConfig(codec="lossless", shard_bytes=300_000)
    options = {"store_settings": settings, "num_taps": 3, "hidden_size": 256, "num_tokens": 1038, "num_samples": 3, "threads": 4}
    with PartWriter(path, "part-00000", **options) as writer:
        for i, states in enumerate(hidden):
            ids = np.arange(len(states), dtype=np.int32)
            writer.append(i, bytes([i] * 32), 0, ids, np.ones(len(ids), np.uint8), states)
        writer.commit({})
    store = HiddenStateStore(path)
    for i, states in enumerate(hidden):
        assert torch.equal(store[i].hidden_states().view(torch.int16), states.cpu().view(torch.int16))


def test_cudnn_attention_is_ready_and_equals_the_flash_kernel() -> None:
    from transformers import LlamaConfig

    text = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    try:
        problem = packed.prepare_cudnn(text, device=torch.device("cuda", 0), dtype=torch.bfloat16, lengths=[1300, 4000])
        assert problem is None and packed._cudnn or torch.cuda.get_device_capability() < (9, 0)
    finally:
        packed._cudnn = False


def test_cudnn_attention_takes_values_that_are_part_of_longer_rows() -> None:
    from transformers import LlamaConfig

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is used from compute capability 9.0 on")
    text = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=2)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(4000, n, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (8, 2))
    v = torch.randn(4000, 768, device="cuda", dtype=torch.bfloat16, generator=generator)[:, 640:].unflatten(1, (2, 64))
    edges = torch.tensor([0, 1500, 4000], dtype=torch.int32)
    packed.register()
    arguments = (edges.cuda(), edges, 2500, 0.125, 0)
    flash = torch.ops.dflash_offline.rows_attention(q, k, v, *arguments)
    assert torch.equal(flash, torch.ops.dflash_offline.rows_attention(q, k, v.contiguous(), *arguments))
    try:
        assert packed.prepare_cudnn(text, device=q.device, dtype=q.dtype, lengths=[1500, 2500], value_row=768) is None
        found = torch.ops.dflash_offline.rows_attention(q, k, v, *arguments)
    finally:
        packed._cudnn = False
    assert distance(found.flatten(1), flash.flatten(1)) < 0.01


def test_merging_leaves_no_memory_taken(bigger_target: Path) -> None:
    options = {"dtype": torch.bfloat16, "device": "cuda", "attention": "sdpa", "layer_ids": [0, 2, 4]}
    target = load_target(bigger_target, **options)
    target.taps(torch.zeros(1, 8, dtype=torch.long))  # what libraries keep from their first call on
    before = torch.cuda.memory_allocated()
    target.compile_layers(dynamic=True)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert any("_MergedLinear" in type(module).__name__ for module in target.model.modules())

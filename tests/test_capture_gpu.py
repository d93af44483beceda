"""Capture on a GPU: compiled layers, one set of graphs for all shapes, rows through side streams into a store."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny_target, write_run_file
from test_capture import Run

from dflash_offline.capture import Forwarder, check_taps
from dflash_offline.store import HiddenStateStore
from dflash_offline.target import load_target

pytestmark = pytest.mark.gpu


@pytest.fixture
def bigger_target(tmp_path: Path, tiny_tokenizer_dir: Path) -> Path:
    """Sizes that attention kernels and Triton like: head_dim 64, hidden 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "initializer_range": 0.05}
    return make_tiny_target(tmp_path / "bigger", tiny_tokenizer_dir, **sizes)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).median())


def test_compiled_layers_give_the_same_and_are_not_compiled_again(bigger_target: Path) -> None:
    options = {"dtype": torch.bfloat16, "device": "cuda", "attention": "sdpa", "layer_ids": [0, 2, 4]}
    eager, target = load_target(bigger_target, **options), load_target(bigger_target, **options)
    forwarder = Forwarder(target, compile_layers=True, is_hybrid=False, vocab_size=512, say=print)
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
    assert graphs[1:] == [graphs[1]] * 5, "compiled again after the first batch of each kind"


@pytest.mark.parametrize("codec", ["lossless", "bf16", "int8"])
def test_gpu_capture_into_a_store(codec: str, tmp_path: Path, bigger_target: Path, conversations: list[dict]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:24]), encoding="utf-8")
    store = {"codec": codec, "part_bytes": 2_000_000, "shard_bytes": 500_000}
    target = {"gpus": [0], "dtype": "bfloat16", "capture_layer_ids": [0, 2, 4]}
    made = Run(write_run_file(tmp_path / "run", model=bigger_target, files=[corpus], store=store, target=target))
    lines = made.capture()
    assert "cuda:0 (NVIDIA" in lines[0] and "GPU-" in lines[0]
    eager = load_target(bigger_target, dtype=torch.bfloat16, device="cuda", attention="sdpa", layer_ids=[0, 2, 4])
    found = HiddenStateStore(made.store_path)
    assert len(found) == len(made.corpus)
    for i in range(len(found)):
        want = eager.capture(torch.from_numpy(np.asarray(found[i].input_ids, np.int64))[None])[0].cpu()
        assert distance(found[i].hidden_states(), want) < 0.03

"""Every family of target: rows alone and in batches of 2, 7 and 20, padded and packed, by one replica and by three."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_run_file
from test_capture import Run, same_content
from test_target_families import FAMILIES, TAPS, V, load, save_model

from dflash_offline.capture import Forwarder, Replica
from dflash_offline.config.target import TargetConfig
from dflash_offline.progress import Progress
from dflash_offline.store import HiddenStateStore
from dflash_offline.target import Target, facts, packing_obstacle
from dflash_offline.target.packed import obstacle, row_by_row

LENGTHS = [30, 29, 21, 20, 20, 17, 13, 12, 9, 8, 8, 7, 5, 4, 3, 3, 2, 2, 2, 1]
PACKED = {"llama", "llama-tied", "qwen2", "qwen3", "mistral-window", "gemma3-text", "qwen3-moe", "qwen3-vl", "gemma3"}


def rows() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(4, V, length, dtype=np.int32) for length in LENGTHS]


def captured(forwarder: Forwarder, size: int) -> list[list[torch.Tensor]]:
    every, found = rows(), []
    for start in range(0, len(every), size):
        for positions, batch in forwarder.run(every[start : start + size], bucket=0):
            found.extend([tap.clone() for tap in batch.row(i)] for i in range(len(positions)))
    return found


def plain_rows(target: Target) -> list[list[torch.Tensor]]:
    """``hidden_states[i + 1]`` of a plain forward of each row alone."""
    found = [target.plain_hidden_states(torch.from_numpy(row.astype(np.int64))[None]) for row in rows()]
    return [[states[layer_id + 1][0] for layer_id in TAPS] for states in found]


def assert_equal(found: list[list[torch.Tensor]], plain: list[list[torch.Tensor]], tolerance: float = 1e-5) -> None:
    """Equal to so much of the row's RMS."""
    for got, want in ((a, b) for x, y in zip(found, plain, strict=True) for a, b in zip(x, y, strict=True)):
        assert got.shape == want.shape and (got - want).abs().max() <= tolerance * want.pow(2).mean().sqrt()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_same_in_every_batch(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    target, known, said = load(tmp_path, layer_ids=TAPS), facts(tmp_path), []
    section = TargetConfig(model="m", dtype="float32", gpus="cpu", attention=target.model.config._attn_implementation)
    obstacle = packing_obstacle(tmp_path, section)
    assert (obstacle is None) == (family in PACKED), obstacle
    plain, again = plain_rows(target), None
    tolerance = 2e-5 if known.is_hybrid else 1e-5  # a recurrence over chunks rounds more, and these random weights amplify
    for packed in (False, True):
        options = {"compile_layers": False, "is_hybrid": known.is_hybrid, "vocab_size": V, "say": said.append}
        forwarder = Forwarder(target, packed=packed and obstacle is None, **options)
        assert forwarder.packs == (packed and family in PACKED)
        for size in (1, 2, 7, 20):
            assert_equal(found := captured(forwarder, size), plain, tolerance)
            again = found if size == 7 else again
        assert_equal(captured(forwarder, 7), again, 0.0)
        assert forwarder.padding == 0 or not forwarder.packs
    assert not said


@pytest.mark.parametrize("family", ["gemma2", "qwen3.5-text", "qwen3-next", "falcon-h1"])
def test_what_cannot_be_packed_is_found_out_even_if_it_is_asked_for(family: str, tmp_path: Path) -> None:
    """A state over tokens, a soft cap: what the configuration does not say, trying it out does."""
    save_model(tmp_path, family)
    target, said = load(tmp_path, layer_ids=TAPS), []
    known = facts(tmp_path)
    forwarder = Forwarder(target, packed=True, compile_layers=False, is_hybrid=known.is_hybrid, vocab_size=V, say=said.append)
    assert not forwarder.packs and said[0].startswith("rows are padded, not packed: ")
    assert_equal(captured(forwarder, 7), plain_rows(target), 2e-5)


def test_a_kernel_of_few_lengths_gives_each_row_its_own_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(100, n, 8, generator=generator) for n in (4, 2))
    v = torch.randn(100, 64, generator=generator)[:, 48:].unflatten(1, (2, 8))  # part of longer rows
    edges, lengths = [0, 37, 38, 90, 100], []

    def attention(*three: torch.Tensor) -> torch.Tensor:
        lengths.append(three[0].shape[2])
        assert three[2].stride()[1:] == (8, 64, 1), "a kernel is chosen by strides too: the last row's must be those of the others"
        return plain(*three)

    def plain(*three: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True, enable_gqa=True)

    want = row_by_row(q, k, v, edges, attention, step=1)
    torch.testing.assert_close(row_by_row(q, k, v.contiguous(), edges, plain, step=1), want)
    found = row_by_row(q, k, v, edges, attention, step=16)
    assert lengths == [37, 1, 52, 10, 48, 16, 64, 16]
    torch.testing.assert_close(found, want)


def test_what_speaks_against_packing_is_named() -> None:
    from transformers import LlamaConfig

    def found(*, dtype: str = "bfloat16", on_gpu: bool = True, attention: str = "sdpa", **changes: Any) -> str | None:
        return obstacle(LlamaConfig(**({"head_dim": 64} | changes)), attention=attention, dtype=dtype, on_gpu=on_gpu)

    assert found() is None and found(dtype="float32", on_gpu=False) is None
    assert "float32 on a GPU" in found(dtype="float32")
    assert "eager" in found(attention="eager")
    assert "300 channels" in found(head_dim=300) and found(head_dim=300, on_gpu=False) is None
    assert "longest row" in found(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "chunks" in found(attention_chunk_size=64)
    assert "not causal" in found(use_bidirectional_attention=True)
    assert "compressed" in found(kv_lora_rank=8)


@pytest.mark.parametrize("family", ["qwen3-moe", "mistral-window", "qwen3.5-text", "gemma2"])
def test_three_replicas_give_what_one_gives(family: str, tmp_path: Path, tiny_tokenizer_dir: Path, conversations: list[dict]) -> None:
    """Packed, with windows, a state over tokens, padded: three replicas at once, each with its own target, share the parts."""
    folder, corpus = tmp_path / "target", tmp_path / "corpus.jsonl"
    save_model(folder, family, vocab_size=512)
    shutil.copytree(tiny_tokenizer_dir, folder, dirs_exist_ok=True)
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:16]), encoding="utf-8")
    section = {"capture_layer_ids": TAPS, "attention": "eager" if family == "gemma2" else "sdpa", "replicas": 3}
    sizes = {"part_bytes": 100_000, "shard_bytes": 30_000}
    made = Run(write_run_file(tmp_path / "run", model=folder, files=[corpus], target=section, store=sizes))
    assert made.plan.packed == (family in PACKED) and len(made.plan.parts) >= 6
    made.capture()
    one = made.content()
    assert len(one) == len(made.corpus) == 16
    made.begin_again()
    with ThreadPoolExecutor(3) as threads:
        options = {"capture_key": made.key, "replicas": 3}
        replicas = [Replica(made.config, replica=i, progress=Progress(None), **options) for i in range(3)]
        list(threads.map(Replica.run, replicas))
    assert same_content(made.content(), one)
    assert len({made.extra(part.name)["replica"] for part in made.plan.parts}) > 1
    target = load(folder, layer_ids=TAPS)
    store = HiddenStateStore(made.store_path)
    for i in range(0, len(store), 5):
        plain = target.plain_hidden_states(torch.from_numpy(np.asarray(store[i].input_ids, np.int64))[None])
        for k, layer_id in enumerate(TAPS):
            want = plain[layer_id + 1][0]
            assert ((store[i].hidden_states()[:, k].float() - want).abs() <= want.abs() * 2**-8 + 2e-5 * want.pow(2).mean().sqrt()).all()

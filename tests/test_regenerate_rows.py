"""Rows that are decoded together, and how their tokens are drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_offline.regenerate.decoding import Drawing, RowDecoder, check_rows
from dflash_offline.regenerate.drawing import next_tokens, uniforms
from dflash_offline.target import load_target

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return load_target(tiny_target, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[], keep_head=True).model


def test_self_check_tells_right_rows_from_wrong_ones(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_offline.regenerate import row_attention

    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41]]
    distance, token_bytes = check_rows(model, prompts, attention="sdpa")
    assert distance < 1e-4 and token_bytes == 4 * 2 * 2 * 16 * 4
    right = row_attention.one_token_attention

    def one_short(query: Any, keys: Any, values: Any, lengths: Any, scaling: float) -> Any:
        return right(query, keys, values, (lengths - 1).clamp_min(1), scaling)

    monkeypatch.setattr(row_attention, "one_token_attention", one_short)
    assert check_rows(model, prompts, attention="sdpa")[0] > 0.2


def test_rows_enter_and_leave_without_disturbing_others(model: Any) -> None:
    def alone(ids: list[int], most: int) -> list[int]:
        ids = list(ids)
        start = len(ids)
        with torch.inference_mode():
            for _ in range(most):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[start:]

    prompts = {0: [5, 6, 7], 1: [9] * 11, 2: [42], 3: [300, 301, 302, 303]}
    most = {0: 4, 1: 9, 2: 7, 3: 5}
    wanted = {name: alone(prompts[name], most[name]) for name in prompts}
    decoder = RowDecoder(model, num_rows=3, length=32, steps=3, stop_ids=[-1], drawing=Drawing())
    try:
        decoder.admit([2, 0], [prompts[0], prompts[1]], most_tokens=[4, 9], keys=[0, 0])
        found: dict[int, list[int]] = {name: [] for name in prompts}
        at = {2: 0, 0: 1}
        for turn in range(8):
            decoder.launch()
            launched = dict(at)
            if turn == 1:  # behind the launched steps, into the row that the first launches emptied
                at[1] = 2
                decoder.admit([1], [prompts[2]], most_tokens=[7], keys=[0])
            written, active = decoder.collect()
            for row, name in launched.items():
                found[name] += [int(token) for token in written[:, row] if token >= 0]
                if not active[row]:
                    del at[row]
                    if name == 0:
                        at[row] = 3
                        decoder.admit([row], [prompts[3]], most_tokens=[5], keys=[0])
        assert found == wanted and not at
    finally:
        from dflash_offline.regenerate.row_attention import set_attention

        set_attention(model, "sdpa")


def test_stop_tokens_end_a_row_at_once(model: Any) -> None:
    from dflash_offline.regenerate.row_attention import set_attention

    try:
        free = RowDecoder(model, num_rows=1, length=32, steps=8, stop_ids=[-1], drawing=Drawing())
        free.admit([0], [[5, 6, 7]], most_tokens=[8], keys=[0])
        free.launch()
        tokens = free.collect()[0][:, 0].tolist()
        stopping = RowDecoder(model, num_rows=1, length=32, steps=8, stop_ids=[tokens[3], 999], drawing=Drawing())
        stopping.admit([0], [[5, 6, 7]], most_tokens=[8], keys=[0])
        stopping.launch()
        written, active = stopping.collect()
        first = tokens.index(tokens[3])
        assert written[:, 0].tolist() == tokens[: first + 1] + [-1] * (7 - first) and not active[0]
    finally:
        set_attention(model, "sdpa")


# ---------------------------------------------------------------- drawing


def test_uniforms_are_uniform_and_their_own() -> None:
    keys_, positions = torch.arange(400).repeat_interleave(100), torch.arange(100).repeat(400)
    drawn = uniforms(keys_, positions)
    assert drawn.min() >= 0 and drawn.max() < 1 and len(drawn.unique()) > 39_000
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    assert ((counts - 2000).abs() < 250).all()
    assert torch.equal(uniforms(keys_[7:8], positions[7:8]), drawn[7:8])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (0.8, 0.35)])
def test_draws_follow_the_distribution(temperature: float, top_p: float) -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.0, -8.0])
    probabilities = torch.softmax(logits / temperature, -1)
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept = torch.zeros(6).index_fill(0, order[before < top_p], 1)
    wanted = probabilities * kept / (probabilities * kept).sum()
    rows = 40_000
    drawn = next_tokens(
        logits.expand(rows, -1), temperature=temperature, top_p=top_p, keys=torch.arange(rows), positions=torch.full((rows,), 17)
    )
    found = torch.bincount(drawn, minlength=6) / rows
    assert (found[kept == 0] == 0).all()
    assert ((found - wanted).abs() < 4 * (wanted * (1 - wanted) / rows).sqrt() + 1e-9).all()


def test_greedy_takes_the_most_likely() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(7, dtype=torch.long)
    assert torch.equal(next_tokens(logits, temperature=0.0, top_p=0.5, keys=zeros, positions=zeros), logits.argmax(-1))

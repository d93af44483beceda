"""Batches: composition does not matter, memory running out halves them, targets that cannot be padded are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_offline.capture import Forwarder, check_padding, check_taps
from dflash_offline.errors import TargetError
from dflash_offline.target import Target, load_target


@pytest.fixture
def target(tiny_target: Path) -> Target:
    return load_target(tiny_target, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 2])


def make_forwarder(target: Target, **options: Any) -> tuple[Forwarder, list[str]]:
    lines: list[str] = []
    return Forwarder(target, **({"compile_layers": True, "is_hybrid": False, "vocab_size": 512, "say": lines.append} | options)), lines


def make_rows(lengths: list[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 500, length, dtype=np.int32) for length in lengths]


def run_rows(forwarder: Forwarder, rows: list[np.ndarray], size: int) -> list[torch.Tensor]:
    """Tapped states ``[T, K, H]`` in float32 of every row, run ``size`` rows at a time."""
    found = []
    for start in range(0, len(rows), size):
        for positions, batch in forwarder.run(rows[start : start + size], bucket=0):
            found.extend(torch.stack(batch.row(i), 1) for i in range(len(positions)))
    return found


@pytest.mark.parametrize("size", [2, 7, 20])
def test_rows_alone_equal_rows_in_batches(target: Target, size: int) -> None:
    rows = make_rows([60, 59, 41, 40, 40, 33, 21, 20, 9, 8, 8, 7, 5, 4, 3, 3, 2, 2, 2, 2])
    forwarder, _ = make_forwarder(target)
    alone, together = run_rows(forwarder, rows, 1), run_rows(forwarder, rows, size)
    assert [len(a) for a in together] == [len(row) for row in rows]
    for a, b in zip(alone, together, strict=True):
        assert ((a - b).abs().amax(-1) / a.pow(2).mean(-1).sqrt()).max() < 1e-5
    again = run_rows(forwarder, rows, size)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True)), "the same batch must give the same bits"


@pytest.mark.parametrize("size", [2, 7, 20])
def test_packed_rows_equal_rows_alone(target: Target, size: int) -> None:
    rows = make_rows([60, 59, 41, 40, 40, 33, 21, 20, 9, 8, 8, 7, 5, 4, 3, 3, 2, 2, 2, 2])
    forwarder, lines = make_forwarder(target, packed=True)
    assert forwarder.packs and not lines
    alone, together = run_rows(make_forwarder(target)[0], rows, 1), run_rows(forwarder, rows, size)
    assert [len(a) for a in together] == [len(row) for row in rows] and forwarder.padding == 0
    for a, b in zip(alone, together, strict=True):
        assert ((a - b).abs().amax(-1) / a.pow(2).mean(-1).sqrt()).max() < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(together, run_rows(forwarder, rows, size), strict=True))


def test_out_of_memory_halves_packed_batches(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder, lines = make_forwarder(target, packed=True)
    rows, taps, sizes = make_rows([40, 30, 20, 10]), target.packed_taps, []
    want = run_rows(forwarder, rows, 4)

    def limited(batch: list[np.ndarray]) -> list[torch.Tensor]:
        sizes.append([len(row) for row in batch])
        if sum(map(len, batch)) > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taps(batch)

    monkeypatch.setattr(target, "packed_taps", limited)
    found = run_rows(forwarder, rows, 4)
    assert sizes == [[40, 30, 20, 10], [40], [30, 20]] + [[10]] and forwarder.limits == {0: 50}
    assert lines == ["out of memory with 4 rows of up to 40 tokens: bucket 0 goes on with at most 50 tokens a batch instead of 100"]
    assert forwarder.make_room(0, [30, 20]) and forwarder.limits == {0: 25}
    assert forwarder.make_room(0, [40, 30]) and forwarder.limits == {0: 25}, "a batch from before the last halving changes nothing"
    assert not forwarder.make_room(0, [40])
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a, b)


def test_target_that_cannot_be_packed_is_padded_and_says_why(target: Target) -> None:
    target.layers[0] = Leaking(target.layers[0])
    forwarder, lines = make_forwarder(target, packed=True)
    assert not forwarder.packs and lines[0].startswith("rows are padded, not packed: packed rows come out")
    (lengths,) = [batch.lengths for _, batch in forwarder.run(make_rows([9, 5]), bucket=0)]
    assert lengths == [9, 5] and forwarder.padded_tokens == 18


def test_padding_share_is_counted(target: Target) -> None:
    forwarder, _ = make_forwarder(target)
    run_rows(forwarder, make_rows([10, 5]), 2)
    assert (forwarder.tokens, forwarder.padded_tokens, forwarder.padding) == (15, 20, 0.25)


def test_out_of_memory_halves_the_bucket(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    taps, sizes = target.taps, []

    def limited(input_ids: torch.Tensor) -> list[torch.Tensor]:
        sizes.append(len(input_ids))
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taps(input_ids)

    monkeypatch.setattr(target, "taps", limited)
    forwarder, lines = make_forwarder(target)
    rows = make_rows([9] * 8)
    found = run_rows(forwarder, rows, 8)
    assert sizes == [8, 4, 2, 2, 2, 2] and forwarder.limits == {0: 18}
    assert len(lines) == 2 and "bucket 0 goes on with at most 18 tokens" in lines[-1]
    monkeypatch.undo()
    for a, b in zip(found, run_rows(make_forwarder(target)[0], rows, 8), strict=True):
        torch.testing.assert_close(a, b)


def test_single_row_that_does_not_fit_is_an_error(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(input_ids: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target, "taps", never)
    with pytest.raises(TargetError, match="a single row of 9 tokens"):
        run_rows(make_forwarder(target)[0], make_rows([9] * 3), 3)


class Leaking(torch.nn.Module):
    """A layer whose every token sees the mean of its row, padding included."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.layer(hidden_states, **kwargs) + hidden_states.mean(1, keepdim=True)


def test_target_that_padding_reaches_gets_rows_of_equal_length(target: Target) -> None:
    assert check_padding(target, 512)
    target.layers[0] = Leaking(target.layers[0])
    assert not check_padding(target, 512)
    forwarder, lines = make_forwarder(target, is_hybrid=True)
    assert "only rows of equal length" in lines[0]
    batches = [batch.lengths for _, batch in forwarder.run(make_rows([9, 9, 8, 5, 5, 5]), bucket=0)]
    assert batches == [[9, 9], [8], [5, 5, 5]] and forwarder.padding == 0


def test_self_check_passes_and_names_a_shifted_layer(target: Target) -> None:
    ids = torch.arange(3, 50)
    taps = [tap[0] for tap in target.taps(ids[None])]
    assert check_taps(target, ids, taps) < 1e-5
    shifted = [target.plain_hidden_states(ids[None])[layer_id][0] for layer_id in target.layer_ids]
    with pytest.raises(TargetError, match=r"tap of layer 0 .* nearest to hidden_states\[0\]"):
        check_taps(target, ids, shifted)
    with pytest.raises(TargetError, match="layer 0"):
        check_taps(target, ids, [tap.roll(1, 0) for tap in taps])
    with pytest.raises(TargetError, match="layer 2"):
        check_taps(target, ids, [taps[0], torch.full_like(taps[1], float("nan"))])

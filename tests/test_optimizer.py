"""Flat weights, AdamW on them, schedules; gradient sums over ranks are in test_train_ranks."""

import numpy as np
import pytest
import torch
from tiny_drafters import BLOCK, tiny_shape
from torch import nn

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import Drafter
from dflash_offline.optimizer import AdamW, Shard, Weights, lr_at, noise_at, state_tensors
from dflash_offline.train.ranks import GradientSum, Ranks

CPU = torch.device("cpu")


def make(seed: int = 0, **options: object) -> tuple[nn.Module, Weights]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return module, Weights(module, device=CPU, dtype=torch.float32, **options)


def backward(module: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    loss = module(torch.randn(11, 5, generator=generator)).square().sum()
    loss.backward()
    return loss.detach()


def test_updates_are_those_of_torch_adamw_with_clipping() -> None:
    module, weights = make()
    reference = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    reference.load_state_dict(module.state_dict())
    mine = AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(5):
        loss = backward(module, 2 * step) + backward(module, 2 * step + 1)  # two micro-batches
        norm = mine.update(lr=0.01 * (step + 1), clip=0.5, weight_sum=torch.tensor(22.0), loss_sum=loss)
        weights.refresh()
        for group in theirs.param_groups:
            group["lr"] = 0.01 * (step + 1)
        theirs.zero_grad()
        backward(reference, 2 * step)
        backward(reference, 2 * step + 1)
        for parameter in reference.parameters():
            parameter.grad /= 22.0
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
        assert float(norm) == pytest.approx(float(expected), rel=1e-5)
        for one, other in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert mine.steps_taken == 5


@pytest.mark.parametrize("case", ["loss", "gradient", "no weight"])
def test_a_step_that_must_not_count_changes_nothing(case: str) -> None:
    module, weights = make()
    optimizer = AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)
    loss = backward(module, 0)
    optimizer.update(lr=0.1, clip=1.0, weight_sum=torch.tensor(11.0), loss_sum=loss)
    before = [flat.clone() for flat in (weights.master, optimizer.first_moment, optimizer.second_moment)]
    loss = backward(module, 1)
    if case == "gradient":
        weights.gradient[3] = float("inf")
    norm = optimizer.update(
        lr=0.1,
        clip=1.0,
        weight_sum=torch.tensor(0.0 if case == "no weight" else 11.0),
        loss_sum=loss * float("nan") if case == "loss" else loss,
    )
    assert all(torch.equal(*pair) for pair in zip(before, (weights.master, optimizer.first_moment, optimizer.second_moment), strict=True))
    assert optimizer.steps_taken == 1 and not weights.gradient.any()
    assert bool(norm.isfinite()) == (case == "no weight")


def test_compute_copies_follow_masters_and_average() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    weights = Weights(module, device=CPU, dtype=torch.bfloat16, ema=0.5)
    assert module.weight.dtype == torch.bfloat16 and weights.master.dtype == torch.float32
    assert torch.equal(module.weight.flatten(), weights.master[:16].bfloat16())
    weights.master += 1
    weights.average(100)
    torch.testing.assert_close(weights.final, weights.master - 0.5)
    weights.refresh(averaged=True)
    assert torch.equal(module.weight.flatten(), weights.final[:16].bfloat16())
    weights.refresh()
    assert torch.equal(module.weight.flatten(), weights.master[:16].bfloat16())
    module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is None and weights.gradient[:16].eq(2).all()


def test_early_average_forgets_the_initial_weights() -> None:
    _, weights = make(ema=0.999)
    weights.master.fill_(3.0)
    for step in range(1, 200):
        weights.average(step)
    assert (weights.final - 3.0).abs().max() < 1e-4


def test_buckets_cover_every_parameter_once() -> None:
    _, weights = make()
    for size in (4, 100, 1 << 20):
        buckets = GradientSum(weights, Ranks(), bucket_bytes=size).buckets
        assert sorted(index for first, last in buckets for index in range(first, last)) == list(range(len(weights.names)))


def test_most_gradients_go_out_before_the_backward_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real drafter's backward pass: only what the context passes through has to wait for its end."""
    drafter = Drafter(tiny_shape(num_layers=3, layer_windows=(None,) * 3))
    weights = Weights(drafter, device=CPU, dtype=torch.float32)
    gradients = GradientSum(weights, Ranks(0, 2, joined=True), bucket_bytes=16 << 10)
    seen: list[tuple[str, int]] = []

    def send(self: GradientSum) -> None:
        seen.append(("sent", self._next))
        self._next += 1

    monkeypatch.setattr(GradientSum, "_send", send)
    made = weights.on_gradient
    weights.on_gradient = lambda index: (seen.append(("made", index)), made(index))
    blocks = BlockLayout.pack([20], [np.array([3, 9])], block_size=BLOCK)
    gradients.start()
    drafter(torch.randn(20, 2 * 64), torch.randn(2, BLOCK, 64), blocks).sum().backward()
    assert sorted(index for what, index in seen if what == "made") == list(range(len(weights.names)))
    assert [number for what, number in seen if what == "sent"] == list(range(len(gradients.buckets)))

    def sent_before(name: str) -> set[int]:
        return {number for what, number in seen[: seen.index(("made", weights.names.index(name)))] if what == "sent"}

    third = {gradients.bucket_of[index] for index, name in enumerate(weights.names) if "layers.2.mlp" in name}
    assert third <= sent_before("layers.1.mlp.down_proj.weight"), "a layer's gradients wait for the layers before it"
    early = sum(
        weights.offsets[last] - weights.offsets[first] for first, last in map(gradients.buckets.__getitem__, sent_before("fc.weight"))
    )
    assert early > 0.6 * weights.numel


def test_shards_divide_what_the_optimiser_keeps_and_train_alike() -> None:
    module, weights = make(ema=0.9)
    optimizer = AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)
    whole = sum(tensor.nbytes for tensor in state_tensors(weights, optimizer).values())
    shards = []
    for index in range(3):
        twin, part = make(ema=0.9, shard=Shard(index, 3, lambda whole, own: None))
        shards.append((twin, part, AdamW(part, betas=(0.9, 0.95), weight_decay=0.1)))
    for _, part, own in shards:
        kept = sum(tensor.nbytes for tensor in state_tensors(part, own).values())
        inner = sum(moment.nbytes for group in own._groups for moment in (*group.first_moments, *group.second_moments))
        assert kept <= -(-whole // 3) + 4 * 4 * 3 and inner <= kept / 2 + 16
    for step in range(3):
        for each, (flat, adam) in [(module, (weights, optimizer)), *((twin, (part, own)) for twin, part, own in shards)]:
            loss = backward(each, step)
            adam.update(lr=0.1, clip=1.0, weight_sum=torch.tensor(11.0), loss_sum=loss)
            flat.average(step + 1)
        weights.refresh()
        joined = torch.cat([part.master for _, part, _ in shards])[: weights.numel]
        torch.testing.assert_close(joined, weights.master, rtol=1e-6, atol=1e-7)
        averages = torch.cat([part.ema for _, part, _ in shards])[: weights.numel]
        torch.testing.assert_close(averages, weights.ema, rtol=1e-6, atol=1e-7)
        for _, part, _ in shards:
            part.compute[: weights.numel].copy_(joined)


def test_cosine() -> None:
    rates = [lr_at(step, total=100, peak=1.0, warmup_ratio=0.04, schedule="cosine") for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[52] == pytest.approx(0.55, abs=0.02)


def test_wsd() -> None:
    rates = [lr_at(step, total=100, peak=2.0, warmup_ratio=0.04, schedule="wsd") for step in range(100)]
    assert rates[3:80] == [2.0] * 77 and rates[-1] == pytest.approx(0.2) and rates[89] == pytest.approx(2.0 * (1 - 0.9 * 0.5))


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_very_short_runs_have_a_positive_rate(total: int, schedule: str) -> None:
    rates = [lr_at(step, total=total, peak=1.0, warmup_ratio=0.04, schedule=schedule) for step in range(total)]
    assert all(0.09 < rate <= 1.0 for rate in rates)


def test_noise_schedules() -> None:
    assert [noise_at(step, total=5, peak=0.4, schedule="constant") for step in (0, 4)] == [0.4, 0.4]
    assert [noise_at(step, total=5, peak=0.4, schedule="linear") for step in (0, 2, 4)] == pytest.approx([0.4, 0.2, 0.0])
    assert [noise_at(step, total=5, peak=0.4, schedule="cosine") for step in (0, 2, 4)] == pytest.approx([0.4, 0.2, 0.0])

"""The objective against a slow, straightforward reference; anchors, labels, streaks, memory, empty batches."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_offline.errors import TrainError
from dflash_offline.objective import (
    FrozenHead,
    Objective,
    anchor_candidates,
    block_labels,
    block_loss,
    decay,
    dpace_weights,
    draw_anchors,
    streaks,
)

BLOCKS, SIZE, HIDDEN, VOCABULARY = 7, 5, 12, 61


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SIZE, HIDDEN, generator=generator)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCABULARY, (BLOCKS, SIZE), generator=generator)
    supervised = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
    supervised[:, 0] = False
    supervised[1, 3:] = False  # cut by the end of its sequence
    supervised[2, 1:] = False  # nothing at all
    teacher = torch.randn(BLOCKS, SIZE - 1, HIDDEN, generator=generator)
    return hidden, head, labels, supervised, teacher


def slow_loss(hidden, head, labels, supervised, teacher, objective):
    """Block by block, slot by slot, as the formulas are written."""
    loss, weight_sum, correct = torch.zeros(()), torch.zeros(()), torch.zeros(labels.shape, dtype=torch.bool)
    for block in range(labels.shape[0]):
        log_probabilities = torch.log_softmax(hidden[block] @ head.T, -1)
        slots = [k for k in range(1, SIZE) if supervised[block, k]]
        survival, product = {}, 1.0
        for k in range(1, SIZE):
            q = log_probabilities[k, labels[block, k]].exp().item()
            product *= (1 - objective.dpace_alpha) * q + objective.dpace_alpha if supervised[block, k] else 1.0
            survival[k] = product
        for k in slots:
            weight = math.exp(-(k - 1) / objective.gamma) if objective.loss == "ce" else sum(survival[j] for j in slots if j >= k)
            term = -log_probabilities[k, labels[block, k]]
            if objective.kl_weight:
                wanted = teacher[block, k - 1] @ head.T
                if cap := objective.teacher_softcap:
                    wanted = cap * torch.tanh(wanted / cap)
                wanted = torch.log_softmax(wanted, -1)
                divergence = (wanted.exp() * (wanted - log_probabilities[k])).sum()
                term = (1 - objective.kl_weight) * term + objective.kl_weight * divergence
            loss, weight_sum = loss + weight * term, weight_sum + weight
            correct[block, k] = log_probabilities[k].argmax() == labels[block, k]
    return loss, weight_sum, correct


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2 * VOCABULARY * 4, 1 << 30], ids=["block-chunks", "two-block-chunks", "whole"])
@pytest.mark.parametrize(
    "objective",
    [
        Objective(gamma=3.0),
        Objective("dpace", dpace_alpha=0.3),
        Objective(gamma=2.0, kl_weight=0.7),
        Objective("dpace", kl_weight=1.0),
        Objective(gamma=2.0, kl_weight=0.5, teacher_softcap=1.5),
    ],
    ids=["ce", "dpace", "kl", "dpace-kl", "capped-kl"],
)
def test_loss_and_gradient_equal_the_slow_reference(objective, chunk_bytes):
    hidden, head, labels, supervised, teacher = example()
    slow_hidden, fast_hidden = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, weight_sum, correct = slow_loss(slow_hidden, head, labels, supervised, teacher, objective)
    (loss / weight_sum).backward()
    out = block_loss(fast_hidden, head, labels, supervised, objective=objective, teacher_hidden=teacher, chunk_bytes=chunk_bytes)
    (out.loss_sum / out.weight_sum).backward()
    torch.testing.assert_close(out.loss_sum, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.weight_sum, torch.as_tensor(weight_sum), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast_hidden.grad, slow_hidden.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(out.correct, correct)
    assert (fast_hidden.grad[:, 0] == 0).all() and (fast_hidden.grad[2] == 0).all() and (fast_hidden.grad[1, 3:] == 0).all()


def test_per_slot_figures_match_the_softmax():
    hidden, head, labels, supervised, _ = example()
    out = block_loss(hidden, head, labels, supervised, objective=Objective())
    wanted = torch.log_softmax(hidden @ head.T, -1).gather(2, labels[..., None])[..., 0]
    torch.testing.assert_close(out.nll, torch.where(supervised, -wanted, 0.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.probability, torch.where(supervised, wanted.exp(), 0.0), rtol=1e-5, atol=1e-6)


def test_trained_slots_alone_and_live_blocks_alone_give_the_same():
    hidden, head, labels, supervised, _ = example()
    supervised[5:] = False
    whole = block_loss(hidden, head, labels, supervised, objective=Objective())
    leaf = hidden[:, 1:].clone().requires_grad_()
    short = block_loss(leaf, head, labels, supervised, objective=Objective(), num_live=5)
    short.loss_sum.backward()
    torch.testing.assert_close(short.loss_sum, whole.loss_sum)
    assert torch.equal(short.correct, whole.correct) and leaf.grad.shape == (BLOCKS, SIZE - 1, HIDDEN) and (leaf.grad[5:] == 0).all()


def test_sums_of_parts_equal_the_sum_of_the_whole():
    """Accumulating micro-batches and dividing once is one big batch: the normaliser is the step's, not the part's."""
    hidden, head, labels, supervised, _ = example()
    whole = block_loss(hidden, head, labels, supervised, objective=Objective("dpace"))
    parts = [
        block_loss(hidden[part], head, labels[part], supervised[part], objective=Objective("dpace")) for part in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    torch.testing.assert_close(sum(part.weight_sum for part in parts), whole.weight_sum)


@pytest.mark.parametrize("num_live", [0, None])
@pytest.mark.parametrize("objective", [Objective(), Objective("dpace")], ids=["ce", "dpace"])
def test_nothing_supervised_is_zero_and_finite(objective, num_live):
    hidden, head, labels, supervised, _ = example()
    leaf = hidden.clone().requires_grad_()
    out = block_loss(leaf, head, labels, torch.zeros_like(supervised), objective=objective, num_live=num_live)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0 and out.weight_sum.item() == 0 and not out.correct.any()
    assert (leaf.grad == 0).all()


def test_extreme_logits_stay_finite():
    hidden, head, labels, supervised, _ = example()
    leaf = (hidden * 1e4).requires_grad_()
    out = block_loss(leaf, head, labels, supervised, objective=Objective())
    out.loss_sum.backward()
    assert out.loss_sum.isfinite() and leaf.grad.isfinite().all()


def test_the_logits_never_exist_whole():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    blocks, vocabulary = 32, 2000
    hidden, head = torch.randn(blocks, SIZE, 8, requires_grad=True), torch.randn(vocabulary, 8)
    supervised = torch.ones(blocks, SIZE, dtype=torch.bool)
    supervised[:, 0] = False
    with Largest() as seen:
        out = block_loss(
            hidden, head, torch.zeros(blocks, SIZE, dtype=torch.long), supervised, objective=Objective(), chunk_bytes=4 * 4 * 4 * vocabulary
        )
        out.loss_sum.backward()
    assert 4 * 4 * vocabulary <= seen.elements <= blocks * (SIZE - 1) * vocabulary // 8


def test_perfect_predictions_have_full_streaks_and_a_gap_ends_one():
    hidden, head, labels, supervised, _ = example()
    head = torch.eye(VOCABULARY)
    hidden = torch.nn.functional.one_hot(labels, VOCABULARY).float() * 50
    supervised[:] = True
    supervised[:, 0] = False
    supervised[3, 2:] = False
    hidden[4, 1] = hidden[4, 1].roll(1)
    hidden[5, 3] = hidden[5, 3].roll(1)
    out = block_loss(hidden, head, labels, supervised, objective=Objective())
    assert streaks(out.correct, supervised).tolist() == [4, 4, 4, 1, 0, 2, 4]
    assert not out.correct[:, 0].any()


def test_a_streak_stops_at_the_first_unsupervised_slot_even_if_later_ones_are_right():
    correct = torch.tensor([[False, True, True, True, True]])
    supervised = torch.tensor([[False, True, False, True, True]])
    assert streaks(correct, supervised).item() == 1


def test_decay_is_the_papers():
    assert decay(4, 7.0).tolist() == pytest.approx([0.0, 1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


def test_dpace_weights_by_hand():
    weights = dpace_weights(torch.tensor([[0.5, 0.2, 0.9]]), torch.tensor([[True, True, False]]), 0.5)
    first, second = 0.75, 0.75 * 0.6
    assert weights[0].tolist() == pytest.approx([first + second, second, 0.0])


def test_labels_have_no_shift_and_stop_at_the_end_and_at_a_gap():
    ids = np.arange(100, 112, dtype=np.int32)
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], np.uint8)
    labels, supervised = block_labels(ids, mask, np.array([2, 3, 6, 10]), 5)
    assert supervised.astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert labels.tolist() == [[0, 103, 104, 0, 0], [0, 104, 0, 0, 0], [0, 107, 108, 109, 110], [0, 111, 0, 0, 0]]
    assert labels.dtype == np.int64 and supervised.dtype == bool


def test_no_anchor_gives_empty_labels():
    labels, supervised = block_labels(np.arange(5), np.ones(5), np.array([], np.int64), 4)
    assert labels.shape == supervised.shape == (0, 4)


def test_candidates_have_two_supervised_tokens_and_reach_the_answers_end():
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1])
    assert anchor_candidates(mask).tolist() == [1, 6, 7]
    assert anchor_candidates(np.array([1])).tolist() == [] and anchor_candidates(np.array([0, 0])).tolist() == []


def test_anchors_are_a_function_of_seed_epoch_and_sample_alone():
    mask = np.r_[np.zeros(20), np.ones(300)]
    drawn = draw_anchors(mask, 40, 1, 2, b"row")
    assert np.array_equal(drawn, draw_anchors(mask, 40, 1, 2, b"row"))
    assert len(set(drawn.tolist())) == 40 and (np.diff(drawn) > 0).all() and drawn.min() >= 20 and drawn.max() <= 318
    for other in (draw_anchors(mask, 40, 2, 2, b"row"), draw_anchors(mask, 40, 1, 3, b"row"), draw_anchors(mask, 40, 1, 2, b"other")):
        assert not np.array_equal(drawn, other)
    assert np.array_equal(draw_anchors(mask, 40, 1, -1, 7), draw_anchors(mask, 40, 1, -1, 7)), "evaluation anchors are fixed"
    assert len(draw_anchors(mask, 500, 1, 2, 3)) == 299, "all candidates when there are few"


def test_anchors_are_uniform_over_the_candidates():
    """Chi-square over many draws: 60 candidates, 6 drawn each time."""
    mask = np.ones(61)
    counts = np.zeros(60)
    for epoch in range(2000):
        counts[draw_anchors(mask, 6, 0, epoch, 5)] += 1
    expected = 2000 * 6 / 60
    # drawing without replacement shrinks the variance by 1 - 6/60; 99.99 % of chi-square with 59 degrees is below 110
    assert ((counts - expected) ** 2 / expected).sum() / (1 - 6 / 60) < 110
    assert counts[-1] > 100, "the last candidate is drawn too"


def test_fp8_head_is_refused_on_a_cpu():
    with pytest.raises(TrainError, match=r'\[train\] head_precision = "fp8" needs GPUs; with gpus = "cpu" use "bf16"'):
        FrozenHead(torch.randn(8, 8), precision="fp8")

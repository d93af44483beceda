"""Softmax over the vocabulary and the loss's gradient with respect to the logits, in place: two Triton kernels.

Both are bound by memory: the first reads the logits once, the second reads and overwrites them. They are two because
D-PACE weighs a slot by the probabilities of its whole block, which only the first knows. At 7,680 rows of 151,936 bf16
logits that is 7 GB, 1.6 ms at 4.3 TB/s.

With fp8 the gradient is written as float8 with one scale a row. The scale needs no extra pass: the largest entry of
p - onehot is the label's, 1 - p_label, because the other probabilities sum to that.

Legend: R rows of a chunk, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_offline.objective.head import FP8_LARGEST
from dflash_offline.objective.softmax import Statistics

LANES = 4096  # columns that one step of a row's loop takes
GRADIENT_COLUMNS = 8192
# one number a row is read of these: whether a chunk of them begins at a multiple of 16 bytes is no reason to compile again
_BY_ROW = ["labels", "weights", "normalisers", "teacher_normalisers", "multipliers"]


@triton.jit(do_not_specialize_on_alignment=["labels", "best_out", "nll_out", "normaliser_out", "divergence_out", "teacher_out"])
def _statistics_kernel(
    logits, teacher, labels, best_out, nll_out, normaliser_out, divergence_out, teacher_out, V, LANES: tl.constexpr, TEACHER: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    lanes = tl.arange(0, LANES)
    highest = tl.full([LANES], float("-inf"), tl.float32)  # every lane keeps its own running maximum and sum
    total = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    if TEACHER:
        teacher += row * V
        teacher_highest = tl.full([LANES], float("-inf"), tl.float32)
        teacher_total = tl.zeros([LANES], tl.float32)
        cross = tl.zeros([LANES], tl.float32)  # sum of exp(t - teacher_highest) * (t - x)
    for start in range(0, V, LANES):
        columns = start + lanes
        inside = columns < V
        x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.where(x > highest, columns, best)
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
        if TEACHER:
            t = tl.load(teacher + columns, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(teacher_highest, t)
            shrink, mass = tl.exp(teacher_highest - higher), tl.exp(t - higher)
            teacher_total = teacher_total * shrink + mass
            cross = cross * shrink + mass * tl.where(inside, t - x, 0.0)
            teacher_highest = higher
    top = tl.max(highest, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    label = tl.load(logits + tl.load(labels + row)).to(tl.float32)
    tl.store(best_out + row, tl.min(tl.where(highest == top, best, V), 0))
    tl.store(nll_out + row, normaliser - label)
    tl.store(normaliser_out + row, normaliser)
    if TEACHER:
        top = tl.max(teacher_highest, 0)
        share = tl.exp(teacher_highest - top)
        mass = tl.sum(teacher_total * share, 0)
        teacher_normaliser = top + tl.log(mass)
        tl.store(divergence_out + row, tl.sum(cross * share, 0) / mass - teacher_normaliser + normaliser)
        tl.store(teacher_out + row, teacher_normaliser)


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _gradient_kernel(
    logits,
    teacher,
    out,
    labels,
    weights,
    normalisers,
    teacher_normalisers,
    multipliers,
    V,
    kl,
    COLUMNS: tl.constexpr,
    TEACHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < V
    trained = columns < tl.where(tl.load(weights + row) == 0.0, 0, V)  # nothing is read for a row without weight
    x = tl.load(logits + row * V + columns, mask=trained, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - tl.load(normalisers + row)) - tl.where(columns == tl.load(labels + row), 1.0 - kl, 0.0)
    if TEACHER:
        t = tl.load(teacher + row * V + columns, mask=trained, other=float("-inf")).to(tl.float32)
        gradient -= kl * tl.exp(t - tl.load(teacher_normalisers + row))
    gradient = tl.where(trained, gradient * tl.load(multipliers + row), 0.0)
    tl.store(out + row * V + columns, gradient.to(out.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None = None) -> Statistics:
    """logits [R, V], labels [R] int64, teacher_logits [R, V]; all contiguous, logits are left as they are."""
    rows, vocabulary = logits.shape
    assert logits.is_contiguous() and (teacher_logits is None or teacher_logits.is_contiguous())
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    nll, normaliser = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    divergence, teacher = (None, None) if teacher_logits is None else (torch.empty_like(nll), torch.empty_like(nll))
    lanes = min(LANES, 1 << (vocabulary.bit_length() - 1))  # so that every lane has a column
    _statistics_kernel[(rows,)](
        logits, teacher_logits, labels, best, nll, normaliser, divergence, teacher, vocabulary,
        LANES=lanes, TEACHER=teacher is not None, num_warps=8,
    )  # fmt: skip
    return Statistics(best, nll, divergence, normaliser, teacher)


def gradient(
    logits: Tensor, found: Statistics, labels: Tensor, weights: Tensor, teacher_logits: Tensor | None, kl_weight: float, *, fp8: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the weighted loss: w (p - (1 - kl) onehot - kl p_target), written over the logits.

    With fp8 it goes to a float8 tensor instead, and the second result, [R, 1] float32, is what it must be multiplied by.
    """
    rows, vocabulary = logits.shape
    out, multipliers, scale = logits, weights, None
    if fp8:
        out = torch.empty_like(logits, dtype=torch.float8_e4m3fn)
        largest = ((1.0 - kl_weight) * -torch.expm1(-found.nll) + kl_weight).clamp(min=1e-9)
        multipliers, scale = FP8_LARGEST / largest, (weights * largest / FP8_LARGEST)[:, None]
    _gradient_kernel[(rows, triton.cdiv(vocabulary, GRADIENT_COLUMNS))](
        logits, teacher_logits, out, labels, weights, found.normaliser, found.teacher, multipliers, vocabulary, kl_weight,
        COLUMNS=GRADIENT_COLUMNS, TEACHER=teacher_logits is not None, num_warps=8,
    )  # fmt: skip
    return out, scale

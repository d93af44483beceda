"""Softmax over the vocabulary and the loss's gradient with respect to the logits, in place: the plain PyTorch form.

``kernels.py`` holds the same two functions for GPUs.

Legend: R rows of a chunk, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """What one pass over the logits found; float32 [R] except ``best``."""

    best: Tensor  # int64, the most likely token
    nll: Tensor  # cross-entropy of the label
    divergence: Tensor | None  # KL(target || drafter)
    normaliser: Tensor  # of the logits, in the form that gradient() of the same module wants
    teacher: Tensor | None  # of the target's logits, likewise


def statistics(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None = None) -> Statistics:
    """logits [R, V] float32 (overwritten by exp(logits - row maximum)), labels [R] int64, teacher_logits [R, V]."""
    highest, best = logits.max(-1)
    label = logits.gather(1, labels[:, None])[:, 0]
    teacher = cross = None
    if teacher_logits is not None:
        teacher_log = teacher_logits.log_softmax(-1)
        teacher = teacher_log.exp()
        cross = (teacher * (teacher_log - logits)).sum(-1)
    total = logits.sub_(highest[:, None]).exp_().sum(-1)
    normaliser = total.log() + highest
    return Statistics(best, normaliser - label, None if cross is None else cross + normaliser, total, teacher)


def gradient(
    logits: Tensor, found: Statistics, labels: Tensor, weights: Tensor, teacher_logits: Tensor | None, kl_weight: float, *, fp8: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradient [R, V] of the weighted loss: w (p - (1 - kl) onehot - kl p_target), written over the logits."""
    assert not fp8, "fp8 is for GPUs"
    logits.mul_((weights / found.normaliser)[:, None])
    if found.teacher is not None:
        logits.addcmul_(found.teacher, weights[:, None], value=-kl_weight)
    logits.scatter_add_(1, labels[:, None], ((kl_weight - 1.0) * weights)[:, None])
    return logits, None

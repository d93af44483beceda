"""The loss over the vocabulary, in chunks of rows; the logits of a micro-batch never exist whole.

At 512 blocks of 16 and a vocabulary of 152k, bf16 logits are 2.5 GB and their float32 softmax twice that. The head is
frozen, so the only gradient needed is that of its input: it is computed in the forward pass, chunk by chunk, from logits
that are overwritten by their own gradient. Backward only scales it. Two products in all, nothing recomputed.

Legend: N blocks, B slots of a block, R = rows of a chunk (whole blocks, slots 1 .. B - 1), V vocabulary, H hidden size.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dflash_offline.objective import softmax
from dflash_offline.objective.head import FrozenHead
from dflash_offline.objective.labels import decay, dpace_weights

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1280 << 20}


@dataclass(frozen=True)
class LossOutput:
    """Sums over a micro-batch. Normalise by the sum of ``weight_sum`` over the whole optimiser step."""

    loss_sum: Tensor  # [] float32, weighted, differentiable
    weight_sum: Tensor  # [] float32
    correct: Tensor  # [N, B] bool: the most likely token is the label; slot 0 False
    nll: Tensor  # [N, B] float32: cross-entropy, 0 where not supervised
    probability: Tensor  # [N, B] float32: of the label, 0 where not supervised


@dataclass(frozen=True)
class Objective:
    """Which loss.

    Attributes:
        loss: ``"ce"``: slots weigh exp(-(k - 1) / gamma); ``"dpace"``: by the drafter's own probabilities instead.
        gamma: decay of ``"ce"``.
        dpace_alpha: smoothing of ``"dpace"``.
        kl_weight: share of forward KL(target || drafter) at temperature 1, the rest being cross-entropy.
        teacher_softcap: the target's soft cap of its logits, x -> c tanh(x / c), where it has one.
    """

    loss: str = "ce"
    gamma: float = 7.0
    dpace_alpha: float = 0.5
    kl_weight: float = 0.0
    teacher_softcap: float | None = None

    def teacher_logits(self, rows: Tensor, head: Tensor) -> Tensor:
        """rows [R, H] for the head -> the target's own logits [R, V]."""
        logits = rows @ head.t()
        return logits if self.teacher_softcap is None else logits.div_(self.teacher_softcap).tanh_().mul_(self.teacher_softcap)


def block_loss(
    hidden: Tensor,
    head: FrozenHead | Tensor,
    labels: Tensor,
    supervised: Tensor,
    *,
    objective: Objective,
    teacher_hidden: Tensor | None = None,
    num_live: int | None = None,
    chunk_bytes: int | None = None,
) -> LossOutput:
    """Weighted loss of the blocks against their labels.

    Args:
        hidden: [N, B - 1, H] or [N, B, H] (slot 0 is ignored) after the drafter's final norm.
        head: the target's head, [V, H].
        labels, supervised: [N, B], as :func:`~dflash_offline.objective.labels.block_labels` gives them.
        teacher_hidden: [N, B - 1, H], needed with ``kl_weight``: row k - 1 is the target's last hidden state after its
            final norm at position p + k - 1, from which it predicts slot k.
        num_live: only blocks before it are looked at; the others are padding.
        chunk_bytes: bytes of the logits that exist at one time.

    Returns:
        Sums with gradient to ``hidden``. Without any supervised slot: a loss of 0, and gradients of 0.
    """
    head = FrozenHead(head) if isinstance(head, Tensor) else head
    assert objective.kl_weight == 0 or teacher_hidden is not None, "kl_weight needs teacher_hidden"
    count, size = labels.shape
    hidden = hidden[:, 1:] if hidden.shape[1] == size else hidden
    live = count if num_live is None else num_live
    rows = hidden[:live].reshape(-1, hidden.shape[-1])
    live_labels, live_supervised = labels[:live, 1:].reshape(-1), supervised[:live, 1:].reshape(-1)
    teacher = None if objective.kl_weight == 0 else teacher_hidden[:live].reshape(-1, hidden.shape[-1])
    budget = chunk_bytes or CHUNK_BYTES[hidden.device.type]
    chunk = chunk_rows(rows.shape[0], size - 1, head.weight.shape[0] * hidden.element_size(), budget)
    loss_sum, weight_sum, nll, correct = _LinearCrossEntropy.apply(
        rows, teacher, head, live_labels, live_supervised, objective, size - 1, chunk
    )

    def whole(values: Tensor) -> Tensor:
        out = values.new_zeros(count, size)
        out[:live, 1:] = values.view(live, size - 1)
        return out

    probability = torch.where(live_supervised, torch.exp(-nll), 0.0)
    nll = torch.where(live_supervised, nll, 0.0)
    return LossOutput(loss_sum, weight_sum, whole(correct), whole(nll), whole(probability))


def chunk_rows(rows: int, slots: int, row_bytes: int, budget: int) -> int:
    """Rows of a chunk: whole blocks, equal chunks, logits within ``budget`` bytes (at least one block)."""
    blocks = max(1, rows // slots)
    largest = max(1, budget // (row_bytes * slots))
    return -(-blocks // -(-blocks // largest)) * slots


class _LinearCrossEntropy(torch.autograd.Function):
    """rows [R, H] -> loss_sum, weight_sum, nll [R], correct [R]; R is all live rows here."""

    @staticmethod
    def forward(ctx, rows, teacher, head, labels, supervised, objective, slots, chunk):
        total, device = rows.shape[0], rows.device
        gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        nll, correct = torch.empty(total, device=device), torch.empty(total, dtype=torch.bool, device=device)
        loss_sum, weight_sum = torch.zeros((), device=device), torch.zeros((), device=device)
        slot_weights = decay(slots + 1, objective.gamma, device)[1:]
        functions = softmax_functions(device)
        for start in range(0, total, chunk):
            here = slice(start, min(start + chunk, total))
            tokens, trained = labels[here], supervised[here].view(-1, slots)
            logits = head.logits(rows[here])
            teacher_logits = None if teacher is None else objective.teacher_logits(teacher[here], head.weight)
            found = functions.statistics(logits, tokens, teacher_logits)
            nll[here], correct[here] = found.nll, (found.best == tokens) & supervised[here]
            if objective.loss == "dpace":
                weights = dpace_weights(torch.exp(-found.nll).view(-1, slots), trained, objective.dpace_alpha).flatten()
            else:
                weights = (trained * slot_weights).flatten()
            loss = found.nll if found.divergence is None else torch.lerp(found.nll, found.divergence, objective.kl_weight)
            loss_sum += (loss * weights).sum()
            weight_sum += weights.sum()
            if gradient is not None:
                fp8 = head.precision == "fp8"
                by_logits, scale = functions.gradient(logits, found, tokens, weights, teacher_logits, objective.kl_weight, fp8=fp8)
                head.input_gradient(by_logits, scale, gradient[here])
                del by_logits
            del logits, teacher_logits  # before the next chunk's, not after
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, nll, correct)
        return loss_sum, weight_sum, nll, correct

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None, None, None, None


def softmax_functions(device: torch.device) -> ModuleType:
    """The module with ``statistics`` and ``gradient`` for a kind of device."""
    if device.type == "cuda":
        from dflash_offline.objective import kernels

        return kernels
    return softmax

"""The token each slot must predict, what it weighs, and runs of correct slots.

Slot k of a block anchored at p predicts the token at p + k: same position, no shift. Slot 0 is known and not trained.
A slot is supervised when its token exists in the sequence, belongs to an answer, and no unsupervised token lies between
it and the anchor: what follows a gap (the next user turn) is another answer, which no drafter could know of.

Legend: T tokens of one sequence, N blocks, B slots of a block.
"""

import numpy as np
import torch
from torch import Tensor


def block_labels(input_ids: np.ndarray, loss_mask: np.ndarray, anchors: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What the blocks at ``anchors`` of one sequence must predict.

    Args:
        input_ids, loss_mask: [T].
        anchors: [N] positions of slot 0.

    Returns:
        labels int64 [N, B], 0 where nothing is supervised, and supervised bool [N, B], False in slot 0.
    """
    positions = np.asarray(anchors, np.int64)[:, None] + np.arange(block_size)
    exists, positions = positions < len(input_ids), np.minimum(positions, len(input_ids) - 1)
    supervised = exists & (np.asarray(loss_mask)[positions] != 0)
    supervised[:, 0] = True
    supervised = np.logical_and.accumulate(supervised, axis=1)  # ends at the first gap
    supervised[:, 0] = False
    return np.where(supervised, np.asarray(input_ids)[positions].astype(np.int64), 0), supervised


def decay(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """[B] weight of each slot, exp(-(k - 1) / gamma), and 0 for slot 0 (DFlash, arXiv 2602.06036)."""
    slots = torch.arange(block_size, dtype=torch.float32, device=device)
    return torch.where(slots > 0, torch.exp(-(slots - 1) / gamma), 0.0)


def dpace_weights(probability: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810) of slots 1 .. B - 1, from the detached probability of the right token.

    With s_i = (1 - alpha) q_i + alpha on supervised slots and 1 elsewhere, and C_j the product of s_i up to j, a slot
    weighs the sum of C_j over the supervised slots j from it on: the expected run that still depends on it.
    Both [N, B - 1]; returns float32 [N, B - 1], 0 where not supervised.
    """
    reach = torch.where(supervised, (1.0 - alpha) * probability.float() + alpha, 1.0).cumprod(1) * supervised
    return reach.flip(1).cumsum(1).flip(1) * supervised


def streaks(correct: Tensor, supervised: Tensor) -> Tensor:
    """[N] int64: correct slots before the first wrong or unsupervised one, from slot 1 on; inputs bool [N, B]."""
    return (correct & supervised)[:, 1:].long().cumprod(1).sum(1)

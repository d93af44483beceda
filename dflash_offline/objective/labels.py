"""The token each slot must predict, what it weighs, and runs of correct slots.

Slot k of a block anchored at p predicts the token at p + k: same position, no shift. Slot 0 is known and not trained.
A slot is supervised when its token exists in the sequence, belongs to an answer, and no unsupervised token lies between
it and the anchor: what follows a gap (the next user turn) is another answer, which no drafter could know of.

Legend: C packed rows, N blocks, B slots of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout


@dataclass(frozen=True)
class Labels:
    """What the blocks of a micro-batch must predict. All [N, B]; slot 0 is never supervised."""

    tokens: Tensor  # int64; 0 where not supervised
    supervised: Tensor  # bool
    weights: Tensor  # float32; 0 where not supervised


def decay(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """[B] weight of each slot, exp(-(k - 1) / gamma), and 0 for slot 0 (DFlash, arXiv 2602.06036)."""
    slots = torch.arange(block_size, dtype=torch.float32, device=device)
    return torch.where(slots > 0, torch.exp(-(slots - 1) / gamma), 0.0)


def labels_and_weights(input_ids: Tensor, loss_mask: Tensor, blocks: BlockLayout, *, gamma: float) -> Labels:
    """input_ids [C] and loss_mask [C] of the packed rows -> labels of every slot, weighted by :func:`decay`."""
    rows = blocks.slot_rows
    exists = rows < blocks.sequence_end[:, None]
    rows = rows.clamp(max=input_ids.shape[0] - 1)
    supervised = exists & (loss_mask[rows] != 0)
    supervised[:, 0] = exists[:, 0]
    supervised = supervised.to(torch.int32).cumprod(1).bool()  # ends at the first gap
    supervised[:, 0] = False
    weights = supervised * decay(blocks.block_size, gamma, rows.device)
    return Labels(torch.where(supervised, input_ids[rows].long(), 0), supervised, weights)


def dpace_weights(probability: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights (arXiv 2605.18810) of slots 1 .. B - 1, from the detached probability of the right token.

    With s_i = (1 - alpha) q_i + alpha on supervised slots and 1 elsewhere, and C_j the product of s_i up to j, a slot
    weighs the sum of C_j over the supervised slots j from it on: the expected run that still depends on it.
    Both [N, B - 1]; returns float32 [N, B - 1].
    """
    reach = torch.where(supervised, (1.0 - alpha) * probability.float() + alpha, 1.0).cumprod(1) * supervised
    return reach.flip(1).cumsum(1).flip(1) * supervised


def streaks(correct: Tensor, supervised: Tensor) -> Tensor:
    """[N] number of correct slots before the first wrong or unsupervised one, from slot 1 on; inputs [N, B], int64 out."""
    return (correct & supervised)[:, 1:].long().cumprod(1).sum(1)

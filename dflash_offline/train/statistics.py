"""What a step is judged by: one small float64 vector, added up over micro-batches and summed over ranks.

Legend: B slots of a block, G micro-batches of a step.
"""

import torch

from dflash_offline.dataset import DeviceBatch
from dflash_offline.objective import LossOutput, streaks

# places; after FIXED come right slots [B - 1], trained slots [B - 1] and the loss of each micro-batch [G]
LOSS, WEIGHT, BLOCKS, STREAK, TOKENS, READ_BYTES, READ_S, WAITED_S, STOP, SAVE, FIXED = range(11)


class Statistics:
    """The vector of one step on this rank, on the training device.

    Args:
        slots: B - 1.
        micro_batches: G.
    """

    def __init__(self, *, slots: int, micro_batches: int, device: torch.device) -> None:
        self.slots = slots
        self.vector = torch.zeros(FIXED + 2 * slots + micro_batches, dtype=torch.float64, device=device)

    def add(self, batch: DeviceBatch, out: LossOutput) -> None:
        """Count one micro-batch. Nothing here waits for the device."""
        live, slots, vector = batch.blocks.num_live, self.slots, self.vector
        loss = out.loss_sum.detach()
        vector[LOSS] += loss
        vector[WEIGHT] += out.weight_sum
        vector[STREAK] += streaks(out.correct, batch.supervised)[:live].sum()
        vector[FIXED : FIXED + slots] += out.correct[:, 1:].sum(0)
        vector[FIXED + slots : FIXED + 2 * slots] += batch.supervised[:live, 1:].sum(0)
        vector[FIXED + 2 * slots + batch.job.number] = loss
        for place, value in ((BLOCKS, live), (TOKENS, batch.num_tokens), (READ_BYTES, batch.read_bytes), (READ_S, batch.read_s)):
            vector[place] += value

    def set(self, place: int, value: float) -> None:
        """Put a number of this rank into a place."""
        self.vector[place] = value


class StepNumbers:
    """A step's vector on the host, over all ranks."""

    def __init__(self, numbers: list[float], *, slots: int) -> None:
        self.numbers = numbers
        self.right, self.trained = numbers[FIXED : FIXED + slots], numbers[FIXED + slots : FIXED + 2 * slots]
        self.losses = numbers[FIXED + 2 * slots :]

    def __getitem__(self, place: int) -> float:
        return self.numbers[place]

    @property
    def loss(self) -> float:
        """Sum of losses over sum of weights; 0 when no slot was trained."""
        return self.numbers[LOSS] / self.numbers[WEIGHT] if self.numbers[WEIGHT] > 0 else 0.0

    @property
    def accuracy(self) -> float:
        """Right among trained slots."""
        return sum(self.right) / max(1.0, sum(self.trained))

    @property
    def accuracy_per_slot(self) -> list[float | None]:
        """The same for each slot from 1; None where none was trained."""
        return [right / trained if trained else None for right, trained in zip(self.right, self.trained, strict=True)]

    @property
    def streak(self) -> float:
        """Mean number of leading right slots of a block."""
        return self.numbers[STREAK] / max(1.0, self.numbers[BLOCKS])

"""What a step is judged by: one small float64 vector, added up over micro-batches and summed over ranks.

Its last part has a row for each rank, which that rank alone fills: after the sum every rank knows them all, without an
exchange of its own.

Legend: B slots of a block, G micro-batches of a step, R ranks.
"""

import resource
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from dflash_offline.dataset import DeviceBatch, Timing, seconds_between
from dflash_offline.objective import LossOutput, streaks

# places; after FIXED come right slots [B - 1], trained slots [B - 1], the loss of each micro-batch [G], rows of ranks [R, ...]
LOSS, WEIGHT, BLOCKS, STREAK, TOKENS, READ_BYTES, STOP, SAVE, RATE, RECOMPILES, FIXED = range(11)


@dataclass(frozen=True)
class RankNumbers:
    """What a rank measured of its own last step; on a GPU that is the last one known to be done.

    Attributes:
        micro_batches: its share of the step; 0 before anything is known.
        work_s: from the start of the step to the end of its last backward pass, before it waits for other ranks.
        waited_s: in which its process waited for data.
        read_s, copy_s, decode_s: what the step's data took in the background: reading, to the device, decoding there.
        memory: bytes in use on its GPU, by whomever; of its process on a CPU.
    """

    micro_batches: float = 0.0
    work_s: float = 0.0
    waited_s: float = 0.0
    read_s: float = 0.0
    copy_s: float = 0.0
    decode_s: float = 0.0
    memory: float = 0.0

    @classmethod
    def of(
        cls, micro_batches: int, worked: tuple[Any, Any], moved: Sequence[Timing], *, waited_s: float, read_s: float, device: torch.device
    ) -> "RankNumbers":
        """Of a step that is done; ``worked``: marks of its begin and end, ``moved``: of its micro-batches."""
        each = [timing.seconds() for timing in moved]
        copy_s, decode_s = sum(copy for copy, _ in each), sum(decode for _, decode in each)
        return cls(micro_batches, seconds_between(*worked), waited_s, read_s, copy_s, decode_s, memory_in_use(device))


def memory_in_use(device: torch.device) -> float:
    """Bytes in use on the GPU, by whomever; resident bytes of this process on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    return float(int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize())


WIDTH = len(fields(RankNumbers))


class Statistics:
    """The vector of one step on this rank, on the training device.

    Args:
        slots: B - 1.
        micro_batches: G.
        ranks: R.
    """

    def __init__(self, *, slots: int, micro_batches: int, ranks: int, device: torch.device) -> None:
        self.slots = slots
        self._ranks_at = FIXED + 2 * slots + micro_batches
        self.vector = torch.zeros(self._ranks_at + ranks * WIDTH, dtype=torch.float64, device=device)

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
        for place, value in ((BLOCKS, live), (TOKENS, batch.num_tokens), (READ_BYTES, batch.read_bytes)):
            vector[place] += value

    def set(self, place: int, value: float) -> None:
        """Put a number of this rank into a place."""
        self.vector[place] = value

    def set_rank(self, rank: int, numbers: RankNumbers) -> None:
        """Fill this rank's row."""
        start = self._ranks_at + rank * WIDTH
        values = torch.tensor(astuple(numbers), dtype=torch.float64, pin_memory=self.vector.is_cuda)
        self.vector[start : start + WIDTH].copy_(values, non_blocking=True)


class StepNumbers:
    """A step's vector on the host, over all ranks."""

    def __init__(self, numbers: Sequence[float], *, slots: int, micro_batches: int) -> None:
        ranks_at = FIXED + 2 * slots + micro_batches
        self.numbers = numbers
        self.right, self.trained = numbers[FIXED : FIXED + slots], numbers[FIXED + slots : FIXED + 2 * slots]
        self.losses = numbers[FIXED + 2 * slots : ranks_at]
        self.ranks = [RankNumbers(*numbers[at : at + WIDTH]) for at in range(ranks_at, len(numbers), WIDTH)]

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

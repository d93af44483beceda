"""Evaluation on held-out conversations.

A block is put at *every* usable anchor of the chosen conversations, so nothing is drawn: the figures of two steps, or of
two runs, differ only by the weights. The same pass gives ``tau_replay``: an answer is walked from its first token in
steps of ``streak + 1``, as the draft-and-verify loop would emit it. (The mean over all anchors, ``tau``, oversamples
easy runs that a real loop jumps over.) Its interval comes from resampling conversations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_offline.corpus import Corpus
from dflash_offline.dataset import BatchShape, DeviceBatch, Job
from dflash_offline.dataset.order import MOST_ADDED
from dflash_offline.objective import LossOutput, anchor_candidates
from dflash_offline.replay import answers

RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles


def choose_rows(corpus: Corpus, most: int, *, available: np.ndarray | None = None) -> list[int]:
    """Up to ``most`` held-out rows, by the order of their content hashes: the same whatever the order of the files.

    ``available``: bool [rows], which rows are in the store; all of them when left out.
    """
    heldout = np.asarray(corpus.heldout)
    rows = np.flatnonzero(heldout if available is None else heldout & available).tolist()
    return sorted(rows, key=lambda row: corpus.hashes[row].tobytes())[:most]


def shape_for(length: int, shapes: Sequence[BatchShape], *, tokens_per_batch: int, blocks: int) -> BatchShape:
    """The smallest training shape that holds a row of ``length`` tokens, so that no other kernel has to be compiled.

    A longer row than all of them hold gets a shape of ``tokens_per_batch`` tokens and ``blocks`` blocks, or nearly as many
    where training has that number: layers are compiled for each.
    """
    fitting = [shape for shape in shapes if shape.context >= length]
    if fitting:
        return min(fitting, key=lambda shape: (shape.context, shape.bucket))
    near = [shape.blocks for shape in shapes if abs(shape.blocks - blocks) <= MOST_ADDED * blocks]
    return BatchShape(-1, tokens_per_batch, max(near, default=blocks))


def jobs(corpus: Corpus, rows: Sequence[int], shapes: Sequence[BatchShape], *, tokens_per_batch: int, blocks: int) -> list[Job]:
    """Micro-batches that cover every usable anchor of ``rows``; a row with many is spread over several."""
    made: list[Job] = []
    by_shape: dict[BatchShape, list[int]] = {}
    for row in rows:
        shape = shape_for(int(corpus.lengths[row]), shapes, tokens_per_batch=tokens_per_batch, blocks=blocks)
        by_shape.setdefault(shape, []).append(row)
    for shape, members in by_shape.items():
        packed: list[tuple[int, np.ndarray]] = []
        context_left, blocks_left = shape.context, shape.blocks

        def close(shape: BatchShape = shape) -> None:
            nonlocal packed, context_left, blocks_left
            if packed:
                made.append(Job(0, len(made), 0, [row for row, _ in packed], shape, [positions for _, positions in packed]))
            packed, context_left, blocks_left = [], shape.context, shape.blocks

        for row in members:
            positions, length = anchor_candidates(corpus.row(row).loss_mask), int(corpus.lengths[row])
            while len(positions):
                if context_left < length or blocks_left == 0:
                    close()
                packed.append((row, positions[:blocks_left]))
                positions, context_left, blocks_left = positions[blocks_left:], context_left - length, blocks_left - len(packed[-1][1])
        close()
    return made


@dataclass
class Scores:
    """What evaluation micro-batches gave; of several ranks they are merged.

    Attributes:
        streaks: row -> {anchor position: leading right slots of its block}.
        slots_right, slots_total: int [B - 1], by slot from 1.
    """

    loss_sum: float = 0.0
    weight_sum: float = 0.0
    streaks: dict[int, dict[int, int]] = field(default_factory=dict)
    slots_right: np.ndarray | None = None
    slots_total: np.ndarray | None = None

    def add(self, batch: DeviceBatch, out: LossOutput) -> None:
        """Note one micro-batch."""
        job, live = batch.job, batch.blocks.num_live
        assert job.anchors is not None
        right = (out.correct & batch.supervised)[:live, 1:].cpu().numpy()
        total = batch.supervised[:live, 1:].sum(0).cpu().numpy()
        self.loss_sum, self.weight_sum = self.loss_sum + float(out.loss_sum.detach()), self.weight_sum + float(out.weight_sum)
        self.slots_right = right.sum(0) if self.slots_right is None else self.slots_right + right.sum(0)
        self.slots_total = total if self.slots_total is None else self.slots_total + total
        leading, block = np.cumprod(right, axis=1).sum(1), 0
        for row, positions in zip(job.rows, job.anchors, strict=True):
            counts = leading[block : block + len(positions)]
            self.streaks.setdefault(int(row), {}).update(zip(positions.tolist(), counts.tolist(), strict=True))
            block += len(positions)

    def merge(self, other: "Scores") -> None:
        """Add another rank's scores."""
        self.loss_sum, self.weight_sum = self.loss_sum + other.loss_sum, self.weight_sum + other.weight_sum
        for row, streaks in other.streaks.items():
            self.streaks.setdefault(row, {}).update(streaks)
        if other.slots_right is not None:
            self.slots_right = other.slots_right if self.slots_right is None else self.slots_right + other.slots_right
            self.slots_total = other.slots_total if self.slots_total is None else self.slots_total + other.slots_total

    def summary(self, corpus: Corpus) -> dict[str, Any]:
        """The numbers of ``metrics.jsonl``; see the module's docstring. ``tau_replay`` is None when no answer has two tokens."""
        assert self.slots_right is not None and self.slots_total is not None and self.weight_sum > 0, "nothing was evaluated"
        streaks = [streak for by_position in self.streaks.values() for streak in by_position.values()]
        streak = sum(streaks) / len(streaks)
        walked = [walk(by_position, answers(np.array(corpus.row(row).loss_mask))) for row, by_position in sorted(self.streaks.items())]
        tokens, steps = np.array([each[0] for each in walked]), np.array([each[1] for each in walked])
        found: dict[str, Any] = {
            "loss": self.loss_sum / self.weight_sum,
            "acc": float(self.slots_right.sum() / self.slots_total.sum()),
            "acc_per_slot": [float(r / t) if t else None for r, t in zip(self.slots_right, self.slots_total, strict=True)],
            "streak": streak,
            "tau": streak + 1,
            "tau_replay": None,
            "tau_replay_interval": None,
            "rows": len(self.streaks),
            "blocks": len(streaks),
        }
        if steps.sum() > 0:
            found["tau_replay"] = float(tokens.sum() / steps.sum())
            found["tau_replay_interval"] = bootstrap(tokens, steps)
        return found


def walk(streak_at: dict[int, int], spans: list[tuple[int, int]]) -> tuple[int, int]:
    """Replay answers ``[start, end)`` from a table of streaks: tokens emitted and steps taken.

    The first token of an answer is the prefill's and is not counted; nothing after an answer's last token is.
    """
    tokens = steps = 0
    for start, end in spans:
        position = start
        while position < end - 1:
            streak = streak_at[position]
            tokens += min(streak + 1, end - 1 - position)
            steps += 1
            position += streak + 1
    return tokens, steps


def bootstrap(tokens: np.ndarray, steps: np.ndarray) -> list[float]:
    """95 % interval of total tokens over total steps, conversations drawn anew ``RESAMPLES`` times (fixed seed)."""
    drawn = np.random.Generator(np.random.PCG64(0)).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    totals, counts = tokens[drawn].sum(1), steps[drawn].sum(1)
    ratios = totals[counts > 0] / counts[counts > 0]
    return [float(each) for each in np.percentile(ratios, INTERVAL)]

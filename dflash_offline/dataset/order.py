"""Which rows are trained on, and the steps they make up: all of it a function of the run file and the corpus.

A step is known by its number alone, so a resumed run needs no position and no state: it asks for the next number.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_offline.buckets import epoch_order
from dflash_offline.config import TrainConfig
from dflash_offline.corpus import Corpus
from dflash_offline.errors import TrainError
from dflash_offline.objective import anchor_candidates
from dflash_offline.store import HiddenStateStore

_CONTEXT_MULTIPLE = 128  # context tokens of a shape are rounded up to this (a tile of the attention kernel)
_BLOCKS_MULTIPLE = 8
_WELL_FILLED, _ENOUGH_STEPS = 0.95, 10  # fewer steps say little of how full they are in the long run
MOST_ADDED = 0.03  # share of blocks by which a bucket is padded to have another's N: layers are compiled for each N


@dataclass(frozen=True)
class BatchShape:
    """The padded size of every micro-batch of one bucket: C context tokens and N blocks."""

    bucket: int
    context: int
    blocks: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} ({self.context} context tokens, {self.blocks} blocks)"


@dataclass(frozen=True)
class Step:
    """One optimiser step.

    Attributes:
        number: from 0.
        epoch: from 0; anchors and noise are drawn from it.
        position: epochs done when the step is, a fraction.
        micro_batches: row numbers of each, all of one bucket; rank r of R takes numbers r, r + R, r + 2R ...
    """

    number: int
    epoch: int
    position: float
    bucket: int
    micro_batches: list[np.ndarray]


def stored_indices(corpus: Corpus, store: HiddenStateStore, *, some: bool = False) -> np.ndarray:
    """Where each corpus row lies in the store: int64 [rows]; with ``some`` -1 for a row that is not there.

    Raises:
        TrainError: rows are missing; the text says how many are there.
    """
    found = np.full(len(corpus), -1, dtype=np.int64)
    for row in range(len(corpus)):
        try:
            found[row] = store.find(corpus.hashes[row].tobytes())
        except KeyError:
            continue
    captured = int((found >= 0).sum())
    if captured < len(corpus) and not some:
        raise TrainError(f"{store.path}: capture incomplete, {captured}/{len(corpus)} rows; run the capture stage to its end first")
    return found


def count_candidates(corpus: Corpus, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Usable anchors of each row, positions p with ``loss_mask[p] and loss_mask[p + 1]``: int64 [rows]."""
    counts = np.zeros(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        counts[i] = len(anchor_candidates(corpus.row(int(row)).loss_mask))
    return counts


class TrainingOrder:
    """The steps of a whole run.

    Args:
        corpus: its rows that are not held out are trained on, each once an epoch.
        train: the run file's section.
        block_size: slots of a block.
        available: bool [rows], which rows are in the store; all of them when left out.

    Raises:
        TrainError: there is no row to train on, or one row alone is over a budget.
    """

    def __init__(self, corpus: Corpus, train: TrainConfig, *, block_size: int, available: np.ndarray | None = None) -> None:
        self.train, self.block_size = train, block_size
        there = np.ones(len(corpus), bool) if available is None else available
        self.rows = np.flatnonzero(~np.asarray(corpus.heldout) & there)
        if not len(self.rows):
            raise TrainError(
                f"{corpus.folder}: no conversation is left to train on "
                f"({len(corpus)} in all, {there.sum()} in the store, all of them held out)"
            )
        self.max_blocks = train.slots_per_batch // block_size
        self._lengths = np.asarray(corpus.lengths)[self.rows].astype(np.int64)
        self._buckets = np.asarray(corpus.buckets)[self.rows]
        self._blocks = np.minimum(count_candidates(corpus, self.rows), min(train.anchors, self.max_blocks))
        self._cached: tuple[int, list[list[np.ndarray]]] | None = None
        self._ends: list[int] = []  # steps done at the end of each epoch
        self.shapes: dict[int, BatchShape] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        """Go through all epochs once: how many steps each has, and the largest micro-batch of each bucket."""
        largest: dict[int, tuple[int, int]] = {}
        counts: Counter[int] = Counter()  # micro-batches of each bucket in the first epoch
        live = np.zeros(2)  # blocks and context tokens in them
        whole, total = int(np.ceil(self.train.epochs)), 0
        for epoch in range(whole):
            order = self._epoch(epoch)
            count = len(order)
            if epoch == whole - 1 and self.train.epochs < whole:
                count = max(1, round(count * (self.train.epochs - epoch)))
            if self.train.max_steps is not None:
                count = min(count, self.train.max_steps - total)
            for micro_batches in order[:count]:
                for rows in micro_batches:
                    bucket = int(self._buckets[rows[0]])
                    context, blocks = int(self._lengths[rows].sum()), int(self._blocks[rows].sum())
                    most_context, most_blocks = largest.get(bucket, (0, 0))
                    largest[bucket] = (max(most_context, context), max(most_blocks, blocks))
                    if epoch == 0:
                        counts[bucket] += 1
                        live += blocks, context
            total += count
            self._ends.append(total)
            if total == self.train.max_steps:
                break
        padded = {bucket: _round_up(max(1, blocks), _BLOCKS_MULTIPLE) for bucket, (_, blocks) in largest.items()}
        shared = share_blocks(padded.values())
        for bucket, (context, _) in sorted(largest.items()):
            self.shapes[bucket] = BatchShape(bucket, _round_up(context, _CONTEXT_MULTIPLE), shared[padded[bucket]])
        computed = sum(count * np.array([self.shapes[bucket].blocks, self.shapes[bucket].context]) for bucket, count in counts.items())
        self._fill = tuple((live / computed).tolist())

    def _epoch(self, epoch: int) -> list[list[np.ndarray]]:
        if self._cached is None or self._cached[0] != epoch:
            try:
                order = epoch_order(
                    self._lengths,
                    self._blocks * self.block_size,
                    self._buckets,
                    tokens_per_batch=self.train.tokens_per_batch,
                    slots_per_batch=self.train.slots_per_batch,
                    micro_batches_per_step=self.train.micro_batches_per_step,
                    seed=self.train.seed,
                    epoch=epoch,
                )
            except ValueError as error:
                raise TrainError(f"[train]: {error}") from None
            self._cached = (epoch, order)
        return self._cached[1]

    def fill(self) -> tuple[float, float]:
        """Of what the first epoch's micro-batches are padded to, the shares that are real: blocks, context tokens."""
        return self._fill

    def fill_line(self) -> str:
        """:meth:`fill` to print, with what to change where blocks are few: padding costs the time of blocks."""
        blocks, context = self.fill()
        line = f"micro-batches: {blocks:.0%} of the block slots and {context:.0%} of the context tokens that are computed are real"
        enough = _round_up(3 * int(self._lengths.max()) // 2, _CONTEXT_MULTIPLE)
        if blocks < _WELL_FILLED and self._ends[0] >= _ENOUGH_STEPS and self.train.tokens_per_batch < enough:
            line += (
                f"; long rows leave little room for another: [train] tokens_per_batch = {self.train.tokens_per_batch} "
                f"could be {enough}, which trains faster"
            )
        return line

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run."""
        return self._ends[-1]

    @property
    def num_epochs(self) -> int:
        """Epochs begun."""
        return len(self._ends)

    def step(self, number: int) -> Step:
        """Step ``number``, from 0."""
        assert 0 <= number < self.total_steps, number
        epoch = bisect_right(self._ends, number)
        within = number - (self._ends[epoch - 1] if epoch else 0)
        order = self._epoch(epoch)
        micro_batches = [self.rows[rows] for rows in order[within]]
        return Step(number, epoch, epoch + (within + 1) / len(order), int(self._buckets[order[within][0][0]]), micro_batches)


def share_blocks(counts: Iterable[int]) -> dict[int, int]:
    """Number of blocks -> the one to pad to: a larger one of ``counts`` of which at most 3 % would be added, or itself."""
    shared: dict[int, int] = {}
    kept = 0
    for count in sorted(set(counts), reverse=True):
        kept = kept if kept * (1 - MOST_ADDED) <= count < kept else count
        shared[count] = kept
    return shared


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""Micro-batches: rows packed one after the other on the context axis, their anchors' blocks beside them.

Anchors and noise of a row are drawn from (seed, epoch, the row's content hash): not from the micro-batch it happens to
be in, nor from any state, so that a run can be replayed and resumed anywhere and on any number of ranks.

Legend: C packed context rows (padded to the bucket's shape), N blocks (padded as well), B slots of a block, T tokens,
k tapped layers that the drafter reads, H hidden size.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout
from dflash_offline.config import TrainConfig
from dflash_offline.corpus import Corpus
from dflash_offline.dataset.order import BatchShape
from dflash_offline.dataset.prefetch import Prefetcher
from dflash_offline.objective import block_labels, draw_anchors
from dflash_offline.store import EncodedBatch, HiddenStateStore

if TYPE_CHECKING:
    from dflash_offline.dataset.reading import ReadingProcesses


@dataclass(frozen=True)
class Job:
    """What one micro-batch is made of.

    Attributes:
        step, number: which micro-batch of which step.
        epoch: anchors and noise are drawn from it.
        rows: corpus rows.
        anchors: positions to use instead of drawn ones, one sorted array a row (evaluation).
    """

    step: int
    number: int
    epoch: int
    rows: Sequence[int] | np.ndarray
    shape: BatchShape
    anchors: list[np.ndarray] | None = None


@dataclass
class MicroBatch:
    """One micro-batch on the host, its hidden states still encoded.

    Attributes:
        spans: ``[start, end)`` of each row on the context axis.
        blocks: where the blocks lie; padded to the shape.
        anchor_tokens: int64 [N], the token in slot 0 of each block.
        labels, supervised: [N, B], what each slot has to predict, and whether it is trained; see ``objective.block_labels``.
        noise_seeds: one a row.
        read_s: time that reading and packing took.
    """

    job: Job
    spans: list[tuple[int, int]]
    blocks: BlockLayout
    anchor_tokens: Tensor
    labels: Tensor
    supervised: Tensor
    noise_seeds: list[int]
    encoded: EncodedBatch
    read_s: float

    @property
    def num_tokens(self) -> int:
        """Context tokens, padding not counted."""
        return self.spans[-1][1] if self.spans else 0

    @property
    def nbytes(self) -> int:
        """Host memory of the encoded hidden states: what prefetching is bounded in."""
        return sum(array.nbytes for array in self.encoded.arrays.values())


class BatchLoader:
    """Makes micro-batches out of corpus and store. Safe to use from one thread at a time (but see ``processes``).

    Args:
        stored: index in the store of each corpus row (``order.stored_indices``).
        taps: positions along the store's layers that the drafter reads, in its order.
        pin: page-locked host memory, for copies that overlap with a GPU's work.
        processes: read in so many processes of its own, see ``reading``; ``load`` is then safe to use from several threads.
    """

    def __init__(
        self,
        corpus: Corpus,
        store: HiddenStateStore,
        stored: np.ndarray,
        train: TrainConfig,
        *,
        taps: list[int],
        block_size: int,
        pin: bool,
        processes: int = 0,
    ) -> None:
        self.corpus, self.store, self.stored, self.train = corpus, store, stored, train
        self.taps, self.block_size, self.pin = taps, block_size, pin
        self._processes: ReadingProcesses | None = None
        if processes:
            from dflash_offline.dataset import reading

            self._processes = reading.ReadingProcesses(self, processes)

    def prefetch(self, jobs: Iterable[Job]) -> Prefetcher[Job, MicroBatch]:
        """``load`` of these jobs, ahead of their use, as many at a time as there are processes."""
        return Prefetcher(jobs, self.load, at_once=1 if self._processes is None else len(self._processes))

    def load(self, job: Job) -> MicroBatch:
        """Read, draw and pack one micro-batch.

        Raises:
            TrainError: a reading process is gone.
        """
        return self.read(job) if self._processes is None else self._processes.load(job)

    def check_content(self, job: Job) -> None:
        """See ``HiddenStateStore.check_content``."""
        self.store.check_content(self._stored(job))

    def _stored(self, job: Job) -> list[int]:
        return self.stored[np.asarray(job.rows, dtype=np.int64)].tolist()

    def close(self) -> None:
        """End the reading processes."""
        if self._processes is not None:
            self._processes.close()

    def read(self, job: Job) -> MicroBatch:
        """``load`` in this process and thread."""
        began = time.perf_counter()
        rows = [self.corpus.row(int(row)) for row in job.rows]
        anchors = job.anchors
        if anchors is None:
            most = min(self.train.anchors, self.train.slots_per_batch // self.block_size)
            anchors = [draw_anchors(row.loss_mask, most, self.train.seed, job.epoch, row.sha256) for row in rows]
        lengths = [len(row.input_ids) for row in rows]
        blocks = BlockLayout.pack(lengths, anchors, block_size=self.block_size, num_context=job.shape.context, num_blocks=job.shape.blocks)
        anchor_tokens = torch.zeros(job.shape.blocks, dtype=torch.int64)
        labels = torch.zeros(job.shape.blocks, self.block_size, dtype=torch.int64)
        supervised = torch.zeros(job.shape.blocks, self.block_size, dtype=torch.bool)
        block = 0
        for row, positions in zip(rows, anchors, strict=True):
            here = slice(block, block + len(positions))
            wanted, trained = block_labels(row.input_ids, row.loss_mask, positions, self.block_size)
            anchor_tokens[here] = torch.from_numpy(row.input_ids[positions].astype(np.int64))
            labels[here], supervised[here] = torch.from_numpy(wanted), torch.from_numpy(trained)
            block = here.stop
        if self.pin:
            anchor_tokens, labels, supervised = anchor_tokens.pin_memory(), labels.pin_memory(), supervised.pin_memory()
            blocks = blocks.pin()
        ends = np.cumsum(lengths).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        seeds = [noise_seed(self.train.seed, job.epoch, row.sha256) for row in rows]
        encoded = self.store.read_encoded(self._stored(job), self.taps)
        return MicroBatch(job, spans, blocks, anchor_tokens, labels, supervised, seeds, encoded, time.perf_counter() - began)


def noise_seed(seed: int, epoch: int, sample_id: bytes) -> int:
    """Seed of a row's noise in one epoch, 63 bits."""
    digest = hashlib.blake2b(f"noise/{seed}/{epoch}/".encode() + sample_id, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

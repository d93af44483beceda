"""One part on its way to the disk.

The target's batches go in by ``put``; a thread takes the rows out of them on a stream of its own and hands them to the
store's writer, which encodes where they lie and has them checked before it places them. No step waits for the GPU but
the writer's last, in a thread of its own. What waits in between is bounded over all jobs of a replica,
so the forward passes wait only when the disk cannot keep up, and that time is counted.

Tensor legend: B rows, T tokens, K taps, H hidden.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_offline.capture.forward import Batch, Forwarder
from dflash_offline.errors import TargetError
from dflash_offline.leases import Lease
from dflash_offline.plan import PlannedPart
from dflash_offline.store import NewSample, PartWriter

if TYPE_CHECKING:
    from dflash_offline.corpus import Corpus


class LeaseLostError(Exception):
    """Another process took the part over while this one was stopped or slow. Not an error of the user's."""


class Backlog:
    """Over all jobs of a replica: bounds what waits to be written, in batches, and counts time, that spent waiting for room too."""

    def __init__(self, batches: int) -> None:
        self._room, self._counted = threading.Semaphore(batches), threading.Lock()
        self.limit, self.waiting = batches, 0  # room in all, and how much of it is taken: what is not yet written
        self.waited_s = 0.0
        self._last_end = 0.0

    def enter(self, gave_up: Callable[[], bool]) -> bool:
        """Take room for a batch, as soon as there is some; False when ``gave_up`` says that it is no longer wanted."""
        start = time.monotonic()
        while not self._room.acquire(timeout=0.2):
            if gave_up():
                return False
        self.waited_s += time.monotonic() - start
        with self._counted:
            self.waiting += 1
        return True

    def leave(self) -> None:
        with self._counted:
            self.waiting -= 1
        self._room.release()

    def end(self, began: float) -> float:
        """A job that ``began`` then (monotonic clock) ends now: its seconds, less those that a job which ended meanwhile has counted.

        Jobs overlap, and the GPU computes after it was told to: only from end to end do their seconds add up to the replica's.
        """
        with self._counted:
            now = time.monotonic()
            seconds, self._last_end = now - max(began, self._last_end), now
        return seconds


class PartJob:
    """Writes one part. ``put`` batches in the order of the plan, then ``finish``; ``error`` tells what went wrong.

    Args:
        writer: entered already; its ``resume_sample`` says how many samples are there.
        lease: asked before every batch and before the commit.
    """

    def __init__(
        self, writer: PartWriter, lease: Lease, corpus: "Corpus", backlog: Backlog, *, layer_ids: list[int], device: torch.device
    ) -> None:
        self.writer, self.lease, self._corpus, self._backlog = writer, lease, corpus, backlog
        self._layer_ids, self._device = layer_ids, device
        self._queue: queue.Queue[tuple[list[int], Batch] | dict[str, Any] | None] = queue.Queue()
        self.error: BaseException | None = None
        self.tokens = 0
        self._began, self._in_float32 = time.monotonic(), False
        self.at: tuple[int, list[int]] = (0, [])  # bucket and lengths of the batch being written
        self._next = 0  # sample of the part that comes next
        self._thread = threading.Thread(target=self._run, name=lease.name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def put(self, rows: list[int], batch: Batch) -> None:
        """Hand over the batch of these corpus rows; waits while too much is waiting already."""
        if self._backlog.enter(lambda: self.error is not None):
            self._queue.put((rows, batch))

    def skip(self, samples: int) -> None:
        """These samples of the plan are stored already and will not come. Before the first ``put``."""
        self._next += samples

    def finish(self, extra: dict[str, Any]) -> None:
        """No more batches come: commit with this in the manifest, and ``seconds`` and ``tokens_per_s`` of the part."""
        self._queue.put(extra)

    def abandon(self) -> None:
        """Stop without a commit; what was written stays for whoever goes on."""
        self.error = self.error or LeaseLostError(self.lease.name)
        self._queue.put(None)

    def wait(self) -> None:
        """Until the thread has ended; room that batches still hold is given back."""
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(self._queue.get_nowait(), tuple):
                    self._backlog.leave()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), self._stream():
                while (item := self._queue.get()) is not None:
                    if isinstance(item, dict):
                        self._check_lease()
                        self.writer.commit(lambda told=item: told | self._rate())
                        break
                    try:
                        self._write(*item)
                    finally:
                        self._backlog.leave()
                    del item
        except BaseException as error:  # handed to the main thread, which raises it
            self.error = self.error or error
        finally:
            with contextlib.suppress(Exception):
                self.writer.__exit__(None, None, None)

    @contextlib.contextmanager
    def _stream(self) -> Any:
        if self._device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                yield
        else:
            yield

    def _rate(self) -> dict[str, float]:
        seconds = self._backlog.end(self._began)
        return {"seconds": round(seconds, 3), "tokens_per_s": round(self.tokens / max(seconds, 1e-9), 1)}

    def _check_lease(self) -> None:
        if self.error is not None:
            raise self.error
        if not self.lease.is_held:
            raise LeaseLostError(self.lease.name)

    def _write(self, rows: list[int], batch: Batch) -> None:
        self._check_lease()
        if batch.ready is not None:
            batch.ready.wait(torch.cuda.current_stream())
        self.at, self._in_float32 = (int(self._corpus.buckets[rows[0]]), batch.lengths), batch.taps[0].dtype == torch.float32
        stored = max(0, min(len(rows), self.writer.resume_sample - self._next))
        self._next += len(rows)
        for group in self._groups(batch, range(stored, len(rows))):
            samples = []
            for index in rows[group.start : group.stop]:
                row = self._corpus.row(index)
                check = functools.partial(self._check_values, index)
                samples.append(NewSample(index, row.sha256, row.bucket, row.input_ids, row.loss_mask, check))
            self.writer.append_group(samples, _hidden(batch, group))
            self.tokens += sum(batch.lengths[group.start : group.stop])
        batch.used_on(self._device)

    def _groups(self, batch: Batch, wanted: range) -> Iterator[range]:
        """Neighbours among the ``wanted`` rows of a batch that the writer takes in one go: as many as fit, one at least."""
        start, tokens = wanted.start, 0
        for b in wanted:
            if b > start and tokens + batch.lengths[b] > self.writer.group_tokens:
                yield range(start, b)
                start, tokens = b, 0
            tokens += batch.lengths[b]
        if start < wanted.stop:
            yield range(start, wanted.stop)

    def _check_values(self, index: int, rms: np.ndarray) -> None:
        """Every token's vector of every tap is finite and not all zero, judged by its norm: ``rms`` float32 ``[T, K]``."""
        sound = np.isfinite(rms) & (rms > 0)
        if sound.all():
            return
        token, tap = np.argwhere(~sound)[0].tolist()
        what = "all zero" if rms[token, tap] == 0 else "not finite"
        where = f"row {index} ({self._corpus.files[int(self._corpus.file_index[index])]} line {int(self._corpus.line[index])})"
        raise TargetError(
            f"{self.lease.name}: the hidden state of token {token} after layer {self._layer_ids[tap]} is {what} in {where}; the row was "
            "not written. Check the target's weights" + ("" if self._in_float32 else ', or compute with [target] dtype = "float32"')
        )


def _hidden(batch: Batch, rows: range) -> torch.Tensor:
    """Neighbouring rows of a batch, one after another: bf16 ``[T, K, H]``. Packed ones lie so already."""
    begin, end = batch.starts[rows.start], batch.starts[rows.stop - 1] + batch.lengths[rows.stop - 1]
    if end - begin == sum(batch.lengths[rows.start : rows.stop]):
        taps = [tap[begin:end] for tap in batch.taps]
    else:
        taps = [torch.cat(pieces) for pieces in zip(*map(batch.row, rows), strict=True)]
    return torch.stack(taps, dim=1).to(torch.bfloat16)


def run_batches(
    part: PlannedPart,
    job: PartJob,
    forwarder: Forwarder,
    corpus: "Corpus",
    *,
    resume: int = 0,
    first_batch: Callable[[np.ndarray, list[torch.Tensor]], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Send a part's batches through the target and hand them to its job; stops early when the job failed.

    Args:
        resume: samples that are stored already; batches wholly among them are left out.
        first_batch: called with the ids and taps of the first row computed.
        progress: called after each batch of the plan with the rows done so far and the tokens just computed.

    Returns:
        Tokens computed, without padding.
    """
    done = total = 0
    for rows in part.batches:
        done += len(rows)
        if done <= resume:
            job.skip(len(rows))
            continue
        ids, tokens = [corpus.row(row).input_ids for row in rows], 0
        for positions, batch in forwarder.run(ids, int(corpus.buckets[rows[0]])):
            if first_batch is not None and total + tokens == 0:
                first_batch(ids[positions.start], batch.row(0))
            job.put([int(rows[i]) for i in positions], batch)
            tokens += sum(batch.lengths)
            del batch
        total += tokens
        if job.error is not None:
            break
        if progress is not None:
            progress(done, tokens)
    return total

"""Threads that share out the reads of a batch among themselves."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

Read = Callable[[], int]  # reads something; its bytes


class ReadingThreads:
    """Several batches may be read at a time, from threads of the caller's; each helps with its own.

    Args:
        count: threads of a batch, the caller's among them.
    """

    def __init__(self, count: int):
        self.count = count
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def run(self, reads: Sequence[Read]) -> int:
        """Call them all, the first ones first; the sum. None is running any more when this returns or raises what one raised."""
        waiting = deque(reads)

        def drain() -> int:
            total = 0
            while True:
                try:
                    read = waiting.popleft()
                except IndexError:
                    return total
                try:
                    total += read()
                except BaseException:
                    waiting.clear()
                    raise

        others: list[Future[int]] = []
        try:
            for _ in range(min(self.count, len(reads)) - 1):
                try:
                    others.append(self._submit(drain))
                except RuntimeError:  # no thread is to be had, or another thread closes them: those there are read all
                    break
            total = drain()
        finally:
            waiting.clear()
            begun = _ended(others)
        return total + sum(other.result() for other in begun)

    def _submit(self, job: Read) -> "Future[int]":
        """To this process's own threads: those of the parent do not come along in a fork."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.count, "store-reader")
        return self._pool[1].submit(job)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and pool[0] == os.getpid():
            pool[1].shutdown()


def _ended(jobs: list["Future[int]"]) -> list["Future[int]"]:
    """Those of the jobs that have run, once they have ended; an interrupt meanwhile is put off until then."""
    begun = [job for job in jobs if not job.cancel()]  # the threads may be busy with another batch
    interrupt: BaseException | None = None
    while True:
        try:
            wait(begun)
            break
        except (KeyboardInterrupt, SystemExit) as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return begun

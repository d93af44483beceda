"""Reading ahead in background threads, bounded in bytes.

Only reading, drawing of anchors and packing happen in the threads; nothing that compiles, and nothing on a GPU.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

PREFETCH_BYTES = 1 << 30


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Job = TypeVar("Job")
Item = TypeVar("Item", bound=Sized)


class Prefetcher(Generic[Job, Item]):
    """Loads jobs in order, ahead of their use. Use as a context manager.

    Args:
        jobs: what to load, in order; taken from one by one in the thread.
        load: makes one item; runs in a thread.
        max_bytes: bound on what is loaded and not yet taken. One item is always loaded, however large.
        at_once: items being loaded at one time, each in a thread of its own; they come out in the order of the jobs.

    Attributes:
        waited_s: time that ``take`` spent waiting since the last ``reset``.
    """

    def __init__(self, jobs: Iterable[Job], load: Callable[[Job], Item], *, max_bytes: int = PREFETCH_BYTES, at_once: int = 1) -> None:
        self._jobs, self._load, self._max_bytes, self._at_once = iter(jobs), load, max_bytes, at_once
        self._ready: deque[Item] = deque()
        self._held_bytes = 0
        self._done = self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.closing(self._items()) as items:
                for item in items:
                    size = item.nbytes
                    with self._changed:
                        self._changed.wait_for(
                            lambda size=size: self._closed or not self._ready or self._held_bytes + size <= self._max_bytes
                        )
                        if self._closed:
                            return
                        self._ready.append(item)
                        self._held_bytes += size
                        self._changed.notify_all()
        except BaseException as error:  # handed to the thread that takes; a reader that died must not look like the end
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _items(self) -> Generator[Item, None, None]:
        with ThreadPoolExecutor(self._at_once, "prefetch") as threads:
            loading: deque[Future[Item]] = deque()
            try:
                for job in self._jobs:
                    loading.append(threads.submit(self._load, job))
                    if len(loading) == self._at_once:
                        yield loading.popleft().result()
                while loading:
                    yield loading.popleft().result()
            finally:
                for item in loading:
                    item.cancel()

    def take(self) -> Item:
        """The next item; waits for it.

        Raises:
            StopIteration: there are no more jobs.
            BaseException: whatever ``load`` raised, once the items before it are taken.
        """
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._done)
            self.waited_s += time.perf_counter() - started
            if self._ready:
                item = self._ready.popleft()
                self._held_bytes -= item.nbytes
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    @property
    def ready(self) -> bool:
        """Whether ``take`` would return an item at once."""
        return bool(self._ready)

    @property
    def depth(self) -> int:
        """Items loaded and not yet taken."""
        return len(self._ready)

    @property
    def held_bytes(self) -> int:
        """Bytes loaded and not yet taken."""
        return self._held_bytes

    def close(self) -> None:
        """Stop loading and drop what is loaded; items being loaded are finished first."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._held_bytes = 0
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Prefetcher[Job, Item]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

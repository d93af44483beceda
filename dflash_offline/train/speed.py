"""Watches that training is as fast as it was, that no rank is slower or fuller than another, and that nothing hangs."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_offline.train.statistics import RankNumbers

WATCHED = 20  # steps in the rolling rate of one shape, and in a comparison of ranks
SLOW = 0.5  # a rolling rate below this share of the best one is said
APART = 1.2  # ranks that differ by more than this factor are said
STALL_S = 600.0  # spent on one thing after which that is said
LEAST_BYTES = 1 << 30  # ... in memory only from this difference on: below it a process is judged by what it imports


class ThroughputWatch:
    """Notices when a shape of micro-batches becomes much slower than it was.

    Rates are kept per shape (the tokens of a second differ between buckets). The first steps of a shape, in which
    kernels are compiled and files read for the first time, count for nothing.
    """

    def __init__(self, *, skip: int = 3) -> None:
        self._skip = skip
        self._seen: dict[Any, int] = {}
        self._recent: dict[Any, deque[tuple[int, float, dict[str, float]]]] = {}
        self._best: dict[Any, float] = {}
        self._said: set[Any] = set()
        self._all: deque[tuple[int, float]] = deque(maxlen=WATCHED)

    @property
    def rate(self) -> float | None:
        """Tokens per second over the last steps of any shape; None while there are too few."""
        seconds = sum(each for _, each in self._all)
        return sum(tokens for tokens, _ in self._all) / seconds if len(self._all) == WATCHED and seconds > 0 else None

    def step(self, shape: Any, *, tokens: int, seconds: float, spent: Mapping[str, float]) -> str | None:
        """Note one step; returns a warning to print, once each time a shape falls below half its best rate.

        Args:
            tokens: context tokens of the step.
            seconds: what the step took.
            spent: what went on meanwhile, by name, in seconds; things go on side by side, so they need not sum up.
        """
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] <= self._skip or seconds <= 0:
            return None
        self._all.append((tokens, seconds))
        recent = self._recent.setdefault(shape, deque(maxlen=WATCHED))
        recent.append((tokens, seconds, dict(spent)))
        if len(recent) < WATCHED:
            return None
        whole = sum(each for _, each, _ in recent)
        rate = sum(tokens for tokens, _, _ in recent) / whole
        best = self._best[shape] = max(self._best.get(shape, 0.0), rate)
        if rate >= SLOW * best:
            self._said.discard(shape)
            return None
        if shape in self._said:
            return None
        self._said.add(shape)
        shares = ", ".join(f"{name} {100 * sum(parts.get(name, 0.0) for _, _, parts in recent) / whole:.0f}%" for name in spent)
        return (
            f"warning: training slowed down to {rate / 1e3:.1f} Ktok/s from {best / 1e3:.1f} in {shape}; "
            f"of a step's {whole / WATCHED:.3f}s: {shares}"
        )


@dataclass(frozen=True)
class RankSpeed:
    """A rank over some steps: seconds of work for one micro-batch, share of the work that waited for data, bytes in use."""

    micro_batch_s: float
    wait_share: float
    memory: float


class RankWatch:
    """Compares the ranks every ``WATCHED`` steps.

    Micro-batches are dealt out unevenly where their number is no multiple of the ranks', so what is compared is the
    time of one micro-batch, before a rank waits for others.

    Attributes:
        speeds: of each rank in the last comparison; empty before the first, and with one rank.
        slow: rank -> how many times the fastest one's time it took, where that is too much.
    """

    def __init__(self, *, skip: int = 3) -> None:
        self.speeds: list[RankSpeed] = []
        self.slow: dict[int, float] = {}
        self._skip, self._window = skip, list[Sequence[RankNumbers]]()
        self._said: set[tuple[str, int]] = set()

    def step(self, ranks: Sequence[RankNumbers]) -> list[str]:
        """Note what the ranks measured in a step; returns warnings to print, once for each rank and matter."""
        if len(ranks) < 2 or not any(rank.micro_batches for rank in ranks):
            return []
        if self._skip:
            self._skip -= 1
            return []
        self._window.append(ranks)
        if len(self._window) < WATCHED:
            return []
        columns = list(zip(*self._window, strict=True))
        self._window = []
        if not all(any(step.micro_batches for step in column) for column in columns):
            return []  # a rank had nothing to do in all these steps
        self.speeds = [_speed(column) for column in columns]
        return self._slow() + self._full()

    def _slow(self) -> list[str]:
        times = [speed.micro_batch_s for speed in self.speeds]
        fastest = times.index(min(times))
        self.slow = {rank: time / times[fastest] for rank, time in enumerate(times) if time > APART * times[fastest]}
        return [
            f"warning: ranks differ in speed: rank {rank} takes {times[rank]:.3f}s for a micro-batch, {ratio:.2f} times as long as rank "
            f"{fastest}, and waits for data {100 * self.speeds[rank].wait_share:.0f}% of it; every step waits for the slowest rank"
            for rank, ratio in self.slow.items()
            if self._is_new("slow", rank)
        ]

    def _full(self) -> list[str]:
        used = [speed.memory for speed in self.speeds]
        least = used.index(min(used))
        return [
            f"warning: ranks differ in memory: {_gib(used[rank])} are in use where rank {rank} runs, {_gib(used[least])} where rank "
            f"{least} does; another process may share its device"
            for rank in range(len(used))
            if used[rank] > APART * used[least] and used[rank] - used[least] > LEAST_BYTES and self._is_new("full", rank)
        ]

    def _is_new(self, matter: str, rank: int) -> bool:
        new = (matter, rank) not in self._said
        self._said.add((matter, rank))
        return new


def _speed(steps: Sequence[RankNumbers]) -> RankSpeed:
    work = sum(step.work_s for step in steps)
    waited = sum(step.waited_s for step in steps)
    return RankSpeed(work / sum(step.micro_batches for step in steps), min(1.0, waited / max(work, 1e-9)), steps[-1].memory)


class StallWatch:
    """Says what a rank has been at for too long: a disk that hangs and a rank that waits for another make no step and no noise.

    Use as a context manager; ``at`` costs nothing and may be called outside of it.
    """

    def __init__(self, say: Callable[[str], None], *, after_s: float = STALL_S) -> None:
        self._say, self._after_s = say, after_s
        self._at: tuple[str, float] = ("starting", time.monotonic())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall", daemon=True)

    def at(self, what: str) -> None:
        """What the rank does from now on, as it is to be read after "has been"."""
        self._at = (what, time.monotonic())

    def _watch(self) -> None:
        said = None
        while not self._stop.wait(self._after_s / 20):
            now = self._at
            what, since = now
            if now is not said and time.monotonic() - since > self._after_s:
                said = now
                self._say(f"has been {what} for {(time.monotonic() - since) / 60:.0f} minutes")

    def __enter__(self) -> "StallWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"

"""The ranks of one drafter: joining them, comparing them, and reducing gradients in a fixed order.

Each rank is a process of its own with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. With one rank
there is no process group at all and every operation here is the identity. A rank that dies is noticed and named by
``peers.py``.

Gradients are reduced in buckets: fixed slices of the flat float32 gradient, cut at parameters, always started in the
same order, which is about the one that the backward pass makes them in. A bucket is started as soon as this rank's
last micro-batch of the step has made all its gradients, so the transfer overlaps with the backward pass; a rank
without a micro-batch in the step starts them all at once. As every rank starts the same buckets in the same order,
uneven shares never hang.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflash_offline.errors import TrainError
from dflash_offline.optimizer import Shard, Weights
from dflash_offline.train.peers import Peers

BUCKET_BYTES = 64 << 20
JOIN_MINUTES = 60  # for all ranks to come: each opens the store and may wait for another one's compilation first
# of one collective: longer than one rank may work while the others wait (a checkpoint on a slow disk); the dead are
# noticed by Peers
COLLECTIVE_HOURS = 12


class StoppedTogetherError(TrainError):
    """Training stopped in good order, because another rank was told to."""


@dataclass
class Ranks:
    """This process's place among the ranks. ``size`` 1 needs no process group."""

    rank: int = 0
    size: int = 1
    joined: bool = field(default=False, repr=False)
    peers: Peers | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls) -> "Ranks":
        """Read RANK and WORLD_SIZE; without them this is the only rank.

        Raises:
            TrainError: they are not numbers, or do not fit each other.
        """
        given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
        try:
            rank, size = int(given["RANK"] or 0), int(given["WORLD_SIZE"] or 1)
        except ValueError:
            raise TrainError(f"environment: RANK and WORLD_SIZE must be whole numbers, got {given}") from None
        if not 0 <= rank < size:
            raise TrainError(f"environment: RANK = {rank} is not below WORLD_SIZE = {size}")
        if size > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
            raise TrainError("environment: MASTER_ADDR and MASTER_PORT are needed when WORLD_SIZE is above 1")
        return cls(rank, size)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that writes files."""
        return self.rank == 0

    def join(self, device: torch.device) -> None:
        """Meet the other ranks: NCCL on GPUs, gloo on CPUs."""
        if self.size == 1 or self.joined:
            return
        if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost", "::1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(minutes=JOIN_MINUTES),
                **options,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).splitlines()[0]
            raise TrainError(f"rank {self.rank} of {self.size}: cannot meet the other ranks at {where} ({reason})") from None
        self.joined = True
        dist.distributed_c10d._set_pg_timeout(timedelta(hours=COLLECTIVE_HOURS))
        self.peers = Peers(self.rank, self.size)
        ports, hosts = zip(*self.gather((self.peers.listen() if self.first else None, socket.gethostname())), strict=True)
        self.peers.hosts = list(hosts)
        if not self.first:
            self.peers.connect(os.environ["MASTER_ADDR"], ports[0])
        self.peers.start()

    def leave(self, *, in_order: bool) -> None:
        """Part from the other ranks. ``in_order``: all of them do so now; else they are to learn that this one failed."""
        if not self.joined:
            return
        if self.peers is not None:
            self.peers.close(in_order=in_order)
        if in_order or dist.get_backend() != "nccl":  # NCCL would wait for what the others will never send
            dist.destroy_process_group()
        self.joined = False

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Around every exchange: turns the loss of another rank into one line.

        Raises:
            TrainError: another rank went away.
        """
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            dead = None if self.peers is None else self.peers.who_died()
            other = "another rank" if self.peers is None or dead is None else self.peers.name(dead)
            raise TrainError(f"rank {self.rank} of {self.size}: lost contact with {other}, whose log says why ({reason})") from None

    @property
    def shard(self) -> Shard:
        """This rank's share of what the ranks divide among themselves."""

        def gather(whole: torch.Tensor, own: torch.Tensor) -> None:
            assert self.joined, "shares can be put together once the ranks have met"
            with self.talking():
                together = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
                together(whole, own.clone())  # own may lie inside whole

        return Shard(self.rank, self.size, gather)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.joined:
            with self.talking():
                dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """One (picklable) value of each rank, in order of ranks, on every rank."""
        if not self.joined:
            return [value]
        found: list[Any] = [None] * self.size
        with self.talking():
            dist.all_gather_object(found, value)
        return found

    def told_to_stop(self, *, this: bool) -> str:
        """Which ranks were told to stop, in words, once all have agreed to; ``this``: whether this one was."""
        told = [rank for rank, each in enumerate(self.gather(this)) if each]
        names = [f"rank {rank}" if self.peers is None else self.peers.name(rank) for rank in told]
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Make sure that all ranks run the same job.

        Raises:
            TrainError: a fact differs; the text names it and the ranks.
        """
        everyone = self.gather(dict(facts))
        for name in facts:
            values = [other.get(name) for other in everyone]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise TrainError(
                        f"ranks differ in {name}: rank 0 has {values[0]!r}, rank {rank} has {value!r}; "
                        "start all ranks from the same code and run file"
                    )


# Parameters whose gradients come last, however late their layer runs: the context passes through all layers, so what makes
# it, and what projects it, hears from all of them before its gradient is whole.
COME_LAST = ("fc.", "hidden_norm.", ".k_proj.", ".v_proj.")


class GradientSum:
    """Sums the flat gradient of a ``Weights`` over the ranks, bucket by bucket (see the module's docstring).

    Attributes:
        buckets: [first, last) parameter of each, in the order they are sent.
    """

    def __init__(self, weights: Weights, ranks: Ranks, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.weights, self.ranks = weights, ranks
        late = [any(part in f".{name}" for part in COME_LAST) for name in weights.names]
        runs: list[tuple[int, int]] = []
        first = 0
        for index in range(len(weights.names)):
            size = (weights.offsets[index + 1] - weights.offsets[first]) * 4
            if size >= bucket_bytes or index + 1 == len(weights.names) or late[index + 1] != late[index]:
                runs.append((first, index + 1))
                first = index + 1
        self.buckets = sorted(reversed(runs), key=lambda run: late[run[0]])
        self.bucket_of = {index: number for number, (first, last) in enumerate(self.buckets) for index in range(first, last)}
        self._missing: list[int] = []
        self._next = len(self.buckets)
        self._running: list[dist.Work] = []
        if ranks.size > 1:
            weights.on_gradient = self._made

    def start(self) -> None:
        """Call before this rank's last backward pass of a step: buckets go out as they become complete."""
        if self.ranks.joined:
            self._missing = [last - first for first, last in self.buckets]
            self._next = 0

    def _made(self, index: int) -> None:
        if self._next == len(self.buckets):
            return
        self._missing[self.bucket_of[index]] -= 1
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._send()

    def _send(self) -> None:
        first, last = self.buckets[self._next]
        part = self.weights.gradient[self.weights.offsets[first] : self.weights.offsets[last]]
        with self.ranks.talking():
            work = dist.all_reduce(part, async_op=True)
        assert work is not None
        self._running.append(work)
        self._next += 1

    def finish(self) -> None:
        """Send what is left and wait for all of it."""
        while self._next < len(self.buckets):
            self._send()
        with self.ranks.talking():
            for work in self._running:
                work.wait()
        self._running.clear()

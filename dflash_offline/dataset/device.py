"""Micro-batches where they are trained on: decoded, padded to their shape, with noise.

On a GPU the next micro-batch is copied and decoded on a stream of its own while the present one is trained on.

Legend: C context rows of the shape, N its blocks, B slots of a block, T tokens, k tapped layers, H hidden size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout
from dflash_offline.dataset.batches import Job, MicroBatch
from dflash_offline.dataset.order import BatchShape
from dflash_offline.dataset.prefetch import Prefetcher


@dataclass(frozen=True)
class Timing:
    """What moving a micro-batch took; ``marks``: before copying, before decoding and at the end (events of a GPU, or seconds)."""

    marks: tuple[Any, Any, Any]

    def seconds(self) -> tuple[float, float]:
        """Of copying to the device and of decoding there. On a GPU: once its work is done."""
        begin, copied, end = self.marks
        return seconds_between(begin, copied), seconds_between(copied, end)


@dataclass
class DeviceBatch:
    """A micro-batch on the training device.

    Attributes:
        hidden_states: [C, k * H], zero in padding rows.
        anchor_tokens: int64 [N]; ``labels`` int64 and ``supervised`` bool [N, B].
        last_hidden: [C, H] outputs of the target's last layer, for training towards its distribution.
        num_tokens: context tokens, padding not counted.
        read_bytes, read_s: what reading it took.
        timing: what moving it took.
    """

    job: Job
    hidden_states: Tensor
    blocks: BlockLayout
    anchor_tokens: Tensor
    labels: Tensor
    supervised: Tensor
    last_hidden: Tensor | None = None
    num_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    timing: Timing | None = None

    @property
    def teacher_rows(self) -> Tensor:
        """[N, B - 1] packed row from whose last hidden state the target predicts slots 1 .. B - 1: the one before each.

        Past the end of a sequence, where no slot is supervised, it is the sequence's last row; row 0 for padding blocks.
        """
        return torch.minimum(self.blocks.slot_rows[:, :-1], self.blocks.sequence_end[:, None] - 1).clamp_(min=0)

    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [value for part in (self, self.blocks) for value in part.__dict__.values() if isinstance(value, Tensor)]


def to_device(batch: MicroBatch, *, device: torch.device, dtype: torch.dtype, num_taps: int, noise: float = 0.0) -> DeviceBatch:
    """Decode a micro-batch on the training device, pad it to its shape and add noise.

    Args:
        dtype: of the hidden states.
        num_taps: k; a further layer in the batch, the target's last, becomes ``last_hidden``, without noise.
        noise: uniform in +-noise times the root mean square of each token's tapped state.
    """
    begin = mark(device)
    encoded = batch.encoded.to(device)
    copied = mark(device)
    decoded = encoded.decode(device)  # bf16 [T, k * H], or (k + 1) * H
    width = num_taps * decoded.shape[1] // len(encoded.taps)
    context, count = batch.job.shape.context, batch.num_tokens
    hidden, last = decoded.new_zeros(context, width, dtype=dtype), None
    hidden[:count] = decoded[:, :width]
    if width < decoded.shape[1]:
        last = decoded.new_zeros(context, decoded.shape[1] - width, dtype=dtype)
        last[:count] = decoded[:, width:]
    if noise > 0:
        add_noise(hidden, batch.spans, batch.noise_seeds, amount=noise, num_taps=num_taps)
    timing = Timing((begin, copied, mark(device)))
    tokens, labels, supervised = (array.to(device, non_blocking=True) for array in (batch.anchor_tokens, batch.labels, batch.supervised))
    return DeviceBatch(
        batch.job,
        hidden,
        batch.blocks.to(device, non_blocking=True),
        tokens,
        labels,
        supervised,
        last_hidden=last,
        num_tokens=count,
        read_bytes=batch.encoded.num_bytes,
        read_s=batch.read_s,
        timing=timing,
    )


def mark(device: torch.device) -> Any:
    """Now: an event on the device's current stream, or seconds of the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def add_noise(hidden: Tensor, spans: Sequence[tuple[int, int]], seeds: Sequence[int], *, amount: float, num_taps: int) -> None:
    """Add uniform noise to packed hidden states [C, k * H], in place: +-amount x RMS of each token's state in each tap."""
    generator = torch.Generator(hidden.device)
    for (start, end), seed in zip(spans, seeds, strict=True):
        states = hidden[start:end].unflatten(-1, (num_taps, -1))  # [T, k, H]
        scale = amount * states.float().square().mean(-1, keepdim=True).sqrt()
        drawn = torch.empty(states.shape, dtype=torch.float32, device=hidden.device)
        states += (drawn.uniform_(-1.0, 1.0, generator=generator.manual_seed(seed)) * scale).to(hidden.dtype)


def made_up(
    shape: BatchShape, *, block_size: int, num_taps: int, hidden_size: int, device: torch.device, dtype: torch.dtype, teacher: bool = False
) -> DeviceBatch:
    """A micro-batch of a shape with made-up contents, as full as it gets: what kernels are compiled and tried with.

    ``teacher``: with ``last_hidden``.
    """
    generator = torch.Generator(device).manual_seed(0)
    length = shape.context
    anchors = torch.linspace(1, length - 1, min(shape.blocks, length - 1)).long().unique().numpy()
    blocks = BlockLayout.pack([length], [anchors], block_size=block_size, num_context=length, num_blocks=shape.blocks).to(device)
    supervised = torch.ones(shape.blocks, block_size, dtype=torch.bool, device=device)
    supervised[:, 0] = False
    return DeviceBatch(
        Job(0, 0, 0, [], shape),
        torch.randn(length, num_taps * hidden_size, device=device, generator=generator).to(dtype),
        blocks,
        torch.zeros(shape.blocks, dtype=torch.int64, device=device),
        torch.zeros(shape.blocks, block_size, dtype=torch.int64, device=device),
        supervised,
        last_hidden=torch.randn(length, hidden_size, device=device, generator=generator).to(dtype) if teacher else None,
        num_tokens=length,
    )


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds from one ``mark`` to another; on a GPU both must have happened."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


class DeviceFeed:
    """Takes micro-batches from a ``Prefetcher`` and has the next one on the device before it is asked for.

    Args:
        move: ``to_device`` with everything but the batch filled in.
    """

    def __init__(self, reader: Prefetcher[Job, MicroBatch], move: Callable[[MicroBatch], DeviceBatch], device: torch.device) -> None:
        self._reader, self._move = reader, move
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: tuple[DeviceBatch, torch.cuda.Event] | None = None

    def take(self) -> DeviceBatch:
        """The next micro-batch, ready for the current stream; see ``Prefetcher.take``."""
        if self._stream is None:
            return self._move(self._reader.take())
        batch, ready = self._next or self._start(self._reader.take())
        self._next = None
        current = torch.cuda.current_stream()
        current.wait_event(ready)
        for tensor in batch.tensors():
            tensor.record_stream(current)
        return batch

    @property
    def waited_s(self) -> float:
        """Time spent waiting for the reader so far."""
        return self._reader.waited_s

    def look_ahead(self) -> None:
        """Start on the next micro-batch if it has been read; call it once the present one's work is queued."""
        if self._stream is not None and self._next is None and self._reader.ready:
            self._next = self._start(self._reader.take())

    def _start(self, batch: MicroBatch) -> tuple[DeviceBatch, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            moved, ready = self._move(batch), torch.cuda.Event()
            ready.record()
        return moved, ready

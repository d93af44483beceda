"""Micro-batches where they are trained on: decoded, padded to their shape, with noise.

On a GPU the next micro-batch is copied and decoded on a stream of its own while the present one is trained on.

Legend: C context rows of the shape, N its blocks, B slots of a block, T tokens, k tapped layers, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout
from dflash_offline.dataset.batches import Job, MicroBatch
from dflash_offline.dataset.order import BatchShape
from dflash_offline.dataset.prefetch import Prefetcher


@dataclass
class DeviceBatch:
    """A micro-batch on the training device.

    Attributes:
        hidden_states: [C, k * H], zero in padding rows.
        anchor_tokens: int64 [N]; ``labels`` int64 and ``supervised`` bool [N, B].
        num_tokens: context tokens, padding not counted.
        read_bytes, read_s: what reading it took.
    """

    job: Job
    hidden_states: Tensor
    blocks: BlockLayout
    anchor_tokens: Tensor
    labels: Tensor
    supervised: Tensor
    num_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0

    def tensors(self) -> list[Tensor]:
        """All of its tensors."""
        return [value for part in (self, self.blocks) for value in part.__dict__.values() if isinstance(value, Tensor)]


def to_device(batch: MicroBatch, *, device: torch.device, dtype: torch.dtype, num_taps: int, noise: float = 0.0) -> DeviceBatch:
    """Decode a micro-batch on the training device, pad it to its shape and add noise.

    Args:
        dtype: of the hidden states.
        num_taps: k.
        noise: uniform in +-noise times the root mean square of each token's tapped state.
    """
    decoded = batch.encoded.decode(device)  # bf16 [T, k * H]
    hidden = torch.zeros(batch.job.shape.context, decoded.shape[1], dtype=dtype, device=device)
    hidden[: batch.num_tokens] = decoded
    if noise > 0:
        add_noise(hidden, batch.spans, batch.noise_seeds, amount=noise, num_taps=num_taps)
    moved = (array.to(device, non_blocking=True) for array in (batch.anchor_tokens, batch.labels, batch.supervised))
    counts = {"num_tokens": batch.num_tokens, "read_bytes": batch.encoded.num_bytes, "read_s": batch.read_s}
    return DeviceBatch(batch.job, hidden, batch.blocks.to(device, non_blocking=True), *moved, **counts)


def add_noise(hidden: Tensor, spans: Sequence[tuple[int, int]], seeds: Sequence[int], *, amount: float, num_taps: int) -> None:
    """Add uniform noise to packed hidden states [C, k * H], in place: +-amount x RMS of each token's state in each tap."""
    generator = torch.Generator(hidden.device)
    for (start, end), seed in zip(spans, seeds, strict=True):
        states = hidden[start:end].unflatten(-1, (num_taps, -1))  # [T, k, H]
        scale = amount * states.float().square().mean(-1, keepdim=True).sqrt()
        drawn = torch.empty(states.shape, dtype=torch.float32, device=hidden.device)
        states += (drawn.uniform_(-1.0, 1.0, generator=generator.manual_seed(seed)) * scale).to(hidden.dtype)


def made_up(shape: BatchShape, *, block_size: int, width: int, device: torch.device, dtype: torch.dtype) -> DeviceBatch:
    """A micro-batch of a shape with made-up contents, as full as it gets: what kernels are compiled and tried with."""
    generator = torch.Generator(device).manual_seed(0)
    length = shape.context
    anchors = torch.linspace(1, length - 1, min(shape.blocks, length - 1)).long().unique().numpy()
    blocks = BlockLayout.pack([length], [anchors], block_size=block_size, num_context=length, num_blocks=shape.blocks).to(device)
    supervised = torch.ones(shape.blocks, block_size, dtype=torch.bool, device=device)
    supervised[:, 0] = False
    return DeviceBatch(
        Job(0, 0, 0, [], shape),
        torch.randn(length, width, device=device, generator=generator).to(dtype),
        blocks,
        torch.zeros(shape.blocks, dtype=torch.int64, device=device),
        torch.zeros(shape.blocks, block_size, dtype=torch.int64, device=device),
        supervised,
        num_tokens=length,
    )


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

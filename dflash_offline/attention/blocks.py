"""Where the blocks of a micro-batch lie: every block is an interval of the packed context axis.

N blocks of B slots stand beside C packed context rows (several sequences one after the other). Block n is anchored at
context row ``context_end[n]`` and reads the rows of its own sequence before it, ``context_start[n] <= c < context_end[n]``:
strictly less, because at inference the hidden state of the anchor's token does not exist yet. Slot k of the block
stands for row ``context_end[n] + k``.

Legend: N blocks (anchors), B slots of a block, C packed context rows, S = N * B slots of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Intervals and positions of one micro-batch's blocks. All tensors are int64 and on one device.

    Real blocks come first, sorted by ``context_end`` (and so by sequence): kernels use the order. Blocks from
    ``num_live`` on only fill the shape; theirs are empty intervals at 0, and they see themselves alone.
    """

    block_size: int
    num_live: int
    context_start: Tensor  # [N] first row of the block's sequence
    context_end: Tensor  # [N] row of the anchor itself, one past the last visible row
    sequence_end: Tensor  # [N] one past the last row of the block's sequence; 0 for padding
    context_positions: Tensor  # [C] position of each context row inside its sequence
    anchor_positions: Tensor  # [N] position of slot 0 inside its sequence

    @property
    def num_blocks(self) -> int:
        return self.context_end.shape[0]

    @property
    def num_context(self) -> int:
        return self.context_positions.shape[0]

    @property
    def slot_positions(self) -> Tensor:
        """[N, B] position of each slot inside its sequence."""
        return self.anchor_positions[:, None] + torch.arange(self.block_size, device=self.anchor_positions.device)

    @property
    def slot_rows(self) -> Tensor:
        """[N, B] packed row each slot stands for; may point past the sequence, compare with ``sequence_end``."""
        return self.context_end[:, None] + torch.arange(self.block_size, device=self.context_end.device)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "BlockLayout":
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def pin(self) -> "BlockLayout":
        """The same in page-locked memory, so that ``to(device, non_blocking=True)`` overlaps."""
        return replace(self, **{name: value.pin_memory() for name, value in self.__dict__.items() if isinstance(value, Tensor)})

    @classmethod
    def pack(
        cls,
        lengths: Sequence[int],
        anchors: Sequence[np.ndarray],
        *,
        block_size: int,
        num_context: int | None = None,
        num_blocks: int | None = None,
    ) -> "BlockLayout":
        """Lay sequences of ``lengths`` rows one after the other, with sorted anchor positions for each, on the CPU.

        ``num_context`` and ``num_blocks`` pad both axes to a fixed shape. Padding context rows belong to nobody.
        """
        assert len(lengths) == len(anchors), (len(lengths), len(anchors))
        total, live = sum(lengths), sum(len(positions) for positions in anchors)
        num_context, num_blocks = num_context or total, num_blocks or live
        assert total <= num_context and live <= num_blocks, (total, num_context, live, num_blocks)
        start, end, stop, position = (np.zeros(num_blocks, np.int64) for _ in range(4))
        context_positions = np.zeros(num_context, np.int64)
        row = block = 0
        for length, positions in zip(lengths, anchors, strict=True):
            context_positions[row : row + length] = np.arange(length)
            count = len(positions)
            if count:
                assert positions[0] >= 0 and positions[-1] < length and (np.diff(positions) > 0).all(), (
                    "anchors must rise inside their sequence"
                )
            here = slice(block, block + count)
            start[here], end[here], stop[here], position[here] = row, row + positions, row + length, positions
            row, block = row + length, block + count
        return cls(block_size, live, *(torch.from_numpy(array) for array in (start, end, stop, context_positions, position)))


def lowest_visible(blocks: BlockLayout, window: int | None) -> Tensor:
    """[N, B] first context row each slot sees. A window W counts the query: slot k sees rows >= anchor + k - (W - 1)."""
    start = blocks.context_start[:, None].expand(-1, blocks.block_size)
    return start if window is None else torch.maximum(start, blocks.slot_rows - (window - 1))


def own_block_mask(block_size: int, window: int | None, device: torch.device) -> Tensor:
    """[B, B] slot k (row) sees slot j (column) of its own block: all of them, or causally inside the window."""
    slots = torch.arange(block_size, device=device)
    behind = slots[:, None] - slots[None, :]
    return torch.ones_like(behind, dtype=torch.bool) if window is None else (behind >= 0) & (behind < window)


def dense_mask(blocks: BlockLayout, window: int | None = None) -> Tensor:
    """[S, C + S] the attention rule spelt out: which context row or slot (column) each slot (row) sees."""
    device, (count, size) = blocks.context_end.device, (blocks.num_blocks, blocks.block_size)
    rows = torch.arange(blocks.num_context, device=device)
    context = (rows >= lowest_visible(blocks, window)[..., None]) & (rows < blocks.context_end[:, None, None])  # [N, B, C]
    same_block = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None]
    own = same_block & own_block_mask(size, window, device)[None, :, None, :]  # [N, B, N, B]
    return torch.cat([context.reshape(count * size, -1), own.reshape(count * size, count * size)], dim=1)

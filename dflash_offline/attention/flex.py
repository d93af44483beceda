"""``flex``: compiled, block-sparse ``flex_attention`` over the keys ``[context ; slots]``.

The BlockMask is built from the sorted intervals themselves: which 128 x 128 tiles hold anything, and which are visible
to all their rows. The mask function is then evaluated inside the edge tiles only.

Legend: N blocks, B slots of a block, S = N * B, C context rows, Q and J query and key tiles.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_offline.attention.blocks import BlockLayout, lowest_visible

TILE = 128


class FlexAttention:
    """For GPUs, inside compiled layers. On a CPU it runs uncompiled and dense, which serves to test the mask."""

    name = "flex"
    compiled = True

    def __init__(self, kernel_options: dict[str, Any] | None = None) -> None:
        self.kernel_options = kernel_options

    def plan(self, blocks: BlockLayout, window: int | None) -> BlockMask:
        return block_mask(blocks, window)

    def context_sized(self, plan: BlockMask) -> None:
        """The kernel is generated for C, which the mask function and the mask's lengths hold as a number."""

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: BlockMask
    ) -> Tensor:
        """query [S, A, D], context_* [C, G, D], block_* [S, G, D] -> [S, A, D]."""
        key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        options = {"block_mask": plan, "enable_gqa": query.shape[1] != key.shape[1], "kernel_options": self.kernel_options}
        if torch.compiler.is_compiling():
            attended = flex_attention(query, key, value, **options)
        elif query.is_cuda:
            attended = _compiled_flex()(query, key, value, **options)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
                attended = flex_attention(query, key, value, **options)
        return attended[0].transpose(0, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def block_mask(blocks: BlockLayout, window: int | None) -> BlockMask:
    """The attention rule as a BlockMask over S queries and C + S keys."""
    size, num_context, num_slots = blocks.block_size, blocks.num_context, blocks.num_blocks * blocks.block_size
    some, every = visible_tiles(blocks, window)
    low, end = lowest_visible(blocks, window).flatten(), blocks.context_end.repeat_interleave(size)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        other = key - num_context
        own = (other >= 0) & (other // size == query // size)
        if window is not None:
            own = own & (other <= query) & (query - other < window)
        return ((key < num_context) & (key >= low[query]) & (key < end[query])) | own

    partial, full = (_ordered(tiles) for tiles in (some & ~every, every))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(num_slots, num_context + num_slots))


def visible_tiles(blocks: BlockLayout, window: int | None) -> tuple[Tensor, Tensor]:
    """Bool [Q, J] twice: tiles in which some row sees some key, and tiles in which every row sees every key."""
    size, num_context, num_slots = blocks.block_size, blocks.num_context, blocks.num_blocks * blocks.block_size
    device = blocks.context_end.device
    first = torch.arange(0, num_context + num_slots, TILE, device=device)  # [J] key range of each tile
    last = (first + TILE - 1).clamp(max=num_context + num_slots - 1)
    low, end = lowest_visible(blocks, window)[..., None], blocks.context_end[:, None, None]  # [N, B, 1], [N, 1, 1]
    context_last = last.clamp(max=num_context - 1)
    some = (torch.maximum(low, first) < end) & (torch.maximum(low, first) <= context_last)
    every = (low <= first) & (last < end) & (last < num_context)
    own = num_context + torch.arange(blocks.num_blocks, device=device)[:, None, None] * size
    some = some | ((first < own + size) & (last >= own))
    rows = -num_slots % TILE  # rows that fill up the last query tile see nothing and hide nothing
    some = F.pad(some.flatten(0, 1), (0, 0, 0, rows), value=False).unflatten(0, (-1, TILE)).any(1)
    return some, F.pad(every.flatten(0, 1), (0, 0, 0, rows), value=True).unflatten(0, (-1, TILE)).all(1)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [Q, J] -> counts [1, 1, Q] and, row by row, the indices of the set tiles first [1, 1, Q, J]; int32."""
    indices = torch.argsort(tiles.to(torch.int8), dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]

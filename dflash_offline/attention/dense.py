"""Dense attention paths: ``eager``, the reference everything else is compared with, and ``sdpa`` for CPUs.

Legend: S slots, C context rows, A query heads, G key/value heads, D head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout, dense_mask, lowest_visible, own_block_mask


class EagerAttention:
    """Softmax over all C + S keys in float32, written out. Slow and memory-hungry; the meaning of the others."""

    name = "eager"
    compiled = False

    def plan(self, blocks: BlockLayout, window: int | None) -> Tensor:
        return dense_mask(blocks, window)

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: Tensor
    ) -> Tensor:
        """query [S, A, D], context_* [C, G, D], block_* [S, G, D], plan [S, C + S] bool -> [S, A, D]."""
        group = query.shape[1] // context_key.shape[1]
        key = torch.cat([context_key, block_key]).repeat_interleave(group, dim=1).float()
        value = torch.cat([context_value, block_value]).repeat_interleave(group, dim=1).float()
        scores = torch.einsum("sad,cad->asc", query.float(), key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~plan, float("-inf")).softmax(-1)
        return torch.einsum("asc,cad->sad", weights, value).to(query.dtype)


@dataclass(frozen=True)
class Group:
    """Neighbouring blocks of one sequence, the context rows any of them sees, and who sees what."""

    slots: slice
    context: slice
    mask: Tensor  # [slots, context + slots] bool


class SdpaAttention:
    """``scaled_dot_product_attention``, a few neighbouring blocks at a time over the context they can see.

    One dense call would spend most of its time on other blocks and other sequences: 2,560 keys a query where about 360
    are visible, in a micro-batch of three 350-token sequences with 64 blocks of 8 each. Uncompiled; made for CPUs.
    """

    name = "sdpa"
    compiled = False
    blocks_per_group = 16

    def plan(self, blocks: BlockLayout, window: int | None) -> list[Group]:
        starts, ends = blocks.context_start.tolist(), blocks.context_end.tolist()
        size, groups, first = blocks.block_size, [], 0
        own = own_block_mask(size, window, blocks.context_end.device)
        lowest = lowest_visible(blocks, window)
        for block in range(1, blocks.num_blocks + 1):
            if block < blocks.num_blocks and starts[block] == starts[first] and block - first < self.blocks_per_group:
                continue
            low, high = starts[first], max(ends[first:block])
            rows = torch.arange(low, high, device=own.device)
            here = slice(first, block)
            context = (rows >= lowest[here, :, None]) & (rows < blocks.context_end[here, None, None])  # [blocks, B, context]
            mask = torch.cat([context.flatten(0, 1), torch.block_diag(*[own] * (block - first)).bool()], dim=1)
            groups.append(Group(slice(first * size, block * size), slice(low, high), mask))
            first = block
        return groups

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: list[Group]
    ) -> Tensor:
        """Same shapes as :meth:`EagerAttention.attend`."""
        grouped, attended = query.shape[1] != context_key.shape[1], []
        for group in plan:
            key = torch.cat([context_key[group.context], block_key[group.slots]])
            value = torch.cat([context_value[group.context], block_value[group.slots]])
            states = [part.transpose(0, 1)[None] for part in (query[group.slots], key, value)]
            attended.append(F.scaled_dot_product_attention(*states, attn_mask=group.mask, enable_gqa=grouped)[0].transpose(0, 1))
        return torch.cat(attended)

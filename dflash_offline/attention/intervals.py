"""``triton``: block attention by kernels that know a block as an interval (``interval_kernels.py``).

Two operators, so that compiled layers call the kernels as they are: attention, and its gradient.

Legend: N blocks, B slots of a block, S = N * B, C context rows, A query heads, G key/value heads, D head width, J tiles
of context keys.
"""

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout
from dflash_offline.errors import TrainError


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels: rows, keys, warps and pipeline stages of each. Powers of two, at least 16."""

    forward_rows: int = 128
    forward_keys: int = 128
    forward_warps: int = 8
    forward_stages: int = 3
    query_rows: int = 128
    query_keys: int = 64
    query_warps: int = 8
    query_stages: int = 3
    key_rows: int = 64
    key_keys: int = 128
    key_warps: int = 8
    key_stages: int = 3
    key_splits: int = 2
    """Programs that share the rows of one tile of context keys; their sums are added in a fixed order."""


class IntervalPlan(NamedTuple):
    """What the kernels know about a micro-batch."""

    start: Tensor  # [N] int32, rising
    end: Tensor  # [N] int32, rising
    ranges: Tensor  # [J, 4] int32: blocks that read any of a key tile (first, end) and all of it (first, end)
    block_size: int
    window: int  # 0: none


class IntervalAttention:
    """For GPUs with bf16 matrix units and heads up to 128 wide; runs alike inside and outside compiled layers."""

    name = "triton"
    compiled = True

    def __init__(self, tiles: Tiles | None = None) -> None:
        self.tiles = tiles or Tiles()
        self._attention = operators()

    def plan(self, blocks: BlockLayout, window: int | None) -> IntervalPlan:
        start, end = rising(blocks.context_start, blocks.context_end)
        ranges = key_ranges(start, end, blocks.num_context, blocks.block_size, window, self.tiles.key_keys)
        return IntervalPlan(start.to(torch.int32), end.to(torch.int32), ranges.to(torch.int32), blocks.block_size, window or 0)

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: IntervalPlan
    ) -> Tensor:
        """query [S, A, D], context_* [C, G, D], block_* [S, G, D] -> [S, A, D]."""
        states = [part.contiguous() for part in (query, context_key, context_value, block_key, block_value)]
        return self._attention(*states, plan.start, plan.end, plan.ranges, plan.block_size, plan.window, list(astuple(self.tiles)))[0]


def rising(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The same intervals with both bounds never falling: empty ones (padding) are moved to where the last one ended."""
    highest = torch.cummax(end, 0).values
    empty = start >= end
    return torch.where(empty, highest, start), torch.where(empty, highest, end)


def key_ranges(start: Tensor, end: Tensor, num_context: int, block_size: int, window: int | None, tile: int) -> Tensor:
    """[J, 4] for each tile of context keys: first and end of the blocks that read any of it, and of those that read all of it.

    ``start`` and ``end`` rise, so both are contiguous. A sliding window moves a block's lower bound to ``end - (W - 1)``
    for slot 0 and ``end + B - 1 - (W - 1)`` for the last slot.
    """
    first = torch.arange(0, num_context, tile, device=end.device)
    last = (first + tile).clamp(max=num_context)  # one past
    low = start if window is None else torch.minimum(torch.maximum(start, end - (window - 1)), end)
    low_of_last_slot = start if window is None else torch.maximum(start, end + block_size - window)
    any_first, any_end = torch.searchsorted(end, first, right=True), torch.searchsorted(low, last)
    all_first, all_end = torch.searchsorted(end, first + tile), torch.searchsorted(low_of_last_slot, first, right=True)
    any_end = torch.maximum(any_end, any_first)
    all_first = torch.minimum(torch.maximum(all_first, any_first), any_end)
    return torch.stack([any_first, any_end, all_first, torch.minimum(torch.maximum(all_end, all_first), any_end)], 1)


def own_keys(rows: int, rows_of_block: int, block_size: int) -> int:
    """Slots of the blocks that a tile of ``rows`` can touch, as a power of two."""
    blocks = max(1, rows // rows_of_block) if rows % rows_of_block == 0 or rows_of_block % rows == 0 else 1 - (1 - rows) // rows_of_block
    return max(16, 1 << (blocks * block_size - 1).bit_length())


@functools.cache
def operators() -> Callable[..., Any]:
    """Register the operators with PyTorch and return the differentiable one.

    Raises:
        TrainError: this PyTorch came without Triton.
    """
    try:
        import triton
    except ImportError:
        raise TrainError('attention = "triton" needs the triton package, which comes with PyTorch for NVIDIA GPUs; use "flex"') from None
    from dflash_offline.attention import interval_kernels as kernels

    def sizes(query: Tensor, context_key: Tensor, block_size: int) -> dict[str, int]:
        heads, width = query.shape[1:]
        return {"A": heads, "P": heads // context_key.shape[1], "B": block_size, "D": width, "DP": max(16, triton.next_power_of_2(width))}

    @torch.library.custom_op("dflash_offline::block_attention", mutates_args=())
    def attention(
        query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
        start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        of, shape = Tiles(*tiles), sizes(query, context_key, block_size)
        rows = query.shape[0] * shape["P"]
        out, normaliser = torch.empty_like(query), query.new_empty(context_key.shape[1], rows, dtype=torch.float32)
        kernels.forward_kernel[(triton.cdiv(rows, of.forward_rows), context_key.shape[1])](
            query, context_key, context_value, block_key, block_value, out, normaliser, start, end,
            rows, context_key.shape[0], query.shape[2] ** -0.5, **shape, M=of.forward_rows, K=of.forward_keys, WINDOW=window,
            OWN_KEYS=own_keys(of.forward_rows, block_size * shape["P"], block_size),
            num_warps=of.forward_warps, num_stages=of.forward_stages,
        )  # fmt: skip
        return out, normaliser

    @attention.register_fake
    def _(query, context_key, *_):
        groups = context_key.shape[1]
        return torch.empty_like(query), query.new_empty(groups, query.shape[0] * query.shape[1] // groups, dtype=torch.float32)

    @torch.library.custom_op("dflash_offline::block_attention_backward", mutates_args=())
    def backward(
        gradient: Tensor, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
        out: Tensor, normaliser: Tensor, start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        of, shape = Tiles(*tiles), sizes(query, context_key, block_size)
        num_context, num_keys = context_key.shape[:2]
        rows, scale = query.shape[0] * shape["P"], query.shape[2] ** -0.5
        gradient = gradient.contiguous()
        by_query, delta = torch.empty_like(query), torch.empty_like(normaliser)
        kernels.query_gradient_kernel[(triton.cdiv(rows, of.query_rows), num_keys)](
            query, context_key, context_value, block_key, block_value, out, gradient, normaliser, delta, by_query, start, end,
            rows, num_context, scale, **shape, M=of.query_rows, K=of.query_keys, WINDOW=window,
            OWN_KEYS=own_keys(of.query_rows, block_size * shape["P"], block_size),
            num_warps=of.query_warps, num_stages=of.query_stages,
        )  # fmt: skip
        dtype = context_key.dtype if of.key_splits == 1 else torch.float32
        by_key, by_value = (context_key.new_empty(of.key_splits, *context_key.shape, dtype=dtype) for _ in range(2))
        kernels.context_gradient_kernel[(triton.cdiv(num_context, of.key_keys), num_keys, of.key_splits)](
            query, context_key, context_value, gradient, normaliser, delta, by_key, by_value, start, end, ranges,
            rows, num_context, scale, **shape, M=of.key_rows, K=of.key_keys, WINDOW=window, SPLITS=of.key_splits,
            num_warps=of.key_warps, num_stages=of.key_stages,
        )  # fmt: skip
        by_block_key, by_block_value = torch.empty_like(block_key), torch.empty_like(block_value)
        blocks, keys = max(1, 64 // block_size), max(16, triton.next_power_of_2(max(1, 64 // block_size) * block_size))
        kernels.block_gradient_kernel[(triton.cdiv(query.shape[0], blocks * block_size), num_keys)](
            query, block_key, block_value, gradient, normaliser, delta, by_block_key, by_block_value,
            rows, scale, **shape, M=64, K=keys, BLOCKS=blocks, WINDOW=window, num_warps=4, num_stages=2,
        )  # fmt: skip
        by_key, by_value = (parts[0] if of.key_splits == 1 else parts.sum(0).to(context_key.dtype) for parts in (by_key, by_value))
        return by_query, by_key, by_value, by_block_key, by_block_value

    @backward.register_fake
    def _(gradient, query, context_key, context_value, block_key, block_value, *_):
        return tuple(torch.empty_like(state) for state in (query, context_key, context_value, block_key, block_value))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:5], *output, *inputs[5:8])
        ctx.constants = inputs[8:]

    def differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return *backward(gradient, *ctx.saved_tensors, *ctx.constants), *[None] * 6

    attention.register_autograd(differentiate, setup_context=keep)
    return attention

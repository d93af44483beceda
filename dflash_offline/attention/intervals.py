"""``triton``: block attention by kernels that know a block as an interval (``interval_kernels.py``).

Two operators, so that compiled layers call the kernels as they are: attention, and its gradient. A graph knows of them the
shapes of their results alone, which holds for every C (``register_fake``: nothing there may turn C into a number).

Legend: N blocks, B slots of a block, S = N * B, C context rows, A query heads, G key/value heads, D head width, J tiles
of context keys.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout
from dflash_offline.errors import TrainError


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels: rows, keys, warps and pipeline stages of each. Powers of two, at least 16.

    The defaults are the fastest of ``benchmarks/attention_kernels.py`` on an H200 with heads 128 wide.
    """

    forward_rows: int = 128
    forward_keys: int = 64
    forward_warps: int = 8
    forward_stages: int = 3
    query_rows: int = 64
    query_keys: int = 64
    query_warps: int = 4
    query_stages: int = 2
    key_rows: int = 64
    key_keys: int = 64
    key_warps: int = 4
    key_stages: int = 2
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
        self._tile_sizes = list(astuple(self.tiles))  # here: PyTorch 2.11 with Python 3.11 cannot compile a layer with astuple in it
        self._attention = operators()

    def compile_kernels(self, states: Sequence[Tensor], blocks: BlockLayout, windows: Iterable[int | None]) -> None:
        """Have Triton compile all kernels at the same time: one after the other they take most of ten seconds.

        Args:
            states: query, context key and value, block key and value of real head sizes, as ``attend`` takes them. N and C
                may be small; Triton compiles anew for a number that is no multiple of 16 where these are.
        """
        query, groups, tiles = states[0], states[1].shape[1], self.tiles
        sums, device = query.new_zeros(groups, query.shape[0] * query.shape[1] // groups, dtype=torch.float32), query.device
        jobs: list[Callable[[], Any]] = []
        for plan in (self.plan(blocks, window) for window in windows):
            jobs += [
                functools.partial(launch_context_gradient, states, query, sums, sums, plan, tiles),
                functools.partial(launch_query_gradient, states, query, query, sums, plan, tiles),
                functools.partial(launch_forward, states, plan, tiles),
                functools.partial(launch_block_gradient, states, query, sums, sums, plan),
            ]

        def run(job: Callable[[], Any]) -> None:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                torch.zeros(1, device=device)  # a thread has no CUDA context before its first launch, and Triton needs one
                job()

        with ThreadPoolExecutor(len(jobs)) as threads:
            for done in [threads.submit(run, job) for job in jobs]:
                done.result()

    def plan(self, blocks: BlockLayout, window: int | None) -> IntervalPlan:
        start, end = rising(blocks.context_start, blocks.context_end)
        ranges = key_ranges(start, end, blocks.num_context, blocks.block_size, window, self.tiles.key_keys)
        return IntervalPlan(start.to(torch.int32), end.to(torch.int32), ranges.to(torch.int32), blocks.block_size, window or 0)

    def context_sized(self, plan: IntervalPlan) -> list[Tensor]:
        """Only the key tiles: the kernels are inside an operator, which reads C off its inputs when it runs."""
        return [plan.ranges]

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: IntervalPlan
    ) -> Tensor:
        """query [S, A, D], context_* [C, G, D], block_* [S, G, D] -> [S, A, D]."""
        states = [part.contiguous() for part in (query, context_key, context_value, block_key, block_value)]
        return self._attention(*states, plan.start, plan.end, plan.ranges, plan.block_size, plan.window, self._tile_sizes)[0]


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


def _sizes(query: Tensor, keys: Tensor, block_size: int) -> dict[str, int]:
    """The constants every kernel is compiled for."""
    heads, width = query.shape[1:]
    return {"A": heads, "P": heads // keys.shape[1], "B": block_size, "D": width, "DP": max(16, 1 << (width - 1).bit_length())}


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Whether a GPU copies tiles by itself (Hopper and later), without threads that compute addresses."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def context_tiles(states: Sequence[Tensor], rows: int) -> tuple[list[Any], bool]:
    """The states with context keys and values [C, G, D] as descriptors of tiles of ``rows``, where that is possible; and whether."""
    query, key, value, *block = states
    count, _, width = key.shape
    if not has_bulk_copies(key.device) or not count or width & (width - 1) or width < 16:
        return list(states), False
    from triton.tools.tensor_descriptor import TensorDescriptor

    described = [TensorDescriptor.from_tensor(part.view(count, -1), [rows, width]) for part in (key, value)]
    return [query, *described, *block], True


def launch_forward(states: Sequence[Tensor], plan: IntervalPlan, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """states: query, context key and value, block key and value -> out [S, A, D], normaliser [G, S * A / G]."""
    from dflash_offline.attention.interval_kernels import forward_kernel

    query, keys = states[0], states[1]
    sizes, groups = _sizes(query, keys, plan.block_size), keys.shape[1]
    rows = query.shape[0] * sizes["P"]
    out, normaliser = torch.empty_like(query), query.new_empty(groups, rows, dtype=torch.float32)
    inputs, bulk = context_tiles(states, tiles.forward_keys)
    forward_kernel[(-(-rows // tiles.forward_rows), groups)](
        *inputs, out, normaliser, plan.start, plan.end, rows, keys.shape[0], query.shape[2] ** -0.5,
        **sizes, M=tiles.forward_rows, K=tiles.forward_keys, WINDOW=plan.window, TMA=bulk,
        OWN_KEYS=own_keys(tiles.forward_rows, plan.block_size * sizes["P"], plan.block_size),
        num_warps=tiles.forward_warps, num_stages=tiles.forward_stages,
    )  # fmt: skip
    return out, normaliser


def launch_query_gradient(
    states: Sequence[Tensor], out: Tensor, gradient: Tensor, normaliser: Tensor, plan: IntervalPlan, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """-> gradient of the query [S, A, D], delta [G, S * A / G]."""
    from dflash_offline.attention.interval_kernels import query_gradient_kernel

    query, keys = states[0], states[1]
    sizes, groups = _sizes(query, keys, plan.block_size), keys.shape[1]
    rows = query.shape[0] * sizes["P"]
    by_query, delta = torch.empty_like(query), torch.empty_like(normaliser)
    inputs, bulk = context_tiles(states, tiles.query_keys)
    query_gradient_kernel[(-(-rows // tiles.query_rows), groups)](
        *inputs, out, gradient, normaliser, delta, by_query, plan.start, plan.end, rows, keys.shape[0], query.shape[2] ** -0.5,
        **sizes, M=tiles.query_rows, K=tiles.query_keys, WINDOW=plan.window, TMA=bulk,
        OWN_KEYS=own_keys(tiles.query_rows, plan.block_size * sizes["P"], plan.block_size),
        num_warps=tiles.query_warps, num_stages=tiles.query_stages,
    )  # fmt: skip
    return by_query, delta


def launch_context_gradient(
    states: Sequence[Tensor], gradient: Tensor, normaliser: Tensor, delta: Tensor, plan: IntervalPlan, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """-> gradients of context keys and values [C, G, D]."""
    from dflash_offline.attention.interval_kernels import context_gradient_kernel

    query, key, value = states[:3]
    sizes, (count, groups) = _sizes(query, key, plan.block_size), key.shape[:2]
    dtype = key.dtype if tiles.key_splits == 1 else torch.float32
    by_key, by_value = (key.new_empty(tiles.key_splits, *key.shape, dtype=dtype) for _ in range(2))
    context_gradient_kernel[(groups * tiles.key_splits, -(-count // tiles.key_keys))](
        query, key, value, gradient, normaliser, delta, by_key, by_value, plan.start, plan.end, plan.ranges,
        query.shape[0] * sizes["P"], count, query.shape[2] ** -0.5,
        **sizes, M=tiles.key_rows, K=tiles.key_keys, WINDOW=plan.window, SPLITS=tiles.key_splits,
        num_warps=tiles.key_warps, num_stages=tiles.key_stages,
    )  # fmt: skip
    if tiles.key_splits == 1:
        return by_key[0], by_value[0]
    return by_key.sum(0).to(key.dtype), by_value.sum(0).to(key.dtype)


def launch_block_gradient(
    states: Sequence[Tensor], gradient: Tensor, normaliser: Tensor, delta: Tensor, plan: IntervalPlan
) -> tuple[Tensor, Tensor]:
    """-> gradients of block keys and values [S, G, D]."""
    from dflash_offline.attention.interval_kernels import block_gradient_kernel

    query, _, _, key, value = states
    sizes, groups, size = _sizes(query, key, plan.block_size), key.shape[1], plan.block_size
    by_key, by_value = torch.empty_like(key), torch.empty_like(value)
    blocks = max(1, 64 // size)
    block_gradient_kernel[(-(-query.shape[0] // (blocks * size)), groups)](
        query, key, value, gradient, normaliser, delta, by_key, by_value, query.shape[0] * sizes["P"], query.shape[2] ** -0.5,
        **sizes, M=64, K=max(16, 1 << (blocks * size - 1).bit_length()), BLOCKS=blocks, WINDOW=plan.window, num_warps=4, num_stages=2,
    )  # fmt: skip
    return by_key, by_value


@functools.cache
def operators() -> Callable[..., Any]:
    """Register the operators with PyTorch and return the differentiable one.

    Raises:
        TrainError: this PyTorch came without Triton.
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        raise TrainError('attention = "triton" needs the triton package, which comes with PyTorch for NVIDIA GPUs; use "sdpa"') from None

    @torch.library.custom_op("dflash_offline::block_attention", mutates_args=())
    def attention(
        query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
        start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        states = (query, context_key, context_value, block_key, block_value)
        return launch_forward(states, IntervalPlan(start, end, ranges, block_size, window), Tiles(*tiles))

    @attention.register_fake
    def _(query, context_key, *_):
        groups = context_key.shape[1]
        return torch.empty_like(query), query.new_empty(groups, query.shape[0] * query.shape[1] // groups, dtype=torch.float32)

    @torch.library.custom_op("dflash_offline::block_attention_backward", mutates_args=())
    def backward(
        gradient: Tensor, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
        out: Tensor, normaliser: Tensor, start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        states, of = (query, context_key, context_value, block_key, block_value), Tiles(*tiles)
        plan, gradient = IntervalPlan(start, end, ranges, block_size, window), gradient.contiguous()
        by_query, delta = launch_query_gradient(states, out, gradient, normaliser, plan, of)
        by_context = launch_context_gradient(states, gradient, normaliser, delta, plan, of)
        return by_query, *by_context, *launch_block_gradient(states, gradient, normaliser, delta, plan)

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

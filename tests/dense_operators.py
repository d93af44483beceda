"""The operators of the ``triton`` attention path on a CPU, written out densely, so that layers with them can be compiled and run there.

Legend: S slots, C context rows, A query heads, G key/value heads, D head width.
"""

import torch
from torch import Tensor

from dflash_offline.attention.intervals import Tiles, operators


def register() -> None:
    """Give the operators a CPU kernel each; their shapes, gradient formula and schema stay those of the GPU."""
    operators()
    torch.library.register_kernel("dflash_offline::block_attention", "cpu", attention)
    torch.library.register_kernel("dflash_offline::block_attention_backward", "cpu", backward)


def attention(
    query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
    start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    states = (query, context_key, context_value, block_key, block_value)
    assert all(state.is_contiguous() for state in states), "kernels read contiguous tensors"
    assert ranges.shape == (-(-context_key.shape[0] // Tiles(*tiles).key_keys), 4), (ranges.shape, context_key.shape)
    weights, _, value = weigh(states, start, end, block_size, window)
    out = torch.einsum("asc,cad->sad", weights, value).to(query.dtype).contiguous()
    groups = context_key.shape[1]
    return out, torch.zeros(groups, query.shape[0] * query.shape[1] // groups)


def backward(
    gradient: Tensor, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor,
    out: Tensor, normaliser: Tensor, start: Tensor, end: Tensor, ranges: Tensor, block_size: int, window: int, tiles: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    states, upstream = (query, context_key, context_value, block_key, block_value), gradient.float()
    weights, key, value = weigh(states, start, end, block_size, window)
    by_weights = torch.einsum("sad,cad->asc", upstream, value)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True)) * query.shape[-1] ** -0.5
    by_query = torch.einsum("asc,cad->sad", by_scores, key)
    by_key, by_value = torch.einsum("asc,sad->cad", by_scores, query.float()), torch.einsum("asc,sad->cad", weights, upstream)
    count, groups = context_key.shape[:2]
    by_key, by_value = (each.unflatten(1, (groups, -1)).sum(2) for each in (by_key, by_value))
    found = by_query, by_key[:count], by_value[:count], by_key[count:], by_value[count:]
    return tuple(each.to(query.dtype).clone(memory_format=torch.contiguous_format) for each in found)


def weigh(states: tuple[Tensor, ...], start: Tensor, end: Tensor, block_size: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights [A, S, C + S], keys and values [C + S, A, D] of each query head, float32."""
    query, context_key, context_value, block_key, block_value = states
    slots, columns = torch.arange(query.shape[0]), torch.arange(context_key.shape[0])
    low, high = (bound.long().repeat_interleave(block_size)[:, None] for bound in (start, end))
    behind, own = slots[:, None] - slots, slots[:, None] // block_size == slots // block_size
    if window:
        low = torch.maximum(low, high + (slots % block_size)[:, None] - (window - 1))
        own = own & (behind >= 0) & (behind < window)
    seen = torch.cat([(columns >= low) & (columns < high), own], dim=1)
    group = query.shape[1] // context_key.shape[1]
    key, value = (
        torch.cat(pair).repeat_interleave(group, dim=1).float() for pair in ((context_key, block_key), (context_value, block_value))
    )
    scores = torch.einsum("sad,cad->asc", query.float(), key) * query.shape[-1] ** -0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1), key, value

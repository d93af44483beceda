"""Dense attention paths: ``eager``, the reference everything else is compared with, and ``sdpa`` for CPUs.

Legend: S slots, C context rows, A query heads, G key/value heads, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout, dense_mask


class EagerAttention:
    """Softmax over all C + S keys in float32, written out. Slow and memory-hungry; the meaning of the others."""

    name = "eager"

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


class SdpaAttention:
    """``scaled_dot_product_attention`` with the dense mask."""

    name = "sdpa"

    def plan(self, blocks: BlockLayout, window: int | None) -> Tensor:
        return dense_mask(blocks, window)

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: Tensor
    ) -> Tensor:
        """Same shapes as :meth:`EagerAttention.attend`."""
        key, value = torch.cat([context_key, block_key]), torch.cat([context_value, block_value])
        query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=plan, enable_gqa=query.shape[1] != key.shape[1])
        return out[0].transpose(0, 1)

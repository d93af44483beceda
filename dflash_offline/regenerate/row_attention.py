"""Attention of one new token for each of many rows, over key and value buffers of fixed shape.

transformers' own paths take a mask over the whole buffer and repeat the key/value heads for every query head; with
hundreds of rows that is most of a step's time. Here a program takes one row and one key/value head, reads the row's
keys and values up to its length and no further, and serves all query heads of the group.

It is registered with transformers under ``NAME`` and gets its two inputs where models pass them on unchanged: the
buffers through the cache, the rows' lengths in place of the mask.

Shapes: R rows, Q new tokens, L buffer length, H query heads, G key/value heads, D head width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, DynamicCache

NAME = "dflash_rows"


class RowBuffers(DynamicCache):
    """A transformers cache whose layers are buffers [R, L, G, D].

    Before a forward, ``begin`` says what it is: prompts that enter some rows, or the next token of all rows.
    """

    def __init__(self, num_rows: int, length: int) -> None:
        super().__init__()
        self.num_rows, self.length = num_rows, length
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._entering: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._all: torch.Tensor | None = None

    def enter(self, rows: torch.Tensor) -> None:
        """The next forward brings prompts into these rows, from position 0 on."""
        self._entering = rows

    def advance(self, positions: torch.Tensor) -> None:
        """The next forward brings one token to every row, at ``positions`` [R]."""
        self._entering, self._positions = None, positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, G, Q, D]. Prompts see only themselves, so they get them back as they are; else
        the whole buffers are returned, in their own layout."""
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = tuple(
                states.new_zeros(self.num_rows, self.length, states.shape[1], states.shape[3]) for states in (key_states, value_states)
            )
            self._all = torch.arange(self.num_rows, device=key_states.device)
        buffers = self.buffers[layer_idx]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            if self._entering is not None:
                buffer[self._entering, : states.shape[2]] = states.transpose(1, 2)
            else:
                buffer[self._all, self._positions] = states[:, :, 0]
        return (key_states, value_states) if self._entering is not None else buffers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are given, never worked out from the cache."""
        return 0


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: ``query`` [rows, H, Q, D] -> [rows, Q, H, D].

    ``attention_mask`` is no mask but the rows' lengths, int64 [R, 1, 1, 1], or empty for prompts: those are causal, and
    what pads them on the right is seen by nobody.
    """
    refused = [name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if kwargs.get(name) is not None]
    assert not refused, f"attention with {refused} is not computed here; supports() or the self-check should have said so"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask.numel() == 0:
        grouped = key.shape[1] != query.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None
    return one_token_attention(query[:, :, 0], key, value, attention_mask.flatten(), scaling)[:, None], None


def one_token_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of ``query`` [R, H, D] over the first ``lengths`` [R] entries of ``keys``, ``values`` [R, L, G, D] -> [R, H, D]."""
    if query.is_cuda:
        from dflash_offline.regenerate.row_kernel import row_attention

        return row_attention(query, keys, values, lengths, scaling)
    visible = torch.arange(keys.shape[1], device=keys.device) < lengths[:, None]
    grouped = keys.shape[2] != query.shape[1]
    out = F.scaled_dot_product_attention(
        query[:, :, None],
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None, None],
        scale=scaling,
        enable_gqa=grouped,
    )
    return out[:, :, 0]


def set_attention(model: nn.Module, name: str) -> None:
    """Have every layer of a model attend by ``NAME``, or by another function that transformers knows."""
    AttentionInterface.register(NAME, attend)
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = name

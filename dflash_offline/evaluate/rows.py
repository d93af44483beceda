"""Target and drafter over several sequences at once, with buffers of fixed shape.

Every sequence has a row in each key/value buffer and writes at its own positions. Nothing is ever cropped: what a
refused token wrote lies behind the row's length, is masked, and is overwritten by the next step. Shapes never change
between steps, so a step can be recorded once as a CUDA graph and replayed.

Shapes: R rows (sequences), Q new tokens of each, L buffer length, B block size, K taps, H hidden, G key/value heads,
D head width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from dflash_offline.drafter import Drafter
from dflash_offline.evaluate.target_steps import SteppedTarget, TargetStep

ATTENTIONS = ("sdpa", "eager")  # implementations that take a mask of our own


class RowsCache(DynamicCache):
    """A transformers cache whose layers are buffers [R, L, G, D] written at given positions."""

    def __init__(self, num_rows: int, length: int) -> None:
        super().__init__()
        self.num_rows, self.length = num_rows, length
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows: torch.Tensor | None = None  # rows of the present forward; None for all
        self.positions: torch.Tensor | None = None  # [rows, Q] where its tokens stand

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [rows, G, Q, D] of a layer; return all of these rows, [rows, G, L, D]."""
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = tuple(
                states.new_zeros(self.num_rows, self.length, states.shape[1], states.shape[3]) for states in (key_states, value_states)
            )
        out = []
        for buffer, states in zip(self.buffers[layer_idx], (key_states, value_states), strict=True):
            rows = torch.arange(self.num_rows, device=states.device) if self.rows is None else self.rows
            buffer[rows[:, None], self.positions] = states.transpose(1, 2)
            out.append((buffer if self.rows is None else buffer[rows]).transpose(1, 2))
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: masks and positions are given, never worked out from the cache."""
        return 0


class RowsTarget:
    """A target over R sequences.

    Args:
        target: the loaded target with its taps; one that ``supports`` allows.
        num_rows, length: of the buffers; a row's tokens and one block more must fit into the length.
    """

    def __init__(self, target: SteppedTarget, *, num_rows: int, length: int) -> None:
        self.target, self.cache = target, RowsCache(num_rows, length)
        self.num_rows, self.length = num_rows, length

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None, logits_to_keep: int | torch.Tensor = 0
    ) -> TargetStep:
        """Run tokens [rows, Q] at positions [rows, Q] -> logits [rows, Q, V], hidden [rows, Q, K*H]."""
        self.cache.rows, self.cache.positions = rows, positions
        visible = torch.arange(self.length, device=tokens.device) <= positions[..., None]  # [rows, Q, L]
        mask = visible[:, None]
        if self.target.model.config._attn_implementation == "eager":
            dtype = self.target.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return self.target.forward(tokens, self.cache, attention_mask=mask, position_ids=positions, logits_to_keep=logits_to_keep)


class RowsDrafter:
    """A drafter over R sequences: context keys and values in buffers [R, L + B, G, D], the block's own behind them."""

    def __init__(self, drafter: Drafter, *, num_rows: int, length: int) -> None:
        shape, weight = drafter.shape, drafter.norm.weight
        self.drafter, self.num_rows, self.length, self.block_size = drafter, num_rows, length, shape.block_size
        size = (num_rows, length + shape.block_size, shape.num_key_value_heads, shape.head_dim)
        self.keys = [weight.new_zeros(size) for _ in drafter.layers]
        self.values = [weight.new_zeros(size) for _ in drafter.layers]
        self.all_rows = torch.arange(num_rows, device=weight.device)

    @torch.inference_mode()
    def add_context(self, taps: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Take in hidden states [rows, Q, K*H] at positions [rows, Q]."""
        rows = self.all_rows if rows is None else rows
        context = self.drafter.context_features(taps.to(self.drafter.norm.weight.dtype).flatten(0, 1))
        rotation = self.drafter.rotation(positions.flatten())
        for layer, keys, values in zip(self.drafter.layers, self.keys, self.values, strict=True):
            key, value = layer.self_attn.context(layer.self_attn.project_context(context), rotation)
            keys[rows[:, None], positions] = key.unflatten(0, positions.shape)
            values[rows[:, None], positions] = value.unflatten(0, positions.shape)

    @torch.inference_mode()
    def draft(self, embeddings: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Blocks of embeddings [R, B, H] at positions ``start`` [R] on -> [R, B, H] for the head."""
        shape, size, length = self.drafter.shape, self.block_size, self.length
        slots = torch.arange(size, device=start.device)
        rotation = self.drafter.rotation((start[:, None] + slots).flatten())
        masks = {window: self._mask(start, window) for window in dict.fromkeys(shape.layer_windows)}
        states = embeddings.flatten(0, 1)
        for layer, keys, values, window in zip(self.drafter.layers, self.keys, self.values, shape.layer_windows, strict=True):
            query, key, value = layer.self_attn.block(layer.input_layernorm(states), rotation, compact=False)
            keys[:, length:], values[:, length:] = key.unflatten(0, (-1, size)), value.unflatten(0, (-1, size))
            attended = F.scaled_dot_product_attention(
                query.unflatten(0, (-1, size)).transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=masks[window],
                enable_gqa=shape.num_attention_heads != shape.num_key_value_heads,
            )
            states = layer.finish(states, attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return self.drafter.norm(states).unflatten(0, (-1, size))

    def _mask(self, start: torch.Tensor, window: int | None) -> torch.Tensor:
        """[R, 1, B, L + B] what each slot sees: context before the block, and its own block (causal where it slides)."""
        rows, slots = torch.arange(self.length, device=start.device), torch.arange(self.block_size, device=start.device)
        context = (rows < start[:, None, None]).expand(-1, self.block_size, -1)
        own = torch.ones(len(start), self.block_size, self.block_size, dtype=torch.bool, device=start.device)
        if window is not None:
            behind = slots[:, None] - slots
            own = own & (behind >= 0) & (behind < window)
            context = context & (start[:, None, None] + slots[:, None] - rows < window)
        return torch.cat([context, own], -1)[:, None]


def supports(model: nn.Module) -> bool:
    """Whether sequences of this model can share a forward: full attention in every layer, and a mask of ours."""
    config = model.config.get_text_config(decoder=True)
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return not slides and model.config._attn_implementation in ATTENTIONS

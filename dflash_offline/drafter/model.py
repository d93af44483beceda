"""The drafter: a Qwen3-style decoder that reads the target's hidden states as context and fills one block at a time.

What is unusual:

- The context (hidden states of K tapped target layers, put through ``fc`` and ``hidden_norm``) is computed once and
  enters every layer as keys and values only; queries come from the block slots alone.
- A block is ``[anchor token, mask, mask, ...]`` at positions p, p+1, ...; all its slots are predicted in one pass.
- Embedding and head are the target's, frozen, and no part of this module: embeddings come in, hidden states go out.
- The first layer's block input has only N + 1 different rows (N anchor tokens and one mask token), and the last layer's
  slot 0 feeds nothing but keys and values: training uses both facts (``mask_embedding``, ``trained_slots_only``).

Legend: N blocks, B slots of a block, S = N * B, C context rows, K tapped layers, H hidden size, A query heads,
G key/value heads, D head width.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_offline.attention import Attention, BlockLayout, make_attention
from dflash_offline.drafter.shape import DrafterShape, rotary_frequencies

Rotation = tuple[Tensor, Tensor]  # cos, sin [rows, 1, D]

# One graph of a compiled layer serves every number of context rows C, on attention paths that can (triton). Should a PyTorch
# refuse that (torch.fx.experimental.symbolic_shapes.ConstraintViolationError: C was made a constant), False compiles each C
# anew: the same numbers and steps as fast, but ten seconds and more for each length bucket before the first step.
ANY_CONTEXT = True


class Linear(nn.Linear):
    """No bias, and no weights of its own: :meth:`Drafter.initialise` writes all of them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, (states.shape[-1],), self.weight, self.eps)


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding in the half-split layout; states [rows, heads, D]."""
    cos, sin = rotation
    low, high = states.chunk(2, -1)
    return states * cos + torch.cat((-high, low), -1) * sin


def spread(rows: Tensor, block_size: int) -> Tensor:
    """[N + 1, ...] (N anchor rows, then the mask row) -> [N * B, ...]."""
    anchors, mask = rows[:-1, None], rows[-1:, None]
    return torch.cat([anchors, mask.expand(anchors.shape[0], block_size - 1, *rows.shape[1:])], dim=1).flatten(0, 1)


class SelfAttention(nn.Module):
    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.shape, self.attention = shape, attention
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.stride_of_all = 2 * kv_width * shape.num_layers  # from row to row of what project_context gives
        self.q_proj = Linear(shape.hidden_size, width)
        self.k_proj = Linear(shape.hidden_size, kv_width)
        self.v_proj = Linear(shape.hidden_size, kv_width)
        self.o_proj = Linear(width, shape.hidden_size)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps)

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.shape.head_dim))

    def project_context(self, context: Tensor) -> Tensor:
        """[C, H] -> [C, 2 * G * D] for this layer alone: context keys before their norm, then values."""
        return torch.cat([self.k_proj(context), self.v_proj(context)], -1)

    def context(self, projected: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [C, G, D] of projected context features [C, 2 * G * D]."""
        if projected.stride(0) == self.stride_of_all:
            # Nothing to do, but asked: it makes the number a constant of a graph that serves every C (see ANY_CONTEXT). As a
            # variable it may be odd for all the compiler knows, and its kernels would load two bytes at a time.
            pass
        key, value = projected.chunk(2, -1)
        return rotate(self.k_norm(self._heads(key)), rotation), self._heads(value)

    def block(self, states: Tensor, rotation: Rotation, *, compact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, A, D], keys and values [S, G, D] of the slots; ``compact``: states holds N + 1 rows to be spread."""
        query, key = self.q_norm(self._heads(self.q_proj(states))), self.k_norm(self._heads(self.k_proj(states)))
        value = self._heads(self.v_proj(states))
        if compact:
            query, key, value = (spread(rows, self.shape.block_size) for rows in (query, key, value))
        return rotate(query, rotation), rotate(key, rotation), value


def project_context(context: Tensor, layers: Iterable["Layer"]) -> tuple[Tensor, ...]:
    """:meth:`SelfAttention.project_context` of every layer, for many rows.

    All layers read the same context, so theirs is one product: ten small ones fill a GPU badly. Copying the weights
    together costs a hundredth of it.
    """
    weights = [(layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight) for layer in layers]
    stacked = torch.cat([weight for pair in weights for weight in pair])
    return F.linear(context, stacked).split([key.shape[0] + value.shape[0] for key, value in weights], -1)


def leave_open(tensors: Iterable[Tensor]) -> None:
    """Let compiled layers take any length of these tensors' first axes, in every call alike.

    An error follows where a layer's graph would hold only for the length it is compiled with. 0 and 1 are lengths of
    their own to PyTorch.
    """
    for tensor in tensors:
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


class Mlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.block_size = shape.block_size
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, attention)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        states: Tensor,
        projected: Tensor,
        context_rotation: Rotation,
        slot_rotation: Rotation,
        plan: Any,
        compact: bool,
        drop_first: bool,
    ) -> Tensor:
        """states [S, H] (``compact``: [N + 1, H]), projected context [C, 2 * G * D] -> [S, H] (``drop_first``: [N * (B - 1), H])."""
        attention = self.self_attn
        context_key, context_value = attention.context(projected, context_rotation)
        query, key, value = attention.block(self.input_layernorm(states), slot_rotation, compact=compact)
        attended = attention.attention.attend(query, context_key, context_value, key, value, plan).flatten(1)
        if compact:
            states = spread(states, self.block_size)
        if drop_first:
            attended, states = (rows.unflatten(0, (-1, self.block_size))[:, 1:].flatten(0, 1) for rows in (attended, states))
        return self.finish(states, attended)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: output projection, residuals, MLP."""
        states = states + self.self_attn.o_proj(attended)
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass
class DraftCache:
    """Context keys and values [rows, G, D] of every layer, for one sequence. Block keys are never kept."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0


class Drafter(nn.Module):
    """The trainable part. Parameter names are those of the z-lab format, without a prefix."""

    def __init__(self, shape: DrafterShape, attention: str | Attention = "sdpa") -> None:
        super().__init__()
        self.shape = shape
        self.attention = make_attention(attention) if isinstance(attention, str) else attention
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, self.attention) for _ in range(shape.num_layers))
        self.layers_compiled = False
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self._frequencies, self._rotation_factor = rotary_frequencies(shape)  # no buffer: .to(bfloat16) must not round it
        if not self.norm.weight.is_meta:
            self.initialise(seed=0)

    @torch.no_grad()
    def initialise(self, *, seed: int) -> None:
        """Normal weights of ``initializer_range``, norms at one; the same for the same seed and kind of device."""
        for index, parameter in enumerate(self.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator(parameter.device).manual_seed((seed << 16) + index)
                parameter.normal_(0.0, self.shape.initializer_range, generator=generator)

    def compile_layers(self, *, backend: str = "inductor") -> None:
        """Compile each layer on its own: one compilation serves all alike layers, in a fraction of a whole graph's time.

        First, inner and last layers differ (see the module's docstring), and so do layers of other windows. On the
        ``triton`` path C is left open (see ``ANY_CONTEXT``), so three compilations serve all micro-batches of N blocks;
        on ``flex`` each (N, C) takes three. A second set is compiled where gradients are off: training never does that
        (``Trainer.drafted``). What runs over slots, which is nearly all of a layer, has constant shapes in any case.

        PyTorch gives up after 8 compilations of one function; the limit is raised to hold every bucket's.
        """
        assert self.attention.compiled, f"attention {self.attention.name} is not made to be compiled"
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
        for layer in self.layers:
            layer.compile(dynamic=False, fullgraph=True, backend=backend)
        self.layers_compiled = True

    def rotation(self, positions: Tensor) -> Rotation:
        """cos and sin [rows, 1, D] of integer positions, rounded to the drafter's precision as transformers does."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        dtype = self.norm.weight.dtype
        return (angles.cos() * self._rotation_factor).to(dtype), (angles.sin() * self._rotation_factor).to(dtype)

    def context_features(self, hidden_states: Tensor) -> Tensor:
        """[C, K * H] tapped hidden states -> [C, H] context."""
        return self.hidden_norm(self.fc(hidden_states))

    def forward(
        self,
        hidden_states: Tensor,
        block_embeddings: Tensor,
        blocks: BlockLayout,
        *,
        mask_embedding: Tensor | None = None,
        trained_slots_only: bool = False,
    ) -> Tensor:
        """Hidden states of the block slots after the final norm, ready for the target's head.

        Args:
            hidden_states: [C, K * H] tapped layers side by side, in the order of ``target_layer_ids``.
            block_embeddings: [N, B, H] target embeddings of the slots; or only the anchors' [N, H] with ``mask_embedding``.
            blocks: where the blocks lie.
            mask_embedding: [H] embedding of the mask token, standing for slots 1 .. B - 1 (same result, less work).
            trained_slots_only: leave slot 0, which predicts nothing, out of the result (same numbers, less work).

        Returns:
            [N, B, H], or [N, B - 1, H] with ``trained_slots_only``.
        """
        context = self.context_features(hidden_states)
        context_rotation, slot_rotation = self.rotation(blocks.context_positions), self.rotation(blocks.slot_positions.flatten())
        plans = {window: self.attention.plan(blocks, window) for window in dict.fromkeys(self.shape.layer_windows)}
        compact = mask_embedding is not None
        states = torch.cat([block_embeddings, mask_embedding[None]]) if compact else block_embeddings.flatten(0, 1)
        last = len(self.layers) - 1
        projections = project_context(context, self.layers)
        if self.layers_compiled and ANY_CONTEXT:
            sized = [self.attention.context_sized(plan) for plan in plans.values()]
            if None not in sized:
                leave_open([*projections, *context_rotation, *itertools.chain.from_iterable(sized)])
        for index, (layer, projected, window) in enumerate(zip(self.layers, projections, self.shape.layer_windows, strict=True)):
            short = {"compact": compact and index == 0, "drop_first": trained_slots_only and index == last}
            states = layer(states, projected, context_rotation, slot_rotation, plans[window], **short)
        return self.norm(states).unflatten(0, (blocks.num_blocks, -1))

    def start_cache(self) -> DraftCache:
        """An empty cache for :meth:`draft`."""
        weight = self.norm.weight
        empty = [weight.new_empty(0, self.shape.num_key_value_heads, self.shape.head_dim) for _ in self.layers]
        return DraftCache(list(empty), list(empty))

    def draft(self, hidden_rows: Tensor, block_embeddings: Tensor, cache: DraftCache, start: int) -> Tensor:
        """One step of inference for one sequence: take in new context rows, then fill the block at ``start``.

        Args:
            hidden_rows: [start - cache.length, K * H] hidden states the cache has not seen.
            block_embeddings: [B, H] embeddings of ``[bonus token, mask, mask, ...]``; any B up to the trained one.
            cache: extended in place by the new context rows.
            start: position of slot 0.

        Returns:
            [B, H] after the final norm.
        """
        assert hidden_rows.shape[0] == start - cache.length, (hidden_rows.shape, start, cache.length)
        size, device = block_embeddings.shape[0], block_embeddings.device
        positions = torch.arange(cache.length, start + size, device=device)
        cos, sin = self.rotation(positions)
        new = hidden_rows.shape[0]
        context_rotation, slot_rotation = (cos[:new], sin[:new]), (cos[new:], sin[new:])
        context = self.context_features(hidden_rows)
        states = block_embeddings
        for index, (layer, window) in enumerate(zip(self.layers, self.shape.layer_windows, strict=True)):
            attention = layer.self_attn
            new_key, new_value = attention.context(attention.project_context(context), context_rotation)
            cache.keys[index] = torch.cat([cache.keys[index], new_key])
            cache.values[index] = torch.cat([cache.values[index], new_value])
            query, key, value = attention.block(layer.input_layernorm(states), slot_rotation, compact=False)
            mask = None
            if window is not None:
                behind = torch.arange(start, start + size, device=device)[:, None] - torch.arange(start + size, device=device)
                mask = (behind >= 0) & (behind < window)
            keys, values = torch.cat([cache.keys[index], key]), torch.cat([cache.values[index], value])
            grouped = query.shape[1] != keys.shape[1]
            attended = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask, enable_gqa=grouped
            )
            states = layer.finish(states, attended[0].transpose(0, 1).flatten(1))
        cache.length = start
        return self.norm(states)

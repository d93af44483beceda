"""Rows one after another in one long row, each seeing itself only: no padding, and one shape of batch.

Positions begin anew at each row, and attention is handed to transformers under a name of its own (``rows_attention``),
so that no mask is ever made. On a GPU it is PyTorch's flash kernel for rows of different length; on a CPU the rows go
through plain attention one by one.

A target can be packed when attention is all that looks from one token to another, causal, and plain enough for that
kernel. ``obstacle`` judges by the configuration, before anything is loaded; ``Target.check_packing`` tries it out.

Tensor legend: T tokens of all rows, N rows, Q query heads, G key-value heads, D head size.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_offline.errors import TargetError
from dflash_offline.target.facts import is_hybrid, load_config
from dflash_offline.target.facts import text_part as text_config

if TYPE_CHECKING:
    from dflash_offline.config.target import TargetConfig

IMPLEMENTATION = "rows_attention"
_KINDS = {"full_attention", "sliding_attention"}
_LARGEST_HEAD = 256
# What transformers hands to an attention function and what changes nothing here
_HARMLESS = {
    "dropout", "position_ids", "cache", "past_key_values", "past_key_value", "use_cache", "cache_position", "layer_idx",
    "output_attentions", "output_hidden_states", "return_dict", "cu_seq_lens_k", "max_length_k", "position_embeddings", "training",
}  # fmt: skip


_seen: dict[int, int] | None = None  # while a target is tried out: layer number -> the window it passed on


class NotPackableError(Exception):
    """The target's attention does something that packed rows cannot have. The text says what."""


def packing_obstacle(folder: Path, section: "TargetConfig") -> str | None:
    """``obstacle`` of the target in this folder, as the run file's ``[target]`` wants it to compute."""
    folder = Path(folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    if getattr(config, "auto_map", None):
        return "it brings its own code"
    return obstacle(text_config(config), attention=section.attention, dtype=section.dtype, on_gpu=section.gpus != "cpu")


def obstacle(text: Any, *, attention: str, dtype: str, on_gpu: bool) -> str | None:
    """Why a target's rows cannot be packed, judged by its text configuration; None if nothing speaks against it.

    Args:
        text: transformers' configuration of the text decoder.
        attention, dtype: as in the run file.
    """
    get = functools.partial(getattr, text)
    kinds = {str(kind) for kind in get("layer_types", None) or ()}
    heads = get("num_attention_heads", None) or 1
    rope = get("rope_parameters", None) or {}
    head_dim = get("head_dim", None) or (get("hidden_size", None) or 0) // heads
    checks = {
        f'[target] attention = "{attention}" packs nothing': attention != "sdpa",
        "it computes in float32 on a GPU, where the kernel for rows of different length is missing": on_gpu and dtype == "float32",
        "its layers carry a state over tokens": is_hybrid(text),
        f"it has layers of kind {', '.join(sorted(kinds - _KINDS))}": bool(kinds - _KINDS),
        "its attention has a soft cap": bool(get("attn_logit_softcapping", None)),
        "its rotary embedding depends on the longest row of a batch": rope.get("rope_type") in ("dynamic", "longrope"),
        "its attention works in chunks": bool(get("attention_chunk_size", None)),
        "its keys and values are compressed": bool(get("kv_lora_rank", None)),
        "its attention is not causal": not get("is_causal", True) or bool(get("use_bidirectional_attention", None)),
        f"its heads have {head_dim} channels": on_gpu and (head_dim > _LARGEST_HEAD or bool(head_dim % 8)),
    }
    return next((reason for reason, holds in checks.items() if holds), None)


@functools.cache
def register() -> None:
    """Make the operation known to PyTorch and transformers. Once in a process."""
    from transformers import AttentionInterface

    torch.library.custom_op("dflash_offline::rows_attention", _rows_attention, mutates_args=())
    torch.library.register_fake("dflash_offline::rows_attention", _rows_attention_shape)
    AttentionInterface.register(IMPLEMENTATION, attend)


def _rows_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float, window: int
) -> torch.Tensor:
    if query.is_cuda:
        left = window - 1 if window else None
        result = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=None,
        )
        return result[0].contiguous()
    edges, pieces = bounds.tolist(), []
    for start, stop in zip(edges, edges[1:], strict=False):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        mask = None
        if window and stop - start > window:
            at = torch.arange(stop - start)
            mask = (at[:, None] >= at) & (at[:, None] - at < window)
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )[0].transpose(0, 1)
        )
    return torch.cat(pieces)


def _rows_attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float, window: int
) -> torch.Tensor:
    return query.new_empty(query.shape)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: ``query`` [1, Q, T, D], ``key`` and ``value`` [1, G, T, D] -> [1, T, Q, D].

    Args:
        cu_seq_lens_q: int32 [N + 1], where the rows begin and end.
        max_length_q: tokens of the longest row.

    Raises:
        NotPackableError: the layer wants something that is not known here.
    """
    strange = [name for name, given in others.items() if given is not None and given is not False and name not in _HARMLESS]
    if strange or attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotPackableError(f"{type(module).__name__} wants {', '.join(strange) or 'a mask of its own'}")
    if cu_seq_lens_q is None or max_length_q is None:
        raise NotPackableError(f"{type(module).__name__} is not told where rows begin")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1] or query.shape[0] != 1:
        raise NotPackableError(f"{type(module).__name__} has heads of different size")
    if _seen is not None:
        _seen[int(module.layer_idx)] = sliding_window or 0
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return torch.ops.dflash_offline.rows_attention(q, k, v, cu_seq_lens_q, max_length_q, scale, sliding_window or 0)[None], None


@contextlib.contextmanager
def windows_seen() -> Iterator[dict[int, int]]:
    """The window that each layer passes to its attention function while the block runs, 0 for none."""
    global _seen
    _seen = {}
    try:
        yield _seen
    finally:
        _seen = None


def check_windows(text: Any, seen: dict[int, int]) -> None:
    """Each layer that slides must have said so to its attention function: no mask says it any more.

    Args:
        text: the text decoder's configuration.
        seen: see ``windows_seen``.

    Raises:
        NotPackableError: one did not.
    """
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    for layer, got in seen.items():
        slides = kinds[layer] == "sliding_attention" if kinds else bool(window) and getattr(text, "use_sliding_window", True)
        if slides and got != window:
            raise NotPackableError(f"layer {layer} slides over {window} tokens, but does not tell its attention function")


def pack(rows: list[Any], device: torch.device) -> dict[str, Any]:
    """Arguments of the model's forward for these rows (int arrays [T_n]), all on ``device``."""
    pinned = device.type == "cuda"
    lengths = torch.tensor([len(row) for row in rows])
    total = int(lengths.sum())
    if total == 0:
        raise TargetError("a batch without tokens")
    ids = torch.empty(1, total, dtype=torch.long, pin_memory=pinned)
    positions = torch.empty(1, total, dtype=torch.long, pin_memory=pinned)
    bounds = torch.zeros(len(rows) + 1, dtype=torch.int32, pin_memory=pinned)
    bounds[1:] = lengths.cumsum(0)
    start = 0
    for row in rows:
        stop = start + len(row)
        ids[0, start:stop] = torch.from_numpy(np.asarray(row).astype(np.int64))  # a copy: corpora are read-only
        torch.arange(len(row), out=positions[0, start:stop])
        start = stop
    ids, positions, bounds = (x.to(device, non_blocking=True) for x in (ids, positions, bounds))
    longest = int(lengths.max())
    return {
        "input_ids": ids,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }

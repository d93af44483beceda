"""Rows one after another in one long row, each seeing itself only: no padding, and one shape of batch.

Positions begin anew at each row, and attention is handed to transformers under a name of its own (``rows_attention``),
so that no mask is ever made. On a GPU it is PyTorch's flash kernel for rows of different length, or, where rows are long
and cuDNN has a faster kernel, that one row by row; on a CPU the rows go through plain attention one by one.

A target can be packed when attention is all that looks from one token to another, causal, and plain enough for that
kernel. ``obstacle`` judges by the configuration, before anything is loaded; ``Target.check_packing`` tries it out.

Tensor legend: T tokens of all rows, N rows, Q query heads, G key-value heads, D head size.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_offline.errors import TargetError
from dflash_offline.target.facts import is_hybrid, load_config, text_part

if TYPE_CHECKING:
    from dflash_offline.config.target import TargetConfig

IMPLEMENTATION = "rows_attention"
_KINDS = {"full_attention", "sliding_attention"}
_LARGEST_HEAD = 256
# What transformers hands to an attention function and what changes nothing here
_HARMLESS = {
    "dropout", "position_ids", "cache", "past_key_values", "past_key_value", "use_cache", "cache_position", "layer_idx",
    "output_attentions", "output_hidden_states", "return_dict", "max_length_k", "position_embeddings", "training",
}  # fmt: skip


LONG_ROWS = 1024  # mean tokens of a batch's rows from which on a kernel call for each row pays
CUDNN_STEP = 256
_cudnn = False  # whether cuDNN's attention was tried in this process and is used for long rows
_seen: dict[int, int] | None = None  # while a target is tried out: layer number -> the window it passed on


class NotPackableError(Exception):
    """The target's attention does something that packed rows cannot have. The text says what."""


def packing_obstacle(folder: Path, section: "TargetConfig") -> str | None:
    """``obstacle`` of the target in this folder, as the run file's ``[target]`` wants it to compute."""
    folder = Path(folder)
    config = load_config(folder, trust_remote_code=section.trust_remote_code)
    if getattr(config, "auto_map", None):
        return "it brings its own code"
    return obstacle(text_part(config), attention=section.attention, dtype=section.dtype, on_gpu=section.gpus != "cpu")


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    edges: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    if not query.is_cuda:
        return row_by_row(query, key, value, edges.tolist(), functools.partial(_plain, scale=scale, window=window), step=1)
    if _cudnn and not window and len(query) >= LONG_ROWS * (len(edges) - 1):
        return row_by_row(query, key, value, edges.tolist(), functools.partial(_cudnn_attention, scale=scale), step=CUDNN_STEP)
    left = window - 1 if window else None
    result = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=None
    )
    return result[0].contiguous()


def _rows_attention_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: list[int], attention: Callable[..., torch.Tensor], *, step: int
) -> torch.Tensor:
    """Causal attention of each row by a kernel that wants one length.

    A row goes in with what follows it, up to a multiple of ``step`` tokens, so that few lengths occur; being causal, no token
    of the row sees what follows, and what comes out for that is dropped.

    Args:
        query, key, value: ``[T, Q, D]``, ``[T, G, D]``, ``[T, G, D]``; tokens may be further apart than their channels take.
        edges: where rows begin and end.
        attention: of ``[1, Q, t, D]``, ``[1, G, t, D]``, ``[1, G, t, D]``.
    """
    out, total = query.new_empty(query.shape), len(query)
    for start, stop in zip(edges, edges[1:], strict=False):
        end = start + -(-(stop - start) // step) * step
        three = [x[start : min(end, total)] for x in (query, key, value)]
        if end > total:
            three = [_extended(x, end - start) for x in three]
        out[start:stop] = attention(*(x.transpose(0, 1)[None] for x in three))[0, :, : stop - start].transpose(0, 1)
    return out


def _extended(rows: torch.Tensor, length: int) -> torch.Tensor:
    """With zeros behind, up to ``length`` rows; as far apart as they were, because a kernel is chosen by that too."""
    out = rows.new_empty_strided((length, *rows.shape[1:]), rows.stride()).zero_()
    out[: len(rows)] = rows
    return out


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int) -> torch.Tensor:
    mask = None
    if window and query.shape[2] > window:
        at = torch.arange(query.shape[2])
        mask = (at[:, None] >= at) & (at[:, None] - at < window)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _cudnn_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, False, 0.0, True, False, scale=scale)[0]


def prepare_cudnn(text: Any, *, device: torch.device, dtype: torch.dtype, lengths: list[int], value_row: int | None = None) -> str | None:
    """Try cuDNN's attention on this GPU and, if it gives what the flash kernel gives, have it ready for rows of these lengths.

    Each multiple of ``CUDNN_STEP`` is a plan of its own that takes a moment to build. From then on batches of long rows use it,
    in this process.

    Args:
        value_row: channels from one token's values to the next one's, where they are part of longer rows; plans depend on it.

    Returns:
        Why it is not used, or None.
    """
    global _cudnn
    register()
    _cudnn = False
    heads, groups = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if size > 128 or size % 8 or torch.cuda.get_device_capability(device) < (9, 0):
        return f"heads of {size} channels on this GPU"
    generator = torch.Generator(device).manual_seed(0)
    edges = torch.tensor([0, 1300, 2400], dtype=torch.int32)
    q, k, v = (torch.randn(2400, n, size, device=device, dtype=dtype, generator=generator) for n in (heads, groups, groups))
    operation = functools.partial(torch.ops.dflash_offline.rows_attention, q, k, v, edges.to(device), edges, 1300, size**-0.5, 0)
    want = operation()
    _cudnn = True
    try:
        distance = float((operation() - want).float().norm() / want.float().norm())
        for length in sorted({-(-length // CUDNN_STEP) * CUDNN_STEP for length in lengths if length >= LONG_ROWS // 2}):
            rows = [torch.zeros(length, n * size, device=device, dtype=dtype) for n in (heads, groups)]
            rows.append(torch.zeros(length, value_row or groups * size, device=device, dtype=dtype)[:, -groups * size :])
            empty = [x.unflatten(1, (-1, size)).transpose(0, 1)[None] for x in rows]
            _cudnn_attention(*empty, scale=size**-0.5)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        _cudnn = False
        return str(error).strip().splitlines()[0][:160]
    if not distance < 0.02:
        _cudnn = False
        return f"its results are {distance:.2g} away from the flash kernel's"
    return None


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
    cu_seq_lens_k: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: ``query`` [1, Q, T, D], ``key`` and ``value`` [1, G, T, D] -> [1, T, Q, D].

    Args:
        cu_seq_lens_q, cu_seq_lens_k: int32 [N + 1], where the rows begin and end; the second one always on the CPU.
        max_length_q: tokens of the longest row.

    Raises:
        NotPackableError: the layer wants something that is not known here.
    """
    strange = [name for name, given in others.items() if given is not None and given is not False and name not in _HARMLESS]
    if strange or attention_mask is not None or is_causal is False or getattr(module, "is_causal", True) is False:
        raise NotPackableError(f"{type(module).__name__} wants {', '.join(strange) or 'a mask of its own'}")
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None:
        raise NotPackableError(f"{type(module).__name__} is not told where rows begin")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1] or query.shape[0] != 1:
        raise NotPackableError(f"{type(module).__name__} has heads of different size")
    if _seen is not None:
        _seen[int(module.layer_idx)] = sliding_window or 0
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = torch.ops.dflash_offline.rows_attention(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, scale, sliding_window or 0)
    return out[None], None


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
    """Arguments of the model's forward for these rows (int arrays [T_n]), on ``device`` but for ``cu_seq_lens_k`` (see ``attend``)."""
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
    edges = bounds
    ids, positions, bounds = (x.to(device, non_blocking=True) for x in (ids, positions, bounds))
    longest = int(lengths.max())
    return {
        "input_ids": ids,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": edges,
        "max_length_q": longest,
        "max_length_k": longest,
    }

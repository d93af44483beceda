"""Facts about a target read from its configuration: sizes, rotary embedding, special tokens. Loads no weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError
from dflash_offline.gguf import find_gguf
from dflash_offline.target.weights import find_embedding, is_tied, stored_tensors

# What the drafter, a plain decoder, does not implement (its rotation covers the whole head)
_ROPE_DROPPED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "mrope_layout", "type")
_STATE_LAYERS = ("linear_attention", "hybrid", "mamba", "conv", "recurrent", "ssm", "rwkv", "delta")
_STATE_SIZES = ("mamba_", "ssm_", "linear_conv_", "conv_kernel", "conv_L_cache", "lru_")


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and conventions of a target's text decoder.

    ``vocab_size`` counts embedding rows (padding rows included); ``rope_parameters`` always holds ``rope_theta`` and
    ``rope_type`` and nothing that the drafter would not follow; ``eos_token_ids`` is a tuple even for one.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    model_type: str
    architectures: tuple[str, ...]
    is_moe: bool
    is_hybrid: bool
    initializer_range: float


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's transformers configuration, whole (of a wrapper: not only its text part).

    Raises:
        TargetError: there is none, its model type is unknown to the installed transformers, or it wants to run code.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    gguf = find_gguf(folder)
    if gguf is None and not (folder / "config.json").is_file():
        raise TargetError(f"{folder}: no config.json, so this is no transformers model folder")
    extra = {"gguf_file": gguf.name} if gguf else {}
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **extra)
    except (ValueError, KeyError, OSError, ImportError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"{folder}: this model brings its own code; read it, then set [target] trust_remote_code = true to run it"
            ) from None
        raise TargetError(f"{folder}: the installed transformers cannot read this configuration ({first[:200]})") from None


def text_part(config: Any) -> Any:
    """The text decoder's configuration inside a wrapper's, or the configuration itself."""
    part = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    inner = getattr(part, "llm_config", None)
    return inner if hasattr(inner, "hidden_size") else part


def _number(config: Any, names: tuple[str, ...], *, folder: Path, default: Any = None) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):  # per layer, as in elastic models: the widest
            value = max(value) if value else None
        if value is not None:
            return value
    if default is None:
        raise TargetError(f"{folder}/config.json: has none of {', '.join(names)} (model type {getattr(config, 'model_type', '?')})")
    return default


def rope_of(config: Any, *, folder: Path) -> dict[str, Any]:
    """The decoder's rotary parameters: base and scaling, of full-attention layers where layer types differ.

    Raises:
        TargetError: the raw ``config.json`` gives the base twice, differently.
    """
    raw_path = Path(folder) / "config.json"
    if raw_path.is_file():
        raw = json.loads(raw_path.read_bytes())
        for part in (raw, raw.get("text_config")):
            nested = part.get("rope_parameters") if isinstance(part, dict) else None
            flat, inner = (part or {}).get("rope_theta"), nested.get("rope_theta") if isinstance(nested, dict) else None
            if flat is not None and inner is not None and float(flat) != float(inner):
                raise TargetError(f"{raw_path}: rope_theta = {flat} and rope_parameters.rope_theta = {inner} differ; make them equal")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):
        rope = rope.get("full_attention") or next(iter(rope.values()))
    rope = {name: value for name, value in rope.items() if name not in _ROPE_DROPPED and value is not None}
    if "rope_theta" not in rope:
        base = getattr(config, "rope_theta", None) or getattr(config, "default_theta", None) or 10000.0
        rope["rope_theta"] = float(base.get("global", 10000.0) if isinstance(base, dict) else base)
    if rope.setdefault("rope_type", "default") in ("mrope", "proportional"):
        rope["rope_type"] = "default"
    return rope


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)


def _stop_tokens(folder: Path, *configs: Any) -> tuple[int, ...]:
    """Stop tokens of generation_config.json first (it is what servers follow), then of the configurations."""
    found: list[int] = []
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        found.extend(_ids(json.loads(path.read_bytes()).get("eos_token_id")))
    for config in configs:
        found.extend(_ids(getattr(config, "eos_token_id", None)))
    return tuple(dict.fromkeys(found))


def is_hybrid(config: Any) -> bool:
    """Whether a layer carries a state over tokens (linear attention, SSM, short convolution), by layer kinds or sizes of such layers."""
    kinds: list[str] = []
    for name in ("layer_types", "layers_block_type", "block_types"):
        if isinstance(value := getattr(config, name, None), (list, tuple)):
            kinds.extend(str(item).lower() for item in value)
    if kinds and any(mark in kind for kind in kinds for mark in _STATE_LAYERS):
        return True
    sizes = config.to_dict() if not kinds else {}
    return any(name.startswith(_STATE_SIZES) and value for name, value in sizes.items())


def facts(folder: Path, trust_remote_code: bool = False) -> TargetFacts:
    """Read a target's facts from its folder (configuration and weight headers; seconds, no weights).

    Raises:
        TargetError: a size is missing; the text names the fields looked for.
    """
    folder = Path(folder)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    text = text_part(config)
    hidden = int(_number(text, ("hidden_size", "n_embd", "d_model"), folder=folder))
    heads = int(_number(text, ("num_attention_heads", "n_head"), folder=folder))
    rows = int(_number(text, ("vocab_size",), folder=folder))
    gguf = find_gguf(folder)
    if gguf is None:
        shape = stored_tensors(folder)[find_embedding(folder)].shape
        if len(shape) != 2 or shape[1] != hidden:
            raise TargetError(f"{folder}: the embedding in the weights is {list(shape)}, but hidden_size in config.json is {hidden}")
        rows = shape[0]
    first = lambda *values: next((value for value in values if value is not None), None)  # noqa: E731
    pad = _ids(first(getattr(config, "pad_token_id", None), getattr(text, "pad_token_id", None)))
    bos = _ids(first(getattr(config, "bos_token_id", None), getattr(text, "bos_token_id", None)))
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    return TargetFacts(
        hidden_size=hidden,
        num_layers=int(_number(text, ("num_hidden_layers", "n_layer"), folder=folder)),
        vocab_size=rows,
        num_attention_heads=heads,
        num_key_value_heads=int(_number(text, ("num_key_value_heads",), folder=folder, default=heads)),
        head_dim=int(_number(text, ("head_dim",), folder=folder, default=max(1, hidden // heads))),
        intermediate_size=int(_number(text, ("intermediate_size", "n_inner", "ffn_dim"), folder=folder, default=4 * hidden)),
        rms_norm_eps=float(
            _number(text, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), folder=folder, default=1e-6)
        ),
        rope_parameters=rope_of(text, folder=folder),
        tie_word_embeddings=is_tied(folder) if gguf is None else bool(getattr(config, "tie_word_embeddings", False)),
        max_position_embeddings=int(_number(text, ("max_position_embeddings", "n_positions"), folder=folder, default=32768)),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_stop_tokens(folder, config, text),
        pad_token_id=pad[0] if pad else None,
        model_type=str(getattr(config, "model_type", "")),
        architectures=tuple(getattr(config, "architectures", None) or ()),
        is_moe=any(isinstance(count, int) and count > 1 for count in experts),
        is_hybrid=is_hybrid(text),
        initializer_range=float(getattr(text, "initializer_range", None) or 0.02),
    )

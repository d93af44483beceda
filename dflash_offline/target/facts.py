"""Facts about a target read from its configuration: sizes, rotary embedding, special tokens. Loads no weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError
from dflash_offline.gguf import find_gguf
from dflash_offline.identity import json_object
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
    path = folder / "config.json" if gguf is None else gguf
    if not path.is_file():
        raise TargetError(f"{folder}: no config.json, so this is no transformers model folder")
    if gguf is None:
        json_object(path)
    extra = {"gguf_file": gguf.name} if gguf else {}
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **extra)
    except Exception as error:  # every kind of damage raises another type
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"{folder}: this model brings its own code; read it, then set [target] trust_remote_code = true to run it"
            ) from None
        raise TargetError(f"{path}: the installed transformers cannot read this configuration ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    """An error of transformers in one line. A field of the wrong type is named on the second one of two."""
    if isinstance(error, ZeroDivisionError):
        return "a size in it is 0"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]
    return line.strip().removeprefix("TypeError: ")[:200]


def text_part(config: Any) -> Any:
    """The text decoder's configuration inside a wrapper's, or the configuration itself."""
    part = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    inner = getattr(part, "llm_config", None)
    return inner if hasattr(inner, "hidden_size") else part


def _whole(config: Any, names: tuple[str, ...], *, folder: Path, default: int | None = None, least: int = 1) -> int:
    for name in names:
        value = getattr(config, name, None)
        for item in (each := value if isinstance(value, (list, tuple)) else [] if value is None else [value]):
            if isinstance(item, bool) or not isinstance(item, (int, float)) or item != item // 1 or not least <= item < 2**63:
                raise TargetError(f"{folder}/config.json: {name} = {value!r}: must be a whole number, at least {least}")
        if each:
            return int(max(each))  # per layer, as in elastic models: the widest
    if default is None:
        raise TargetError(f"{folder}/config.json: has none of {', '.join(names)} (model type {getattr(config, 'model_type', '?')})")
    return default


def _real(value: Any, name: str, *, folder: Path, above: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < math.inf:
        bound = f" above {above:g}" if above > -math.inf else ""
        raise TargetError(f"{folder}/config.json: {name} = {value!r}: must be a number{bound}")
    return float(value)


def rope_of(config: Any, *, folder: Path) -> dict[str, Any]:
    """The decoder's rotary parameters: base and scaling, of full-attention layers where layer types differ.

    Raises:
        TargetError: the raw ``config.json`` gives the base twice, differently; or they are no rotary parameters.
    """
    raw_path = Path(folder) / "config.json"
    if raw_path.is_file():
        raw = json_object(raw_path)
        for part in (raw, raw.get("text_config")):
            part = part if isinstance(part, dict) else {}
            nested = part.get("rope_parameters")
            flat, inner = part.get("rope_theta"), nested.get("rope_theta") if isinstance(nested, dict) else None
            if flat is not None and inner is not None and flat != inner:
                raise TargetError(f"{raw_path}: rope_theta = {flat} and rope_parameters.rope_theta = {inner} differ; make them equal")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        raise TargetError(f"{raw_path}: rope_parameters = {rope!r}: must be a table with rope_type and rope_theta")
    if rope and all(isinstance(value, dict) for value in rope.values()):
        rope = rope.get("full_attention") or next(iter(rope.values()))
    rope = {name: value for name, value in rope.items() if name not in _ROPE_DROPPED and value is not None}
    if "rope_theta" not in rope:
        base = getattr(config, "rope_theta", None) or getattr(config, "default_theta", None) or 10000.0
        rope["rope_theta"] = base.get("global", 10000.0) if isinstance(base, dict) else base
    rope["rope_theta"] = _real(rope["rope_theta"], "rope_theta", folder=folder, above=0)
    if not isinstance(kind := rope.setdefault("rope_type", "default"), str):
        raise TargetError(f"{raw_path}: rope_type = {kind!r}: must be text, for example 'default'")
    if kind in ("mrope", "proportional"):
        rope["rope_type"] = "default"
    return rope


def _ids(value: Any, name: str, path: Path) -> tuple[int, ...]:
    """Token ids, of none, one or several; -1 is how older files say none."""
    items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or not -1 <= item < 2**31 for item in items):
        raise TargetError(f"{path}: {name} = {value!r}: must be a token id or a list of them (whole numbers from 0)")
    return tuple(item for item in items if item >= 0)


def _stop_tokens(folder: Path, *configs: Any) -> tuple[int, ...]:
    """Stop tokens of generation_config.json first (it is what servers follow), then of the configurations."""
    found: list[int] = []
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        found.extend(_ids(json_object(path).get("eos_token_id"), "eos_token_id", path))
    for config in configs:
        found.extend(_ids(getattr(config, "eos_token_id", None), "eos_token_id", path.with_name("config.json")))
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
        TargetError: a size is missing (the text names the fields looked for), or a field cannot be what it is set to.
    """
    folder = Path(folder)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    text = text_part(config)
    hidden = _whole(text, ("hidden_size", "n_embd", "d_model"), folder=folder)
    heads = _whole(text, ("num_attention_heads", "n_head"), folder=folder, least=0)
    rows = _whole(text, ("vocab_size",), folder=folder)
    gguf = find_gguf(folder)
    if gguf is None:
        shape = stored_tensors(folder)[find_embedding(folder)].shape
        if len(shape) != 2 or shape[1] != hidden:
            raise TargetError(f"{folder}: the embedding in the weights is {list(shape)}, but hidden_size in config.json is {hidden}")
        rows = shape[0]
    first = lambda *values: next((value for value in values if value is not None), None)  # noqa: E731
    pad, bos = (
        _ids(first(getattr(config, name, None), getattr(text, name, None)), name, folder / "config.json")
        for name in ("pad_token_id", "bos_token_id")
    )
    epsilons = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
    named, epsilon = next(((name, value) for name in epsilons if (value := getattr(text, name, None)) is not None), (epsilons[0], 1e-6))
    architectures = getattr(config, "architectures", None)
    experts = [getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")]
    return TargetFacts(
        hidden_size=hidden,
        num_layers=_whole(text, ("num_hidden_layers", "n_layer"), folder=folder),
        vocab_size=rows,
        num_attention_heads=heads,
        num_key_value_heads=_whole(text, ("num_key_value_heads",), folder=folder, default=heads, least=0),
        head_dim=_whole(text, ("head_dim",), folder=folder, default=max(1, hidden // max(1, heads)), least=0),
        intermediate_size=_whole(text, ("intermediate_size", "n_inner", "ffn_dim"), folder=folder, default=4 * hidden, least=0),
        rms_norm_eps=_real(epsilon, named, folder=folder),
        rope_parameters=rope_of(text, folder=folder),
        tie_word_embeddings=is_tied(folder) if gguf is None else bool(getattr(config, "tie_word_embeddings", False)),
        max_position_embeddings=_whole(text, ("max_position_embeddings", "n_positions"), folder=folder, default=32768),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_stop_tokens(folder, config, text),
        pad_token_id=pad[0] if pad else None,
        model_type=str(getattr(config, "model_type", "")),
        architectures=tuple(architectures) if isinstance(architectures, (list, tuple)) else (),
        is_moe=any(isinstance(count, int) and count > 1 for count in experts),
        is_hybrid=is_hybrid(text),
        initializer_range=_real(getattr(text, "initializer_range", None) or 0.02, "initializer_range", folder=folder),
    )

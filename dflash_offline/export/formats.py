"""The two ``config.json`` forms of a drafter, made from its shape.

Both describe the same Qwen3-style decoder. ``zlab`` is read by SGLang, vLLM and the z-lab reference code,
``speculators`` by vLLM. Their layer ids differ: a speculators id is the z-lab id + 1 (it counts the embedding).

Block layout, both: slot 0 is the known token, slots 1 .. B-1 predict.
"""

from dataclasses import dataclass
from typing import Any, Literal

from dflash_offline.drafter import DrafterShape
from dflash_offline.errors import ExportError

Format = Literal["zlab", "speculators"]
FORMATS: tuple[Format, ...] = ("zlab", "speculators")
ARCHITECTURE = "DFlashDraftModel"
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class TargetInfo:
    """What an export says about the target besides its sizes.

    Attributes:
        name: hub id or folder, for the model card, serve commands and the speculators config.
        architectures: of the target's ``config.json``.
        bos_token_id, eos_token_id, pad_token_id: the target's; eos may be a list.
    """

    name: str
    architectures: list[str]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of the ``11 n + 3`` tensors, the same in both formats."""
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    per_layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for layer in range(shape.num_layers):
        tensors |= {f"layers.{layer}.{name}": size for name, size in per_layer.items()}
    return tensors


def decoder_config(shape: DrafterShape, target: TargetInfo) -> dict[str, Any]:
    """The Qwen3 decoder's part, complete: no reader has to fall back on a default of its own.

    RoPE is written flat and nested, because older and newer readers take different ones. ``partial_rotary_factor`` and
    mrope fields are never written: one server would apply them, the others would not.

    Raises:
        ExportError: layers slide with different windows, which one config cannot say.
    """
    windows = {window for window in shape.layer_windows if window is not None}
    if len(windows) > 1:
        raise ExportError(f"export: layers slide with different windows {sorted(windows)}; the formats know one sliding_window for all")
    rope = dict(shape.rope_parameters)
    rope.setdefault("rope_type", "default")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in shape.layer_windows],
        "sliding_window": max(windows) if windows else None,
        "use_sliding_window": bool(windows),
        "max_window_layers": shape.num_layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": shape.initializer_range,
        "max_position_embeddings": shape.max_position_embeddings,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def zlab_config(shape: DrafterShape, target: TargetInfo) -> dict[str, Any]:
    """``config.json`` of the z-lab form. Block size stands twice: readers look in different places."""
    return {
        "architectures": [ARCHITECTURE],
        **decoder_config(shape, target),
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
        },
    }


def speculators_config(shape: DrafterShape, target: TargetInfo) -> dict[str, Any]:
    """``config.json`` of the speculators form, which has no top-level ``model_type``.

    ``sliding_window_non_causal`` decides about every layer in vLLM: false makes all of them causal inside the block.
    Ours are bidirectional where attention is full and causal where it slides, so only pure drafters can be written.

    Raises:
        ExportError: full and sliding layers are mixed.
    """
    sliding = [window is not None for window in shape.layer_windows]
    if any(sliding) and not all(sliding):
        raise ExportError(
            "export: the speculators format cannot express sliding layers (causal inside a block) beside full ones (bidirectional): "
            'one flag makes all layers causal or none; set [export] formats = ["zlab"], or no sliding_window'
        )
    return {
        "speculators_model_type": "dflash",
        "architectures": [ARCHITECTURE],
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": decoder_config(shape, target),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not any(sliding),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
    }


def config_of(form: Format, shape: DrafterShape, target: TargetInfo) -> dict[str, Any]:
    """``config.json`` in the given format."""
    return zlab_config(shape, target) if form == "zlab" else speculators_config(shape, target)

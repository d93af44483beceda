"""Read an exported drafter, ours or another's, back into a shape and tensors; refuse what would not be the same drafter.

Servers take a wrong folder without a word (unknown names are ignored or missing ones re-initialised), so everything
that could make the numbers differ is an error here: missing, unexpected or misshapen tensors, a pruned vocabulary,
another block layout, causal blocks, a partial rotation, RoPE given twice with different values.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_offline.drafter import DrafterShape
from dflash_offline.drafter.shape import rotary_frequencies
from dflash_offline.errors import DFlashError, ExportError, TargetError
from dflash_offline.export.formats import ARCHITECTURE, Format, TargetInfo, tensor_shapes
from dflash_offline.figures import counted
from dflash_offline.identity import default_layer_ids, exported_folder, text_config
from dflash_offline.manifest import read_json

# what speculators before 0.9.0 saved of the target itself; every reader takes these from the target
_TARGETS_OWN = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
# whole numbers of a drafter's config, and the range beyond which they are damage
_WHOLE = {
    name: (1, 1 << 24)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "block_size")
} | {
    "num_hidden_layers": (1, 1024),
    "num_target_layers": (1, 1 << 16),
    "mask_token_id": (0, 1 << 24),
    "max_position_embeddings": (1, 1 << 40),
    "sliding_window": (0, 1 << 40),
}
_NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
_REAL = ("rms_norm_eps", "rope_theta", "initializer_range")
_DTYPES = {torch.bfloat16, torch.float16, torch.float32}


@dataclass(frozen=True)
class ExportedDrafter:
    """A folder as read.

    Attributes:
        form: ``"zlab"`` or ``"speculators"``; ``"trained"``: no export yet, float32 weights beside ``shape.json``.
        shape: all sizes; ``target_layer_ids`` are z-lab ids whatever the form.
        tensors: the ``11 n + 3`` of ``tensor_shapes``, as stored.
        target: what the folder says about the target; its name may be empty.
        notes: what was left out or worked out, for the user to see.
    """

    folder: Path
    form: Format | Literal["trained"]
    shape: DrafterShape
    tensors: dict[str, torch.Tensor]
    target: TargetInfo
    notes: tuple[str, ...] = ()


def read_drafter(folder: Path | str, *, num_target_layers: int | None = None) -> ExportedDrafter:
    """Read a z-lab or speculators folder, or the only such subfolder; or what training wrote (``drafters/KEY/drafter``).

    Args:
        num_target_layers: layers of the target, which a speculators folder does not say; when left out it is read
            from the verifier's ``config.json`` if that is a folder on this machine.

    Raises:
        ExportError: it cannot be read, or is not a drafter this project can run (the text says why).
    """
    folder = exported_folder(Path(folder))
    if (folder / "shape.json").is_file() and not (folder / "config.json").is_file():
        return _read_trained(folder)
    config = _read_config(folder)
    tensors = read_tensors(folder)
    form: Format = "speculators" if "speculators_model_type" in config else "zlab"
    try:
        if form == "speculators":
            shape, target, notes = _speculators_shape(folder, config, num_target_layers)
        else:
            shape, target, notes = _zlab_shape(folder, config, tensors, num_target_layers)
        rotary_frequencies(shape)  # a scaling without its factor, or with one that is no number
    except TargetError as error:
        raise ExportError(f"{folder}/config.json: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExportError(f"{folder}/config.json: {type(error).__name__}: {error}; this is no complete DFlash drafter config") from None
    if form == "speculators" and (own := sorted(_TARGETS_OWN & tensors.keys())) and _older_than_090(config):
        notes.append(f"left out {', '.join(own)}: they are the target's own")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in _TARGETS_OWN}
    check_tensors(folder, tensors, shape)
    return ExportedDrafter(folder, form, shape, tensors, target, tuple(notes))


def _read_trained(folder: Path) -> ExportedDrafter:
    path = folder / "shape.json"
    try:
        shape = DrafterShape.from_dict(read_json(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExportError(f"{path}: {type(error).__name__}: {error}; this is no shape of a trained drafter") from None
    tensors = read_tensors(folder)
    check_tensors(folder, tensors, shape)
    return ExportedDrafter(folder, "trained", shape, tensors, TargetInfo("", [], None, None, None))


def check_fits(drafter: DrafterShape, *, where: str, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Refuse a drafter made for another target.

    Args:
        where: names the drafter in the message.
        hidden_size, vocab_size, num_layers: the target's; vocab_size counts embedding rows, padding included.

    Raises:
        ExportError: sizes, taps or mask token do not fit.
    """
    wanted = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_target_layers": num_layers}
    for name, value in wanted.items():
        if getattr(drafter, name) != value:
            raise ExportError(
                f"{where}: {name} is {getattr(drafter, name)}, the target's is {value}; this drafter was made for another target"
            )
    if not 0 <= drafter.mask_token_id < vocab_size:
        raise ExportError(f"{where}: mask_token_id {drafter.mask_token_id} is no row of the target's embedding (0 to {vocab_size - 1})")


def check_tensors(folder: Path, tensors: dict[str, torch.Tensor], shape: DrafterShape) -> None:
    """Names, shapes and dtypes of a drafter's tensors.

    Raises:
        ExportError: naming the first few that are missing, unexpected or wrong.
    """
    expected = tensor_shapes(shape)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ExportError(
            f"{folder}: lacks {counted(len(missing), 'tensor')}: {_first(missing)}; a server would fill them with random numbers"
        )
    if unexpected := sorted(tensors.keys() - expected.keys()):
        hint = "a pruned vocabulary is not supported" if {"d2t", "t2d"} & set(unexpected) else "a plain DFlash drafter has none"
        raise ExportError(f"{folder}: {counted(len(unexpected), 'unexpected tensor')}: {_first(unexpected)}; {hint}")
    for name, size in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != size:
            raise ExportError(f"{folder}: {name} has shape {list(tensor.shape)}, config.json asks for {list(size)}")
        if tensor.dtype not in _DTYPES:
            raise ExportError(f"{folder}: {name} is {tensor.dtype}; only bfloat16, float16 and float32 are read (no quantised drafters)")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of ``model.safetensors``, or of the shards its index names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file() and index.is_file():
        names = _shards(index)
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ExportError(f"{folder}: no {name}")
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError, struct.error) as error:
            raise ExportError(f"{path}: cannot be read ({error})") from None
    return tensors


def _shards(index: Path) -> list[str]:
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ExportError(f"{index}: no weight_map, so this is no safetensors index; copy the drafter again")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:  # a path could lead out of the folder
            raise ExportError(f"{index}: weight_map names {name!r}; only files beside the index are read")
    return sorted(set(shards.values()))


def _first(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(f"{folder}: no config.json, so this is no exported drafter")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ExportError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ExportError(f"{path}: no JSON object, so this is no exported drafter")
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type", "dflash") != "dflash":
        raise ExportError(f"{path}: speculators_model_type is {config['speculators_model_type']!r}; only 'dflash' drafters can be read")
    if "speculators_model_type" not in config and architectures != [ARCHITECTURE]:
        raise ExportError(f"{path}: architectures is {architectures}; only ['{ARCHITECTURE}'] (not its variants) can be read")
    return config


def rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    """RoPE of a decoder config, nested or flat, as one dict with ``rope_type`` and ``rope_theta``.

    Raises:
        ExportError: none is given, flat and nested values differ, or only a part of the head is rotated.
    """
    nested, scaling, flat = config.get("rope_parameters"), config.get("rope_scaling"), config.get("rope_theta")
    rope = dict(nested or {})
    for other in (scaling or {}, {} if flat is None else {"rope_theta": flat}):
        for name, value in other.items():
            name = "rope_type" if name == "type" else name
            if name in rope and rope[name] != value:
                raise ExportError(
                    f"{where}: {name} is given twice, {rope[name]} and {value}; readers take one or the other, so correct the file"
                )
            rope[name] = value
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        raise ExportError(f"{where}: no rope_theta, neither at top level nor in rope_parameters")
    factor = config.get("partial_rotary_factor", rope.pop("partial_rotary_factor", 1.0))
    if factor not in (None, 1, 1.0) or any(name.startswith("mrope") for name in (*rope, *config)):
        raise ExportError(
            f"{where}: partial_rotary_factor or mrope in a drafter config: some servers apply it and others do not, so it cannot be trusted"
        )
    return rope


def _check_numbers(config: dict[str, Any], where: str) -> None:
    """Refuse what is no number where one is needed; what is missing is for others to miss."""
    for name, (least, most) in _WHOLE.items():
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise ExportError(f"{where}: {name} is {value!r}; it must be a whole number from {least} to {most}")
    rope = config.get("rope_parameters") or {}
    for name, value in [(name, config.get(name)) for name in _REAL] + [("rope_theta", rope.get("rope_theta"))]:
        real = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not real:
            raise ExportError(f"{where}: {name} is {value!r}; it must be a number above 0")


def _decoder(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Fields of ``DrafterShape`` that the Qwen3 decoder's config holds."""
    _check_numbers(config, where)
    if missing := [name for name in _NEEDED if config.get(name) is None]:
        raise ExportError(f"{where}: no {', '.join(missing)}; this is no complete DFlash drafter config")
    for name, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("is_causal", None)):
        if config.get(name, allowed) != allowed:
            raise ExportError(
                f"{where}: {name} is {config[name]!r}; "
                + (f"only {allowed!r} can be run" if allowed is not None else "it overrides every layer")
            )
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ExportError(f"{where}: layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ExportError(f"{where}: layer_types holds {sorted(unknown)}; only full_attention and sliding_attention can be run")
    window = config.get("sliding_window")
    if "sliding_attention" in kinds and (not window or not config.get("use_sliding_window", True)):
        raise ExportError(
            f"{where}: layers slide, but sliding_window is {window} and use_sliding_window {config.get('use_sliding_window')}"
        )
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": rope_parameters(config, where),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "initializer_range": config.get("initializer_range", 0.02),
    }


def _checked_ids(ids: Any, num_layers: int, where: str) -> tuple[int, ...]:
    if not ids or len(set(ids)) != len(ids) or any(type(i) is not int or i not in range(num_layers - 1) for i in ids):
        raise ExportError(f"{where}: target layer ids {ids} do not fit a target of {num_layers} layers (each once, 0 to {num_layers - 2})")
    return tuple(ids)


def _zlab_shape(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], num_target_layers: int | None
) -> tuple[DrafterShape, TargetInfo, list[str]]:
    where, notes = f"{folder}/config.json", []
    inner = config.get("dflash_config") or {}
    if inner.get("causal"):
        raise ExportError(f"{where}: dflash_config.causal is set; only blocks that see themselves both ways can be run")
    for table, at in ((config, where), (inner, f"{where}: dflash_config")):
        _check_numbers(table, at)
    sizes = {size for size in (config.get("block_size"), inner.get("block_size")) if size is not None}
    if len(sizes) != 1:
        raise ExportError(f"{where}: block_size is given as {sorted(sizes) or 'nothing'}; it must be there once, or twice and equal")
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    if mask is None:
        raise ExportError(f"{where}: no dflash_config.mask_token_id")
    num_layers = config.get("num_target_layers") or num_target_layers
    if num_layers is None:
        raise ExportError(f"{where}: no num_target_layers; say how many layers the target has")
    ids = inner.get("target_layer_ids", config.get("target_layer_ids"))
    if ids is None:
        ids = default_layer_ids(num_layers, config["num_hidden_layers"])
        notes.append(f"target_layer_ids left out; the rule for {num_layers} layers gives {ids}")
        fc = tensors.get("fc.weight")
        if fc is not None and fc.shape[1] != len(ids) * config["hidden_size"]:
            raise ExportError(
                f"{where}: no target_layer_ids, and fc.weight takes {fc.shape[1] // config['hidden_size']} taps; the rule gives {len(ids)}"
            )
    shape = DrafterShape(
        **_decoder(config, where),
        block_size=sizes.pop(),
        mask_token_id=mask,
        target_layer_ids=_checked_ids(ids, num_layers, where),
        num_target_layers=num_layers,
    )
    return shape, TargetInfo("", [], config.get("bos_token_id"), config.get("eos_token_id"), config.get("pad_token_id")), notes


def _speculators_shape(folder: Path, config: dict[str, Any], num_target_layers: int | None) -> tuple[DrafterShape, TargetInfo, list[str]]:
    where, notes = f"{folder}/config.json", []
    _check_numbers(config, where)
    decoder = config["transformer_layer_config"]
    if config.get("draft_vocab_size", 32000) != decoder["vocab_size"]:
        raise ExportError(
            f"{where}: draft_vocab_size {config.get('draft_vocab_size', '32000 (its default)')} is not the vocabulary's "
            f"{decoder['vocab_size']}; a pruned vocabulary is not supported"
        )
    if config.get("sample_from_anchor"):
        raise ExportError(
            f"{where}: sample_from_anchor is true: slot 0 predicts too; only the layout with a known token in slot 0 can be run"
        )
    if config.get("mask_token_id") is None:
        raise ExportError(f"{where}: no mask_token_id")
    fields = _decoder(decoder, where)
    slides = [window is not None for window in fields["layer_windows"]]
    if any(slides) and config.get("sliding_window_non_causal", False):
        raise ExportError(f"{where}: sliding layers that see a block both ways (sliding_window_non_causal) cannot be run; ours are causal")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path") or ""
    if num_target_layers is None and name and (Path(name) / "config.json").is_file():
        num_target_layers = text_config(read_json(Path(name) / "config.json")).get("num_hidden_layers")
    if num_target_layers is None:
        raise ExportError(
            f"{where}: a speculators folder does not say how many layers the target has; name the target (verifier is {name!r})"
        )
    shape = DrafterShape(
        **fields,
        block_size=config.get("block_size", 8),
        mask_token_id=config["mask_token_id"],
        target_layer_ids=_checked_ids([i - 1 for i in config.get("aux_hidden_state_layer_ids") or []], num_target_layers, where),
        num_target_layers=num_target_layers,
    )
    if "block_size" not in config:
        notes.append("block_size left out; the format's default is 8")
    tokens = (decoder.get("bos_token_id"), decoder.get("eos_token_id"), decoder.get("pad_token_id"))
    return shape, TargetInfo(name, list(verifier.get("architectures") or []), *tokens), notes


def _older_than_090(config: dict[str, Any]) -> bool:
    try:
        major, minor = (int(part) for part in str(config.get("speculators_version", "0.0")).split(".")[:2])
    except ValueError:
        raise DFlashError(f"speculators_version {config.get('speculators_version')!r} is no version number") from None
    return (major, minor) < (0, 9)

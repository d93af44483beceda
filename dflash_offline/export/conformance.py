"""Check an exported folder after it was written, from its files alone.

No server reports a missing or misnamed tensor, so this does: it opens the folder again and compares names, shapes,
dtypes, values and every config field with what the formats ask for, and the rotation that transformers' Qwen3 class
rebuilds from the config with the one the drafter was trained with.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_offline.drafter import DrafterShape, rotary_frequencies
from dflash_offline.errors import ExportError
from dflash_offline.export.formats import Format, TargetInfo, config_of, tensor_shapes
from dflash_offline.export.reading import read_drafter, read_tensors
from dflash_offline.manifest import read_json

_FORBIDDEN = {
    "zlab": ("is_causal", "speculators_model_type", "partial_rotary_factor", "mrope_section"),
    "speculators": ("is_causal", "model_type", "partial_rotary_factor", "mrope_section"),
}


@dataclass(frozen=True)
class Check:
    """One line of a conformance report."""

    name: str
    passed: bool
    detail: str


def check_folder(
    folder: Path, *, form: Format, shape: DrafterShape, target: TargetInfo, source: dict[str, torch.Tensor] | None = None
) -> list[Check]:
    """Check an exported folder against what it should hold.

    Args:
        form: the format it was written in.
        shape, target: what it was written from.
        source: the weights it was written from, any float dtype; the file must hold them rounded to bf16.

    Returns:
        Every check with its outcome; nothing is raised for a failed one (see ``require``).
    """
    checks = []
    for name, check in (
        ("folder reads back as the same drafter", lambda: _reads_back(folder, form, shape)),
        ("config.json holds exactly the format's fields", lambda: _config(folder, form, shape, target)),
        ("tensor names and shapes", lambda: _tensors(folder, shape)),
        ("tensors are bfloat16, metadata says pt", lambda: _dtypes(folder)),
        ("values are finite and alive", lambda: _values(folder)),
        ("values are the trained ones", lambda: _same_values(folder, source)),
        ("rotation rebuilt from config.json is the one trained with", lambda: _rotation(folder, shape)),
    ):
        checks.append(_run(name, check))
    return checks


def require(checks: list[Check], folder: Path) -> None:
    """Raise ``ExportError`` naming the checks that failed."""
    if failed := [f"{check.name}: {check.detail}" for check in checks if not check.passed]:
        raise ExportError(f"{folder}: the export does not conform: {'; '.join(failed)}")


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except ExportError as error:
        return Check(name, False, str(error))
    except (KeyError, ValueError, TypeError) as error:  # transformers, or a field that is not there
        return Check(name, False, f"{type(error).__name__}: {error}".splitlines()[0])


def _expect(condition: bool, detail: str) -> None:
    if not condition:
        raise ExportError(detail)


def _reads_back(folder: Path, form: Format, shape: DrafterShape) -> str:
    read = read_drafter(folder, num_target_layers=shape.num_target_layers)
    _expect(read.form == form, f"it is a {read.form} folder")
    _expect(read.shape == shape, f"its shape is {read.shape}, written was {shape}")
    return f"{shape.num_layers} layers, block {shape.block_size}, taps {list(shape.target_layer_ids)}, mask token {shape.mask_token_id}"


def _config(folder: Path, form: Format, shape: DrafterShape, target: TargetInfo) -> str:
    found, wanted = read_json(folder / "config.json"), config_of(form, shape, target)
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name, "absent") != wanted.get(name, "absent"))
    _expect(not wrong, f"differs in {', '.join(wrong)}")
    decoder: dict[str, Any] = found.get("transformer_layer_config", found)
    present = sorted(name for name in _FORBIDDEN[form] if name in found) + sorted(
        n for n in ("partial_rotary_factor", "is_causal") if n in decoder
    )
    _expect(not present, f"has {', '.join(present)}, which servers would apply")
    _expect(decoder["rope_theta"] == decoder["rope_parameters"]["rope_theta"], "rope_theta differs between its two places")
    if form == "zlab":
        _expect(found["block_size"] == found["dflash_config"]["block_size"], "block_size differs between its two places")
    return f"{len(found)} fields"


def _tensors(folder: Path, shape: DrafterShape) -> str:
    found = {name: tuple(tensor.shape) for name, tensor in read_tensors(folder).items()}
    wanted = tensor_shapes(shape)
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    _expect(not wrong, f"{len(wrong)} differ: {', '.join(wrong[:4])}")
    _expect(len(found) == 11 * shape.num_layers + 3, f"{len(found)} tensors")
    return f"{len(found)} = 11 x {shape.num_layers} + 3"


def _dtypes(folder: Path) -> str:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        _expect((file.metadata() or {}).get("format") == "pt", "metadata has no format pt")
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    _expect(kinds == {"BF16"}, f"dtypes are {sorted(kinds)}")
    return "BF16"


def _values(folder: Path) -> str:
    tensors = read_tensors(folder)
    infinite = sorted(name for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    _expect(not infinite, f"not finite: {', '.join(infinite[:4])}")
    # An all-zero matrix is a tensor that was never initialised or never loaded; training cannot get there.
    dead = sorted(name for name, tensor in tensors.items() if not tensor.any())
    _expect(not dead, f"all zero: {', '.join(dead[:4])}")
    return f"{sum(tensor.numel() for tensor in tensors.values()):,} parameters"


def _same_values(folder: Path, source: dict[str, torch.Tensor] | None) -> str:
    if source is None:
        return "no source given, not compared"
    tensors = read_tensors(folder)
    trained = {name: tensor.detach().cpu().to(torch.bfloat16) for name, tensor in source.items()}
    differ = sorted(name for name, tensor in trained.items() if name not in tensors or not torch.equal(tensors[name], tensor))
    _expect(not differ, f"differ: {', '.join(differ[:4])}")
    return f"{len(tensors)} tensors equal, bit for bit, after rounding to bf16"


def _rotation(folder: Path, shape: DrafterShape) -> str:
    rebuilt, factor = rebuilt_rotation(folder)
    ours, our_factor = rotary_frequencies(shape)
    _expect(rebuilt.shape == ours.shape, f"{len(rebuilt)} frequencies, trained with {len(ours)}")
    worst = float(((rebuilt.double() - ours.double()).abs() / ours.double()).max())
    _expect(worst < 1e-6, f"frequencies differ by up to {worst:.1e} of their size")
    _expect(math.isclose(factor, our_factor, rel_tol=1e-6), f"scaling factor {factor}, trained with {our_factor}")
    return f"{len(ours)} frequencies, rope type {shape.rope_parameters.get('rope_type', 'default')}"


def rebuilt_rotation(folder: Path) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and factor that transformers' Qwen3 class makes from the folder's config."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

    config = read_json(folder / "config.json")
    rotary = Qwen3RotaryEmbedding(Qwen3Config(**config.get("transformer_layer_config", config)))
    return rotary.inv_freq, float(rotary.attention_scaling)

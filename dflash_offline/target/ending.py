"""What a target does between its last layer and its distribution, beside the head: final norm, scale, soft cap.

The norm is an instance of the target's own class, so that every variant (Gemma's ``1 + weight``, a norm with a bias, one
without weights) is computed as the target computes it; only its weights are read, not the model's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_offline.errors import TargetError
from dflash_offline.target.facts import load_config, text_part
from dflash_offline.target.load import final_norm
from dflash_offline.target.weights import find_embedding, read_named

_GGUF_NORM = "output_norm.weight"


@dataclass(frozen=True)
class Ending:
    """Logits of the target = soft cap of ``head @ rows(states)``.

    Attributes:
        norm: the final norm.
        scale: what the target multiplies its logits by.
        softcap: logits x become ``softcap * tanh(x / softcap)``; None for no cap.
    """

    norm: nn.Module
    scale: float
    softcap: float | None

    @torch.no_grad()
    def rows(self, states: Tensor) -> Tensor:
        """Outputs of the last layer [..., H] -> what the head is to be given, [..., H]."""
        rows: Tensor = self.norm(states)
        return rows if self.scale == 1.0 else rows * self.scale


def load_ending(folder: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False) -> Ending:
    """Build the target's final norm and load its weights.

    Raises:
        TargetError: the target has no final norm that could be found, or its weights are missing.
    """
    folder = Path(folder)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    name, norm = final_norm(folder, config, trust_remote_code=trust_remote_code)
    shapes = {parameter: tuple(value.shape) for parameter, value in norm.named_parameters()}
    prefix = ".".join(find_embedding(folder).split(".")[:-2]) if any(folder.glob("*.safetensors")) else None
    stored: dict[str, Tensor] = {}
    for parameter, shape in shapes.items():
        wanted = _GGUF_NORM if prefix is None else f"{prefix}.{name}.{parameter}".lstrip(".")
        stored[parameter] = read_named(folder, wanted, dtype=dtype, device=torch.device(device))
        if tuple(stored[parameter].shape) != shape:
            raise TargetError(f"{folder}: {wanted} is {list(stored[parameter].shape)}, the target's final norm takes {list(shape)}")
    norm.load_state_dict(stored, strict=False, assign=True)
    norm.requires_grad_(False)
    if prefix is None and "weight" in stored:
        stored["weight"] -= _offset(norm, stored["weight"])  # GGUF holds the factor itself
    scale, softcap = _scale(config), _value(config, "final_logit_softcapping")
    return Ending(norm, scale, softcap)


@torch.no_grad()
def _offset(norm: nn.Module, weight: Tensor) -> float:
    """What a norm adds to its weight: 1 where it multiplies by ``1 + weight``."""
    kept, states = weight.clone(), torch.ones_like(weight)
    weight.zero_()
    offset = float(norm(states[None]).mean())
    weight.copy_(kept)
    return round(offset)


def _value(config: Any, name: str) -> float | None:
    for part in (config, text_part(config)):
        value = getattr(part, name, None)
        if isinstance(value, int | float) and value:
            return float(value)
    return None


def _scale(config: Any) -> float:
    """Cohere, Falcon-H1 and others multiply their logits by a number, Granite divides by one."""
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= _value(config, name) or 1.0
    return scale / (_value(config, "logits_scaling") or 1.0)

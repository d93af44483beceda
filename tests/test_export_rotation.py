"""From a target's config.json to the exported one: the rotation trained with is the one that servers rebuild."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import tensors_of
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_offline.config import DrafterConfig
from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.errors import TargetError
from dflash_offline.export import TargetInfo, export_weights
from dflash_offline.target import facts

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the target's config.json says; what it means
    "nested": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_type": "default", "rope_theta": 1e6}),
    "flat": ({"rope_theta": 1e7, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e7}),
    "small base": ({"rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e4}),
    "llama3 nested": ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, LLAMA3 | {"rope_theta": 5e5}),
    "llama3 flat": ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, LLAMA3 | {"rope_theta": 5e5}),
    "yarn": ({"rope_theta": 1e6, "rope_scaling": YARN}, YARN | {"rope_theta": 1e6}),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.25},
        {"rope_type": "default", "rope_theta": 1e7},
    ),
    "mrope": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
}


@pytest.fixture
def rewritten(tmp_path: Path, tiny_target: Path) -> Callable[[dict[str, Any]], Path]:
    """A copy of the tiny target whose config.json has these rotary fields and no others."""

    def make(fields: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
        config = json.loads((folder / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
            config.pop(name, None)
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


@pytest.mark.parametrize("form", ["zlab", "speculators"])
@pytest.mark.parametrize("written", WRITTEN)
def test_the_rotation_of_the_target_reaches_the_export(
    rewritten: Callable[[dict[str, Any]], Path], tmp_path: Path, written: str, form: str
) -> None:
    fields, meant = WRITTEN[written]
    known = facts(rewritten(fields))
    shape = DrafterShape.from_target(known, DrafterConfig(layers=1), [0, 2], 511)
    assert shape.rope_parameters == meant
    drafter = Drafter(shape)
    export_weights(tmp_path / form, form=form, shape=shape, tensors=tensors_of(drafter), target=TargetInfo("t", ["LlamaForCausalLM"]))
    config = json.loads((tmp_path / form / "config.json").read_text())
    config = config.get("transformer_layer_config", config)
    assert config["rope_theta"] == meant["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not [name for name in (*config, *config["rope_parameters"]) if "partial" in name or "mrope" in name]
    own = {name: value for name, value in config.items() if name not in ("architectures", "auto_map")}
    rebuilt = Qwen3RotaryEmbedding(AutoConfig.for_model(**own | {"model_type": "qwen3"}))
    positions = torch.tensor([0, 1, 17, 300, 1500])
    cos, sin = rebuilt(torch.zeros(1), positions[None])
    ours = drafter.rotation(positions)
    torch.testing.assert_close(ours[0][:, 0], cos[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[1][:, 0], sin[0], rtol=0, atol=0)
    flat = {name: value for name, value in own.items() if name != "rope_parameters"}  # what readers of the flat form see
    old_form = Qwen3RotaryEmbedding(AutoConfig.for_model(**flat | {"model_type": "qwen3"}))(torch.zeros(1), positions[None])
    assert torch.equal(old_form[0], cos) and torch.equal(old_form[1], sin)


def test_two_bases_that_differ_are_refused(rewritten: Callable[[dict[str, Any]], Path]) -> None:
    folder = rewritten({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    with pytest.raises(TargetError, match="rope_theta") as error:
        facts(folder)
    assert "\n" not in str(error.value)

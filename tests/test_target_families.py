"""Every family of target: a tiny random checkpoint of the real transformers class, tapped, against its own plain forward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_offline.errors import TargetError
from dflash_offline.target import Target, facts, load_embedding_and_head, load_ending, load_target

V, H, LAYERS = 96, 32, 4
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
HYBRID = LINEAR | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": H,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", SIZES | {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SIZES | {"sliding_window": 8}),
    "gemma3-text": ("Gemma3TextConfig", "Gemma3ForCausalLM", SIZES | {"sliding_window": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", SIZES | MOE),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", SIZES | MOE | HYBRID | {"shared_expert_intermediate_size": 16}),
    "qwen3.5-text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SIZES | HYBRID),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        SIZES | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "qwen3-vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", {"text_config": SIZES, "vision_config": VISION}),
    "qwen3.5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {"text_config": SIZES | HYBRID, "vision_config": VISION}),
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": SIZES | {"sliding_window": 8},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
}
TAPS = [0, 2]


def load(folder: Path, **options: Any) -> Target:
    """In float32 on the CPU; eager attention where transformers has no other for the family (a soft cap)."""
    eager = "gemma2" in (folder / "config.json").read_text()
    return load_target(folder, dtype=torch.float32, device="cpu", attention="eager" if eager else "sdpa", **options)


def save_model(folder: Path, family: str, *, max_shard_size: str = "5GB", like: tuple[str, str] | None = None, **changes: Any) -> Any:
    """Write a tiny random checkpoint (``like``: of these classes, with the family's sizes) and return the model, in float32."""
    config_name, model_name, options = FAMILIES[family]
    config_name, model_name = like or (config_name, model_name)
    torch.manual_seed(1)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**(options | changes))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:  # ones or zeros say nothing about whether a norm was loaded
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def token_rows() -> torch.Tensor:
    return torch.randint(4, V, (3, 21), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_equal_plain_forward(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    rows = token_rows()
    with torch.inference_mode():
        plain = [model(input_ids=row[None], output_hidden_states=True, use_cache=False).hidden_states for row in rows]
    target = load(tmp_path, layer_ids=TAPS)
    assert len(target.layers) == max(TAPS) + 1, "layers after the last tap must not be there"
    got = target.capture(rows, torch.full((3,), rows.shape[1]))
    assert got.shape == (3, rows.shape[1], len(TAPS), H)
    for k, layer_id in enumerate(TAPS):
        for b in range(len(rows)):
            want = plain[b][layer_id + 1][0]
            error = (got[b, :, k] - want).abs().amax(-1) / want.pow(2).mean(-1).sqrt()
            assert error.max() < 1e-5, (layer_id, b, error.max())
    own = target.plain_hidden_states(rows[:1])
    assert torch.equal(own[TAPS[-1] + 1][0], target.capture(rows[:1])[0, :, -1]), "the last entry must be before the final norm"


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_model_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    rows = token_rows()[:1]
    target = load(tmp_path, layer_ids=TAPS, keep_head=True)
    with torch.inference_mode():
        want, got = model(input_ids=rows, use_cache=False).logits, target.model(input_ids=rows, use_cache=False).logits
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_embedding_and_head(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, family)
    found = facts(tmp_path)
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.num_attention_heads, found.num_key_value_heads) == (
        H,
        LAYERS,
        V,
        4,
        2,
    )
    assert (found.head_dim, found.bos_token_id, found.eos_token_ids) == (8, 1, (2, 3))
    assert found.is_moe == ("moe" in family or "next" in family)
    assert found.is_hybrid == any(word in family for word in ("next", "3.5", "falcon"))
    assert set(found.rope_parameters) == {"rope_type", "rope_theta"}
    embedding, head = load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (head is embedding) == found.tie_word_embeddings == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5-text", "falcon-h1", "qwen3-moe", "mistral-window"])
def test_padding_never_reaches_real_tokens(family: str, tmp_path: Path) -> None:
    """A row alone, in a padded batch, and beside rows that differ: the same, whatever pads it."""
    save_model(tmp_path, family)
    target = load(tmp_path, layer_ids=TAPS)
    rows = token_rows()
    alone = target.capture(rows[:1, :9])[0]
    scale = alone.pow(2).mean(-1, keepdim=True).sqrt()
    for pad in (0, 5, V - 1):
        batch = rows.clone()
        batch[0, 9:] = pad
        assert ((target.capture(batch)[0, :9] - alone).abs() / scale).max() < 1e-5


def test_sharded_without_index(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3", max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    load(tmp_path, layer_ids=[0])
    (tmp_path / "model.safetensors.index.json").unlink()
    embedding, head = load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")
    assert torch.equal(embedding, model.model.embed_tokens.weight) and torch.equal(head, model.lm_head.weight)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", max_shard_size="20KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(TargetError, match=victim.name):
        load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")


def test_head_missing_is_an_error_and_never_random(tmp_path: Path) -> None:
    save_model(tmp_path, "llama-tied")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(TargetError, match="no output head"):
        load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")
    with pytest.raises(TargetError, match="lm_head"):
        load(tmp_path, layer_ids=[0], keep_head=True)


def test_family_without_sdpa_is_told_to_use_eager(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma2")
    with pytest.raises(TargetError, match='attention = "eager"'):
        load_target(tmp_path, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0])


def test_fp8_blocks_are_dequantised_as_transformers_does(tmp_path: Path) -> None:
    """An fp8 checkpoint (blocks of 16 x 16 with a scale each) gives the states of the model it stands for."""
    model = save_model(tmp_path, "qwen3")
    path, block = tmp_path / "model.safetensors", 16
    stored = load_file(path)
    for name, weight in list(stored.items()):
        if "layers" in name and "proj" in name:
            tiles = weight.view(weight.shape[0] // block, block, weight.shape[1] // block, block)
            scale = tiles.abs().amax((1, 3)) / 448
            codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = codes.view(weight.shape), scale
            model.get_parameter(name).data.copy_((codes.float() * scale[:, None, :, None]).view(weight.shape))
    path.unlink()
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = token_rows()[:1]
    with torch.inference_mode():
        plain = model(input_ids=rows, output_hidden_states=True, use_cache=False).hidden_states
    got = load(tmp_path, layer_ids=TAPS).capture(rows)
    for k, layer_id in enumerate(TAPS):
        torch.testing.assert_close(got[:, :, k], plain[layer_id + 1], rtol=1e-4, atol=1e-4)


def test_code_that_comes_with_a_model_runs_on_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_model(tmp_path, "llama")
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(
        f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaModel):\n    config_class = OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(TargetError, match="trust_remote_code = true"):
        load(tmp_path, layer_ids=TAPS)
    assert not ran.exists()
    rows = token_rows()[:1]
    with torch.inference_mode():
        plain = model(input_ids=rows, output_hidden_states=True, use_cache=False).hidden_states
    got = load(tmp_path, layer_ids=TAPS, trust_remote_code=True).capture(rows)
    torch.testing.assert_close(got[:, :, 1], plain[TAPS[1] + 1])
    whole = load(tmp_path, layer_ids=TAPS, trust_remote_code=True, keep_head=True)
    torch.testing.assert_close(whole.model(input_ids=rows).logits, model(input_ids=rows).logits)


@pytest.mark.parametrize("family", [*FAMILIES, "granite", "cohere", "olmo"])
def test_ending_and_head_give_the_targets_logits(family: str, tmp_path: Path) -> None:
    """Plain and 1 + weight norms, scales and caps of logits, wrappers: from the last layer's output to the logits."""
    if family == "gemma2":
        model = save_model(tmp_path, family, final_logit_softcapping=2.0)
    elif family in FAMILIES:
        model = save_model(tmp_path, family)
    else:
        scaled = {"granite": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 0.25}, "olmo": {}}[family]
        name = family.capitalize()
        model = save_model(tmp_path, "llama", like=(f"{name}Config", f"{name}ForCausalLM"), **scaled)
    target = load(tmp_path, layer_ids=[LAYERS - 1])
    rows = token_rows()[:1]
    with torch.inference_mode():
        want = model(input_ids=rows, use_cache=False).logits[0]
    ending = load_ending(tmp_path, dtype=torch.float32, device="cpu")
    _, head = load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")
    got = ending.rows(target.capture(rows)[0, :, 0]) @ head.T
    if ending.softcap is not None:
        got = ending.softcap * torch.tanh(got / ending.softcap)
    assert (ending.softcap is not None) == (family == "gemma2")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

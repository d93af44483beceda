"""Exported folders: config fields, tensors, conformance, reading back, conversion, refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zlab_reference import ReferenceDrafter

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.errors import ExportError
from dflash_offline.export import (
    TargetInfo,
    check_fits,
    check_folder,
    convert,
    export_weights,
    read_drafter,
    serve_commands,
    tensor_shapes,
    write_folder,
    zlab_config,
)

ROPES: dict[str, dict[str, Any]] = {
    "plain 1e4": {"rope_type": "default", "rope_theta": 1e4},
    "plain 1e7": {"rope_type": "default", "rope_theta": 1e7},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
}
TARGET = TargetInfo("example/target", ["LlamaForCausalLM"], 1, [2, 3], 2)


def make_shape(**changes: Any) -> DrafterShape:
    base = DrafterShape(
        hidden_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # not hidden / heads, as in Qwen3
        intermediate_size=96,
        rms_norm_eps=1e-5,
        rope_parameters=ROPES["plain 1e4"],
        vocab_size=512,
        block_size=8,
        mask_token_id=511,
        target_layer_ids=(0, 2, 1),
        num_target_layers=6,
        max_position_embeddings=2048,
        layer_windows=(None, None),
        initializer_range=0.1,
    )
    return replace(base, **changes)


def make_drafter(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    drafter = Drafter(shape)
    drafter.initialise(seed=seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1:  # norms away from one, so that swapping two of them shows
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
            parameter.copy_(parameter.to(torch.bfloat16))
    return drafter.eval()


def written(folder: Path, form: str = "zlab", **changes: Any) -> tuple[Path, Drafter]:
    drafter = make_drafter(make_shape(**changes))
    export_weights(folder, form=form, shape=drafter.shape, tensors=dict(drafter.named_parameters()), target=TARGET)
    return folder, drafter


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_zlab_folder_is_what_servers_look_for(tmp_path: Path) -> None:
    folder, drafter = written(tmp_path / "zlab")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == 8 and config["dflash_config"] == {"mask_token_id": 511, "target_layer_ids": [0, 2, 1], "block_size": 8}
    assert config["num_target_layers"] == 6 and config["vocab_size"] == 512 and config["head_dim"] == 32
    assert config["rope_theta"] == 1e4 == config["rope_parameters"]["rope_theta"] and config["rope_scaling"] is None
    assert config["eos_token_id"] == [2, 3] and config["tie_word_embeddings"] is False and config["dtype"] == "bfloat16"
    assert config["layer_types"] == ["full_attention"] * 2 and config["use_sliding_window"] is False
    for name in ("is_causal", "auto_map", "partial_rotary_factor"):
        assert name not in config
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3 and {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (64, 192) and tensors["layers.1.self_attn.q_norm.weight"].shape == (32,)
    assert set(tensors) == {name for name, _ in drafter.named_parameters()}


def test_speculators_folder_is_what_vllm_looks_for(tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "spec", form="speculators")
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash" and "model_type" not in config
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 2] and config["mask_token_id"] == 511
    assert config["draft_vocab_size"] == 512 == config["transformer_layer_config"]["vocab_size"]
    assert config["block_size"] == 8 and config["sample_from_anchor"] is False and config["target_hidden_size"] is None
    assert config["sliding_window_non_causal"] is True, "false makes vLLM's full layers causal"
    proposal = config["speculators_config"]["proposal_methods"]
    assert proposal == [{"proposal_type": "greedy", "speculative_tokens": 7, "accept_tolerance": 0.0, "verifier_accept_k": 1}]
    assert config["speculators_config"]["verifier"] == {"name_or_path": "example/target", "architectures": ["LlamaForCausalLM"]}
    assert len(load_file(folder / "model.safetensors")) == 25


def test_tensor_shapes_are_those_of_the_module() -> None:
    for changes in (
        {},
        {"num_layers": 3, "layer_windows": (None,) * 3},
        {"target_layer_ids": (1,)},
        {"head_dim": 16, "num_key_value_heads": 4},
    ):
        shape = make_shape(**changes)
        assert tensor_shapes(shape) == {name: tuple(parameter.shape) for name, parameter in Drafter(shape).named_parameters()}


@pytest.mark.parametrize("rope", ROPES)
def test_reference_gives_the_same_hidden_states_from_the_folder_alone(tmp_path: Path, rope: str) -> None:
    folder, drafter = written(tmp_path / "zlab", rope_parameters=ROPES[rope])
    generator = torch.Generator().manual_seed(1)
    taps, slots = torch.randn(300, 192, generator=generator), torch.randn(2, 8, 64, generator=generator)
    anchors = [5, 290]
    layout = BlockLayout.pack([300], [torch.tensor(anchors).numpy()], block_size=8)
    with torch.inference_mode():
        ours = drafter(taps, slots, layout)
        cache = drafter.start_cache()
        stepped = [drafter.draft(taps[low:high], slots[i], cache, high) for i, (low, high) in enumerate([(0, 5), (5, 290)])]
    reference = ReferenceDrafter(folder)
    for i, anchor in enumerate(anchors):
        expected = reference.block(taps[:anchor], slots[i]).float()
        torch.testing.assert_close(ours[i], expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(stepped[i], expected, atol=2e-5, rtol=1e-4)


def test_reference_agrees_where_layers_slide(tmp_path: Path) -> None:
    folder, drafter = written(tmp_path / "zlab", layer_windows=(5, None))
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["layer_types"] == ["sliding_attention", "full_attention"] and config["sliding_window"] == 5 and config["use_sliding_window"]
    )
    taps, slots = torch.randn(40, 192), torch.randn(1, 8, 64)
    with torch.inference_mode():
        ours = drafter(taps, slots, BlockLayout.pack([40], [torch.tensor([30]).numpy()], block_size=8))[0]
    torch.testing.assert_close(ours, ReferenceDrafter(folder).block(taps[:30], slots[0]).float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_a_folder_reads_back_as_the_same_drafter(tmp_path: Path, form: str) -> None:
    folder, drafter = written(tmp_path / "out", form=form, rope_parameters=ROPES["yarn"])
    read = read_drafter(folder, num_target_layers=6)
    assert read.form == form and read.shape == drafter.shape
    assert read.target.eos_token_id == [2, 3] and (form == "zlab" or read.target.name == "example/target")
    for name, parameter in drafter.named_parameters():
        assert torch.equal(read.tensors[name], parameter.to(torch.bfloat16)), name


def test_conversion_both_ways_is_bit_for_bit(tmp_path: Path) -> None:
    zlab, drafter = written(tmp_path / "zlab", rope_parameters=ROPES["llama3"])
    convert(zlab, tmp_path / "spec", form="speculators", target=TARGET)
    convert(tmp_path / "spec", tmp_path / "again", form="zlab", num_target_layers=6)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("zlab", "spec", "again")]
    assert weights[0] == weights[1] == weights[2]
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads((zlab / "config.json").read_text())
    with pytest.raises(ExportError, match="is a zlab folder already"):
        convert(zlab, tmp_path / "x", form="zlab")
    with pytest.raises(ExportError, match="does not name its target"):
        convert(zlab, tmp_path / "x", form="speculators")
    with pytest.raises(ExportError, match="does not say how many layers"):
        convert(tmp_path / "spec", tmp_path / "x", form="zlab")


def test_mixed_sliding_layers_are_refused_in_speculators_form_only(tmp_path: Path) -> None:
    written(tmp_path / "zlab", layer_windows=(5, None))
    with pytest.raises(ExportError, match="cannot express sliding layers"):
        written(tmp_path / "spec", form="speculators", layer_windows=(5, None))
    assert not (tmp_path / "spec" / "model.safetensors").exists()
    folder, _ = written(tmp_path / "all", form="speculators", layer_windows=(5, 5))
    assert json.loads((folder / "config.json").read_text())["sliding_window_non_causal"] is False
    with pytest.raises(ExportError, match=r"different windows \[5, 6\]"):
        written(tmp_path / "two", layer_windows=(5, 6))


def test_writing_takes_any_storage_and_refuses_what_a_server_would_not_notice(tmp_path: Path) -> None:
    drafter = make_drafter(make_shape())
    tensors = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    shared = torch.cat([tensors["layers.0.mlp.up_proj.weight"], tensors["layers.0.mlp.gate_proj.weight"]])
    tensors["layers.0.mlp.up_proj.weight"], tensors["layers.0.mlp.gate_proj.weight"] = shared[:96], shared[96:]
    tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"].T.contiguous().T
    write_folder(tmp_path / "a", form="zlab", shape=drafter.shape, target=TARGET, tensors=tensors)
    checks = check_folder(tmp_path / "a", form="zlab", shape=drafter.shape, target=TARGET, source=dict(drafter.named_parameters()))
    assert all(check.passed for check in checks), checks
    with pytest.raises(ExportError, match="norm.weight is not finite"):
        broken = tensors | {"norm.weight": torch.full((64,), float("nan"))}
        write_folder(tmp_path / "b", form="zlab", shape=drafter.shape, target=TARGET, tensors=broken)
    with pytest.raises(ExportError, match="nothing written, it would lack 1 trained tensor: fc.weight"):
        missing = {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
        write_folder(tmp_path / "b", form="zlab", shape=drafter.shape, target=TARGET, tensors=missing)
    (tmp_path / "a" / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="holds model-00001"):
        write_folder(tmp_path / "a", form="zlab", shape=drafter.shape, target=TARGET, tensors=tensors)


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (rename("norm.weight", "model.norm.weight"), "tensor names and shapes"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(4, 4, dtype=torch.bfloat16)}), "tensor names and shapes"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()}), "tensor names and shapes"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].float()}), "bfloat16"),
        (lambda t: t["layers.1.mlp.up_proj.weight"].zero_(), "finite and alive"),
        (lambda t: t["norm.weight"].fill_(float("inf")), "finite and alive"),
        (lambda t: t["layers.0.self_attn.k_norm.weight"].mul_(1.01), "the trained ones"),
    ],
)
def test_conformance_finds_a_damaged_tensor(tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None], check: str) -> None:
    folder, drafter = written(tmp_path / "zlab")
    edit_tensors(folder, damage)
    checks = check_folder(folder, form="zlab", shape=drafter.shape, target=TARGET, source=dict(drafter.named_parameters()))
    assert any(check in found.name for found in checks if not found.passed), checks


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(rope_theta=1e6),
        lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25),
        lambda c: c.update(is_causal=True),
        lambda c: c.update(block_size=9),
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 2]),
        lambda c: c.update(head_dim=16),
        lambda c: c.pop("num_target_layers"),
        lambda c: c.update(architectures=["Qwen3ForCausalLM"]),
    ],
)
def test_conformance_finds_a_damaged_config(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    folder, drafter = written(tmp_path / "zlab")
    edit(folder, change)
    checks = check_folder(folder, form="zlab", shape=drafter.shape, target=TARGET)
    assert not all(check.passed for check in checks)


def test_conformance_finds_a_wrong_rotation(tmp_path: Path) -> None:
    folder, drafter = written(tmp_path / "zlab", rope_parameters=ROPES["plain 1e7"])
    other = replace(drafter.shape, rope_parameters=ROPES["plain 1e4"])
    found = {check.name: check.passed for check in check_folder(folder, form="zlab", shape=other, target=TARGET)}
    assert not found["rotation rebuilt from config.json is the one trained with"]


REFUSALS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("zlab", lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    ("zlab", lambda c: c.update(block_size=16), r"block_size is given as \[8, 16\]"),
    ("zlab", lambda c: (c.pop("block_size"), c["dflash_config"].pop("block_size")), "block_size is given as nothing"),
    ("zlab", lambda c: c["dflash_config"].pop("mask_token_id"), "no dflash_config.mask_token_id"),
    ("zlab", lambda c: c.update(is_causal=True), "is_causal is True; it overrides every layer"),
    ("zlab", lambda c: c["dflash_config"].update(causal=True), "dflash_config.causal"),
    ("zlab", lambda c: c.update(attention_bias=True), "attention_bias is True"),
    ("zlab", lambda c: c.update(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("zlab", lambda c: c.update(rope_theta=5.0), "rope_theta is given twice"),
    ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0, 5, 1]), "do not fit a target of 6 layers"),
    ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]), "fc.weight has shape"),
    ("zlab", lambda c: c.update(num_hidden_layers=3, layer_types=["full_attention"] * 3), "lacks 11 tensors"),
    ("zlab", lambda c: c.pop("intermediate_size"), "no complete DFlash drafter config"),
    ("zlab", lambda c: c.update(rms_norm_eps=None), "no rms_norm_eps; this is no complete DFlash drafter config"),
    ("zlab", lambda c: c.update(rms_norm_eps="a"), "rms_norm_eps is 'a'; it must be a number above 0"),
    ("zlab", lambda c: c.update(hidden_size=64.0), "hidden_size is 64.0; it must be a whole number"),
    ("zlab", lambda c: c.update(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; it must be a whole number from 1 to 1024"),
    ("zlab", lambda c: c["dflash_config"].update(mask_token_id="5"), "mask_token_id is '5'; it must be a whole number"),
    ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0.0, 1, 4]), "do not fit a target of 6 layers"),
    ("zlab", lambda c: c["rope_parameters"].update(rope_type="yarn", factor="x"), "rotary scaling .* is not whole"),
    ("zlab", lambda c: c["rope_parameters"].update(rope_type="zz"), "config.json: rotary scaling 'zz' is not supported"),
    ("speculators", lambda c: c.update(mask_token_id="5"), "mask_token_id is '5'; it must be a whole number"),
    ("speculators", lambda c: c["transformer_layer_config"].update(rms_norm_eps="a"), "rms_norm_eps is 'a'"),
    ("speculators", lambda c: c.update(sample_from_anchor=True), "sample_from_anchor"),
    ("speculators", lambda c: c.update(draft_vocab_size=100), "pruned vocabulary"),
    ("speculators", lambda c: c.pop("draft_vocab_size"), "32000"),
    ("speculators", lambda c: c.update(mask_token_id=None), "no mask_token_id"),
    ("speculators", lambda c: c.update(aux_hidden_state_layer_ids=[0, 2, 1]), "do not fit"),
    ("speculators", lambda c: c.update(speculators_model_type="eagle3"), "eagle3"),
    (
        "speculators",
        lambda c: c["transformer_layer_config"].update(layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True),
        "sliding_window_non_causal",
    ),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSALS)
def test_reading_refuses_in_one_line(tmp_path: Path, form: str, change: Callable[[dict[str, Any]], None], message: str) -> None:
    folder, _ = written(tmp_path / "out", form=form)
    edit(folder, change)
    with pytest.raises(ExportError, match=message) as caught:
        read_drafter(folder, num_target_layers=6)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_reading_others_folders(tmp_path: Path) -> None:
    """Flat RoPE only, ids left to the rule, shards with an index; embedding and head of files before 0.9.0."""
    folder, drafter = written(tmp_path / "zlab", num_target_layers=24, target_layer_ids=(1, 21))
    edit(folder, lambda c: (c.pop("rope_parameters"), c["dflash_config"].pop("target_layer_ids"), c["dflash_config"].pop("block_size")))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    read = read_drafter(folder)
    assert read.shape == drafter.shape and "the rule for 24 layers gives [1, 21]" in read.notes[0]

    old, drafter = written(tmp_path / "old", form="speculators")
    own = {"embed_tokens.weight": torch.ones(512, 64, dtype=torch.bfloat16), "lm_head.weight": torch.ones(512, 64, dtype=torch.bfloat16)}
    edit_tensors(old, lambda t: t.update(own))
    with pytest.raises(ExportError, match="2 unexpected tensors"):
        read_drafter(old, num_target_layers=6)
    edit(old, lambda c: c.update(speculators_version="0.8.1"))
    read = read_drafter(old, num_target_layers=6)
    assert set(read.tensors) == set(tensor_shapes(drafter.shape)) and "the target's own" in read.notes[0]


def test_a_folder_is_read_from_its_only_subfolder(tmp_path: Path) -> None:
    """``export --output DIR`` makes DIR/speculators."""
    folder, drafter = written(tmp_path / "out" / "speculators", form="speculators")
    read = read_drafter(tmp_path / "out", num_target_layers=6)
    assert (read.folder, read.form, read.shape) == (folder, "speculators", drafter.shape)
    other, _ = written(tmp_path / "out" / "zlab")
    with pytest.raises(ExportError, match=rf"out: no config.json, but several folders with one; name one of {folder}, {other}$"):
        read_drafter(tmp_path / "out", num_target_layers=6)


def test_what_training_wrote_is_read_and_converted(tmp_path: Path) -> None:
    drafter = Drafter(make_shape())
    tensors = {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "shape.json").write_text(json.dumps(drafter.shape.to_dict()))
    save_file(tensors, folder / "model.safetensors")
    read = read_drafter(folder)
    assert (read.form, read.shape) == ("trained", drafter.shape)
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in tensors.items())
    for form in ("zlab", "speculators"):
        checks = convert(folder, tmp_path / form, form=form, target=TARGET)
        assert all(check.passed for check in checks)
        again = read_drafter(tmp_path / form, num_target_layers=drafter.shape.num_target_layers)
        assert again.shape == drafter.shape and torch.equal(again.tensors["fc.weight"], tensors["fc.weight"].to(torch.bfloat16))
    (folder / "shape.json").write_text("{}")
    with pytest.raises(ExportError, match="shape.json: .*no shape of a trained drafter"):
        read_drafter(folder)


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no config.json"):
        read_drafter(tmp_path)
    folder, _ = written(tmp_path / "zlab")
    cut = (folder / "model.safetensors").read_bytes()[:-100]
    (folder / "model.safetensors").write_bytes(cut)
    with pytest.raises(ExportError, match="cannot be read"):
        read_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="no model.safetensors"):
        read_drafter(folder)
    index = folder / "model.safetensors.index.json"
    for content, message in (
        ([], "index.json: no weight_map"),
        ({"weight_map": {"a": 5}}, "index.json: weight_map names 5; only files beside the index are read"),
        ({"weight_map": {"a": "../other/model.safetensors"}}, "weight_map names '../other/model.safetensors'; only files beside"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ExportError, match=message):
            read_drafter(folder)
    index.unlink()
    (folder / "config.json").write_text("{")
    with pytest.raises(ExportError, match="not valid JSON"):
        read_drafter(folder)


def test_a_drafter_of_another_target_is_refused() -> None:
    shape = make_shape()
    check_fits(shape, where="d", hidden_size=64, vocab_size=512, num_layers=6)
    for changes, message in (
        ({"hidden_size": 128}, "hidden_size is 64"),
        ({"vocab_size": 500}, "vocab_size"),
        ({"num_layers": 5}, "num_target_layers"),
    ):
        with pytest.raises(ExportError, match=message):
            check_fits(shape, where="d", **({"hidden_size": 64, "vocab_size": 512, "num_layers": 6} | changes))
    with pytest.raises(ExportError, match="mask_token_id 512"):
        check_fits(replace(shape, mask_token_id=512), where="d", hidden_size=64, vocab_size=512, num_layers=6)


def test_serve_commands_count_as_each_server_does() -> None:
    commands = serve_commands("zlab", target="T", folder="D", block_size=8)
    assert '"num_speculative_tokens": 7' in commands["vLLM"] and "--speculative-num-draft-tokens 8" in commands["SGLang"]
    assert set(serve_commands("speculators", target="T", folder="D", block_size=8)) == {"vLLM"}


def test_model_card(tmp_path: Path) -> None:
    drafter = make_drafter(make_shape())
    training = {"data": {"rows": 12}, "settings": {"epochs": 6.0}, "heldout": {"acc": 0.2222222}, "chat_template_kwargs": {"x": 1}}
    export_weights(
        tmp_path / "z",
        form="zlab",
        shape=drafter.shape,
        tensors=dict(drafter.named_parameters()),
        target=TARGET,
        license_name="mit",
        training=training,
        datasets={"gsm8k": {"acceptance_length": 2.6, "interval": [2.5, 2.7], "prompts": 80}},
    )
    card = (tmp_path / "z" / "README.md").read_text()
    for piece in (
        "license: mit",
        'base_model: "example/target"',
        "| gsm8k | 2.60 | 2.50 to 2.70 | 80 |",
        "rows: 12",
        "acc 0.2222",
        "sglang",
        "vllm serve",
    ):
        assert piece in card, piece
    assert json.loads((tmp_path / "z" / "training.json").read_text()) == training
    shutil.rmtree(tmp_path / "z")


def test_a_conversion_takes_the_card_along(tmp_path: Path) -> None:
    drafter = make_drafter(make_shape())
    tensors, training = dict(drafter.named_parameters()), {"data": {"rows": 12}, "settings": {"epochs": 6}}
    datasets = {"gsm8k": {"acceptance_length": 2.6, "interval": [2.5, 2.7], "prompts": 80}}
    options: dict[str, Any] = {"license_name": "mit", "training": training, "datasets": datasets}
    for form in ("zlab", "speculators"):
        export_weights(tmp_path / form, form=form, shape=drafter.shape, tensors=tensors, target=TARGET, **options)
    convert(tmp_path / "zlab", tmp_path / "there", form="speculators", target=replace(TARGET, name="another/name"))
    convert(tmp_path / "there", tmp_path / "back", form="zlab", num_target_layers=6)
    for made, like in (("there", "speculators"), ("back", "zlab")):  # "another/name" is in no card: what it says is of the source
        assert (tmp_path / made / "README.md").read_text() == (tmp_path / like / "README.md").read_text()
    card = tmp_path / "zlab" / "README.md"
    for number, foreign in enumerate(("# A drafter\n\nServe it with vLLM.\n", 'base_model: "\\x"\n## Serve\n## Drafter\n', None)):
        card.unlink()
        if foreign is not None:
            card.write_text(foreign)
        convert(tmp_path / "zlab", tmp_path / f"foreign-{number}", form="speculators", target=TARGET)
        assert not (tmp_path / f"foreign-{number}" / "README.md").exists()
        card.touch()


def test_config_has_no_key_left_to_a_default_of_the_reader(tmp_path: Path) -> None:
    """transformers' Qwen3 class, given the exported config, agrees with it on every field it knows."""
    from transformers import Qwen3Config

    shape = make_shape(rope_parameters=ROPES["llama3"], layer_windows=(7, None))
    config = zlab_config(shape, TARGET)
    read = Qwen3Config(**json.loads(json.dumps(config))).to_dict()
    for name in (
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "vocab_size",
        "eos_token_id",
    ):
        assert read[name] == config[name], name

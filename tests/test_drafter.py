"""The drafter: names, forward pass, leaks end to end, incremental drafting, rotation, shapes from a target."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_offline.attention import BlockLayout
from dflash_offline.config import DrafterConfig, RunConfig
from dflash_offline.drafter import Drafter, DrafterShape, planned_shape, rotary_frequencies
from dflash_offline.errors import ConfigError, TargetError
from dflash_offline.manifest import digest

SHAPE = DrafterShape(
    hidden_size=48,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    vocab_size=97,
    block_size=4,
    mask_token_id=96,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    max_position_embeddings=512,
    layer_windows=(None, 7, None),
    initializer_range=0.2,
)


def facts(**changes):
    values = {
        "hidden_size": 64, "num_layers": 4, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "max_position_embeddings": 2048, "is_moe": False, "is_hybrid": False, "initializer_range": 0.02,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def example(shape=SHAPE, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths, anchors = [29, 22], [np.array([0, 5, 6, 20, 28]), np.array([2, 13])]
    blocks = BlockLayout.pack(lengths, anchors, block_size=shape.block_size, num_context=56, num_blocks=9)
    hidden = torch.randn(56, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
    table = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    ids = torch.randint(0, 90, (56,), generator=generator)
    tokens = torch.full((9, shape.block_size), shape.mask_token_id)
    tokens[:, 0] = ids[blocks.context_end]
    return hidden, table, tokens, blocks


def test_parameters_have_the_names_and_shapes_servers_load():
    names = {name: tuple(parameter.shape) for name, parameter in Drafter(SHAPE).named_parameters()}
    layer = {
        "input_layernorm.weight": (48,), "post_attention_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (64, 48), "self_attn.k_proj.weight": (32, 48), "self_attn.v_proj.weight": (32, 48),
        "self_attn.o_proj.weight": (48, 64), "self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (80, 48), "mlp.up_proj.weight": (80, 48), "mlp.down_proj.weight": (48, 80),
    }  # fmt: skip
    wanted = {"fc.weight": (48, 96), "hidden_norm.weight": (48,), "norm.weight": (48,)}
    wanted |= {f"layers.{index}.{name}": shape for index in range(3) for name, shape in layer.items()}
    assert names == wanted and len(names) == 11 * 3 + 3
    assert set(Drafter(SHAPE).state_dict()) == set(wanted), "buffers would be exported as unknown tensors"


def test_initial_weights_follow_the_seed_and_have_the_right_spread():
    first, again, other = Drafter(SHAPE), Drafter(SHAPE), Drafter(SHAPE)
    other.initialise(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert not torch.equal(first.layers[0].self_attn.q_proj.weight, first.layers[1].self_attn.q_proj.weight)
    assert abs(first.fc.weight.std().item() - 0.2) < 0.02 and (first.hidden_norm.weight == 1).all()


@pytest.mark.parametrize("path", ["eager", "sdpa", "flex"])
def test_no_leak_end_to_end(path):
    """A hidden state at or after the anchor, another block's token, another sequence: unchanged. One before: changed."""
    drafter = Drafter(SHAPE, attention=path).eval()
    hidden, table, tokens, blocks = example()
    with torch.no_grad():
        before = drafter(hidden, table[tokens], blocks)
        for row in range(0, 51, 2):
            changed = hidden.clone()
            changed[row] += 1.0
            differs = (drafter(changed, table[tokens], blocks) != before).flatten(1).any(1)
            visible = (row >= blocks.context_start) & (row < blocks.context_end)
            assert torch.equal(differs, visible), f"row {row}"
        for block in range(blocks.num_blocks):
            changed = tokens.clone()
            changed[block, 0] = (changed[block, 0] + 1) % 90
            differs = (drafter(hidden, table[changed], blocks) != before).flatten(1).any(1)
            assert differs.nonzero().flatten().tolist() == [block]


def test_the_context_really_reaches_every_slot():
    drafter = Drafter(replace(SHAPE, layer_windows=(None,) * 3))
    hidden, table, tokens, blocks = example()
    changed = hidden.clone()
    changed[3] += 1.0
    differs = (drafter(hidden, table[tokens], blocks) != drafter(changed, table[tokens], blocks)).any(-1)
    assert differs[1].all() and not differs[0].any()


def test_short_forms_give_the_same_numbers_and_gradients():
    """Anchors and one mask row instead of whole blocks; trained slots alone instead of all."""
    drafter = Drafter(SHAPE)
    hidden, table, tokens, blocks = example()
    whole = drafter(hidden, table[tokens], blocks)
    short = drafter(hidden, table[tokens[:, 0]], blocks, mask_embedding=table[SHAPE.mask_token_id], trained_slots_only=True)
    assert short.shape == (9, 3, 48)
    torch.testing.assert_close(short, whole[:, 1:], rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(short)
    wanted = torch.autograd.grad((whole[:, 1:] * upstream).sum(), list(drafter.parameters()))
    got = torch.autograd.grad((short * upstream).sum(), list(drafter.parameters()))
    for (name, _), ours, theirs in zip(drafter.named_parameters(), got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("windows", [(None, None, None), (None, 7, None), (5, 5, 5)])
def test_drafting_step_by_step_equals_the_training_pass(windows):
    shape = replace(SHAPE, layer_windows=windows)
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(31, 96, generator=generator)
    table, starts = torch.randn(97, 48, generator=generator), np.array([4, 5, 9, 22, 30])
    tokens = torch.full((5, 4), 96)
    tokens[:, 0] = torch.tensor([3, 8, 1, 40, 7])
    with torch.no_grad():
        wanted = drafter(hidden, table[tokens], BlockLayout.pack([31], [starts], block_size=4))
        cache = drafter.start_cache()
        for block, start in enumerate(starts.tolist()):
            got = drafter.draft(hidden[cache.length : start], table[tokens[block]], cache, start)
            torch.testing.assert_close(got, wanted[block], rtol=1e-4, atol=1e-5)
            assert cache.length == start and cache.keys[0].shape[0] == start


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e7},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotation_is_that_of_transformers_qwen3(rope):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    shape = replace(SHAPE, rope_parameters=rope)
    config = Qwen3Config(hidden_size=48, num_attention_heads=4, head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope))
    positions = torch.tensor([0, 1, 17, 100, 400])
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = Drafter(shape).rotation(positions)
    torch.testing.assert_close(ours[0][:, 0], cos[0], rtol=0, atol=0)
    torch.testing.assert_close(ours[1][:, 0], sin[0], rtol=0, atol=0)


def test_frequencies_stay_float32_when_the_drafter_is_bfloat16():
    drafter = Drafter(SHAPE).to(torch.bfloat16)
    cos, _ = drafter.rotation(torch.tensor([301]))
    exact = torch.cos(301 * rotary_frequencies(SHAPE)[0]).to(torch.bfloat16)
    assert cos.dtype == torch.bfloat16 and torch.equal(cos[0, 0, :8], exact)


def test_matches_a_plain_qwen3_layer():
    """Our layer on one sequence equals transformers' Qwen3 decoder layer given the same keys: an outside witness."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    shape = replace(SHAPE, num_layers=1, layer_windows=(None,), target_layer_ids=(1,))
    drafter = Drafter(shape, attention="eager")
    config = Qwen3Config(
        hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
        rope_parameters=dict(SHAPE.rope_parameters), attn_implementation="eager",
    )  # fmt: skip
    reference = Qwen3DecoderLayer(config, 0)
    reference.load_state_dict(drafter.layers[0].state_dict())
    # a block anchored at 0 has no context: its layer is an ordinary bidirectional decoder layer over 4 tokens
    states = torch.randn(1, 4, 48)
    blocks = BlockLayout.pack([1], [np.array([0])], block_size=4)
    cos, sin = drafter.rotation(torch.arange(4))
    wanted = reference(states, attention_mask=None, position_embeddings=(cos.transpose(0, 1), sin.transpose(0, 1)))
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    got = drafter(torch.zeros(1, 48), states, blocks)
    torch.testing.assert_close(got[0], drafter.norm(wanted.view(4, 48)), rtol=1e-5, atol=1e-5)


def test_shape_follows_a_dense_target_and_survives_json():
    import json

    shape = DrafterShape.from_target(facts(), DrafterConfig(layers=2, block_size=8), [0, 2], 500)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.intermediate_size) == (4, 2, 16, 128)
    assert shape.layer_windows == (None, None) and shape.rope_parameters["rope_theta"] == 5e5
    assert DrafterShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


@pytest.mark.parametrize(
    ("changes", "heads", "kv_heads"),
    [
        ({"hidden_size": 5120, "head_dim": 256}, 40, 8),
        ({"hidden_size": 2048, "is_moe": True}, 16, 8),
        ({"hidden_size": 320, "is_moe": True}, 2, 2),
    ],
)
def test_unusual_targets_get_heads_of_128(changes, heads, kv_heads):
    shape = DrafterShape.from_target(facts(**changes), DrafterConfig(), [1], 1)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (heads, kv_heads, 128)
    assert shape.intermediate_size == 3 * changes["hidden_size"]


def test_sliding_layers_and_size_overrides():
    section = DrafterConfig(layers=3, sliding_window=64, sliding_layers=[0, 2], num_attention_heads=8, intermediate_size=99)
    shape = DrafterShape.from_target(facts(), section, [1], 1)
    assert shape.layer_windows == (64, None, 64) and shape.num_attention_heads == 8 and shape.intermediate_size == 99
    assert DrafterShape.from_target(facts(), DrafterConfig(layers=2, sliding_window=8), [1], 1).layer_windows == (8, 8)
    with pytest.raises(ConfigError, match="3 query heads are no multiple of 2"):
        DrafterShape.from_target(facts(), DrafterConfig(num_attention_heads=3), [1], 1)


def test_rope_keeps_base_and_scaling_only_and_refuses_what_depends_on_length():
    shape = DrafterShape.from_target(
        facts(rope_parameters={"type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1]}),
        DrafterConfig(), [1], 1,
    )  # fmt: skip
    assert shape.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(TargetError, match="dynamic"):
        DrafterShape.from_target(facts(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), DrafterConfig(), [1], 1)


def test_a_drafter_built_on_a_meta_device_works_once_it_has_weights():
    with torch.device("meta"):
        empty = Drafter(SHAPE)
    filled = Drafter(SHAPE)
    empty.load_state_dict(filled.state_dict(), assign=True)
    hidden, table, tokens, blocks = example()
    assert torch.equal(empty(hidden, table[tokens], blocks), filled(hidden, table[tokens], blocks))


def test_a_planned_shape_is_worked_out_once_for_what_it_follows_from(run_file, monkeypatch):
    from dflash_offline import target

    path = run_file(4)
    config = RunConfig.load(path)
    folder = Path(shutil.copytree(config.target.model, config.root_dir.parent / "target"))
    path.write_text(path.read_text().replace(json.dumps(config.target.model), json.dumps(str(folder))))
    worked_out, resolve = [], target.resolve_mask_token_id
    monkeypatch.setattr(target, "resolve_mask_token_id", lambda *wanted: worked_out.append(wanted) or resolve(*wanted))

    def planned() -> DrafterShape:
        return planned_shape(RunConfig.load(path), folder)

    first = planned()
    assert not config.root_dir.exists() and planned() == first and len(worked_out) == 2, "no root is made to remember it in"
    config.root_dir.mkdir()
    assert planned() == planned() == first and planned().to_dict() == first.to_dict() and len(worked_out) == 3
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 500]}')  # names end tokens, which masks must not be
    model = json.loads((folder / "config.json").read_text())
    assert planned() == planned() == first and len(worked_out) == 4
    (folder / "config.json").write_text(json.dumps(model | {"rms_norm_eps": 1e-3}))
    assert planned() == planned() == replace(first, rms_norm_eps=1e-3) and len(worked_out) == 5
    path.write_text(path.read_text().replace("block_size = 4", "block_size = 5"))
    assert planned() == planned() == replace(first, rms_norm_eps=1e-3, block_size=5) and len(worked_out) == 6
    for file in (config.root_dir / "cache" / "shapes").iterdir():
        file.write_text("{")
    assert planned().block_size == 5 and len(worked_out) == 7
    (file,) = [file for file in (config.root_dir / "cache" / "shapes").iterdir() if file.read_text() != "{"]
    whole = json.loads(file.read_text())
    edits = [{"mask_token_id": 7}, {"layer_windows": [None, None]}, {"hidden_size": "64"}, {"of_later": 1}]
    damaged = [whole | {"shape": whole["shape"] | edit} for edit in edits]
    fewer = {name: value for name, value in whole["shape"].items() if name != "initializer_range"}
    for number, content in enumerate([*damaged, {"shape": fewer, "digest": digest(fewer)}, whole["shape"], [], {"shape": None}], 8):
        file.write_text(json.dumps(content))
        assert planned() == planned() == replace(first, rms_norm_eps=1e-3, block_size=5) and len(worked_out) == number
    path.write_text(path.read_text().replace("block_size = 5", "block_size = 5\nmask_token_id = 2"))
    for _ in range(2):
        with pytest.raises(TargetError, match="is an end token of the target"):
            planned()


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn"}, {"rope_type": "yarn", "factor": "x"}, {"rope_type": "llama3", "factor": 8.0}])
def test_rotary_scaling_that_is_not_whole_is_an_error(scaling):
    with pytest.raises(TargetError, match="rotary scaling .* is not whole .*mend the model's config.json"):
        rotary_frequencies(replace(SHAPE, rope_parameters={"rope_theta": 1e4, **scaling}))

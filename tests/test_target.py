"""Facts, weights, mask token and tokenizer of a target; each error names what was looked for."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_target
from safetensors.torch import load_file, save_file

from dflash_offline.capture import check_taps
from dflash_offline.capture.forward import prepare_process
from dflash_offline.errors import TargetError
from dflash_offline.target import Target, facts, load_embedding_and_head, load_target, load_tokenizer, resolve_mask_token_id
from dflash_offline.target.weights import stored_tensors


@pytest.fixture
def target_copy(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


# -- facts


def test_rope_nested_or_flat_but_not_two_bases(target_copy: Path) -> None:
    edit_config(target_copy, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_theta=None)
    assert facts(target_copy).rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    edit_config(target_copy, rope_parameters=None, rope_theta=5e5)
    assert facts(target_copy).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    edit_config(target_copy, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_theta=1e4)
    with pytest.raises(TargetError, match="10000.0 and rope_parameters.rope_theta = 1000000.0 differ"):
        facts(target_copy)


def test_rope_scaling_is_kept_and_what_a_drafter_lacks_is_not(target_copy: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    edit_config(target_copy, rope_parameters=yarn | {"partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3]}, rope_theta=None)
    assert facts(target_copy).rope_parameters == yarn


def test_stop_tokens_of_generation_config_count(target_copy: Path) -> None:
    (target_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert facts(target_copy).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "no-such-model"}, "cannot read this configuration"),
        ({"auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}, "model_type": "other"}, "trust_remote_code = true"),
        ({"hidden_size": 32}, "hidden_size in config.json is 32"),
        ({"hidden_size": "64"}, r"config.json: .*'hidden_size' expected int, got str \(value: '64'\)"),
        ({"hidden_size": 64.0}, r"config.json: .*'hidden_size' expected int, got float \(value: 64.0\)"),
        ({"num_hidden_layers": True}, "config.json: .*'num_hidden_layers' expected int, got bool"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers = -1: must be a whole number, at least 1"),
        ({"num_attention_heads": 0}, "config.json: .*a size in it is 0"),
        ({"rms_norm_eps": "x"}, "config.json: .*'rms_norm_eps' expected float"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps = nan: must be a number"),
        ({"eos_token_id": "x"}, "config.json: .*'eos_token_id' with value 'x'"),
        ({"head_dim": [16]}, r"config.json: .*'head_dim' with value \[16\]"),
        ({"layer_types": 5}, "config.json: .*'int' object is not iterable"),
        ({"rope_parameters": [1]}, r"config.json: .*'rope_parameters' with value \[1\]"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, "config.json: rope_theta = 'a': must be a number above 0"),
        ({"rope_parameters": {"rope_type": 5, "rope_theta": 1e4}}, "config.json: rope_type = 5: must be text"),
        ({"rope_theta": "a"}, "config.json: rope_theta = a and rope_parameters.rope_theta = 10000.0 differ"),
    ],
)
def test_bad_config_is_one_line(target_copy: Path, changes: dict[str, Any], match: str) -> None:
    edit_config(target_copy, **changes)
    with pytest.raises(TargetError, match=match) as error:
        facts(target_copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "match"),
    [(b"", "not valid JSON"), (b"\xff\x00\x81", "not valid JSON"), (b"[1]", "holds no JSON object"), (b"null", "holds no JSON object")],
)
def test_damaged_json_is_one_line(target_copy: Path, name: str, content: bytes, match: str) -> None:
    (target_copy / name).write_bytes(content)
    with pytest.raises(TargetError, match=f"/{name}: {match}") as error:
        facts(target_copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["x", [None], {"a": 1}, [2, "x"], 2.7, True, 10**30])
def test_stop_tokens_are_token_ids(target_copy: Path, value: Any) -> None:
    (target_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TargetError, match=r"/generation_config.json: eos_token_id = .*: must be a token id or a list of them"):
        facts(target_copy)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no config.json"):
        facts(tmp_path)


# -- weights


def test_padded_vocabulary_counts_rows_of_the_embedding(target_copy: Path) -> None:
    assert facts(target_copy).vocab_size == 512
    assert len(load_tokenizer(target_copy)) == 500


def test_a_tokenizer_that_cannot_be_loaded_says_what_to_do(target_copy: Path) -> None:
    (target_copy / "tokenizer.json").write_text("{}")
    with pytest.raises(TargetError, match=r"its tokenizer cannot be loaded \(.+\); copy the tokenizer's files there again"):
        load_tokenizer(target_copy)
    (target_copy / "tokenizer.json").unlink()  # settings alone are no tokenizer
    with pytest.raises(TargetError, match=r"no tokenizer\.json in the folder; put the tokenizer's files beside the weights"):
        load_tokenizer(target_copy)


@pytest.mark.parametrize("content", [[], {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": {"a": []}}])
def test_index_that_is_none_is_refused(target_copy: Path, content: Any) -> None:
    (target_copy / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(TargetError, match="index.json: not a safetensors index; copy the model again"):
        stored_tensors(target_copy)


def test_quantised_head_is_refused(target_copy: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * 10).to(torch.int8)
        tensors["lm_head.weight_scale"] = torch.ones(1)

    edit_weights(target_copy, quantise)
    with pytest.raises(TargetError, match="lm_head.weight is stored as I8"):
        load_embedding_and_head(target_copy, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_asked_for_is_precision_given(target_copy: Path, stored: torch.dtype) -> None:
    edit_weights(target_copy, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    edit_config(target_copy, dtype=str(stored).removeprefix("torch."))
    embedding, head = load_embedding_and_head(target_copy, dtype=torch.bfloat16, device="cpu")
    assert embedding.dtype == head.dtype == torch.bfloat16
    target = load_target(target_copy, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0])
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.float32}


def test_damaged_weight_file_is_named(target_copy: Path) -> None:
    path = target_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TargetError, match="model.safetensors: cannot be read as safetensors"):
        stored_tensors(target_copy)


def test_pickled_weights_are_refused(target_copy: Path) -> None:
    (target_copy / "model.safetensors").rename(target_copy / "pytorch_model.bin")
    with pytest.raises(TargetError, match="convert the model to safetensors"):
        stored_tensors(target_copy)


# -- loading


def test_later_layers_and_head_are_never_read(target_copy: Path) -> None:
    """What is not there cannot be read: without the last layers and the head in the file, the first ones still load."""

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in [
            name for name in tensors if "layers.2." in name or "layers.3." in name or name in ("lm_head.weight", "model.norm.weight")
        ]:
            del tensors[name]

    whole = load_target(target_copy, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 1])
    edit_weights(target_copy, cut)
    target = load_target(target_copy, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 1])
    ids = torch.arange(3, 40)[None]
    assert torch.equal(target.capture(ids), whole.capture(ids))
    assert target.num_bytes == 4 * sum(p.numel() for p in target.model.parameters()) + sum(b.nbytes for b in target.model.buffers())
    with pytest.raises(TargetError, match="would be random"):
        load_target(target_copy, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[2])


def test_layer_that_is_not_there(tiny_target: Path) -> None:
    with pytest.raises(TargetError, match="layers 0 to 3"):
        load_target(tiny_target, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 4])


def test_order_of_taps_is_the_order_asked_for(tiny_target: Path) -> None:
    ids = torch.arange(3, 20)[None]
    options = {"dtype": torch.float32, "device": "cpu", "attention": "eager"}
    rising = load_target(tiny_target, layer_ids=[0, 2], **options).capture(ids)
    falling = load_target(tiny_target, layer_ids=[2, 0], **options).capture(ids)
    assert torch.equal(rising, falling.flip(2))


def test_a_layer_that_adds_its_number_shows_up_at_its_id(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Layer k adds the constant k + 1 to every channel: tap i must then hold the sum of 1..i+1 above the embedding."""
    folder = make_tiny_target(tmp_path / "model", tiny_tokenizer_dir, mlp_bias=True)

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "layers." in name and "norm" not in name:
                tensor.zero_()
            if name.endswith("down_proj.bias"):
                tensor.fill_(int(name.split("layers.")[1].split(".")[0]) + 1)

    edit_weights(folder, plain)
    embedding, _ = load_embedding_and_head(folder, dtype=torch.float32, device="cpu")
    ids = torch.arange(3, 20)
    taps = load_target(folder, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 1, 3]).capture(ids[None])[0]
    for k, total in enumerate((1.0, 3.0, 10.0)):
        torch.testing.assert_close(taps[:, k], embedding[ids] + total)


@contextlib.contextmanager
def compiled_beside_plain(folder: Path, *, graphs: int) -> Iterator[tuple[Target, Target]]:
    """The target twice, with its layers compiled and without; at the end so many graphs have been made, and nothing broke one."""
    prepare_process()
    options = {"dtype": torch.float32, "device": "cpu", "attention": "sdpa", "layer_ids": [0, 2]}
    compiled, plain = load_target(folder, **options), load_target(folder, **options)
    torch._dynamo.reset()
    stats, breaks = torch._dynamo.utils.counters["stats"], torch._dynamo.utils.counters["graph_break"]
    before = stats["unique_graphs"]
    compiled.compile_layers(dynamic=True, backend="eager")
    yield compiled, plain
    assert stats["unique_graphs"] - before == graphs and not breaks
    torch._dynamo.reset()


def test_two_graphs_serve_every_batch_shape(tiny_target: Path) -> None:
    """Layers compiled one by one share a graph, which takes any batch and length; a single row has one of its own."""
    with compiled_beside_plain(tiny_target, graphs=2) as (compiled, plain):
        for rows, tokens in ((3, 24), (4, 64), (1, 40), (64, 8), (1, 64), (2, 96), (7, 32)):
            ids = torch.randint(3, 500, (rows, tokens), generator=torch.Generator().manual_seed(rows))
            taps = compiled.taps(ids)
            torch.testing.assert_close(torch.stack(taps, 2), plain.capture(ids), rtol=1e-5, atol=1e-5)  # merged products round
            check_taps(compiled, ids[0], [tap[0] for tap in taps])  # must leave nothing behind that asks for other graphs


def test_one_graph_serves_every_packed_batch(tiny_target: Path) -> None:
    with compiled_beside_plain(tiny_target, graphs=1) as (compiled, plain):
        for lengths in ([9], [5, 64, 3], [40, 40], [2] * 30, [200]):
            rows = [torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
            found = [tap[0].split(lengths) for tap in compiled.packed_taps(rows)]
            want = [tap[0].split(lengths) for tap in plain.packed_taps(rows)]
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)  # merged products round
            check_taps(compiled, rows[0], [taps[0] for taps in found])  # as at the start of a capture: between packed batches


# -- tokenizer and mask token


def test_mask_token_is_the_first_free_row(tiny_target: Path) -> None:
    assert resolve_mask_token_id(tiny_target, None) == 500
    assert resolve_mask_token_id(tiny_target, 511) == 511


@pytest.mark.parametrize(("wanted", "match"), [(2, "end token"), (1, "beginning token"), (512, "512 rows"), (-1, "512 rows")])
def test_meaningful_or_missing_mask_token_is_refused(tiny_target: Path, wanted: int, match: str) -> None:
    with pytest.raises(TargetError, match=match):
        resolve_mask_token_id(tiny_target, wanted)


def test_ordinary_mask_token_is_warned_about(tiny_target: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_mask_token_id(tiny_target, 300) == 300
    assert "ordinary token" in caplog.text


def test_tokenizers_own_mask_token_comes_first(target_copy: Path) -> None:
    tokenizer = load_tokenizer(target_copy)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(target_copy)
    assert resolve_mask_token_id(target_copy, None) == 500
    tokenizer = load_tokenizer(target_copy)
    tokenizer.mask_token = "<|im_end|>"  # an alias of eos is no mask
    tokenizer.save_pretrained(target_copy)
    assert resolve_mask_token_id(target_copy, None) == 501


def test_no_free_row_asks_for_one(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    folder = make_tiny_target(tmp_path / "model", tiny_tokenizer_dir, vocab_size=500)
    with pytest.raises(TargetError, match=r"set \[drafter\] mask_token_id .*0 <\|endoftext\|>"):
        resolve_mask_token_id(folder, None)


def test_chat_template_from_a_file(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(tiny_target, tmp_path / "template.jinja")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(TargetError, match="cannot be read"):
        load_tokenizer(tiny_target, tmp_path / "missing.jinja")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\x00\x81")
    with pytest.raises(TargetError, match="binary.jinja: the chat template is no UTF-8 text"):
        load_tokenizer(tiny_target, tmp_path / "binary.jinja")


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer_config.json", "[1]"), ("tokenizer_config.json", "null"), ("tokenizer.json", "null")]
)
def test_damaged_tokenizer_is_one_line(target_copy: Path, name: str, content: str) -> None:
    (target_copy / name).write_text(content)
    with pytest.raises(TargetError, match="its tokenizer cannot be loaded") as error:
        load_tokenizer(target_copy)
    assert "\n" not in str(error.value)

"""A folder that holds one GGUF file: the same hidden states and head as the model it was written from."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_run_file
from test_capture import Run

from dflash_offline import identity
from dflash_offline.config import RunConfig
from dflash_offline.corpus.template import load_template
from dflash_offline.errors import TargetError
from dflash_offline.store import HiddenStateStore
from dflash_offline.target import facts, load_embedding_and_head, load_ending, load_target, load_tokenizer

gguf = pytest.importorskip("gguf", reason="the extra 'demo' is not installed")

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pair_up(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps a head's rotated halves interleaved: rows 0, d/2, 1, d/2 + 1, ..."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: torch.nn.Module, tokenizer_dir: Path | None = None) -> None:
    """``tokenizer_dir``: a byte-pair tokenizer to put into it."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    writer.add_tensor("output.weight", state["lm_head.weight"].numpy())
    for i in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{i}.{ours}.weight"]
            if "q_proj" in ours or "k_proj" in ours:
                weight = pair_up(weight, config.num_attention_heads if "q_proj" in ours else config.num_key_value_heads)
            writer.add_tensor(f"blk.{i}.{theirs}.weight", weight.contiguous().numpy())
    if tokenizer_dir is not None:
        own, raw = load_tokenizer(tokenizer_dir), json.loads((tokenizer_dir / "tokenizer.json").read_text())
        special = {each["content"]: each["id"] for each in raw["added_tokens"]}
        tokens = sorted(raw["model"]["vocab"] | special, key=(raw["model"]["vocab"] | special).get)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in raw["model"]["merges"]])
        writer.add_eos_token_id(own.eos_token_id)
        writer.add_chat_template(own.chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_model(**changes: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 128} | changes
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes)).eval()


@pytest.fixture
def model() -> torch.nn.Module:
    return make_model()


def test_gguf_target_equals_its_origin(tmp_path: Path, model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.norm.weight += torch.linspace(-0.3, 0.3, 32)
    write_gguf(tmp_path / "model.gguf", model)
    found = facts(tmp_path)
    assert (found.hidden_size, found.num_layers, found.vocab_size, found.head_dim, found.model_type) == (32, 3, 64, 8, "llama")
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        want = model(ids, output_hidden_states=True).hidden_states
    target = load_target(tmp_path, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[0, 1])
    assert len(target.layers) == 2
    got = target.capture(ids)
    for k in range(2):
        torch.testing.assert_close(got[0, :, k], want[k + 1][0], rtol=1e-5, atol=1e-5)
    embedding, head = load_embedding_and_head(tmp_path, dtype=torch.float32, device="cpu")
    assert torch.equal(embedding, model.model.embed_tokens.weight) and torch.equal(head, model.lm_head.weight)
    ending = load_ending(tmp_path, dtype=torch.float32, device="cpu")
    last = load_target(tmp_path, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=[2]).capture(ids)[0, :, 0]
    torch.testing.assert_close(ending.rows(last), want[-1][0], rtol=1e-4, atol=1e-4)


def test_folder_with_a_gguf_file_and_a_tokenizer_is_captured(tmp_path: Path, tiny_tokenizer_dir: Path, conversations: list[dict]) -> None:
    """No config.json: keys, plan and layers follow from the file's header."""
    folder, corpus = tmp_path / "target", tmp_path / "corpus.jsonl"
    shutil.copytree(tiny_tokenizer_dir, folder)
    model = make_model(vocab_size=512, num_hidden_layers=4, max_position_embeddings=2048)
    write_gguf(folder / "model.gguf", model)
    corpus.write_text("".join(json.dumps(row) + "\n" for row in conversations[:6]), encoding="utf-8")
    made = Run(write_run_file(tmp_path / "run", model=folder, files=[corpus], target={"capture_layer_ids": [0, 1]}))
    sizes = identity.target_config(made.config)
    assert (sizes["num_hidden_layers"], sizes["hidden_size"], sizes["vocab_size"], sizes["head_dim"]) == (4, 32, 512, 8)
    assert sizes["tie_word_embeddings"] is False and made.plan.packed
    assert any("self-check passed" in line for line in made.capture())
    store = HiddenStateStore(made.store_path)
    assert len(store) == len(made.corpus) == 6
    ids = torch.from_numpy(np.asarray(store[0].input_ids, np.int64))[None]
    with torch.inference_mode():
        want = model(ids, output_hidden_states=True).hidden_states[2][0]
    assert (store[0].hidden_states()[:, 1].float() - want).norm() < 0.01 * want.norm()


def test_a_gguf_file_alone_brings_its_tokenizer_and_template(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(vocab_size=512), tiny_tokenizer_dir)
    template = load_template(RunConfig.load(write_run_file(tmp_path / "run", model=tmp_path, files=[tmp_path / "none.jsonl"])))
    assert load_tokenizer(tiny_tokenizer_dir).eos_token in template.enders


def test_two_gguf_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(TargetError, match="2 GGUF files"):
        facts(tmp_path)

"""The z-lab drafter written out a second time, from its published description and an exported folder alone.

Plain torch on single tensors, one block at a time, no caches, no code of ``dflash_offline``: what it computes from
``config.json`` and ``model.safetensors`` is what a server would. With it, an independent draft-and-verify loop that
runs the whole target again at every step.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def inverse_frequencies(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies of each pair of channels, from the flat fields that the older readers take."""
    dim, theta, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"] or {}
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return torch.tensor(plain), 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return torch.tensor([f / factor for f in plain]), 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        out = []
        for frequency in plain:
            turns = original * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
            out.append((1 - share) * frequency / factor + share * frequency)
        return torch.tensor(out), 1.0
    assert kind == "yarn", kind

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(channel(scaling.get("beta_fast", 32))))
    high = min(dim - 1, math.ceil(channel(scaling.get("beta_slow", 1))))
    out = []
    for i, frequency in enumerate(plain):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        out.append(frequency * (1 - ramp) + frequency / factor * ramp)
    return torch.tensor(out), 0.1 * math.log(factor) + 1.0


class ReferenceDrafter:
    """A drafter out of a z-lab folder, in float64 unless told otherwise."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.frequencies, self.factor = inverse_frequencies(self.config)
        self.block_size = self.config["block_size"]
        self.layer_ids = self.config["dflash_config"]["target_layer_ids"]
        self.mask_id = self.config["dflash_config"]["mask_token_id"]
        self.dtype = dtype

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].double() * self.frequencies.double()  # [rows, D/2]
        cos, sin = (angles.cos() * self.factor).to(self.dtype)[:, None], (angles.sin() * self.factor).to(self.dtype)[:, None]
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def block(self, taps: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """taps [p, K*H] of every token before the anchor at p, embeddings [B, H] of the slots -> [B, H] for the head."""
        c, w, eps = self.config, self.weights, self.config["rms_norm_eps"]
        start, size = len(taps), len(embeddings)
        context = rms_norm(taps.to(self.dtype) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        x = embeddings.to(self.dtype)
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        key_positions, query_positions = torch.arange(start + size), torch.arange(start, start + size)
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            normed = rms_norm(x, w[p + "input_layernorm.weight"], eps)
            both = torch.cat([context, normed])
            q = (normed @ w[p + "self_attn.q_proj.weight"].T).view(size, heads, dim)
            k = (both @ w[p + "self_attn.k_proj.weight"].T).view(start + size, kv_heads, dim)
            v = (both @ w[p + "self_attn.v_proj.weight"].T).view(start + size, kv_heads, dim)
            q = self.rotate(rms_norm(q, w[p + "self_attn.q_norm.weight"], eps), query_positions)
            k = self.rotate(rms_norm(k, w[p + "self_attn.k_norm.weight"], eps), key_positions)
            visible = torch.ones(size, start + size, dtype=torch.bool)
            if c["layer_types"][i] == "sliding_attention":
                behind = query_positions[:, None] - key_positions[None, :]
                visible = (behind >= 0) & (behind < c["sliding_window"])
            out = torch.empty(size, heads, dim, dtype=self.dtype)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = q[:, head] @ k[:, shared].T / math.sqrt(dim)
                out[:, head] = torch.softmax(scores.masked_fill(~visible, -math.inf), -1) @ v[:, shared]
            x = x + out.reshape(size, -1) @ w[p + "self_attn.o_proj.weight"].T
            normed = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = normed @ w[p + "mlp.gate_proj.weight"].T, normed @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
        return rms_norm(x, w["norm.weight"], eps)


@torch.no_grad()
def draft_and_verify(
    model: torch.nn.Module, drafter: ReferenceDrafter, prompt: list[int], max_new_tokens: int, stop: set[int]
) -> tuple[list[int], list[int]]:
    """Greedy loop on a transformers causal LM, the whole sequence run anew each time.

    Returns the emitted tokens and the accepted drafted tokens of each step.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def target(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return out.logits[0].argmax(-1), torch.cat([out.hidden_states[i + 1][0] for i in drafter.layer_ids], -1)

    own, taps = target(prompt)
    text, accepted = [int(own[-1])], []
    while len(text) < max_new_tokens and text[-1] not in stop:
        start = len(prompt) + len(text) - 1  # position of the bonus token
        slots = torch.tensor([text[-1]] + [drafter.mask_id] * (drafter.block_size - 1))
        hidden = drafter.block(taps[:start], embedding[slots])
        drafted = (hidden @ head.to(drafter.dtype).T).argmax(-1)[1:].tolist()
        own, taps = target(prompt + text + drafted)
        count = 0
        while count < len(drafted) and drafted[count] == int(own[start + count]):
            count += 1
        accepted.append(count)
        for token in [*drafted[:count], int(own[start + count])]:
            text.append(token)
            if token in stop or len(text) == max_new_tokens:
                break
    return text, accepted

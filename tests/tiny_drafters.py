"""A drafter overfitted on one conversation of the tiny target, made once for all test modules that need it."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.evaluate import Decoder, load_decoder
from dflash_offline.target import load_target

BLOCK = 6
LAYER_IDS = (0, 2)


def tiny_shape(**changes: Any) -> DrafterShape:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "vocab_size": 512,
        "block_size": BLOCK,
        "mask_token_id": 511,
        "target_layer_ids": LAYER_IDS,
        "num_target_layers": 4,
        "max_position_embeddings": 2048,
        "layer_windows": (None, None),
    }
    return DrafterShape(**(sizes | changes))


def tensors_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in drafter.named_parameters()}


def prompt_ids(seed: int, length: int = 20) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_decoder(target: Path, drafter: Drafter) -> Decoder:
    return load_decoder(target, drafter.shape, tensors_of(drafter), device="cpu", dtype=torch.float32)


@cache
def own_text(tiny_target: Path) -> tuple[list[int], list[int]]:
    """A prompt and the 120 tokens the tiny target itself writes after it."""
    decoder = make_decoder(tiny_target, Drafter(tiny_shape()))
    prompt = prompt_ids(0)
    response = decoder.generate_plain(prompt, max_new_tokens=120)
    assert len(response.tokens) == 120, "this seed's text must not stop early"
    return prompt, response.tokens


@cache
def stored_conversation(tiny_target: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, loss mask and bf16 context rows of that conversation, as the store would hold them."""
    prompt, text = own_text(tiny_target)
    ids = torch.tensor(prompt + text)
    target = load_target(tiny_target, dtype=torch.float32, device="cpu", attention="sdpa", layer_ids=list(LAYER_IDS))
    hidden = target.capture(ids[None])[0].flatten(1).to(torch.bfloat16)
    mask = torch.zeros(len(ids), dtype=torch.uint8)
    mask[len(prompt) :] = 1
    return ids, mask, hidden


@cache
def overfit(tiny_target: Path) -> Drafter:
    """A drafter trained on that one conversation until it knows it: every anchor in every step, plain cross-entropy."""
    ids, mask, hidden = stored_conversation(tiny_target)
    drafter = Drafter(tiny_shape())
    decoder = make_decoder(tiny_target, drafter)
    anchors = torch.arange(len(ids) - 1)[(mask[:-1] & mask[1:]).bool()].numpy()
    layout = BlockLayout.pack([len(ids)], [anchors], block_size=BLOCK)
    rows = layout.slot_rows[:, 1:]
    inside = rows < len(ids)
    labels = ids[rows.clamp(max=len(ids) - 1)][inside]
    slots = torch.full((len(anchors), BLOCK), 511)
    slots[:, 0] = ids[anchors]
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        out = drafter(hidden.float(), decoder.embedding[slots].float(), layout)[:, 1:][inside]
        loss = torch.nn.functional.cross_entropy(out @ decoder.head.T, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.05, loss.item()
    return drafter.eval()


def with_noise(drafter: Drafter) -> Drafter:
    """A copy that is often wrong: noise on every weight."""
    noisy = Drafter(drafter.shape)
    noisy.load_state_dict(drafter.state_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(parameter.std() * 0.8 * torch.randn(parameter.shape, generator=generator))
    return noisy

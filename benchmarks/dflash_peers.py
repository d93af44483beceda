"""One training step of the peers' DFlash models on the benchmark's tensors. Its drafter of SpecForge also serves ``quality.py``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[int], Tensor]
Made = tuple[Step, nn.Module]


def _rows(work: Any, tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The packed row as these models want it: one row, or a batch padded to the longest. They do not pack.

    Returns ids [b, T], hidden [b, T, K * H] and loss mask [b, T].
    """
    device, longest, count = tensors.hidden.device, max(work.lengths), len(work.lengths)
    ids = torch.zeros(count, longest, dtype=torch.long, device=device)
    hidden = tensors.hidden.new_zeros(count, longest, tensors.hidden.shape[1])
    mask = torch.zeros(count, longest, device=device)
    start = 0
    for row, length in enumerate(work.lengths):
        ids[row, :length], hidden[row, :length] = tensors.input_ids[start : start + length], tensors.hidden[start : start + length]
        mask[row, :length] = torch.from_numpy(tensors.loss_mask[start : start + length]).float().to(device)
        start += length
    return ids, hidden, mask


def _config(shape: Any, **settings: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim, intermediate_size=shape.intermediate_size, vocab_size=shape.vocab_size,
        num_hidden_layers=shape.num_layers, rms_norm_eps=shape.rms_norm_eps, max_position_embeddings=shape.max_position_embeddings,
        layer_types=["full_attention"] * shape.num_layers, **settings,
    )  # fmt: skip


def specforge_draft(shape: Any, *, device: Any, dtype: torch.dtype, backend: str, **settings: Any) -> nn.Module:
    """SpecForge's drafter of a shape of ours, with weights of its own; ``settings`` go into its transformers configuration."""
    from specforge.modeling.draft.dflash import DFlashDraftModel

    config = _config(shape, **settings)
    config.block_size, config.num_target_layers = shape.block_size, shape.num_target_layers
    config.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.target_layer_ids)}
    config._attn_implementation = backend
    with torch.device(device):
        return DFlashDraftModel(config).to(device, dtype)


def specforge(folder: Path, work: Any, tensors: Any) -> Made:
    """SpecForge 0.2.0: ``OnlineDFlashModel`` as its trainer runs it, with flex_attention."""
    sys.path.append(str(folder))
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel

    shape, device, dtype = work.shape, tensors.hidden.device, tensors.hidden.dtype
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    draft = specforge_draft(shape, device=device, dtype=dtype, backend=backend)
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(tensors.head, requires_grad=False)
    table = nn.Embedding(1, 1)
    table.weight = nn.Parameter(tensors.embedding, requires_grad=False)
    ids, hidden, mask = _rows(work, tensors)
    model = OnlineDFlashModel(
        draft, head, table, shape.mask_token_id, block_size=shape.block_size, attention_backend=backend,
        num_anchors=work.anchors // len(work.lengths), loss_decay_gamma=7.0,
    )  # fmt: skip

    def step(_: int) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, hidden_states=hidden, loss_mask=mask)[0]
        loss.backward()
        return loss.detach()

    return step, model


def speculators(folder: Path, work: Any, tensors: Any) -> Made:
    """speculators 0.9.0: its DFlash model with cross-entropy on the target's tokens."""
    sys.path.append(str(folder))
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    shape, device, dtype = work.shape, tensors.hidden.device, tensors.hidden.dtype
    layer = _config(shape)
    layer._attn_implementation = "simple_flex_attention"
    proposal = GreedyTokenProposalConfig(speculative_tokens=shape.block_size - 1)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=shape.vocab_size, block_size=shape.block_size,
        aux_hidden_state_layer_ids=[layer_id + 1 for layer_id in shape.target_layer_ids], mask_token_id=shape.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    model = DFlashDraftModel(config).to(device, dtype)
    for name, parameter in model.named_parameters():
        frozen = any(part in name for part in ("embed_tokens", "lm_head", "verifier"))
        parameter.requires_grad_(not frozen)
        if parameter.isnan().any() or frozen:
            nn.init.normal_(parameter, 0, 0.02)
    ids, hidden, mask = tensors.input_ids[None], tensors.hidden[None], torch.from_numpy(tensors.loss_mask).float().to(device)[None]
    last = torch.randn(1, ids.shape[1], shape.hidden_size, device=device, dtype=dtype)
    lengths = torch.tensor(work.lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(work.lengths), device=device), lengths)[None]
    loss_config = resolve_loss_config("ce", "fused")

    def step(_: int) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(hidden, ids, mask, last, document, loss_config=loss_config, gamma=7.0, max_anchors=work.anchors)[1]
        loss.backward()
        return loss.detach()

    return step, model


PEERS: dict[str, Callable[[Path, Any, Any], Made]] = {"specforge-0.2.0": specforge, "speculators-0.9.0": speculators}

"""transformers' own ``generate``, for targets whose layers do not all attend fully (sliding windows, linear attention)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, GenerationConfig

from dflash_offline.config import RegenerateConfig

if TYPE_CHECKING:
    from dflash_offline.regenerate.local import Asked


def generate(model: Any, group: "Sequence[Asked]", stop_ids: list[int], section: RegenerateConfig) -> list[list[int]]:
    """Answers of a group of prompts, each with its stop token if it has one.

    Prompts are padded on the left. A layer that hands a state from token to token would take the padding in, so such
    models answer one prompt at a time.
    """
    if has_state(model) and len(group) > 1:
        return [generate(model, [asked], stop_ids, section)[0] for asked in group]
    longest = max(len(asked.ids) for asked in group)
    pad = stop_ids[0] if stop_ids else 0
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(asked.ids)) + asked.ids for asked in group], device=device)
    mask = torch.tensor([[0] * (longest - len(asked.ids)) + [1] * len(asked.ids) for asked in group], device=device)
    most = max(asked.most_tokens for asked in group)
    options: dict[str, Any] = {"do_sample": False}
    if section.temperature > 0:
        torch.manual_seed(group[0].conversation.draw_key(section.seed))
        options = {"do_sample": True, "temperature": section.temperature, "top_p": section.top_p, "top_k": 0}
    model.generation_config = GenerationConfig()  # the model's own would fill in what is left out here
    config = GenerationConfig(max_new_tokens=most, eos_token_id=stop_ids or None, pad_token_id=pad, **options)
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    answers = []
    for asked, line in zip(group, output[:, longest:].tolist(), strict=True):
        ends = [i + 1 for i, token in enumerate(line) if token in stop_ids]
        answers.append(line[: min([asked.most_tokens, *ends])])
    return answers


def has_state(model: Any) -> bool:
    """Whether the model's cache has layers that hold more than keys and values."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (KeyError, AttributeError, ValueError):
        return True
    return any("LinearAttention" in kind.__name__ for layer in layers for kind in type(layer).__mro__)

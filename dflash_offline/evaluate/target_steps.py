"""The target, one sequence at a time, with a KV cache that can be put back.

A draft-and-verify loop runs the target on a whole block and then keeps only a part of it. Attention layers just drop
the last keys. A layer with a recurrent state (linear attention, SSM, convolution) cannot: its state is copied before
the block and, when a part is refused, put back and run again over the kept tokens.

Shapes: T tokens, K taps, H hidden, V vocabulary; batch 1 throughout.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_offline.errors import EvaluateError


@dataclass
class TargetStep:
    """What one forward of the target gives.

    Attributes:
        logits: [T, V]; of the last token only, [1, V], after ``prefill``.
        hidden: [T, K*H] outputs of the tapped layers, in the drafter's order.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class SteppedTarget:
    """A causal LM that takes tokens in steps.

    Args:
        model: the transformers module with its head, in evaluation mode.
        layers: its decoder layers.
        layer_ids: tapped layers; id i is the output of ``layers[i]``.

    Tapped rows pass through bf16, as the store keeps them and servers compute them, so that the drafter sees the same
    numbers here as in training.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
        self.model = model
        self.layer_ids = list(layer_ids)
        self.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed within transformers 5
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks = [layers[i].register_forward_hook(self._tap(i)) for i in dict.fromkeys(self.layer_ids)]
        self.cache: DynamicCache | None = None
        self.length = 0
        self._block: torch.Tensor | None = None  # tokens of the last step, until `keep` says what stays
        self._saved: dict[int, Any] = {}
        self.recurrent = _has_recurrent_state(model)
        self.stepwise = self.recurrent and not self._continues_blocks()

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def prefill(self, input_ids: Sequence[int] | torch.Tensor) -> TargetStep:
        """Start anew with a prompt of T tokens. Logits are those of its last token."""
        self.cache = self._new_cache()
        self.length, self._block, self._saved = 0, None, {}
        ids = torch.as_tensor(input_ids, dtype=torch.long, device=self.device)
        step = self._forward(ids, logits_to_keep=1)
        self.length = len(ids)
        return step

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> TargetStep:
        """Run T tokens after the kept ones. ``keep`` must be called before the next step."""
        assert self._block is None, "keep() was not called after the last step"
        if self.recurrent and len(tokens) > 1:
            self._saved = {index: _copied(layer) for index, layer in enumerate(self.cache.layers) if not _croppable(layer)}
        self._block = tokens
        if not self.stepwise:
            return self._forward(tokens, logits_to_keep=0)
        steps = [self._forward(token, logits_to_keep=0) for token in tokens.split(1)]
        return TargetStep(torch.cat([step.logits for step in steps]), torch.cat([step.hidden for step in steps]))

    @torch.inference_mode()
    def keep(self, num_tokens: int) -> None:
        """Keep the first tokens of the last step, forget the others."""
        block, saved = self._block, self._saved
        assert block is not None and 1 <= num_tokens <= len(block)
        self._block, self._saved = None, {}
        removed = len(block) - num_tokens
        self.length += num_tokens
        if not removed:
            return
        if not saved:
            self.cache.crop(-removed)
            return
        for index, layer in enumerate(self.cache.layers):
            if index in saved:
                self.cache.layers[index] = saved[index]
            else:
                layer.crop(-len(block))
        kept = block[:num_tokens]
        for part in kept.split(1) if self.stepwise else [kept]:
            self._forward(part, logits_to_keep=1)

    @torch.inference_mode()
    def at_once(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] that T tokens after a prompt are chosen from, in one forward without any kept state."""
        cache = self._new_cache()
        ids = torch.as_tensor([*prompt_ids, *tokens[:-1]], dtype=torch.long, device=self.device)
        return self.forward(ids[None], cache, logits_to_keep=len(tokens)).logits[0]

    def take_taps(self) -> list[torch.Tensor]:
        """What the tapped layers gave in the last forward, [batch, T, H] each, in the drafter's order."""
        taps = [self._taps[i] for i in self.layer_ids]
        self._taps.clear()
        return taps

    def _new_cache(self) -> DynamicCache:
        # without a config the cache keeps every key, also of sliding layers, so that it can be cropped
        return DynamicCache(config=self.model.config) if self.recurrent else DynamicCache()

    def _tap(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._taps[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def forward(self, tokens: torch.Tensor, cache: DynamicCache, **options: Any) -> TargetStep:
        """The model on tokens [R, T] with any cache; logits [R, T, V], hidden [R, T, K*H]. Options go to the model."""
        output = self.model(input_ids=tokens, use_cache=True, **{self.cache_name: cache}, **options)
        hidden = torch.cat(self.take_taps(), dim=-1)
        return TargetStep(output.logits, hidden.to(torch.bfloat16).to(hidden.dtype))

    def _forward(self, ids: torch.Tensor, *, logits_to_keep: int) -> TargetStep:
        step = self.forward(ids[None], self.cache, logits_to_keep=logits_to_keep)
        return TargetStep(step.logits[0], step.hidden[0])

    def _continues_blocks(self) -> bool:
        """Whether a block after a cached prefix gives what single tokens give (older recurrent code starts from zero)."""
        ids = torch.arange(3, 11, device=self.device) % self.model.get_input_embeddings().weight.shape[0]
        rows = []
        for block in (True, False):
            self.stepwise = not block
            self.prefill(ids[:4])
            rows.append(self.step(ids[4:]).hidden.float())
        scale = rows[1].pow(2).mean().sqrt()
        return bool((rows[0] - rows[1]).abs().max() < 0.1 * scale)


def _croppable(layer: Any) -> bool:
    return type(layer) is DynamicLayer


def _copied(layer: Any) -> Any:
    return copy.deepcopy(layer)


def _has_recurrent_state(model: nn.Module) -> bool:
    """Whether the model's own cache has layers that hold more than keys and values."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (KeyError, AttributeError, ValueError) as error:
        raise EvaluateError(
            f"{type(model).__name__}: transformers makes no cache for it ({error}); the draft-and-verify loop needs one"
        ) from None
    return any("LinearAttention" in kind.__name__ for layer in layers for kind in type(layer).__mro__)

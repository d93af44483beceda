"""A loaded target with hooks on the tapped layers.

Tensor legend: B rows, T tokens (padded), N tokens of all rows (packed), K taps, H hidden.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dflash_offline.errors import TargetError
from dflash_offline.target import packed
from dflash_offline.target.facts import text_part
from dflash_offline.target.merged import merge

_HOOKS_FLAG = "_output_capturing_hooks_installed"  # how transformers knows that its hooks are there
_STATE_KINDS = ("linear", "mamba", "conv", "recurrent", "ssm", "delta")
_STATE_MODULES = ("mamba", "linear_attn", "conv", "temporal_block")


@contextlib.contextmanager
def _hooks_taken_back(model: nn.Module) -> Iterator[None]:
    """Remove the hooks that transformers installs, and leaves, to record hidden states.

    Each layer gets hooks of its own, inside attention too; with them every layer would be compiled by itself.
    """
    modules = list(model.modules())
    before = [(set(module._forward_hooks), _HOOKS_FLAG in vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, (hooks, flagged) in zip(modules, before, strict=True):
            for key in [key for key in module._forward_hooks if key not in hooks]:
                del module._forward_hooks[key]
            if not flagged:
                vars(module).pop(_HOOKS_FLAG, None)


class Target:
    """A text decoder that gives the outputs of chosen layers.

    Attributes:
        model: the transformers module (without head and later layers unless it was loaded with ``keep_head``).
        layers: its decoder layers, as far as they were kept.
        layer_ids: the tapped layers, in the order of the K axis.
    """

    def __init__(
        self, model: nn.Module, *, layers: nn.ModuleList, layer_ids: list[int], num_layers: int, device: torch.device, dtype: torch.dtype
    ):
        self.model, self.layers, self.layer_ids = model, layers, list(layer_ids)
        self.num_layers, self.device, self.dtype = num_layers, device, dtype
        self._caught: dict[int, torch.Tensor] | None = None
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(self._catcher(layer_id))

    def _catcher(self, layer_id: int) -> Callable[..., None]:
        def catch(module: nn.Module, args: Any, output: Any) -> None:
            if self._caught is not None:
                self._caught[layer_id] = output[0] if isinstance(output, (tuple, list)) else output

        return catch

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters and buffers."""
        tensors = {tensor.data_ptr(): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    @torch.inference_mode()
    def capture(self, input_ids: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs of the tapped layers, ``[B, T, K, H]`` in the target's dtype.

        Rows are padded on the right, so no mask is needed: every mixer of a decoder, attention or recurrent, looks
        back only, and what follows a row's end is not part of the answer. Rows at or beyond ``lengths`` are undefined.

        Args:
            input_ids: ``[B, T]`` token ids; what pads them may be any id.
            lengths: ``[B]``, only checked against T.
        """
        assert input_ids.dim() == 2
        assert lengths is None or int(lengths.max()) <= input_ids.shape[1]
        return torch.stack(self.taps(input_ids), dim=2)

    @torch.inference_mode()
    def taps(self, input_ids: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
        """The tapped layers' outputs as they leave the layers: K tensors ``[B, T, H]``, without a copy."""
        self._caught = {}
        try:
            self.model(input_ids=input_ids.to(self.device), use_cache=False, **arguments)
            caught = self._caught
        finally:
            self._caught = None
        if missing := [i for i in self.layer_ids if i not in caught]:
            raise TargetError(f"layers {missing} of {type(self.model).__name__} did not run, so nothing could be tapped there")
        return [caught[i] for i in self.layer_ids]

    @torch.inference_mode()
    def packed_taps(self, rows: Sequence[Any]) -> list[torch.Tensor]:
        """The tapped layers' outputs of rows (int arrays) that lie one after another: K tensors ``[1, N, H]``, without a copy.

        Raises:
            NotPackableError: the target's attention wants what packed rows cannot have.
        """
        packed.register()
        arguments = packed.pack(rows, self.device)
        with self._attention(packed.IMPLEMENTATION):
            return self.taps(**arguments)

    def check_packing(self, vocab_size: int) -> float:
        """Compare packed rows with the same rows alone; the largest relative distance over rows and taps (median over tokens).

        Raises:
            NotPackableError: the target's attention wants what packed rows cannot have, or its forward does not take them.
        """
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, vocab_size, (length,), generator=generator) for length in (37, 5, 96, 64)]
        try:
            with packed.windows_seen() as seen:
                together = self.packed_taps(rows)
        except packed.NotPackableError:
            raise
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise packed.NotPackableError(f"its forward does not take packed rows ({type(error).__name__}: {first[:160]})") from error
        packed.check_windows(text_part(self.model.config), seen)
        worst, start = 0.0, 0
        for row in rows:
            for alone, tap in zip(self.taps(row[None]), together, strict=True):
                got, want = tap[0, start : start + len(row)].float(), alone[0].float()
                distance = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-20)
                worst = max(worst, float(distance.median()))
            start += len(row)
        return worst

    @contextlib.contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        """Every module's attention by this name, while the block runs."""
        configs = {id(config): config for module in self.model.modules() if (config := getattr(module, "config", None)) is not None}
        before = [(config, config._attn_implementation) for config in configs.values() if hasattr(config, "_attn_implementation")]
        try:
            for config, _ in before:
                config._attn_implementation = implementation
            yield
        finally:
            for config, name in before:
                config._attn_implementation = name

    @torch.inference_mode()
    def plain_hidden_states(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """transformers' own ``output_hidden_states`` of one row ``[1, T]``: entry i + 1 belongs to layer i."""
        assert input_ids.shape[0] == 1
        with _hooks_taken_back(self.model):
            output = self.model(input_ids=input_ids.to(self.device), use_cache=False, output_hidden_states=True)
        states = getattr(output, "hidden_states", None)
        if states is None:
            raise TargetError(f"{type(self.model).__name__} returns no hidden states, so the taps cannot be checked against them")
        return tuple(states)

    def compile_layers(self, *, dynamic: bool, backend: str = "inductor") -> None:
        """Compile every layer on its own; layers of one kind share a compilation. Projections are merged first (``merged.py``).

        Only ``forward`` is compiled, so that hooks (ours and transformers' own) run outside and cause no recompilation.
        Of a layer that carries a state over tokens only the MLP is compiled: its loop over chunks of the sequence would
        be unrolled, and compiled anew for every length.
        """
        merge(self.layers, lambda: self.taps(torch.zeros(1, 8, dtype=torch.long)))
        kinds = getattr(self.model.config, "layer_types", None) or []
        for i, layer in enumerate(self.layers):
            kind = str(kinds[i]) if i < len(kinds) else ""
            has_state = any(word in kind for word in _STATE_KINDS) or any(hasattr(layer, name) for name in _STATE_MODULES)
            part = getattr(layer, "mlp", None) if has_state else layer
            if part is not None:
                part.forward = torch.compile(part.forward, dynamic=dynamic, backend=backend)

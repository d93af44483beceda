"""One conversation of a store. What lies in it is read when it is asked for.

T tokens of it, K taps, k selected taps, t selected tokens, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dflash_offline.errors import StoreError

if TYPE_CHECKING:
    import torch

    from dflash_offline.store.reader import HiddenStateStore


@dataclass(frozen=True)
class StoredSample:
    """One conversation of the store. ``hidden_states`` reads when called."""

    store: "HiddenStateStore"
    number: int  # in the store
    part: str
    index: int  # in the part
    sample_id: int  # row in the corpus it was captured from
    sha256: bytes
    bucket: int
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        trained = int(np.count_nonzero(self.loss_mask))
        return f"<sample {self.number}, {self.part}: {len(self)} tokens, {trained} trained on, layers {self.store.layer_ids}>"

    def hidden_states(self, layers: Sequence[int] | None = None, tokens: slice = slice(None)) -> "torch.Tensor":
        """bf16 ``[t, k, H]``; only the chunks that hold them are read.

        Args:
            layers: positions along K (``store.positions(layer_ids)`` finds them); None = all.
            tokens: a slice without step.
        """
        return self.store.read_tokens(self.number, *self._range(tokens), layers)

    def hidden_states_numpy(self, layers: Sequence[int] | None = None, tokens: slice = slice(None)) -> np.ndarray:
        """``hidden_states`` as float32, the same numbers; does not import torch, which takes longer than reading a few samples."""
        return self.store.read_tokens_numpy(self.number, *self._range(tokens), layers)

    def _range(self, tokens: slice) -> tuple[int, int]:
        if not isinstance(tokens, slice):
            raise StoreError(f"tokens = {tokens!r}: give a slice, as sample[10:20] or tokens=slice(10, 20)")
        start, stop, step = tokens.indices(len(self))
        if step != 1:
            raise StoreError(f"tokens = {tokens}: a step is not supported; slice the result instead")
        return start, max(start, stop)

    def __getitem__(self, tokens: slice) -> "torch.Tensor":
        """``sample[a:b]`` is ``sample.hidden_states(tokens=slice(a, b))``."""
        return self.hidden_states(tokens=tokens)

"""What is looked at in the values of a sample before they are encoded: finite, not all zero, their norms.

T tokens, K taps, H hidden size. ``rms`` is float32 ``[T, K]``, the root mean square of each token's vector.
"""

from typing import Any

import numpy as np
import torch

from dflash_offline.errors import StoreError


def token_rms(hidden: torch.Tensor) -> torch.Tensor:
    """Root mean square of each vector of ``hidden`` [T, K, H], float32 ``[T, K]``, on its device."""
    return torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32) * hidden.shape[-1] ** -0.5


def check_values(sample_id: int, rms: np.ndarray) -> None:
    if not np.isfinite(rms).all():
        token, tap = np.argwhere(~np.isfinite(rms))[0]
        raise StoreError(
            f"sample {sample_id}: hidden states are not finite at token {token}, captured layer number {tap}; the sample was not stored. "
            "Check the target's dtype and attention implementation"
        )
    if zero := [tap for tap in range(rms.shape[1]) if not rms[:, tap].any()]:
        raise StoreError(f"sample {sample_id}: hidden states are all zero at captured layer number {zero[0]}; it was not stored")


class Norms:
    """Smallest, mean and largest RMS of a token's vector, per tap; survives a resume through the journal."""

    def __init__(self, num_taps: int, state: dict[str, Any]):
        self.low = np.array(state.get("min", [np.inf] * num_taps))
        self.high = np.array(state.get("max", [0.0] * num_taps))
        self.total = np.array(state.get("sum", [0.0] * num_taps))

    def add(self, rms: np.ndarray) -> None:
        self.low, self.high = np.minimum(self.low, rms.min(0)), np.maximum(self.high, rms.max(0))
        self.total = self.total + rms.sum(0, dtype=np.float64)

    def state(self) -> dict[str, Any]:
        return {"min": self.low.tolist(), "max": self.high.tolist(), "sum": self.total.tolist()}

    def summary(self, tokens: int) -> dict[str, Any]:
        return {"min": self.low.tolist(), "mean": (self.total / tokens).tolist(), "max": self.high.tolist()}

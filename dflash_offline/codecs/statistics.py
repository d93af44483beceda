"""Per-channel scales that int codecs need: measured once on fixed rows, before any part is written.

T tokens, K taps, H hidden size.

Residual streams hold a few channels with hundreds of times the energy of the others, and first tokens hundreds of times the
norm of later ones. So the mean square of a channel is taken over vectors that are first brought to RMS 1: every
token counts alike, or the first one would set the scale for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors
import safetensors.numpy
import xxhash

from dflash_offline.errors import StoreDamagedError, StoreError
from dflash_offline.manifest import write_bytes

if TYPE_CHECKING:
    import torch

# of the median channel: one that was quiet on these rows must not, once it speaks, take the scale from its whole block
# (real residual streams have none below 0.6 of the median, so it costs nothing)
_FLOOR = 0.5


@dataclass(frozen=True)
class ChannelStatistics:
    """``rms`` float32 ``[K, H]``: root mean square of each channel of unit-RMS vectors. All replicas use the same."""

    rms: np.ndarray
    num_tokens: int

    @classmethod
    def from_rows(cls, rows: Iterable[torch.Tensor]) -> ChannelStatistics:
        """Measure on hidden states bf16 ``[T, K, H]`` of some samples; a few thousand tokens are enough.

        Sums in float64 on the rows' device; replicas share one result rather than measure each (``save``, ``load``).

        Raises:
            StoreError: there is no row, or a value is not finite.
        """
        import torch

        total: torch.Tensor | None = None
        num_tokens = 0
        for hidden in rows:
            values = hidden.double()
            unit = values.square() / values.square().mean(-1, keepdim=True).clamp(min=1e-30)
            total = unit.sum(0) if total is None else total + unit.sum(0)
            num_tokens += len(hidden)
        if total is None or num_tokens == 0:
            raise StoreError("channel statistics need at least one row; the plan's list of rows is empty")
        if not torch.isfinite(total).all():
            raise StoreError("channel statistics: hidden states are not finite; check the target's dtype and attention implementation")
        rms = (total / num_tokens).sqrt()
        rms = torch.maximum(rms, rms.median(-1, keepdim=True).values * _FLOOR).clamp(min=1e-30)
        return cls(rms.to(torch.float32).cpu().numpy(), num_tokens)

    @property
    def digest(self) -> str:
        """xxh3-128 of shape and values; parts of one store must agree on it."""
        return xxhash.xxh3_128(repr(self.rms.shape).encode() + np.ascontiguousarray(self.rms, "<f4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole and durable."""
        metadata = {"digest": self.digest, "num_tokens": str(self.num_tokens)}
        write_bytes(Path(path), safetensors.numpy.save({"rms": np.ascontiguousarray(self.rms)}, metadata))

    @classmethod
    def load(cls, path: Path) -> ChannelStatistics:
        """Read what ``save`` wrote.

        Raises:
            StoreDamagedError: it is not, or does not fit its digest.
        """
        try:
            with safetensors.safe_open(path, "np") as file:
                metadata, found = file.metadata() or {}, file.get_tensor("rms")
        except FileNotFoundError:
            raise StoreDamagedError(f"{path}: missing; the channel statistics of this store are needed to add to it") from None
        except safetensors.SafetensorError as error:
            raise StoreDamagedError(f"{path}: no channel statistics can be read from it ({error})") from None
        result = cls(found, int(metadata.get("num_tokens", 0)))
        if metadata.get("digest") != result.digest:
            raise StoreDamagedError(f"{path}: channel statistics do not fit their digest; restore the file, or capture into another root")
        return result

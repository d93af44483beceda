"""Encoded rows on their way from the files to the device that decodes them.

T tokens of a sample, k selected taps, H hidden size, W values per token and tap of one encoded array.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from dflash_offline.codecs import Codec


@dataclass
class EncodedBatch:
    """Encoded rows of some samples, one after another, as they lie on disk."""

    codec: Codec
    taps: tuple[int, ...]  # positions along K
    arrays: dict[str, torch.Tensor]  # name -> [k, sum T, W], pinned where CUDA is used
    offsets: np.ndarray  # int64 [n + 1], edges of the samples along sum T
    input_ids: np.ndarray  # int32 [sum T]
    loss_mask: np.ndarray  # uint8 [sum T]
    num_bytes: int  # read from files

    def to(self, device: torch.device | str) -> "EncodedBatch":
        """The same with its codes on ``device``."""
        return replace(self, arrays={name: array.to(device, non_blocking=True) for name, array in self.arrays.items()})

    def decode(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """bf16 ``[sum T, k * H]`` on ``device``: the codes are copied there and decoded there."""
        return self.codec.decode(self.to(device).arrays, self.taps).flatten(1)

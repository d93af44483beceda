"""Attention paths by name."""

from typing import Any, Protocol

from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout
from dflash_offline.attention.dense import EagerAttention, SdpaAttention
from dflash_offline.errors import TrainError


class Attention(Protocol):
    """One way to compute block attention."""

    name: str
    compiled: bool  # made to run inside compiled layers

    def plan(self, blocks: BlockLayout, window: int | None) -> Any:
        """What ``attend`` needs to know about the blocks; made once per micro-batch and shared by the layers."""

    def attend(
        self, query: Tensor, context_key: Tensor, context_value: Tensor, block_key: Tensor, block_value: Tensor, plan: Any
    ) -> Tensor:
        """query [S, A, D], context_* [C, G, D], block_* [S, G, D] -> [S, A, D]."""


def make_attention(name: str) -> Attention:
    """The attention path called ``name``.

    Raises:
        TrainError: no such path.
    """
    match name:
        case "eager":
            return EagerAttention()
        case "sdpa":
            return SdpaAttention()
        case "flex":
            from dflash_offline.attention.flex import FlexAttention  # its import takes seconds, and a CPU does without

            return FlexAttention()
        case "triton":
            from dflash_offline.attention.intervals import IntervalAttention

            return IntervalAttention()
    raise TrainError(f"attention = {name!r} is not known; known are eager, sdpa, flex, triton")

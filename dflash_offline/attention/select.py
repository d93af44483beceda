"""Attention paths by name."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout
from dflash_offline.attention.dense import EagerAttention, SdpaAttention
from dflash_offline.config.train import why_not
from dflash_offline.errors import TrainError

LARGEST_HEAD = 128  # of the triton path
SHARED_BYTES = 200 << 10  # of shared memory its tiles take: Hopper and newer have 227 KiB


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

    def context_sized(self, plan: Any) -> Sequence[Tensor] | None:
        """For ``compiled`` paths: tensors of a plan whose first axis follows from C, where one graph of a layer serves every C.

        No other part of such a plan may follow from C: PyTorch takes the numbers in it, and all its other sizes, as
        constants of the graph. None: C itself has to be a constant.
        """


def choose_attention(name: str, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> str:
    """Resolve ``"auto"`` to the fastest exact path of the device; any other name is taken as it is, where the device can train with it.

    A Hopper or newer GPU gets ``triton`` (bf16 or fp16, heads up to 128 wide), another ``flex``; a CPU gets ``sdpa``. What is chosen is
    still to be proved (``proof.prove``): a failure there is an error, never a slower path in silence.

    Raises:
        TrainError: the path needs a GPU, or a newer one.
    """
    if name != "auto":
        if reason := why_not("attention", name, torch.cuda.get_device_capability(device) if device.type == "cuda" else None):
            raise TrainError(f"[train] {reason}")
        return name
    if device.type != "cuda":
        return "sdpa"
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    suits = dtype in (torch.bfloat16, torch.float16) and head_dim <= LARGEST_HEAD and shared_bytes >= SHARED_BYTES
    return "triton" if suits else "flex"


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

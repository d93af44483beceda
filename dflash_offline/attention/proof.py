"""Proof, before training, that the attention path computes the rule, and that it does not run dense in silence.

A block-sparse kernel that fell back to a dense one gives right numbers at a third of the speed; a wrong mask gives full
speed and a drafter that accepts nothing. Both cost others weeks, so both are checked at every start, in seconds.

Legend: N blocks, B slots of a block, C context rows, A query heads, G key/value heads, D head width.
"""

import os
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_offline.attention.blocks import BlockLayout
from dflash_offline.attention.dense import EagerAttention
from dflash_offline.attention.select import Attention
from dflash_offline.errors import TrainError

# ||difference|| / ||reference||, the reference in float32 on the same (rounded) inputs
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}  # float32: tf32 products on GPUs
SLOWEST_SHARE_OF_DENSE = 1.0  # of the time a dense product over all keys would take at a third of the matrix rate
NAMES = ("output", "query", "context key", "context value", "block key", "block value")


@dataclass(frozen=True)
class Proof:
    """What was measured. ``attention_s`` and ``dense_s`` are 0 on a CPU, where speed is not judged."""

    path: str
    errors: dict[str, float]  # relative, of the output and of each gradient; the worst over the windows
    attention_s: float  # forward and backward, one layer, real shapes
    dense_s: float  # what dense attention would take at the most

    def __str__(self) -> str:
        speed = f", {self.attention_s * 1e3:.2f} ms a layer against {self.dense_s * 1e3:.1f} ms dense" if self.dense_s else ""
        return f"attention {self.path}: within {max(self.errors.values()):.1e} of the dense reference{speed}"


def refuse_switches(attention: Attention, device: torch.device) -> None:
    """
    Raises:
        TrainError: a debugging switch is on: the one that hides a compilation race and makes attention several times slower,
            or, where compiled layers are wanted on a GPU, one that turns compilation off.
    """
    switch = "force_compile" + "_during_fx_trace"  # spelt in two parts: the tests look for any place that sets it
    if getattr(torch._dynamo.config, switch, False):
        raise TrainError(f"torch._dynamo.config.{switch} is on: attention would run several times slower without a word; leave it off")
    off = torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    if off and attention.compiled and device.type == "cuda":
        raise TrainError(
            f'attention "{attention.name}": compilation is turned off, so every step would run slowly; unset TORCH_COMPILE_DISABLE and '
            'TORCHDYNAMO_DISABLE, or ask for attention = "eager" by name'
        )


def prove(
    attention: Attention,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    windows: set[int | None],
    dtype: torch.dtype,
    device: torch.device,
    num_context: int | None = None,
    num_blocks: int | None = None,
) -> Proof:
    """Check ``attention`` on a small case of its real head geometry, and time it at ``num_context`` and ``num_blocks``.

    Raises:
        TrainError: wrong numbers, an unsuitable switch, or a speed that only a dense or uncompiled path has.
    """
    refuse_switches(attention, device)
    worst: dict[str, float] = {}
    blocks = small_case(block_size).to(device)
    states = random_states(blocks, heads, kv_heads, head_dim, dtype, device)
    upstream = torch.randn(states[0].shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if attention.name == "triton" and device.type == "cuda":
        attention.compile_kernels(states, blocks, windows)
    for window in windows:
        found = outcome(attention, blocks, window, states, upstream)
        wanted = outcome(EagerAttention(), blocks, window, [state.float() for state in states], upstream.float())
        for name, got, right in zip(NAMES, found, wanted, strict=True):
            error = ((got.float() - right).norm() / right.norm().clamp(min=1e-20)).item()
            worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))
    bad = {name: error for name, error in worst.items() if error > TOLERANCE[dtype]}
    if bad:
        listed = ", ".join(f"{name} {error:.1e}" for name, error in bad.items())
        others = " or ".join(f'"{name}"' for name in ("flex", "sdpa") if name != attention.name)
        raise TrainError(
            f"attention {attention.name!r} differs from the dense reference (relative error: {listed}; allowed {TOLERANCE[dtype]:.0e}); "
            f"set [train] attention = {others} and report this with the versions of torch and triton"
        )
    if device.type != "cuda" or num_context is None or num_blocks is None:
        return Proof(attention.name, worst, 0.0, 0.0)
    anchors = np.linspace(0, num_context - 1, num_blocks, dtype=np.int64) if num_blocks <= num_context else np.arange(num_context)
    blocks = BlockLayout.pack([num_context], [np.unique(anchors)], block_size=block_size, num_blocks=num_blocks).to(device)
    states = random_states(blocks, heads, kv_heads, head_dim, dtype, device)
    attention_s = timed(attention, blocks, states)
    slots = num_blocks * block_size
    products = 3.5 * 4 * slots * (num_context + slots) * heads * head_dim
    dense_s = 3 * products / matrix_rate(dtype, device) + 2e-3
    if attention_s > SLOWEST_SHARE_OF_DENSE * dense_s:
        raise TrainError(
            f"attention {attention.name!r} takes {attention_s * 1e3:.1f} ms a layer, more than dense attention would "
            f'({dense_s * 1e3:.1f} ms): a compiled block-sparse kernel is not what runs; [train] attention = "eager" would allow that'
        )
    return Proof(attention.name, worst, attention_s, dense_s)


def small_case(block_size: int) -> BlockLayout:
    """Two sequences of several tiles, anchors at the first and the last rows, neighbours, and padding."""
    first = np.unique(np.concatenate([[0, 1, 2], np.arange(9, 300, 13), [298, 299]]))
    second = np.unique(np.concatenate([np.arange(3, 150, 31), [148]]))
    live = len(first) + len(second)
    return BlockLayout.pack([300, 149], [first, second], block_size=block_size, num_context=512, num_blocks=-(-(live + 3) // 8) * 8)


def random_states(blocks: BlockLayout, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Query, context key and value, block key and value."""
    generator, slots = torch.Generator(device).manual_seed(0), blocks.num_blocks * blocks.block_size
    shapes = [(slots, heads), (blocks.num_context, kv_heads), (blocks.num_context, kv_heads), (slots, kv_heads), (slots, kv_heads)]
    return [torch.randn(*shape, head_dim, generator=generator, device=device).to(dtype) for shape in shapes]


def outcome(attention: Attention, blocks: BlockLayout, window: int | None, states: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and the gradients of the five inputs."""
    leaves = [state.clone().requires_grad_() for state in states]
    attended = attention.attend(*leaves, attention.plan(blocks, window))
    return [attended.detach(), *torch.autograd.grad(attended, leaves, upstream)]


def timed(attention: Attention, blocks: BlockLayout, states: list[Tensor], *, repeats: int = 5) -> float:
    """Seconds of a forward and backward pass on a GPU, after warm-up: the least of several, for other processes may share the host."""
    plan, upstream = attention.plan(blocks, None), torch.randn_like(states[0])
    leaves, seconds = [state.clone().requires_grad_() for state in states], []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.autograd.grad(attention.attend(*leaves, plan), leaves, upstream)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[2:])


def matrix_rate(dtype: torch.dtype, device: torch.device, *, size: int = 4096) -> float:
    """Floating-point operations a second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)

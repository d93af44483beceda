"""Proof, at start, that the compiled block-sparse attention is what runs inside the drafter, and that it is right.

``attention.prove`` checks a path by itself: output and gradients, and its time against a dense product's. A path that
is right by itself may still be left out of the compiled layers, which then train the same drafter several times slower
and say nothing. So, on a GPU:

1. layers were compiled, whole (a graph break is an error already);
2. the profiler saw the attention kernels of the chosen path, in forward and backward passes;
3. a few blocks' outputs agree with a dense drafter's, computed uncompiled from the same weights.

``attention = "eager"`` and ``"sdpa"`` were asked for by name, and only the third point is checked.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dflash_offline import attention
from dflash_offline.attention import BlockLayout
from dflash_offline.dataset import BatchShape, DeviceBatch
from dflash_offline.drafter import Drafter
from dflash_offline.errors import TrainError
from dflash_offline.graphs import compiled_graphs

if TYPE_CHECKING:
    from dflash_offline.train.loop import Trainer
    from dflash_offline.train.setup import Setup

# parts of the names of the GPU kernels of each path: forward, backward
KERNELS = {"flex": ("flex_attention", "flex_attention_backward"), "triton": ("forward_kernel", "context_gradient_kernel")}
REFERENCE_BLOCKS = 4
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-3}  # relative, after all layers


def prove_attention(setup: "Setup", shape: BatchShape) -> attention.Proof:
    """``attention.prove`` with the drafter's head geometry, timed at the size of ``shape``."""
    drafter = setup.drafter
    judged = drafter.attention.name in KERNELS  # a dense path that was asked for by name may be as slow as it is
    return attention.prove(
        drafter.attention,
        heads=setup.shape.num_attention_heads,
        kv_heads=setup.shape.num_key_value_heads,
        head_dim=setup.shape.head_dim,
        block_size=setup.shape.block_size,
        windows=set(setup.shape.layer_windows),
        dtype=setup.dtype,
        device=setup.device,
        num_context=shape.context if judged else None,
        num_blocks=shape.blocks if judged else None,
    )


def prove(trainer: "Trainer") -> str:
    """Check the three points on the smallest shape, which is compiled already; returns a line to print.

    Raises:
        TrainError: naming what runs in place of the wanted kernels.
    """

    setup = trainer.setup
    path = setup.drafter.attention.name
    shape = min(trainer.order.shapes.values(), key=lambda each: each.context * each.blocks)
    batch = setup.made_up(shape)
    if path in KERNELS:
        if compiled_graphs() == 0:
            raise TrainError(
                f'attention "{path}": nothing was compiled, so every step would run slowly; report this, or ask for '
                'attention = "eager" by name'
            )
        ran = _kernels_of_a_pass(trainer, batch)
        for part in KERNELS[path]:
            if not any(part in name for name in ran):
                shown = ", ".join(sorted(ran, key=lambda name: -ran[name])[:3])
                raise TrainError(
                    f'attention "{path}": no kernel named *{part}* ran on {setup.machine["device"]}; most time went to {shown}. '
                    'Attention fell back to something slower; report this, or ask for attention = "eager" by name'
                )
    difference = _difference_from_dense(trainer, batch)
    limit = TOLERANCE[setup.dtype]
    if not difference < limit:
        raise TrainError(
            f'attention "{path}": outputs differ from the dense reference by {difference:.3g} of their size (allowed: {limit}); '
            'training with it would be wrong. Update PyTorch, or ask for attention = "eager" by name'
        )
    return f'attention "{path}" checked against the dense reference in {shape}: differs by {difference:.1e}'


def _kernels_of_a_pass(trainer: "Trainer", batch: DeviceBatch) -> dict[str, float]:
    """Kernel name -> microseconds of one forward and backward pass."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        trainer.losses(batch).loss_sum.backward()
        torch.cuda.synchronize()
    trainer.setup.weights.gradient.zero_()
    return {event.key: event.device_time_total for event in recorded.key_averages()}


@torch.no_grad()
def _difference_from_dense(trainer: "Trainer", batch: DeviceBatch) -> float:
    """Largest relative difference of a few blocks' outputs, one norm a block, between the path and the dense reference.

    A block depends on its own context and slots only, so the reference is computed for these blocks alone.
    """
    setup, blocks = trainer.setup, batch.blocks
    anchors = setup.embedding[torch.arange(blocks.num_blocks, device=setup.device) % setup.shape.vocab_size]
    ours = trainer.drafted(batch, anchors)
    chosen = torch.linspace(0, blocks.num_live - 1, min(REFERENCE_BLOCKS, blocks.num_live), device=setup.device).long().unique()
    with torch.device(setup.device):
        reference = Drafter(setup.shape, attention="eager")
    reference.load_state_dict(dict(setup.drafter.named_parameters()), strict=True, assign=True)
    few: BlockLayout = replace(blocks, num_live=len(chosen), **{name: _only(blocks, name, chosen) for name in _PER_BLOCK})
    theirs = reference(batch.hidden_states, anchors[chosen], few, mask_embedding=trainer.mask_embedding, trained_slots_only=True)
    ours, theirs = ours[chosen].float().flatten(1), theirs.float().flatten(1)
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


_PER_BLOCK = ("context_start", "context_end", "sequence_end", "anchor_positions")


def _only(blocks: BlockLayout, name: str, chosen: Tensor) -> Tensor:
    values: Tensor = getattr(blocks, name)
    return values[chosen]

"""The work that a training step is timed on: shapes, tensors, micro-batches, and the operations it is credited with.

Legend: C packed context rows, K tapped layers, H hidden size, N blocks, B slots of a block, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import DrafterShape
from dflash_offline.objective import block_labels, draw_anchors


def shape_of(hidden: int, layers: int, heads: int, kv_heads: int, width: int, mlp: int, vocabulary: int, taps: tuple[int, ...], block: int):
    """A drafter's shape for a target of these sizes."""
    return DrafterShape(
        hidden_size=hidden, num_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width,
        intermediate_size=mlp, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, vocab_size=vocabulary,
        block_size=block, mask_token_id=vocabulary - 1, target_layer_ids=taps, num_target_layers=max(taps) + 3,
        max_position_embeddings=40960, layer_windows=(None,) * layers,
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What one step trains on: ``lengths`` rows packed into one micro-batch, ``anchors`` blocks in all."""

    name: str
    shape: DrafterShape
    lengths: tuple[int, ...]
    anchors: int


QWEN3_8B = shape_of(4096, 5, 32, 8, 128, 12288, 151936, (1, 9, 17, 25, 33), 16)
WORKS = [
    Work("qwen3-8b", QWEN3_8B, (3072,), 512),
    Work("qwen3-8b-packed", QWEN3_8B, (1408, 832, 512, 320), 512),
    Work("qwen3.6-27b", shape_of(5120, 5, 32, 8, 128, 17408, 248320, (1, 16, 31, 46, 61), 16), (3072,), 512),
    Work("smollm2-135m", shape_of(576, 5, 9, 3, 64, 1536, 49152, (1, 8, 14, 20, 27), 16), (512,) * 32, 96 * 32),
]
TINY = Work("tiny", shape_of(64, 3, 4, 2, 16, 96, 512, (1, 2), 4), (60, 36), 12)


@dataclass
class Tensors:
    """The inputs that every implementation gets."""

    input_ids: Tensor  # [C]
    loss_mask: np.ndarray  # [C]
    hidden: Tensor  # [C, K * H]
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]


def make_tensors(work: Work, device: str, dtype: torch.dtype) -> Tensors:
    """Random tokens and hidden states; the first eighth of each row is its prompt."""
    shape, total = work.shape, sum(work.lengths)
    generator = torch.Generator(device).manual_seed(0)
    mask = np.concatenate([np.r_[np.zeros(length // 8), np.ones(length - length // 8)] for length in work.lengths])
    hidden = torch.randn(total, len(shape.target_layer_ids) * shape.hidden_size, device=device, dtype=dtype, generator=generator)
    tables = [
        torch.empty(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator) for _ in range(2)
    ]
    ids = torch.randint(0, shape.vocab_size - 2, (total,), device=device, generator=generator)
    return Tensors(ids, mask.astype(np.uint8), hidden, *tables)


@dataclass
class Batch:
    """Blocks and labels on the host, as the reader hands them over."""

    blocks: BlockLayout
    labels: Tensor
    supervised: Tensor


def make_batches(work: Work, tensors: Tensors, count: int) -> list[Batch]:
    """Micro-batches with anchors of their own, made beforehand: in training they come from reader threads."""
    ids, size, batches = tensors.input_ids.cpu().numpy(), work.shape.block_size, []
    shares = [work.anchors * length // sum(work.lengths) for length in work.lengths]
    for epoch in range(count):
        anchors, labels, supervised, start = [], [], [], 0
        for row, (length, share) in enumerate(zip(work.lengths, shares, strict=True)):
            mask = tensors.loss_mask[start : start + length]
            anchors.append(draw_anchors(mask, share, 0, epoch, row))
            found = block_labels(ids[start : start + length], mask, anchors[-1], size)
            labels.append(found[0])
            supervised.append(found[1])
            start += length
        blocks = BlockLayout.pack(work.lengths, anchors, block_size=size, num_blocks=work.anchors)
        padding = ((0, work.anchors - blocks.num_live), (0, 0))
        arrays = [torch.from_numpy(np.pad(np.concatenate(parts), padding)) for parts in (labels, supervised)]
        if tensors.hidden.is_cuda:  # as the reader hands them over, so that the host never waits for the GPU
            blocks, arrays = blocks.pin(), [array.pin_memory() for array in arrays]
        batches.append(Batch(blocks, *arrays))
    return batches


def step_flops(work: Work) -> float:
    """Floating-point operations a straightforward step needs: what every implementation is credited with.

    6 a weight and slot for projections and MLP, 4 for ``fc`` (no input gradient), 6 for the context's keys and values,
    4 for the frozen head over slots 1 .. B - 1, and 3.5 times the forward products of attention over half the context.
    Work that is saved (one mask row in the first layer, no slot 0 in the last) is credited all the same.
    """
    shape, tokens = work.shape, sum(work.lengths)
    width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layer = 2 * shape.hidden_size * (width + kv_width) + 3 * shape.hidden_size * shape.intermediate_size
    slots, size = work.anchors * shape.block_size, shape.block_size
    visible = sum(length * length for length in work.lengths) / tokens / 2 + size
    return (
        6 * layer * slots * shape.num_layers
        + 4 * len(shape.target_layer_ids) * shape.hidden_size**2 * tokens
        + 12 * shape.hidden_size * kv_width * tokens * shape.num_layers
        + 4 * work.anchors * (size - 1) * shape.hidden_size * shape.vocab_size
        + 3.5 * 4 * slots * visible * width * shape.num_layers
    )

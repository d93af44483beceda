"""What the drafter is trained for, and how well it does.

========================  =======================================================================================
``anchors.py``            which positions of a sequence blocks are anchored at
``labels.py``             the token each slot must predict and what it weighs; runs of correct slots
``head.py``               the target's frozen head, in bf16 or fp8
``loss.py``               cross-entropy (and KL) over the vocabulary in chunks; logits never exist whole
``softmax.py``            softmax statistics and gradient over the logits, in PyTorch
``kernels.py``            the same as Triton kernels
========================  =======================================================================================
"""

from dflash_offline.objective.anchors import anchor_candidates, draw_anchors
from dflash_offline.objective.head import FrozenHead
from dflash_offline.objective.labels import block_labels, decay, dpace_weights, streaks
from dflash_offline.objective.loss import LossOutput, Objective, block_loss

__all__ = [
    "FrozenHead",
    "LossOutput",
    "Objective",
    "anchor_candidates",
    "block_labels",
    "block_loss",
    "decay",
    "dpace_weights",
    "draw_anchors",
    "streaks",
]

"""Is the loop's output the target's own greedy output?

Speculative decoding is lossless in exact arithmetic. In floating point a block and a single token take other paths
through the kernels, so where the target's two best tokens are nearly tied either may come out. Such a first difference
is a near-tie: counted and shown. Any other difference is a fault.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_offline.evaluate.decoder import Response


@dataclass(frozen=True)
class Comparison:
    """Outcome for one response.

    Attributes:
        outcome: ``identical``, ``near_tie`` (at the first difference) or ``different``.
        index: token of the first difference, None when identical.
        gap: target's best logit minus that of the token the loop emitted there; inf when not among its best.
        tolerance: the largest gap that counts as a tie there.
    """

    outcome: Literal["identical", "near_tie", "different"]
    index: int | None = None
    gap: float = 0.0
    tolerance: float = 0.0


def tie_tolerance(size: float, dtype: torch.dtype) -> float:
    """Largest gap between two logits of about ``size`` that rounding explains: 1e-4 of it in float32, two steps in bfloat16."""
    if dtype == torch.bfloat16:
        return 2 * 2.0 ** (math.floor(math.log2(max(abs(size), 1e-30))) - 7)
    return 1e-4 * abs(size)


def compare(loop: Response, plain: Response, *, dtype: torch.dtype) -> Comparison:
    """Compare the loop's response with the plain one of the same prompt.

    Args:
        plain: from ``Decoder.generate_plain``, which remembers its best logits.
        dtype: precision the target computed in.
    """
    for index, (ours, reference) in enumerate(zip(loop.tokens, plain.tokens, strict=False)):
        if ours != reference:
            best = plain.best[index]
            size = max(abs(value) for value in best.values())
            gap = best[reference] - best.get(ours, -math.inf)
            tolerance = tie_tolerance(size, dtype)
            return Comparison("near_tie" if gap <= tolerance else "different", index, gap, tolerance)
    if len(loop.tokens) != len(plain.tokens):
        return Comparison("different", min(len(loop.tokens), len(plain.tokens)), math.inf)
    return Comparison("identical")

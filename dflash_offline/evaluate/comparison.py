"""Is the loop's output the target's own greedy output?

Speculative decoding is lossless in exact arithmetic. In floating point a block and a single token take other paths
through the kernels, so where the target's two best tokens are nearly tied either may come out. Such a first difference
is a near-tie: counted and shown. Any other difference is a fault.

What counts as nearly tied: in float32 a gap of 1e-4 of the logits' size. In bfloat16 two steps of it; but the hidden
state that the head multiplies is rounded too, at every layer, so gaps can move by more than the logits' own steps. Where
two steps do not explain a difference, the noise is measured: the target's own text runs through it once more, all
tokens at once, with no loop, drafter or kept state involved. As far as that moves a gap between two of the best tokens
anywhere in the text, a gap is noise; but never more than ``MOST_STEPS`` steps, for what moves further is broken.

Shapes: T tokens of a response, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_offline.evaluate.decoder import Response

STEPS = 2  # of bfloat16, that are a tie without more ado
MOST_STEPS = 16


@dataclass(frozen=True)
class Comparison:
    """Outcome for one response.

    Attributes:
        outcome: ``identical``, ``near_tie`` (at the first difference) or ``different``.
        index: token of the first difference, None when identical.
        gap: target's best logit minus that of the token the loop emitted there; inf when not among its best.
        tolerance: the largest gap that counts as a tie there.
        measured: whether the tolerance is measured noise.
    """

    outcome: Literal["identical", "near_tie", "different"]
    index: int | None = None
    gap: float = 0.0
    tolerance: float = 0.0
    measured: bool = False


def bfloat16_step(size: float) -> float:
    """Distance between neighbouring bfloat16 numbers of about ``size``."""
    return 2.0 ** (math.floor(math.log2(max(abs(size), 1e-30))) - 7)


def tie_tolerance(size: float, dtype: torch.dtype) -> float:
    """Largest gap between two logits of about ``size`` that rounding explains: 1e-4 of it in float32, two steps in bfloat16."""
    return STEPS * bfloat16_step(size) if dtype == torch.bfloat16 else 1e-4 * abs(size)


def measured_noise(plain: Response, at_once: torch.Tensor) -> float:
    """The furthest that any gap between two of a token's best logits moved, over all tokens of a response.

    Args:
        plain: from the target alone, token by token.
        at_once: [T, V] logits of the same text in one forward; row i is what token i was chosen from.
    """
    furthest = 0.0
    for best, row in zip(plain.best, at_once.float(), strict=True):
        ids = list(best)
        moved = row[ids] - torch.tensor([best[token] for token in ids], device=row.device)
        furthest = max(furthest, float(moved.max() - moved.min()))
    return furthest


def compare(loop: Response, plain: Response, *, dtype: torch.dtype, at_once: Callable[[], torch.Tensor] | None = None) -> Comparison:
    """Compare the loop's response with the plain one of the same prompt.

    Args:
        plain: from ``Decoder.generate_plain``, which remembers its best logits.
        dtype: precision the target computed in.
        at_once: gives the logits for ``measured_noise``; asked only where two steps of bfloat16 do not do.
    """
    for index, (ours, reference) in enumerate(zip(loop.tokens, plain.tokens, strict=False)):
        if ours != reference:
            best = plain.best[index]
            size = max(abs(value) for value in best.values())
            gap, tolerance = best[reference] - best.get(ours, -math.inf), tie_tolerance(size, dtype)
            if gap <= tolerance or dtype != torch.bfloat16 or at_once is None:
                return Comparison("near_tie" if gap <= tolerance else "different", index, gap, tolerance)
            logits = at_once()
            if math.isinf(gap):
                gap = float(logits[index, reference] - logits[index, ours])
            tolerance = min(max(tolerance, measured_noise(plain, logits)), MOST_STEPS * bfloat16_step(size))
            return Comparison("near_tie" if gap <= tolerance else "different", index, gap, tolerance, measured=True)
    if len(loop.tokens) != len(plain.tokens):
        return Comparison("different", min(len(loop.tokens), len(plain.tokens)), math.inf)
    return Comparison("identical")

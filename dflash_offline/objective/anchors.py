"""Which positions of a sequence blocks are anchored at.

A position p is a candidate when tokens p and p + 1 are both supervised: the block has at least one slot to train, and
the token at p is one the target wrote, as at inference. A block may be cut by the end of its sequence; leaving such
anchors out would never train the end of an answer.

Legend: T tokens of one sequence.
"""

import numpy as np

EVALUATION_EPOCH = -1  # the epoch of the fixed anchors of the held-out rows


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Candidate positions, ascending. loss_mask [T] of 0 and 1."""
    supervised = np.asarray(loss_mask) != 0
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_anchors(loss_mask: np.ndarray, num: int, seed: int, epoch: int, sample_id: int | bytes) -> np.ndarray:
    """Up to ``num`` candidates, uniform without replacement, ascending (int64).

    They depend on ``(seed, epoch, sample_id)`` alone, so that a run can be replayed and resumed anywhere, on any number
    of ranks. ``sample_id``: any number or bytes that name the sequence. ``epoch = EVALUATION_EPOCH`` is for
    evaluation: the same anchors every time.
    """
    candidates = anchor_candidates(loss_mask)
    if len(candidates) <= num:
        return candidates
    name = int.from_bytes(sample_id, "little") if isinstance(sample_id, bytes) else sample_id
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch + 1, name])))
    return np.sort(generator.choice(candidates, num, replace=False, shuffle=False))

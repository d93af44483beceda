"""``tau_replay``: what the draft-and-verify loop would accept on text that is already written.

A conversation's answer is replayed as the loop would emit it: the prefill gives the answer's first token; every step
drafts a block from the stored context before its anchor, accepts the leading correct slots and moves on by one more
than that. Where the text is the target's own greedy output this is the real loop, without the target. (The mean over
uniformly drawn anchors is not: it oversamples the easy runs that a real loop jumps over.)

Shapes: T tokens, K taps, H hidden, N anchors, B block size, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import Drafter

# Blocks in one drafter pass; does not change the result. Dense attention costs blocks squared, so few at a time on a CPU.
ANCHORS_PER_PASS = {"cpu": 48}
ANCHORS_PER_PASS_ELSEWHERE = 256


@dataclass
class ReplayResult:
    """Accepted text of one or more answers.

    Attributes:
        tokens: tokens emitted by verify steps: accepted ones and the target's own; an answer's first token (the
            prefill's) is not counted, nothing after the answer's last token is.
        steps: verify steps.
        accepted: draft tokens accepted in each step, in order, 0 to B - 1.
    """

    tokens: int = 0
    steps: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per step, pooled. NaN without a step."""
        return self.tokens / self.steps if self.steps else float("nan")

    @classmethod
    def pooled(cls, results: Iterable["ReplayResult"]) -> "ReplayResult":
        """Total tokens over total steps of several results."""
        total = cls()
        for result in results:
            total.tokens += result.tokens
            total.steps += result.steps
            total.accepted.extend(result.accepted)
        return total


def answers(loss_mask: np.ndarray | torch.Tensor) -> list[tuple[int, int]]:
    """Supervised runs of a row as [start, end) pairs of token positions.

    Runs of one token are left out: the prefill gives it, no step is needed.
    """
    mask = (loss_mask.cpu().numpy() if isinstance(loss_mask, torch.Tensor) else np.asarray(loss_mask)).astype(bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2) if end - start > 1]


@torch.inference_mode()
def streaks(
    drafter: Drafter,
    embedding: torch.Tensor,  # [V, H]
    head: torch.Tensor,  # [V, H]
    hidden_rows: torch.Tensor,  # [T, K*H]
    input_ids: torch.Tensor | np.ndarray,  # [T]
    anchors: list[int],
    ends: list[int],
    *,
    anchors_per_pass: int | None = None,
) -> list[int]:
    """Leading slots drafted right, for a block at each anchor.

    Slot k of the block at p is right when the greedy draft equals token p + k; counting stops at ``end`` (exclusive),
    the end of the anchor's answer. The head is applied slot by slot to the blocks that are still right, so the usual
    cost is one or two head rows a block instead of B - 1; the result is the same.

    Args:
        hidden_rows: context states of the whole row; cast to the embedding's device and dtype.
        anchors, ends: N positions each; anchors rise.
        anchors_per_pass: blocks in one drafter pass.
    """
    shape, device, dtype = drafter.shape, embedding.device, embedding.dtype
    # a copy: rows of a corpus are read-only memory maps
    ids = (input_ids if isinstance(input_ids, torch.Tensor) else torch.from_numpy(np.array(input_ids))).to(device, torch.long)
    context = hidden_rows.to(device, dtype)
    at_once = anchors_per_pass or ANCHORS_PER_PASS.get(device.type, ANCHORS_PER_PASS_ELSEWHERE)
    counts: list[int] = []
    for first in range(0, len(anchors), at_once):
        positions = np.asarray(anchors[first : first + at_once])
        length = int(positions[-1]) + 1  # later rows are seen by no block of this pass
        blocks = BlockLayout.pack([length], [positions], block_size=shape.block_size).to(device)
        chosen = blocks.anchor_positions
        limit = torch.tensor(ends[first : first + at_once], device=device)
        hidden = drafter(
            context[:length], embedding[ids[chosen]], blocks, mask_embedding=embedding[shape.mask_token_id], trained_slots_only=True
        )  # [N, B-1, H]
        count = torch.zeros(len(chosen), dtype=torch.long, device=device)
        alive = torch.arange(len(chosen), device=device)
        for slot in range(1, shape.block_size):
            alive = alive[chosen[alive] + slot < limit[alive]]
            if not len(alive):
                break
            drafted = (hidden[alive, slot - 1] @ head.T).argmax(-1)
            alive = alive[drafted == ids[chosen[alive] + slot]]
            count[alive] = slot
        counts.extend(count.tolist())
    return counts


def replay(
    drafter: Drafter,
    embedding: torch.Tensor,
    head: torch.Tensor,
    hidden_rows: torch.Tensor,
    input_ids: torch.Tensor | np.ndarray,
    loss_mask: torch.Tensor | np.ndarray,
    *,
    only_answer: int | None = None,
    anchors_per_pass: int | None = None,
) -> ReplayResult:
    """Replay the answers of one row, greedily (see the module's docstring).

    Args:
        drafter: on the embedding's device, in its dtype. Rows have all lengths, so give one whose attention takes any
            shape (``sdpa``), not one compiled for fixed shapes.
        embedding, head: the target's frozen [V, H] tables.
        hidden_rows: [T, K*H] stored context states, the drafter's taps in its order.
        input_ids, loss_mask: [T].
        only_answer: index of the one answer to replay; all of them when None.
    """
    spans = answers(loss_mask)
    if only_answer is not None:
        spans = spans[only_answer : only_answer + 1]
    anchors = [p for start, end in spans for p in range(start, end - 1)]
    ends = [end for start, end in spans for _ in range(start, end - 1)]
    counts = streaks(drafter, embedding, head, hidden_rows, input_ids, anchors, ends, anchors_per_pass=anchors_per_pass)
    streak_at = dict(zip(anchors, counts, strict=True))
    result = ReplayResult()
    for start, end in spans:
        position = start
        while position < end - 1:
            streak = streak_at[position]
            emitted = min(streak + 1, end - 1 - position)  # the last token of an answer ends it inside a block
            result.accepted.append(streak)
            result.steps += 1
            result.tokens += emitted
            position += streak + 1
    return result

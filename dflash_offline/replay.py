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

ANCHORS_PER_PASS = 256  # blocks in one drafter pass; bounds memory, does not change the result


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
    mask = np.asarray(torch.as_tensor(loss_mask).cpu()).astype(bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2) if end - start > 1]


@torch.inference_mode()
def streaks(
    drafter: Drafter,
    embedding: torch.Tensor,  # [V, H]
    head: torch.Tensor,  # [V, H]
    hidden_rows: torch.Tensor,  # [T, K*H]
    input_ids: torch.Tensor,  # [T]
    anchors: list[int],
    ends: list[int],
    *,
    anchors_per_pass: int = ANCHORS_PER_PASS,
) -> list[int]:
    """Leading slots drafted right, for a block at each anchor.

    Slot k of the block at p is right when the greedy draft equals token p + k; counting stops at ``end`` (exclusive),
    the end of the anchor's answer. The head is applied slot by slot to the blocks that are still right, so the usual
    cost is one or two head rows a block instead of B - 1; the result is the same.

    Args:
        hidden_rows: context states of the whole row; cast to the embedding's device and dtype.
        anchors, ends: N positions each.
    """
    shape, device, dtype = drafter.shape, embedding.device, embedding.dtype
    ids = torch.as_tensor(input_ids).to(device, torch.long)
    context = hidden_rows.to(device, dtype)
    counts: list[int] = []
    for first in range(0, len(anchors), anchors_per_pass):
        chosen = torch.tensor(anchors[first : first + anchors_per_pass], device=device)
        limit = torch.tensor(ends[first : first + anchors_per_pass], device=device)
        num_context = int(chosen.max())  # rows at or after the last anchor are seen by no block of this pass
        slots = torch.full((len(chosen), shape.block_size), shape.mask_token_id, device=device)
        slots[:, 0] = ids[chosen]
        blocks = BlockLayout(
            context_start=torch.zeros_like(chosen),
            context_end=chosen,
            context_positions=torch.arange(num_context, device=device),
            anchor_positions=chosen,
        )
        hidden = drafter(context[:num_context], embedding[slots], blocks)  # [N, B, H]
        count = torch.zeros(len(chosen), dtype=torch.long, device=device)
        alive = torch.arange(len(chosen), device=device)
        for slot in range(1, shape.block_size):
            alive = alive[chosen[alive] + slot < limit[alive]]
            if not len(alive):
                break
            drafted = (hidden[alive, slot] @ head.T).argmax(-1)
            alive = alive[drafted == ids[chosen[alive] + slot]]
            count[alive] = slot
        counts.extend(count.tolist())
    return counts


def replay(
    drafter: Drafter,
    embedding: torch.Tensor,
    head: torch.Tensor,
    hidden_rows: torch.Tensor,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    only_answer: int | None = None,
    anchors_per_pass: int = ANCHORS_PER_PASS,
) -> ReplayResult:
    """Replay the answers of one row, greedily (see the module's docstring).

    Args:
        drafter: in evaluation mode, on the embedding's device, in its dtype.
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

"""``tau_replay`` on held-out conversations, and the real loop on the same answers.

Where the target writes the stored answer again, replay and loop do the same steps and must agree; if they differ by
more than 3 %, what is stored or trained is not what the loop sees (a leak, shifted layers, another template), and that
is said.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.run import Loop
from dflash_offline.figures import counted
from dflash_offline.replay import ReplayResult, answers, replay

AGREEMENT = 0.03


@dataclass(frozen=True)
class HeldoutRow:
    """One stored conversation: ``input_ids``, ``loss_mask`` [T] and a function that reads its context rows [T, K*H]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    read_hidden: Callable[[], torch.Tensor]


def tau_replay(
    loop: Loop, rows: Sequence[HeldoutRow], *, loop_rows: int, max_new_tokens: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Replay held-out rows; let the real loop write the first answer of the first ``loop_rows`` of them.

    Args:
        max_new_tokens: longest answer the loop writes; longer ones are compared up to there.

    Returns:
        ``tau`` pooled over all answers of all rows with ``tokens``, ``steps``, ``rows``; and ``loop``: ``rows``
        generated, ``reproduced`` of them token by token, and over those ``replay``, ``loop`` (acceptance lengths),
        ``difference`` (relative) and ``agrees``; None where no row was reproduced. ``common``: the same over every row,
        each up to the first token that the target writes otherwise.
    """
    decoder = loop.decoder
    results, spans = [], {}
    for index, row in enumerate(rows):
        results.append(_replay(decoder, row, row.loss_mask))
        if len(spans) < loop_rows and (found := answers(row.loss_mask)):
            spans[index] = (found[0][0], min(found[0][1], found[0][0] + max_new_tokens))
    total = ReplayResult.pooled(results)
    outcome = {"tau": total.tau if total.steps else None, "tokens": total.tokens, "steps": total.steps, "rows": len(rows), "loop": None}
    if not spans:
        return outcome
    queue = deque((index, rows[index].input_ids[:start].tolist()) for index, (start, _) in spans.items())
    longest = max(end - start for start, end in spans.values())
    replayed, written, whole = [], [], []
    for index, response in loop.run(queue, max_new_tokens=longest, plain=False):
        (start, end), row = spans[index], rows[index]
        same = _common(response.tokens, row.input_ids[start:end].tolist())
        if same < 2:
            continue
        only = np.zeros_like(row.loss_mask)
        only[start : start + same] = 1
        replayed.append(_replay(decoder, row, only))
        written.append(response.first(same))
        whole.append(same == end - start)
    comparison = {"rows": len(spans), "reproduced": sum(whole), **dict.fromkeys(("replay", "loop", "difference", "agrees"))}
    comparison["common"] = _beside(replayed, written)
    outcome["loop"] = comparison
    if any(whole):
        comparison |= _beside(*([each for each, kept in zip(all_, whole, strict=True) if kept] for all_ in (replayed, written)))
        expected, real, difference = (comparison[name] for name in ("replay", "loop", "difference"))
        comparison["agrees"] = difference < AGREEMENT
        if difference >= AGREEMENT:
            say(
                f"WARNING: on {counted(sum(whole), 'held-out answer')} tau_replay is {expected:.3f} but the real loop accepts {real:.3f} "
                f"({difference:.0%} apart, {AGREEMENT:.0%} allowed): what was stored is not what the loop sees; "
                "check layers, template and precision"
            )
    return outcome


def _beside(replayed: list[ReplayResult], written: list[Response]) -> dict[str, Any]:
    """Acceptance lengths of replay and loop over the same texts."""
    steps = sum(response.steps for response in written)
    if not steps:
        return dict.fromkeys(("replay", "loop", "difference"))
    expected, real = ReplayResult.pooled(replayed).tau, sum(response.step_tokens for response in written) / steps
    return {"replay": expected, "loop": real, "difference": abs(expected - real) / real}


def _common(ours: list[int], stored: list[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(ours, stored, strict=False)) if a != b), min(len(ours), len(stored)))


def _replay(decoder: Decoder, row: HeldoutRow, loss_mask: np.ndarray) -> ReplayResult:
    return replay(decoder.drafter, decoder.embedding, decoder.head, row.read_hidden(), row.input_ids, loss_mask)

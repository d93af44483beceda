"""``tau_replay`` on held-out conversations, and the real loop on the same answers.

Where the target writes the stored answer again, replay and loop do the same steps and must agree; if they differ by
more than 3 %, what is stored or trained is not what the loop sees (a leak, shifted layers, another template), and that
is said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_offline.evaluate.decoder import Decoder
from dflash_offline.replay import ReplayResult, answers, replay

AGREEMENT = 0.03


@dataclass(frozen=True)
class HeldoutRow:
    """One stored conversation: ``input_ids``, ``loss_mask`` [T] and a function that reads its context rows [T, K*H]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    read_hidden: Callable[[], torch.Tensor]


def tau_replay(
    decoder: Decoder, rows: Sequence[HeldoutRow], *, loop_rows: int, max_new_tokens: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Replay held-out rows; run the real loop on one answer of the first ``loop_rows`` of them.

    Args:
        max_new_tokens: longest answer the loop generates; longer ones are compared up to there.

    Returns:
        ``tau`` pooled over all answers of all rows with ``tokens``, ``steps``, ``rows``; and ``loop``: ``rows``
        generated, ``reproduced`` of them token by token, and over those ``replay``, ``loop`` (acceptance lengths),
        ``difference`` (relative) and ``agrees``; None where no row was reproduced.
    """
    results, pairs, tried = [], [], 0
    for row in rows:
        hidden = row.read_hidden()
        results.append(replay(decoder.drafter, decoder.embedding, decoder.head, hidden, row.input_ids, row.loss_mask))
        spans = answers(row.loss_mask)
        if tried < loop_rows and spans:
            tried += 1
            pairs.append(_loop_beside_replay(decoder, row, hidden, spans[0], max_new_tokens))
    total = ReplayResult.pooled(results)
    found = {"tau": total.tau if total.steps else None, "tokens": total.tokens, "steps": total.steps, "rows": len(rows), "loop": None}
    if tried:
        same = [pair for pair in pairs if pair is not None]
        comparison = {"rows": tried, "reproduced": len(same), **dict.fromkeys(("replay", "loop", "difference", "agrees"))}
        found["loop"] = comparison
        if sum(real_steps for _, (_, real_steps) in same):
            replayed = ReplayResult.pooled(result for result, _ in same).tau
            real = sum(tokens for _, (tokens, _) in same) / sum(steps for _, (_, steps) in same)
            difference = abs(replayed - real) / real
            comparison |= {"replay": replayed, "loop": real, "difference": difference, "agrees": difference < AGREEMENT}
            if difference >= AGREEMENT:
                say(
                    f"WARNING: on {len(same)} held-out answers tau_replay is {replayed:.3f} but the real loop accepts {real:.3f} "
                    f"({difference:.0%} apart, {AGREEMENT:.0%} allowed): what was stored is not what the loop sees; "
                    "check layers, template and precision"
                )
    return found


def _loop_beside_replay(
    decoder: Decoder, row: HeldoutRow, hidden: torch.Tensor, span: tuple[int, int], max_new_tokens: int
) -> tuple[ReplayResult, tuple[int, int]] | None:
    """Replay and loop (tokens, steps) of one answer; None where the target writes another text."""
    start, end = span[0], min(span[1], span[0] + max_new_tokens)
    response = decoder.generate(row.input_ids[:start].tolist(), max_new_tokens=end - start)
    if response.tokens != row.input_ids[start:end].tolist():
        return None
    only = np.zeros_like(row.loss_mask)
    only[start:end] = 1
    replayed = replay(decoder.drafter, decoder.embedding, decoder.head, hidden, row.input_ids, only)
    return replayed, (response.step_tokens, response.steps)

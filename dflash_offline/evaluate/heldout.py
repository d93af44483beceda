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

from dflash_offline.evaluate.decoder import Decoder
from dflash_offline.evaluate.run import Loop
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
        ``difference`` (relative) and ``agrees``; None where no row was reproduced.
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
    replayed, written = [], []
    for index, response in loop.run(queue, max_new_tokens=longest, plain=False):
        (start, end), row = spans[index], rows[index]
        response = response.first(end - start)
        if response.tokens == row.input_ids[start:end].tolist():
            only = np.zeros_like(row.loss_mask)
            only[start:end] = 1
            replayed.append(_replay(decoder, row, only))
            written.append(response)
    comparison = {"rows": len(spans), "reproduced": len(written), **dict.fromkeys(("replay", "loop", "difference", "agrees"))}
    outcome["loop"] = comparison
    if steps := sum(response.steps for response in written):
        expected, real = ReplayResult.pooled(replayed).tau, sum(response.step_tokens for response in written) / steps
        difference = abs(expected - real) / real
        comparison |= {"replay": expected, "loop": real, "difference": difference, "agrees": difference < AGREEMENT}
        if difference >= AGREEMENT:
            say(
                f"WARNING: on {len(written)} held-out answers tau_replay is {expected:.3f} but the real loop accepts {real:.3f} "
                f"({difference:.0%} apart, {AGREEMENT:.0%} allowed): what was stored is not what the loop sees; "
                "check layers, template and precision"
            )
    return outcome


def _replay(decoder: Decoder, row: HeldoutRow, loss_mask: np.ndarray) -> ReplayResult:
    return replay(decoder.drafter, decoder.embedding, decoder.head, row.read_hidden(), row.input_ids, loss_mask)

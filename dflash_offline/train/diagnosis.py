"""What to say when a step diverged: the rows it was made of, and any that hold numbers that are not finite."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash_offline.dataset import Job, Step

if TYPE_CHECKING:
    from dflash_offline.train.setup import Setup

SHOWN = 6


def describe_divergence(setup: "Setup", step: Step, micro_batches: Sequence[np.ndarray]) -> str:
    """One or two sentences. Reads the micro-batches again and looks at every row in every layer the drafter reads."""
    broken: list[str] = []
    for number, rows in enumerate(micro_batches):
        batch = setup.loader.load(Job(step.number, number, step.epoch, rows, setup.order.shapes[step.bucket]))
        states = batch.encoded.decode(torch.device("cpu")).unflatten(-1, (len(setup.loader.taps), -1))  # [T, k, H]
        for row, (start, end) in zip(rows.tolist(), batch.spans, strict=True):
            finite = torch.isfinite(states[start:end]).all(-1)  # [T, k]
            for tap in torch.nonzero(~finite.all(0)).flatten().tolist():
                token = int(torch.nonzero(~finite[:, tap])[0])
                layer = [*setup.shape.target_layer_ids, setup.shape.num_target_layers - 1][tap]  # the last, where it is read as well
                broken.append(f"{sample(setup, row)}, layer {layer}, token {token}")
    if broken:
        return f"The store holds hidden states that are not finite ({setup.loader.store.path}): {_listed(broken)}."
    rows = _listed([sample(setup, int(row)) for rows in micro_batches for row in rows])
    return f"All hidden states of the step are finite: try a smaller [train] lr. Its samples: {rows}."


def sample(setup: "Setup", row: int) -> str:
    """``row 17 (chats.jsonl:18, 3fa9c2d1)``: number in the corpus, where it was read, start of its content hash."""
    return f"row {row} ({setup.corpus.origin(row)}, {setup.corpus.hashes[row].tobytes().hex()[:8]})"


def _listed(items: list[str]) -> str:
    return "; ".join(items[:SHOWN]) + (f"; and {len(items) - SHOWN} more" if len(items) > SHOWN else "")

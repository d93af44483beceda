"""What a training run tells: the status line, ``metrics.jsonl``, TensorBoard and other trackers.

::

    [14m] step=8 loss=9.81 acc=0.031 streak=0.12 tau=1.12 lr=6.0e-05 noise=0.0003
          | read=412MB/s wait=1% train=23.5Ktok/s | epoch~0.01 ETA=1.3h           (one line)

``loss``, ``acc``, ``streak`` are of that one step, over all ranks (``acc``: right among all trained slots; ``streak``:
leading right slots of a block; ``tau = streak + 1``). ``read``, ``wait`` and ``train`` are over the time since the line
before: stored bytes read, share of the time that ranks waited for data, context tokens trained (padding not counted),
summed (``wait``: averaged) over the ranks. Ranks that take more than 1.2 times as long for a micro-batch as the fastest
one are named at the end: ``| slow: rank 2 x1.4``.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_offline.figures import counted, seconds_text
from dflash_offline.manifest import write_bytes
from dflash_offline.train.trackers import Trackers
from dflash_offline.watch.metrics import read_metrics

METRICS = "metrics.jsonl"


def status_line(row: Mapping[str, Any]) -> str:
    """The line of one metrics row (shape: see the module's docstring)."""
    return (
        f"[{seconds_text(row['elapsed_s'])}] step={row['step']} loss={row['loss']:.2f} acc={row['acc']:.3f} "
        f"streak={row['streak']:.2f} tau={row['tau']:.2f} lr={row['lr']:.1e} noise={row['noise']:.4f} "
        f"| read={row['read_bytes_per_s'] / 1e6:.0f}MB/s "
        f"wait={100 * row['wait_share']:.0f}% train={row['tokens_per_s'] / 1e3:.1f}Ktok/s "
        f"| epoch~{row['epoch']:.2f} ETA={seconds_text(row['eta_s'])}"
        + (f" | slow: {', '.join(f'rank {rank} x{ratio:.1f}' for rank, ratio in slow.items())}" if (slow := row.get("slow_ranks")) else "")
    )


def heldout_line(row: Mapping[str, Any]) -> str:
    """The line of one evaluation row."""
    held = row["heldout"]
    line = f"[{seconds_text(row['elapsed_s'])}] step={row['step']} held-out: loss={held['loss']:.2f} acc={held['acc']:.3f}"
    line += f" tau={held['tau']:.2f}"
    if held["tau_replay"] is not None:
        low, high = held["tau_replay_interval"]
        line += f" tau_replay={held['tau_replay']:.2f} [{low:.2f}, {high:.2f}]"
    return f"{line} ({counted(held['rows'], 'conversation')}, {counted(held['blocks'], 'block')})"


class Records:
    """Writes the files of one run; only rank 0 has one.

    Args:
        folder: the run's folder under ``drafters/``.
        after: the step that training resumes from. Rows beyond it, left by a run that got further before it was
            killed, are dropped, and so is a torn last line: steps are in the file once, rising.
        trackers: get the same numbers as TensorBoard; closed with this.
    """

    def __init__(self, folder: Path, *, after: int, trackers: Trackers | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / METRICS
        folder.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= after]
        write_bytes(self.path, "".join(kept).encode(), durable=False)
        self._file = self.path.open("a", encoding="utf-8")  # noqa: SIM115
        self._trackers = trackers
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row to ``metrics.jsonl`` and its numbers to TensorBoard and the trackers.

        Unlike the progress file this is a result: a full disk stops the run here (``OSError``).
        """
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        scalars = _scalars(row)
        for name, value in scalars:
            self._board.add_scalar(name, value, row["step"])
        if self._trackers is not None:
            self._trackers.log(scalars, step=row["step"])

    def close(self) -> None:
        """Flush and make durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._board.close()
        if self._trackers is not None:
            self._trackers.close()


def _scalars(row: Mapping[str, Any], prefix: str = "train") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.extend(_scalars(value, name))
        elif isinstance(value, list):
            found.extend((f"{prefix}/{name}/{i}", float(item)) for i, item in enumerate(value) if isinstance(item, int | float))
        elif isinstance(value, int | float) and name != "step":
            found.append((f"{prefix}/{name}", float(value)))
    return found

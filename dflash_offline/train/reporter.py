"""Turns the numbers of steps into rows, lines and warnings."""

import time
from typing import Any

from dflash_offline.config import TrainConfig
from dflash_offline.dataset import BatchShape, Prefetcher, Step
from dflash_offline.errors import TrainError
from dflash_offline.progress import Progress
from dflash_offline.train.records import Records, heldout_line, status_line
from dflash_offline.train.speed import RankWatch, ThroughputWatch
from dflash_offline.train.statistics import RATE, READ_BYTES, RECOMPILES, TOKENS, StepNumbers

TOLD = ("loss", "tau", "tokens_per_s", "read_bytes_per_s", "wait_share", "eta_s", "recompiles")  # in the progress file


class Reporter:
    """Rows of ``metrics.jsonl``, status lines, the progress file, and what watches the speed of one rank.

    Only rank 0 has ``records``, and only it prints.

    Attributes:
        earlier_s: seconds of training before this process, from the checkpoint.
        total_tokens: context tokens trained since the first step of the run.
        reader: what reads ahead, while the loop runs: how much it holds is told.
        recompiles: graphs compiled after warm-up, by all ranks.
    """

    def __init__(self, train: TrainConfig, progress: Progress, *, total_steps: int, num_ranks: int) -> None:
        self.train, self.progress, self.total_steps, self.num_ranks = train, progress, total_steps, num_ranks
        self.records: Records | None = None
        self.reader: Prefetcher[Any, Any] | None = None
        self.first_step, self.earlier_s, self.total_tokens, self.recompiles = 0, 0.0, 0, 0
        self.started = time.monotonic()
        self.last_row: dict[str, Any] = {}
        self._throughput, self._ranks = ThroughputWatch(), RankWatch()
        self._warnings: list[str] = []
        self._window = {"seconds": 0.0, "tokens": 0.0, "read_bytes": 0.0, "waited_s": 0.0}

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.earlier_s + time.monotonic() - self.started

    @property
    def rate(self) -> float | None:
        """Tokens per second over the last steps, as this process saw them; None while there are too few."""
        return self._throughput.rate

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.records is not None:
            self.progress.say(text)

    def warn(self, text: str) -> None:
        """Print a line that begins with "warning:" and put it into the next row."""
        self._warnings.append(text.removeprefix("warning: "))
        self.say(text)

    def step(
        self, step: Step, numbers: StepNumbers, *, shape: BatchShape, lr: float, noise: float, norm: float, seconds: float, stopping: bool
    ) -> None:
        """Note one step; write its row and line where one is due.

        Raises:
            TrainError: slower than ``[train] min_tokens_per_s``; on every rank at the same step.
        """
        self.total_tokens += int(numbers[TOKENS])
        self.recompiles += int(numbers[RECOMPILES])
        waited_s = sum(rank.waited_s for rank in numbers.ranks) / self.num_ranks
        for name, value in (("seconds", seconds), ("tokens", numbers[TOKENS]), ("read_bytes", numbers[READ_BYTES]), ("waited_s", waited_s)):
            self._window[name] += value
        self._watch_speed(shape, numbers, waited_s=min(waited_s, seconds), seconds=seconds)
        number = step.number + 1
        if number % self.train.log_every == 0 or number in (self.first_step + 1, self.total_steps) or stopping:
            self._log(step, numbers, lr=lr, noise=noise, norm=norm)
        shown = {name: self.last_row[name] for name in TOLD if self.last_row}
        if self.reader is not None:
            shown |= {"reader_queue": self.reader.depth, "reader_queue_bytes": self.reader.held_bytes}
        self.progress.update(done=number, total=self.total_steps, text="training", **shown)

    def _watch_speed(self, shape: BatchShape, numbers: StepNumbers, *, waited_s: float, seconds: float) -> None:
        def mean(name: str) -> float:
            return sum(getattr(rank, name) for rank in numbers.ranks) / self.num_ranks

        spent = {
            "waiting for data": waited_s,
            "the step itself": max(0.0, seconds - waited_s),
            "in the background reading": mean("read_s"),
            "copying to the device": mean("copy_s"),
            "decoding": mean("decode_s"),
        }
        slower = self._throughput.step(shape, tokens=int(numbers[TOKENS]), seconds=seconds, spent=spent)
        for warning in (*([slower] if slower else []), *self._ranks.step(numbers.ranks)):
            self.warn(warning)
        rate, least = numbers[RATE], self.train.min_tokens_per_s  # rank 0's rate, so that all ranks decide alike
        if least and 0 < rate < least:
            raise TrainError(
                f"training runs at {rate:,.0f} tokens/s, below [train] min_tokens_per_s = {least:,.0f}, so it was stopped; "
                "find the cause (the lines above say what the time goes to) or lower the limit; checkpoints are kept"
            )

    def _log(self, step: Step, numbers: StepNumbers, *, lr: float, noise: float, norm: float) -> None:
        window, self._window = self._window, dict.fromkeys(self._window, 0.0)
        seconds, number, elapsed = max(window["seconds"], 1e-9), step.number + 1, self.elapsed_s
        per_step = (elapsed - self.earlier_s) / max(1, number - self.first_step)  # what is left goes at this process's speed
        row = {
            "step": number,
            "loss": numbers.loss,
            "acc": numbers.accuracy,
            "acc_per_slot": numbers.accuracy_per_slot,
            "streak": numbers.streak,
            "tau": numbers.streak + 1,
            "lr": lr,
            "noise": noise,
            "grad_norm": norm,
            "read_bytes_per_s": window["read_bytes"] / seconds,
            "wait_share": min(1.0, window["waited_s"] / seconds),
            "tokens_per_s": window["tokens"] / seconds,
            "epoch": step.position,
            "eta_s": per_step * (self.total_steps - number),
            "elapsed_s": elapsed,
            "tokens": self.total_tokens,
            "recompiles": self.recompiles,
        }
        if self._ranks.speeds:
            names = ("micro_batch_s", "wait_share", "memory")
            row["ranks"] = {name: [getattr(speed, name) for speed in self._ranks.speeds] for name in names}
            row["slow_ranks"] = {str(rank): ratio for rank, ratio in self._ranks.slow.items()}
        if self._warnings:
            row["warnings"], self._warnings = self._warnings, []
        self.last_row = row
        if self.records is not None:
            self.records.write(row)
            self.say(status_line(row))

    def evaluation(self, step: int, summary: dict[str, Any]) -> None:
        """Write the row and line of one evaluation."""
        row = {"step": step, "elapsed_s": self.elapsed_s, "heldout": summary}
        if self.records is not None:
            self.records.write(row)
            self.say(heldout_line(row))
        numbers = {"heldout_loss": summary["loss"], "heldout_tau": summary["tau"]}
        if summary["tau_replay"] is not None:
            numbers["tau_replay"] = summary["tau_replay"]
        self.progress.update(text="training", **numbers)

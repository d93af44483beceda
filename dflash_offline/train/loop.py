"""The training loop of one rank: ``Trainer.train_step`` is the whole of an optimiser step.

A step's micro-batches are dealt to the ranks round-robin from the one global order. Each rank adds up gradients of the
*summed* loss over its share; gradients and one small vector of statistics are summed over the ranks; the optimiser then
divides by the sum of weights of the whole step. On a GPU nothing in a step waits for the device: a step's statistics
are read while the next one runs.
"""

import contextlib
import math
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch

from dflash_offline import checkpoint
from dflash_offline.dataset import DeviceBatch, Job, MicroBatch, Prefetcher, Step, to_device
from dflash_offline.errors import CheckpointError, TrainError
from dflash_offline.objective import LossOutput, block_loss, streaks
from dflash_offline.optimizer import lr_at, noise_at, state_tensors
from dflash_offline.progress import Progress
from dflash_offline.stage import TERMINATED
from dflash_offline.train import heldout
from dflash_offline.train.diagnosis import describe_divergence
from dflash_offline.train.ranks import GradientSum, Ranks
from dflash_offline.train.records import Records, ThroughputWatch, heldout_line, status_line
from dflash_offline.train.setup import Setup

# places in the vector of statistics; after them right and trained slots, each by slot, and the loss of each micro-batch
LOSS, WEIGHT, BLOCKS, STREAK, TOKENS, READ_BYTES, WAITED_S, READ_S, STOP, SAVE, FIXED = range(11)


@dataclass
class Pending:
    """A step whose statistics are still on their way to the host."""

    step: Step
    lr: float
    noise: float
    statistics: torch.Tensor
    norm: torch.Tensor
    ready: Any  # torch.cuda.Event or None
    seconds: float


class Trainer:
    """Trains the drafter of a ``Setup``.

    Args:
        setup: data, drafter, optimiser.
        ranks: joined.
        progress: of this process.
    """

    def __init__(self, setup: Setup, ranks: Ranks, progress: Progress) -> None:
        self.setup, self.ranks, self.progress = setup, ranks, progress
        self.train, self.order = setup.config.train, setup.order
        self.gradients = GradientSum(setup.weights, ranks)
        self.slots = setup.shape.block_size - 1
        self.mask_embedding = setup.embedding[setup.shape.mask_token_id]
        self.first_step = self.next_step = 0
        self.earlier_s = 0.0  # seconds of training before this process started
        self.total_tokens = 0
        self.started = self.saved_at = time.monotonic()
        self.stop_asked = False  # this process got SIGTERM
        self.stop_agreed = self.save_agreed = False  # all ranks know, at the same step
        self.watch = ThroughputWatch()
        self.records: Records | None = None
        self.pending: Pending | None = None
        self.last_row: dict[str, Any] = {}
        self.last_heldout: dict[str, Any] | None = None
        self._window = {"seconds": 0.0, "tokens": 0.0, "read_bytes": 0.0, "waited_s": 0.0}
        rows = heldout.choose_rows(setup.corpus, self.train.heldout_rows)
        self.heldout_jobs = heldout.jobs(
            setup.corpus, rows, list(self.order.shapes.values()), tokens_per_batch=self.train.tokens_per_batch, blocks=self.order.max_blocks
        )

    # ---- one step

    def move(self, batch: MicroBatch, *, noise: float) -> DeviceBatch:
        """A micro-batch, decoded, on the training device."""
        taps = len(self.setup.shape.target_layer_ids)
        return to_device(batch, device=self.setup.device, dtype=self.setup.dtype, num_taps=taps, noise=noise)

    def losses(self, batch: DeviceBatch) -> LossOutput:
        """Forward pass and loss of one micro-batch."""
        setup = self.setup
        hidden = setup.drafter(
            batch.hidden_states,
            setup.embedding[batch.anchor_tokens],
            batch.blocks,
            mask_embedding=self.mask_embedding,
            trained_slots_only=True,
        )
        live = batch.blocks.num_live
        return block_loss(hidden, setup.head, batch.labels, batch.supervised, objective=setup.objective, num_live=live)

    def train_step(self, step: Step, batches: list[MicroBatch], *, began: float, waited_s: float) -> None:
        """One optimiser step from this rank's micro-batches of it (none is fine).

        Args:
            began: ``time.perf_counter()`` before the batches were waited for.
            waited_s: how long that took.
        """
        setup, train, total = self.setup, self.train, self.order.total_steps
        lr = lr_at(step.number, total=total, peak=train.lr, warmup_ratio=train.warmup_ratio, schedule=train.schedule)
        noise = noise_at(step.number, total=total, peak=train.noise, schedule=train.noise_schedule)
        statistics = torch.zeros(FIXED + 2 * self.slots + train.micro_batches_per_step, dtype=torch.float64, device=setup.device)
        for batch in batches:
            if batch is batches[-1]:
                self.gradients.start()
            moved = self.move(batch, noise=noise)
            out = self.losses(moved)
            out.loss_sum.backward()
            self._count(statistics, batch.job.number, moved, out)
        if not batches:
            self.gradients.start()
        for place, value in (
            (TOKENS, sum(batch.num_tokens for batch in batches)),
            (READ_BYTES, sum(batch.encoded.num_bytes for batch in batches)),
            (WAITED_S, waited_s),
            (READ_S, sum(batch.read_s for batch in batches)),
            (STOP, float(self.stop_asked)),
            (SAVE, float(self.ranks.first and time.monotonic() - self.saved_at > 60 * train.checkpoint_minutes)),
        ):
            statistics[place] = value
        self.gradients.finish()
        self.ranks.sum(statistics)
        norm = setup.optimizer.update(lr=lr, clip=train.clip, weight_sum=statistics[WEIGHT], loss_sum=statistics[LOSS])
        setup.weights.average(step.number + 1)
        setup.weights.refresh()
        self._settle()  # the step before this one
        ready = None
        if setup.device.type == "cuda":
            statistics, norm = statistics.to("cpu", non_blocking=True), norm.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self.pending = Pending(step, lr, noise, statistics, norm, ready, time.perf_counter() - began)
        if ready is None:
            self._settle()

    def _count(self, statistics: torch.Tensor, number: int, batch: DeviceBatch, out: LossOutput) -> None:
        correct, supervised = out.correct[:, 1:], batch.supervised[:, 1:]
        live = batch.blocks.num_live
        statistics[LOSS] += out.loss_sum.detach()
        statistics[WEIGHT] += out.weight_sum
        statistics[BLOCKS] += live
        statistics[STREAK] += streaks(out.correct, batch.supervised)[:live].sum()
        statistics[FIXED : FIXED + self.slots] += correct.sum(0)
        statistics[FIXED + self.slots : FIXED + 2 * self.slots] += supervised.sum(0)
        statistics[FIXED + 2 * self.slots + number] = out.loss_sum.detach()

    def _settle(self) -> None:
        """Read the pending step's statistics: stop if it diverged, else write its row."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        if pending.ready is not None:
            pending.ready.synchronize()
        numbers, norm = pending.statistics.tolist(), float(pending.norm)
        losses = numbers[FIXED + 2 * self.slots :]
        if not math.isfinite(norm) or not all(math.isfinite(loss) for loss in losses):
            self._diverged(pending.step, losses, norm)
        self.stop_agreed, self.save_agreed = self.stop_agreed or numbers[STOP] > 0, self.save_agreed or numbers[SAVE] > 0
        self.total_tokens += int(numbers[TOKENS])
        for name, value in (
            ("seconds", pending.seconds),
            ("tokens", numbers[TOKENS]),
            ("read_bytes", numbers[READ_BYTES]),
            ("waited_s", numbers[WAITED_S] / self.ranks.size),
        ):
            self._window[name] += value
        waited, read = numbers[WAITED_S] / self.ranks.size, numbers[READ_S] / self.ranks.size
        self._watch(pending, numbers[TOKENS], waited=min(waited, pending.seconds), read=read)
        number, total = pending.step.number + 1, self.order.total_steps
        if number % self.train.log_every == 0 or number in (self.first_step + 1, total) or self.stop_agreed:
            self._log(pending, numbers, norm)
        done = {} if not self.last_row else {name: self.last_row[name] for name in ("loss", "tau", "tokens_per_s", "wait_share")}
        self.progress.update(done=number, total=total, text="training", **done)

    def _watch(self, pending: Pending, tokens: float, *, waited: float, read: float) -> None:
        shape = self.order.shapes[pending.step.bucket]
        spent = {"waiting for data": waited, "the step": max(0.0, pending.seconds - waited)}
        warning = self.watch.step(shape, tokens=int(tokens), seconds=spent)
        if warning is not None and self.ranks.first:
            self.progress.say(f"{warning} (reading took {read:.1f}s of the step in the background)")
        rate = self.watch.rate
        if self.train.min_tokens_per_s and rate is not None and rate < self.train.min_tokens_per_s:
            raise TrainError(
                f"training runs at {rate:,.0f} tokens/s, below [train] min_tokens_per_s = {self.train.min_tokens_per_s:,.0f}; "
                f"a run of this speed was not wanted. Resume from {self.setup.folder / 'checkpoints'} once the cause is found"
            )

    def _log(self, pending: Pending, numbers: list[float], norm: float) -> None:
        window, self._window = self._window, dict.fromkeys(self._window, 0.0)
        right, trained = numbers[FIXED : FIXED + self.slots], numbers[FIXED + self.slots : FIXED + 2 * self.slots]
        seconds, number, total = max(window["seconds"], 1e-9), pending.step.number + 1, self.order.total_steps
        elapsed = self.elapsed_s
        here = max(1, number - self.first_step)  # steps of this process: what is left goes at this process's speed
        streak = numbers[STREAK] / max(1.0, numbers[BLOCKS])
        row = {
            "step": number,
            "loss": numbers[LOSS] / numbers[WEIGHT] if numbers[WEIGHT] > 0 else 0.0,
            "acc": sum(right) / max(1.0, sum(trained)),
            "acc_per_slot": [r / t if t else None for r, t in zip(right, trained, strict=True)],
            "streak": streak,
            "tau": streak + 1,
            "lr": pending.lr,
            "noise": pending.noise,
            "grad_norm": norm,
            "read_bytes_per_s": window["read_bytes"] / seconds,
            "wait_share": min(1.0, window["waited_s"] / seconds),
            "tokens_per_s": window["tokens"] / seconds,
            "epoch": pending.step.position,
            "eta_s": (elapsed - self.earlier_s) / here * (total - number),
            "elapsed_s": elapsed,
            "tokens": self.total_tokens,
        }
        self.last_row = row
        if self.records is not None:
            self.records.write(row)
            self.progress.say(status_line(row))

    def _diverged(self, step: Step, losses: list[float], norm: float) -> NoReturn:
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        micro_batches = [step.micro_batches[number] for number in bad] or step.micro_batches
        saved = checkpoint.steps(self.setup.folder / "checkpoints")
        raise TrainError(
            f"step {step.number + 1}: {'the loss' if bad else f'the gradient norm ({norm})'} is not finite; weights were not changed. "
            + describe_divergence(self.setup, step, micro_batches)
            + (f" Last checkpoint: step {saved[-1]}." if saved else " There is no checkpoint yet.")
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.earlier_s + time.monotonic() - self.started

    # ---- the run

    def run(self) -> None:
        """Train to the end, or until asked to stop (checkpoint, then ``SystemExit(143)``)."""
        previous = signal.signal(signal.SIGTERM, self._ask_to_stop)
        self.started = self.saved_at = time.monotonic()
        jobs = (job for number in range(self.next_step, self.order.total_steps) for job in self._jobs(self.order.step(number)))
        try:
            with Prefetcher(jobs, self.setup.loader.load) as reader:
                while self.next_step < self.order.total_steps:
                    step = self.order.step(self.next_step)
                    began, waited = time.perf_counter(), reader.waited_s
                    batches = [reader.take() for _ in self._jobs(step)]
                    self.train_step(step, batches, began=began, waited_s=reader.waited_s - waited)
                    self.next_step += 1
                    self._between_steps()
        finally:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, previous)
            if self.records is not None:
                self.records.close()

    def _between_steps(self) -> None:
        """Evaluate, save and stop where due. All ranks decide alike: what they decide by was summed over them."""
        number, last = self.next_step, self.next_step == self.order.total_steps
        if number % self.train.evaluate_every == 0 or last:
            self._settle()
            self.evaluate()
        if number % self.train.checkpoint_every == 0 or last or self.save_agreed or self.stop_agreed:
            self._settle()
            self.save()
        if self.stop_agreed and not last:
            self.progress.say(f"stopped at step {number} of {self.order.total_steps}; the same command goes on from there")
            raise SystemExit(TERMINATED)

    def _jobs(self, step: Step) -> list[Job]:
        """This rank's share of a step."""
        numbers = range(self.ranks.rank, len(step.micro_batches), self.ranks.size)
        shape = self.order.shapes[step.bucket]
        return [Job(step.number, number, step.epoch, step.micro_batches[number], shape) for number in numbers]

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_asked = True

    @torch.no_grad()
    def evaluate(self) -> None:
        """Score the held-out conversations with the weights that would be exported; rank 0 writes the row."""
        if not self.heldout_jobs:
            return
        self.progress.update(text="evaluating", force=True)
        self.setup.weights.refresh(averaged=True)
        scores = heldout.Scores()
        mine = self.heldout_jobs[self.ranks.rank :: self.ranks.size]
        with Prefetcher(mine, self.setup.loader.load) as reader:
            for job in mine:
                batch = reader.take()
                out, live = self.losses(self.move(batch, noise=0.0)), batch.blocks.num_live
                scores.add(
                    job,
                    loss_sum=float(out.loss_sum),
                    weight_sum=float(out.weight_sum),
                    correct=out.correct[:live, 1:].cpu().numpy(),
                    supervised=batch.supervised[:live, 1:].numpy(),
                )
        self.setup.weights.refresh()
        whole = heldout.Scores()
        for each in self.ranks.gather(scores):
            whole.merge(each)
        row = {"step": self.next_step, "elapsed_s": self.elapsed_s, "heldout": whole.summary(self.setup.corpus)}
        if self.records is not None:
            self.records.write(row)
            self.progress.say(heldout_line(row))
        held = row["heldout"]
        self.progress.update(text="training", heldout_loss=held["loss"], heldout_tau=held["tau"], tau_replay=held["tau_replay"] or 0.0)

    def save(self) -> None:
        """Write a checkpoint (rank 0)."""
        self.saved_at, self.save_agreed = time.monotonic(), False
        weights = self.setup.weights
        self.ranks.compare({f"master weights after step {self.next_step}": float(weights.master.sum(dtype=torch.float64))})
        if not self.ranks.first:
            return
        self.progress.update(text="writing a checkpoint", force=True)
        state = {
            "step": self.next_step,
            "updates": int(self.setup.optimizer.steps_taken),
            "tokens": self.total_tokens,
            "elapsed_s": self.elapsed_s,
            "ranks": self.ranks.size,
            "facts": self.setup.facts,
            "machine": self.setup.machine,
        }
        tensors = state_tensors(weights, self.setup.optimizer)
        folder = self.setup.folder / "checkpoints"
        checkpoint.save(folder, key=self.setup.key, tensors=tensors, state=state, keep=self.train.keep_checkpoints)
        self.progress.update(text="training", force=True)

    def resume(self) -> None:
        """Go on from the newest complete checkpoint, when there is one; open the records.

        Raises:
            CheckpointError: it belongs to another run.
        """
        setup, checkpoints = self.setup, self.setup.folder / "checkpoints"
        found, passed_over = checkpoint.newest(checkpoints, key=setup.key)
        self.ranks.compare({"the newest checkpoint": None if found is None else found.step})
        say = self.progress.say if self.ranks.first else (lambda text: None)
        for problem in passed_over:
            say(f"warning: passed over a damaged checkpoint: {problem}")
        if found is not None:
            stored = found.state["facts"]
            for name, value in setup.facts.items():
                if stored.get(name) != value:
                    change = f"{name} was {stored.get(name)!r} and is {value!r} now"
                    raise CheckpointError(f"{found.folder}: {change}; remove {checkpoints} to start afresh")
            found.load_into(state_tensors(setup.weights, setup.optimizer))
            setup.optimizer.set_steps_taken(found.state["updates"])
            setup.weights.refresh()
            self.first_step = self.next_step = found.step
            self.earlier_s, self.total_tokens = found.state["elapsed_s"], found.state["tokens"]
            for name, value in setup.machine.items():
                before = found.state["machine"].get(name)
                if before != value:
                    say(f"note: {name} was {before} before and is {value} now; losses may differ in the last digits")
            say(f"resuming at step {found.step} of {self.order.total_steps}" + self._ranks_changed(found.state["ranks"]))
        if self.ranks.first:
            checkpoint.discard_after(checkpoints, self.next_step)
            self.records = Records(setup.folder, after=self.next_step)

    def _ranks_changed(self, before: int) -> str:
        now = self.ranks.size
        return "" if before == now else f" with {now} rank{'s' if now > 1 else ''} in place of {before}: same samples in the same order"

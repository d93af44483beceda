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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from dflash_offline import checkpoint
from dflash_offline.attention import Proof
from dflash_offline.dataset import BatchShape, DeviceBatch, DeviceFeed, Job, MicroBatch, Prefetcher, Step, Timing, mark, to_device
from dflash_offline.drafter import model
from dflash_offline.environment import environment
from dflash_offline.errors import TrainError
from dflash_offline.graphs import compiled_graphs
from dflash_offline.objective import LossOutput, block_loss
from dflash_offline.optimizer import lr_at, noise_at
from dflash_offline.progress import Progress
from dflash_offline.stage import SAVING, TERMINATED
from dflash_offline.train import heldout, kernels, state
from dflash_offline.train.diagnosis import describe_divergence
from dflash_offline.train.proof import prove_attention
from dflash_offline.train.ranks import GradientSum, Ranks, StoppedTogetherError
from dflash_offline.train.reporter import Reporter
from dflash_offline.train.setup import Setup
from dflash_offline.train.speed import StallWatch
from dflash_offline.train.statistics import LOSS, RATE, RECOMPILES, SAVE, STOP, WEIGHT, RankNumbers, Statistics, StepNumbers


@dataclass
class Pending:
    """A step whose statistics are still on their way to the host."""

    step: Step
    lr: float
    noise: float
    vector: torch.Tensor
    norm: torch.Tensor
    ready: Any  # torch.cuda.Event, or None
    worked: tuple[Any, Any]  # when this rank's work on it began and was done; see mark
    waited_s: float
    read_s: float
    moved: list[Timing]  # its micro-batches


class Trainer:
    """Trains the drafter of a ``Setup``.

    Args:
        setup: data, drafter, optimiser.
        ranks: joined, or about to be: nothing is exchanged before ``state.resume``.
        progress: of this process.
    """

    def __init__(self, setup: Setup, ranks: Ranks, progress: Progress) -> None:
        self.setup, self.ranks, self.progress = setup, ranks, progress
        self.train, self.order = setup.config.train, setup.order
        self.reporter = Reporter(self.train, progress, total_steps=self.order.total_steps, num_ranks=ranks.size)
        self.gradients = GradientSum(setup.weights, ranks)
        self.mask_embedding = setup.embedding[setup.shape.mask_token_id]
        self.next_step = 0
        self.stop_asked = False  # this process got SIGTERM
        self.stop_agreed = self.save_agreed = False  # all ranks know, at the same step
        self.saved_at = time.monotonic()
        self.pending: Pending | None = None
        self.num_graphs, self.recompiled, self.warmed_up = 0, 0, False
        self.measured = RankNumbers()  # of this rank's last settled step
        self.settled_at = time.perf_counter()
        self.stall = StallWatch(lambda text: progress.say(f"warning: rank {ranks.rank} {text}, at step {self.next_step + 1}"))
        self.heldout_jobs = heldout.jobs(
            setup.corpus,
            heldout.choose_rows(setup.corpus, self.train.heldout_rows, available=setup.loader.stored >= 0),
            list(self.order.shapes.values()),
            tokens_per_batch=self.train.tokens_per_batch,
            blocks=self.order.max_blocks,
        )

    # ---- one step

    def drafted(self, batch: DeviceBatch, anchors: torch.Tensor) -> torch.Tensor:
        """The drafter's hidden states [N, B - 1, H] of the trained slots; ``anchors`` [N, H] embed the blocks' first tokens.

        Where gradients are off (held-out batches, proofs), the forward pass is training's all the same, and its result is
        cut off: compiled layers without gradients are other graphs, as many again to compile before the first step. What
        the pass saved for a backward pass goes when this returns, and training needs that room anyway.
        """
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            hidden: torch.Tensor = self.setup.drafter(
                batch.hidden_states, anchors, batch.blocks, mask_embedding=self.mask_embedding, trained_slots_only=True
            )
        return hidden if wanted else hidden.detach()

    def losses(self, batch: DeviceBatch) -> LossOutput:
        """Forward pass and loss of one micro-batch."""
        setup = self.setup
        hidden = self.drafted(batch, setup.embedding[batch.anchor_tokens])
        teacher = None
        if setup.ending is not None:
            assert batch.last_hidden is not None
            teacher = setup.ending.rows(batch.last_hidden)[batch.teacher_rows]
        return block_loss(
            hidden,
            setup.head,
            batch.labels,
            batch.supervised,
            objective=setup.objective,
            teacher_hidden=teacher,
            num_live=batch.blocks.num_live,
        )

    def train_step(self, step: Step, feed: DeviceFeed) -> None:
        """One optimiser step from this rank's micro-batches of it (none is fine), taken from ``feed``."""
        setup, train, total = self.setup, self.train, self.order.total_steps
        began = mark(setup.device)
        lr = lr_at(step.number, total=total, peak=train.lr, warmup_ratio=train.warmup_ratio, schedule=train.schedule)
        statistics = Statistics(
            slots=setup.shape.block_size - 1, micro_batches=train.micro_batches_per_step, ranks=self.ranks.size, device=setup.device
        )
        jobs, waited_s = self.jobs(step), feed.waited_s
        read_s, moved = 0.0, []
        for job in jobs:
            self.stall.at("waiting for data")
            batch = feed.take()
            self.stall.at("computing")
            if job is jobs[-1]:
                self.gradients.start()
            out = self.losses(batch)
            out.loss_sum.backward()
            statistics.add(batch, out)
            read_s += batch.read_s
            moved += [batch.timing] if batch.timing is not None else []
            feed.look_ahead()
        if not jobs:
            self.gradients.start()
        worked = began, mark(setup.device)
        waited_s = feed.waited_s - waited_s
        statistics.set_rank(self.ranks.rank, self.measured)
        self._tell(statistics)
        self.stall.at("summing gradients with the other ranks")
        self.gradients.finish()
        vector = self.ranks.sum(statistics.vector)
        norm = setup.optimizer.update(lr=lr, clip=train.clip, weight_sum=vector[WEIGHT], loss_sum=vector[LOSS])
        setup.weights.average(step.number + 1)
        setup.weights.refresh()
        self.settle()  # the step before this one
        vector, norm, ready = _to_host(vector, norm)
        self.pending = Pending(step, lr, self.noise(step.number), vector, norm, ready, worked, waited_s, read_s, moved)
        if ready is None:
            self.settle()

    def _tell(self, statistics: Statistics) -> None:
        """Put what all ranks have to act on alike into the vector."""
        statistics.set(STOP, float(self.stop_asked))
        statistics.set(RECOMPILES, self.recompiled)
        self.recompiled = 0
        if self.ranks.first:
            statistics.set(SAVE, float(time.monotonic() - self.saved_at > 60 * self.train.checkpoint_minutes))
            statistics.set(RATE, self.reporter.rate or 0.0)

    def noise(self, number: int) -> float:
        """Noise on context features at a step."""
        return noise_at(number, total=self.order.total_steps, peak=self.train.noise, schedule=self.train.noise_schedule)

    def settle(self) -> None:
        """Read the pending step's statistics: stop if it diverged, else report it."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if pending.ready is not None:
            self.stall.at("waiting for its GPU, which may wait for the other ranks")
            pending.ready.synchronize()
        seconds, self.settled_at = time.perf_counter() - self.settled_at, time.perf_counter()
        count, device = len(self.jobs(pending.step)), self.setup.device
        self.measured = RankNumbers.of(
            count, pending.worked, pending.moved, waited_s=pending.waited_s, read_s=pending.read_s, device=device
        )
        shape = self.setup.shape.block_size - 1, self.train.micro_batches_per_step
        numbers, norm = StepNumbers(pending.vector.tolist(), slots=shape[0], micro_batches=shape[1]), float(pending.norm)
        if not math.isfinite(norm) or not all(math.isfinite(loss) for loss in numbers.losses):
            self._diverged(pending.step, numbers.losses, norm)
        self.stop_agreed, self.save_agreed = self.stop_agreed or numbers[STOP] > 0, self.save_agreed or numbers[SAVE] > 0
        self.reporter.step(
            pending.step,
            numbers,
            shape=self.order.shapes[pending.step.bucket],
            lr=pending.lr,
            noise=pending.noise,
            norm=norm,
            seconds=seconds,
            stopping=self.stop_agreed,
        )

    def _diverged(self, step: Step, losses: list[float], norm: float) -> NoReturn:
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        micro_batches = [step.micro_batches[number] for number in bad] or step.micro_batches
        saved = checkpoint.steps(self.setup.folder / "checkpoints")
        raise TrainError(
            f"step {step.number + 1}: {'the loss' if bad else f'the gradient norm ({norm})'} is not finite; weights were not changed. "
            + (f"Last checkpoint: step {saved[-1]}. " if saved else "There is no checkpoint yet. ")
            + describe_divergence(self.setup, step, micro_batches)
        )

    def warm_up(self, folder: Path) -> list[str]:
        """Prove the attention path and compile what every shape needs, before the ranks meet; returns lines to print.

        Raises:
            TrainError: the path is wrong, or as slow as a dense one (see ``attention.prove``), or PyTorch cannot compile a
                layer for all numbers of context tokens at once.
        """
        from torch.fx.experimental.symbolic_shapes import ConstraintViolationError  # the compiler's, which a CPU does without

        setup = self.setup
        # a graph that serves several C is laid out for the first: the largest, where a poor layout would cost most
        wanted = {*self.order.shapes.values(), *(job.shape for job in self.heldout_jobs)}
        shapes = sorted(wanted, key=lambda shape: (-shape.context, -shape.blocks, shape.bucket))
        proofs: list[Proof] = []

        def compile_shape(shape: BatchShape) -> None:
            batch = setup.made_up(shape)
            try:
                self.losses(batch).loss_sum.backward()
            except ConstraintViolationError as error:
                raise TrainError(
                    f"compiling the drafter's layers: PyTorch {torch.__version__} makes the number of context tokens a constant of the "
                    "graph, so one graph cannot serve all length buckets; set ANY_CONTEXT = False in "
                    f"{model.__file__}, which compiles each bucket on its own, and report this: {' '.join(str(error).split())[:300]}"
                ) from error
            setup.weights.gradient.zero_()
            with torch.no_grad():  # held-out batches: the same graphs, see drafted; the loss without its gradient
                self.losses(batch)

        what = {
            "shape": setup.shape.to_dict(),
            "batches": [[shape.context, shape.blocks] for shape in shapes],
            "any_context": model.ANY_CONTEXT,
            "machine": setup.machine,
            "dtype": self.train.dtype,
            "head": self.train.head_precision,
            "teacher": setup.ending is not None,
            "versions": {name: environment().get(name) for name in ("dflash_offline", "git", "triton")},
        }
        passes = {"attention": lambda: proofs.append(prove_attention(setup, max(shapes, key=lambda shape: shape.blocks * shape.context)))}
        line = kernels.warm_up(folder, what, passes | {str(shape): partial(compile_shape, shape) for shape in shapes})
        self.num_graphs, self.warmed_up = compiled_graphs(), True
        return [line, *map(str, proofs)]

    # ---- the run

    def jobs(self, step: Step) -> list[Job]:
        """This rank's share of a step."""
        numbers = range(self.ranks.rank, len(step.micro_batches), self.ranks.size)
        shape = self.order.shapes[step.bucket]
        return [Job(step.number, number, step.epoch, step.micro_batches[number], shape) for number in numbers]

    def feed(self, reader: Prefetcher[Job, MicroBatch], *, training: bool) -> DeviceFeed:
        """Micro-batches on the training device, with the noise of their step when training."""
        setup, taps = self.setup, len(self.setup.shape.target_layer_ids)

        def move(batch: MicroBatch) -> DeviceBatch:
            noise = self.noise(batch.job.step) if training else 0.0
            return to_device(batch, device=setup.device, dtype=setup.dtype, num_taps=taps, noise=noise)

        return DeviceFeed(reader, move, setup.device)

    def run(self) -> None:
        """Train to the end, or until asked to stop (checkpoint, then ``SystemExit(143)``)."""
        previous = signal.signal(signal.SIGTERM, self._ask_to_stop)
        self.reporter.started = self.saved_at = time.monotonic()
        self.settled_at = time.perf_counter()
        jobs = (job for number in range(self.next_step, self.order.total_steps) for job in self.jobs(self.order.step(number)))
        try:
            with self.stall, self.setup.loader.prefetch(jobs) as reader:
                feed, self.reporter.reader = self.feed(reader, training=True), reader
                while self.next_step < self.order.total_steps:
                    step = self.order.step(self.next_step)
                    self.train_step(step, feed)
                    self.next_step += 1
                    self._count_recompiles(step)
                    self._between_steps()
        finally:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, previous)
            if self.reporter.records is not None:
                self.reporter.records.close()

    def _count_recompiles(self, step: Step) -> None:
        """None is expected: every shape was compiled before the first step. Each rank says its own."""
        if self.warmed_up and (more := compiled_graphs() - self.num_graphs):
            self.num_graphs += more
            self.recompiled += more
            self.progress.say(
                f"warning: rank {self.ranks.rank}: {more} graph{'s' if more > 1 else ''} compiled after warm-up, in step "
                f"{step.number + 1} of {self.order.shapes[step.bucket]}: {kernels.recompiles()}"
            )

    def _between_steps(self) -> None:
        """Evaluate, save and stop where due. All ranks decide alike: what they decide by was summed over them."""
        number, last = self.next_step, self.next_step == self.order.total_steps
        if number % self.train.evaluate_every == 0 or last:
            self.settle()
            self.stall.at("evaluating")
            self.evaluate()
            self.settled_at = time.perf_counter()
        if number % self.train.checkpoint_every == 0 or last or self.save_agreed or self.stop_agreed:
            self.settle()
            self.stall.at(SAVING)
            state.save(self)
            self.saved_at, self.save_agreed = time.monotonic(), False
            self.settled_at = time.perf_counter()
        if self.stop_agreed and not last:
            self.reporter.say(f"stopped at step {number} of {self.order.total_steps}; the same command goes on from there")
            told = self.ranks.told_to_stop(this=self.stop_asked)
            if self.stop_asked:
                raise SystemExit(TERMINATED)
            raise StoppedTogetherError(
                f"rank {self.ranks.rank} of {self.ranks.size}: stopped after step {number}, which is saved, because {told} was told to "
                "stop or lost its command; run the same command again wherever it was started"
            )

    def _ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_asked = True

    @torch.no_grad()
    def evaluate(self) -> None:
        """Score the held-out conversations with the weights that would be exported."""
        if not self.heldout_jobs:
            return
        self.progress.update(text="evaluating", force=True)
        self.setup.weights.refresh(averaged=True)
        scores = heldout.Scores()
        mine = self.heldout_jobs[self.ranks.rank :: self.ranks.size]
        with self.setup.loader.prefetch(mine) as reader:
            feed = self.feed(reader, training=False)
            for _ in mine:
                batch = feed.take()
                out = self.losses(batch)
                feed.look_ahead()
                scores.add(batch, out)
        self.setup.weights.refresh()
        whole = heldout.Scores()
        for each in self.ranks.gather(scores):
            whole.merge(each)
        self.reporter.evaluation(self.next_step, whole.summary(self.setup.corpus))


def _to_host(vector: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Start copying to the host; the event is None when there is nothing to wait for."""
    if vector.device.type != "cuda":
        return vector, norm, None
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True) for each in (vector, norm)]
    ready = torch.cuda.Event()
    ready.record()
    return *copies, ready

"""Saving and resuming a ``Trainer``: weights, moments and counters. Data order and noise follow from the step alone."""

from typing import TYPE_CHECKING, Any

import torch

from dflash_offline import checkpoint
from dflash_offline.checkpoint import Checkpoint
from dflash_offline.errors import CheckpointError
from dflash_offline.optimizer import state_tensors
from dflash_offline.stage import SAVING
from dflash_offline.train.records import Records
from dflash_offline.train.trackers import Trackers

if TYPE_CHECKING:
    from dflash_offline.train.loop import Trainer


def save(trainer: "Trainer") -> None:
    """Write a checkpoint of the steps done so far (rank 0), once all ranks are known to hold the same weights.

    Raises:
        TrainError: they do not.
    """
    setup, reporter = trainer.setup, trainer.reporter
    weights = setup.weights
    copies = weights.master if weights.shard.count == 1 else weights.compute  # what all ranks have alike
    total = float(copies.sum(dtype=torch.float64))
    trainer.ranks.compare({f"the sum of all weights after step {trainer.next_step}": total})
    trainer.progress.update(text=SAVING, force=True)
    tensors = _whole(trainer)
    if not trainer.ranks.first:
        trainer.progress.update(text="training", force=True)
        return
    state = {
        "step": trainer.next_step,
        "updates": int(setup.optimizer.steps_taken),
        "tokens": reporter.total_tokens,
        "elapsed_s": reporter.elapsed_s,
        "ranks": trainer.ranks.size,
        "facts": setup.facts,
        "machine": setup.machine,
    }
    checkpoint.save(
        setup.folder / "checkpoints",
        key=setup.key,
        tensors=tensors,
        state=state,
        keep=trainer.train.keep_checkpoints,
    )
    trainer.progress.update(text="training", force=True)


def _whole(trainer: "Trainer") -> dict[str, torch.Tensor]:
    """All weights and moments, on rank 0; shares are put together one tensor after the other, in the gradient's memory."""
    weights = trainer.setup.weights
    tensors = state_tensors(weights, trainer.setup.optimizer)
    if weights.shard.count == 1:
        return tensors
    found = {}
    for name, share in tensors.items():
        whole = weights.whole(share)
        if trainer.ranks.first:
            found[name] = whole.to("cpu", copy=True)
    weights.gradient.zero_()
    return found


def resume(trainer: "Trainer") -> None:
    """Go on from the newest complete checkpoint, when there is one, and open the records (rank 0).

    Raises:
        CheckpointError: it belongs to another run.
        TrainError: the ranks found different ones.
    """
    setup, reporter = trainer.setup, trainer.reporter
    checkpoints = setup.folder / "checkpoints"
    found, passed_over = checkpoint.newest(checkpoints, key=setup.key)
    trainer.ranks.compare({"the newest checkpoint": None if found is None else found.step})
    if found is not None:
        _check(found, setup.facts)
        found.load_into(state_tensors(setup.weights, setup.optimizer), numel=setup.weights.numel, start=setup.weights.start)
        setup.optimizer.set_steps_taken(found.state["updates"])
        setup.weights.refresh()
        trainer.next_step = reporter.first_step = found.step
        reporter.earlier_s, reporter.total_tokens = found.state["elapsed_s"], found.state["tokens"]
    if trainer.ranks.first:
        checkpoint.discard_after(checkpoints, trainer.next_step)
        reporter.records = Records(setup.folder, after=trainer.next_step, trackers=_trackers(trainer))
    for problem in passed_over:
        reporter.say(f"warning: passed over a damaged checkpoint: {problem}")
    if found is not None:
        for line in _changes(found.state, setup.machine):
            reporter.say(line)
        reporter.say(f"resuming at step {found.step} of {trainer.order.total_steps}{_ranks(found.state['ranks'], trainer.ranks.size)}")


def _trackers(trainer: "Trainer") -> Trackers | None:
    setup, section = trainer.setup, trainer.train
    if not section.trackers:
        return None
    settings = {name: getattr(setup.config, name).model_dump(mode="json") for name in ("drafter", "train")}
    project, say = section.tracker_project, trainer.progress.say
    return Trackers(section.trackers, project=project, run=setup.key, folder=setup.folder, settings=settings, say=say)


def _check(found: Checkpoint, facts: dict[str, Any]) -> None:
    stored = found.state["facts"]
    for name, value in facts.items():
        if stored.get(name) != value:
            change = f"{name} was {stored.get(name)!r} and is {value!r} now"
            raise CheckpointError(f"{found.folder}: {change}; remove {found.folder.parent} to start afresh")


def _changes(state: dict[str, Any], machine: dict[str, Any]) -> list[str]:
    return [
        f"note: {name} was {state['machine'].get(name)} before and is {value} now; losses may differ in the last digits"
        for name, value in machine.items()
        if state["machine"].get(name) != value
    ]


def _ranks(before: int, now: int) -> str:
    return "" if before == now else f" with {now} rank{'s' if now > 1 else ''} in place of {before}: same samples in the same order"

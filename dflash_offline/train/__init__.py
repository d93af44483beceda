"""Drafter training: ``python -m dflash_offline.train --config FILE --key KEY``, one process per rank.

===================  =========================================================================================
``setup.py``         what a rank trains with: data, drafter, frozen tables, optimiser
``ranks.py``         the other ranks: joining, comparing, gradient sums in a fixed order
``peers.py``         which rank has died
``partial.py``       training on what is captured so far
``loop.py``          the training loop; ``Trainer.train_step`` is one optimiser step
``statistics.py``    what a step is judged by
``speed.py``         that training stays as fast as it was, and that ranks are alike
``heldout.py``       evaluation on held-out conversations, ``tau_replay``
``state.py``         saving and resuming
``reporter.py``      numbers of steps -> rows, lines, warnings
``records.py``       status line, ``metrics.jsonl``, TensorBoard
``trackers.py``      the same numbers for wandb and trackio
``kernels.py``       compiled kernels, made before the ranks meet
``proof.py``         that the compiled block-sparse attention is what runs
``diagnosis.py``     what to say when a step diverged
``output.py``        the trained drafter and the manifest
===================  =========================================================================================

RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment place a process among its ranks; without
them it is the only one. Rank 0 writes all files. Weights, optimiser and gradients lie flat in one fixed layout
(``optimizer.py``), checkpoints are in ``checkpoint.py``, batches in ``dataset``.
"""

import argparse
import sys

from dflash_offline.config import RunConfig
from dflash_offline.figures import Laps, count_text, counted
from dflash_offline.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the stage."""
    parser.add_argument("--partial", action="store_true", help="train a drafter of its own on the parts committed so far")


def train(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
    """Train the drafter of a run file, from its newest checkpoint if there is one: the body of the stage.

    Raises:
        TrainError: see ``setup.prepare`` and ``Trainer.run``.
    """
    laps = Laps()
    from dflash_offline.optimizer import state_tensors
    from dflash_offline.train import kernels, output, state
    from dflash_offline.train.loop import Trainer
    from dflash_offline.train.partial import choose
    from dflash_offline.train.proof import prove
    from dflash_offline.train.ranks import Ranks, StoppedTogetherError
    from dflash_offline.train.setup import choose_device, prepare
    from dflash_offline.train.trackers import check_installed

    laps.end("imports")
    check_installed(config.train.trackers)
    ranks = Ranks.from_environment()
    device = choose_device(config, ranks)
    if device.type == "cuda":
        # the backward pass asks for the interpreter at every parameter; a reader thread would keep it for 5 ms each time
        sys.setswitchinterval(5e-4)
    folder = None
    if device.type == "cuda":
        folder, said = kernels.use_cache_folder(device)
        if said is not None:
            progress.say(said)
        if config.train.attention in ("auto", "triton", "flex"):
            kernels.import_compiler()
    progress.update(text="opening corpus and store", force=True)
    partial = choose(config, arguments.key) if getattr(arguments, "partial", False) else None
    setup = prepare(config, arguments.key, ranks, device, partial=partial)
    trainer = Trainer(setup, ranks, progress)
    laps.end("data and weights")
    if folder is not None:
        progress.update(text="compiling kernels", force=True)
        lines = trainer.warm_up(folder)
        laps.end("kernels")
        lines.append(prove(trainer))
        laps.end("checks")
        for line in lines if ranks.first else ():
            progress.say(line)
    progress.update(text="waiting for the other ranks", force=True)
    ranks.join(device)
    try:
        ranks.compare(setup.facts)
        state.resume(trainer)
        laps.end("ranks and checkpoint")
        if ranks.first:
            place = setup.machine["device"] if device.type == "cuda" else "the CPU"
            progress.say(
                f"training {count_text(setup.weights.numel)} parameters on {counted(len(setup.order.rows), 'conversation')}: "
                f"{counted(setup.order.total_steps, 'step')}, {counted(ranks.size, 'rank')} on {place}, "
                f"attention {setup.machine['attention']}; ready after {laps}"
            )
            progress.say(setup.order.fill_line())
            if partial is not None:
                progress.say(
                    f"this is a drafter of {counted(len(partial.parts), 'part')}, "
                    f"{int((setup.loader.stored >= 0).sum())} of {len(setup.corpus)} "
                    f"conversations, in {setup.folder}; the full one is still to be trained"
                )
            if setup.weights.shard.count > 1:
                share = sum(tensor.nbytes for tensor in state_tensors(setup.weights, setup.optimizer).values())
                progress.say(f"weights and optimiser state divided among {ranks.size} ranks: {share / 1e9:.2f} GB each")
        trainer.run()
        final = setup.weights.whole(setup.weights.final)
        if ranks.first:
            output.write(setup, ranks, final)
            progress.say(f"drafter written to {setup.folder / 'drafter'}")
        ranks.gather(None)  # the others end once the drafter is there, or fail with the rank that should write it
    except (SystemExit, StoppedTogetherError):
        ranks.leave(in_order=True)  # asked to stop: all ranks, after the same step
        raise
    except BaseException:
        ranks.leave(in_order=False)
        raise
    ranks.leave(in_order=True)

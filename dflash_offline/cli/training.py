"""``train --partial``: training that does not wait for capture."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from dflash_offline.cli.options import config_option, load_run
from dflash_offline.figures import counted

if TYPE_CHECKING:
    from dflash_offline.layout import Layout


@click.command()
@config_option
@click.option("--partial", is_flag=True, help="Train on the parts committed so far.")
@click.option("--drafter", help="Name of the drafter, where the run file has several.")
def train(config: Path | None, partial: bool, drafter: str | None) -> None:
    """Train on what is captured so far, while capture goes on; stopped, it goes on with the same parts.

    What comes of it is a drafter of its own: the full one is trained by luigi --module pipelines TrainDrafter.
    """
    if not partial:
        raise click.UsageError("say --partial to train on the parts committed so far; luigi --module pipelines TrainDrafter trains on all")
    from dflash_offline import keys
    from dflash_offline.gpus import check_settings, locked, resolve
    from dflash_offline.layout import Layout
    from dflash_offline.processes import CHECKPOINT_GRACE_S, Job, free_port, rank_environment, run_jobs
    from dflash_offline.train.partial import choose

    run = load_run(config)
    if drafter is not None:
        run = run.for_drafter(drafter)
    devices = resolve(run.train.gpus, run.train.ranks, where="[train] gpus")
    check_settings(run.train, devices, where=run.where("train"))
    key = keys.train_key(run)
    port, name = free_port(), Layout.partial_training(drafter)
    options = ["--config", str(run.source), "--key", key, "--partial", *(["--drafter", drafter] if drafter else [])]
    jobs = [
        Job(
            f"{name}-{rank}",
            "dflash_offline.train",
            options,
            gpu=gpu,
            peers=len(devices),
            environment=rank_environment(rank, len(devices), port=port),
        )
        for rank, gpu in enumerate(devices)
    ]
    signal.signal(signal.SIGTERM, _stop)
    logs = Layout(run.root_dir).logs("train")
    logs.mkdir(parents=True, exist_ok=True)
    with locked(logs / f"{name}.lock", "another train --partial", click.echo) as lock:  # two would write into one folder
        choose(run, key)  # refused once and at once, before ranks are started that would each refuse it
        try:
            run_jobs(jobs, log_dir=logs, say=click.echo, grace_s=CHECKPOINT_GRACE_S, inherit=[lock])
        except (KeyboardInterrupt, SystemExit) as stopped:
            click.echo(_what_is_kept(Layout(run.root_dir), key))
            raise SystemExit(128 + signal.SIGINT if isinstance(stopped, KeyboardInterrupt) else stopped.code) from None


def _what_is_kept(layout: "Layout", key: str) -> str:
    """Said when the command is stopped."""
    from dflash_offline.manifest import MANIFEST
    from dflash_offline.train.partial import unfinished

    begun = unfinished(layout.drafter(key).parent, key)
    if begun is None:
        return "stopped before anything was trained; the same command begins anew"
    folder = layout.drafter(begun.key)
    saved = sorted(path.parent.name for path in folder.glob(f"checkpoints/step-*/{MANIFEST}"))
    kept = f"stopped; {folder} keeps checkpoint {saved[-1]}" if saved else f"stopped before the first checkpoint of {folder}"
    return f"{kept}; the same command {'goes on from it' if saved else 'begins anew'}, with the same {counted(len(begun.parts), 'part')}"


def _stop(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)

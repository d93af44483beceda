"""``init`` writes a run file, ``smoke`` runs the user's own on 64 conversations through the whole chain."""

from pathlib import Path

import click

from dflash_offline.cli.options import config_option, load_run


@click.command()
@click.option("--demo", is_flag=True, help="The embedded run file: SmolLM2-135M on two CPU cores.")
def init(demo: bool) -> None:
    """Print a commented run file: dflash-offline init > run.toml"""
    from dflash_offline import reference

    click.echo(reference.demo_run_file(Path.cwd()) if demo else reference.commented_run_file(), nl=False)


@click.command()
@config_option
@click.option("--rows", type=click.IntRange(min=4), default=64, show_default=True, help="Conversations taken from the corpus.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Most training steps.")
@click.option("--keep", is_flag=True, help="Keep the folder of the smoke run.")
def smoke(config: Path | None, rows: int, steps: int, keep: bool) -> None:
    """Run your run file on a few conversations, through the whole chain.

    Same target, GPUs, shapes and settings; fewer rows and steps. What fails here would have failed after hours.
    """
    from dflash_offline.inputs import take_stdin
    from dflash_offline.smoke import run_smoke

    run = load_run(config)
    take_stdin(run, click.echo)
    run_smoke(run, rows=rows, steps=steps, keep=keep, say=click.echo)

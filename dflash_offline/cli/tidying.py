"""``reset`` forgets a stage, ``prune`` deletes what is not needed. Both say the bytes and ask first."""

from pathlib import Path

import click

from dflash_offline.cli.options import config_option, echo_json, json_option, load_run, table
from dflash_offline.figures import bytes_text

_STAGES = ("regenerate", "corpus", "capture", "train", "export", "evaluate", "report")


def _objects(url: str) -> str:
    return f"the objects of this store below {url}"


@click.command()
@click.argument("stage", type=click.Choice(_STAGES))
@config_option
@click.option("--drafter", metavar="NAME", help="Of [[drafters]] only this one (train, export, evaluate); all when left out.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(stage: str, config: Path | None, drafter: str | None, yes: bool) -> None:
    """Make one stage of the run file run again: removes its mark of completion (and checkpoints, for train)."""
    from dflash_offline.tidy import remove, reset_plan

    run = load_run(config)
    if drafter is not None:
        if stage not in ("train", "export", "evaluate"):
            raise click.UsageError(f"--drafter is for train, export and evaluate; {stage} is one for all drafters")
        run = run.for_drafter(drafter)
    removals = reset_plan(run, stage)
    if not removals:
        click.echo(f"{stage}: nothing is there, so it will run anyway")
        return
    for removal in removals:
        for path in removal.paths:
            click.echo(f"remove {path}")
        for url in removal.urls:
            click.echo(f"remove {_objects(url)}")
    size = sum(removal.size_bytes for removal in removals)
    if not yes:
        click.confirm(f"Remove these ({bytes_text(size)}) so that {stage} runs again?", abort=True)
    remove(removals)
    click.echo(f"{stage} will run again; later stages stay as they are unless you reset them too")


@click.command()
@config_option
@click.option(
    "--also", type=click.Path(path_type=Path, exists=True), multiple=True, help="Another run file of this root whose results stay."
)
@click.option("--store", "with_store", is_flag=True, help="Also delete the store once its drafter is trained.")
@click.option("--checkpoints", is_flag=True, help="Also delete the checkpoints of drafters that are trained.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def prune(
    config: Path | None, also: tuple[Path, ...], with_store: bool, checkpoints: bool, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete corpora, stores, drafters and results that the run file does not lead to. Never touches foreign files."""
    from dflash_offline.tidy import prune_plan, remove

    runs = [load_run(config), *[load_run(path) for path in also]]
    removals = prune_plan(runs, store=with_store, checkpoints=checkpoints)
    size = sum(removal.size_bytes for removal in removals)
    if as_json:
        echo_json([{"what": r.what, "paths": [str(path) for path in r.paths], "urls": r.urls, "bytes": r.size_bytes} for r in removals])
    elif not removals:
        click.echo("nothing to delete")
    else:
        rows = [[removal.what, path, bytes_text(removal.size_bytes)] for removal in removals for path in removal.paths]
        table(None, ["what", "path", "bytes"], rows, right=(2,))
        for url in (url for removal in removals for url in removal.urls):
            click.echo(f"with them go {_objects(url)}")
    if dry_run or not removals:
        return
    if not yes:
        click.confirm(f"Delete {len(removals)} of these, {bytes_text(size)}?", abort=True, err=as_json)
    remove(removals)
    click.echo(f"{bytes_text(size)} freed", err=as_json)

"""``status`` says where a run stands, ``report`` prints what it gave."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_offline.cli.options import config_option, echo_json, json_option, load_run, seconds_text, table

if TYPE_CHECKING:
    from dflash_offline.status import Status


@click.command()
@config_option
@json_option
@click.option("--watch", is_flag=True, help="Print again every few seconds until Ctrl-C.")
@click.option("--every", type=click.FloatRange(min=0.2), default=3.0, show_default=True, help="Seconds between two looks of --watch.")
def status(config: Path | None, as_json: bool, watch: bool, every: float) -> None:
    """Where the run stands: stages, parts, processes, rates. Reads files only, from any host that sees the root."""
    from dflash_offline.status import read_status

    run = load_run(config)
    while True:
        found = read_status(run)
        if as_json:
            echo_json(found.to_dict())
        else:
            if watch:
                click.clear()
            _print_status(found)
        if not watch:
            return
        time.sleep(every)


def _print_status(found: "Status") -> None:
    table(f"root {found.root}", ["stage", "state", "key", ""], [[s.name, s.state, s.key or "?", s.detail] for s in found.stages])
    if found.processes:
        click.echo()
        rows = []
        for process in found.processes:
            state = "gone" if process.alive is False else f"{seconds_text(process.age_s)} ago"
            done = "" if process.done is None else f"{process.done:,}" + (f" of {process.total:,}" if process.total is not None else "")
            numbers = " ".join(f"{name}={value:,.4g}" for name, value in process.numbers.items())
            rows.append([process.name, process.pid, state, done, process.text, numbers])
        table(None, ["process", "pid", "last word", "done", "doing", "numbers"], rows, right=(1, 3))
    if found.gpus:
        click.echo()
        rows = [
            [gpu["gpu"], gpu["name"], f"{gpu['utilisation_percent']} %", f"{gpu['memory_used_mib']} of {gpu['memory_total_mib']} MiB"]
            for gpu in found.gpus
        ]
        table(None, ["GPU", "", "busy", "memory"], rows, right=(2,))
    if found.training:
        numbers = {name: value for name, value in found.training.items() if isinstance(value, int | float)}
        click.echo("\n" + " ".join(f"{name}={value:,.4g}" for name, value in numbers.items()))
    for warning in found.warnings:
        click.echo(f"warning: {warning}")


@click.command()
@config_option
@click.option("--path", "path_only", is_flag=True, help="Print the folder only.")
def report(config: Path | None, path_only: bool) -> None:
    """Print the report of a finished run (and where its HTML page is)."""
    from dflash_offline import keys
    from dflash_offline.layout import Layout
    from dflash_offline.manifest import read_manifest

    run = load_run(config)
    folder = Layout(run.root_dir).report(keys.report_key(run))
    read_manifest(folder, kind="report")
    if path_only:
        click.echo(folder)
        return
    click.echo((folder / "report.md").read_text(encoding="utf-8"), nl=False)
    click.echo(f"\n{folder / 'report.html'}")

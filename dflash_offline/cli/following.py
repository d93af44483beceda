"""``status`` says where a run stands, ``report`` prints what it gave."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_offline.cli.options import bytes_text, config_option, echo_json, finished_folder, json_option, load_run, seconds_text, table

if TYPE_CHECKING:
    from dflash_offline.status import Process, Status


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
    shown = [process for process in found.processes if process.of_this_run or not (process.ended or process.alive is False)]
    if shown:
        click.echo()
        rows = []
        for process in shown:
            state = "ended" if process.ended else "gone" if process.alive is False else f"{seconds_text(process.age_s)} ago"
            numbers = " ".join(number_text(name, value) for name, value in process.numbers.items())
            name = process.name if process.of_this_run else f"{process.name} (another run file)"
            rows.append([name, process.pid, state, _done_text(process), process.text, numbers])
        table(None, ["process", "pid", "last word", "done", "doing", "numbers"], rows, right=(1, 3))
    if found.gpus:
        click.echo()
        rows = [
            [gpu["gpu"], gpu["name"], f"{gpu['utilisation_percent']} %", f"{gpu['memory_used_mib']} of {gpu['memory_total_mib']} MiB"]
            for gpu in found.gpus
        ]
        table(None, ["GPU", "", "busy", "memory"], rows, right=(2,))
    if found.training:
        from dflash_offline.train.records import status_line

        click.echo(f"\n{status_line(found.training)}")
    for warning in found.warnings:
        click.echo(f"warning: {warning}")


def _done_text(process: "Process") -> str:
    if process.done is None:
        return ""
    if process.unit == "bytes":
        return bytes_text(process.done) + (f" of {bytes_text(process.total)}" if process.total is not None else "")
    return f"{process.done:,}{'' if process.total is None else f' of {process.total:,}'} {process.unit}".rstrip()


def number_text(name: str, value: float) -> str:
    """A number of a progress file as its name wants it: ``tokens=17.1K``, ``wait=3%``, ``eta=12m``, ``read=11.2 MB/s``."""
    from dflash_offline.buckets import count_text

    for suffix, text in (
        ("_bytes_per_s", lambda: f"{bytes_text(value)}/s"),
        ("_per_s", lambda: f"{count_text(value) if value >= 10 else f'{value:.2g}'}/s"),
        ("_share", lambda: f"{value:.0%}"),
        ("_s", lambda: seconds_text(value)),
    ):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}={text()}"
    if name.endswith("bytes"):
        return f"{name}={bytes_text(value)}"
    return f"{name}={count_text(value) if float(value).is_integer() and 'loss' not in name else f'{value:.3g}'}"


@click.command()
@config_option
@click.option("--path", "path_only", is_flag=True, help="Print the folder only.")
def report(config: Path | None, path_only: bool) -> None:
    """Print the report of a finished run (and where its HTML page is)."""
    from dflash_offline import keys
    from dflash_offline.layout import Layout

    run = load_run(config)
    folder = finished_folder(run, Layout(run.root_dir).report(keys.report_key(run)), kind="report")
    if path_only:
        click.echo(folder)
        return
    click.echo((folder / "report.md").read_text(encoding="utf-8"), nl=False)
    click.echo(f"\n{folder / 'report.html'}")

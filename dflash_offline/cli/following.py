"""``status`` says where a run stands, ``report`` prints what it gave."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_offline.cli.options import config_option, echo_json, finished_folder, json_option, load_run, table
from dflash_offline.figures import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig
    from dflash_offline.status import Process, Status


@click.command()
@config_option
@json_option
@click.option("--watch", is_flag=True, help="Print again every few seconds until Ctrl-C; with --json, one line each time.")
@click.option("--every", type=click.FloatRange(min=0.2), help="Seconds between two looks of --watch; 3 when left out.")
def status(config: Path | None, as_json: bool, watch: bool, every: float | None) -> None:
    """Where the run stands: stages, parts, processes, GPUs, rates. From any terminal or host that sees the root."""
    from dflash_offline.status import read_status

    if every is not None and not watch:
        raise click.UsageError("--every goes with --watch")
    run = load_run(config)
    try:
        while True:
            found = read_status(run)
            if as_json and watch:
                click.echo(json.dumps(found.to_dict(), ensure_ascii=False))
            elif as_json:
                echo_json(found.to_dict())
            else:
                if watch:
                    click.clear()
                _print_status(found)
            if not watch:
                return
            time.sleep(3.0 if every is None else every)
    except KeyboardInterrupt:
        if not watch:
            raise


def _print_status(found: "Status") -> None:
    rows = []
    for stage in found.stages:
        rates = " ".join(number_text(name, value) for name, value in stage.numbers.items())
        rows.append(
            [f"{stage.name} {stage.drafter}".rstrip(), stage.state, stage.key or "?", "  ".join(filter(None, [stage.detail, rates]))]
        )
    table(f"root {found.root}", ["stage", "state", "key", ""], rows)
    shown = [process for process in found.processes if process.of_this_run or not (process.ended or process.alive is False)]
    if shown:
        click.echo()
        _print_processes(found, shown)
    rows = [
        [
            host["host"],
            gpu["gpu"],
            gpu["name"],
            share_text(gpu["busy"]),
            memory_text(gpu),
            f"{seconds_text(max(0.0, time.time() - host['time']))} ago",
        ]
        for host in found.hosts
        for gpu in host["gpus"]
    ]
    if rows:
        click.echo()
        table(None, ["host", "GPU", "", "busy", "memory", "seen"], rows, right=(3,))
    for host in found.hosts:
        if host.get("gpu_note"):
            click.echo(f"\nGPU figures of {host['host']} are left out: {host['gpu_note']}")
    if found.trainings:
        from dflash_offline.train.records import status_line

        click.echo()
        for name, row in found.trainings.items():
            click.echo(f"{name}: {status_line(row)}" if name else status_line(row))
    for warning in found.warnings:
        click.echo(f"warning: {warning}")


def _print_processes(found: "Status", shown: "list[Process]") -> None:
    several_hosts = len({process.host for process in shown if process.host}) > 1 or any(process.alive is None for process in shown)
    gpus = {(host["host"], name): gpu for host in found.hosts for gpu in host["gpus"] for name in (gpu["gpu"], gpu["uuid"])}
    rows = []
    for process in shown:
        state = "ended" if process.ended else "gone" if process.alive is False else f"{seconds_text(process.age_s)} ago"
        numbers = " ".join(number_text(name, value) for name, value in process.numbers.items() if name not in _SHOWN_ELSEWHERE)
        name = process.name if process.of_this_run else f"{process.name} (another run file)"
        place = [process.host] if several_hosts else []
        on = "" if process.gpu is None else process.gpu
        if process.gpu is not None and not process.ended:
            on = gpu_text(process, gpus.get((process.host, process.gpu)))
        rows.append([name, *place, process.pid, state, _done_text(process), process.text, on, numbers])
    columns = ["process", *(["host"] if several_hosts else []), "pid", "last word", "done", "doing", "GPU", "numbers"]
    if not any(row[-2] for row in rows):  # all on the CPU
        columns, rows = [*columns[:-2], columns[-1]], [[*row[:-2], row[-1]] for row in rows]
    table(None, columns, rows, right=(2, 4) if several_hosts else (1, 3))


_SHOWN_ELSEWHERE = ("gpu_bytes", "part_rows", "part_rows_done", "writer_queue_limit")


def gpu_text(process: "Process", gpu: dict[str, Any] | None) -> str:
    """``3: 41.2 GB own, 97 % busy``: what torch holds in the process itself, and how busy the whole GPU is."""
    parts = []
    if (own := process.numbers.get("gpu_bytes")) is not None:
        parts.append(f"{bytes_text(own)} own")
    if gpu is not None:
        parts.append(f"{share_text(gpu['busy'])} busy")
    return f"{process.gpu}: {', '.join(parts)}" if parts else str(process.gpu)


def share_text(share: float | None) -> str:
    return "?" if share is None else f"{share:.0%}"


def memory_text(gpu: dict[str, Any]) -> str:
    """``41.2 GB of 150.1 GB``."""
    if gpu["used_bytes"] is None or gpu["total_bytes"] is None:
        return "?"
    return f"{bytes_text(gpu['used_bytes'])} of {bytes_text(gpu['total_bytes'])}"


def _done_text(process: "Process") -> str:
    if process.done is None:
        return ""
    if process.unit == "bytes":
        return bytes_text(process.done) + (f" of {bytes_text(process.total)}" if process.total is not None else "")
    return f"{process.done:,}{'' if process.total is None else f' of {process.total:,}'} {process.unit}".rstrip()


def number_text(name: str, value: float) -> str:
    """A number of a progress file as its name wants it: ``tokens=17.1K``, ``wait=3%``, ``eta=12m``, ``read=11.2 MB/s``."""
    for suffix, text in (
        ("_bytes_per_s", lambda: f"{bytes_text(value)}/s"),
        ("_per_s", lambda: f"{count_text(value) if value >= 10 else f'{value:.2g}'}/s"),
        ("_share", lambda: f"{value:.0%}"),
        ("_s", lambda: seconds_text(value)),
    ):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}={text()}"
    if name == "writer_queue":
        return f"to write={value:.0f}"
    if name.startswith("reader_queue"):
        return f"read ahead={bytes_text(value)}" if name.endswith("bytes") else f"batches ahead={value:.0f}"
    if name.endswith("bytes"):
        return f"{name}={bytes_text(value)}"
    return f"{name}={count_text(value) if float(value).is_integer() and 'loss' not in name else f'{value:.3g}'}"


@click.command()
@config_option
@click.option("--path", "path_only", is_flag=True, help="Print the folder only.")
@click.option(
    "--serve", is_flag=True, help="Serve a page that follows the run, to this machine only, until Ctrl-C; /metrics is for Prometheus."
)
@click.option("--port", type=click.IntRange(0, 65535), help="Of --serve; 8790 when left out, 0 takes a free one.")
def report(config: Path | None, path_only: bool, serve: bool, port: int | None) -> None:
    """Print the report of a finished run (and where its HTML page is), or --serve a live page of a running one."""
    from dflash_offline import keys
    from dflash_offline.layout import Layout

    run = load_run(config)
    if serve:
        _serve(run, port)
        return
    if port is not None:
        raise click.UsageError("--port goes with --serve")
    folder = finished_folder(run, Layout(run.root_dir).report(keys.report_key(run)), kind="report")
    if path_only:
        click.echo(folder)
        return
    click.echo((folder / "report.md").read_text(encoding="utf-8"), nl=False)
    click.echo(f"\n{folder / 'report.html'}")


def _serve(run: "RunConfig", port: int | None) -> None:
    import contextlib
    import signal
    import sys

    from dflash_offline.report.serving import PORT, Server, announced

    with Server(run, port=PORT if port is None else port) as server, announced(server):
        number = server.server_address[1]
        click.echo(f"{server.url} (Prometheus: {server.url}metrics), for this machine only; Ctrl-C ends it")
        click.echo(f"from another one: ssh -L {number}:127.0.0.1:{number} HOST, then open the same address there", err=True)
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)

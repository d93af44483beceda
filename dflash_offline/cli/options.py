"""What commands share: which run file, which store, and how results are printed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig

DEFAULT = Path("run.toml")
_EMBEDDED_SAID = f"{__name__}.embedded_said"

config_option = click.option(
    "--config", type=click.Path(path_type=Path), help="Run file; run.toml of this folder, or else the embedded one, when left out."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load_run(config: Path | None) -> "RunConfig":
    """The run file named, or ``run.toml`` of this folder, or the embedded one (said on stderr)."""
    from dflash_offline.config import EMBEDDED, RunConfig

    if config is None and not DEFAULT.exists():
        context = click.get_current_context(silent=True)
        said = {} if context is None else context.meta  # a command may ask for its run file more than once
        if not said.get(_EMBEDDED_SAID):
            click.echo("no run.toml in this folder: using the embedded run file (SmolLM2-135M on the CPU)", err=True)
            said[_EMBEDDED_SAID] = True
        return RunConfig.load(EMBEDDED)
    return RunConfig.load(config if config is not None else DEFAULT)


def store_path(store: Path | None, config: Path | None, *, damaged: bool = False) -> Path:
    """The store folder named (or one folder above it), or that of the run file.

    Args:
        damaged: accept a folder without ``zarr.json``, which may be what ``verify`` is to find.

    Raises:
        StoreError: there is no store at that place.
    """
    from dflash_offline.errors import StoreError

    if store is None:
        from dflash_offline import keys
        from dflash_offline.layout import Layout
        from dflash_offline.status import store_was_deleted

        run = load_run(config)
        path = Layout(run.root_dir).store(keys.capture_key(run))
        trained = [keys.train_key(each) for each in run.each_drafter()]
        if all(store_was_deleted(Layout(run.root_dir), keys.capture_key(run), key) for key in trained):
            raise StoreError(f"{path}: store deleted (the drafter is trained)")
        hint = f"nothing has been captured for {run.source.name} as it is now; run `luigi --module pipelines CaptureHiddenStates` first"
    else:
        path = store / "hidden_states.zarr" if (store / "hidden_states.zarr").is_dir() else store
        hint = "name a folder called hidden_states.zarr"
    if not ((path / "zarr.json").is_file() or (damaged and path.is_dir())):
        raise StoreError(f"{path}: no hidden-state store; {hint}")
    return path


# kind of a manifest -> what is missing without it, the task that makes it
_MAKERS = {"drafter": ("trained", "TrainDrafter"), "export": ("exported", "ExportDrafter"), "report": ("reported", "WriteReport")}


def finished_folder(run: "RunConfig", folder: Path, *, kind: str) -> Path:
    """The folder of a finished stage, given back once its manifest is read.

    Raises:
        DFlashError: the stage has not run for the run file as it is now, or its manifest was edited.
    """
    from dflash_offline.errors import DFlashError
    from dflash_offline.manifest import MANIFEST, read_manifest

    if not (folder / MANIFEST).is_file():
        done, task = _MAKERS[kind]
        raise DFlashError(f"{folder}: nothing {done} for {run.source.name} as it is now; run `luigi --module pipelines {task}` first")
    read_manifest(folder, kind=kind)
    return folder


class StoreLocation(click.ParamType):
    """A store's folder, or the URL of one in an object store, whose tables are then fetched."""

    name = "path or URL"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, str) and "://" in value:
            from dflash_offline.store import mirror

            return mirror(value)
        return Path(value)


def store_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """STORE as an optional option beside --config: ``--store PATH``."""
    option = click.option("--store", type=StoreLocation(), help="Store folder or URL; that of the run file when left out.")
    return option(config_option(command))


def echo_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=1, ensure_ascii=False))


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """Print a table. ``right`` names the columns that hold numbers. Piped, it is as wide as it needs to be."""
    import sys

    from rich.console import Console
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(made)

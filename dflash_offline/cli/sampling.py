"""``export-sample``: one sample of a store as a file for other programs."""

from pathlib import Path

import click

from dflash_offline.cli.options import echo_json, json_option, store_arguments, store_path
from dflash_offline.cli.showing import find_sample, layer_positions
from dflash_offline.figures import bytes_text


@click.command("export-sample")
@click.argument("sample")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@store_arguments
@json_option
@click.option("--layers", help="Layer ids, separated by commas; all captured ones when left out.")
def export_sample(sample: str, out: Path, store: Path | None, config: Path | None, as_json: bool, layers: str | None) -> None:
    """Write one SAMPLE (number, or start of its content hash) to OUT, a safetensors file: ids, mask, bfloat16 hidden states."""
    from dflash_offline import store as stores

    opened, positions = stores.HiddenStateStore(store_path(store, config)), None
    if layers is not None:
        positions = layer_positions(opened, layers)
    found = stores.export_sample(opened, find_sample(opened, sample), out, layers=positions)
    if as_json:
        echo_json(found)
    else:
        facts = found["metadata"]
        click.echo(f"{out}: sample {facts['number']} ({facts['part']}), layers {facts['layer_ids']}, {bytes_text(found['bytes'])}")

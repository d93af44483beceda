"""One sample of a store, or one conversation: ``show``; and which sample, and which layers, a command line means."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_offline.cli.options import echo_json, json_option, load_run, store_arguments, store_path, table
from dflash_offline.figures import counted

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig
    from dflash_offline.store import HiddenStateStore


def find_sample(store: "HiddenStateStore", which: str) -> int:
    """A sample's number, from its number or the first digits of its content hash.

    Raises:
        StoreError: there is none, or more than one.
    """
    from dflash_offline.errors import StoreError

    if not len(store):
        raise StoreError(f"{store.path}: holds no committed part yet; capture first")
    if which.lstrip("-").isdigit() and len(which) < 12:
        if not -len(store) <= int(which) < len(store):
            raise StoreError(f"sample {which}: the store has {counted(len(store), 'sample')}, numbered from 0")
        return int(which) % len(store)
    hits = [i for i, row in enumerate(store.hashes) if row.tobytes().hex().startswith(which.lower())]
    if len(hits) != 1:
        raise StoreError(f"sample {which!r}: {len(hits) or 'no'} samples have a content hash that starts like that")
    return hits[0]


def layer_positions(store: "HiddenStateStore", layers: str) -> list[int]:
    """Positions along the captured layers of what ``--layers`` names.

    Raises:
        StoreError: it names none, or one that was not captured.
    """
    from dflash_offline.errors import StoreError

    wanted = [layer.strip() for layer in layers.split(",")]
    if not all(layer.removeprefix("-").isdigit() or layer == "last" for layer in wanted):
        names = ", ".join(map(str, store.layer_names))
        raise StoreError(f"--layers {layers}: give layer ids separated by commas; captured are [{names}]")
    return store.positions([layer if layer == "last" else int(layer) for layer in wanted])


def _token_range(context: click.Context, parameter: click.Parameter, value: str | None) -> slice:
    if value is None:
        return slice(None)
    start, colon, stop = value.partition(":")
    try:
        first, last = int(start) if start else 0, (int(stop) if stop else None) if colon else int(start) + 1
        if first < 0 or (last is not None and last <= first):
            raise ValueError
        return slice(first, last)
    except ValueError:
        raise click.BadParameter(f"{value!r}: give a:b with a below b, a: or :b, counted in tokens from 0") from None


@click.command()
@click.argument("sample", required=False)
@store_arguments
@json_option
@click.option(
    "--corpus", "row", type=click.IntRange(min=0), help="Show this row of the corpus instead; needs no store, nor a prepared corpus."
)
@click.option("--layers", help="Layer ids, separated by commas; all captured ones when left out.")
@click.option("--tokens", callback=_token_range, help="Token range a:b; --json gives ids, mask and text of it alone.")
@click.option("--values", type=click.IntRange(min=0), default=4, show_default=True, help="First values shown of each layer.")
def show(
    sample: str | None,
    store: Path | None,
    config: Path | None,
    as_json: bool,
    row: int | None,
    layers: str | None,
    tokens: slice,
    values: int,
) -> None:
    """One SAMPLE (number, or start of its content hash): its text with the trained part marked, norms, first values.

    With --corpus N: conversation N before anything was captured, its trained part marked.
    """
    if (sample is None) == (row is None):
        raise click.UsageError("name a sample of the store, or a row of the corpus with --corpus N")
    if row is not None:
        if layers is not None or tokens != slice(None):
            raise click.UsageError("--layers and --tokens are about a sample of the store; --corpus shows the whole conversation")
        _show_conversation(load_run(config), row, as_json=as_json)
        return
    assert sample is not None
    from dflash_offline import store as stores
    from dflash_offline.errors import StoreError

    opened = stores.HiddenStateStore(store_path(store, config))
    number, positions = find_sample(opened, sample), None
    if layers is not None:
        positions = layer_positions(opened, layers)
    length = int(opened.lengths[number])
    if not range(length)[tokens]:
        raise StoreError(f"--tokens: sample {number} has {counted(length, 'token')}, numbered from 0; the range holds none of them")
    found = stores.details(opened, number, layers=positions, tokens=tokens, values=values)
    ids, mask = found["input_ids"][tokens], found["loss_mask"][tokens]
    runs = _text_runs(ids, mask, config)
    if as_json:
        first, last, _ = tokens.indices(length)
        text = None if runs is None else "".join(text for text, _ in runs)
        echo_json(found | {"num_tokens": length, "tokens": [first, last], "input_ids": ids, "loss_mask": mask, "text": text})
        return
    click.echo(
        f"sample {number} ({found['part']}, number {found['index']}), {counted(len(found['input_ids']), 'token')}, "
        f"{sum(found['loss_mask'])} trained on, bucket {found['bucket']}, hash {found['sha256'][:16]}\n"
    )
    shown = runs if runs is not None else [(f"{token} ", bool(trained)) for token, trained in zip(ids, mask, strict=True)]
    click.echo(_marked(shown) + "\n")
    rows = []
    for row in found["layers"]:
        norms = ["", "", ""] if row["rms"] is None else [f"{row['rms'][key]:.4g}" for key in ("min", "mean", "max")]
        rows.append([row["layer_id"], *norms, *(f"{value:.4g}" for value in row["values"])])
    width = max((len(row["values"]) for row in found["layers"]), default=0)
    columns = ["layer", "RMS min", "mean", "max", *[f"[{i}]" for i in range(width)]]
    table(None, columns, rows, right=range(len(columns)))


def _marked(runs: Sequence[tuple[str, bool]]) -> str:
    return "".join(click.style(f"\u00ab{text}\u00bb", fg="green") if trained else text for text, trained in runs)


def _show_conversation(run: "RunConfig", row: int, *, as_json: bool) -> None:
    from dflash_offline import corpus

    found = corpus.show(run, row)
    if as_json:
        echo_json({"origin": found.origin, "tokens": found.num_tokens, "supervised": found.num_supervised, "runs": found.runs})
        return
    notes = "".join(f", {note}" for note in found.notes)
    click.echo(f"row {row} ({found.origin}), {counted(found.num_tokens, 'token')}, {found.num_supervised:,} trained on{notes}\n")
    click.echo(_marked(found.runs))


def _text_runs(ids: list[int], mask: list[int], config: Path | None) -> list[tuple[str, bool]] | None:
    """Runs of (text, trained) with the run file's tokenizer; None where there is none (a store without its run file)."""
    from itertools import groupby

    from dflash_offline import identity
    from dflash_offline.errors import DFlashError

    try:
        tokenizer = _tokenizer(identity.model_folder(load_run(config)), ids)
    except DFlashError as error:
        click.echo(f"note: token ids instead of text ({error})", err=True)
        return None
    grouped = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [(tokenizer.decode([token for token, _ in pairs], skip_special_tokens=False), trained) for trained, pairs in grouped]


def _tokenizer(folder: Path, ids: Sequence[int]) -> Any:
    """What decodes these ids to the text that the folder's tokenizer in transformers does.

    Where it is a byte-level one, ``tokenizer.json`` says all about that, and importing transformers, which takes seconds,
    is not needed. Tokens that only ``tokenizer_config.json`` adds are transformers' business, as are other decoders, which
    it makes anew for some models.
    """
    from contextlib import suppress

    from tokenizers import Tokenizer, decoders

    with suppress(Exception):  # absent or damaged, of whatever type: load_tokenizer says it
        found = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if isinstance(found.decoder, decoders.ByteLevel) and all(found.id_to_token(token) is not None for token in set(ids)):
            return found
    from dflash_offline.target import load_tokenizer

    return load_tokenizer(folder)

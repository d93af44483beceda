"""Look into a store: ``inspect``, ``show``, ``stats``, ``verify``, ``diff``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_offline.cli.options import StoreLocation, echo_json, json_option, load_run, store_arguments, store_path, table
from dflash_offline.figures import bytes_text, counted, first_of

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig
    from dflash_offline.store import HiddenStateStore


_IDENTITY_TITLES = {"dtype": "computed in", "zstd": "zstd of codes"}  # the store itself is bfloat16 in any case
_PLOT_FORMATS = ("svg", "png", "pdf")


@click.command()
@store_arguments
@json_option
@click.option("--samples", "limit", type=click.IntRange(min=0), default=0, help="Also list so many samples.")
@click.option("--bucket", type=int, help="Of --samples, those in this bucket.")
@click.option("--min-tokens", type=int, default=0, help="Of --samples, those at least this long.")
@click.option("--max-tokens", type=int, help="Of --samples, those at most this long.")
@click.option("--part", help="Of --samples, those in this part.")
@click.option("--source", help="Of --samples, those whose conversation names this source; asks the corpus of the run file.")
def inspect(
    store: Path | None,
    config: Path | None,
    as_json: bool,
    limit: int,
    bucket: int | None,
    min_tokens: int,
    max_tokens: int | None,
    part: str | None,
    source: str | None,
) -> None:
    """What is in a store: samples, tokens, bytes, layers, arrays, identity. Reads no hidden states."""
    if not limit and (bucket, min_tokens, max_tokens, part, source) != (None, 0, None, None, None):
        raise click.UsageError("--bucket, --min-tokens, --max-tokens, --part and --source choose what --samples lists; give --samples N")
    from dflash_offline import store as stores
    from dflash_offline.errors import StoreError

    opened = stores.HiddenStateStore(store_path(store, config), verify="off")
    found = stores.summary(opened)
    listed: list[dict[str, Any]] = []
    if limit:
        for option, value, known in (
            ("--part", part, [name for name, _ in opened.part_sizes()]),
            ("--bucket", bucket, list(found.get("buckets", {}))),
        ):
            if value is not None and value not in known:
                raise StoreError(f"{option} {value}: not in {opened.path}; there are {first_of(known, 20)}")
        filters = {"bucket": bucket, "min_tokens": min_tokens, "max_tokens": max_tokens, "part": part}
        if source is not None:
            filters["among"] = of_source(opened, load_run(config), source)
        listed = stores.samples(opened, limit=limit, **filters)
    if as_json:
        echo_json(found | ({"sample_table": listed} if limit else {}))
        return
    rows = [[name, f"{found[name]:,}"] for name in ("samples", "tokens", "parts", "files")]
    rows.append(["bytes", f"{bytes_text(found['bytes'])} ({found['bytes']:,})"])
    if found["parts"]:
        rows.append(["bytes/token", f"{found['bytes_per_token']:,.0f}, {found['ratio']:.3f} of bfloat16"])
    rows += [[_IDENTITY_TITLES.get(name, name), _identity_text(value)] for name, value in found["identity"].items()]
    if found["url"]:
        rows.append(["kept at", found["url"]])
    rows += [["unfinished", name] for name in found["unfinished"]]
    table(found["path"], ["", ""], rows)
    if found["parts"]:
        click.echo()
        names = _layer_names(found["layer_ids"], found["num_taps"])
        rms = [[name, *(f"{found['rms'][key][k]:.3g}" for key in ("min", "mean", "max"))] for k, name in enumerate(names)]
        table("RMS of a token's vector", ["layer", "min", "mean", "max"], rms, right=range(4))
        click.echo()
        buckets = [[bucket, f"{row['samples']:,}", f"{row['tokens']:,}"] for bucket, row in found["buckets"].items()]
        table(None, ["bucket", "samples", "tokens"], buckets, right=range(3))
        click.echo()
        arrays = [
            [row["name"], row["dtype"], row["shape"], row["chunk"], row["shard"] or "", row["zstd"] or "", bytes_text(row["bytes"])]
            for row in found["arrays"]
        ]
        columns = ["array", "dtype", "shape in the first part", "chunk", "Zarr shard", "zstd", "bytes, all parts"]
        table(None, columns, arrays, right=(6,))
    if limit and not listed:
        click.echo("\nno sample is like that")
    elif limit:
        click.echo()
        fields = ("number", "part", "tokens", "supervised", "bucket", "sample_id", "sha256")
        listed_rows = [[row[name][:16] if name == "sha256" else row[name] for name in fields] for row in listed]
        table(None, ["sample", "part", "tokens", "supervised", "bucket", "corpus row", "hash"], listed_rows, right=(0, 2, 3, 4, 5))
    for note in found["notes"]:
        click.echo(f"note: {note}")


def _identity_text(value: Any) -> Any:
    """A file is a list of its bytes and a digest in a store's identity."""
    match value:
        case [int() as size, str() as digest]:
            return f"{bytes_text(size)}, {digest}"
    return value


def _layer_names(layer_ids: Sequence[int], num_taps: int) -> list[str]:
    return [*map(str, layer_ids), *["last"] * (num_taps - len(layer_ids))]


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


def of_source(store: "HiddenStateStore", run: "RunConfig", source: str) -> Any:
    """Which samples are conversations of this source in the run file's corpus: bool [n].

    Raises:
        StoreError: the corpus names no such source.
        CorpusError: it is not prepared.
    """
    import numpy as np

    from dflash_offline import keys
    from dflash_offline.corpus import Corpus
    from dflash_offline.errors import StoreError
    from dflash_offline.layout import Layout

    corpus = Corpus.open(Layout(run.root_dir).corpus(keys.corpus_key(run)))
    if source not in corpus.sources:
        known = ", ".join(sorted(corpus.sources)[:20]) or "none; its conversations have no field `source`"
        raise StoreError(f"--source {source}: not in the corpus of {run.source.name}; there are {known}")
    rows = np.ascontiguousarray(corpus.hashes[np.asarray(corpus.source_index) == corpus.sources.index(source)])
    return np.isin(np.ascontiguousarray(store.hashes).view("V32").ravel(), rows.view("V32").ravel())


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


def _plot_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A file that a plot can be written to; said before the store is read, which may take minutes."""
    from dflash_offline.errors import DFlashError

    if value is not None and value.suffix.lower().removeprefix(".") not in _PLOT_FORMATS:
        raise DFlashError(f"--plot {value}: a plot is written as {', '.join(_PLOT_FORMATS)}; let the file's name end in one of them")
    if value is not None and not value.parent.is_dir():
        raise DFlashError(f"--plot {value}: there is no folder {value.parent}; make it first")
    return value


@click.command()
@store_arguments
@json_option
@click.option("--rows", type=click.IntRange(min=1), default=16, show_default=True, help="Samples read.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_plot_file,
    is_eager=True,  # before a store's tables are fetched
    help=f"Also write a plot ({', '.join(_PLOT_FORMATS)}).",
)
def stats(store: Path | None, config: Path | None, as_json: bool, rows: int, plot: Path | None) -> None:
    """Norms, outlier channels, non-finite values of each layer, and how alike the tapped layers are."""
    from dflash_offline import store as stores

    found = stores.stats(store_path(store, config), num_samples=rows)
    if plot is not None:
        from dflash_offline.report.plots import store_figure

        store_figure(found, plot)
    if as_json:
        echo_json(found)
    else:
        click.echo(
            f"{counted(len(found['samples']), 'sample')}, {counted(found['tokens'], 'token')}, "
            f"{found['not_finite']:,} values that are not finite\n"
        )
        lines = []
        for row in found["layers"]:
            channels = ", ".join(f"{c['channel']} ({c['share_of_energy']:.0%})" for c in row["outlier_channels"][:4])
            lines.append([row["layer_id"], *(f"{row['rms'][name]:.4g}" for name in ("min", "mean", "max")), channels])
        table(None, ["layer", "RMS min", "mean", "max", "channels with most of the energy"], lines, right=range(4))
        click.echo()
        names = [str(row["layer_id"]) for row in found["layers"]]
        alike = [[name, *(f"{value:.3f}" for value in row)] for name, row in zip(names, found["similarity"], strict=True)]
        table("mean cosine between tapped layers", ["", *names], alike, right=range(1, len(names) + 1))
    if found["not_finite"]:
        raise SystemExit(1)


@click.command()
@store_arguments
@json_option
@click.option("--quick", is_flag=True, help="Compare names and sizes only, not contents.")
@click.option("--values", is_flag=True, help="Also decode every row: finds what was wrong before it was written.")
@click.option("--rebuild-index", is_flag=True, help="First make a lost or damaged index.json anew from the parts that are whole.")
def verify(store: Path | None, config: Path | None, as_json: bool, quick: bool, values: bool, rebuild_index: bool) -> None:
    """Check every byte of a store against its manifests. Exit status 1 and the part's name where something is wrong."""
    from dflash_offline import store as stores

    path = store_path(store, config, damaged=True)
    if rebuild_index:
        parts = stores.rebuild_index(path)
        click.echo(f"{path}: index made anew from {counted(len(parts), 'part that is whole', plural='parts that are whole')}", err=as_json)
    checked: list[int] = []  # bytes of the parts so far, after each of them
    problems = stores.verify(path, deep=not quick, values=values, progress=lambda done, total: checked.append(done))
    count, size = len(checked), (checked or [0])[-1]
    if as_json:
        listed = [{"part": p.part, "file": p.file, "text": p.text, "samples": p.samples} for p in problems]
        known = size if size or not count else None  # the sizes are in index.json, which may be what is damaged
        echo_json({"path": str(path), "parts": count, "bytes": known, "problems": listed})
    else:
        for problem in problems:
            click.echo(str(problem))
        if not problems:
            how = " (names and sizes)" if quick else ""
            click.echo(f"{path}: {counted(count, 'part')}, {bytes_text(size)}, all as their manifests say{how}")
    if problems:
        raise SystemExit(1)


@click.command()
@click.argument("one", type=StoreLocation())
@click.argument("other", type=StoreLocation())
@json_option
@click.option("--rows", type=click.IntRange(min=1), default=16, show_default=True, help="Shared samples whose values are compared.")
def diff(one: Path, other: Path, as_json: bool, rows: int) -> None:
    """How two stores differ: identity, rows, and values of rows they share. Exit status 1 if they differ."""
    from dflash_offline import store as stores

    found = stores.diff(store_path(one, None), store_path(other, None), num_samples=rows)
    if as_json:
        echo_json(found)
    else:
        for name, (first, second) in found["identity"].items():
            click.echo(f"{name}: {first!r} and {second!r}")
        (a, b), (only_a, only_b) = found["samples"], found["num_only_in"]
        click.echo(f"samples: {a:,} and {b:,}; {found['common']:,} in both, {only_a:,} only in the first, {only_b:,} only in the second")
        if found["relative_l2"] is not None:
            names = [name if name == "last" else f"layer {name}" for name in found["layer_ids"]]
            errors = ", ".join(f"{name}: {value:.2g}" for name, value in zip(names, found["relative_l2"], strict=True))
            compared, equal = f"{found['compared']:,} of {found['common']:,} shared samples compared", found["equal"]
            same = "all equal" if equal == found["compared"] else f"{equal:,} equal"
            click.echo(f"values: {compared}, {same}; relative L2: {errors}")
    if found["identity"] or any(found["num_only_in"]) or found.get("equal") != found.get("compared"):
        raise SystemExit(1)

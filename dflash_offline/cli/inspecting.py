"""Look into a store: ``inspect``, ``stats``, ``verify``, ``diff``."""

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

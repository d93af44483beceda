"""Look into a store: ``inspect``, ``show``, ``stats``, ``verify``, ``diff``."""

from pathlib import Path
from typing import Any

import click

from dflash_offline.cli.options import bytes_text, echo_json, json_option, load_run, store_arguments, store_path, table


@click.command()
@store_arguments
@json_option
@click.option("--samples", "limit", type=click.IntRange(min=0), default=0, help="Also list so many samples.")
@click.option("--bucket", type=int, help="Of --samples, those in this bucket.")
@click.option("--min-tokens", type=int, default=0, help="Of --samples, those at least this long.")
@click.option("--max-tokens", type=int, help="Of --samples, those at most this long.")
def inspect(
    store: Path | None, config: Path | None, as_json: bool, limit: int, bucket: int | None, min_tokens: int, max_tokens: int | None
) -> None:
    """What is in a store: samples, tokens, bytes, layers, arrays, identity. Reads no hidden states."""
    from dflash_offline.inspection import describe, samples_table

    path = store_path(store, config)
    found = describe(path)
    listed = samples_table(path, bucket=bucket, shortest=min_tokens, longest=max_tokens, limit=limit) if limit else []
    if as_json:
        echo_json(found | ({"sample_table": listed} if limit else {}))
        return
    rows = [
        ["samples", f"{found['samples']:,}"],
        ["tokens", f"{found['tokens']:,}"],
        ["parts", f"{len(found['parts']):,}"],
        ["bytes", f"{bytes_text(found['bytes'])} ({found['bytes']:,})"],
    ]
    if found["parts"]:
        rows.append(["bytes/token", f"{found['bytes_per_token']:,.0f}, {found['ratio_to_bf16']:.3f} of bfloat16"])
        rows.append(["codec", found["codec"]])
    rows += [[name, value] for name, value in found["identity"].items() if name not in ("codec",)]
    rows += [["unfinished", name] for name in found["parts_unfinished"]] + [["MISSING", name] for name in found["parts_missing"]]
    table(str(path), ["", ""], rows)
    if found["parts"]:
        click.echo()
        layers = [[row["layer"], f"{row['rms_min']:.3g}", f"{row['rms_mean']:.3g}", f"{row['rms_max']:.3g}"] for row in found["layers"]]
        table("RMS of a token's vector", ["layer", "min", "mean", "max"], layers, right=(0, 1, 2, 3))
        click.echo()
        columns = ["bucket", "samples", "tokens", "shortest", "longest"]
        table(None, columns, [[f"{row[column]:,}" for column in columns] for row in found["buckets"]], right=range(5))
        click.echo()
        arrays = [
            [row["name"], row["dtype"], row["shape"], row["chunk"], row["shard"] or "", " ".join(row["codecs"])] for row in found["arrays"]
        ]
        table("arrays of the first part", ["name", "dtype", "shape", "chunk", "Zarr shard", "codecs"], arrays)
    if limit:
        click.echo()
        table(None, ["sample", "part", "tokens", "bucket", "row", "hash"], [list(row.values()) for row in listed], right=(0, 2, 3, 4))


def _token_range(context: click.Context, parameter: click.Parameter, value: str | None) -> slice:
    if value is None:
        return slice(None)
    start, colon, stop = value.partition(":")
    try:
        return slice(int(start) if start else None, (int(stop) if stop else None) if colon else int(start) + 1)
    except ValueError:
        raise click.BadParameter(f"{value!r}: give a:b, a: or :b, counted in tokens from 0") from None


@click.command()
@click.argument("sample")
@store_arguments
@json_option
@click.option("--layers", help="Layer ids, separated by commas; all captured ones when left out.")
@click.option("--tokens", callback=_token_range, help="Token range a:b.")
@click.option("--values", type=click.IntRange(min=0), default=4, show_default=True, help="First values shown of each layer.")
def show(sample: str, store: Path | None, config: Path | None, as_json: bool, layers: str | None, tokens: slice, values: int) -> None:
    """One SAMPLE (number, or start of its content hash): its text with the trained part marked, norms, first values."""
    from dflash_offline.errors import StoreError
    from dflash_offline.inspection import find_sample
    from dflash_offline.store import HiddenStateStore

    opened = HiddenStateStore(store_path(store, config))
    found = find_sample(opened, sample)
    if layers is None:
        positions = list(range(opened.num_taps))
    else:
        try:
            positions = opened.positions([int(layer) for layer in layers.split(",")])
        except ValueError:
            raise StoreError(f"--layers {layers}: give layer ids separated by commas; captured are {opened.layer_ids}") from None
    names: list[Any] = [*opened.layer_ids, *["last"] * (opened.num_taps - len(opened.layer_ids))]
    states = found.hidden_states(layers=positions, tokens=tokens).float()  # [t, k, H]
    rms = states.square().mean(2).sqrt()
    pieces = _pieces(found.input_ids[tokens], config)
    mask = found.loss_mask[tokens]
    per_layer = [
        {
            "layer": names[position],
            "rms_mean": float(rms[:, k].mean()) if len(rms) else None,
            "rms_max": float(rms[:, k].max()) if len(rms) else None,
            "first_values": states[0, k, :values].tolist() if len(states) else [],
        }
        for k, position in enumerate(positions)
    ]
    if as_json:
        head = {"sample": found.number, "part": found.part, "index": found.index, "hash": found.sha256.hex(), "bucket": found.bucket}
        text = None if pieces is None else "".join(pieces)
        ids = {"input_ids": found.input_ids[tokens].tolist(), "loss_mask": mask.tolist(), "text": text}
        echo_json(head | {"tokens": len(found)} | ids | {"layers": per_layer})
        return
    click.echo(
        f"sample {found.number} ({found.part}, number {found.index}), {len(found)} tokens, {int(found.loss_mask.sum())} trained on, "
        f"bucket {found.bucket}, hash {found.sha256.hex()[:16]}"
    )
    click.echo()
    click.echo(_marked(pieces if pieces is not None else [f"{token} " for token in found.input_ids[tokens]], mask))
    click.echo()
    rows = [
        [
            row["layer"],
            *(f"{row[name]:.4g}" if row[name] is not None else "" for name in ("rms_mean", "rms_max")),
            *(f"{v:.4g}" for v in row["first_values"]),
        ]
        for row in per_layer
    ]
    width = max((len(row["first_values"]) for row in per_layer), default=0)
    columns = ["layer", "RMS mean", "RMS max", *[f"[{i}]" for i in range(width)]]
    table(None, columns, rows, right=range(len(columns)))


def _pieces(ids: Any, config: Path | None) -> list[str] | None:
    """Text of each token with the run file's tokenizer; None where there is none (a store without its run file)."""
    from dflash_offline import identity
    from dflash_offline.errors import DFlashError
    from dflash_offline.target import load_tokenizer

    try:
        tokenizer = load_tokenizer(identity.target_folder(load_run(config)))
    except DFlashError as error:
        click.echo(f"note: token ids instead of text ({error})", err=True)
        return None
    # decoded as a whole and cut up again, so that characters of several tokens and leading spaces come out right
    pieces, before = [], ""
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        held_back = whole.endswith("\ufffd") and end < len(ids)
        pieces.append("" if held_back else whole[len(before) :])
        before = before if held_back else whole
    return pieces


def _marked(pieces: list[str], mask: Any) -> str:
    """Trained spans between guillemets, and green on a terminal."""
    text, inside = "", False
    for piece, trained in zip(pieces, mask, strict=True):
        if bool(trained) != inside:
            text += "\u00ab" if trained else "\u00bb"
            inside = bool(trained)
        text += click.style(piece, fg="green") if trained else piece
    return text + ("\u00bb" if inside else "")


@click.command()
@store_arguments
@json_option
@click.option("--rows", type=click.IntRange(min=1), default=64, show_default=True, help="Samples read.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also write a plot (svg, png, pdf).")
def stats(store: Path | None, config: Path | None, as_json: bool, rows: int, plot: Path | None) -> None:
    """Norms, outlier channels, non-finite values of each layer, and how alike the tapped layers are."""
    from dflash_offline.inspection import statistics
    from dflash_offline.store import HiddenStateStore

    found = statistics(HiddenStateStore(store_path(store, config)), rows=rows)
    if plot is not None:
        from dflash_offline.report.plots import store_figure

        store_figure(found, plot)
    if as_json:
        echo_json(found)
        return
    click.echo(f"{found['samples']} samples, {found['tokens']:,} tokens")
    names = ("rms_median", "rms_mean", "rms_max", "rms_first_token", "abs_max")
    lines = []
    for row in found["layers"]:
        channels = ", ".join(f"{c['channel']} ({c['energy_share']:.0%})" for c in row["outlier_channels"])
        lines.append([row["layer"], *(f"{row[name]:.4g}" for name in names), row["non_finite"], channels])
    columns = ["layer", "RMS median", "mean", "max", "first token", "largest value", "not finite", "channels with most energy"]
    table(None, columns, lines, right=range(7))
    click.echo()
    layers = [str(row["layer"]) for row in found["layers"]]
    table(
        "mean cosine between tapped layers",
        ["", *layers],
        [[layer, *(f"{v:.3f}" for v in row)] for layer, row in zip(layers, found["similarity"], strict=True)],
    )
    if any(row["non_finite"] for row in found["layers"]):
        raise SystemExit(1)


@click.command()
@store_arguments
@json_option
@click.option("--quick", is_flag=True, help="Compare sizes only, not contents.")
def verify(store: Path | None, config: Path | None, as_json: bool, quick: bool) -> None:
    """Check every byte of a store against its manifests. Exit status 1 and the part's name where something is wrong."""
    from dflash_offline.inspection import check, read_index

    path = store_path(store, config)
    problems = check(path, deep=not quick)
    if as_json:
        echo_json({"path": str(path), "problems": problems})
    else:
        for problem in problems:
            click.echo(problem)
        if not problems:
            parts = read_index(path)["parts"]
            size = sum(part["bytes"] for part in parts.values())
            click.echo(f"{path}: {len(parts)} parts, {bytes_text(size)}, all as their manifests say{' (sizes only)' if quick else ''}")
    if problems:
        raise SystemExit(1)


@click.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@json_option
@click.option("--rows", type=click.IntRange(min=1), default=32, show_default=True, help="Shared samples whose values are compared.")
def diff(one: Path, other: Path, as_json: bool, rows: int) -> None:
    """How two stores differ: identity, rows, and values of rows they share. Exit status 1 if they differ."""
    from dflash_offline.inspection import difference
    from dflash_offline.store import HiddenStateStore

    found = difference(HiddenStateStore(store_path(one, None)), HiddenStateStore(store_path(other, None)), rows=rows)
    if as_json:
        echo_json(found)
    else:
        for name, (first, second) in found["identity"].items():
            click.echo(f"{name}: {first!r} and {second!r}")
        a, b = found["samples"]
        click.echo(
            f"samples: {a:,} and {b:,}; {found['shared']:,} in both, {found['only_in_first']:,} only in the first, {found['only_in_second']:,} only in the second"
        )
        rows_ = [[row["layer"], f"{row['relative_l2']:.3g}", f"{row['largest']:.3g}"] for row in found["layers"]]
        if rows_:
            table(f"values of {found['compared']} shared samples", ["layer", "relative L2", "largest difference"], rows_, right=(0, 1, 2))
    if found["identity"] or found["only_in_first"] or found["only_in_second"] or any(row["largest"] for row in found["layers"]):
        raise SystemExit(1)

"""``doctor`` looks at the machine, ``plan`` at what a run will cost, before any GPU second."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_offline.cli.options import config_option, echo_json, json_option, load_run, table
from dflash_offline.figures import bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from dflash_offline.estimate import Estimate


@click.command()
@config_option
@json_option
def doctor(config: Path | None, as_json: bool) -> None:
    """Is this machine fit for the run? Every line is ok, warn or fail, with what to do."""
    from dflash_offline.doctor import examine

    checks = examine(load_run(config))
    if as_json:
        echo_json([dataclasses.asdict(check) for check in checks])
    else:
        table(None, ["", "", "found", "what to do"], [[check.level, check.name, check.found, check.advice] for check in checks])
    if any(check.level == "fail" for check in checks):
        raise SystemExit(1)


class _Rate(click.FloatRange):
    """A number above 0; neither infinite nor nan, which passes every comparison of a range."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        rate = float(super().convert(value, param, ctx))
        if not math.isfinite(rate):
            self.fail(f"{value} is no rate; give a number above 0.", param, ctx)
        return rate


@click.command()
@config_option
@json_option
@click.option("--sample", type=click.IntRange(min=1), default=2000, show_default=True, help="Conversations tokenised for the estimate.")
@click.option("--capture-tokens-per-s", type=_Rate(), help="Rate of one replica; measured parts of this root when left out.")
@click.option(
    "--train-tokens-per-s", type=_Rate(), help="Rate of all ranks of a drafter together; the last run of this root when left out."
)
@click.option("--force", is_flag=True, help="Exit with 0 even if the disk is too small.")
def plan(
    config: Path | None,
    as_json: bool,
    sample: int,
    capture_tokens_per_s: float | None,
    train_tokens_per_s: float | None,
    force: bool,
) -> None:
    """Samples, tokens, parts, bytes by codec, time, GPU memory and free disk, before any GPU second.

    Exit status 1 when the store cannot fit on the disk, another root writes into it, or no conversation can be used.
    """
    from dflash_offline.corpus import none_heldout, peek
    from dflash_offline.errors import CorpusError, DFlashError, StoreError, StoreFullError
    from dflash_offline.estimate import estimate
    from dflash_offline.inputs import take_stdin
    from dflash_offline.sharing import refusal

    run = load_run(config)
    take_stdin(run, lambda text: click.echo(text, err=True))
    found = estimate(run, sample=sample, capture_tokens_per_s=capture_tokens_per_s, train_tokens_per_s=train_tokens_per_s)
    if not found.rows:
        among = f" among the {counted(found.rows_read, 'row')} read" if found.rows_read else ""
        where = "[regenerate] prompts" if run.regenerates else "[corpus] files"
        why = peek(run, sample).why_none
        raise CorpusError(
            f"{run.source.name}: no conversation can be trained on{among}: {why}; mend the rows, or name other files in {where}"
        )
    if run.corpus.heldout_fraction == 0 or found.rows == 1:
        found.warnings.append(none_heldout(run))
    if as_json:
        echo_json(found.to_dict())
    else:
        rows = [
            ["conversations", f"{found.rows:,}{_rows_read(found)}"],
            ["tokens", f"{found.tokens:,}, {found.supervised_tokens:,} supervised"],
            ["already captured", counted(found.captured_rows, "conversation")],
            *_still_to_write(found, run.store.codec),
            ["free disk", f"{bytes_text(found.free_bytes)} on {found.disk}"],
            *([["GPU memory, a replica", f"about {bytes_text(found.replica_bytes)}"]] if run.target.gpus != "cpu" else []),
            *([["GPU memory, a rank", f"about {bytes_text(found.rank_bytes)}"]] if run.train.gpus != "cpu" else []),
            ["capture", _duration(found.capture_s, found.idle_capture_gpu_h, "--capture-tokens-per-s")],
            ["training", _duration(found.train_s, found.idle_train_gpu_h, "--train-tokens-per-s")],
        ]
        table(f"{run.source}", ["", ""], rows)
        for warning in found.warnings:
            click.echo(f"note: {warning}")
    refused = None
    with contextlib.suppress(DFlashError):  # without the target's weights no key is known
        refused = refusal(run)
    if refused is not None:
        raise StoreError(refused)
    if not found.fits and not force:
        raise StoreFullError(
            f"{found.disk}: the store needs {bytes_text(found.needed_bytes)} more and {bytes_text(found.free_bytes)} are free; make space, "
            "choose another root, a smaller codec or fewer layers, or use --force"
        )


def _rows_read(found: "Estimate") -> str:
    """What the number of conversations was made from, and how many rows are not among them."""
    notes = [] if found.is_exact else [f"estimated from {found.rows_read:,} rows"]
    if found.rows_rejected:
        notes.append(f"{found.rows_rejected:,} of {counted(found.rows_read, 'row')} cannot be used; preparing the corpus names them")
    return f" ({'; '.join(notes)})" if notes else ""


def _still_to_write(found: "Estimate", codec: str) -> list[list[str]]:
    """Rows on what capture has left to do."""
    if not found.tokens_to_capture:
        return [["still to write", "nothing"]]
    parts = f"{'' if found.is_exact else 'about '}{counted(found.parts, 'part')}"
    title = "still to write as" if found.captured_rows else "store as"
    sizes = found.bytes_by_codec.items()
    return [
        ["still to capture", f"{found.tokens_to_capture:,} tokens in {parts}"],
        *[[f"{title} {name}", f"{bytes_text(size)}{'  <- [store] codec' if name == codec else ''}"] for name, size in sizes],
    ]


def _duration(seconds: float | None, idle_gpu_h: float | None, option: str) -> str:
    if seconds is None:
        return f"no rate measured yet; give {option}"
    return seconds_text(seconds) + (f", {idle_gpu_h:.1f} GPU hours idle meanwhile" if idle_gpu_h else "")

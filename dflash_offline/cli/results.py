"""Use what was trained: ``export`` it, ``evaluate`` it on prompts, ``generate`` text with it."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_offline.cli.options import config_option, echo_json, finished_folder, json_option, load_run
from dflash_offline.figures import counted, finite

if TYPE_CHECKING:
    from dflash_offline.config import RunConfig


class DeviceName(click.ParamType):
    """The devices that a model can run on here."""

    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", value):
            self.fail(f"{value!r}: give cpu, cuda or cuda:N", param, ctx)
        return value


class Temperature(click.FloatRange):
    """A number from 0; neither infinite nor nan, which passes every comparison of a range."""

    name = "temperature"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is no temperature; give a number from 0.", param, ctx)
        return found


_temperature_option = click.option("--temperature", type=Temperature(), default=0.0, show_default=True, help="0 is greedy.")
_seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the sampling.")
_device_option = click.option(
    "--device", type=DeviceName(), help="cpu, cuda or cuda:N; a GPU where [evaluate] or [train] names one, when left out."
)
_drafter_option = click.option(
    "--drafter", metavar="NAME|DIR", help="Name in [[drafters]], or an exported drafter, ours or another's; the run's own when left out."
)


@click.command()
@config_option
@click.option("--format", "form", type=click.Choice(["zlab", "speculators"]), help="Form to write; [export] formats when left out.")
@click.option("--drafter", metavar="NAME", help="Which of [[drafters]], where the run file has several.")
@click.option("--step", type=int, help="Export the checkpoint of this step.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Convert this exported folder, byte for byte (or write what train --partial made).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to; a folder named by the form is made in it (not with --from). The run's own place when left out.",
)
def export(config: Path | None, form: str | None, drafter: str | None, step: int | None, source: Path | None, output: Path | None) -> None:
    """Write the drafter in the form that servers load, and check what was written."""
    if (step is not None or form is not None or source is not None) and output is None:
        raise click.UsageError("name a folder with --output DIR: the run's own export is what the run file says")
    run = load_run(config)
    if output is not None and _in_the_run(output, run):
        raise click.UsageError(f"--output {output} lies in the run's own root {run.root_dir}; name a folder outside it")
    if source is not None:
        if form is None or step is not None or drafter is not None:
            raise click.UsageError("--from needs --format, and takes neither --step nor --drafter")
        _convert(source, output, form, run)
        return
    from dflash_offline import keys
    from dflash_offline.export import export as run_export
    from dflash_offline.layout import Layout
    from dflash_offline.progress import Progress

    run = run if drafter is None else run.for_drafter(drafter)
    key = keys.export_key(run)
    if step is None:
        finished_folder(run, Layout(run.root_dir).drafter(keys.train_key(run)), kind="drafter")
    if form is not None:
        run = run.model_copy(update={"export": run.export.model_copy(update={"formats": [form]})})
    for folder in run_export(run, key, Progress(None), step=step, folder=output):
        click.echo(folder)


def _in_the_run(output: Path, run: "RunConfig") -> bool:
    """Whether a folder lies in the root; where the run file lies there too (root "."), in a folder of a stage."""
    from dflash_offline.tidy import STAGE_FOLDERS

    root, output = run.root_dir.resolve(), output.resolve()
    if run.source.resolve().is_relative_to(root):
        return any(output.is_relative_to(root / name) for name in STAGE_FOLDERS)
    return output.is_relative_to(root)


def _convert(source: Path, output: Path | None, form: Any, run: "RunConfig") -> None:
    from dflash_offline.export import convert
    from dflash_offline.export.stage import target_info
    from dflash_offline.target import facts

    assert output is not None
    folder = _target_folder(run)
    checks = convert(source, output, form=form, target=target_info(run, folder), num_target_layers=facts(folder).num_layers)
    click.echo(f"{output}: {len(checks)} of {len(checks)} conformance checks passed")


def _target_folder(run: "RunConfig") -> Path:
    from dflash_offline import identity

    return identity.model_folder(run)


def _device(run: "RunConfig", device: str | None) -> str:
    """``--device``, or the first GPU that the run file names for evaluation (its number among the visible ones), or the CPU."""
    if device is not None:
        return device
    gpus = run.evaluation_gpus
    return "cpu" if gpus == "cpu" else "cuda:0" if gpus == "all" else f"cuda:{gpus[0]}"


def _chosen(run: "RunConfig", drafter: str | None) -> tuple["RunConfig", Path]:
    """The run file as the drafter has it, and the folder of its export: of one of [[drafters]], of a folder, or the run's own.

    Raises:
        ConfigError: there is no such drafter, or several to choose from.
    """
    if drafter is not None and drafter not in run.drafter_names and Path(drafter).is_dir():
        return run, Path(drafter)
    if drafter is not None and not run.drafters:
        raise click.UsageError(f"--drafter {drafter}: no such folder, and the run file has no [[drafters]]")
    run = run if drafter is None else run.for_drafter(drafter)
    return run, _exported(run)


def _exported(run: "RunConfig") -> Path:
    """The run's own export."""
    from dflash_offline import keys
    from dflash_offline.layout import Layout
    from dflash_offline.manifest import read_manifest

    folder = finished_folder(run, Layout(run.root_dir).export(keys.export_key(run)), kind="export")
    return folder / read_manifest(folder, kind="export")["formats"][0]


@click.command()
@click.argument("prompts", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@config_option
@_drafter_option
@_device_option
@click.option("--max-prompts", type=click.IntRange(min=1), help="Most prompts of each file; [evaluate] max_prompts when left out.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens of one turn; [evaluate] max_new_tokens when left out.")
@click.option("--batch", type=click.IntRange(min=1), help="Prompts decoded at once; [evaluate] batch when left out.")
@_temperature_option
@_seed_option
@click.option("--no-baseline", is_flag=True, help="Do not run the target alone: no speed-up, no check of the text.")
@json_option
def evaluate(
    prompts: tuple[Path, ...],
    config: Path | None,
    drafter: str | None,
    device: str | None,
    max_prompts: int | None,
    max_new_tokens: int | None,
    batch: int | None,
    temperature: float,
    seed: int,
    no_baseline: bool,
    as_json: bool,
) -> None:
    """Draft and verify on PROMPTS files (any format [corpus] reads): acceptance length, speed, and that the text is the target's own."""
    from dflash_offline.evaluate import evaluate_folder
    from dflash_offline.progress import Progress

    class Told(Progress):
        """Tells on stderr when stdout is for JSON."""

        def say(self, text: str) -> None:
            click.echo(text, err=as_json)

    (run, exported), progress = _chosen(load_run(config), drafter), Told(None)
    template = run.path(run.corpus.chat_template) if run.corpus.chat_template else None
    found = evaluate_folder(
        _target_folder(run),
        exported,
        list(prompts) or run.evaluation_prompts(),
        device=_device(run, device),
        max_prompts=max_prompts or run.evaluate.max_prompts,
        max_new_tokens=max_new_tokens or run.evaluate.max_new_tokens,
        baseline=not no_baseline,
        batch=batch or run.evaluate.batch,
        temperature=temperature,
        seed=seed,
        chat_template_kwargs=run.corpus.chat_template_kwargs,
        chat_template=template,
        trust_remote_code=run.target.trust_remote_code,
        say=progress.say,
        progress=progress,
    )
    if as_json:
        echo_json(finite(found))


@click.command()
@click.argument("prompt")
@config_option
@_drafter_option
@_device_option
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most tokens of the answer.")
@_temperature_option
@_seed_option
def generate(
    prompt: str, config: Path | None, drafter: str | None, device: str | None, max_new_tokens: int, temperature: float, seed: int
) -> None:
    """Stream an answer to PROMPT. Green: drafted and accepted; plain (or between guillemets in a pipe): the target's own."""
    import sys

    import torch

    from dflash_offline.evaluate import Response, load_decoder
    from dflash_offline.evaluate import generate as stream
    from dflash_offline.export import read_drafter
    from dflash_offline.target import facts, load_tokenizer

    run, exported = _chosen(load_run(config), drafter)
    folder, chosen = _target_folder(run), torch.device(_device(run, device))
    template = run.path(run.corpus.chat_template) if run.corpus.chat_template else None
    read = read_drafter(exported, num_target_layers=facts(folder).num_layers)
    decoder = load_decoder(
        folder,
        read.shape,
        read.tensors,
        device=chosen,
        dtype=torch.float32 if chosen.type == "cpu" else torch.bfloat16,
        trust_remote_code=run.target.trust_remote_code,
        where=str(read.folder),
    )
    response, colours = Response(), sys.stdout.isatty()
    runs = stream(
        decoder,
        load_tokenizer(folder, template),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        chat_template_kwargs=run.corpus.chat_template_kwargs,
        into=response,
    )
    for piece in runs:
        text = click.style(piece.text, fg="green") if piece.drafted else piece.text if colours else f"\u00ab{piece.text}\u00bb"
        click.echo(text, nl=False)
    length = response.step_tokens / response.steps if response.steps else math.nan
    told = f"{counted(len(response.tokens), 'token')} in {counted(response.steps, 'step')}: {length:.2f} a step"
    click.echo(f"\n\n{told} (the first comes from the prompt)", err=True)

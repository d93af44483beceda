"""The evaluation of a run (``python -m dflash_offline.evaluate``), and of any exported drafter."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.drafter import DrafterShape
from dflash_offline.evaluate.heldout import HeldoutRow, tau_replay
from dflash_offline.evaluate.loading import load_decoder
from dflash_offline.evaluate.run import Loop, Say, require_lossless, run_dataset
from dflash_offline.evaluate.summary import number, overall, table
from dflash_offline.export.reading import read_drafter
from dflash_offline.export.stage import load_trained, renew_cards
from dflash_offline.figures import counted
from dflash_offline.layout import Layout
from dflash_offline.manifest import read_json, write_json, write_manifest
from dflash_offline.precision import DTYPES
from dflash_offline.progress import Progress
from dflash_offline.prompts import read_data_sets
from dflash_offline.target import facts, load_tokenizer

RESULTS = "results.json"


def precision(config: RunConfig, device: torch.device) -> torch.dtype:
    """``[evaluate] dtype``, else that of [target]; float32 on a CPU, where bfloat16 is slower and no more faithful."""
    if config.evaluate.dtype is not None:
        return DTYPES[config.evaluate.dtype]
    return torch.float32 if device.type == "cpu" else DTYPES[config.target.dtype]


def stage_device(config: RunConfig) -> torch.device:
    """The CPU, or the one GPU this process was given."""
    gpus = config.evaluation_gpus
    return torch.device("cpu" if gpus == "cpu" else "cuda:0")


def evaluate(config: RunConfig, key: str, progress: Progress) -> dict[str, Any]:
    """Evaluate the run's drafter: every prompt file, then held-out rows. Writes ``results.json`` and the manifest.

    Raises:
        EvaluateError: an output was not the target's own (``results.json`` is written all the same).
    """
    layout = Layout(config.root_dir)
    folder, trained = layout.evaluation(key), layout.drafter(keys.train_key(config))
    shape, tensors = load_trained(trained)
    device = stage_device(config)
    if device.type == "cpu":
        torch.set_num_threads(1)  # on cores that something else uses too, two threads ran four times slower than one
    dtype = precision(config, device)
    target_folder = identity.model_folder(config)
    progress.say(f"Evaluating on {device} in {str(dtype).removeprefix('torch.')}: loading target and drafter")
    progress.update(text="loading", force=True)
    decoder = load_decoder(
        target_folder,
        shape,
        tensors,
        device=device,
        dtype=dtype,
        attention=config.target.attention,
        trust_remote_code=config.target.trust_remote_code,
        where=str(trained / "drafter"),
    )
    template = config.path(config.corpus.chat_template) if config.corpus.chat_template else None
    files = config.evaluation_prompts()
    folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(decoder, batch=config.evaluate.batch, say=progress.say)
    datasets = run_files(
        loop,
        load_tokenizer(target_folder, template),
        files,
        dtype=dtype,
        max_prompts=config.evaluate.max_prompts,
        max_new_tokens=config.evaluate.max_new_tokens,
        chat_template_kwargs=config.corpus.chat_template_kwargs,
        baseline=config.evaluate.baseline,
        progress=progress,
    )
    progress.update(text="held-out rows", force=True)
    held_out = tau_replay(
        loop,
        heldout_rows(config, shape),
        loop_rows=config.evaluate.heldout_loop_rows,
        max_new_tokens=config.evaluate.max_new_tokens,
        say=progress.say,
    )
    results = {
        "datasets": datasets,
        "overall": overall(datasets),
        "tau_replay": held_out,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": shape.block_size,
    }
    write_json(folder / RESULTS, results)
    for line in report_lines(results):
        progress.say(line)
    require_lossless(datasets)
    write_manifest(folder, kind="evaluation", key=key, files=[RESULTS], overall=results["overall"], tau_replay=held_out["tau"])
    renew_cards(config)
    return results


def run_files(
    loop: Loop, tokenizer: Any, files: list[Path], *, max_prompts: int, progress: Progress, **options: Any
) -> dict[str, dict[str, Any]]:
    """Every prompt file as one data set (``run_dataset``); options are passed on to it."""
    sets = read_data_sets(files, most=max_prompts)
    total, done = sum(len(prompts) for prompts in sets.values()), 0

    def count() -> None:
        nonlocal done
        done += 1
        progress.update(done=done, total=total)

    results = {}
    for name, prompts in sets.items():
        progress.update(done=done, total=total, text=name, force=True)
        results[name] = run_dataset(loop, tokenizer, prompts, name=name, say=progress.say, on_prompt=count, **options)
        length, steps = results[name]["acceptance_length"], results[name]["steps"]
        progress.say(f"{name}: acceptance length {number(length)} over {counted(steps, 'step')}, {counted(len(prompts), 'prompt')}")
    return results


def heldout_rows(config: RunConfig, shape: DrafterShape) -> list[HeldoutRow]:
    """Up to ``[evaluate] heldout_rows`` held-out conversations, the same that training evaluates on, read from the store."""
    from dflash_offline.corpus import Corpus
    from dflash_offline.store import HiddenStateStore
    from dflash_offline.train.heldout import choose_rows

    layout = Layout(config.root_dir)
    corpus = Corpus.open(layout.corpus(keys.corpus_key(config)))
    chosen = choose_rows(corpus, config.evaluate.heldout_rows)
    if not chosen:
        return []
    store = HiddenStateStore(layout.store(keys.capture_key(config)), **config.store.cache)
    positions = store.positions(shape.target_layer_ids)
    rows = []
    for index in chosen:
        row = corpus.row(index)
        sample = store.find(row.sha256)

        def read(sample: int = sample) -> torch.Tensor:
            return store[sample].hidden_states(layers=positions).flatten(1)

        rows.append(HeldoutRow(row.input_ids, row.loss_mask, read))
    return rows


def report_lines(results: dict[str, Any]) -> list[str]:
    """What the terminal shows at the end."""
    lines = table(results["datasets"], results["overall"]) if results["datasets"] else []
    replayed = results.get("tau_replay")
    if replayed and replayed["tau"] is not None:
        line = f"tau_replay on {counted(replayed['rows'], 'held-out row')}: {replayed['tau']:.3f}"
        pair = replayed["loop"]
        if pair and pair["reproduced"] == 0:
            line += (
                f"; of {counted(pair['rows'], 'held-out answer')} none was written again by the target token by token, so the real loop "
                "is not beside it; [evaluate] heldout_loop_rows says how many are tried"
            )
        elif pair:
            again = counted(pair["reproduced"], "answer")
            line += f"; on {again} the target writes again: replay {pair['replay']:.3f}, real loop {pair['loop']:.3f}"
        lines.append(line)
    if results.get("temperature"):
        lines.append(
            f"Sampled at temperature {results['temperature']:g} by the exact rejection rule; such answers are not compared with greedy ones"
        )
    if results["device"] == "cpu" and results["datasets"]:
        lines.append(
            "A CPU shows no speed-up: a block costs it as much as its tokens one by one. Acceptance lengths are the same everywhere."
        )
    elif results["datasets"]:
        *others, most = sorted({result["batch"] for result in results["datasets"].values()})
        batches = " and ".join([*map(str, others), counted(most, "prompt")])
        lines.append(f"Speeds are those of {batches} at once, with and without the drafter.")
    return lines


def evaluate_folder(
    target_folder: Path,
    drafter_folder: Path,
    prompt_files: list[Path],
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    max_prompts: int = 80,
    max_new_tokens: int = 256,
    baseline: bool = True,
    batch: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    chat_template: Path | None = None,
    trust_remote_code: bool = False,
    say: Say = print,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate an exported drafter (z-lab or speculators, ours or another's) on a target.

    Args:
        temperature, seed: see ``Loop``.

    Returns:
        As ``results.json``, without ``tau_replay``.

    Raises:
        ExportError: the drafter cannot be read or does not fit the target.
        EvaluateError: a prompt file cannot be used, or an output was not the target's own.
    """
    chosen = torch.device(device)
    dtype = dtype or (torch.float32 if chosen.type == "cpu" else torch.bfloat16)
    read = read_drafter(drafter_folder, num_target_layers=facts(target_folder, trust_remote_code=trust_remote_code).num_layers)
    for note in read.notes:
        say(f"{drafter_folder}: {note}")
    warn_about_template(read.folder, chat_template_kwargs or {}, say=say)
    decoder = load_decoder(
        target_folder, read.shape, read.tensors, device=chosen, dtype=dtype, trust_remote_code=trust_remote_code, where=str(drafter_folder)
    )
    datasets = run_files(
        Loop(decoder, batch=batch, temperature=temperature, seed=seed, say=say),
        load_tokenizer(target_folder, chat_template),
        list(prompt_files),
        dtype=dtype,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        chat_template_kwargs=chat_template_kwargs or {},
        baseline=baseline,
        progress=progress or Progress(None),
    )
    results = {
        "datasets": datasets,
        "overall": overall(datasets),
        "device": str(chosen),
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": read.shape.block_size,
        "temperature": temperature,
    }
    for line in report_lines(results):
        say(line)
    require_lossless(datasets)
    return results


def warn_about_template(drafter_folder: Path, chat_template_kwargs: dict[str, Any], *, say: Callable[[str], None]) -> None:
    """Warn when the prompts are rendered with other template options than the training data was."""
    path = Path(drafter_folder) / "training.json"
    if path.is_file():
        trained = read_json(path).get("chat_template_kwargs")
        if trained is not None and trained != chat_template_kwargs:
            say(
                f"WARNING: the drafter was trained on text rendered with chat_template_kwargs = {trained}, "
                f"the prompts are rendered with {chat_template_kwargs}; acceptance suffers"
            )


def main(argv: list[str] | None = None) -> None:
    from dflash_offline.stage import run_stage

    def body(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
        evaluate(config, arguments.key, progress)
        progress.update(text="written", force=True)

    run_stage("evaluate", body, argv, key=keys.evaluate_key)

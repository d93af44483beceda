"""The export of a run (``python -m dflash_offline.export``), of one of its checkpoints, or of any trained weights."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_offline import checkpoint, identity, keys
from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.drafter import Drafter, DrafterShape, planned_shape
from dflash_offline.errors import DFlashError, ExportError
from dflash_offline.export.card import model_card
from dflash_offline.export.conformance import Check, check_folder, require
from dflash_offline.export.formats import Format, TargetInfo
from dflash_offline.export.reading import check_fits, read_tensors
from dflash_offline.export.warm_start import started_from
from dflash_offline.export.writing import write_folder
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, damaged_files, digest, read_json, read_manifest, write_bytes, write_json, write_manifest
from dflash_offline.progress import Progress
from dflash_offline.target import facts


def target_info(config: RunConfig, folder: Path) -> TargetInfo:
    """What the exports say about the run's target."""
    known = facts(folder, trust_remote_code=config.target.trust_remote_code)
    eos: int | list[int] | None = list(known.eos_token_ids) or None
    if eos is not None and len(eos) == 1:
        eos = eos[0]
    name = config.export.target_name or (folder.name if config.target.model == DEMO_MODEL else config.target.model)
    return TargetInfo(name, list(known.architectures), known.bos_token_id, eos, known.pad_token_id)


def export_weights(
    folder: Path,
    *,
    form: Format,
    shape: DrafterShape,
    tensors: dict[str, torch.Tensor],
    target: TargetInfo,
    license_name: str = "other",
    training: dict[str, Any] | None = None,
    datasets: dict[str, dict[str, Any]] | None = None,
) -> list[Check]:
    """Write one folder: weights, config, model card, ``training.json``; check it.

    Args:
        training: what the card and ``training.json`` say: ``data``, ``settings``, ``heldout``, ``chat_template_kwargs``.
        datasets: evaluation results for the card.

    Returns:
        The conformance checks, all passed.

    Raises:
        ExportError: the format cannot hold this drafter, or what was written does not conform.
    """
    write_folder(folder, form=form, shape=shape, target=target, tensors=tensors)
    _write_card(folder, form, shape, target, license_name=license_name, training=training, datasets=datasets)
    if training is not None:
        write_json(folder / "training.json", training)
    checks = check_folder(folder, form=form, shape=shape, target=target, source=tensors)
    require(checks, folder)
    return checks


def _write_card(
    folder: Path,
    form: Format,
    shape: DrafterShape,
    target: TargetInfo,
    *,
    license_name: str,
    training: dict[str, Any] | None,
    datasets: dict[str, dict[str, Any]] | None,
) -> None:
    told = {name: (training or {}).get(name) for name in ("data", "settings", "heldout")}
    card = model_card(form=form, shape=shape, target=target, license_name=license_name, datasets=datasets, **told)
    write_bytes(folder / "README.md", card.encode())


def renew_cards(config: RunConfig) -> list[Path]:
    """Write the acceptance table into the model cards of the run's export, where both export and evaluation are complete.

    The two stages run side by side and each calls this once its own manifest is written, so whichever is later sees
    both; what they write is the same.

    Returns:
        The cards written.
    """
    layout = Layout(config.root_dir)
    folder, datasets = layout.export(keys.export_key(config)), _evaluation(config, layout)
    if not datasets or not (folder / MANIFEST).is_file():
        return []
    manifest = read_manifest(folder, kind="export")
    shape, target = DrafterShape.from_dict(manifest["shape"]), target_info(config, identity.model_folder(config))
    written = []
    for form in manifest["formats"]:
        options = {"license_name": config.export.license, "training": read_json(folder / form / "training.json"), "datasets": datasets}
        _write_card(folder / form, form, shape, target, **options)
        written.append(folder / form / "README.md")
    return written


def load_trained(folder: Path) -> tuple[DrafterShape, dict[str, torch.Tensor]]:
    """Shape and final weights of a trained drafter (``drafters/KEY``), every file checked against its checksum.

    Raises:
        ExportError: a file is missing or damaged.
    """
    if problems := damaged_files(folder, read_manifest(folder, kind="drafter"), deep=True):
        raise ExportError(f"{folder}: {problems[0]}; `dflash-offline reset train` has it written again from the last checkpoint")
    return DrafterShape.from_dict(read_json(folder / "drafter" / "shape.json")), read_tensors(folder / "drafter")


def load_checkpoint(folder: Path, step: int, shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Weights of the checkpoint of a step: the average where there is one, else the masters.

    Args:
        folder: ``drafters/KEY``.
        shape: the drafter's; a checkpoint holds flat float32 values in the module's order and a digest of the shape.

    Raises:
        ExportError: there is no such checkpoint, or it is of another shape.
    """
    checkpoints = folder / "checkpoints"
    found = checkpoint.folder_of(checkpoints, step)
    if not found.is_dir():
        there = ", ".join(str(number) for number in checkpoint.steps(checkpoints)) or "none"
        raise ExportError(f"{folder}: no checkpoint of step {step}; there are {there}")
    manifest = read_manifest(found, kind=checkpoint.KIND)
    if problems := damaged_files(found, manifest, deep=True):
        raise ExportError(f"{found}: {problems[0]}; export another step")
    if read_json(found / checkpoint.STATE)["facts"]["shape"] != digest(shape.to_dict()):
        raise ExportError(f"{found}: was written with other drafter sizes than the run file asks for")
    with safe_open(found / checkpoint.TENSORS, framework="pt") as file:
        values = file.get_tensor("ema" if "ema" in file.keys() else "master")  # noqa: SIM118 (no mapping)
    tensors, offset = {}, 0
    for name, parameter in Drafter(shape).named_parameters():
        tensors[name] = values[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    assert offset == values.numel(), (offset, values.numel())
    return tensors


def export(config: RunConfig, key: str, progress: Progress, *, step: int | None = None, folder: Path | None = None) -> list[Path]:
    """Export the run's drafter in every format of ``[export] formats``.

    Args:
        step: export this checkpoint and not the final weights; needs ``folder``.
        folder: where to, in place of the run's own place for exports (which is committed by a manifest).

    Returns:
        The folders written.
    """
    layout = Layout(config.root_dir)
    trained = layout.drafter(keys.train_key(config))
    out = folder or layout.export(key)
    assert step is None or folder is not None, "a checkpoint never goes where the final export belongs"
    manifest = read_manifest(trained, kind="drafter") if step is None else {}
    target_folder = identity.model_folder(config)
    known = facts(target_folder, trust_remote_code=config.target.trust_remote_code)
    if step is None:
        shape, tensors = load_trained(trained)
    else:
        shape = planned_shape(config, target_folder)
        tensors = load_checkpoint(trained, step, shape)
    check_fits(shape, where=str(trained), hidden_size=known.hidden_size, vocab_size=known.vocab_size, num_layers=known.num_layers)
    target, training = target_info(config, target_folder), _training(config, manifest, step)
    datasets = _evaluation(config, layout) if step is None else None
    report: dict[str, list[dict[str, Any]]] = {}
    written = []
    for form in config.export.formats:
        checks = export_weights(
            out / form,
            form=form,
            shape=shape,
            tensors=tensors,
            target=target,
            license_name=config.export.license,
            training=training,
            datasets=datasets,
        )
        report[form] = [check.__dict__ for check in checks]
        written.append(out / form)
        progress.say(f"Exported {out / form}: {len(checks)} of {len(checks)} conformance checks passed")
    write_json(out / "conformance.json", report)
    if folder is None:
        write_manifest(out, kind="export", key=key, formats=list(config.export.formats), shape=shape.to_dict(), conformance=report)
        renew_cards(config)
    return written


_COUNTS = {"rows": "conversations", "heldout_rows": "held out of them", "tokens": "tokens", "supervised_tokens": "supervised tokens"}


def _training(config: RunConfig, manifest: dict[str, Any], step: int | None) -> dict[str, Any]:
    """What the folder tells about its training."""
    train, drafter = config.train, config.drafter
    told: dict[str, Any] = {
        "settings": {
            "layers": drafter.layers,
            "block size": drafter.block_size,
            "anchors a conversation": train.anchors,
            "epochs": train.epochs,
            "loss": train.loss,
            "peak learning rate": train.lr,
            "schedule": train.schedule,
            "seed": train.seed,
            "store codec": config.store.codec,
        },
        "chat_template_kwargs": config.corpus.chat_template_kwargs,
    }
    if step is not None:
        told["settings"]["checkpoint of step"] = step
    if (start := started_from(config)) is not None:
        told["settings"]["weights at the start"] = start
    for name in ("steps", "tokens", "seconds"):
        if isinstance(manifest.get(name), (int, float)):
            told["settings"][f"{name} trained"] = manifest[name]
    corpus = Layout(config.root_dir).corpus(keys.corpus_key(config))
    try:
        counts = read_manifest(corpus, kind="corpus").get("counts", {})
    except DFlashError:
        counts = {}
    told["data"] = {
        "files": ", ".join(sorted({Path(name).name for name in config.corpus.files or config.regenerate.prompts})),
        **{title: counts[name] for name, title in _COUNTS.items() if name in counts},
        "chat template options": json.dumps(config.corpus.chat_template_kwargs),
    }
    heldout = manifest.get("heldout") or {}
    told["heldout"] = {name: heldout[name] for name in ("loss", "acc", "tau", "tau_replay") if isinstance(heldout.get(name), (int, float))}
    return told


def _evaluation(config: RunConfig, layout: Layout) -> dict[str, dict[str, Any]] | None:
    """Results of the draft-and-verify loop by data set, where it is complete."""
    try:
        folder = layout.evaluation(keys.evaluate_key(config))
        read_manifest(folder, kind="evaluation")
        return read_json(folder / "results.json")["datasets"]
    except (DFlashError, OSError, KeyError):
        return None


def main(argv: list[str] | None = None) -> None:
    from dflash_offline.stage import run_stage

    def body(config: RunConfig, arguments: argparse.Namespace, progress: Progress) -> None:
        progress.update(done=0, total=len(config.export.formats), text="writing", force=True)
        written = export(config, arguments.key, progress)
        progress.update(done=len(written), text="written", force=True)

    run_stage("export", body, argv, key=keys.export_key)

"""What training leaves: ``drafter/model.safetensors``, ``drafter/shape.json`` and, last, the manifest."""

from typing import Any

import torch
from safetensors.torch import save_file

from dflash_offline import checkpoint
from dflash_offline.errors import StoreFullError
from dflash_offline.manifest import disk_is_full, write_json, write_manifest
from dflash_offline.train.ranks import Ranks
from dflash_offline.train.records import METRICS, read_metrics
from dflash_offline.train.setup import Setup

KIND = "drafter"
WEIGHTS = "drafter/model.safetensors"
SHAPE = "drafter/shape.json"


def write(setup: Setup, ranks: Ranks, final: torch.Tensor) -> dict[str, Any]:
    """Write the trained drafter and commit the folder; returns the manifest.

    Args:
        final: all of ``Weights.final``, flat.

    Weights are the float32 masters, or their average where ``[train] ema`` is set, under z-lab names.

    Raises:
        StoreFullError: the disk is full; checkpoints are intact.
    """
    folder = setup.folder
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    tensors = {name: view.to("cpu").contiguous() for name, view in setup.weights.named(final).items()}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()), "a weight is not finite"
    temporary = folder / "drafter" / ".model.safetensors.tmp"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if disk_is_full(error):
            text = "the disk is full; checkpoints are intact. Make space, run the same command again"
            raise StoreFullError(f"{folder / WEIGHTS}: {text}") from None
        raise
    temporary.replace(folder / WEIGHTS)
    write_json(folder / SHAPE, setup.shape.to_dict())
    rows = read_metrics(folder / METRICS)
    trained = [row for row in rows if "loss" in row]
    evaluated = [row for row in rows if "heldout" in row]
    saved, _ = checkpoint.newest(folder / "checkpoints", key=setup.key)
    assert saved is not None and saved.step == setup.order.total_steps, "the last step is always saved"
    return write_manifest(
        folder,
        kind=KIND,
        key=setup.key,
        files=[WEIGHTS, SHAPE, METRICS],
        steps=saved.step,
        tokens=saved.state["tokens"],
        seconds=saved.state["elapsed_s"],
        epochs=setup.order.num_epochs,
        ranks=ranks.size,
        parameters=setup.weights.numel,
        shape=setup.shape.to_dict(),
        mask_token_id=setup.shape.mask_token_id,
        chat_template_kwargs=setup.config.corpus.chat_template_kwargs,
        averaged=setup.config.train.ema is not None,
        partial=None if setup.partial is None else setup.partial.to_dict() | {"rows": int((setup.loader.stored >= 0).sum())},
        machine=setup.machine,
        metrics=trained[-1] if trained else None,
        heldout=evaluated[-1]["heldout"] if evaluated else None,
    )

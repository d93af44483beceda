"""``[drafter] init_from``: training starts from the weights of an exported drafter, ours or another's."""

from pathlib import Path
from typing import Any

import torch

from dflash_offline import identity
from dflash_offline.config import RunConfig
from dflash_offline.drafter import DrafterShape
from dflash_offline.errors import ConfigError
from dflash_offline.export.reading import check_fits, read_drafter

# fields of the shape that the run file says, by their names there
_SETTINGS = {
    "target_layer_ids": "target_layer_ids",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "num_layers": "layers",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def start_tensors(config: RunConfig, shape: DrafterShape) -> dict[str, torch.Tensor] | None:
    """Tensors to start from, by name, as stored; None where the run file names no folder.

    Args:
        shape: of the drafter to be trained.

    Raises:
        ConfigError: the drafter in the folder is another one: taps, sizes, mask token, windows, rotation; or not finite.
        ExportError: it cannot be read, was made for another target, or predicts by another block layout.
    """
    folder = identity.start_folder(config)
    if folder is None:
        return None
    where = f"{config.source.name}: {config.where('drafter')} init_from = {config.drafter.init_from!r}"
    read = read_drafter(folder, num_target_layers=shape.num_target_layers)
    check_fits(read.shape, where=where, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, num_layers=shape.num_target_layers)
    if wrong := {name: _plain(getattr(read.shape, name)) for name in _SETTINGS if getattr(read.shape, name) != getattr(shape, name)}:
        theirs = ", ".join(f"{_SETTINGS[name]} = {value}" for name, value in wrong.items())
        ours = ", ".join(str(_plain(getattr(shape, name))) for name in wrong)
        raise ConfigError(f"{where}: that drafter has {theirs}, this run {ours}; set {theirs} in the run file, or leave init_from out")
    if read.shape.layer_windows != shape.layer_windows:
        theirs, ours = ([window or "full" for window in each.layer_windows] for each in (read.shape, shape))
        raise ConfigError(f"{where}: that drafter's layers see {theirs}, this run's {ours}; set sliding_window and sliding_layers so")
    if not _same_rotation(read.shape, shape):
        raise ConfigError(
            f"{where}: that drafter rotates by {read.shape.rope_parameters}, the target by {shape.rope_parameters}; "
            "it was trained with another rotation and cannot be gone on with"
        )
    if broken := sorted(name for name, tensor in read.tensors.items() if not torch.isfinite(tensor).all()):
        raise ConfigError(f"{where}: that drafter's {broken[0]} is not finite (of {len(broken)} tensors); start from one that is whole")
    return read.tensors


def started_from(config: RunConfig) -> str | None:
    """Name of the folder for the model card."""
    return None if config.drafter.init_from is None else Path(config.drafter.init_from).name


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _same_rotation(one: DrafterShape, other: DrafterShape) -> bool:
    from dflash_offline.drafter import rotary_frequencies

    (mine, my_factor), (theirs, their_factor) = rotary_frequencies(one), rotary_frequencies(other)
    return my_factor == their_factor and torch.equal(mine, theirs)

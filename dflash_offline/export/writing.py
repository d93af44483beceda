"""Write a drafter's tensors and ``config.json`` into a folder that servers load."""

import contextlib
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_offline.drafter import DrafterShape
from dflash_offline.errors import ExportError
from dflash_offline.export.formats import Format, TargetInfo, config_of, tensor_shapes
from dflash_offline.figures import counted, first_of
from dflash_offline.manifest import write_json

OWN_FILES = {"config.json", "model.safetensors", "README.md", "training.json"}


def write_folder(folder: Path, *, form: Format, shape: DrafterShape, target: TargetInfo, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``model.safetensors`` (bf16) and then ``config.json``, each whole or not at all.

    Args:
        tensors: the ``11 n + 3`` by name, any float dtype and device, contiguous or not; bf16 ones keep every bit.

    Raises:
        ExportError: the format cannot say this shape, tensors are missing or not finite, or the folder holds other
            files (a server would read them as part of the drafter).
    """
    folder = Path(folder)
    config = config_of(form, shape, target)
    if missing := sorted(tensor_shapes(shape).keys() - tensors.keys()):
        raise ExportError(f"{folder}: nothing written, it would lack {counted(len(missing), 'trained tensor')}: {first_of(missing, 4)}")
    folder.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in folder.iterdir() if path.name not in OWN_FILES and not path.name.startswith(".")):
        raise ExportError(f"{folder}: holds {', '.join(others[:3])}; name an empty folder")
    rounded = {}
    for name in sorted(tensor_shapes(shape)):
        # a copy of its own for each: a compiled, tied or transposed module may share or stride its storage
        rounded[name] = tensors[name].detach().to(device="cpu", dtype=torch.bfloat16, copy=True).contiguous()
        if not torch.isfinite(rounded[name]).all():
            raise ExportError(f"{folder}: nothing written, {name} is not finite in bf16")
    temporary = folder / f".model.{os.getpid()}.tmp"
    try:
        save_file(rounded, temporary, metadata={"format": "pt"})
        temporary.replace(folder / "model.safetensors")
    except OSError as error:
        raise ExportError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    write_json(folder / "config.json", config)

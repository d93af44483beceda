"""Put a target and a drafter together into a ``Decoder``."""

from pathlib import Path

import torch

from dflash_offline.drafter import Drafter, DrafterShape
from dflash_offline.errors import EvaluateError, ExportError
from dflash_offline.evaluate.decoder import Decoder
from dflash_offline.evaluate.target_steps import SteppedTarget
from dflash_offline.export.reading import check_fits, check_tensors
from dflash_offline.figures import counted
from dflash_offline.target import facts, load_embedding_and_head, load_target, load_tokenizer


def make_drafter(shape: DrafterShape, tensors: dict[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A drafter for inference. Weights are rounded to bf16 first, as they are exported and served."""
    drafter = Drafter(shape, attention="sdpa")
    drafter.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, strict=True)
    drafter = drafter.to(device=device, dtype=dtype)
    return drafter.eval().requires_grad_(False)


def load_decoder(
    target_folder: Path,
    shape: DrafterShape,
    tensors: dict[str, torch.Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    where: str = "drafter",
) -> Decoder:
    """Load the whole target with its head, and the drafter beside it.

    Args:
        shape, tensors: of the drafter, as trained or as read from an export (``export.read_drafter``).
        where: names the drafter in messages.

    Raises:
        EvaluateError: this process does not see the GPU.
        ExportError: the drafter does not fit the target, or its weights are not finite.
        TargetError: the target cannot be loaded.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EvaluateError(
            f'{device} is asked for, but this process sees no GPU; give --device cpu, or set [evaluate] gpus = "cpu" for the run'
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise EvaluateError(f"{device} is asked for, but this process sees {counted(count, 'GPU')}, numbered from 0")
    known = facts(target_folder, trust_remote_code=trust_remote_code)
    check_fits(shape, where=where, hidden_size=known.hidden_size, vocab_size=known.vocab_size, num_layers=known.num_layers)
    check_tensors(Path(where), tensors, shape)
    for name in sorted(tensors):  # the target would refuse all that it drafts: a slow answer, and no word about why
        if not torch.isfinite(tensors[name].to(torch.bfloat16)).all():
            raise ExportError(f"{where}: {name} is not finite in bf16; copy the drafter again, or train it anew")
    layer_ids = list(shape.target_layer_ids)
    target = load_target(
        target_folder,
        dtype=dtype,
        device=device,
        attention=attention,
        layer_ids=layer_ids,
        trust_remote_code=trust_remote_code,
        keep_head=True,
    )
    embedding, head = load_embedding_and_head(target_folder, dtype=dtype, device=device)
    stop_ids = {*known.eos_token_ids}
    eos = load_tokenizer(target_folder).eos_token_id
    if eos is not None:
        stop_ids.add(int(eos))
    drafter = make_drafter(shape, tensors, device=device, dtype=dtype)
    return Decoder(SteppedTarget(target.model, target.layers, layer_ids), drafter, embedding, head, stop_ids=sorted(stop_ids))

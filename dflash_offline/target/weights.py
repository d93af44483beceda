"""The target's weight files: what is in them, and its embedding and head, without loading the model.

Names, shapes and dtypes come from the safetensors headers (one small read a file), so that a checkpoint in one file,
in shards, with or without an index, or inside a multimodal wrapper is looked at in the same way. In a folder that
holds a GGUF file and no safetensors, GGUF's own names are used and the two tensors are dequantised.

Tensor legend: V embedding rows, H hidden size.
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dflash_offline.errors import TargetError
from dflash_offline.gguf import find_gguf

# Ends of names, best first. What contains one of _NOT_THE_DECODER belongs to another tower or a built-in drafter.
_EMBEDDING_ENDS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "token_embd.weight",
)
_HEAD_ENDS = ("lm_head.weight", "embed_out.weight")
_GGUF_HEAD = "output.weight"
_NOT_THE_DECODER = ("visual", "vision", "audio", "mtp", "nextn", "talker", "encoder.", "eagle", "draft", "per_layer", "code_predictor")
_FLOATS = {"BF16", "F16", "F32", "F64"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: the file that holds it, its shape and its dtype as the file names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise TargetError(f"{path}: cannot be read as safetensors ({error}); copy the model again") from None
    header.pop("__metadata__", None)
    return header


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors")))


@lru_cache(maxsize=8)
def _read_headers(folder: Path, stamp: tuple[tuple[str, int, int], ...]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, _, _ in stamp:
        for key, entry in _header(folder / name).items():
            found[key] = StoredTensor(folder / name, tuple(entry["shape"]), entry["dtype"])
    return found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, by name.

    Raises:
        TargetError: there are none, a file is damaged, or the index names a file that is missing.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
            if not all(isinstance(name, str) for name in shards):
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError):
            raise TargetError(f"{index}: not a safetensors index; copy the model again") from None
        if missing := sorted(name for name in shards if not (folder / name).is_file()):
            raise TargetError(
                f"{folder}: {len(missing)} of the {len(shards)} weight files in its index are missing ({missing[0]}); copy the model again"
            )
    found = _read_headers(folder, _stamp(folder))
    if not found:
        if any(folder.glob("*.bin")):
            raise TargetError(
                f"{folder}: weights are pickled .bin files, which may run code when read; convert the model to safetensors first"
            )
        raise TargetError(f"{folder}: no .safetensors files, so there are no weights to read")
    return found


def _pick(names: list[str], ends: tuple[str, ...]) -> str | None:
    """The shortest name with the first of ``ends`` that any name has, other towers left out."""
    for end in ends:
        matching = [
            name for name in names if (name == end or name.endswith("." + end)) and not any(word in name for word in _NOT_THE_DECODER)
        ]
        if matching:
            return min(matching, key=lambda name: (len(name), name))
    return None


def find_embedding(folder: Path) -> str:
    """Name of the token embedding in the checkpoint."""
    tensors = stored_tensors(folder)
    name = _pick(list(tensors), _EMBEDDING_ENDS)
    if name is None:
        raise TargetError(f"{folder}: no token embedding in the weights; looked for names that end in {', '.join(_EMBEDDING_ENDS[:4])}")
    return name


def find_head(folder: Path) -> str | None:
    """Name of the output head in the checkpoint; None where it has none of its own."""
    return _pick(list(stored_tensors(folder)), _HEAD_ENDS)


def is_tied(folder: Path) -> bool:
    """Whether the head is the embedding, as ``config.json`` says: the outer flag of a wrapper counts before the inner one."""
    raw = json.loads((Path(folder) / "config.json").read_bytes())
    for part in (raw, raw.get("text_config"), raw.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("tie_word_embeddings"), bool):
            return part["tie_word_embeddings"]
    # transformers leaves a value out of config.json where it is the class's default
    from transformers import AutoConfig  # late: it takes seconds, and most models say it

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # the class is not known here: what is not written down is not claimed
        return False
    return bool(getattr(config, "tie_word_embeddings", False))


def _read(tensors: dict[str, StoredTensor], name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from safetensors import safe_open

    stored = tensors[name]
    if stored.dtype not in _FLOATS:
        raise TargetError(
            f"{stored.file}: {name} is stored as {stored.dtype}, a quantised format; the drafter needs the target's embedding and head in "
            "BF16, F16 or F32. Use a checkpoint that leaves these two unquantised"
        )
    with safe_open(str(stored.file), framework="pt", device=str(device)) as file:
        tensor = file.get_tensor(name)
    return tensor.to(dtype)


def read_named(folder: Path, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One tensor of the checkpoint, by its name in the files (of a GGUF file: GGUF's own names).

    Raises:
        TargetError: it is missing or quantised.
    """
    if (path := find_gguf(folder)) is not None:
        return _gguf_tensors(path, (name,), dtype=dtype, device=device)[name]
    tensors = stored_tensors(folder)
    if name not in tensors:
        raise TargetError(f"{folder}: no {name} in the weights, which the target's final norm needs; copy the model again")
    return _read(tensors, name, dtype=dtype, device=device)


def load_embedding_and_head(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the target's embedding and head straight from its files to ``device``.

    Returns:
        ``(embedding [V, H], head [V, H])``. Of a tied checkpoint both are the same tensor.

    Raises:
        TargetError: one of them is missing or quantised, or a separate head has another shape. Never random weights.
    """
    folder, device = Path(folder), torch.device(device)
    if (path := find_gguf(folder)) is not None:
        return _from_gguf(path, dtype=dtype, device=device)
    tensors = stored_tensors(folder)
    embedding_name = find_embedding(folder)
    head_name = find_head(folder)
    embedding = _read(tensors, embedding_name, dtype=dtype, device=device)
    if head_name is None:
        if not is_tied(folder):
            raise TargetError(
                f"{folder}: no output head in the weights (looked for names that end in {', '.join(_HEAD_ENDS)}), and config.json "
                "does not say tie_word_embeddings = true; correct whichever of the two is wrong"
            )
        return embedding, embedding
    head = _read(tensors, head_name, dtype=dtype, device=device)
    if head.shape[1] != embedding.shape[1]:
        raise TargetError(
            f"{folder}: {head_name} is {list(head.shape)} and {embedding_name} {list(embedding.shape)}; their widths must agree"
        )
    if head.shape == embedding.shape and is_tied(folder) and torch.equal(head, embedding):
        return embedding, embedding
    return embedding, head


def _from_gguf(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = _gguf_tensors(path, ("token_embd.weight",), optional=(_GGUF_HEAD,), dtype=dtype, device=device)
    embedding = tensors["token_embd.weight"]
    return embedding, tensors.get(_GGUF_HEAD, embedding)


def _gguf_tensors(
    path: Path, names: tuple[str, ...], *, optional: tuple[str, ...] = (), dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Tensors of a GGUF file, dequantised."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise TargetError(f"{path}: reading a GGUF file needs the package gguf; run `pip install gguf accelerate`") from None

    found = {tensor.name: tensor for tensor in GGUFReader(str(path)).tensors if tensor.name in (*names, *optional)}
    if missing := [name for name in names if name not in found]:
        raise TargetError(f"{path}: no {missing[0]} in this GGUF file, so it is no language model")
    return {
        name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).to(device=device, dtype=dtype)
        for name, tensor in found.items()
    }

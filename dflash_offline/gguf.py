"""What a GGUF file says of its model, in the words of a ``config.json``. Reads the header only, without torch."""

import functools
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError

# our name -> the file's, behind the architecture's name
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}


def find_gguf(folder: Path) -> Path | None:
    """The folder's only GGUF file, where it holds no safetensors and no config.json of its own.

    Raises:
        TargetError: there are several.
    """
    folder = Path(folder)
    if any(folder.glob("*.safetensors")) or (folder / "config.json").is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise TargetError(f"{folder}: holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, ...); keep one of them there")
    return found[0] if found else None


def tokenizer_source(folder: Path) -> dict[str, str]:
    """Where a folder's tokenizer is, as ``AutoTokenizer.from_pretrained`` takes it: in its GGUF file if no original lies beside that."""
    gguf = None if (folder / "tokenizer.json").is_file() else find_gguf(folder)
    return {} if gguf is None else {"gguf_file": gguf.name}


def gguf_config(path: Path) -> dict[str, Any]:
    """Sizes of the model in a GGUF file, by their names in a ``config.json``.

    Raises:
        TargetError: the package gguf is missing, or the file is no GGUF file or names no sizes.
    """
    stat = Path(path).stat()
    return dict(_read(str(path), stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=8)
def _read(path: str, *_stamp: int) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise TargetError(f"{path}: reading a GGUF file needs the package gguf; run `pip install gguf`") from None
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise TargetError(f"{path}: not a readable GGUF file ({str(error)[:120]}); copy it again") from None

    def value(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    found = {ours: value(f"{architecture}.{theirs}") for ours, theirs in _SIZES.items()}
    if missing := [_SIZES[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads") if found[name] is None]:
        raise TargetError(f"{path}: its header has no {architecture}.{missing[0]}, so the model's sizes are not known")
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if found["vocab_size"] is None and embedding is not None:
        found["vocab_size"] = int(embedding.shape[-1])
    found["head_dim"] = found["head_dim"] or found["hidden_size"] // found["num_attention_heads"]
    found["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return {"model_type": architecture, **{name: given for name, given in found.items() if given is not None}}

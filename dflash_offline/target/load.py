"""Load a target for capture: only the layers up to the last tap, straight to its device; or whole, for decoding.

Weights come through transformers' own loading (it knows renamed keys, fused experts, fp8 blocks, GGUF), which reads a
tensor only when the module that it is for exists. So the layers after the last tap and the head are left out of the
*module*, by a subclass that drops them as soon as it is built on the meta device, and their bytes are never read. The
final norm becomes an identity: nothing needs it, and transformers' ``hidden_states[-1]`` then is the last tap.

Tensor legend: B rows, T tokens, K taps, H hidden.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash_offline.errors import TargetError
from dflash_offline.figures import counted, first_of
from dflash_offline.gguf import find_gguf
from dflash_offline.target.facts import load_config, text_part
from dflash_offline.target.taps import Target
from dflash_offline.target.weights import find_embedding, find_head

_LAYER_LISTS = ("layers", "h", "blocks", "decoder_layers")
_loading = threading.Lock()  # transformers replaces functions of the process while it loads: threads would put back each other's
_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "embedding_norm")


def load_target(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: str,
    layer_ids: list[int],
    trust_remote_code: bool = False,
    keep_head: bool = False,
) -> Target:
    """Load the text decoder of a target and tap its layers.

    Args:
        folder: a transformers model folder, or one that holds a single GGUF file.
        dtype: precision it computes in (parameters of quantised layers keep theirs).
        device: where its weights go, read from the files straight to it.
        attention: transformers' name of the attention implementation.
        layer_ids: layers to tap; id i is the output of 0-based decoder layer i, before the final norm.
        keep_head: keep every layer, the final norm and the head, so that ``model`` gives logits.

    Raises:
        TargetError: the model cannot be loaded or tapped, or the checkpoint lacks weights that the module needs.
    """
    folder, device = Path(folder), torch.device(device)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    text = text_part(config)
    num_layers = int(getattr(text, "num_hidden_layers", None) or getattr(text, "n_layer", 0))
    if bad := [i for i in layer_ids if i not in range(num_layers)]:
        raise TargetError(f"{folder}: layers {bad} cannot be tapped; the target has layers 0 to {num_layers - 1}")
    if attention == "flash_attention_2" and not _has_flash_attention():
        raise TargetError('[target] attention = "flash_attention_2" needs the package flash-attn, which is not installed; use "sdpa"')

    gguf = find_gguf(folder)
    cls, own_config = _class_and_config(folder, config, text, keep_head=keep_head, trust_remote_code=trust_remote_code)
    if attention == "sdpa" and not getattr(cls, "_supports_sdpa", True):
        raise TargetError(f'{folder}: {cls.__name__} has no sdpa attention in transformers; set [target] attention = "eager"')
    options: dict[str, Any] = {"config": own_config, "dtype": dtype, "attn_implementation": attention, "local_files_only": True}
    if own_config is not config and gguf is None:
        options["key_mapping"] = _text_keys(folder)
        if getattr(config, "quantization_config", None) is not None and getattr(own_config, "quantization_config", None) is None:
            own_config.quantization_config = config.quantization_config
    if gguf is not None:
        options |= _gguf_options(gguf)
    if not keep_head:
        cls = truncated(cls, max(layer_ids) + 1, folder)
    model = _from_pretrained(cls, folder, options, device)
    return Target(model, layers=_layers(model, folder), layer_ids=layer_ids, num_layers=num_layers, device=device, dtype=dtype)


def _has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def _class_and_config(folder: Path, config: Any, text: Any, *, keep_head: bool, trust_remote_code: bool) -> tuple[type[nn.Module], Any]:
    """The class to build and the configuration to give it.

    For capture: the bare text decoder. For decoding: the text decoder with its head where transformers has one, else
    the whole wrapper.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    auto_map = getattr(config, "auto_map", None) or {}
    if auto_map and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        for name in ("AutoModelForCausalLM",) if keep_head else ("AutoModel", "AutoModelForCausalLM"):
            if name in auto_map:
                return get_class_from_dynamic_module(auto_map[name], str(folder), local_files_only=True), config
    tables = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if keep_head else [MODEL_MAPPING]
    for table in tables:
        for candidate in (text, config):
            found = table.get(type(candidate), None)
            if found is not None:
                return (found[0] if isinstance(found, (list, tuple)) else found), candidate
    raise TargetError(
        f"{folder}: the installed transformers has no text decoder{' with a head' if keep_head else ''} for model type "
        f"{getattr(config, 'model_type', '?')!r}; looked for {type(text).__name__} and {type(config).__name__}"
    )


def _text_keys(folder: Path) -> dict[str, str]:
    """Renaming of a wrapper's weights to those of its text decoder: off with what stands before ``embed_tokens``.

    A prefix that a decoder with a head wants back ("model.") is added by transformers.
    """
    embedding, head = find_embedding(folder), find_head(folder)
    prefixes = [embedding[: -len("embed_tokens.weight")]] if embedding.endswith("embed_tokens.weight") else []
    if head is not None and head.endswith("lm_head.weight"):
        prefixes.append(head[: -len("lm_head.weight")])
    return {rf"^{re.escape(prefix)}": "" for prefix in prefixes if prefix}


def _gguf_options(path: Path) -> dict[str, Any]:
    from transformers import GgufConfig
    from transformers.utils import is_accelerate_available, is_gguf_available

    if not is_gguf_available() or not is_accelerate_available():
        raise TargetError(f"{path}: reading a GGUF file needs two packages; run `pip install gguf accelerate`")
    return {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def _find_layers(module: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that owns the list of decoder layers, and the list's name."""
    paths = (
        "",
        "model",
        "language_model",
        "model.language_model",
        "language_model.model",
        "transformer",
        "backbone",
        "decoder",
        "model.decoder",
        "text_model",
    )
    for path in paths:
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        for name in _LAYER_LISTS:
            if isinstance(getattr(owner, name, None), nn.ModuleList):
                return owner, name
    return None


def _no_layers(cls: type[nn.Module], folder: Path) -> str:
    return f"{folder}: {cls.__name__} has no list of decoder layers (looked for {', '.join(_LAYER_LISTS)} in it and in its decoder)"


def _layers(model: nn.Module, folder: Path) -> nn.ModuleList:
    found = _find_layers(model)
    if found is None:
        raise TargetError(_no_layers(type(model), folder))
    return getattr(*found)


def truncated(cls: type[nn.Module], keep: int, folder: Path) -> type[nn.Module]:
    """A subclass that drops every layer from ``keep`` on, the final norm and the head as soon as it is built.

    It keeps the class's name: transformers looks up its table of renamed weights by it. The configuration stays whole,
    because some families work out from the full depth which layers slide or share keys.
    """

    def __init__(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        found = _find_layers(self)
        if found is None:
            raise TargetError(_no_layers(cls, folder))
        owner, name = found
        setattr(owner, name, getattr(owner, name)[:keep])
        for norm in _FINAL_NORMS:
            if isinstance(getattr(owner, norm, None), nn.Module):
                setattr(owner, norm, nn.Identity())
        if isinstance(getattr(self, "lm_head", None), nn.Module):  # only code that comes with a model gets here with a head
            self.lm_head = nn.Identity()

    return type(
        cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    )


def final_norm(folder: Path, config: Any, *, trust_remote_code: bool = False) -> tuple[str, nn.Module]:
    """The decoder's final norm, its name beside the layers and a module of its class on the meta device.

    Args:
        config: what ``load_config`` gave.

    Raises:
        TargetError: no such module was found.
    """
    cls, own_config = _class_and_config(folder, config, text_part(config), keep_head=False, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = cls(own_config)
    found = _find_layers(model)
    if found is None:
        raise TargetError(_no_layers(cls, folder))
    for name in _FINAL_NORMS:
        if isinstance(norm := getattr(found[0], name, None), nn.Module):
            return name, norm
    raise TargetError(f"{folder}: {cls.__name__} has no final norm (looked for {', '.join(_FINAL_NORMS)})")


def _from_pretrained(cls: type[nn.Module], folder: Path, options: dict[str, Any], device: torch.device) -> nn.Module:
    from transformers.utils import is_accelerate_available

    straight = device.type != "cpu" and is_accelerate_available()
    if straight:
        options = options | {"device_map": {"": device}}
    elif device.type != "cpu":
        print(
            "accelerate is not installed: weights go through host memory; `pip install accelerate` loads them straight to the GPU",
            flush=True,
        )
    try:
        with _loading, quiet_transformers():
            model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    except TargetError:
        raise
    except torch.OutOfMemoryError as error:
        raise TargetError(f"{folder}: the target does not fit into the memory of {device} ({str(error).splitlines()[0][:160]})") from None
    except (ValueError, OSError, ImportError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(f"{folder}: transformers cannot load this model ({type(error).__name__}: {first[:240]})") from error
    missing = sorted(info.get("missing_keys", ())) + sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing:
        raise TargetError(
            f"{folder}: the checkpoint lacks {counted(len(missing), 'weight')} that {cls.__name__} needs ({first_of(missing, 1)}), "
            "which would be random; copy the model again, or check that config.json belongs to it"
        )
    return (model if straight or device.type == "cpu" else model.to(device)).eval().requires_grad_(False)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bar and its list of weights that were left out on purpose."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()

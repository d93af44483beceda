"""What tells one input from another: digests of the target's files, the tokenizer, the template, the corpus files.

Nothing here imports torch or transformers: Luigi works out its keys with it.

A target's weights are tens of gigabytes, so they are told apart by sizes, by the safetensors headers, by blocks
sampled over each file and by the first block of every tensor: a fine-tune differs there, even one of a few layers.
Corpus files are read whole; their digests are remembered by path, size, inode and both time stamps.
"""

import contextlib
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from dflash_offline import demo
from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.errors import ConfigError, CorpusError, DFlashError, ExportError, TargetError
from dflash_offline.gguf import find_gguf, gguf_config
from dflash_offline.layout import Layout
from dflash_offline.manifest import checksum, digest, read_json, write_json

_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 4096
_HEADER_BYTES = 1 << 20
_SETTLED_S = 2.0  # a file changed more recently may change again within one tick of its time stamps
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
)


def target_folder(config: RunConfig) -> Path:
    """The target's folder on this machine. For the demo model it may not exist before ``demo.ensure_converted``.

    Raises:
        TargetError: there is neither such a folder nor such a model in the hub cache.
    """
    name = config.target.model
    return demo.converted_folder() if name == DEMO_MODEL else _local_folder(config, name, f"[target] model = {name!r}")


def start_folder(config: RunConfig) -> Path | None:
    """The folder of ``[drafter] init_from``; None where it is left out.

    Raises:
        TargetError: there is neither such a folder nor such a model in the hub cache.
    """
    name = config.drafter.init_from
    return None if name is None else exported_folder(_local_folder(config, name, f"{config.where('drafter')} init_from = {name!r}"))


def exported_folder(folder: Path) -> Path:
    """Where an export's ``config.json`` is: ``folder``, or its only subfolder with one (``export --output`` makes one for each form).

    Raises:
        ExportError: several subfolders have one.
    """
    if (folder / "config.json").is_file():
        return folder
    found = sorted(path.parent for path in folder.glob("*/config.json"))
    if len(found) > 1:
        raise ExportError(f"{folder}: no config.json, but several folders with one; name one of {', '.join(map(str, found))}")
    return found[0] if found else folder


def start_identity(config: RunConfig) -> list[Any]:
    """Digest of what training starts from, in a list; an empty one where it starts from random weights."""
    folder = start_folder(config)
    if folder is None:
        return []
    path = folder / "config.json"
    if not path.is_file():
        name = f"{config.where('drafter')} init_from = {config.drafter.init_from!r}"
        raise TargetError(f"{name}: {folder} has no config.json, so this is no exported drafter")
    return [{"config": checksum(path), "weights": digest(weights_identity(folder))}]


def _local_folder(config: RunConfig, name: str, where: str) -> Path:
    path = config.path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise TargetError(f"{where} is a file; name the folder that holds config.json")
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        with contextlib.suppress(LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
            return Path(snapshot_download(name, local_files_only=True))
        raise TargetError(f"{where}: no folder {path}, and not in the hub cache; run `hf download {name}` first")
    raise TargetError(f"{where}: no folder {path}")


def model_folder(config: RunConfig) -> Path:
    """The folder that target and tokenizer are loaded from; the demo model is converted first, once.

    Raises:
        TargetError: as ``target_folder``.
    """
    return demo.ensure_converted() if config.target.model == DEMO_MODEL else target_folder(config)


def target_config(config: RunConfig) -> dict[str, Any]:
    """``config.json`` of the target, of a multimodal wrapper the whole of it (see ``text_config``); a GGUF file's header instead."""
    if config.target.model == DEMO_MODEL:
        return demo.model_config()
    path = target_folder(config) / "config.json"
    if (gguf := find_gguf(path.parent)) is not None:
        return gguf_config(gguf)
    if not path.is_file():
        raise TargetError(f"{path.parent}: no config.json, so this is no transformers model folder")
    return json_object(path)


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder.

    Raises:
        TargetError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TargetError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise TargetError(f"{path}: not valid JSON ({error}); copy the model again") from None
    if not isinstance(content, dict):
        raise TargetError(f"{path}: holds no JSON object; copy the model again")
    return content


def text_config(model_config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a ``config.json``: ``text_config`` (or ``llm_config``) of a wrapper, else all of it."""
    for name in ("text_config", "llm_config"):
        if isinstance(model_config.get(name), dict):
            return model_config[name]
    return model_config


def num_target_layers(config: RunConfig) -> int:
    """Decoder layers of the target."""
    found = text_config(target_config(config)).get("num_hidden_layers")
    if not isinstance(found, int) or found < 2:
        raise TargetError(
            f"{target_folder(config)}/config.json: num_hidden_layers (at top level or in text_config) is {found!r}; must be at least 2"
        )
    return found


def default_layer_ids(num_layers: int, num_taps: int) -> list[int]:
    """Layers to tap by default: ``[n // 2]`` for one, else ``round(1 + j (n - 4) / (K - 1))`` (z-lab/dflash).

    Python's ``round`` (half to even) is meant. 24 -> 1, 6, 11, 16, 21; 64 -> 1, 16, 31, 46, 61.
    """
    if num_taps == 1:
        return [num_layers // 2]
    return [round(1 + j * (num_layers - 4) / (num_taps - 1)) for j in range(num_taps)]


def capture_layer_ids(config: RunConfig) -> list[int]:
    """Resolved ``[target] capture_layer_ids``: id i is the output of 0-based decoder layer i, HF ``hidden_states[i+1]``.

    Raises:
        ConfigError: an id is not a layer, is the last layer, or the default formula gives one twice.
    """
    num_layers, wanted = num_target_layers(config), config.target.capture_layer_ids
    ids = default_layer_ids(num_layers, wanted) if isinstance(wanted, int) else list(wanted)
    where = f"{config.source.name}: [target] capture_layer_ids = {wanted}"
    if isinstance(wanted, int) and (len(set(ids)) != len(ids) or any(i not in range(num_layers - 1) for i in ids)):
        raise ConfigError(
            f"{where}: {wanted} cannot be spread over the target's {num_layers} layers (would be {ids}); name ids, 0 to {num_layers - 2}"
        )
    for i in ids:
        if i == num_layers - 1:
            raise ConfigError(
                f"{where}: layer {i} is the last one, whose output servers take after the final norm; highest allowed is {num_layers - 2}"
            )
        if i not in range(num_layers):
            raise ConfigError(f"{where}: the target has {num_layers} layers, so ids go from 0 to {num_layers - 2}; got {i}")
    return ids


def drafter_layer_ids(config: RunConfig) -> list[int]:
    """Resolved ``[drafter] target_layer_ids``, a selection of the captured ones in the drafter's order."""
    captured, wanted = capture_layer_ids(config), config.drafter.target_layer_ids
    if wanted is None:
        return captured
    if missing := [i for i in wanted if i not in captured]:
        raise ConfigError(f"{config.source.name}: {config.where('drafter')} target_layer_ids names {missing}; captured are {captured}")
    return list(wanted)


def weights_identity(folder: Path) -> dict[str, Any]:
    """Size and sampled digest of every weight file (see the module's docstring)."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise TargetError(f"{folder}: no weight files ({', '.join(_WEIGHT_SUFFIXES)})")
    return {path.name: [path.stat().st_size, sampled_digest(path)] for path in files}


def sampled_digest(path: Path) -> str:
    """Digest of a large file: size, first megabyte, blocks spread evenly over it, the first block of every safetensors tensor."""
    stat = path.stat()
    remembered = _sampled_digest if _settled(stat) else _sampled_digest.__wrapped__
    return remembered(path, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)


def _settled(stat: os.stat_result) -> bool:
    return time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_S


@lru_cache(maxsize=1024)
def _sampled_digest(path: Path, size: int, *_stamp: int) -> str:
    hashed = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        hashed.update(head)
        evenly = [i * max(0, size - _BLOCK_BYTES) // (_SAMPLED_BLOCKS - 1) for i in range(_SAMPLED_BLOCKS)]
        tensors = _tensor_starts(head, file) if path.suffix == ".safetensors" else []
        for start in [*evenly, *tensors]:
            file.seek(start)
            hashed.update(file.read(_BLOCK_BYTES))
    return hashed.hexdigest()


def _tensor_starts(head: bytes, file: BinaryIO) -> list[int]:
    """Where each tensor of a safetensors file begins (8 bytes of header length, JSON header, data); [] if it is none."""
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= 100_000_000:
        return []
    file.seek(8)
    try:
        header = json.loads(file.read(length))
        return sorted(8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return []


def target_identity(config: RunConfig) -> dict[str, Any]:
    """Digests that change when the target's hidden states may change."""
    if config.target.model == DEMO_MODEL:
        return demo.identity()
    folder = target_folder(config)
    model_config = {name: value for name, value in target_config(config).items() if name not in ("transformers_version", "_name_or_path")}
    return {"config": digest(model_config), "weights": digest(weights_identity(folder))}


def tokenizer_identity(config: RunConfig) -> dict[str, Any]:
    """Digests of the tokenizer, of the chat template and of the options given to it."""
    if config.target.model == DEMO_MODEL:
        tokenizer: Any = demo.identity()
    else:
        folder = target_folder(config)
        named = sorted(path.relative_to(folder).as_posix() for path in folder.glob("additional_chat_templates/*.jinja"))
        tokenizer = {name: checksum(folder / name) for name in (*_TOKENIZER_FILES, *named) if (folder / name).is_file()}
        if not tokenizer and (gguf := find_gguf(folder)) is not None:  # it holds a tokenizer of its own
            tokenizer = {gguf.name: [gguf.stat().st_size, sampled_digest(gguf)]}
        if not tokenizer:
            raise TargetError(f"{folder}: no tokenizer files ({', '.join(_TOKENIZER_FILES[:2])}, ...); put them beside the weights")
    template = None
    if config.corpus.chat_template is not None:
        path = config.path(config.corpus.chat_template)
        if not path.is_file():
            raise ConfigError(f"{config.source.name}: [corpus] chat_template = {config.corpus.chat_template!r}: no such file ({path})")
        template = checksum(path)
    return {"tokenizer": digest(tokenizer), "template": digest([template, config.corpus.chat_template_kwargs])}


def files_identity(config: RunConfig, paths: list[Path]) -> list[str]:
    """Content digest of each file, in order. Files unchanged since the last time are not read again."""
    cache_path = Layout(config.root_dir).cache / "digests.json"
    cache: Any = None
    with contextlib.suppress(OSError, DFlashError):
        cache = read_json(cache_path)
    if not isinstance(cache, dict):
        cache = {}
    digests, changed = [], False
    for path in paths:
        try:
            stat = path.stat()
            stamp = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
            known = cache.get(str(path))
            if not (isinstance(known, list) and len(known) == 2 and known[0] == stamp):
                known = [stamp, checksum(path)]
                if _settled(stat):
                    cache[str(path)], changed = known, True
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None
        digests.append(known[1])
    if changed:
        with contextlib.suppress(OSError, DFlashError):  # only a cache: a read-only root must not stop `status`
            cache_path.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache_path, cache, durable=False)
    return digests


def short(content: Any) -> str:
    """Sixteen hex digits that name a JSON value: a content key."""
    return digest(json.loads(json.dumps(content)))[:16]

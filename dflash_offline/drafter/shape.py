"""A drafter's shape: what fixes its tensors and its rotation, and how it follows from the target."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_offline.config import RunConfig
from dflash_offline.errors import ConfigError, DFlashError, TargetError
from dflash_offline.layout import Layout
from dflash_offline.manifest import checksum, digest, read_json, write_json

# Their angles depend on the length of the sequence in flight, which a slot of a packed micro-batch does not know.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes a drafter's tensors and its rotation; saved beside the weights as ``shape.json``."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]  # one a layer; None sees everything
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        assert len(self.layer_windows) == self.num_layers, (self.layer_windows, self.num_layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self) | {"target_layer_ids": list(self.target_layer_ids), "layer_windows": list(self.layer_windows)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterShape":
        return cls(**(values | {"target_layer_ids": tuple(values["target_layer_ids"]), "layer_windows": tuple(values["layer_windows"])}))

    @classmethod
    def from_target(cls, facts: Any, section: Any, target_layer_ids: Sequence[int], mask_token_id: int) -> "DrafterShape":
        """Sizes of a target layer unless ``section`` (``DrafterConfig``) names others.

        A mixture of experts, heads wider than 128 and odd geometries have no layer worth copying: they get heads of 128,
        H / 128 of them rounded to a multiple of at most 8 key/value heads, and an MLP of 3 H.

        Raises:
            ConfigError: sizes of the run file do not go together.
            TargetError: the target's rotary embedding cannot be carried over.
        """
        hidden = facts.hidden_size
        ordinary = (
            not facts.is_moe
            and all((facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim, facts.intermediate_size))
            and facts.head_dim <= 128
            and facts.head_dim % 2 == 0
            and facts.num_attention_heads % facts.num_key_value_heads == 0
        )
        if ordinary:
            heads, kv_heads, head_dim, intermediate = (
                facts.num_attention_heads,
                facts.num_key_value_heads,
                facts.head_dim,
                facts.intermediate_size,
            )
        else:
            heads = max(1, round(hidden / 128))
            kv_heads = min(8, heads)
            heads, head_dim, intermediate = round(heads / kv_heads) * kv_heads, 128, 3 * hidden
        heads, kv_heads = section.num_attention_heads or heads, section.num_key_value_heads or kv_heads
        if heads % kv_heads:
            raise ConfigError(
                f"run.toml: [drafter]: {heads} query heads are no multiple of {kv_heads} key/value heads; "
                "set both num_attention_heads and num_key_value_heads (what is left out is the target's)"
            )
        windows = [None] * section.layers
        if section.sliding_window is not None:
            for layer in range(section.layers) if section.sliding_layers is None else section.sliding_layers:
                windows[layer] = section.sliding_window
        return cls(
            hidden_size=hidden,
            num_layers=section.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=section.head_dim or head_dim,
            intermediate_size=section.intermediate_size or intermediate,
            rms_norm_eps=facts.rms_norm_eps,
            rope_parameters=rope_of_target(facts.rope_parameters),
            vocab_size=facts.vocab_size,
            block_size=section.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
            num_target_layers=facts.num_layers,
            max_position_embeddings=facts.max_position_embeddings,
            layer_windows=tuple(windows),
            initializer_range=facts.initializer_range or 0.02,
        )


def planned_shape(config: RunConfig, target_folder: Path) -> DrafterShape:
    """The drafter that a run file asks for, mask token resolved.

    What follows from the target is remembered under the run's ``cache``, by the content it follows from: the first stage
    works it out with transformers and a tokenizer, whose imports alone take seconds, which every rank would wait for again.

    Raises:
        ConfigError: its sizes do not go together, or are not those of ``init_from``.
        ExportError: the drafter of ``init_from`` cannot be read.
        TargetError: the mask token cannot be used or none can be found; the rotary embedding cannot be carried over.
    """
    path = _cached_at(config, target_folder)
    shape = None if path is None else _read_cached(path)
    if shape is None:
        shape = _from_target_folder(config, target_folder)
        if path is not None and config.root_dir.is_dir():  # `doctor` and `plan` make no root
            with contextlib.suppress(OSError, DFlashError):  # only a cache: a full disk or a read-only root stops nothing
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"shape": shape.to_dict(), "digest": digest(shape.to_dict())}, durable=False)
    if config.drafter.init_from is not None:
        from dflash_offline.export.warm_start import start_tensors

        start_tensors(config, shape)  # what does not fit is said wherever a shape is planned: before anything is captured
    return shape


def _from_target_folder(config: RunConfig, target_folder: Path) -> DrafterShape:
    """The planned shape, worked out."""
    from dflash_offline import identity
    from dflash_offline.target import facts, resolve_mask_token_id

    mask_token_id = resolve_mask_token_id(target_folder, config.drafter.mask_token_id)
    known = facts(target_folder, config.target.trust_remote_code)
    return DrafterShape.from_target(known, config.drafter, identity.drafter_layer_ids(config), mask_token_id)


def _cached_at(config: RunConfig, target_folder: Path) -> Path | None:
    """Where the planned shape is remembered: named by all that it follows from. None where that cannot be told."""
    from dflash_offline import identity, keys

    if config.target.trust_remote_code:  # the model's own code may say anything
        return None
    generation = Path(target_folder) / "generation_config.json"  # names end tokens
    try:
        content = [
            keys.FORMAT,
            {name: metadata.version(name) for name in ("dflash_offline", "transformers", "tokenizers")},
            identity.target_identity(config),
            identity.tokenizer_identity(config)["tokenizer"],
            checksum(generation) if generation.is_file() else None,
            config.drafter.model_dump(mode="json", exclude={"init_from"}),
            identity.drafter_layer_ids(config),
        ]
    except (OSError, DFlashError, metadata.PackageNotFoundError):  # what is wrong is said by whoever works the shape out
        return None
    return Layout(config.root_dir).cache / "shapes" / f"{digest(content)}.json"


def _read_cached(path: Path) -> DrafterShape | None:
    """None where it is not there, was changed, or is of a release with other fields: it is worked out again."""
    with contextlib.suppress(OSError, DFlashError, TypeError, KeyError):
        found = read_json(path)
        if set(found["shape"]) == {field.name for field in fields(DrafterShape)} and digest(found["shape"]) == found["digest"]:
            return DrafterShape.from_dict(found["shape"])
    return None


def check_sizes(config: RunConfig) -> None:
    """Refuse a codec that cannot store this target, and what training would refuse of any drafter of a run file.

    Every command asks before it takes a GPU's time.

    Raises:
        StoreError: as ``codecs.check_hidden_size``.
        DFlashError: as ``planned_shape``, with the entry of ``[[drafters]]`` where there are several.
    """
    from dflash_offline import identity
    from dflash_offline.codecs import check_hidden_size

    folder = identity.model_folder(config)
    check_hidden_size(config.store.codec, identity.text_config(identity.target_config(config)).get("hidden_size"))
    for each in config.each_drafter():
        try:
            planned_shape(each, folder)
        except DFlashError as error:
            raise type(error)(f"[[drafters]] {each.name}: {error}" if each.name else str(error)) from None


def rope_of_target(parameters: dict[str, Any]) -> dict[str, Any]:
    """The target's rotary parameters as the drafter keeps them: base and scaling; the whole head is rotated, always.

    Raises:
        TargetError: a scaling whose angles depend on the running length.
    """
    kept = {
        name: value for name, value in parameters.items() if name not in ("partial_rotary_factor", "type") and not name.startswith("mrope")
    }
    kept["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    if kept["rope_type"] in LENGTH_DEPENDENT_ROPE:
        raise TargetError(
            f"the target's rotary scaling {kept['rope_type']!r} changes with the running length and cannot be trained on packed rows; "
            "give its config.json a fixed one (default, linear, llama3, yarn)"
        )
    return kept


def rotary_frequencies(shape: DrafterShape) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin, as transformers' Qwen3 makes them from the exported config.

    Raises:
        TargetError: a scaling that transformers does not know, or one that is not whole.
    """
    kind = shape.rope_parameters["rope_type"]
    with torch.device("cpu"):  # whatever device the drafter is being built on, a meta device too
        if kind == "default":
            exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
            return 1.0 / (shape.rope_parameters["rope_theta"] ** exponents), 1.0
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if kind not in ROPE_INIT_FUNCTIONS or kind in LENGTH_DEPENDENT_ROPE:
            raise TargetError(f"rotary scaling {kind!r} is not supported; supported are default, linear, llama3, yarn")
        try:
            config = Qwen3Config(
                hidden_size=shape.hidden_size,
                num_attention_heads=shape.num_attention_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters=dict(shape.rope_parameters),
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        except Exception as error:  # transformers checks some of it, in its own words
            why = " ".join(str(error).split())[:200]
            raise TargetError(f"rotary scaling {dict(shape.rope_parameters)} is not whole ({why}); mend the model's config.json") from None
        return frequencies.float(), factor

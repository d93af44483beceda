"""``[train]``."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dflash_offline.config.section import Fraction, Gpus, PositiveInt, Section, Seed, check_gpus

# setting and value -> the lowest compute capability that runs it, what that brings, and what to use on such a GPU and on a CPU
_NEEDS_GPU: dict[tuple[str, str], tuple[tuple[int, int], str, str, str]] = {
    ("head_precision", "fp8"): ((8, 9), "fp8 matrix units", '"bf16"', '"bf16"'),
    ("attention", "triton"): ((8, 0), "bf16 matrix units", '"auto"', '"auto" or "sdpa"'),
    ("attention", "flex"): ((7, 0), "kernels that Triton compiles", '"sdpa"', '"auto" or "sdpa"'),
}


def why_not(setting: str, value: str, capability: tuple[int, int] | None) -> str | None:
    """Why a setting of [train] cannot run on a GPU of this compute capability (None: on a CPU); None where it can."""
    if (setting, value) not in _NEEDS_GPU:
        return None
    lowest, brings, on_gpu, on_cpu = _NEEDS_GPU[setting, value]
    if capability is None:
        return f'{setting} = "{value}" needs GPUs; with gpus = "cpu" use {on_cpu}'
    if capability < lowest:
        needs, has = (".".join(map(str, each)) for each in (lowest, capability))
        return f'{setting} = "{value}" needs a GPU with {brings} (compute capability {needs} or newer, not {has}); use {on_gpu}'
    return None


class TrainConfig(Section):
    """Drafter training."""

    mode: Literal["ddp", "independent"] = Field(
        "ddp", description="ddp: all ranks train one drafter. independent: the drafters of [[drafters]] side by side, from one store."
    )
    gpus: Gpus = Field(
        [5, 6, 7], description='GPUs that train, one rank each; "all", or "cpu". They index CUDA_VISIBLE_DEVICES where that is set.'
    )
    ranks: PositiveInt = Field(1, description='Number of ranks when gpus = "cpu".')
    nodes: list[str] = Field(
        [],
        description="Host names that train one drafter together, each by the same command; the first one writes. None: this host alone.",
    )
    master_address: str | None = Field(
        None, description="Where the ranks of several nodes meet: the first node as the others reach it; its name when left out."
    )
    master_port: Annotated[int, Field(ge=1, le=65535)] = Field(29500, description="Port they meet at, free on the first node.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of forward and backward passes; master weights are float32 always."
    )
    attention: Literal["auto", "flex", "triton", "sdpa", "eager"] = Field(
        "auto",
        description="Attention path. auto: compiled block-sparse kernels on a GPU (never anything slower in silence), sdpa on a CPU.",
    )
    head_precision: Literal["bf16", "fp8"] = Field(
        "bf16", description="Precision of the frozen head's products; fp8 needs a GPU that has it."
    )
    epochs: Annotated[float, Field(gt=0)] = Field(6.0, description="Passes over the corpus.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimiser steps even if epochs are left.")
    tokens_per_batch: PositiveInt = Field(
        12288,
        description="Context tokens in one micro-batch, padding included; at least max_length. With half as much again, long rows "
        "leave fewer of the block slots empty, which cost time all the same.",
    )
    micro_batches_per_step: PositiveInt = Field(3, description="Micro-batches in one optimiser step, over all ranks.")
    anchors: PositiveInt = Field(512, description="Most anchors (blocks) drawn from one conversation each epoch.")
    slots_per_batch: PositiveInt = Field(16384, description="Most block slots (anchors x block_size) in one micro-batch.")
    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="Peak learning rate of AdamW.")
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW weight decay.")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="Learning rate: warm-up then cosine to 10 %, or warm-up, constant, last fifth linear to 10 %."
    )
    warmup_ratio: Fraction = Field(0.04, description="Share of the steps that warms up.")
    clip: Annotated[float, Field(gt=0)] = Field(1.0, description="Largest gradient norm.")
    loss: Literal["ce", "dpace"] = Field("ce", description="Slot weights: exponential decay (ce), or D-PACE (arXiv 2605.18810).")
    gamma: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Decay of the slot weights; 7, 5, 4 for block sizes 16, 10, 8 when left out."
    )
    dpace_alpha: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="Smoothing of D-PACE.")
    kl_weight: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Share of KL to the target's distribution in the loss; needs [store] store_last_hidden."
    )
    noise: Annotated[float, Field(ge=0)] = Field(0.0, description="Uniform noise on context features, in units of their RMS.")
    noise_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="How the noise goes to zero over training.")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Decay of an average of the weights, used for evaluation and export."
    )
    seed: Seed = Field(0, description="Seed of initial weights, epoch order, anchors and noise.")
    checkpoint_every: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoint_minutes: Annotated[float, Field(gt=0)] = Field(10.0, description="Minutes between checkpoints at the most.")
    keep_checkpoints: PositiveInt = Field(2, description="Checkpoints kept; older ones are deleted.")
    evaluate_every: PositiveInt = Field(500, description="Steps between evaluations on the held-out conversations.")
    heldout_rows: PositiveInt = Field(64, description="Most held-out conversations used in one of those evaluations.")
    reader: Literal["auto", "process", "threads"] = Field(
        "auto",
        description="Where batches are read: in up to four processes of each rank (what auto means on GPUs) or beside the loop.",
    )
    log_every: PositiveInt = Field(10, description="Steps between status lines.")
    trackers: list[Literal["wandb", "trackio"]] = Field(
        [], description="Trackers that get the scalars as well, if they are installed; TensorBoard always does."
    )
    tracker_project: str = Field("dflash-offline", description="What these call the project.")
    fsdp: bool = Field(
        False, description="Divide master weights and optimiser state among the ranks: for drafters too large for one GPU to hold them all."
    )
    min_tokens_per_s: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Stop when training is slower than this after warm-up; 0 never stops."
    )

    _gpus = field_validator("gpus")(check_gpus)

    def why_not(self, capability: tuple[int, int] | None) -> str | None:
        """Why these settings cannot run on a GPU of this compute capability (None: on a CPU); None where they can."""
        settings = (("attention", self.attention), ("head_precision", self.head_precision))
        return next((reason for name, value in settings if (reason := why_not(name, value, capability))), None)

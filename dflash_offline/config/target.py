"""``[target]``."""

from typing import Literal

from pydantic import Field, field_validator

from dflash_offline.config.section import Gpus, PositiveInt, Section, check_gpus


class TargetConfig(Section):
    """The target model: the language model that the drafter will speed up."""

    model: str = Field(description='Model folder (relative to this file) or hub name; "demo:smollm2" is the embedded demo model.')
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision the target computes in. On a CPU float32 is much faster."
    )
    gpus: Gpus = Field(
        [0, 1, 2, 3, 4],
        description='GPUs that capture, one replica each; "all", or "cpu". They index CUDA_VISIBLE_DEVICES where that is set.',
    )
    replicas: PositiveInt = Field(1, description='Number of replicas when gpus = "cpu".')
    capture_layer_ids: list[int] | PositiveInt = Field(
        5, description="Layers whose output is stored (0-based; id i is HF hidden_states[i+1]), or how many to spread over the depth."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="Attention implementation of the target.")
    compile: bool = Field(True, description="Compile the target's layers one by one. Has an effect on GPUs only.")
    batches: Literal["auto", "packed", "padded"] = Field(
        "auto",
        description="Rows of a capture batch one after another without padding (packed), or padded; auto packs where the target allows it.",
    )
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with the model folder.")

    _gpus = field_validator("gpus")(check_gpus)

    @field_validator("capture_layer_ids")
    @classmethod
    def _layer_ids(cls, ids: list[int] | int) -> list[int] | int:
        if isinstance(ids, list) and (not ids or len(set(ids)) != len(ids) or min(ids) < 0):
            raise ValueError(f"capture_layer_ids = {ids}: at least one, each once, counted from 0")
        return ids

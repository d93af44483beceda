"""``[evaluate]`` and ``[export]``."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dflash_offline.config.section import Gpus, PositiveInt, Section, check_gpus


class EvaluateConfig(Section):
    """The real draft-and-verify loop after training."""

    prompts: list[str] = Field(
        [],
        description="Prompt files, in any format that [corpus] reads; each file is one data set. None: evaluation on held-out rows only.",
    )
    max_prompts: PositiveInt = Field(80, description="Most prompts taken from one file.")
    max_new_tokens: PositiveInt = Field(256, description="Most tokens generated for one turn.")
    batch: PositiveInt = Field(8, description="Prompts decoded at once; 1 for the speed that a single user sees.")
    heldout_rows: PositiveInt = Field(64, description="Most held-out conversations used for tau_replay.")
    heldout_loop_rows: Annotated[int, Field(ge=0)] = Field(
        4,
        description="Held-out answers that the real loop writes too, so that its acceptance length stands beside tau_replay; only those "
        "that the target writes again token by token count. 0 for none.",
    )
    baseline: bool = Field(True, description="Also time the target alone and check that the output is its own greedy output.")
    gpus: Gpus | None = Field(None, description="GPU of the evaluation (the first one is used); that of [train] when left out.")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="Precision of target and drafter; that of [target] when left out."
    )

    _gpus = field_validator("gpus")(check_gpus)


class ExportConfig(Section):
    """What the trained drafter is written as."""

    formats: list[Literal["zlab", "speculators"]] = Field(["zlab"], min_length=1, description="zlab: SGLang and vLLM; speculators: vLLM.")
    license: str = Field("other", description="Licence named in the model card.")
    target_name: str | None = Field(
        None, description="Name of the target in the model card and serve commands; [target] model when left out."
    )

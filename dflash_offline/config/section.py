"""What the sections of the run file have in common."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Gpus = list[int] | Literal["all", "cpu"]
PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    # strict: TOML has types, so "8" is no number and true is no 1
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)


def check_gpus(gpus: Gpus | None) -> Gpus | None:
    if isinstance(gpus, list):
        if not gpus:
            raise ValueError('gpus is an empty list; name GPUs, or "all", or "cpu"')
        if len(set(gpus)) != len(gpus) or min(gpus) < 0:
            raise ValueError(f"gpus = {gpus}: every GPU once, counted from 0")
    return gpus

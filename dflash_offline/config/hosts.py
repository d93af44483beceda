"""``[hosts]``: which GPUs a host has for the run, where several hosts share one run file and one root."""

from pydantic import Field, field_validator

from dflash_offline.config.section import Gpus, Section, check_gpus


class HostConfig(Section):
    """One host: GPUs in place of those that the other sections name. Its name is what `hostname` prints there."""

    target_gpus: Gpus | None = Field(None, description="On this host in place of [target] gpus.")
    train_gpus: Gpus | None = Field(None, description="On this host in place of [train] gpus.")
    evaluate_gpus: Gpus | None = Field(None, description="On this host in place of [evaluate] gpus.")

    _gpus = field_validator("target_gpus", "train_gpus", "evaluate_gpus")(check_gpus)


def same_host(one: str, other: str) -> bool:
    """Whether two names are one host's: letter case is ignored, and the domain where one of them has none."""
    one, other = one.lower(), other.lower()
    return one == other or ("." in one) != ("." in other) and one.split(".")[0] == other.split(".")[0]

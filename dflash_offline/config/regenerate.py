"""``[regenerate]``."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dflash_offline.config.section import Gpus, PositiveInt, Section, Seed, check_gpus


class RegenerateConfig(Section):
    """Answers written anew by the target, before the corpus is prepared. Without prompts nothing is regenerated."""

    prompts: list[str] = Field(
        [], description="Prompt files, folders or globs, in any format that [corpus] reads; user turns are asked, answers in them ignored."
    )
    backend: Literal["transformers", "server"] = Field(
        "transformers", description="Who answers: the target loaded here, or servers with the OpenAI interface (vLLM, SGLang)."
    )
    base_urls: list[str] = Field([], description='Servers, for example ["http://127.0.0.1:8000/v1"]; requests are spread over them.')
    model: str | None = Field(None, description="The model's name at the servers; the only one they serve when left out.")
    api_key_env: str | None = Field(None, description="Name of the environment variable that holds the servers' key.")
    concurrency: PositiveInt = Field(64, description="Requests in flight at each server.")
    retries: Annotated[int, Field(ge=0)] = Field(8, description="Further tries of a request before its row is given up.")
    retry_wait_s: Annotated[float, Field(gt=0)] = Field(
        0.5, description="Wait before the first of them; doubles each time up to 30 s, unless the server names a time."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="Longest wait for one answer.")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0 takes the most likely token each time.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Share of the probability that is drawn from.")
    max_new_tokens: PositiveInt = Field(2048, description="Most tokens of one answer. An answer cut here ends its conversation.")
    max_turns: PositiveInt = Field(8, description="Most user turns of a conversation that are asked.")
    max_prompts: PositiveInt | None = Field(None, description="Only the first so many rows of the prompt files; all when left out.")
    seed: Seed = Field(0, description="Seed of the drawn tokens.")
    gpus: Gpus | None = Field(None, description="GPUs of the transformers back end, one process each; those of [target] when left out.")
    replicas: PositiveInt = Field(1, description='Number of processes of the transformers back end when gpus = "cpu".')
    batch: PositiveInt = Field(512, description="Most conversations that one process answers at once; fewer where memory is short.")
    part_rows: PositiveInt = Field(1000, description="Most prompts in one part, the unit that is committed.")

    _gpus = field_validator("gpus")(check_gpus)

    @field_validator("base_urls")
    @classmethod
    def _urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not re.fullmatch(r"https?://(\[[0-9a-fA-F:]+\]|[^\s/@?#:\[\]]+)(:\d+)?(/[^\s@?#]*)?", url):
                shown = re.sub(r"(?s)[?#].*", "?...", re.sub(r"(?s)^([a-z]+://)?.*@", r"\1...@", url))
                raise ValueError(
                    f"base_urls: {shown!r} is no plain http(s)://host:port/path; a key goes into the variable that api_key_env names"
                )
        return urls

    @field_validator("api_key_env")
    @classmethod
    def _variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("api_key_env is no name of an environment variable; never write the key itself into a run file")
        return name

    @model_validator(mode="after")
    def _backends(self) -> "RegenerateConfig":
        if self.backend == "server" and not self.base_urls:
            raise ValueError('backend = "server" needs base_urls, for example ["http://127.0.0.1:8000/v1"]')
        server_only = [name for name in ("base_urls", "model", "api_key_env") if getattr(self, name)]
        if self.backend == "transformers" and server_only:
            raise ValueError(f'{server_only[0]} has no effect with backend = "transformers"; set backend = "server"')
        return self

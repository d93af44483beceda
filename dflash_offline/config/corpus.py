"""``[corpus]``."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dflash_offline.config.section import Fraction, PositiveInt, Section


class CorpusConfig(Section):
    """The conversations: files, template, loss mask, length buckets, held-out split."""

    files: list[str] = Field(
        [],
        description='Conversation files, folders or globs: JSONL, JSON, Parquet, Arrow; gzip, bz2, xz, zstd; "-" for standard input; '
        "owner/name@config:split of a Hugging Face data set (pip install datasets). Left out with [regenerate].",
    )
    bucket_edges: list[PositiveInt] | Literal["auto"] = Field(
        [770, 1216, 1728, 2432, 3296, 8193],
        min_length=1,
        description='Length buckets in tokens: everything below the first edge, then [edge, next edge). "auto" takes them from the corpus.',
    )
    num_buckets: PositiveInt = Field(6, description='Most length buckets that bucket_edges = "auto" makes.')
    max_length: PositiveInt = Field(8192, description="Longest conversation kept whole, in tokens; must be below the last bucket edge.")
    too_long: Literal["cut", "cut_turn", "drop"] = Field(
        "cut", description="A longer one is cut at max_length, cut at its last whole turn, or dropped."
    )
    tokens_per_batch: PositiveInt = Field(16384, description="Token budget of one capture batch, padding included.")
    heldout_fraction: Fraction = Field(
        0.02, description="Share of the conversations kept for evaluation, chosen by a stable hash of their prompt."
    )
    chat_template: str | None = Field(None, description="File with a Jinja chat template in place of the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Passed to the chat template, for example { enable_thinking = false }.")
    supervise: Literal["all", "last"] = Field("all", description="Assistant turns that are trained on: all of them, or the last one only.")
    supervise_thinking: bool = Field(True, description="Whether thinking text inside an answer is trained on.")
    strict: bool = Field(False, description="Fail on the first row that cannot be used, instead of counting it.")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        {}, description='Role names of your own data, for example { student = "user", teacher = "assistant" }.'
    )
    drop_answers: list[str] = Field(
        [], description='Regular expressions; a conversation is left out when one matches the start of an answer, for example ["ERROR"].'
    )
    workers: PositiveInt | None = Field(None, description="Processes that tokenise; one for each core when left out.")

    @field_validator("drop_answers")
    @classmethod
    def _patterns(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"drop_answers: {pattern!r} is no regular expression ({error})") from None
        return patterns

    @model_validator(mode="after")
    def _edges(self) -> "CorpusConfig":
        edges = self.bucket_edges
        if isinstance(edges, list):
            if edges != sorted(set(edges)):
                raise ValueError(f"bucket_edges = {edges}: must rise")
            if self.max_length >= edges[-1]:
                raise ValueError(f"max_length = {self.max_length} does not fit bucket_edges, which end at {edges[-1]}; raise the last edge")
        if self.tokens_per_batch < self.max_length:
            raise ValueError(
                f"tokens_per_batch = {self.tokens_per_batch} is below max_length = {self.max_length}; a batch holds the longest row"
            )
        return self

"""``[store]``."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from dflash_offline.config.section import PositiveInt, Section
from dflash_offline.store_url import HOLDS_SECRETS, holds_secrets


class StoreConfig(Section):
    """The hidden-state store."""

    codec: Literal["bf16", "lossless", "int8", "int6", "int4"] = Field(
        "int8",  # its drafters accept as long as those trained from exact values: docs/quality.md
        description="How hidden states are stored: bf16 as it is, lossless (bit-exact, about 0.68 of that), int8 (0.51), int6 (0.41), "
        "int4 (0.30).",
    )
    zstd: bool = Field(False, description="Compress int8/int6/int4 codes with zstd as well: smaller, slower to read.")
    part_bytes: PositiveInt = Field(1_000_000_000, description="Encoded hidden-state bytes in one part, the unit that is committed.")
    shard_bytes: PositiveInt = Field(128_000_000, description="Bytes of one Zarr shard (one file).")
    chunk_tokens: Annotated[int, Field(gt=0, le=65536)] = Field(64, description="Tokens in one Zarr chunk, the unit that is read.")
    store_last_hidden: bool = Field(False, description="Also store the last layer's output before the final norm, for distillation losses.")
    verify: Literal["deep", "sizes", "off"] = Field(
        "deep", description="What training checks before it first reads a part: checksums, sizes only, or nothing."
    )
    url: str | None = Field(
        None,
        description='Keep hidden states in an object store, for example "s3://bucket/prefix" (pip install "dflash_offline[objectstore]"); '
        "any URL of obstore or fsspec. Credentials come from the environment.",
    )
    cache_bytes: PositiveInt = Field(50_000_000_000, description="With url: bytes of hidden states kept on this host's disk, at most.")
    cache_folder: str | None = Field(None, description="With url: where they are kept; beside the store's tables below root when left out.")

    @field_validator("url")
    @classmethod
    def _url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if holds_secrets(url):  # not repeated in the message
            raise ValueError(f"url {HOLDS_SECRETS}")
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s]+", url):
            raise ValueError(f'url = "{url}": give SCHEME://BUCKET/PREFIX, for example "s3://bucket/prefix"')
        if url.startswith("memory://"):
            raise ValueError(f'url = "{url}": memory is gone with the process that captures; name a store that other processes reach')
        return url.rstrip("/")

    def location(self, capture_key: str) -> str | None:
        """URL of the store with this key; None for a local one."""
        return None if self.url is None else f"{self.url}/{capture_key}/hidden_states.zarr"

    @property
    def cache(self) -> dict[str, int | str | None]:
        """What ``HiddenStateStore`` is told about its cache."""
        return {"cache_bytes": self.cache_bytes, "cache_folder": self.cache_folder}

"""``[store]``."""

from typing import Literal

from pydantic import Field

from dflash_offline.config.section import PositiveInt, Section


class StoreConfig(Section):
    """The hidden-state store."""

    codec: Literal["bf16", "lossless", "int8", "int6", "int4"] = Field(
        "lossless",
        description="How hidden states are stored: bf16 as it is, lossless (about 0.68 of that), int8 (0.51), int6 (0.40), int4 (0.29).",
    )
    zstd: bool = Field(False, description="Compress int8/int6/int4 codes with zstd as well: smaller, slower to read.")
    part_bytes: PositiveInt = Field(1_000_000_000, description="Encoded hidden-state bytes in one part, the unit that is committed.")
    shard_bytes: PositiveInt = Field(128_000_000, description="Bytes of one Zarr shard (one file).")
    chunk_tokens: PositiveInt = Field(64, description="Tokens in one Zarr chunk, the unit that is read.")
    store_last_hidden: bool = Field(False, description="Also store the last layer's output before the final norm, for distillation losses.")
    verify: Literal["deep", "sizes", "off"] = Field(
        "deep", description="What training checks before it first reads a part: checksums, sizes only, or nothing."
    )

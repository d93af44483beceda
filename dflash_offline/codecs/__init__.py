"""Numeric codecs of the hidden-state store.

Reading order::

    base        what a codec is
    planes      bf16 as it is; lossless, exponents apart
    quantised   int8, int6, int4
    statistics  per-channel scales, measured once
    kernels     the same in Triton, for a GPU

``make_codec(name, ...)`` gives the codec that a run file or a store names.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_offline.codecs.base import Codec, EncodedArray
from dflash_offline.codecs.planes import Bf16Codec, BytePlanesCodec, LosslessCodec
from dflash_offline.codecs.quantised import QuantisedCodec
from dflash_offline.codecs.statistics import ChannelStatistics
from dflash_offline.errors import StoreError

CODECS = ("bf16", "lossless", "int8", "int6", "int4")
NEEDS_STATISTICS = ("int8", "int6", "int4")
MULTIPLE_OF = {"lossless": 2, "int6": 4, "int4": 2}  # what the hidden size must be a multiple of, to pack whole bytes

__all__ = [
    "CODECS",
    "NEEDS_STATISTICS",
    "Bf16Codec",
    "BytePlanesCodec",
    "ChannelStatistics",
    "Codec",
    "EncodedArray",
    "LosslessCodec",
    "QuantisedCodec",
    "check_hidden_size",
    "codec_of_part",
    "make_codec",
]


def check_hidden_size(name: str, hidden_size: object) -> None:
    """Refuse a codec that cannot pack so many channels; a size that is no number is left to what needs one.

    Raises:
        StoreError: naming what would do.
    """
    multiple = MULTIPLE_OF.get(name, 1)
    if isinstance(hidden_size, int) and hidden_size % multiple:
        fits = ", ".join(f'"{codec}"' for codec in CODECS if hidden_size % MULTIPLE_OF.get(codec, 1) == 0)
        raise StoreError(
            f'[store] codec = "{name}" needs a hidden size that is a multiple of {multiple}; the target\'s is {hidden_size}; '
            f"use one of {fits}"
        )


def make_codec(
    name: str,
    *,
    num_taps: int,
    hidden_size: int,
    zstd: bool = False,
    statistics: ChannelStatistics | None = None,
    format_version: int | None = None,
) -> Codec:
    """The codec of that name.

    Args:
        format_version: of the store; None = the newest. ``lossless`` has changed with version 2.

    Raises:
        StoreError: there is none, or not for this hidden size.
    """
    check_hidden_size(name, hidden_size)
    if name == "bf16":
        return Bf16Codec(num_taps, hidden_size)
    if name == "lossless":
        return (BytePlanesCodec if format_version == 1 else LosslessCodec)(num_taps, hidden_size)
    if name in NEEDS_STATISTICS:
        return QuantisedCodec.of(name, num_taps, hidden_size, statistics=statistics, zstd=zstd)
    raise StoreError(f"codec {name!r} is not known; allowed: {', '.join(CODECS)}")


def codec_of_part(attributes: dict[str, Any], read_constant: Callable[[str], np.ndarray]) -> Codec:
    """The codec that a part's group attributes name, with the constants that the part holds."""
    name, num_taps, hidden_size = attributes["codec"], attributes["num_taps"], attributes["hidden_size"]
    if name not in NEEDS_STATISTICS:
        return make_codec(name, num_taps=num_taps, hidden_size=hidden_size, format_version=attributes["format_version"])
    outliers = read_constant("outlier_channels") if attributes["outlier_channels"] else np.zeros((num_taps, 0), np.int32)
    return QuantisedCodec(name, num_taps, hidden_size, channel_scale=read_constant("channel_scale"), outlier_channels=outliers, zstd=False)

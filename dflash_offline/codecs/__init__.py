"""Numeric codecs of the hidden-state store.

Reading order::

    base        what a codec is
    planes      bf16 as it is; lossless byte planes
    statistics  per-channel scales, measured once
    kernels     the same in Triton, for a GPU

``make_codec(name, ...)`` gives the codec that a run file or a store names.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_offline.codecs.base import Codec, EncodedArray
from dflash_offline.codecs.planes import Bf16Codec, LosslessCodec
from dflash_offline.codecs.statistics import ChannelStatistics
from dflash_offline.errors import StoreError

CODECS = ("bf16", "lossless")

__all__ = ["CODECS", "Bf16Codec", "ChannelStatistics", "Codec", "EncodedArray", "LosslessCodec", "codec_of_part", "make_codec"]


def make_codec(name: str, *, num_taps: int, hidden_size: int, zstd: bool = False, statistics: ChannelStatistics | None = None) -> Codec:
    """The codec of that name.

    Raises:
        StoreError: there is none.
    """
    if name == "bf16":
        return Bf16Codec(num_taps, hidden_size)
    if name == "lossless":
        return LosslessCodec(num_taps, hidden_size)
    raise StoreError(f"codec {name!r} is not known; allowed: {', '.join(CODECS)}")


def codec_of_part(attributes: dict[str, Any], read_constant: Callable[[str], np.ndarray]) -> Codec:
    """The codec that a part's group attributes name, with the constants that the part holds."""
    return make_codec(attributes["codec"], num_taps=attributes["num_taps"], hidden_size=attributes["hidden_size"])

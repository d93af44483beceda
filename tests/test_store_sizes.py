"""How many bytes a written store takes, against bf16."""

import pytest
import torch
from small_store import folder_in_memory, identity, settings, statistics_for

from dflash_offline import store
from dflash_offline.config import StoreConfig
from dflash_offline.store.schema import SAMPLE_ARRAYS, TOKEN_ARRAYS

# most bytes over those of bf16, where H has blocks of 128 channels or more; with blocks of 64
ALLOWED = {"bf16": (1.001, 1.001), "int8": (0.51, 0.52), "int6": (0.40, 0.41), "int4": (0.29, 0.30)}
TAPS = 5


def _write(root, codec: str, *, hidden: int, tokens: int, samples: int, **fields) -> dict:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(tokens, TAPS, hidden, generator=generator) * 8).bfloat16()
    store.create_or_open(root, identity(codec, layer_ids=list(range(TAPS))))
    shape = {"num_taps": TAPS, "hidden_size": hidden, "num_tokens": tokens * samples, "num_samples": samples}
    options = {"store_settings": settings(codec, **fields), "statistics": statistics_for(codec, TAPS, hidden)}
    with store.PartWriter(root, "part-00000", **shape, **options) as part:
        for i in range(samples):
            part.append(i, i.to_bytes(32, "little"), 0, [1] * tokens, [1] * tokens, values)
        part.commit()
    return store.summary(root)


@pytest.mark.parametrize("codec", ALLOWED)
@pytest.mark.parametrize("hidden", [576, 1024, 4096])
def test_bytes_over_bf16(codec, hidden):
    """Bytes on disk of all that the hidden states need, constants as they weigh in a part of the default size."""
    tokens = 1_250_000 // hidden // 64 * 64
    with folder_in_memory() as folder:
        found = _write(folder / "s", codec, hidden=hidden, tokens=tokens // 4, samples=4, shard_bytes=128_000_000)
        part, bf16 = folder / "s" / "part-00000", 2 * TAPS * hidden * tokens
        sizes = {array.name: sum(path.stat().st_size for path in array.rglob("c/**/*") if path.is_file()) for array in part.iterdir()}
        assert sum(sizes.values()) <= found["bytes"] <= sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        once = sum(sizes.pop(name, 0) for name in ("channel_scale", "outlier_channels"))
        for name in (*TOKEN_ARRAYS, *SAMPLE_ARRAYS):  # of bf16 there would be as many
            sizes.pop(name)
        ratio = sum(sizes.values()) / bf16 + once / StoreConfig().part_bytes
        assert 0.9 * ALLOWED[codec][0] < ratio <= ALLOWED[codec][hidden == 576], f"{ratio:.4f} {sizes}"

"""Makes the golden stores beside this file, one per codec that a format version changed: run once per version, never for an old one.

    python tests/golden/make_store.py

Every later release must read them: ``tests/test_store_golden.py``. The rows come from integers, not from a random
generator, so that any version of any library makes the same ones.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent
VERSION, TAPS, HIDDEN, LENGTHS = 2, 2, 64, [3, 70, 1]
CODECS = ("lossless",)  # those that the version changed


def row(number: int) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Ids, mask and hidden states bf16 [T, K, H] of a golden row: a fixed walk over bf16 bit patterns of ordinary size."""
    tokens = LENGTHS[number]
    ids = (np.arange(tokens) * 7 + number).astype(np.int32)
    mask = (np.arange(tokens) % 3 > 0).astype(np.uint8)
    at = np.arange(tokens * TAPS * HIDDEN, dtype=np.int64) + 100_003 * number
    value = (at * 2654435761 >> 7) % 2001 - 1000  # -1000 to 1000
    value = value.reshape(tokens, TAPS, HIDDEN) * 2.0 ** -(np.arange(tokens)[:, None, None] % 6)
    value[:, :, 5] *= 100
    return ids, mask, torch.from_numpy(value).to(torch.bfloat16)


def main() -> None:
    from dflash_offline import manifest, store
    from dflash_offline.codecs import ChannelStatistics
    from dflash_offline.config import StoreConfig

    kept = ("dflash_offline", "torch", "zarr", "numcodecs")
    versions = {name: version for name, version in manifest.environment().items() if name in kept}
    manifest.environment = lambda: versions  # a golden store need not say on which machine it was made
    for codec in CODECS:
        root = FOLDER / f"v{VERSION}-{codec}.zarr"
        if root.exists():
            sys.exit(f"{root} is there; golden stores are not made again")
        store.create_or_open(root, {"layer_ids": [4, 9], "codec": codec, "golden": True})
        statistics = ChannelStatistics.from_rows([row(1)[2]])
        with store.PartWriter(
            root,
            "part-00000",
            store_settings=StoreConfig(codec=codec, shard_bytes=64 * TAPS * HIDDEN),
            num_taps=TAPS,
            hidden_size=HIDDEN,
            num_tokens=sum(LENGTHS),
            num_samples=len(LENGTHS),
            statistics=statistics,
        ) as part:
            for number in range(len(LENGTHS)):
                ids, mask, hidden = row(number)
                part.append(number, hashlib.sha256(bytes([number])).digest(), number, ids, mask, hidden)
            part.commit()
        decoded = [store.HiddenStateStore(root)[i].hidden_states().view(torch.int16).numpy() for i in range(len(LENGTHS))]
        digest = hashlib.sha256(b"".join(array.tobytes() for array in decoded)).hexdigest()
        (FOLDER / f"v{VERSION}-{codec}.sha256").write_text(digest + "\n")  # of the decoded bf16 bits
        (root / ".lock").unlink()


if __name__ == "__main__":
    main()

"""Small stores for the tests: rows that look like residual streams, written through PartWriter."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_offline import store
from dflash_offline.codecs import NEEDS_STATISTICS, ChannelStatistics
from dflash_offline.config import StoreConfig

K, H = 3, 64
LENGTHS = [5, 200, 63, 64, 65, 1, 129, 300, 7, 90]


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A temporary folder, in memory where there is one: hundreds of fsyncs on a shared disk take minutes."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@dataclass
class Row:
    sample_id: int
    sha256: bytes
    bucket: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: torch.Tensor


def residual_stream(tokens: int, taps: int, hidden: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [T, K, H] with outlier channels and a first token far larger than the others, as real ones have."""
    channels = torch.exp(torch.randn(taps, hidden, generator=torch.Generator().manual_seed(hidden)))
    channels[:, 3] *= 60
    values = torch.randn(tokens, taps, hidden, generator=generator) * channels
    values[0] *= 40
    return values.bfloat16()


def rows(lengths: list[int] = LENGTHS, *, taps: int = K, hidden: int = H, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, tokens in enumerate(lengths):
        ids = torch.randint(0, 500, (tokens,), generator=generator).numpy().astype(np.int32)
        mask = (np.arange(tokens) >= tokens // 3).astype(np.uint8)
        sha256 = hashlib.sha256(ids.astype("<i4").tobytes() + mask.tobytes() + bytes([seed])).digest()
        made.append(Row(100 + i, sha256, i % 4, ids, mask, residual_stream(tokens, taps, hidden, generator)))
    return made


def identity(codec: str = "lossless", **fields: object) -> dict[str, object]:
    layers = fields.pop("layer_ids", list(range(1, K + 1)))
    return {
        "target_weights": "abc",
        "layer_ids": layers,
        "dtype": "bfloat16",
        "codec": codec,
        "zstd": False,
        "store_last_hidden": False,
        **fields,
    }


def settings(codec: str = "lossless", **fields: object) -> StoreConfig:
    return StoreConfig(**{"codec": codec, "shard_bytes": 128 * K * (H + 1), "chunk_tokens": 64, **fields})


def statistics_for(codec: str, taps: int = K, hidden: int = H) -> ChannelStatistics | None:
    if codec not in NEEDS_STATISTICS:
        return None
    return ChannelStatistics.from_rows(row.hidden for row in rows([150, 80], taps=taps, hidden=hidden, seed=99))


def writer(root: Path, name: str, samples: list[Row], codec: str = "lossless", **fields: object) -> store.PartWriter:
    taps, hidden = samples[0].hidden.shape[1:]
    return store.PartWriter(
        root,
        name,
        store_settings=settings(codec, **fields),
        num_taps=taps,
        hidden_size=hidden,
        num_tokens=sum(len(row.input_ids) for row in samples),
        num_samples=len(samples),
        statistics=statistics_for(codec, taps, hidden),
    )


def append(part: store.PartWriter, row: Row) -> None:
    part.append(row.sample_id, row.sha256, row.bucket, row.input_ids, row.loss_mask, row.hidden)


def write_part(root: Path, name: str, samples: list[Row], codec: str = "lossless", **fields: object) -> None:
    """Write or finish a part, as capture does: from ``resume_sample`` on."""
    with writer(root, name, samples, codec, **fields) as part:
        for row in samples[part.resume_sample :]:
            append(part, row)
        part.commit({"replica": 0})


def make_store(root: Path, codec: str = "lossless", parts: int = 2, **fields: object) -> list[Row]:
    """A store with ``parts`` parts; returns its rows in order."""
    store.create_or_open(root, identity(codec))
    everything = []
    for i in range(parts):
        samples = rows(seed=i)
        write_part(root, f"part-{i:05d}", samples, codec, **fields)
        everything += samples
    return everything


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int16), other.contiguous().view(torch.int16))


def content(root: Path) -> dict[str, bytes]:
    """Every file whose bytes are decided by the rows: all but manifests and index, which hold times and versions."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name not in ("manifest.json", "index.json"))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}

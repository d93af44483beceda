"""The files of one part: its shape, metadata, small arrays and manifest.

T tokens, K taps, W values per token and tap, C token chunks of a shard.

::

    part-00012/
      zarr.json                          group; attributes: codec, num_taps, hidden_size, numbers of the codec
      high/ low/ | codes/ scales/ ...    [T, K, W], chunks [64, 1, W] inside shards; see ``codecs``
      input_ids/ loss_mask/              [T]
      sample_offsets/                    [n + 1], edges of the samples along T
      sample_ids/ sample_hashes/ buckets/  [n], [n, 32], [n]
      channel_scale/ ...                 [K, ...], what the codec needs beside the arrays per token
      manifest.json                      written last
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline import manifest
from dflash_offline.codecs import Codec, EncodedArray
from dflash_offline.config import StoreConfig
from dflash_offline.store import schema
from dflash_offline.store.journal import Journal
from dflash_offline.store.shard_writing import write_shard
from dflash_offline.store.shards import array_metadata, write_small

SAMPLE = np.dtype([("sample_id", "<i8"), ("sha256", "u1", 32), ("bucket", "<i2"), ("tokens", "<i8")])  # a row of the spool


@dataclass(frozen=True)
class PartShape:
    """Sizes of a part, fixed by the plan and the settings before its first token."""

    num_tokens: int
    num_samples: int
    num_taps: int
    hidden_size: int
    chunk_tokens: int
    shard_tokens: int  # of the bulk arrays; small arrays are one shard

    @classmethod
    def of(cls, codec: Codec, settings: StoreConfig, *, num_tokens: int, num_samples: int) -> "PartShape":
        """Shards of whole chunks, no larger than ``shard_bytes`` nor than the part."""
        chunk = settings.chunk_tokens
        widest = codec.num_taps * max(array.token_bytes for array in codec.arrays)
        chunks = max(1, min(settings.shard_bytes // (chunk * widest), -(-num_tokens // chunk)))
        return cls(num_tokens, num_samples, codec.num_taps, codec.hidden_size, chunk, chunk * chunks)

    def shard_chunks(self, array: EncodedArray) -> int:
        """C of an array."""
        return (self.shard_tokens if array.bulk else self.num_tokens + self.chunk_tokens - 1) // self.chunk_tokens

    def new_buffer(self, array: EncodedArray) -> np.ndarray:
        """Memory for one shard: uint8 ``[C, K, chunk bytes]``. Not cleared: numpy's ``empty`` comes in huge pages, ``zeros`` does not."""
        return np.empty((self.shard_chunks(array), self.num_taps, self.chunk_tokens * array.token_bytes), np.uint8)

    def copy_rows(self, rows: np.ndarray, buffer: np.ndarray, first: int) -> None:
        """Put ``rows`` [K, t, W] into the chunks of a shard's buffer, from its token ``first`` on."""
        size, done = self.chunk_tokens, 0
        view, raw = buffer.reshape(len(buffer), self.num_taps, size, -1), rows.view(np.uint8)
        while done < raw.shape[1]:
            chunk, row = divmod(first + done, size)
            count = min(raw.shape[1] - done, size - row)
            view[chunk, :, row : row + count] = raw[:, done : done + count]
            done += count

    def clear_tail(self, buffer: np.ndarray, tokens: int) -> int:
        """Zero what lies behind the last token of the last chunk in use; returns the number of chunks in use."""
        chunks = -(-tokens // self.chunk_tokens)
        if tail := chunks * self.chunk_tokens - tokens:
            buffer.reshape(len(buffer), self.num_taps, self.chunk_tokens, -1)[chunks - 1, :, -tail:] = 0
        return chunks


def write_metadata(folder: Path, codec: Codec, shape: PartShape) -> None:
    """Group and array metadata; the same bytes each time, so a resumed writer just writes them again."""
    attributes = {
        "format_version": schema.FORMAT_VERSION,
        "codec": codec.name,
        "num_taps": shape.num_taps,
        "hidden_size": shape.hidden_size,
        "row": "row j of a sample is its token j: id, loss mask and hidden states, not shifted",
        **codec.attributes,
    }
    folder.mkdir(exist_ok=True)
    manifest.write_json(folder / schema.GROUP_FILE, {"zarr_format": 3, "node_type": "group", "attributes": attributes}, durable=False)
    for array in codec.arrays:
        (folder / array.name).mkdir(exist_ok=True)
        metadata = array_metadata(
            (shape.num_tokens, shape.num_taps, array.width),
            array.dtype,
            chunks=(shape.chunk_tokens, 1, array.width),
            shards=(shape.shard_chunks(array) * shape.chunk_tokens, shape.num_taps, array.width),
            zstd=array.zstd,
            fill_value=array.fill_value,
            attributes=array.attributes,
            dimension_names=("token", "tap", "value"),
        )
        manifest.write_bytes(folder / array.name / schema.GROUP_FILE, metadata, durable=False)


def write_small_arrays(folder: Path, codec: Codec, shape: PartShape, journal: Journal, executor: Executor | None) -> None:
    """Make Zarr arrays of what the journal's spools hold, and of the codec's constants."""
    samples = journal.spool("samples", SAMPLE, ())
    for name, dtype in schema.TOKEN_ARRAYS.items():
        write_small(folder / name, journal.spool(name, dtype, ()), ["token"])
    write_small(folder / "sample_offsets", np.concatenate([[0], np.cumsum(samples["tokens"])]).astype(np.int64), ["sample_edge"])
    write_small(folder / "sample_ids", samples["sample_id"].astype(np.int64), ["sample"])
    write_small(folder / "sample_hashes", samples["sha256"], ["sample", "byte"])
    write_small(folder / "buckets", samples["bucket"].astype(np.int16), ["sample"])
    for name, constant in codec.constants.items():
        write_small(folder / name, constant, ["tap", "channel"])
    for array in codec.arrays:
        if not array.bulk:
            rows, chunks = journal.spool(array.name, array.dtype, (shape.num_taps, array.width)), shape.new_buffer(array)
            shape.copy_rows(rows.swapaxes(0, 1), chunks, 0)
            shape.clear_tail(chunks, len(rows))
            path = folder / array.name / "c" / "0" / "0" / "0"
            write_shard(path, chunks, shard_chunks=len(chunks), zstd=array.zstd, executor=executor)


def write_part_manifest(
    folder: Path,
    journal: Journal,
    *,
    name: str,
    identity: dict[str, Any],
    codec: Codec,
    shape: PartShape,
    executor: Executor | None,
    **content: Any,
) -> None:
    """Sync every file and folder of the part, read back what was written, then write the part's manifest."""
    samples = journal.spool("samples", SAMPLE, ())
    arrays = [path for path in folder.iterdir() if path.is_dir()]
    files = sorted(str(path.relative_to(folder)) for array in arrays for path in array.rglob("*") if path.is_file())
    for parent in {p for file in files for p in (folder / file).parents if p.is_relative_to(folder)}:
        manifest.fsync_folder(parent)
    written = manifest.write_manifest(
        folder,
        kind=schema.PART_KIND,
        key=manifest.digest(identity),
        files=[schema.GROUP_FILE, *files],
        executor=executor,
        name=name,
        codec=codec.name,
        constants=codec.constants_digest,
        samples=shape.num_samples,
        tokens=shape.num_tokens,
        num_taps=shape.num_taps,
        hidden_size=shape.hidden_size,
        sample_ids=[int(samples["sample_id"].min()), int(samples["sample_id"].max())],
        **content,
    )
    changed = [file for file, expected in journal.files.items() if written["files"][file] != expected]
    assert not changed, f"{folder}: {changed} differ from what was written"

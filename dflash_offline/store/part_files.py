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

import contextlib
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dflash_offline import manifest
from dflash_offline.codecs import Codec, EncodedArray
from dflash_offline.config import StoreConfig
from dflash_offline.errors import StoreError
from dflash_offline.store import schema
from dflash_offline.store.journal import SPOOL_SUFFIX, Journal, SpoolDamagedError
from dflash_offline.store.read_back import read_back, refuse_foreign_files
from dflash_offline.store.shard_writing import place_bytes, write_shard
from dflash_offline.store.shards import array_metadata, small_array

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
        """Memory for one shard: uint8 ``[C, K, place_bytes]``. Not cleared: numpy's ``empty`` comes in huge pages, ``zeros`` does not."""
        return np.empty((self.shard_chunks(array), self.num_taps, place_bytes(self.chunk_tokens * array.token_bytes, array.zstd)), np.uint8)

    def _tokens(self, buffer: np.ndarray, token_bytes: int) -> np.ndarray:
        """The tokens in a shard's buffer: ``[C, K, tokens of a chunk, bytes of a token]``, a view."""
        return buffer[..., : self.chunk_tokens * token_bytes].reshape(len(buffer), self.num_taps, self.chunk_tokens, token_bytes)

    def copy_rows(self, rows: np.ndarray, buffer: np.ndarray, first: int) -> None:
        """Put ``rows`` [K, t, W] into the chunks of a shard's buffer, from its token ``first`` on."""
        raw, size = rows.view(np.uint8), self.chunk_tokens
        tokens, (chunk, row) = self._tokens(buffer, raw.shape[2]), divmod(first, size)
        if row:  # the end of a chunk, then whole ones, then the beginning of one
            count = min(raw.shape[1], size - row)
            tokens[chunk, :, row : row + count] = raw[:, :count]
            raw, chunk = raw[:, count:], chunk + 1
        whole, left = divmod(raw.shape[1], size)
        if whole:
            chunks = raw[:, : whole * size].reshape(self.num_taps, whole, size, -1)
            tokens[chunk : chunk + whole] = chunks.swapaxes(0, 1)
        if left:
            tokens[chunk + whole, :, :left] = raw[:, whole * size :]

    def clear_tail(self, array: EncodedArray, buffer: np.ndarray, tokens: int) -> int:
        """Zero what lies behind the last token of the last chunk in use; returns the number of chunks in use."""
        chunks = -(-tokens // self.chunk_tokens)
        if tail := chunks * self.chunk_tokens - tokens:
            self._tokens(buffer, array.token_bytes)[chunks - 1, :, -tail:] = 0
        return chunks


def metadata(codec: Codec, shape: PartShape, format_version: int) -> dict[str, bytes]:
    """Group and array metadata, path in the part -> content; the same bytes each time, so they are just written again."""
    attributes = {
        "format_version": format_version,
        "codec": codec.name,
        "num_taps": shape.num_taps,
        "hidden_size": shape.hidden_size,
        "row": "row j of a sample is its token j: id, loss mask and hidden states, not shifted",
        **codec.attributes,
    }
    files = {schema.GROUP_FILE: manifest.json_bytes({"zarr_format": 3, "node_type": "group", "attributes": attributes})}
    for array in codec.arrays:
        files[f"{array.name}/{schema.GROUP_FILE}"] = array_metadata(
            (shape.num_tokens, shape.num_taps, array.width),
            array.dtype,
            chunks=(shape.chunk_tokens, 1, array.width),
            shards=(shape.shard_chunks(array) * shape.chunk_tokens, shape.num_taps, array.width),
            zstd=array.zstd,
            fill_value=array.fill_value,
            attributes=array.attributes,
            dimension_names=("token", "tap", "value"),
        )
    return files


def write_files(folder: Path, files: dict[str, bytes]) -> dict[str, list[Any]]:
    """Write small files, not yet durable; the commit sees to that. Returns path in the part -> [bytes, checksum]."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_bytes(path, content, durable=False)
    return {name: [len(content), xxhash.xxh3_128(content).hexdigest()] for name, content in files.items()}


def write_small_arrays(
    folder: Path, codec: Codec, shape: PartShape, journal: Journal, executor: Executor | None
) -> tuple[dict[str, list[Any]], np.ndarray]:
    """Make Zarr arrays of what the journal's spools hold, and of the codec's constants.

    Returns:
        Path in the part -> [bytes, checksum] of what was written; the samples, ``SAMPLE`` ``[n]``.

    Raises:
        StoreError: spooled rows are not those that were noted; they are dropped from the journal.
    """
    try:
        samples = journal.spool("samples", SAMPLE, ())
        small = {
            "sample_offsets": (np.concatenate([[0], np.cumsum(samples["tokens"])]).astype(np.int64), ["sample_edge"]),
            "sample_ids": (samples["sample_id"].astype(np.int64), ["sample"]),
            "sample_hashes": (samples["sha256"], ["sample", "byte"]),
            "buckets": (samples["bucket"].astype(np.int16), ["sample"]),
            **{name: (journal.spool(name, dtype, ()), ["token"]) for name, dtype in schema.TOKEN_ARRAYS.items()},
            **{name: (constant, ["tap", "channel"]) for name, constant in codec.constants.items()},
        }
        files: dict[str, bytes] = {}
        for name, (array, dimension_names) in small.items():
            files |= small_array(name, array, dimension_names)
        written = write_files(folder, files)
        for array in codec.arrays:
            if not array.bulk:
                rows, chunks = journal.spool(array.name, array.dtype, (shape.num_taps, array.width)), shape.new_buffer(array)
                shape.copy_rows(rows.swapaxes(0, 1), chunks, 0)
                shape.clear_tail(array, chunks, len(rows))
                name = f"{array.name}/c/0/0/0"
                written[name] = list(write_shard(folder / name, chunks, shard_chunks=len(chunks), zstd=array.zstd, executor=executor))
    except SpoolDamagedError as damage:
        rows_named = _rows_of(journal, damage.shard)
        journal.forget(damage.shard)
        raise StoreError(
            f"{damage.path}: {'differs from what was written' if damage.path.exists() else 'missing'}, which concerns {rows_named} of "
            f"{folder.stem}; the part was not committed. Check the disk and run the same command again: it makes the part anew from "
            f"shard {damage.shard} on"
        ) from None
    return written, samples


def _rows_of(journal: Journal, shard: int) -> str:
    """The samples with a token in a shard; of them those whose ids and mask do not fit their hash, if that tells them apart."""
    try:
        samples = journal.spool("samples", SAMPLE, ())
    except SpoolDamagedError:
        return f"the samples of shard {shard}"
    first = journal.samples_after[shard - 1] if shard else 0
    touched = range(first, min(journal.samples_after[shard] + 1, len(samples)))
    wrong = []
    with contextlib.suppress(OSError):
        ids, mask = (np.fromfile(journal.folder / (name + SPOOL_SUFFIX), dtype) for name, dtype in schema.TOKEN_ARRAYS.items())
        edges = [0, *np.cumsum(samples["tokens"]).tolist()]
        wrong = [
            i for i in touched if _row_hash(ids[edges[i] : edges[i + 1]], mask[edges[i] : edges[i + 1]]) != bytes(samples["sha256"][i])
        ]
    named = wrong if 0 < len(wrong) < len(touched) else touched
    span = f"sample {named[0]}" if len(named) == 1 else f"samples {named[0]} to {named[-1]}"
    rows = samples["sample_id"][list(named)]
    return f"{span} (corpus row {rows[0]}{f' to {rows[-1]}' if len(named) > 1 else ''})"


def _row_hash(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    from dflash_offline.corpus import row_hash  # loads tokenizers; wanted for a message only

    return row_hash(input_ids, loss_mask)


def write_part_manifest(
    folder: Path,
    journal: Journal,
    *,
    name: str,
    identity: dict[str, Any],
    codec: Codec,
    shape: PartShape,
    format_version: int,
    executor: Executor | None,
    **content: Any,
) -> None:
    """Write all but the shards, which are there, read back every file, and only then the part's manifest.

    The list of files comes from what the codec must have, never from what lies there.

    Raises:
        StoreError: a file is missing, differs from what was written, cannot be read, or is not the part's.
    """
    written = write_files(folder, metadata(codec, shape, format_version))
    small, samples = write_small_arrays(folder, codec, shape, journal, executor)
    expected = {**written, **small, **journal.files}
    shards = range(-(-shape.num_tokens // shape.shard_tokens))
    wanted = {f"{array.name}/c/{shard}/0/0" for array in codec.arrays if array.bulk for shard in shards}
    if journal.files.keys() != wanted or len(samples) != shape.num_samples or samples["tokens"].sum() != shape.num_tokens:
        journal.forget(0)
        raise StoreError(
            f"{journal.folder}: what it notes is not what {name} must hold, so it has been damaged; the part was not committed. "
            "Check the disk and run the same command again: it makes the part anew"
        )
    refuse_foreign_files(folder, expected)
    read_back(folder, expected, journal, executor=executor)
    manifest.write_manifest(
        folder,
        kind=schema.PART_KIND,
        key=manifest.digest(identity),
        files=dict(sorted(expected.items())),
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

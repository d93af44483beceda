"""Writes one part of a store: resumable Zarr shard by Zarr shard, committed whole.

T tokens, K taps, H hidden size, C token chunks of a shard.

1. ``append`` encodes each sample where it lies and collects the codes in the buffer of the current shard.
2. A full shard is written by a thread, synced, and noted in the journal (``journal``); the next one fills meanwhile,
   so at most two are in memory.
3. ``commit`` writes the small arrays and the manifest, syncs, lists the part in the store's index and renames
   ``part-00012.partial`` to ``part-00012``. Killed anywhere in between, the same calls finish the work.

One process at a time writes a part (a lock on ``.part-00012.lock``); a shard has one writer, ever.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import manifest
from dflash_offline.codecs import Codec, EncodedArray, make_codec
from dflash_offline.config import StoreConfig
from dflash_offline.errors import StoreError, StoreFullError
from dflash_offline.store import schema
from dflash_offline.store.journal import Journal
from dflash_offline.store.shards import array_metadata, write_shard, write_small

SAMPLE = np.dtype([("sample_id", "<i8"), ("sha256", "u1", 32), ("bucket", "<i2"), ("tokens", "<i8")])


class PartWriter:
    """Context manager that writes part ``name`` of the store. Samples come in the order of the plan.

    Leaving the block without ``commit`` (an exception, a kill) keeps the shards that were finished.

    Args:
        num_tokens, num_samples: of the whole part, known from the plan.
        statistics: of the channels, for codecs that need them.
        threads: compress chunks in parallel.
    """

    def __init__(
        self,
        store_path: Path | str,
        name: str,
        *,
        store_settings: StoreConfig,
        num_taps: int,
        hidden_size: int,
        num_tokens: int,
        num_samples: int,
        statistics: Any = None,
        threads: int = 1,
    ):
        if not schema.PART_NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no name of a part; they are part-00000, part-00001, ...")
        assert num_tokens >= num_samples > 0 and num_taps > 0 and hidden_size > 0
        self.root, self.name, self.settings = Path(store_path), name, store_settings
        self.num_taps, self.hidden_size, self.num_tokens, self.num_samples = num_taps, hidden_size, num_tokens, num_samples
        self.codec: Codec = make_codec(
            store_settings.codec, num_taps=num_taps, hidden_size=hidden_size, zstd=store_settings.zstd, statistics=statistics
        )
        self.target, self.partial = self.root / name, self.root / f"{name}.partial"
        self.identity = schema.read_attributes(self.root)["identity"]
        self.already_committed = False
        self.resume_sample = 0
        self.chunk_tokens, self.shard_tokens = _shard_shape(self.codec, store_settings, num_tokens)
        self.bulk = [array for array in self.codec.arrays if array.bulk]
        self.small = [array for array in self.codec.arrays if not array.bulk]
        self._threads, self._resources = threads, contextlib.ExitStack()

    def __enter__(self) -> "PartWriter":
        with self._resources as resources, self._explained():
            self._lock(resources)
            self.journal = Journal(self.root / f".{self.name}.work", self.partial)
            self._recover()
            self._writer = resources.enter_context(ThreadPoolExecutor(1, f"{self.name}-writer"))
            self._compressor: Executor | None = resources.enter_context(ThreadPoolExecutor(self._threads)) if self._threads > 1 else None
            self._pending: Future | None = None
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _lock(self, resources: contextlib.ExitStack) -> None:
        path = self.root / f".{self.name}.lock"
        while True:
            descriptor = resources.enter_context(schema.open_lock(path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"{self.partial}: another process is writing this part; wait for it, or stop it first") from None
            try:
                if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                    break
            except FileNotFoundError:
                pass  # its former holder committed and removed it between our open and our lock
        resources.callback(lambda: path.unlink(missing_ok=True))

    def _recover(self) -> None:
        if not (self.target / manifest.MANIFEST).exists() and (self.partial / manifest.MANIFEST).exists():
            self._publish()  # killed between manifest and rename
        if (self.target / manifest.MANIFEST).exists():
            self.journal.clear()
            self.already_committed, self.resume_sample = True, self.num_samples
            return
        if self.target.exists():
            raise StoreError(
                f"{self.target}: exists without a manifest, so it is not a part of this store; move it away and run the same command again"
            )
        self.journal.start(self._spec())
        self._write_metadata()
        samples = self.journal.spool("samples", SAMPLE, ())
        self.resume_sample = len(samples)
        self._position = self.journal.tokens
        self._skip = self.journal.tokens - int(samples["tokens"].sum())
        self._buffers = self._new_buffers()
        self._spare: list[np.ndarray] | None = None
        self._rows: dict[str, list[bytes]] = {name: [] for name in ("samples", *schema.TOKEN_ARRAYS, *(a.name for a in self.small))}
        self._samples = self.resume_sample
        self._norms = _Norms(self.num_taps, self.journal.statistics)

    def _spec(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "format_version": schema.FORMAT_VERSION,
            "identity": manifest.digest(self.identity),
            "codec": self.codec.name,
            "zstd": self.settings.zstd,
            "constants": {name: manifest.xxhash.xxh3_128(array.tobytes()).hexdigest() for name, array in self.codec.constants.items()},
            "num_taps": self.num_taps,
            "hidden_size": self.hidden_size,
            "num_tokens": self.num_tokens,
            "num_samples": self.num_samples,
            "chunk_tokens": self.chunk_tokens,
            "shard_tokens": self.shard_tokens,
        }

    def _write_metadata(self) -> None:
        """Group and array metadata; the same bytes each time, so a resumed writer just writes them again."""
        attributes = {
            "format_version": schema.FORMAT_VERSION,
            "codec": self.codec.name,
            "num_taps": self.num_taps,
            "hidden_size": self.hidden_size,
            "row": "row j of a sample is its token j: id, loss mask and hidden states, not shifted",
            **self.codec.attributes,
        }
        self.partial.mkdir(exist_ok=True)
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        manifest.write_json(self.partial / schema.GROUP_FILE, group, durable=False)
        for array in self.codec.arrays:
            (self.partial / array.name).mkdir(exist_ok=True)
            manifest.write_bytes(self.partial / array.name / "zarr.json", self._metadata(array), durable=False)

    def _metadata(self, array: EncodedArray) -> bytes:
        return array_metadata(
            (self.num_tokens, self.num_taps, array.width),
            array.dtype,
            chunks=(self.chunk_tokens, 1, array.width),
            shards=(self.shard_tokens if array.bulk else self._whole_tokens(), self.num_taps, array.width),
            zstd=array.zstd,
            fill_value=array.fill_value,
            attributes=array.attributes,
            dimension_names=("token", "tap", "value"),
        )

    def _whole_tokens(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens) * self.chunk_tokens

    def _new_buffers(self) -> list[np.ndarray]:
        chunks = self.shard_tokens // self.chunk_tokens
        return [np.zeros((chunks, self.num_taps, self.chunk_tokens * array.token_bytes), np.uint8) for array in self.bulk]

    # -- samples in ------------------------------------------------------------------------------------------------

    def append(self, sample_id: int, sha256: bytes, bucket: int, input_ids: Any, loss_mask: Any, hidden: torch.Tensor) -> None:
        """Add the next sample.

        Args:
            sample_id: its row in the corpus.
            sha256: digest of its ids and mask, 32 bytes; the name the row goes by.
            input_ids, loss_mask: ``[T]``, tensors or arrays.
            hidden: bf16 ``[T, K, H]`` on the CPU or a GPU.

        Raises:
            StoreError: a value is not finite, or a tap is zero throughout; nothing of the sample is written.
            StoreFullError: the disk is full.
        """
        ids, mask = np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.uint8)
        assert hidden.dtype == torch.bfloat16 and hidden.shape == (len(ids), self.num_taps, self.hidden_size), (hidden.dtype, hidden.shape)
        assert len(ids) == len(mask) > 0 and len(sha256) == 32 and self._samples < self.num_samples, (
            sample_id,
            len(ids),
            len(mask),
            self._samples,
        )
        skip, self._skip = self._skip, 0
        assert skip < len(ids), f"sample {sample_id} is shorter than what is stored of it; the plan has changed"
        rms = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32).mul_(self.hidden_size**-0.5).cpu().numpy()
        _check_values(sample_id, rms)
        encoded = {name: array.cpu() for name, array in self.codec.encode(hidden[skip:]).items()}
        record = np.zeros((), SAMPLE)
        record["sample_id"], record["sha256"], record["bucket"], record["tokens"] = (
            sample_id,
            np.frombuffer(sha256, np.uint8),
            bucket,
            len(ids),
        )
        with self._explained():
            self._place(ids[skip:], mask[skip:], encoded, rms[skip:], record)

    def _place(self, ids: np.ndarray, mask: np.ndarray, encoded: dict[str, torch.Tensor], rms: np.ndarray, record: np.ndarray) -> None:
        arrays, done = {name: array.numpy() for name, array in encoded.items()}, 0
        assert self._position + len(ids) <= self.num_tokens, "more tokens than the plan has"
        while done < len(ids):
            first = self._position % self.shard_tokens
            count = min(len(ids) - done, self.shard_tokens - first)
            piece = slice(done, done + count)
            for array, buffer in zip(self.bulk, self._buffers, strict=True):
                self._copy(arrays[array.name][:, piece], buffer, first)
            for array in self.small:
                self._rows[array.name].append(arrays[array.name][:, piece].swapaxes(0, 1).tobytes())
            self._rows["input_ids"].append(ids[piece].tobytes())
            self._rows["loss_mask"].append(mask[piece].tobytes())
            self._norms.add(rms[piece])
            done += count
            self._position += count
            if done == len(ids):
                self._rows["samples"].append(record.tobytes())
                self._samples += 1
            if self._position % self.shard_tokens == 0:
                self._finish_shard()

    def _copy(self, codes: np.ndarray, buffer: np.ndarray, first: int) -> None:
        """``codes`` [K, t, W] into the shard's chunks, from its token ``first`` on."""
        size, done = self.chunk_tokens, 0
        view = buffer.reshape(len(buffer), self.num_taps, size, -1)
        raw = codes.view(np.uint8)
        while done < raw.shape[1]:
            chunk, row = divmod(first + done, size)
            count = min(raw.shape[1] - done, size - row)
            view[chunk, :, row : row + count] = raw[:, done : done + count]
            done += count

    # -- shards out ------------------------------------------------------------------------------------------------

    def _finish_shard(self) -> None:
        """Hand the current shard to the writing thread and go on with the other buffer."""
        self._wait()
        rows = {name: b"".join(pieces) for name, pieces in self._rows.items()}
        shard = (self._position - 1) // self.shard_tokens
        tokens = self._position - shard * self.shard_tokens
        job = (shard, tokens, self._buffers, rows, self._position, self._samples, self._norms.state())
        self._pending = self._writer.submit(self._write_shard, *job)
        self._buffers, self._spare = self._spare, self._buffers
        if self._buffers is None and self._position < self.num_tokens:
            self._buffers = self._new_buffers()
        self._rows = {name: [] for name in self._rows}

    def _write_shard(
        self, shard: int, tokens: int, buffers: list[np.ndarray], rows: dict[str, bytes], position: int, samples: int, norms: dict[str, Any]
    ) -> None:
        files, chunks = {}, -(-tokens // self.chunk_tokens)
        for array, buffer in zip(self.bulk, buffers, strict=True):
            if tail := chunks * self.chunk_tokens - tokens:  # rows of an earlier shard must not show behind the last token
                buffer.reshape(len(buffer), self.num_taps, self.chunk_tokens, -1)[chunks - 1, :, -tail:] = 0
            path = self.partial / array.name / "c" / str(shard) / "0" / "0"
            size = write_shard(path, buffer[:chunks], shard_chunks=len(buffer), zstd=array.zstd, executor=self._compressor)
            for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
                manifest.fsync_folder(folder)
            files[str(path.relative_to(self.partial))] = list(size)
        self.journal.append(tokens=position, samples=samples, files=files, spools=rows, statistics=norms)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    # -- the end ---------------------------------------------------------------------------------------------------

    def commit(self, extra: dict[str, Any] | None = None) -> None:
        """Write what is left, then the manifest, and give the part its name.

        Args:
            extra: what else the manifest records (seconds, replica, device ...); JSON values.
        """
        if self.already_committed:
            return
        assert self._position == self.num_tokens and self._samples == self.num_samples, (
            self._position,
            self.num_tokens,
            self._samples,
            self.num_samples,
        )
        with self._explained():
            if self._position % self.shard_tokens:
                self._finish_shard()
            self._wait()
            samples = self._write_small_arrays()
            self._write_manifest(samples, extra or {})
            self._publish()
            self.journal.clear()
        self.already_committed = True

    def _write_small_arrays(self) -> np.ndarray:
        journal, partial = self.journal, self.partial
        samples = np.array(journal.spool("samples", SAMPLE, ()))
        for name, dtype in schema.TOKEN_ARRAYS.items():
            write_small(partial / name, journal.spool(name, dtype, ()), ["token"])
        write_small(partial / "sample_offsets", np.concatenate([[0], np.cumsum(samples["tokens"])]).astype(np.int64), ["sample_edge"])
        write_small(partial / "sample_ids", samples["sample_id"].astype(np.int64), ["sample"])
        write_small(partial / "sample_hashes", samples["sha256"], ["sample", "byte"])
        write_small(partial / "buckets", samples["bucket"].astype(np.int16), ["sample"])
        for name, constant in self.codec.constants.items():
            write_small(partial / name, constant, ["tap", "channel"])
        for array in self.small:
            self._write_spooled(array)
        return samples

    def _write_spooled(self, array: EncodedArray) -> None:
        """One shard file for the whole of a small array, made from its spool."""
        rows = self.journal.spool(array.name, array.dtype, (self.num_taps, array.width))
        chunks = np.zeros((self._whole_tokens() // self.chunk_tokens, self.num_taps, self.chunk_tokens * array.token_bytes), np.uint8)
        self._copy(rows.swapaxes(0, 1), chunks, 0)
        write_shard(
            self.partial / array.name / "c" / "0" / "0" / "0", chunks, shard_chunks=len(chunks), zstd=array.zstd, executor=self._compressor
        )

    def _write_manifest(self, samples: np.ndarray, extra: dict[str, Any]) -> None:
        files = sorted(str(p.relative_to(self.partial)) for a in self.partial.iterdir() if a.is_dir() for p in a.rglob("*") if p.is_file())
        for folder in {p for name in files for p in (self.partial / name).parents if p.is_relative_to(self.partial)}:
            manifest.fsync_folder(folder)
        written = manifest.write_manifest(
            self.partial,
            kind=schema.PART_KIND,
            key=manifest.digest(self.identity),
            files=[schema.GROUP_FILE, *files],
            name=self.name,
            codec=self.codec.name,
            samples=self.num_samples,
            tokens=self.num_tokens,
            num_taps=self.num_taps,
            hidden_size=self.hidden_size,
            sample_ids=[int(samples["sample_id"].min()), int(samples["sample_id"].max())],
            rms=self._norms.summary(self.num_tokens),
            extra=extra,
        )
        changed = [name for name, expected in self.journal.files.items() if written["files"][name] != expected]
        assert not changed, f"{self.partial}: {changed} differ from what was written"

    def _publish(self) -> None:
        """List the part in the index, then rename it. In this order a kill in between leaves nothing unlisted."""
        found = manifest.read_manifest(self.partial, kind=schema.PART_KIND)
        num_bytes = sum(size for size, _ in found["files"].values())
        with schema.locked(self.root / schema.LOCK):
            index = schema.read_index(self.root)
            index["parts"][self.name] = {
                "manifest": found["digest"],
                "samples": found["samples"],
                "tokens": found["tokens"],
                "bytes": num_bytes,
            }
            schema.write_index(self.root, index)
        os.rename(self.partial, self.target)
        manifest.fsync_folder(self.root)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, StoreFullError) as error:
            if isinstance(error, StoreFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
                left = (self.num_tokens - getattr(getattr(self, "journal", None), "tokens", 0)) * self.codec.token_bytes
                raise StoreFullError(
                    f"{self.partial}: the disk is full; this part needs up to {left:,} bytes more. Make space and run the same command again: "
                    "what is finished is kept"
                ) from error
            raise StoreError(f"{error.filename or self.partial}: cannot be written ({error.strerror})") from error


def _shard_shape(codec: Codec, settings: StoreConfig, num_tokens: int) -> tuple[int, int]:
    """Tokens of a chunk and of a shard: whole chunks, no larger than ``shard_bytes`` nor than the part."""
    chunk = settings.chunk_tokens
    widest = codec.num_taps * max(array.token_bytes for array in codec.arrays)
    return chunk, chunk * max(1, min(settings.shard_bytes // (chunk * widest), -(-num_tokens // chunk)))


def _check_values(sample_id: int, rms: np.ndarray) -> None:
    if not np.isfinite(rms).all():
        token, tap = np.argwhere(~np.isfinite(rms))[0]
        raise StoreError(
            f"sample {sample_id}: hidden states are not finite at token {token}, captured layer number {tap}; the sample was not stored. "
            "Check the target's dtype and attention implementation"
        )
    if zero := [tap for tap in range(rms.shape[1]) if not rms[:, tap].any()]:
        raise StoreError(
            f"sample {sample_id}: hidden states are all zero at captured layer number {zero[0]}; the sample was not stored. Check the target's weights"
        )


class _Norms:
    """Smallest, mean and largest RMS of a token's vector, per tap; survives a resume through the journal."""

    def __init__(self, num_taps: int, state: dict[str, Any]):
        self.low = np.array(state.get("min", [np.inf] * num_taps))
        self.high = np.array(state.get("max", [0.0] * num_taps))
        self.total = np.array(state.get("sum", [0.0] * num_taps))

    def add(self, rms: np.ndarray) -> None:
        self.low, self.high = np.minimum(self.low, rms.min(0)), np.maximum(self.high, rms.max(0))
        self.total = self.total + rms.sum(0, dtype=np.float64)

    def state(self) -> dict[str, Any]:
        return {"min": self.low.tolist(), "max": self.high.tolist(), "sum": self.total.tolist()}

    def summary(self, tokens: int) -> dict[str, Any]:
        return {"min": self.low.tolist(), "mean": (self.total / tokens).tolist(), "max": self.high.tolist()}

"""Writes one part of a store: resumable Zarr shard by Zarr shard, committed whole.

T tokens, K taps, H hidden size.

1. ``append`` encodes each sample where it lies (``staging``) and collects the codes in the buffer of the current shard.
2. A full shard is written by a thread, synced, and noted in the journal (``journal``); the next one fills meanwhile,
   so at most two are in memory; three with more ``threads`` than one, when two are written at the same time.
3. ``commit`` writes the small arrays, reads every file back, writes the manifest (``part_files``), lists the part in the store's index and
   renames ``part-00012.partial`` to ``part-00012``. Killed anywhere in between, the same calls finish the work.

One process at a time writes a part (a lock on ``.part-00012.lock``); a shard has one writer, ever.
"""

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline import manifest
from dflash_offline.codecs import ChannelStatistics, Codec, make_codec
from dflash_offline.config import StoreConfig
from dflash_offline.errors import DFlashError, StoreBusyError, StoreError, StoreFullError
from dflash_offline.store import schema
from dflash_offline.store.journal import Journal
from dflash_offline.store.part_files import SAMPLE, PartShape, metadata, write_files, write_part_manifest
from dflash_offline.store.remote import Remote
from dflash_offline.store.shard_writing import write_shard
from dflash_offline.store.staging import Piece, Stager
from dflash_offline.store.values import Norms, check_values

_SMALL_FILES_BYTES = 1 << 16  # on the disk, of a part's metadata and manifest
_STAGED = 16  # pieces of samples from a GPU that may wait to be placed; their slots bound them first


class PartWriter:
    """Context manager that writes part ``name`` of the store. Samples come in the order of the plan.

    Leaving the block without ``commit`` (an exception, a kill) keeps the shards that were finished.
    ``already_committed`` says that another process finished the part before this one got its lock.

    Args:
        num_tokens, num_samples: of the whole part, known from the plan.
        statistics: of the channels, for codecs that need them.
        threads: compress chunks and read files back in parallel, and write two shards at a time.

    Raises:
        StoreBusyError: another process writes this part.
        StoreError: the folder cannot be written.
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
        statistics: ChannelStatistics | None = None,
        threads: int = 1,
    ):
        if not schema.PART_NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no name of a part; they are part-00000, part-00001, ...")
        assert num_tokens >= num_samples > 0, (num_tokens, num_samples)
        self.root, self.name = Path(store_path), name
        self.target, self.partial = self.root / name, self.root / f"{name}.partial"
        self.identity = schema.read_attributes(self.root)["identity"]
        self.codec: Codec = make_codec(
            store_settings.codec, num_taps=num_taps, hidden_size=hidden_size, zstd=store_settings.zstd, statistics=statistics
        )
        self.remote = Remote.of(self.root, cache_bytes=store_settings.cache_bytes, cache_folder=store_settings.cache_folder)
        self.shape = PartShape.of(self.codec, store_settings, num_tokens=num_tokens, num_samples=num_samples)
        self.bulk = [array for array in self.codec.arrays if array.bulk]
        self.small = [array for array in self.codec.arrays if not array.bulk]
        self.already_committed, self.resume_sample = False, 0
        self._uploads: dict[str, Future] = {}
        self._threads, self._resources = threads, contextlib.ExitStack()
        self._shards_at_once = 2 if threads > 1 else 1

    def __enter__(self) -> "PartWriter":
        with self._resources as resources, self._explained():
            self._lock(resources)
            self.journal = Journal(self.root / f".{self.name}.work", self.partial)
            self._recover()
            self._uploader = ThreadPoolExecutor(2, f"{self.name}-uploader")
            resources.callback(self._uploader.shutdown, cancel_futures=True)
            self._compressor: Executor | None = resources.enter_context(ThreadPoolExecutor(self._threads)) if self._threads > 1 else None
            self._writer = resources.enter_context(ThreadPoolExecutor(self._shards_at_once, f"{self.name}-writer"))
            self._placer = resources.enter_context(ThreadPoolExecutor(1, f"{self.name}-placer"))
            if self.remote is not None and not self.already_committed:
                self.remote.begin(self.name)
                self._upload(self.journal.files)
            if not self.already_committed and self._found and self.journal.tokens == self.shape.num_tokens:
                self.commit(self._found["extra"])
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._failed = True  # what still waits to be placed is dropped; after a commit nothing is
        self._resources.close()

    def _lock(self, resources: contextlib.ExitStack) -> None:
        path = self.root / f".{self.name}.lock"
        while True:
            descriptor = resources.enter_context(schema.open_lock(path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    break
            except BlockingIOError:
                raise StoreBusyError(f"{self.partial}: another process is writing this part; wait for it, or stop it first") from None
            except FileNotFoundError:
                pass  # its former holder removed it between our open and our lock
        resources.callback(lambda: path.unlink(missing_ok=True))

    def _recover(self) -> None:
        self._found: dict[str, Any] | None = None
        if not (self.target / manifest.MANIFEST).exists() and (self.partial / manifest.MANIFEST).exists():
            self._take_manifest()
        if (self.target / manifest.MANIFEST).exists():
            self.journal.clear()
            self.already_committed = True
            self.resume_sample = self._appended = self.shape.num_samples
            return
        schema.check_constants(schema.read_index(self.root), self.codec.constants_digest, self.root)
        if self.target.exists():
            raise StoreError(
                f"{self.target}: exists without a manifest, so it is no part of this store; move it away and run the same command again"
            )
        self.journal.start(self._spec())
        write_files(self.partial, metadata(self.codec, self.shape))
        samples = self.journal.spool("samples", SAMPLE, ())
        self.resume_sample = self._appended = self._samples = len(samples)
        self._position = self._handed_over = self.journal.tokens  # tokens placed; tokens in shards that are written or being written
        self._skip = self.journal.tokens - int(samples["tokens"].sum())
        self._buffers: list[np.ndarray] | None = self._new_buffers()
        self._rows: dict[str, list[bytes]] = {name: [] for name in ("samples", *schema.TOKEN_ARRAYS, *(a.name for a in self.small))}
        self._norms = Norms(self.shape.num_taps, self.journal.statistics)
        self._stager = Stager(self.codec)
        self._staged: deque[Future] = deque()
        self._written: deque[tuple[Future, list[np.ndarray]]] = deque()  # shards being written, and the memory they lie in
        self._failed = False

    def _take_manifest(self) -> None:
        """Of a writer that was killed between manifest and rename.

        One that the index lists was checked, and its shards may be in the object store alone: the part is given its name.
        Any other is not believed: it is removed, and the part is compared with the journal and committed again.
        """
        listed = schema.read_index(self.root)["parts"].get(self.name, {}).get("manifest")
        with contextlib.suppress(DFlashError):
            self._found = manifest.read_manifest(self.partial, kind=schema.PART_KIND)
        if self._found is not None and self._found["digest"] == listed:
            self._publish()
            return
        (self.partial / manifest.MANIFEST).unlink()
        manifest.fsync_folder(self.partial)

    def _spec(self) -> dict[str, Any]:
        """What makes one unfinished part another: with a changed one it is begun afresh."""
        return {
            "name": self.name,
            "format_version": schema.FORMAT_VERSION,
            "identity": manifest.digest(self.identity),
            "arrays": [[array.name, array.dtype, array.width, array.zstd] for array in self.codec.arrays],
            "constants": self.codec.constants_digest,
            "shape": vars(self.shape),
        }

    def _new_buffers(self) -> list[np.ndarray]:
        return [self.shape.new_buffer(array) for array in self.bulk]

    # -- samples in ------------------------------------------------------------------------------------------------

    def append(
        self,
        sample_id: int,
        sha256: bytes,
        bucket: int,
        input_ids: Any,
        loss_mask: Any,
        hidden: torch.Tensor,
        *,
        check: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Add the next sample. From a GPU this returns before the sample is placed, and a fault shows in a later call.

        Args:
            sample_id: its row in the corpus.
            sha256: digest of its ids and mask, 32 bytes; the name the row goes by.
            input_ids, loss_mask: ``[T]``, tensors or arrays.
            hidden: bf16 ``[T, K, H]`` on the CPU or a GPU.
            check: called with the root mean square of each vector, float32 ``[T, K]``, before anything of the sample is
                placed; what it raises stops the part.

        Raises:
            StoreError: a value is not finite, or a tap is zero throughout; nothing of the sample is written.
            StoreFullError: the disk is full.
        """
        ids, mask = np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.uint8)
        expected = (len(ids), self.shape.num_taps, self.shape.hidden_size)
        assert hidden.dtype == torch.bfloat16 and hidden.shape == expected, (hidden.dtype, hidden.shape, expected)
        assert len(ids) == len(mask) > 0 and len(sha256) == 32 and self._appended < self.shape.num_samples, (sample_id, len(ids), len(mask))
        skip, self._skip = self._skip, 0
        assert skip < len(ids), f"sample {sample_id} is shorter than what is stored of it; the plan has changed"
        record = np.zeros((), SAMPLE)
        record["sample_id"], record["sha256"], record["bucket"], record["tokens"] = (
            sample_id,
            np.frombuffer(sha256, np.uint8),
            bucket,
            len(ids),
        )
        self._appended += 1
        ids, mask = ids[skip:], mask[skip:]
        for piece in self._stager.pieces(hidden[skip:]):
            if not hidden.is_cuda:
                self._place(piece, ids, mask, record, check)
                continue
            self._staged.append(self._placer.submit(self._place, piece, ids, mask, record, check))
            while self._staged and (len(self._staged) > _STAGED or self._staged[0].done()):
                self._staged.popleft().result()

    def _place(
        self, piece: Piece, ids: np.ndarray, mask: np.ndarray, record: np.ndarray, check: Callable[[np.ndarray], None] | None
    ) -> None:
        """Place one piece of a sample; the sample's values are checked before its first."""
        try:
            if self._failed:  # a sample before this one was refused; placing this one would shift the rows
                return
            with self._explained():
                arrays, rms = piece.wait()
                if piece.start == 0:
                    if check is not None:
                        check(rms)
                    check_values(int(record["sample_id"]), rms)
                span = slice(piece.start, piece.stop)
                self._place_rows(ids[span], mask[span], arrays, rms[span], record if piece.stop == len(ids) else None)
        except BaseException:
            self._failed = True
            raise
        finally:
            piece.release()

    def _place_rows(
        self, ids: np.ndarray, mask: np.ndarray, arrays: dict[str, np.ndarray], rms: np.ndarray, record: np.ndarray | None
    ) -> None:
        """Tokens into the shard; ``record`` with the last ones of a sample."""
        shard_tokens, done = self.shape.shard_tokens, 0
        assert self._position + len(ids) <= self.shape.num_tokens, "more tokens than the plan has"
        while done < len(ids):
            first = self._position % shard_tokens
            count = min(len(ids) - done, shard_tokens - first)
            piece = slice(done, done + count)
            for array, buffer in zip(self.bulk, self._buffers, strict=True):
                self.shape.copy_rows(arrays[array.name][:, piece], buffer, first)
            for array in self.small:
                self._rows[array.name].append(arrays[array.name][:, piece].swapaxes(0, 1).tobytes())
            self._rows["input_ids"].append(ids[piece].tobytes())
            self._rows["loss_mask"].append(mask[piece].tobytes())
            self._norms.add(rms[piece])
            done += count
            self._position += count
            if done == len(ids) and record is not None:
                self._rows["samples"].append(record.tobytes())
                self._samples += 1
            if self._position % shard_tokens == 0:
                self._finish_shard()

    # -- shards out ------------------------------------------------------------------------------------------------

    def _finish_shard(self) -> None:
        """Hand the current shard to a writing thread and go on with other buffers."""
        spare = self._wait_for_shards(leave=self._shards_at_once - 1)
        rows = {name: b"".join(pieces) for name, pieces in self._rows.items()}
        noted = {"tokens": self._position, "samples": self._samples, "spools": rows, "statistics": self._norms.state()}
        self._handed_over = self._position
        shard = (self._position - 1) // self.shape.shard_tokens
        before = self._written[-1][0] if self._written else None
        self._written.append((self._writer.submit(self._write_shard, shard, self._buffers, noted, before), self._buffers))
        self._buffers = (spare or self._new_buffers()) if self._position < self.shape.num_tokens else None
        self._rows = {name: [] for name in self._rows}

    def _write_shard(self, shard: int, buffers: list[np.ndarray], noted: dict[str, Any], before: Future | None) -> None:
        tokens, files = noted["tokens"] - shard * self.shape.shard_tokens, {}
        for array, buffer in zip(self.bulk, buffers, strict=True):
            chunks = self.shape.clear_tail(buffer, tokens)  # rows of an earlier shard must not show behind the last token
            path = self.partial / array.name / "c" / str(shard) / "0" / "0"
            written = write_shard(path, buffer[:chunks], shard_chunks=len(buffer), zstd=array.zstd, executor=self._compressor)
            for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
                manifest.fsync_folder(folder)
            files[str(path.relative_to(self.partial))] = list(written)
        if before is not None:
            before.result()  # the journal grows in the order of the tokens
        self.journal.append(files=files, **noted)
        self._upload(files)

    def _upload(self, files: Iterable[str]) -> None:
        if self.remote is not None:
            for file in files:
                self._uploads[file] = self._uploader.submit(self.remote.upload, self.name, self.partial, file)

    def _wait_for_shards(self, *, leave: int) -> list[np.ndarray] | None:
        """Until at most so many are being written; the memory of one that is done."""
        spare = None
        while len(self._written) > leave:
            written, spare = self._written.popleft()
            written.result()
        for upload in list(self._uploads.values()):
            if upload.done():
                upload.result()
        return spare

    # -- the end ---------------------------------------------------------------------------------------------------

    def commit(self, extra: dict[str, Any] | Callable[[], dict[str, Any]] | None = None) -> None:
        """Write what is left, then the manifest, and give the part its name.

        Args:
            extra: what else the manifest records (seconds, replica, device ...), JSON values. Or a function of them, called
                when the rows are written.
        """
        if self.already_committed:
            return
        while self._staged:
            self._staged.popleft().result()
        assert self._position == self.shape.num_tokens and self._samples == self.shape.num_samples, (
            self._position,
            self._samples,
            self.shape,
        )
        with self._explained():
            if self._position > self._handed_over:
                self._finish_shard()
            self._wait_for_shards(leave=0)
            self._buffers = None
            write_part_manifest(
                self.partial,
                self.journal,
                name=self.name,
                identity=self.identity,
                codec=self.codec,
                shape=self.shape,
                executor=self._compressor,
                rms=self._norms.summary(self.shape.num_tokens),
                extra=(extra() if callable(extra) else extra) or {},
            )
            self._publish()
            self.journal.clear()
        self.already_committed = True

    def _publish(self) -> None:
        """Bring the part to its object store, if any, list it in the index, rename it: a kill in between leaves nothing unlisted."""
        found = manifest.read_manifest(self.partial, kind=schema.PART_KIND)
        if self.remote is not None:
            for upload in self._uploads.values():
                upload.result()
            self.remote.commit(self.name, self.partial, uploaded=self._uploads)
        with schema.locked(self.root / schema.LOCK):
            index = schema.read_index(self.root)
            schema.check_constants(index, found["constants"], self.root)
            index["parts"][self.name] = schema.index_entry(found)
            schema.write_index(self.root, index)
            if self.remote is not None:
                self.remote.put_index()
        if self.remote is not None:
            self.remote.thin(self.name, self.partial)
        self.partial.rename(self.target)
        manifest.fsync_folder(self.root)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the operating system says into one line that says what to do."""
        try:
            yield
        except (OSError, StoreFullError) as error:
            if isinstance(error, StoreFullError) or manifest.disk_is_full(error):
                finished = self.journal.tokens if hasattr(self, "journal") else 0
                needed = (self.shape.num_tokens - finished) * self.codec.token_bytes + _SMALL_FILES_BYTES
                needed += sum(self.journal.spooled.values()) if hasattr(self, "journal") else 0  # they become arrays at the end
                raise StoreFullError(
                    f"{self.partial}: the disk is full; this part needs up to {needed:,} bytes more. "
                    "Make space and run the same command again: what is finished is kept"
                ) from error
            raise StoreError(f"{error.filename or self.partial}: cannot be written ({error.strerror})") from error

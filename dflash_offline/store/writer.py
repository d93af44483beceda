"""Writes one part of a store: resumable Zarr shard by Zarr shard, committed whole.

T tokens, K taps, H hidden size.

1. ``append`` encodes samples where they lie (``staging``) and collects the codes in the buffer of the current shard.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class NewSample:
    """What is known of a sample beside its hidden states.

    Attributes:
        sample_id: its row in the corpus.
        sha256: digest of its ids and mask, 32 bytes; the name the row goes by.
        input_ids, loss_mask: ``[T]``, tensors or arrays.
        check: called if a vector is not finite or all zero, with the root mean square of each, float32 ``[T, K]``, before
            anything of the sample is placed; what it raises stops the part.
    """

    sample_id: int
    sha256: bytes
    bucket: int
    input_ids: Any
    loss_mask: Any
    check: Callable[[np.ndarray], None] | None = None


@dataclass(frozen=True)
class _Group:
    """Samples that are encoded together: what is stored of them beside their hidden states."""

    ids: np.ndarray  # int32 [T], one sample after another
    mask: np.ndarray  # uint8 [T]
    records: np.ndarray  # SAMPLE [n]
    ends: np.ndarray  # int64 [n], where each sample ends along T
    checks: list[Callable[[np.ndarray], None] | None]


@dataclass
class _Shard:
    """Memory that one shard fills, and a later one again once it is written.

    All of it is there from the beginning: rows kept one by one until the shard is full would lie scattered between the
    temporary megabytes of encoding, which glibc then can neither use again as a whole nor give back (several shards of them).
    """

    buffers: list[np.ndarray]  # of the bulk arrays: ``PartShape.new_buffer``
    rows: dict[str, np.ndarray]  # of the arrays that are spooled, one a token
    samples: np.ndarray  # SAMPLE, those that end in the shard
    num_samples: int = 0


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
        attributes = schema.read_attributes(self.root)
        self.identity, self.format_version = (
            attributes["identity"],
            attributes["format_version"],
        )  # a store begun with an older one keeps it
        self.codec: Codec = make_codec(
            store_settings.codec,
            num_taps=num_taps,
            hidden_size=hidden_size,
            zstd=store_settings.zstd,
            statistics=statistics,
            format_version=self.format_version,
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
        write_files(self.partial, metadata(self.codec, self.shape, self.format_version))
        samples = self.journal.spool("samples", SAMPLE, ())
        self.resume_sample = self._appended = self._samples = len(samples)
        self._position = self._handed_over = self.journal.tokens  # tokens placed; tokens in shards that are written or being written
        self._skip = self.journal.tokens - int(samples["tokens"].sum())
        self._shard: _Shard | None = self._new_shard()
        self._norms = Norms(self.shape.num_taps, self.journal.statistics)
        self._stager = Stager(self.codec)
        self._staged: deque[Future] = deque()
        self._written: deque[tuple[Future, _Shard]] = deque()  # shards being written
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
            "format_version": self.format_version,
            "identity": manifest.digest(self.identity),
            "arrays": [[array.name, array.dtype, array.width, array.zstd] for array in self.codec.arrays],
            "constants": self.codec.constants_digest,
            "shape": vars(self.shape),
        }

    def _new_shard(self) -> _Shard:
        tokens, small = self.shape.shard_tokens, {array.name: (self.shape.num_taps, array.token_bytes) for array in self.small}
        rows = {name: np.empty((tokens, *row), np.uint8) for name, row in small.items()}
        rows |= {name: np.empty(tokens, dtype) for name, dtype in schema.TOKEN_ARRAYS.items()}
        samples = np.empty(min(tokens, self.shape.num_samples), SAMPLE)
        return _Shard([self.shape.new_buffer(array) for array in self.bulk], rows, samples)

    # -- samples in ------------------------------------------------------------------------------------------------

    @property
    def group_tokens(self) -> int:
        """Tokens that ``append_group`` takes in one go: what one piece on its way from a GPU holds."""
        return self._stager.piece_tokens

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
        """Add the next sample, of any length: ``append_group`` of one."""
        self.append_group([NewSample(sample_id, sha256, bucket, input_ids, loss_mask, check)], hidden)

    def append_group(self, samples: Sequence[NewSample], hidden: torch.Tensor) -> None:
        """Add the next samples. From a GPU this returns before they are placed, and a fault shows in a later call.

        Short samples are better added many at a time: what a sample costs beside its bytes holds up the thread that feeds the GPU.

        Args:
            samples: several only if they have ``group_tokens`` together at most.
            hidden: bf16 ``[T, K, H]`` on the CPU or a GPU, one sample after another.

        Raises:
            StoreError: a value is not finite, or a tap is zero throughout; nothing of that sample is written.
            StoreFullError: the disk is full.
        """
        group = self._group(samples)
        expected = (len(group.ids), self.shape.num_taps, self.shape.hidden_size)
        assert hidden.dtype == torch.bfloat16 and hidden.shape == expected, (hidden.dtype, hidden.shape, expected)
        assert len(samples) == 1 or len(group.ids) <= self.group_tokens, (len(samples), len(group.ids), self.group_tokens)
        skip, self._skip = self._skip, 0
        assert skip < group.ends[0], f"sample {samples[0].sample_id} is shorter than what is stored of it; the plan has changed"
        self._appended += len(samples)
        if skip:
            group = _Group(group.ids[skip:], group.mask[skip:], group.records, group.ends - skip, group.checks)
        for piece in self._stager.pieces(hidden[skip:]):
            if not hidden.is_cuda:
                self._place(piece, group)
                continue
            self._staged.append(self._placer.submit(self._place, piece, group))
            while self._staged and (len(self._staged) > _STAGED or self._staged[0].done()):
                self._staged.popleft().result()

    def _group(self, samples: Sequence[NewSample]) -> _Group:
        ids = [np.ascontiguousarray(sample.input_ids, np.int32) for sample in samples]
        mask = [np.ascontiguousarray(sample.loss_mask, np.uint8) for sample in samples]
        for sample, own_ids, own_mask in zip(samples, ids, mask, strict=True):
            assert len(own_ids) == len(own_mask) > 0 and len(sample.sha256) == 32, (sample.sample_id, len(own_ids), len(own_mask))
        assert 0 < len(samples) <= self.shape.num_samples - self._appended, (len(samples), self._appended, self.shape.num_samples)
        records = np.empty(len(samples), SAMPLE)
        records["sample_id"], records["bucket"] = [sample.sample_id for sample in samples], [sample.bucket for sample in samples]
        records["sha256"] = np.frombuffer(b"".join(sample.sha256 for sample in samples), np.uint8).reshape(-1, 32)
        records["tokens"] = [len(own_ids) for own_ids in ids]
        joined = [np.frombuffer(b"".join(arrays), arrays[0].dtype) for arrays in (ids, mask)]  # numpy gives the lock away for each array
        return _Group(*joined, records, np.cumsum(records["tokens"]), [sample.check for sample in samples])

    def _place(self, piece: Piece, group: _Group) -> None:
        """Place one piece of a group; each sample's values are checked before anything of it is placed."""
        try:
            if self._failed:  # a sample before this one was refused; placing this one would shift the rows
                return
            with self._explained():
                arrays, rms = piece.wait()
                if piece.start == 0 and not (rms.min() > 0 and np.isfinite(rms.max())):  # neither holds if one is NaN
                    first = 0
                    for sample, stop in enumerate(group.ends.tolist()):
                        try:
                            if (check := group.checks[sample]) is not None:
                                check(rms[first:stop])
                            check_values(int(group.records["sample_id"][sample]), rms[first:stop])
                        except BaseException:
                            self._place_rows(group, 0, first, arrays, rms)  # those before it; several samples are one piece
                            raise
                        first = stop
                self._place_rows(group, piece.start, piece.stop, arrays, rms)
        except BaseException:
            self._failed = True
            raise
        finally:
            piece.release()

    def _place_rows(self, group: _Group, start: int, stop: int, arrays: dict[str, np.ndarray], rms: np.ndarray) -> None:
        """Tokens ``[start, stop)`` of a group, at which ``arrays`` begin, into the shard, and the samples that end among them."""
        shard_tokens, done = self.shape.shard_tokens, start
        assert self._position + stop - start <= self.shape.num_tokens, "more tokens than the plan has"
        while done < stop:
            shard, first = self._shard, self._position % shard_tokens
            count = min(stop - done, shard_tokens - first)
            tokens, placed = slice(done, done + count), slice(done - start, done - start + count)
            for array, buffer in zip(self.bulk, shard.buffers, strict=True):
                self.shape.copy_rows(arrays[array.name][:, placed], buffer, first)
            rows = slice(first, first + count)
            for array in self.small:
                shard.rows[array.name][rows] = arrays[array.name][:, placed].view(np.uint8).swapaxes(0, 1)
            shard.rows["input_ids"][rows], shard.rows["loss_mask"][rows] = group.ids[tokens], group.mask[tokens]
            self._norms.add(rms[tokens])
            ended = group.records[slice(*np.searchsorted(group.ends, (done, done + count), side="right").tolist())]
            shard.samples[shard.num_samples : shard.num_samples + len(ended)] = ended
            shard.num_samples += len(ended)
            self._samples += len(ended)
            done += count
            self._position += count
            if self._position % shard_tokens == 0:
                self._finish_shard()

    # -- shards out ------------------------------------------------------------------------------------------------

    def _finish_shard(self) -> None:
        """Hand the current shard to a writing thread and go on with other buffers."""
        spare = self._wait_for_shards(leave=self._shards_at_once - 1)
        shard, number = self._shard, self._handed_over // self.shape.shard_tokens
        spools = {"samples": shard.samples[: shard.num_samples]}
        spools |= {name: rows[: self._position - self._handed_over] for name, rows in shard.rows.items()}
        noted = {"tokens": self._position, "samples": self._samples, "spools": spools, "statistics": self._norms.state()}
        self._handed_over = self._position
        before = self._written[-1][0] if self._written else None
        self._written.append((self._writer.submit(self._write_shard, number, shard.buffers, noted, before), shard))
        self._shard = (spare or self._new_shard()) if self._position < self.shape.num_tokens else None
        if self._shard is not None:
            self._shard.num_samples = 0

    def _write_shard(self, shard: int, buffers: list[np.ndarray], noted: dict[str, Any], before: Future | None) -> None:
        tokens, files = noted["tokens"] - shard * self.shape.shard_tokens, {}
        for array, buffer in zip(self.bulk, buffers, strict=True):
            chunks = self.shape.clear_tail(array, buffer, tokens)  # rows of an earlier shard must not show behind the last token
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

    def _wait_for_shards(self, *, leave: int) -> _Shard | None:
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
            self._shard = None
            write_part_manifest(
                self.partial,
                self.journal,
                name=self.name,
                identity=self.identity,
                codec=self.codec,
                shape=self.shape,
                format_version=self.format_version,
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

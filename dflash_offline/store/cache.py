"""Blocks of remote shard files kept on a local disk, in a bounded number of bytes. Several processes share one folder.

::

    cache/
      .size                                 bytes reserved; also the lock under which that number changes
      part-00012-3f9a.../codes.c.0.0.0/17   block 17 of a shard file; its time stamp is its last use

A block is written under a temporary name and renamed, so a killed process leaves no torn one. Room is reserved before
it is written: the number in ``.size`` is never below what lies there, and counting anew puts right what kills left too
high. What is read from a block is compared with its chunk's checksum by the reader, as from any file.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK_BYTES = 8 << 20  # a request of this size runs at a connection's full rate; a long sample takes several
_KEPT = 0.95  # eviction goes down to this share, so that it is not done for every block
_STALE_S = 600.0  # a temporary file this old has lost its writer
_SIZE = ".size"


class BlockCache:
    """Args: ``max_bytes`` bounds the blocks below ``folder``, which is made when the first one is kept."""

    def __init__(self, folder: Path, max_bytes: int, *, block_bytes: int = BLOCK_BYTES):
        self.folder, self.max_bytes, self.block_bytes = Path(folder), max_bytes, block_bytes
        self._told = False

    def read(self, key: str, block: int, buffers: Sequence[memoryview], offset: int, size: int) -> bool:
        """Fill ``buffers`` from byte ``offset`` of a block on; False when it is not kept, or not of ``size`` bytes."""
        try:
            descriptor = os.open(self.folder / key / str(block), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not kept, or not for this user; fetched then
            return False
        try:
            if os.fstat(descriptor).st_size != size:
                return False
            with contextlib.suppress(OSError):  # another user's, or on a disk mounted for reading
                os.utime(descriptor)
            return os.preadv(descriptor, buffers, offset) == sum(map(len, buffers))
        finally:
            os.close(descriptor)

    def keep(self, key: str, block: int, content: bytes | memoryview) -> None:
        """Keep a block, at the cost of those not used for longest. One that does not fit on the disk is not kept."""
        size = memoryview(content).nbytes
        path = self.folder / key / str(block)
        temporary = path.with_name(f".{block}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            if size > self.max_bytes or not self._reserve(size):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError as error:  # disk full, say: reading goes on without
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not isinstance(error, FileNotFoundError):  # that is a folder forgotten meanwhile, for damage that another thread met
                self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Say once that a cache is none: every epoch then fetches the whole store again."""
        if not self._told:
            self._told = True
            reason = error.strerror or error
            print(
                f"warning: {self.folder}: fetched hidden states cannot be kept ({reason}) and are fetched again each time; "
                "make it writable, or name another [store] cache_folder",
                flush=True,
            )

    def forget(self, key: str) -> None:
        """Drop every block whose key lies below ``key``; another thread may have done so already."""
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def mark(self, key: str, *, name: str) -> Path:
        """Path of a small file beside blocks that says something about them; never counted, gone with ``forget``."""
        return self.folder / key / f".{name}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that are there, counted."""
        return sum(size for _, size, _ in self._blocks())

    def _reserve(self, size: int) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / _SIZE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, 32, 0).strip()
            total = int(text) if text.isdigit() else self.max_bytes
            if total + size > self.max_bytes:
                total = self._evict(int(self.max_bytes * _KEPT) - size)
            if total + size <= self.max_bytes:
                os.pwrite(descriptor, f"{total + size:<32}".encode(), 0)
                return True
            return False
        finally:
            os.close(descriptor)

    def _evict(self, most: int) -> int:
        """Remove the blocks not used for longest until at most ``most`` bytes are left; returns what is left."""
        blocks = sorted(self._blocks())
        total = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if total <= max(0, most):
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
        return total

    def _blocks(self) -> Iterator[tuple[int, int, Path]]:
        """Last use, bytes and path of each; temporary files that lost their writer are removed."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    found = path.stat()
                    if name.isdigit():
                        yield found.st_mtime_ns, found.st_size, path
                    elif name.endswith(".tmp"):
                        if time.time() - found.st_mtime > _STALE_S:
                            path.unlink()
                        else:
                            yield found.st_mtime_ns + (1 << 62), found.st_size, path  # another's, just being written: evicted last

"""Bytes of a file, unpacked whatever they are packed with, and digested on the way.

gzip, bz2, xz and zstd are told by the first bytes. A packed file that is damaged or was cut short is an error that says
where; it never passes for a shorter file.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from dflash_offline.errors import CorpusError

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

READ_BYTES = 1 << 20


class Source(io.RawIOBase):
    """The file itself: counts and digests what is read from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.digest = path, 0, xxhash.xxh3_128()
        self._file = path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        self.position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdFile(io.RawIOBase):
    """Unpacks zstd frames one after another. The package's own reader takes a cut file for a whole one."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise CorpusError(f"{path}: packed with zstd; `pip install zstandard` to read it") from None
        self._file, self._new_frame, self._error = file, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame: Any = None
        self._packed = self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            if not self._packed:
                self._packed = self._file.read(1 << 17)
                if not self._packed:
                    if self._frame is not None:
                        raise EOFError("the file ends inside a frame")
                    return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._unpacked = self._frame.decompress(self._packed)
            except self._error as error:
                raise EOFError(str(error)) from None
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


def unpack(path: Path, head: bytes, source: Source) -> IO[bytes]:
    """A file to read unpacked bytes from; ``head`` holds its first bytes. Keep it: the source closes with it."""
    kind = next((kind for magic, kind in _PACKED.items() if head.startswith(magic)), None)
    raw: Any = io.BufferedReader(source, READ_BYTES)
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "zstd":
        return io.BufferedReader(_ZstdFile(path, raw), READ_BYTES)
    return raw


def chunks(source: Source, file: IO[bytes], size: int) -> Iterator[bytes]:
    """Unpacked bytes, ``size`` at a time.

    Raises:
        CorpusError: the packed data is damaged or ends early.
    """
    while True:
        try:
            chunk = file.read(size)
        except (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
            raise CorpusError(
                f"{source.path}: damaged or cut short near byte {source.position:,} of the file ({' '.join(str(error).split())}); "
                "copy it again, or unpack what is left of it to another file"
            ) from None
        if not chunk:
            return
        yield chunk

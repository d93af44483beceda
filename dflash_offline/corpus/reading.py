"""Conversation files -> blocks of raw rows. What a file is, is told by its first bytes, never by its name.

Text: JSON lines (LF, CRLF or CR; byte order marks anywhere at a line's start), one JSON array, or JSON objects one after
another; plain or packed with gzip, bz2, xz or zstd. Tables: Parquet, Arrow files and streams. Blocks are about a
megabyte, so memory does not depend on the size of a file, and are decoded by whoever processes them (``decode_block``).

A file that cannot be read to its end, or that changes meanwhile, is a ``CorpusError``; a line that is no JSON is a
rejected row.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from dflash_offline.corpus.schema import RowRejected
from dflash_offline.errors import CorpusError

BLOCK_BYTES = 1 << 20
MAX_ROW_BYTES = 64 << 20  # a longer row is rejected unread: no conversation of a usable length needs it
_TABLE_ROWS = 256
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF16_OR_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
# Files that stand beside data in a folder and hold no conversations
_NO_DATA = re.compile(
    r"(dataset_info|dataset_dict|state|dataset_infos)\.json|.*\.(md|rst|png|jpe?g|pdf|py|ya?ml|toml|lock)|licen[cs]e.*|notice.*", re.I
)
_COLUMNS = {"messages", "conversations", "system", "system_prompt", "tools", "functions", "finish_reason", "source"}
_SPACE = re.compile(r"[ \t\r\n\ufeff]*")


@dataclass
class Block:
    """Some rows of a file: ``kind`` "lines" (bytes, split at ``newline``), "items" ((line, bytes) each), "table" (an Arrow
    stream) or "long" (one line too long to read). ``line`` is the number of the first row, from 1; ``position`` how
    far into the file, in bytes, reading has come."""

    file_index: int
    kind: str
    payload: Any
    line: int
    position: int
    newline: bytes = b"\n"


class _Source(io.RawIOBase):
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


def is_data(path: Path) -> bool:
    """False for files that usually stand beside data (README, licence, the index of a saved data set)."""
    return _NO_DATA.fullmatch(path.name) is None


def read_file(path: Path, file_index: int, *, digest: str | None = None) -> Iterator[Block]:
    """Yield the blocks of one file.

    Args:
        digest: xxh3-128 of the file as it was when its key was made; what is read must have the same.

    Raises:
        CorpusError: unreadable, damaged, no known format, or changed while it was read.
    """
    try:
        before = _stamp(path)
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if not head:
            return
        if head.startswith((b"PAR1", b"ARROW1\x00\x00", b"\xff\xff\xff\xff")):
            yield from _read_table(path, head, file_index)
        else:
            with _Source(path) as source:
                unpacked = _unpack(path, head, source)  # kept: the source would be closed with it
                yield from _read_text(source, unpacked, file_index)
                while source.read(BLOCK_BYTES):  # what follows the end of packed data
                    pass
                if digest is not None and source.digest.hexdigest() != digest:
                    raise CorpusError(f"{path}: it changed while it was being read; run the same command again")
        if _stamp(path) != before:
            raise CorpusError(f"{path}: it changed while it was being read; run the same command again")
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror or error})") from None


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def _unpack(path: Path, head: bytes, source: _Source) -> IO[bytes]:
    kind = next((kind for magic, kind in _PACKED.items() if head.startswith(magic)), None)
    raw: Any = io.BufferedReader(source, BLOCK_BYTES)
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "zstd":
        return io.BufferedReader(_ZstdFile(path, raw), BLOCK_BYTES)
    return raw


def _chunks(source: _Source, file: IO[bytes]) -> Iterator[bytes]:
    """Unpacked bytes of the file; damaged packed data is a ``CorpusError``."""
    while True:
        try:
            chunk = file.read(BLOCK_BYTES)
        except (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
            raise CorpusError(
                f"{source.path}: damaged or cut short near byte {source.position:,} of the file ({' '.join(str(error).split())}); "
                "copy it again, or unpack what is left of it to another file"
            ) from None
        if not chunk:
            return
        yield chunk


def _read_text(source: _Source, file: IO[bytes], file_index: int) -> Iterator[Block]:
    chunks = _chunks(source, file)
    head = b""
    for chunk in chunks:
        head += chunk
        if head.strip(b" \t\r\n\xef\xbb\xbf"):
            break
    text = head.lstrip(b" \t\r\n\xef\xbb\xbf")
    if head.startswith(_UTF16_OR_32) or b"\0" in text[:2]:
        raise CorpusError(f"{source.path}: not UTF-8 but UTF-16 or UTF-32; convert it with `iconv -t UTF-8`")
    if not text:
        return
    if text[:1] not in b"{[" or text.startswith(b"PAR1"):
        raise CorpusError(f"{source.path}: no known format (it starts with {text[:16]!r}); wanted JSON lines, JSON, Parquet or Arrow")
    newline = b"\r" if b"\n" not in head and b"\r" in head.rstrip(b"\r") else b"\n"
    first = text.split(newline, 1)[0]
    layout = _layout(first, text, at_end=len(head) < BLOCK_BYTES)

    def rest() -> Iterator[bytes]:
        yield head
        yield from chunks

    if layout == "lines":
        yield from _read_lines(source, rest(), file_index, newline)
    else:
        yield from _read_values(source, rest(), file_index, array=layout == "array")


def _layout(first: bytes, text: bytes, *, at_end: bool) -> str:
    """ "lines", "array" (one JSON array of rows) or "values" (objects written over several lines)."""
    decoder = json.JSONDecoder()
    if text.startswith(b"["):
        # a list of messages is a row by itself, so these are lines; a list of rows is the array
        try:
            item = decoder.raw_decode(text.decode("utf-8", "replace"), _SPACE.match(text.decode("utf-8", "replace"), 1).end())[0]  # type: ignore[union-attr]
        except ValueError:
            return "array"
        return "lines" if isinstance(item, dict) and ("role" in item or "from" in item) else "array"
    try:
        json.loads(first)
    except ValueError:
        try:
            decoder.raw_decode(text.decode("utf-8", "replace"))
        except ValueError:
            return "values" if first.strip() == b"{" and not at_end else "lines"
        return "values" if first.strip() == b"{" or not first.rstrip().endswith(b"}") else "lines"
    return "lines"


def _read_lines(source: _Source, chunks: Iterator[bytes], file_index: int, newline: bytes) -> Iterator[Block]:
    line, kept, skipping = 1, b"", False
    for chunk in chunks:
        if skipping:
            at = chunk.find(newline)
            if at < 0:
                continue
            yield Block(file_index, "long", b"", line, source.position)
            line, chunk, skipping = line + 1, chunk[at + 1 :], False
        at = chunk.rfind(newline)
        if at < 0:
            kept += chunk
            if len(kept) > MAX_ROW_BYTES:
                kept, skipping = b"", True
            continue
        payload = kept + chunk[:at] if kept else chunk[:at]
        kept = chunk[at + 1 :]
        yield Block(file_index, "lines", payload, line, source.position, newline)
        line += payload.count(newline) + 1
    if skipping:
        yield Block(file_index, "long", b"", line, source.position)
    elif kept:
        yield Block(file_index, "lines", kept, line, source.position, newline)


def _read_values(source: _Source, chunks: Iterator[bytes], file_index: int, *, array: bool) -> Iterator[Block]:
    """JSON values one after another, or the items of one array. Each goes on as its own bytes."""
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # bad bytes come back as they were, in their row
    decoder = json.JSONDecoder()
    text, at, line, ended = "", 0, 1, False
    items: list[tuple[int, bytes]] = []
    size, number, opened = 0, 0, not array

    def more() -> None:
        nonlocal text, at, ended
        wanted, text, at = max(BLOCK_BYTES, len(text) - at), text[at:], 0  # doubling: a long row is not scanned over and over
        parts = [text]
        while wanted > 0 and not ended:
            chunk = next(chunks, None)
            if chunk is None:
                ended = True
                parts.append(decode.decode(b"", final=True))
            else:
                parts.append(decode.decode(chunk))
                wanted -= len(chunk)
        text = "".join(parts)

    while True:
        start = at
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text) and (array and ((not opened and text[at] == "[") or (number and text[at] == ","))):
            opened, at = True, _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        line += text.count("\n", start, at)
        if at >= len(text):
            if ended:
                if array:
                    raise CorpusError(f"{source.path}: the JSON array has no end; the file was cut after row {number} (line {line})")
                break
            more()
            continue
        if array and text[at] == "]":
            break
        try:
            end = decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            if not ended and len(text) - at <= MAX_ROW_BYTES:
                more()
                continue
            reason = (
                "the file ends inside it"
                if ended and isinstance(error, ValueError)
                else f"longer than {MAX_ROW_BYTES >> 20} MiB, or not JSON"
            )
            detail = f"{error.msg}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise CorpusError(
                f"{source.path}:{line}: row {number + 1} cannot be read ({detail}: {reason}); repair the file, or write it as JSON lines"
            ) from None
        item = text[at:end].encode("utf-8", "surrogateescape")
        items.append((line, item))
        line += text.count("\n", at, end)
        size, number, at = size + len(item), number + 1, end
        if size >= BLOCK_BYTES:
            yield Block(file_index, "items", items, items[0][0], source.position)
            items, size = [], 0
    if items:
        yield Block(file_index, "items", items, items[0][0], source.position)
    if text[at + 1 :].strip() or any(chunk.strip() for chunk in chunks):  # nothing is left out in silence
        raise CorpusError(f"{source.path}:{line}: more data after the end of the JSON array; keep one array, or write JSON lines")


def _read_table(path: Path, head: bytes, file_index: int) -> Iterator[Block]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, row = path.stat().st_size, 1
    try:
        if head.startswith(b"PAR1"):
            with pq.ParquetFile(path) as file:
                columns, rows = _columns(path, file.schema_arrow), max(1, file.metadata.num_rows)
                for batch in file.iter_batches(batch_size=_TABLE_ROWS, columns=columns):
                    yield Block(file_index, "table", _table_bytes(batch), row, size * min(row, rows) // rows)
                    row += batch.num_rows
            return
        with pa.memory_map(str(path)) as file:
            if head.startswith(b"ARROW1"):
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                reader = batches = pa.ipc.open_stream(file)
            columns = _columns(path, reader.schema)
            for batch in batches:
                for start in range(0, batch.num_rows, _TABLE_ROWS):
                    piece = batch.select(columns).slice(start, _TABLE_ROWS)
                    yield Block(file_index, "table", _table_bytes(piece), row, min(size, file.tell()))
                    row += piece.num_rows
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: damaged or cut short after row {row - 1} ({' '.join(str(error).split())[:200]})") from None


def _columns(path: Path, schema: Any) -> list[str]:
    """Columns worth loading: known names, and lists of objects. Others stay on disk."""
    import pyarrow as pa

    def may_hold_messages(kind: Any) -> bool:
        return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)

    found = [field.name for field in schema if field.name in _COLUMNS or may_hold_messages(field.type)]
    if not found:
        raise CorpusError(f"{path}: no column holds conversations; its columns are {', '.join(schema.names[:12])}")
    return found


def _table_bytes(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decode_block(block: Block) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of a block. A row that cannot be decoded comes as the ``RowRejected`` that says why; blank
    lines come as None."""
    if block.kind == "table":
        import pyarrow as pa

        for i, row in enumerate(pa.ipc.open_stream(block.payload).read_all().to_pylist()):
            yield block.line + i, {name: value for name, value in row.items() if value is not None}
    elif block.kind == "long":
        yield block.line, RowRejected("row too long to read", f"more than {MAX_ROW_BYTES >> 20} MiB")
    elif block.kind == "items":
        for line, item in block.payload:
            yield line, _decode(item)
    else:
        for i, line in enumerate(block.payload.split(block.newline)):
            line = line.lstrip(codecs.BOM_UTF8).strip(b" \t\r")
            row = _decode(line) if line else None
            if isinstance(row, RowRejected) and b"\r" in line:  # lone CRs among other line ends
                for part in line.split(b"\r"):
                    yield block.line + i, _decode(part) if part.strip() else None
            else:
                yield block.line + i, row


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowRejected("invalid UTF-8", f"byte {error.object[error.start]:#04x} at offset {error.start} of the row")
    except json.JSONDecodeError as error:
        return RowRejected("invalid JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return RowRejected("invalid JSON", " ".join(str(error).split())[:100])

"""Conversation files -> blocks of raw rows. What a file is, is told by its first bytes, never by its name.

Text: JSON lines (LF, CRLF or CR; byte order marks anywhere at a line's start), one JSON array, or JSON objects one after
another; plain or packed with gzip, bz2, xz or zstd. Tables: Parquet, Arrow files and streams. Blocks are about a
megabyte, so memory does not depend on the size of a file, and are decoded by whoever processes them (``decode_block``).

A file that cannot be read to its end, or that changes meanwhile, is a ``CorpusError``; a line that is no JSON is a
rejected row.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dflash_offline.corpus.schema import RowRejected
from dflash_offline.corpus.tables import read_table
from dflash_offline.corpus.unpacking import Source, chunks, unpack
from dflash_offline.corpus.values import Values
from dflash_offline.errors import CorpusError

BLOCK_BYTES = 1 << 20
MAX_ROW_BYTES = 32 << 20  # a longer row is rejected unread: no conversation of a usable length needs it
_UTF16_OR_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
# Files that stand beside data in a folder and hold no conversations
_NO_DATA = re.compile(
    r"(dataset_info|dataset_dict|state|dataset_infos)\.json|.*\.(md|rst|png|jpe?g|pdf|py|ya?ml|toml|lock)|licen[cs]e.*|notice.*", re.I
)


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
            for payload, row, position in read_table(path, head):
                yield Block(file_index, "table", payload, row, position)
        else:
            with Source(path) as source:
                unpacked = unpack(path, head, source)  # kept: the source would be closed with it
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


def _read_text(source: Source, file: IO[bytes], file_index: int) -> Iterator[Block]:
    blocks = chunks(source, file, BLOCK_BYTES)
    head = b""
    for chunk in blocks:
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
        yield from blocks

    if layout == "lines":
        yield from _read_lines(source, rest(), file_index, newline)
    else:
        values = Values(source.path, rest(), array=layout == "array", block_bytes=BLOCK_BYTES, max_row_bytes=MAX_ROW_BYTES)
        for line, items in values:
            yield Block(file_index, "items" if items else "long", items, line, source.position)


def _layout(first: bytes, text: bytes, *, at_end: bool) -> str:
    """ "lines", "array" (one JSON array of rows) or "values" (objects written over several lines)."""
    decoder = json.JSONDecoder()
    if text.startswith(b"["):
        # a list of messages is a row by itself, so these are lines; a list of rows is the array
        try:
            item = decoder.raw_decode(text[1:].decode("utf-8", "replace").lstrip(" \t\r\n\ufeff"))[0]
        except (ValueError, RecursionError):
            return "array"
        return "lines" if isinstance(item, dict) and ("role" in item or "from" in item) else "array"
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        try:
            decoder.raw_decode(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return "values" if first.strip() == b"{" and not at_end else "lines"
        return "values" if first.strip() == b"{" or not first.rstrip().endswith(b"}") else "lines"
    return "lines"


def _read_lines(source: Source, blocks: Iterator[bytes], file_index: int, newline: bytes) -> Iterator[Block]:
    line, kept, skipping = 1, b"", False
    for chunk in blocks:
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
        return RowRejected("invalid JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return RowRejected("invalid JSON", " ".join(str(error).split())[:100])

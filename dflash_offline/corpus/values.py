"""JSON values one after another, or the items of one array, out of a stream of bytes.

Each value goes on as its own bytes, to be decoded by whoever processes it. Where a value ends is found by decoding it,
and, where that fails, by its quotes and brackets: a malformed item of an array, or one too long to be kept, is one row
that cannot be used and not the end of the file.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from dflash_offline.errors import CorpusError

SPACE = re.compile(r"[ \t\r\n\ufeff]*")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class Values:
    """Iterates over (number of the first line, items): items are (line, bytes), an empty list stands for one value that is
    too long to be kept.

    Args:
        chunks: bytes of the text, in order.
        array: whether the text is one array; else values follow one another.
        block_bytes: of the items that come together.
        max_row_bytes: a longer value is passed over.

    Raises:
        CorpusError: the file ends inside a value or before its array does, or it goes on after the array.
    """

    def __init__(self, path: Path, chunks: Iterator[bytes], *, array: bool, block_bytes: int, max_row_bytes: int) -> None:
        self.path, self.array, self.block_bytes, self.max_row_bytes = path, array, block_bytes, max_row_bytes
        self._chunks = chunks
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # bad bytes come back as they were, in their row
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._line, self._ended = "", 0, 1, False
        self._number, self._opened = 0, not array

    def __iter__(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        items: list[tuple[int, bytes]] = []
        size = 0
        while self._find_value():
            line, value = self._line, self._take()
            if value is None:
                if items:
                    yield items[0][0], items
                yield line, []
                items, size = [], 0
                continue
            items.append((line, value))
            size += len(value)
            if size >= self.block_bytes:
                yield items[0][0], items
                items, size = [], 0
        if items:
            yield items[0][0], items
        if self._text[self._at + 1 :].strip() or any(chunk.strip() for chunk in self._chunks):  # nothing is left out in silence
            raise CorpusError(f"{self.path}:{self._line}: more data after the end of the JSON array; keep one array, or write JSON lines")

    def _more(self) -> None:
        """Read on. Twice as much each time, so that a long value is not scanned over and over."""
        wanted, self._text, self._at = max(self.block_bytes, len(self._text) - self._at), self._text[self._at :], 0
        parts = [self._text]
        while wanted > 0 and not self._ended:
            chunk = next(self._chunks, None)
            if chunk is None:
                self._ended = True
                parts.append(self._decode.decode(b"", final=True))
            else:
                parts.append(self._decode.decode(chunk))
                wanted -= len(chunk)
        self._text = "".join(parts)

    def _find_value(self) -> bool:
        """Go to where the next value begins; False at the end."""
        while True:
            start, text = self._at, self._text
            self._at = _skip_space(text, self._at)
            if self._at < len(text) and self.array:
                before = "[" if not self._opened else "," if self._number else ""
                if text[self._at] == before:
                    self._opened, self._at = True, _skip_space(text, self._at + 1)
            self._line += text.count("\n", start, self._at)
            if self._at < len(text):
                return not (self.array and text[self._at] == "]")
            if self._ended:
                if self.array:
                    raise CorpusError(
                        f"{self.path}: the JSON array has no end; the file was cut after row {self._number} (line {self._line})"
                    )
                return False
            self._more()

    def _take(self) -> bytes | None:
        """The value that begins here; None for one that is too long to be kept."""
        while True:
            try:
                return self._cut(self._decoder.raw_decode(self._text, self._at)[1])
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            if self._ended or len(self._text) - self._at > self.max_row_bytes:
                break
            self._more()
        first, end = self._text[self._at], _value_end(self._text, self._at)
        if end is not None and self._is_border(end):
            return self._cut(end)  # malformed inside: whoever decodes it says what is wrong
        if end is None and self._pass_over():
            return None
        cause = f"{reason}: the file ends inside it" if end is None and first in '{["' else reason
        raise CorpusError(
            f"{self.path}:{self._line}: row {self._number + 1} cannot be read ({cause}); repair the file, or write it as JSON lines"
        )

    def _cut(self, end: int) -> bytes:
        value = self._text[self._at : end]
        self._line += value.count("\n")
        self._number, self._at = self._number + 1, end
        return value.encode("utf-8", "surrogateescape")

    def _is_border(self, end: int) -> bool:
        """Whether a value may end here: what follows is the next one, or the end."""
        after = _skip_space(self._text, end)
        following = self._text[after : after + 1]
        return following in (("", ",", "]") if self.array else ("", "{", "["))

    def _pass_over(self) -> bool:
        """Go behind the value that begins here, keeping nothing of it; False if the file ends before it does."""
        depth = quoted = 0
        while True:
            last = self._at
            for match in _STRUCTURE.finditer(self._text, self._at):
                last = match.end()
                depth, quoted = _nested(match[0], depth, quoted)
                if depth < 0:
                    return False
                if not depth and not quoted:
                    self._line += self._text.count("\n", self._at, last)
                    self._number, self._at = self._number + 1, last
                    return True
            self._line += self._text.count("\n", self._at)
            kept = self._text[-1:] if last < len(self._text) and self._text.endswith("\\") else ""  # half of an escape
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._text, self._at = kept + self._decode.decode(chunk), 0


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # type: ignore[union-attr]


def _nested(mark: str, depth: int, quoted: int) -> tuple[int, int]:
    """Depth of brackets, and 1 inside a string, after a quote, a bracket or an escape."""
    if mark == '"':
        return depth, 1 - quoted
    if quoted or mark[0] == "\\":
        return depth, quoted
    return depth + (1 if mark in "{[" else -1), quoted


def _value_end(text: str, at: int) -> int | None:
    """Where the value that begins at ``at`` ends, going by quotes and brackets; None if it does not."""
    depth = quoted = 0
    for match in _STRUCTURE.finditer(text, at):
        depth, quoted = _nested(match[0], depth, quoted)
        if depth < 0:
            return None
        if not depth and not quoted:
            return match.end()
    return None

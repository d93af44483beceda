"""Files of every format, whole and damaged."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash_offline.corpus import reading
from dflash_offline.corpus.reading import decode_block, is_data, read_file
from dflash_offline.corpus.schema import RowRejected
from dflash_offline.errors import CorpusError
from dflash_offline.manifest import checksum

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"q{i} \u2028 é"}, {"role": "assistant", "content": "a\x85b"}]} for i in range(700)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def read(path: Path) -> list[tuple[int, Any]]:
    return [item for block in read_file(path, 0, digest=checksum(path)) for item in decode_block(block) if item[1] is not None]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda content: content,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "two gzip members": lambda content: gzip.compress(content[:5000]) + gzip.compress(content[5000:]),
    "two zstd frames": lambda content: zstandard.compress(content[:5000]) + zstandard.compress(content[5000:]),
}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("layout", ["lines", "array", "pretty array", "pretty objects", "no final newline", "crlf", "cr"])
def test_text_is_recognised_by_content(tmp_path: Path, packer: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 20_000)
    content = {
        "lines": LINES,
        "array": json.dumps(ROWS).encode(),
        "pretty array": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
        "pretty objects": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
        "no final newline": LINES.rstrip(b"\n"),
        "crlf": LINES.replace(b"\n", b"\r\n"),
        "cr": LINES.replace(b"\n", b"\r"),
    }[layout]
    found = read(write(tmp_path / "corpus.txt", PACKERS[packer](content)))
    assert [row for _, row in found] == ROWS
    if layout in ("lines", "crlf", "cr", "no final newline"):
        assert [line for line, _ in found] == list(range(1, 701))
    elif layout == "pretty array":
        lines = content.decode().split("\n")
        assert all(lines[line - 1].strip() == "{" for line, _ in found)


def write_table(path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist([{**row, "id": i, "embedding": [0.5] * 8} for i, row in enumerate(rows)])
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=100)
    else:
        new = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_tables_are_recognised_by_content(tmp_path: Path, kind: str) -> None:
    found = read(write_table(tmp_path / "corpus.jsonl", kind, ROWS))
    assert [row for _, row in found] == [row | {"id": i} for i, row in enumerate(ROWS)]  # other columns were not loaded
    assert [line for line, _ in found] == list(range(1, 701))


def test_a_table_of_prompts_is_read(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "system": "s"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c")
    assert [row for _, row in read(tmp_path / "c")] == rows


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_cut_tables_are_errors(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / "corpus", kind, ROWS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(CorpusError, match="corpus: damaged or cut short after row"):
        read(path)


def test_a_table_without_conversations_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["a"], "score": [1]}), path)
    with pytest.raises(CorpusError, match="no column holds conversations; its columns are text, score"):
        read(path)


def test_list_of_messages_in_each_line(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row["messages"]) + "\n" for row in ROWS)
    assert [row for _, row in read(write(tmp_path / "c", lines.encode()))] == [row["messages"] for row in ROWS]


def test_byte_order_marks_and_blank_lines(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    content = bom + LINES + b"\n  \n" + bom + LINES  # two files put together
    found = read(write(tmp_path / "c", content))
    assert [row for _, row in found] == ROWS + ROWS
    assert found[700][0] == 703


def test_bad_lines_are_single_rejected_rows(tmp_path: Path) -> None:
    good = LINES.split(b"\n")[0]
    bad = {
        b'{"messages": "\xe9"}': "invalid UTF-8",
        b'{"a": 1,}': "invalid JSON",
        b"{'a': 1}": "invalid JSON",
        b'{"a": 1} // note': "invalid JSON",
        b'{"messages": [{"role": "us': "invalid JSON",
    }
    found = read(write(tmp_path / "c", b"\n".join([good, *[line for key in bad for line in (key, good)]])))
    assert [row.reason if isinstance(row, RowRejected) else row for _, row in found] == [
        ROWS[0],
        *[item for reason in bad.values() for item in (reason, ROWS[0])],
    ]
    assert [line for line, _ in found] == list(range(1, 12))
    assert found[9][1].detail == "Unterminated string starting at column 24"


def test_lone_carriage_returns_among_newlines(tmp_path: Path) -> None:
    lines = LINES.split(b"\n")
    found = read(write(tmp_path / "c", lines[0] + b"\r" + lines[1] + b"\n" + lines[2] + b"\n"))
    assert [row for _, row in found] == ROWS[:3]


def test_invalid_bytes_in_an_array_reject_their_row_only(tmp_path: Path) -> None:
    content = json.dumps(ROWS[:3], ensure_ascii=False).encode().replace(b"q1", b"q\xff")
    found = [row for _, row in read(write(tmp_path / "c", content))]
    assert found[0] == ROWS[0] and found[2] == ROWS[2] and found[1].reason == "invalid UTF-8"


@pytest.mark.parametrize("malformed", ["{'role': 'user'}", '{"b": 2,}', '{"b": 2 /* two */}', "{}, bare", '{"b" "\\"}"}'])
def test_a_malformed_item_of_an_array_rejects_that_row_only(tmp_path: Path, malformed: str) -> None:
    first, last = (json.dumps(row) for row in ROWS[:2])
    found = read(write(tmp_path / "c", f"[{first},\n{malformed},\n{last}]".encode()))
    assert found[0] == (1, ROWS[0])
    rejected = [(line, row.reason) for line, row in found if isinstance(row, RowRejected)]
    assert rejected == [(2, "invalid JSON")]
    if malformed != "{}, bare":  # without brackets of its own it takes the next row with it
        assert found[-1] == (3, ROWS[1]) and len(found) == 3


@pytest.mark.parametrize("layout", ["array", "pretty objects"])
def test_a_giant_value_is_passed_over_without_being_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(reading, "MAX_ROW_BYTES", 5000)
    giant = {"messages": ['brackets ]}"[{ \\" and \\ quotes', {"nested": "x" * 997 + "\\"}] * 40, "last": "\\"}
    rows = [ROWS[0], giant, ROWS[1], giant]
    text = json.dumps(rows, indent=1) if layout == "array" else "\n".join(json.dumps(row, indent=1) for row in rows)
    found = [row.reason if isinstance(row, RowRejected) else row for _, row in read(write(tmp_path / "c", text.encode()))]
    assert found == [ROWS[0], "row too long to read", ROWS[1], "row too long to read"]


@pytest.mark.long
def test_a_row_of_200_megabytes_takes_little_memory(tmp_path: Path) -> None:
    """One JSON line, and one item of an array: passed over, in less than 300 MB more than before."""
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom dflash_offline.corpus.reading import decode_block, read_file\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\nbefore = peak()\n"
        "rows = [row for block in read_file(Path(sys.argv[1]), 0) for _, row in decode_block(block) if row is not None]\n"
        "print(len(rows), getattr(rows[1], 'reason', None), peak() - before)"
    )
    row = json.dumps(ROWS[0]).encode()
    for before, between, after in ((b"", b"\n", b"\n"), (b"[", b",", b"]")):
        with (tmp_path / "c").open("wb") as file:
            file.write(before + row + between + b'{"messages": "')
            for _ in range(200):
                file.write(b"x" * 1_000_000)
            file.write(b'"}' + between + row + after)
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, check=True)
        count, *reason, extra = done.stdout.split()
        assert (count, " ".join(reason)) == ("3", "row too long to read") and int(extra) < 300_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (LINES.decode().encode("utf-16-le"), "UTF-16"),
        (b"id,text\n1,hello\n", "no known format"),
        (b"\x89PNG\r\n\x1a\n0000", "no known format"),
        (json.dumps(ROWS).encode()[:-30], "cannot be read"),
        (json.dumps(ROWS).encode()[:-1], "has no end"),
        (b'[{"a": 1}, {"b": 2', "row 2 cannot be read"),
        (b'[{"a": 1}, {"b": 2}} , {"c": 3}]', "row 3 cannot be read"),
        (b'[{"a": 1}]\n[{"a": 1}]', "more data after the end"),
        (gzip.compress(LINES)[:-500], "damaged or cut short"),
        (lzma.compress(LINES)[:-50], "damaged or cut short"),
        (bz2.compress(LINES)[:-50], "damaged or cut short"),
        (gzip.compress(LINES)[:200] + b"\0" * 50 + gzip.compress(LINES)[250:], "damaged or cut short"),
    ],
)
def test_bad_files_are_errors_that_name_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=message) as caught:
        read(write(tmp_path / "bad-corpus.jsonl", content))
    assert "bad-corpus.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", [3, 1000, 100_000])
def test_a_cut_zstd_file_is_an_error(tmp_path: Path, missing: int) -> None:
    content = b"".join(b'{"noise": "' + os.urandom(40).hex().encode() + b'"}\n' for _ in range(5000))
    packed = zstandard.compress(content)
    assert len(read(write(tmp_path / "whole", packed))) == 5000
    with pytest.raises(CorpusError, match="damaged or cut short"):
        read(write(tmp_path / "c", packed[:-missing]))


def test_empty_files_hold_nothing(tmp_path: Path) -> None:
    for content in (b"", b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"")):
        assert read(write(tmp_path / "c", content)) == []


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="missing: cannot be read"):
        list(read_file(tmp_path / "missing", 0))


def test_giant_lines_are_skipped_without_being_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(reading, "MAX_ROW_BYTES", 5000)
    lines = LINES.split(b"\n")
    giant = b'{"messages": "' + b"x" * 50_000 + b'"}'
    found = read(write(tmp_path / "c", b"\n".join([lines[0], giant, lines[1], giant])))
    assert [row.reason if isinstance(row, RowRejected) else row for _, row in found] == [
        ROWS[0],
        "row too long to read",
        ROWS[1],
        "row too long to read",
    ]
    assert [line for line, _ in found] == [1, 2, 3, 4]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    path = write(tmp_path / "c", LINES)
    blocks = read_file(path, 0)
    next(blocks)
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(CorpusError, match="changed while it was being read"):
        list(blocks)
    table = write_table(tmp_path / "t", "parquet", ROWS)
    blocks = read_file(table, 0)
    next(blocks)
    os.utime(table, ns=(1, 1))
    with pytest.raises(CorpusError, match="changed while it was being read"):
        list(blocks)


def test_a_file_that_changed_since_its_key_was_made_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "c", LINES)
    with pytest.raises(CorpusError, match="changed while it was being read"):
        list(read_file(path, 0, digest="0" * 32))


def test_all_of_a_packed_file_is_digested(tmp_path: Path) -> None:
    """What follows the packed data counts too, else a changed file could pass for the old one."""
    path = write(tmp_path / "c", bz2.compress(LINES) + b"trailing")
    assert len(read(path)) == 700


def test_files_beside_data_are_known() -> None:
    for name in ("README.md", "LICENSE", "dataset_info.json", "state.json", "NOTICE.txt", "plot.png"):
        assert not is_data(Path("folder") / name), name
    for name in ("train.jsonl", "a.json", "data-00000-of-00001.arrow", "x.parquet", "corpus", "statement.json"):
        assert is_data(Path("folder") / name), name


def test_position_grows_to_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10_000)
    path = write(tmp_path / "c", gzip.compress(LINES))
    positions = [block.position for block in read_file(path, 0)]
    assert positions == sorted(positions) and positions[-1] == path.stat().st_size


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_first_row_that_is_nested_without_end(tmp_path: Path, opening: str) -> None:
    row = json.dumps(ROWS[0])
    deep = opening * 20_000 + "1" + ("]" if opening == "[" else "}") * 20_000
    for content in (f"{deep}\n{row}\n", f"[{deep},{row}]", opening * 20_000):
        try:
            found = [item for _, item in read(write(tmp_path / "f", content.encode()))]
        except CorpusError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(found[0], RowRejected) and found[1:] in ([ROWS[0]], [])

"""Parquet and Arrow files: the columns that hold conversations, a few hundred rows at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_offline.errors import CorpusError

_TABLE_ROWS = 256
_CONVERSATIONS = {"messages", "conversations", "prompt"}
_BESIDE_THEM = {"system", "system_prompt", "tools", "functions", "finish_reason", "status", "source", "id"}


def read_table(path: Path, head: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (rows as an Arrow stream, number of the first from 1, bytes of the file read so far).

    Raises:
        CorpusError: damaged, or no column holds conversations.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, row = path.stat().st_size, 1
    try:
        if head.startswith(b"PAR1"):
            with pq.ParquetFile(path) as file:
                columns, rows = _columns(path, file.schema_arrow), max(1, file.metadata.num_rows)
                for batch in file.iter_batches(batch_size=_TABLE_ROWS, columns=columns):
                    yield _table_bytes(batch), row, size * min(row, rows) // rows
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
                    yield _table_bytes(piece), row, min(size, file.tell())
                    row += piece.num_rows
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path}: damaged or cut short after row {row - 1} ({' '.join(str(error).split())[:200]})") from None


def _columns(path: Path, schema: Any) -> list[str]:
    """Columns worth loading: known names, and lists of objects. Others stay on disk."""
    import pyarrow as pa

    def may_hold_messages(kind: Any) -> bool:
        return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)

    found = {field.name for field in schema if field.name in _CONVERSATIONS or may_hold_messages(field.type)}
    if not found:
        raise CorpusError(f"{path}: no column holds conversations; its columns are {', '.join(schema.names[:12])}")
    return [name for name in schema.names if name in found | _BESIDE_THEM]


def _table_bytes(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()

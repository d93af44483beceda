"""A corpus of given rows, written where a benchmark wants one, without conversations or a tokenizer."""

from pathlib import Path

import numpy as np

from dflash_offline.corpus.storage import CorpusWriter, row_hash
from dflash_offline.manifest import write_manifest


def write_corpus(folder: Path, rows: list[np.ndarray], masks: list[np.ndarray], *, key: str) -> list[bytes]:
    """Rows int32 ``[T]`` with masks uint8 ``[T]``, all in one bucket and none held out; their content hashes."""
    folder.mkdir(parents=True)
    count, lengths = len(rows), np.array([len(row) for row in rows])
    hashes = [row_hash(row, mask) for row, mask in zip(rows, masks, strict=True)]
    with CorpusWriter(folder) as writer:
        writer.append(
            {
                "input_ids": np.concatenate(rows),
                "loss_mask": np.concatenate(masks),
                "lengths": lengths,
                "hashes": np.frombuffer(b"".join(hashes), np.uint8).reshape(count, 32),
                "prompt_hashes": np.arange(count),
                "file_index": np.zeros(count),
                "line": np.arange(1, count + 1),
                "source_index": np.full(count, -1),
                "truncated": np.zeros(count),
            }
        )
        files = writer.finish(buckets=np.zeros(count), heldout=np.zeros(count))
    counts = {"rows": count, "tokens": int(lengths.sum())}
    rows_from = {"files": ["rows.jsonl"], "sources": []}
    edges = [int(lengths.max()) + 1]
    write_manifest(folder, kind="corpus", key=key, files=files, counts=counts, bucket_edges=edges, rows_from=rows_from)
    return hashes

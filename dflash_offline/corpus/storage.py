"""The tokenised corpus on disk: flat arrays, written row by row, read by memory map.

``input_ids.bin`` int32 and ``loss_mask.bin`` uint8 hold all tokens one row after another; every other array has one
entry a row (``ROW_ARRAYS``). ``manifest.json``, written last, holds their names and what the rows came from.
"""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash_offline.errors import CorpusError
from dflash_offline.manifest import damaged_files, read_manifest

TOKEN_ARRAYS = {"input_ids": np.dtype("<i4"), "loss_mask": np.dtype("u1")}
ROW_ARRAYS = {
    "lengths": (np.dtype("<i4"), ()),  # tokens
    "buckets": (np.dtype("<i2"), ()),
    "heldout": (np.dtype("?"), ()),
    "hashes": (np.dtype("u1"), (32,)),  # row_hash
    "prompt_hashes": (np.dtype("<u8"), ()),  # of the first user turn: what the held-out split goes by
    "file_index": (np.dtype("<i4"), ()),
    "line": (np.dtype("<i8"), ()),  # line of a text file, row number of a table, both counted from 1
    "source_index": (np.dtype("<i2"), ()),  # -1: the row names no source
    "truncated": (np.dtype("?"), ()),  # the answer was cut by a length limit
}


def row_hash(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """What identifies a row everywhere: sha256 of its int32 little-endian ids, then its mask bytes."""
    digest = hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4"))
    digest.update(np.ascontiguousarray(loss_mask, dtype="u1"))
    return digest.digest()


@dataclass(frozen=True)
class CorpusRow:
    """One conversation, or one answer of it where the template needs them apart.

    ``input_ids`` int32 [T]; ``loss_mask`` uint8 [T], 1 where the token is trained on; both describe the same token.
    """

    index: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    sha256: bytes
    bucket: int
    heldout: bool


class Corpus:
    """A prepared corpus. Arrays are memory maps; nothing is loaded before it is used.

    Attributes:
        folder: where it lies.
        manifest: what was made (counts, bucket edges, template, mask methods, rejected rows by reason).
        offsets: int64 [n + 1], where each row's tokens start; ``lengths`` int32, ``buckets`` int16, ``heldout`` bool,
            ``hashes`` uint8 [n, 32], ``file_index`` int32, ``line`` int64, ``source_index`` int16, ``truncated`` bool: [n].
        files, sources: names that ``file_index`` and ``source_index`` point into.
    """

    lengths: np.ndarray
    buckets: np.ndarray
    heldout: np.ndarray
    hashes: np.ndarray
    prompt_hashes: np.ndarray
    file_index: np.ndarray
    line: np.ndarray
    source_index: np.ndarray
    truncated: np.ndarray

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = Path(folder), manifest
        self._num_rows: int = manifest["counts"]["rows"]
        num_tokens: int = manifest["counts"]["tokens"]
        for name, (dtype, shape) in ROW_ARRAYS.items():
            setattr(self, name, np.memmap(self.folder / f"{name}.bin", dtype=dtype, mode="r", shape=(self._num_rows, *shape)))
        self._input_ids = np.memmap(self.folder / "input_ids.bin", dtype=TOKEN_ARRAYS["input_ids"], mode="r", shape=(num_tokens,))
        self._loss_mask = np.memmap(self.folder / "loss_mask.bin", dtype=TOKEN_ARRAYS["loss_mask"], mode="r", shape=(num_tokens,))
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.files: list[str] = manifest["rows_from"]["files"]
        self.sources: list[str] = manifest["rows_from"]["sources"]

    @classmethod
    def open(cls, folder: Path, *, deep: bool = False) -> "Corpus":
        """Open a complete corpus.

        Args:
            deep: compare contents with their checksums, not only sizes.

        Raises:
            DFlashError: there is no manifest (preparing did not finish), or it was edited.
            CorpusError: a file is missing, has another size or, with ``deep``, other content.
        """
        manifest = read_manifest(folder, kind="corpus")
        if problems := damaged_files(folder, manifest, deep=deep):
            raise CorpusError(f"{folder}: {problems[0]}; `dflash-offline reset corpus` has it prepared again")
        return cls(folder, manifest)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def bucket_edges(self) -> list[int]:
        """Edges the rows were sorted by (resolved, if the run file says "auto")."""
        return list(self.manifest["bucket_edges"])

    def row(self, index: int) -> CorpusRow:
        """Row ``index`` (0-based); its arrays are views of the memory maps.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < self._num_rows:
            raise IndexError(f"the corpus has {self._num_rows} rows; there is no row {index}")
        tokens = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return CorpusRow(
            index,
            self._input_ids[tokens],
            self._loss_mask[tokens],
            self.hashes[index].tobytes(),
            int(self.buckets[index]),
            bool(self.heldout[index]),
        )

    def origin(self, index: int) -> str:
        """``file:line`` a row was read from."""
        return f"{self.files[self.file_index[index]]}:{self.line[index]}"


class CorpusWriter:
    """Appends rows to the arrays of a folder. Buckets and the held-out split are written after the last row.

    Use as a context manager. Files left by a run that was killed are overwritten; without a manifest they meant nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.num_rows = self.num_tokens = self.num_supervised = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> "CorpusWriter":
        for name in (*TOKEN_ARRAYS, *ROW_ARRAYS):
            if name not in ("buckets", "heldout"):
                self._files[name] = self._stack.enter_context((self.folder / f"{name}.bin").open("wb", buffering=1 << 20))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def append(self, arrays: dict[str, np.ndarray]) -> None:
        """Append rows: every token array concatenated, every row array with one entry a row."""
        assert arrays.keys() == self._files.keys(), sorted(arrays.keys() ^ self._files.keys())
        for name, file in self._files.items():
            dtype = TOKEN_ARRAYS[name] if name in TOKEN_ARRAYS else ROW_ARRAYS[name][0]
            file.write(np.ascontiguousarray(arrays[name], dtype=dtype))
        self.num_rows += len(arrays["lengths"])
        self.num_tokens += len(arrays["input_ids"])
        self.num_supervised += int(np.count_nonzero(arrays["loss_mask"]))

    def finish(self, *, buckets: np.ndarray, heldout: np.ndarray) -> list[str]:
        """Write the two arrays that need all rows; returns the names of all files."""
        self._stack.close()
        (self.folder / "buckets.bin").write_bytes(np.ascontiguousarray(buckets, dtype=ROW_ARRAYS["buckets"][0]))
        (self.folder / "heldout.bin").write_bytes(np.ascontiguousarray(heldout, dtype=ROW_ARRAYS["heldout"][0]))
        return [f"{name}.bin" for name in (*TOKEN_ARRAYS, *ROW_ARRAYS)]

    def read(self, name: str, *, columns: int | None = None) -> np.ndarray:
        """A row array as written so far (flushes); of a wide one only the first ``columns``, to save memory."""
        self._files[name].flush()
        dtype, shape = ROW_ARRAYS[name]
        if not self.num_rows:
            return np.zeros((0, *shape), dtype=dtype)
        mapped = np.memmap(self.folder / f"{name}.bin", dtype=dtype, mode="r", shape=(self.num_rows, *shape))
        return np.array(mapped if columns is None else mapped[:, :columns])

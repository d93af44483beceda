"""Look at a corpus: a row's text with what is trained on, and the lengths of a sample before anything is prepared."""

from dataclasses import dataclass

import numpy as np

from dflash_offline.config import RunConfig
from dflash_offline.corpus.preparation import corpus_files
from dflash_offline.corpus.reading import Block, read_file
from dflash_offline.corpus.rows import RowMaker, RowOptions
from dflash_offline.corpus.storage import Corpus
from dflash_offline.corpus.template import load_source, load_template


def render(config: RunConfig, corpus: Corpus, index: int) -> list[tuple[str, bool]]:
    """Text of row ``index`` as runs of (text, supervised), control tokens included; joined they are the whole row.

    A character whose tokens lie on both sides of a run's border shows as U+FFFD.

    Raises:
        IndexError: there is no such row.
    """
    row, template = corpus.row(index), load_template(config)
    borders = np.flatnonzero(np.diff(row.loss_mask)) + 1
    starts, stops = [0, *borders.tolist()], [*borders.tolist(), len(row.input_ids)]
    return [(template.decode(row.input_ids[a:b]), bool(row.loss_mask[a])) for a, b in zip(starts, stops, strict=True)]


@dataclass(frozen=True)
class Peek:
    """A sample of a corpus that was not prepared yet.

    Attributes:
        lengths: tokens of each sampled row, int32 [n].
        supervised_tokens: trained tokens in them.
        records: rows of the files the sample was made from, usable or not.
        share_read: of all bytes of all files.
    """

    lengths: np.ndarray
    supervised_tokens: int
    records: int
    share_read: float

    @property
    def estimated_rows(self) -> int:
        """Rows of the whole corpus, going by bytes."""
        return round(len(self.lengths) / self.share_read) if self.share_read else 0

    @property
    def estimated_tokens(self) -> int:
        """Tokens of the whole corpus, going by bytes."""
        return round(int(self.lengths.sum()) / self.share_read) if self.share_read else 0


def peek(config: RunConfig, num_rows: int) -> Peek:
    """Tokenise about ``num_rows`` rows, spread evenly over the files' beginnings.

    Raises:
        CorpusError, ConfigError: as ``prepare``.
    """
    paths = [path for path in corpus_files(config) if path.stat().st_size]
    maker = RowMaker(RowOptions.of(config, load_source(config)), [str(path) for path in paths])
    lengths, supervised, records, read = [np.zeros(0, dtype=np.int32)], 0, 0, 0.0
    wanted = -(-num_rows // max(1, len(paths)))
    for i, path in enumerate(paths):
        taken = 0
        for block in read_file(path, i):
            num_block_rows = _rows_in(block)
            share = min(1.0, (wanted - taken) / max(1, num_block_rows))
            result = maker(_first_rows(block, wanted - taken))
            records += result.counts.records
            taken += result.counts.records
            if result.arrays is not None:
                lengths.append(result.arrays["lengths"])
                supervised += int(np.count_nonzero(result.arrays["loss_mask"]))
            if taken >= wanted or share < 1:
                read += path.stat().st_size * min(1.0, taken / max(1, num_block_rows) * block.position / path.stat().st_size)
                break
        else:
            read += path.stat().st_size
    total = sum(path.stat().st_size for path in paths)
    return Peek(np.concatenate(lengths), supervised, records, read / total if total else 0.0)


def _rows_in(block: Block) -> int:
    if block.kind == "lines":
        return block.payload.count(block.newline) + 1
    return len(block.payload) if block.kind == "items" else 256


def _first_rows(block: Block, count: int) -> Block:
    if block.kind == "lines":
        payload = block.newline.join(block.payload.split(block.newline, count)[:count])
        return Block(block.file_index, block.kind, payload, block.line, block.position, block.newline)
    if block.kind == "items":
        return Block(block.file_index, block.kind, block.payload[:count], block.line, block.position)
    return block

"""Look at a corpus: a row's text with what is trained on, and the lengths of a sample before anything is prepared."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.corpus.preparation import corpus_files
from dflash_offline.corpus.reading import Block, decode_block, read_file
from dflash_offline.corpus.rows import Counts, RowMaker, RowOptions
from dflash_offline.corpus.schema import RowRejected
from dflash_offline.corpus.storage import Corpus
from dflash_offline.corpus.template import ChatTemplate, load_source, load_template
from dflash_offline.errors import CorpusError
from dflash_offline.figures import counted
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST


@dataclass(frozen=True)
class Shown:
    """A conversation as it is trained on.

    Attributes:
        origin: ``file:line`` it was read from.
        num_tokens, num_supervised: tokens, and how many of them are trained on.
        runs: its text as runs of (text, supervised), control tokens included; joined they are the whole row. A
            character whose tokens lie on both sides of a run's border shows as U+FFFD.
        notes: whatever else is known of the row.
    """

    origin: str
    num_tokens: int
    num_supervised: int
    runs: list[tuple[str, bool]]
    notes: list[str]


def show(config: RunConfig, index: int) -> Shown:
    """Row ``index`` of the run file's corpus; of a corpus that is not prepared yet, read from its files.

    Raises:
        CorpusError: there is no such row.
        DFlashError: files, tokenizer or template cannot be used.
    """
    folder = Layout(config.root_dir).corpus(keys.corpus_key(config))
    if not (folder / MANIFEST).exists():
        return _show_unprepared(config, index)
    corpus = Corpus.open(folder)
    if not 0 <= index < len(corpus):
        raise CorpusError(f"--corpus {index}: the corpus has {counted(len(corpus), 'row')}, numbered from 0")
    row = corpus.row(index)
    notes = [f"bucket {row.bucket}", *["held out"] * row.heldout, *["no end marker"] * bool(corpus.truncated[index])]
    runs = render(config, corpus, index)
    return Shown(corpus.origin(index), len(row.input_ids), int(np.count_nonzero(row.loss_mask)), runs, notes)


def _show_unprepared(config: RunConfig, index: int) -> Shown:
    files = corpus_files(config)
    paths = [path for path in files if path.stat().st_size]
    maker = RowMaker(RowOptions.of(config, load_source(config)), [str(path) for path in paths])
    before, counts = 0, Counts()
    for number, path in enumerate(paths):
        for block in read_file(path, number):
            result = maker(block)
            arrays = result.arrays
            counts.add(result.counts)
            count = 0 if arrays is None else len(arrays["lengths"])
            if arrays is None or index >= before + count:
                before += count
                continue
            place = index - before
            stop = int(arrays["lengths"][: place + 1].sum())
            tokens = slice(stop - int(arrays["lengths"][place]), stop)
            ids, mask = arrays["input_ids"][tokens], arrays["loss_mask"][tokens]
            origin = f"{path}:{arrays['line'][place]}"
            runs = _runs(maker.template, ids, mask)
            return Shown(origin, len(ids), int(np.count_nonzero(mask)), runs, ["not prepared yet"])
    if not before:
        raise CorpusError(f"--corpus {index}: the files have no usable row: {_why_none(counts, files)}")
    raise CorpusError(f"--corpus {index}: the files have {counted(before, 'usable row')}, numbered from 0")


def _why_none(counts: Counts, files: list[Path]) -> str:
    """Why the files, of which ``counts`` tells, have no usable row."""
    return counts.why_rejected() or (f"{files[0]} is empty" if len(files) == 1 else f"all {len(files):,} files are empty")


def render(config: RunConfig, corpus: Corpus, index: int) -> list[tuple[str, bool]]:
    """Text of row ``index`` as runs of (text, supervised), see ``Shown``.

    Raises:
        IndexError: there is no such row.
    """
    row = corpus.row(index)
    return _runs(load_template(config), row.input_ids, row.loss_mask)


def _runs(template: ChatTemplate, ids: np.ndarray, mask: np.ndarray) -> list[tuple[str, bool]]:
    borders = np.flatnonzero(np.diff(mask)) + 1
    starts, stops = [0, *borders.tolist()], [*borders.tolist(), len(ids)]
    return [(template.decode(ids[a:b]), bool(mask[a])) for a, b in zip(starts, stops, strict=True)]


@dataclass(frozen=True)
class Peek:
    """A sample of a corpus that was not prepared yet.

    Attributes:
        lengths: tokens of each sampled row, int32 [n].
        supervised_tokens: trained tokens in them.
        records: rows of the files the sample was made from, usable or not.
        rejected: those of them that cannot be used.
        share_read: of all bytes of all files.
        is_bound: the answers are not written yet, and count as long as they may become.
        first: ``file:line`` of the first usable row; None when there is none.
        why_none: where there is no usable row, the reasons and the first row of each.
    """

    lengths: np.ndarray
    supervised_tokens: int
    records: int
    rejected: int
    share_read: float
    is_bound: bool = False
    first: str | None = None
    why_none: str = ""

    @property
    def estimated_rows(self) -> int:
        """Rows of the whole corpus, going by bytes."""
        return round(len(self.lengths) / self.share_read) if self.share_read else 0

    @property
    def estimated_tokens(self) -> int:
        """Tokens of the whole corpus, going by bytes."""
        return round(int(self.lengths.sum()) / self.share_read) if self.share_read else 0


def peek(config: RunConfig, num_rows: int) -> Peek:
    """Tokenise about ``num_rows`` rows, spread evenly over the files' beginnings. Where the target is to write the answers
    and has not yet, the rows are the prompts, and every answer counts ``[regenerate] max_new_tokens``.

    Raises:
        CorpusError, ConfigError: as ``prepare``.
    """
    from dflash_offline.regenerate import is_answered, prompt_files

    is_bound = config.regenerates and not is_answered(config)
    files = prompt_files(config) if is_bound else corpus_files(config)
    paths = [path for path in files if path.stat().st_size]
    measure = (_prompt_lengths if is_bound else _row_lengths)(config, paths)
    lengths, supervised, counts, read, first = [np.zeros(0, dtype=np.int32)], 0, Counts(), 0.0, None
    most_prompts = config.regenerate.max_prompts if is_bound else None
    wanted = -(-min(num_rows, most_prompts or num_rows) // max(1, len(paths)))
    for i, path in enumerate(paths):
        taken = 0
        for block in read_file(path, i):
            num_block_rows = _rows_in(block)
            share = min(1.0, (wanted - taken) / max(1, num_block_rows))
            found = measure(_first_rows(block, wanted - taken))
            counts.add(found.counts)
            taken += found.counts.records
            lengths.append(found.lengths)
            if first is None and found.first_line is not None:
                first = f"{path}:{found.first_line}"
            supervised += found.supervised_tokens
            if taken >= wanted or share < 1:
                read += path.stat().st_size * min(1.0, taken / max(1, num_block_rows) * block.position / path.stat().st_size)
                break
        else:
            read += path.stat().st_size
    total = sum(path.stat().st_size for path in paths)
    share = read / total if total else 0.0
    if most_prompts is not None:
        share = min(1.0, max(share, counts.records / most_prompts))
    return Peek(
        np.concatenate(lengths),
        supervised,
        counts.records,
        sum(counts.rejected.values()),
        share,
        is_bound,
        first,
        "" if first is not None else _why_none(counts, files),
    )


@dataclass(frozen=True)
class _Measured:
    """A block's usable rows, and the line of the first of them."""

    lengths: np.ndarray
    supervised_tokens: int
    counts: Counts
    first_line: int | None


def _row_lengths(config: RunConfig, paths: list[Path]) -> Callable[[Block], _Measured]:
    maker = RowMaker(RowOptions.of(config, load_source(config)), [str(path) for path in paths])

    def measure(block: Block) -> _Measured:
        result = maker(block)
        arrays = result.arrays
        if arrays is None:
            return _Measured(np.zeros(0, dtype=np.int32), 0, result.counts, None)
        return _Measured(arrays["lengths"], int(np.count_nonzero(arrays["loss_mask"])), result.counts, int(arrays["line"][0]))

    return measure


def _prompt_lengths(config: RunConfig, paths: list[Path]) -> Callable[[Block], _Measured]:
    from dflash_offline.regenerate import parse_turns

    template, section, most = load_template(config), config.regenerate, config.corpus.max_length

    def measure(block: Block) -> _Measured:
        lengths, supervised, counts, first = [], 0, Counts(), None
        for line, row in decode_block(block):
            if row is None:
                continue
            counts.records += 1
            try:
                if isinstance(row, RowRejected):
                    raise row
                turns = parse_turns(row, roles=config.corpus.roles)[: section.max_turns]
                history = [message for turn in turns for message in (*turn, {"role": "assistant", "content": "x"})]
                messages, _, mark = template.mark(history, None)
                asked = len(template.encode(template.render(messages), mark).ids)
            except RowRejected as error:
                counts.reject(error.reason, f"{paths[block.file_index]}:{line}", error.detail)
                continue
            first = line if first is None else first
            answered = len(turns) * section.max_new_tokens
            lengths.append(min(most, asked + answered))
            supervised += min(answered, lengths[-1])
        return _Measured(np.array(lengths, dtype=np.int32), supervised, counts, first)

    return measure


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

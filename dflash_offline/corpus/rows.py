"""One block of raw rows -> arrays and counts: the work of one worker process."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_offline.config import RunConfig
from dflash_offline.corpus.masking import EncodedRow, Rendered, Span, encode_row, render_conversation
from dflash_offline.corpus.reading import Block, decode_block
from dflash_offline.corpus.schema import RowRejected, parse_row
from dflash_offline.corpus.storage import row_hash
from dflash_offline.corpus.template import ChatTemplate, TemplateSource, check_ids

EXAMPLES = 3  # rejected rows shown for each reason


@dataclass(frozen=True)
class RowOptions:
    """What a worker needs to know of the run file."""

    source: TemplateSource
    supervise: str
    supervise_thinking: bool
    max_length: int
    too_long: str
    roles: dict[str, str]
    drop_answers: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig, source: TemplateSource) -> "RowOptions":
        section = config.corpus
        return cls(
            source,
            section.supervise,
            section.supervise_thinking,
            section.max_length,
            section.too_long,
            dict(section.roles),
            tuple(section.drop_answers),
        )


@dataclass
class Counts:
    """What became of the rows read. ``records == conversations + rejected``."""

    records: int = 0
    blank: int = 0
    conversations: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> "file:line: detail"
    notes: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)  # answers by how their span was found
    truncated: int = 0  # answers without an end marker

    def reject(self, reason: str, where: str, detail: str) -> None:
        self.rejected[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES:
            shown.append(f"{where}: {detail}" if detail else where)

    def why_rejected(self) -> str:
        """The most frequent reasons, each with its first row: ``3 x no messages, the first in c.jsonl:1 (keys are a, b)``."""
        texts = []
        for reason, count in self.rejected.most_common(4):
            where, _, detail = self.examples[reason][0].partition(": ")
            texts.append(f"{count:,} x {reason}, the first in {where}{f' ({detail})' if detail else ''}")
        return "; ".join(texts)

    def add(self, other: "Counts") -> None:
        self.records += other.records
        self.blank += other.blank
        self.conversations += other.conversations
        self.truncated += other.truncated
        for name in ("rejected", "notes", "methods"):
            getattr(self, name).update(getattr(other, name))
        for reason, shown in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine.extend(shown[: EXAMPLES - len(mine)])


@dataclass
class BlockResult:
    """Arrays of the rows made (see ``storage``), the row sources by name, and counts."""

    file_index: int
    position: int
    arrays: dict[str, np.ndarray] | None
    sources: list[str]
    counts: Counts


class RowMaker:
    """Turns blocks into arrays. Built once in each worker.

    Args:
        options: from the run file.
        files: names of the files, for messages.
    """

    def __init__(self, options: RowOptions, files: list[str]) -> None:
        self.options, self.files = options, files
        self.template = ChatTemplate(options.source)
        # No token is longer, so a text longer than this many characters is longer than max_length tokens
        longest = max(map(len, self.template.tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.max_characters = options.max_length * longest + 1024

    def __call__(self, block: Block) -> BlockResult:
        counts, made, sources = Counts(), [], {}
        name = self.files[block.file_index]
        for line, row in decode_block(block):
            if row is None:
                counts.blank += 1
                continue
            counts.records += 1
            try:
                if isinstance(row, RowRejected):
                    raise row
                conversation = parse_row(row, roles=self.options.roles, drop_answers=self.options.drop_answers)
                rows = self._encode(conversation, counts, f"{name}:{line}")
            except RowRejected as error:
                counts.reject(error.reason, f"{name}:{line}", error.detail)
                continue
            counts.conversations += 1
            source = -1 if conversation.source is None else sources.setdefault(conversation.source, len(sources))
            prompt = conversation.prompt_hash()
            made.extend((encoded, line, source, prompt) for encoded in rows)
        return BlockResult(block.file_index, block.position, self._arrays(block, made), list(sources), counts)

    def _encode(self, conversation: Any, counts: Counts, where: str) -> list[EncodedRow]:
        """The rows of one conversation.

        Raises:
            RowRejected: none of them can be used.
        """
        options, rows, notes = self.options, [], []
        rendered_rows = render_conversation(
            self.template, conversation, supervise=options.supervise, supervise_thinking=options.supervise_thinking
        )
        problem = None
        for rendered in rendered_rows:
            notes += rendered.notes
            try:
                encoded = encode_row(self.template, self._bounded(rendered))
                check_ids(encoded.input_ids, self.template, where)
                rows.append(self._fit(encoded, notes))
            except RowRejected as error:
                problem = error
        if not rows:
            assert problem is not None
            raise problem
        if len(rows) < len(rendered_rows):
            notes.append("answers of split conversations left out")
        counts.notes.update(set(notes))
        counts.methods.update(method for row in rows for method in row.methods)
        counts.truncated += sum(row.cut for row in rows)
        return rows

    def _bounded(self, rendered: Rendered) -> Rendered:
        """Cut a text that is certainly longer than ``max_length`` tokens, so that a giant row takes no giant memory."""
        limit = self.max_characters
        if len(rendered.text) <= limit:
            return rendered
        if self.options.too_long == "drop":
            raise RowRejected("too long", f"more than {self.options.max_length} tokens")
        spans = [Span(span.start, min(span.end, limit), span.method) for span in rendered.spans if span.start < limit]
        if not spans:
            raise RowRejected("too long", f"no answer within {self.options.max_length} tokens")
        return Rendered(rendered.text[:limit], spans, rendered.mark, True, rendered.notes)

    def _fit(self, row: EncodedRow, notes: list[str]) -> EncodedRow:
        """Apply the length policy."""
        limit, policy = self.options.max_length, self.options.too_long
        if len(row.input_ids) <= limit:
            return row
        if policy == "drop":
            raise RowRejected("too long", f"{len(row.input_ids)} tokens")
        ends = [end for end in row.turn_ends if end <= limit]
        if policy == "cut_turn":
            if not ends:
                raise RowRejected("too long", "the first answer does not end within max_length")
            length = ends[-1]
        else:
            supervised = np.flatnonzero(row.loss_mask[:limit])
            length = int(supervised[-1]) + 1 if len(supervised) else 0
        mask = row.loss_mask[:length]
        if not (mask[:-1] & mask[1:]).any():
            raise RowRejected("too long", f"no answer within {limit} tokens")
        notes.append("conversations cut at max_length" if policy == "cut" else "conversations cut at a turn")
        return EncodedRow(row.input_ids[:length], mask, row.methods, ends, length, length not in row.turn_ends)

    @staticmethod
    def _arrays(block: Block, made: list[tuple[EncodedRow, int, int, int]]) -> dict[str, np.ndarray] | None:
        if not made:
            return None
        hashes = [np.frombuffer(row_hash(row.input_ids, row.loss_mask), dtype=np.uint8) for row, *_ in made]
        return {
            "input_ids": np.concatenate([row.input_ids for row, *_ in made]),
            "loss_mask": np.concatenate([row.loss_mask for row, *_ in made]),
            "lengths": np.array([len(row.input_ids) for row, *_ in made], dtype=np.int32),
            "hashes": np.stack(hashes),
            "prompt_hashes": np.array([prompt for *_, prompt in made], dtype=np.uint64),
            "file_index": np.full(len(made), block.file_index, dtype=np.int32),
            "line": np.array([line for _, line, _, _ in made], dtype=np.int64),
            "source_index": np.array([source for _, _, source, _ in made], dtype=np.int16),
            "truncated": np.array([row.cut for row, *_ in made], dtype=bool),
        }

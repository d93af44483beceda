"""Prompt files -> what is asked: the user turns of each row, in groups that one answer follows.

Files are read as the corpus reads them (any format, any shape of row); a row may also hold ``prompt``, one user turn.
Answers in the rows are ignored: the target writes them anew. Rows that need tools are left out, because the results of
other calls than those recorded are not known.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_offline import identity
from dflash_offline.config import RunConfig
from dflash_offline.corpus.reading import decode_block, is_data, read_file
from dflash_offline.corpus.schema import RowRejected, read_messages
from dflash_offline.errors import RegenerateError

EXAMPLES = 3  # rejected rows shown for each reason


@dataclass(frozen=True)
class Prompt:
    """One conversation to be held.

    Attributes:
        index: number among the usable rows of all prompt files, from 0.
        turns: each one the messages (user, before them system) that are sent before an answer is asked for.
        id, source: the row's own, whatever they are; None when it has none.
        where: file and line.
    """

    index: int
    turns: list[list[dict[str, str]]]
    id: Any
    source: Any
    where: str

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "turns": self.turns, "id": self.id, "source": self.source, "where": self.where}


@dataclass
class PromptCounts:
    """What became of the rows read: ``rows == prompts + rejected``."""

    rows: int = 0
    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def reject(self, error: RowRejected, where: str) -> None:
        self.rejected[error.reason] += 1
        shown = self.examples.setdefault(error.reason, [])
        if len(shown) < EXAMPLES:
            shown.append(f"{where}: {error.detail}" if error.detail else where)


def prompt_files(config: RunConfig) -> list[Path]:
    """The prompt files of a run file, without README and index files that lie in data folders.

    Raises:
        ConfigError: a pattern matches no file.
        RegenerateError: nothing but such files is there.
    """
    paths = config.files(config.regenerate.prompts, where="[regenerate] prompts")
    named = {config.path(pattern) for pattern in config.regenerate.prompts}
    kept = [path for path in paths if path in named or is_data(path)]
    if not kept:
        raise RegenerateError(f"[regenerate] prompts: none of {', '.join(path.name for path in paths[:5])} holds prompts")
    return kept


def read_prompts(config: RunConfig, counts: PromptCounts) -> Iterator[Prompt]:
    """Yield the prompts of a run file in the order of its files; ``counts`` is filled meanwhile.

    Raises:
        CorpusError: a file cannot be read, or changed while it was.
    """
    section = config.regenerate
    paths = prompt_files(config)
    for number, (path, digest) in enumerate(zip(paths, identity.files_identity(config, paths), strict=True)):
        for block in read_file(path, number, digest=digest):
            for line, row in decode_block(block):
                if row is None:
                    continue
                if section.max_prompts is not None and counts.rows == section.max_prompts:
                    return
                counts.rows += 1
                where = f"{path}:{line}"
                try:
                    if isinstance(row, RowRejected):
                        raise row
                    turns = parse_turns(row, roles=config.corpus.roles)[: section.max_turns]
                    own = row if isinstance(row, dict) else {}
                    prompt = Prompt(counts.prompts, turns, own.get("id"), own.get("source"), where)
                    _check_text(prompt)
                except RowRejected as error:
                    counts.reject(error, where)
                    continue
                counts.prompts += 1
                yield prompt


def parse_turns(row: Any, *, roles: dict[str, str] | None = None) -> list[list[dict[str, str]]]:
    """What is asked in a row, turn by turn.

    An answer is asked for where the row has one. In a row without answers every user message is a turn of its own.

    Raises:
        RowRejected: it asks nothing, or needs tools.
    """
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and not isinstance(row.get("messages"), list):
        row = {**row, "messages": [{"role": "user", "content": row["prompt"]}]}
    messages = read_messages(row, roles=roles)
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        raise RowRejected("needs tools", "it holds tool calls or their results")
    if isinstance(row, dict) and (row.get("tools") or row.get("functions")):
        raise RowRejected("needs tools", "it offers tools")
    answered = any(message["role"] == "assistant" for message in messages)
    turns: list[list[dict[str, str]]] = []
    waiting: list[dict[str, str]] = []
    for message in [*messages, {"role": "assistant"}] if answered else messages:
        if message["role"] != "assistant":
            waiting.append({"role": message["role"], "content": message["content"]})
        if message["role"] == ("assistant" if answered else "user") and any(part["role"] == "user" for part in waiting):
            turns.append(waiting)
            waiting = []
    if not turns:
        raise RowRejected("no user turn")
    if any(not message["content"].strip() for turn in turns for message in turn if message["role"] == "user"):
        raise RowRejected("empty user turn")
    return turns


def _check_text(prompt: Prompt) -> None:
    try:
        json.dumps(prompt.to_dict(), ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError):  # the second: a table's column of another type as id
        raise RowRejected("lone surrogate or unknown type", "it cannot be written as JSON in UTF-8") from None

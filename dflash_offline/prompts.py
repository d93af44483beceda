"""Prompt files of an evaluation, in any format that conversations come in; each file is one data set.

Outside ``evaluate``, which loads torch: ``doctor``, ``plan`` and the start of the pipeline read them too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.errors import CorpusError, EvaluateError


def data_sets(config: RunConfig) -> dict[str, list["Prompt"]]:
    """What [evaluate] prompts names, as the evaluation will read it. A file that is no good is found out before the run, not after it.

    Raises:
        ConfigError: a name in [evaluate] prompts stands for no file.
        EvaluateError: as ``read_data_sets``.
    """
    files = config.evaluation_prompts()
    try:
        return read_data_sets(files, most=config.evaluate.max_prompts)
    except EvaluateError as error:
        raise EvaluateError(f"{config.source.name}: [evaluate] prompts: {error}") from None


def read_data_sets(files: list[Path], *, most: int) -> dict[str, list["Prompt"]]:
    """The first ``most`` prompts of each file, by the name of its data set.

    Raises:
        EvaluateError: two files have one name; or as ``read_prompts``.
    """
    sets: dict[str, list[Prompt]] = {}
    for path in files:
        if dataset_name(path) in sets:
            raise EvaluateError(f"{path}: another prompt file is called {dataset_name(path)!r} too; data sets go by file name")
        sets[dataset_name(path)] = read_prompts(path, most=most)
    return sets


@dataclass(frozen=True)
class Prompt:
    """One conversation to be held.

    Attributes:
        messages: without the answers that are to be generated. An assistant message inside is given history; one at
            the very end is a reference answer and was dropped.
        where: file and line, for messages.
    """

    messages: list[dict[str, Any]]
    where: str

    @property
    def num_turns(self) -> int:
        """Answers that will be generated."""
        return sum(1 for _ in self.turns())

    def turns(self) -> Iterator[int]:
        """Ends of the message prefixes after which an answer is generated: after each user message that has none."""
        for index, message in enumerate(self.messages):
            follows = self.messages[index + 1]["role"] if index + 1 < len(self.messages) else None
            if message["role"] in ("user", "tool") and follows not in ("assistant", "tool"):
                yield index + 1


def dataset_name(path: Path) -> str:
    """``eval-gsm8k.jsonl`` -> ``gsm8k``."""
    name = path.name
    for suffix in (".gz", ".bz2", ".xz", ".zst", ".jsonl", ".json", ".parquet", ".arrow"):
        name = name.removesuffix(suffix)
    return name.removeprefix("eval-")


def read_prompts(path: Path, *, most: int) -> list[Prompt]:
    """Read the first ``most`` prompts of a file, of any format that conversations come in.

    A row holds messages, as a conversation does, or ``prompt`` (one user turn).

    Raises:
        EvaluateError: the file cannot be read or a row is no prompt; names file and line.
    """
    from dflash_offline.corpus.reading import decode_block, read_file

    prompts: list[Prompt] = []
    try:
        for block in read_file(path, 0):
            for line, row in decode_block(block):
                if row is not None:
                    prompts.append(_prompt(row, f"{path}, line {line}"))
                if len(prompts) == most:
                    return prompts
    except CorpusError as error:
        raise EvaluateError(str(error)) from None
    if not prompts:
        raise EvaluateError(f"{path}: holds no prompts")
    return prompts


def _prompt(row: Any, where: str) -> Prompt:
    from dflash_offline.corpus.schema import RowRejected, read_messages

    try:
        if isinstance(row, RowRejected):
            raise row
        if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row.get("messages") is None:
            row = {**row, "messages": [{"role": "user", "content": row["prompt"]}]}
        messages = read_messages(row)
    except RowRejected as error:
        raise EvaluateError(f"{where}: {error.reason}" + (f" ({error.detail})" if error.detail else "")) from None
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    prompt = Prompt(messages, where)
    if not prompt.num_turns:
        raise EvaluateError(f"{where}: no user message to answer")
    if any(m["role"] == "user" and not m["content"].strip() for m in prompt.messages):
        raise EvaluateError(f"{where}: the user message is empty")
    return prompt

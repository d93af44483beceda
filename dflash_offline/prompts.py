"""Prompt files of an evaluation: JSONL with ``messages``; each file is one data set.

Outside ``evaluate``, which loads torch: ``doctor``, ``plan`` and the start of the pipeline read them too.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.config import RunConfig
from dflash_offline.errors import EvaluateError


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
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    return name.removeprefix("eval-")


def read_prompts(path: Path, *, most: int) -> list[Prompt]:
    """Read the first ``most`` prompts of a JSONL file (gzip or not).

    A row holds ``messages`` (role and content), or ``prompt`` (one user turn).

    Raises:
        EvaluateError: the file cannot be read or a row is no prompt; names file and line.
    """
    prompts: list[Prompt] = []
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    prompts.append(_prompt(line, f"{path}, line {number}"))
                if len(prompts) == most:
                    break
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise EvaluateError(f"{path}: cannot be read ({error})") from None
    if not prompts:
        raise EvaluateError(f"{path}: holds no prompts")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line.strip())  # without its end: an error there would be placed on the next line
    except json.JSONDecodeError as error:
        raise EvaluateError(f"{where}: not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise EvaluateError(f"{where}: not valid JSON ({error})") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if messages is None and isinstance(row, dict) and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and "role" in m for m in messages
    ):
        raise EvaluateError(f"{where}: no messages with role and text content")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    prompt = Prompt([{"role": m["role"], "content": m["content"]} for m in messages], where)
    if not prompt.num_turns:
        raise EvaluateError(f"{where}: no user message to answer")
    if any(m["role"] == "user" and not m["content"].strip() for m in prompt.messages):
        raise EvaluateError(f"{where}: the user message is empty")
    return prompt

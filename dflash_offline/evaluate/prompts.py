"""Prompt files of an evaluation: JSONL with ``messages``; each file is one data set."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.corpus.template import with_fixed_date
from dflash_offline.errors import EvaluateError


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
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise EvaluateError(f"{path}: cannot be read ({error})") from None
    if not prompts:
        raise EvaluateError(f"{path}: holds no prompts")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
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
    return prompt


def encode(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any], *, where: str) -> list[int]:
    """Token ids of messages, ending where the assistant begins to speak. A date in the template is the corpus's own.

    Raises:
        EvaluateError: the tokenizer has no chat template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise EvaluateError(f"{where}: the target's tokenizer has no chat template; name one in [corpus] chat_template")
    options = {"chat_template": with_fixed_date(template), "add_generation_prompt": True, **chat_template_kwargs}
    try:
        encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except (TemplateError, ValueError, TypeError) as error:
        raise EvaluateError(f"{where}: the chat template refuses these messages ({error})") from None
    return list(encoded["input_ids"])

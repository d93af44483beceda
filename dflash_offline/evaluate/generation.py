"""Stream text from target and drafter, with what the drafter contributed marked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.prompts import encode


@dataclass(frozen=True)
class TextRun:
    """A piece of streamed text.

    Attributes:
        text: decoded; characters that need tokens of the next run appear with that run.
        drafted: the drafter proposed it and the target accepted; else the target's own token.
        step: number of the loop's step, 0 for the prefill.
    """

    text: str
    drafted: bool
    step: int


def generate(
    decoder: Decoder,
    tokenizer: Any,
    messages: list[dict[str, Any]] | str,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat_template_kwargs: dict[str, Any] | None = None,
    into: Response | None = None,
) -> Iterator[TextRun]:
    """Answer ``messages`` (or one user message), yielding runs as they are emitted.

    Args:
        temperature: 0 is greedy; else sampling by the exact rejection rule from ``seed``.
        into: filled with counts and times as the response grows.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    ids = encode(tokenizer, messages, chat_template_kwargs or {}, where="prompt")
    generator = torch.Generator(decoder.target.device).manual_seed(seed) if temperature > 0 else None
    text = _IncrementalText(tokenizer)
    emissions = decoder.stream(ids, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator, into=into)
    for step, emission in enumerate(emissions):
        drafted, own = emission.tokens[: emission.num_drafted], emission.tokens[emission.num_drafted :]
        for tokens, by_drafter in ((drafted, True), (own, False)):
            piece = text.add([token for token in tokens if token not in decoder.stop_ids])
            if piece:
                yield TextRun(piece, by_drafter, step)
    if rest := text.finish():
        yield TextRun(rest, False, step)


class _IncrementalText:
    """Decodes tokens as they come; holds back a character whose bytes are not all there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._tokens, self._shown = tokenizer, [], ""

    def add(self, tokens: list[int]) -> str:
        self._tokens.extend(tokens)
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if whole.endswith("\ufffd"):
            return ""
        return self._advance(whole)

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _advance(self, whole: str) -> str:
        piece, self._shown = whole[len(self._shown) :], whole
        return piece

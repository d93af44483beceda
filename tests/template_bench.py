"""A chat template with a tokenizer: our rows beside what transformers makes of the same messages."""

from typing import Any

import chat_templates as templates
import numpy as np
from conftest import CHATML
from transformers import PreTrainedTokenizerFast

from dflash_offline.corpus.masking import EncodedRow, encode_row, render_conversation
from dflash_offline.corpus.schema import parse_row
from dflash_offline.corpus.template import ChatTemplate, TemplateSource

SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
QUESTION, ANSWER = "What is 2 + 2?", "It is 4.\n\nReally."
# name: template, end marker, method
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>", "prefix"),
    "qwen2.5": (templates.QWEN25, "<|im_end|>", "prefix"),
    "llama3": (templates.LLAMA3, "<|eot_id|>", "prefix"),
    "gemma": (templates.GEMMA, "<end_of_turn>", "prefix"),
    "mistral": (templates.MISTRAL, "<|endoftext|>", "prefix"),
    "phi": (templates.PHI, "<|end|>", "prefix"),
    "generation": (templates.GENERATION, "<|im_end|>", "generation"),
    "generation without end": (templates.GENERATION_WITHOUT_END, "<|im_end|>", "generation"),
    "no generation prompt": (templates.NO_GENERATION_PROMPT, "<|im_end|>", "content"),
}


class Bench:
    """A template with a tokenizer: our rows, and what transformers makes of the same messages."""

    def __init__(self, tokenizer: Any, template: str, special: dict[str, str] = SPECIAL, **kwargs: Any) -> None:
        self.kwargs = kwargs
        self.ours = ChatTemplate(TemplateSource("test template", template, None, tokenizer.to_str(), {**special, **kwargs}, None))
        self.theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        self.theirs.chat_template = self.ours.template  # with the date fixed

    def rows(self, row: Any, *, supervise: str = "all", supervise_thinking: bool = True) -> list[EncodedRow]:
        rendered = render_conversation(self.ours, parse_row(row), supervise=supervise, supervise_thinking=supervise_thinking)
        return [encode_row(self.ours, one) for one in rendered]

    def ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self.theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **{**self.kwargs, **options})["input_ids"]

    def supervised(self, row: EncodedRow) -> list[str]:
        """Text of each run of supervised tokens."""
        borders = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]]).astype(np.int8)))
        return [self.ours.decode(row.input_ids[a:b]) for a, b in borders.reshape(-1, 2)]

    def is_what_a_server_sees(self, row: EncodedRow, messages: list[dict[str, Any]]) -> bool:
        """Whether the tokens before the last answer are the prompt that a server would give the target."""
        prompt = self.ids(messages[:-1], add_generation_prompt=True)
        borders = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8)) == 1)
        return row.input_ids[: len(prompt)].tolist() == prompt and int(borders[-1]) + 1 == len(prompt)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns

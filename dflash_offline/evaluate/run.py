"""Hold the conversations of every data set with the loop, and with the target alone, and sum up."""

from collections.abc import Callable
from typing import Any

import torch

from dflash_offline.errors import EvaluateError
from dflash_offline.evaluate.comparison import Comparison, compare
from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.prompts import Prompt, encode
from dflash_offline.evaluate.summary import summarise

Say = Callable[[str], None]


def hold(
    decoder: Decoder,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any],
    baseline: bool,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[list[Response], list[Response]]:
    """One conversation, asked turn by turn; each answer becomes history of the next turn.

    With ``baseline`` every turn is also answered by the target alone, on the same history.

    Returns:
        The loop's responses and the plain ones (empty without ``baseline``), one a turn.
    """
    responses, plain, given = [], [], 0
    history: list[dict[str, Any]] = []
    for end in prompt.turns():
        history.extend(prompt.messages[given:end])
        given = end
        ids = encode(tokenizer, history, chat_template_kwargs, where=prompt.where)
        response = decoder.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator)
        responses.append(response)
        if baseline:
            plain.append(decoder.generate_plain(ids, max_new_tokens=max_new_tokens))
        text = [token for token in response.tokens if token not in decoder.stop_ids]
        history.append({"role": "assistant", "content": tokenizer.decode(text, skip_special_tokens=True)})
    return responses, plain


def run_dataset(
    decoder: Decoder,
    tokenizer: Any,
    prompts: list[Prompt],
    *,
    dtype: torch.dtype,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any],
    baseline: bool,
    name: str = "",
    say: Say = print,
    on_prompt: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One data set, greedily -> its entry of ``results.json`` (see ``summarise``)."""
    held, alone = [], []
    comparisons: list[Comparison] = []
    for prompt in prompts:
        responses, plain = hold(
            decoder, tokenizer, prompt, max_new_tokens=max_new_tokens, chat_template_kwargs=chat_template_kwargs, baseline=baseline
        )
        held.append(responses)
        alone.append(plain)
        for turn, pair in enumerate(zip(responses, plain, strict=False), start=1):
            found = compare(*pair, dtype=dtype)
            comparisons.append(found)
            if found.outcome != "identical":
                kind = "near-tie" if found.outcome == "near_tie" else "DIFFERENT"
                say(
                    f"{name or 'prompt'}: {prompt.where}, turn {turn}: differs from the target's own output first at token {found.index}: "
                    f"{kind} (logits {found.gap:.3g} apart, a tie is up to {found.tolerance:.3g})"
                )
        on_prompt()
    return summarise(held, alone if baseline else None, comparisons, block_size=decoder.block_size)


def require_lossless(datasets: dict[str, dict[str, Any]]) -> None:
    """Fail when an output differed from the target's own beyond near-ties.

    Raises:
        EvaluateError: naming the data sets.
    """
    wrong = {name: result["different"] for name, result in datasets.items() if result["different"]}
    if wrong:
        listed = ", ".join(f"{count} of {name}" for name, count in wrong.items())
        raise EvaluateError(
            f"the loop's output is not the target's own greedy output: {listed} responses differ beyond near-ties; see the log for where"
        )

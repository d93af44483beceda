"""Hold the conversations of every data set with the loop, and with the target alone, and sum up."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dflash_offline.errors import EvaluateError
from dflash_offline.evaluate.batched import BatchedDecoder, Work, supports
from dflash_offline.evaluate.comparison import Comparison, compare
from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.prompts import encode
from dflash_offline.evaluate.summary import summarise
from dflash_offline.prompts import Prompt

Say = Callable[[str], None]


class Loop:
    """Answers a queue of prompts: several at once where the target allows it, else one after the other.

    Args:
        batch: prompts at once.
        temperature: 0 is greedy; else tokens are sampled from the target's distribution, one prompt at a time.
        seed: of the sampling.
    """

    def __init__(self, decoder: Decoder, *, batch: int, temperature: float = 0.0, seed: int = 0, say: Say = print) -> None:
        self.decoder, self.temperature = decoder, temperature
        self._generator = torch.Generator(decoder.target.device).manual_seed(seed)
        if batch > 1 and temperature > 0:
            say("Sampled answers are decoded one prompt at a time")
            batch = 1
        if batch > 1 and not supports(decoder.target.model):
            say("This target's prompts are decoded one at a time: not all its layers are full attention that takes a mask")
            batch = 1
        self.batch = batch
        self._batched = BatchedDecoder(decoder, batch, say=say) if batch > 1 else None

    def run(self, queue: deque[Work], *, max_new_tokens: int, plain: bool) -> Iterator[tuple[Any, Response]]:
        """Each response as it ends, with the name of its prompt; the queue may grow meanwhile.

        ``plain``: by the target alone, greedily.
        """
        if self._batched is not None:
            run = self._batched.run_plain if plain else self._batched.run
            yield from run(queue, max_new_tokens=max_new_tokens)
            return
        sampling = {"temperature": self.temperature, "generator": self._generator}
        generate = self.decoder.generate_plain if plain else partial(self.decoder.generate, **sampling)
        while queue:
            name, ids = queue.popleft()
            yield name, generate(ids, max_new_tokens=max_new_tokens)


class _Conversation:
    """A prompt being held: history so far, answers, and the token ids each turn was asked with."""

    def __init__(self, prompt: Prompt, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
        self.prompt, self.tokenizer, self.kwargs = prompt, tokenizer, chat_template_kwargs
        self.ends, self.given = list(prompt.turns()), 0
        self.history: list[dict[str, Any]] = []
        self.asked: list[list[int]] = []
        self.responses: list[Response] = []

    def ask(self) -> list[int] | None:
        """Token ids of the next turn; None after the last."""
        if len(self.asked) == len(self.ends):
            return None
        end = self.ends[len(self.asked)]
        self.history.extend(self.prompt.messages[self.given : end])
        self.given = end
        self.asked.append(encode(self.tokenizer, self.history, self.kwargs, where=self.prompt.where))
        return self.asked[-1]

    def answer(self, response: Response, stop_ids: frozenset[int]) -> None:
        """Take a response into the history."""
        self.responses.append(response)
        text = self.tokenizer.decode([token for token in response.tokens if token not in stop_ids], skip_special_tokens=True)
        self.history.append({"role": "assistant", "content": text})


def hold(
    loop: Loop,
    tokenizer: Any,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any],
    baseline: bool,
    on_prompt: Callable[[], None] = lambda: None,
) -> tuple[list[list[Response]], list[list[Response]], list[list[list[int]]]]:
    """Hold conversations, turn by turn; each answer becomes history of the next turn.

    With ``baseline`` every turn is also answered by the target alone, on the same history.

    Returns:
        The loop's responses, the plain ones (empty lists without ``baseline``) and the token ids that each was asked
        with, by prompt and turn.
    """
    conversations = [_Conversation(prompt, tokenizer, chat_template_kwargs) for prompt in prompts]
    queue: deque[Work] = deque((index, conversation.ask()) for index, conversation in enumerate(conversations))
    for index, response in loop.run(queue, max_new_tokens=max_new_tokens, plain=False):
        conversations[index].answer(response, loop.decoder.stop_ids)
        ids = conversations[index].ask()
        if ids is None:
            on_prompt()
        else:
            queue.append((index, ids))
    alone: list[list[Response]] = [[] for _ in prompts]
    if baseline:
        again: deque[Work] = deque(((i, turn), ids) for i, each in enumerate(conversations) for turn, ids in enumerate(each.asked))
        for (index, _), response in sorted(loop.run(again, max_new_tokens=max_new_tokens, plain=True), key=lambda found: found[0]):
            alone[index].append(response)
    return [each.responses for each in conversations], alone, [each.asked for each in conversations]


def run_dataset(
    loop: Loop,
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
    """One data set -> its entry of ``results.json`` (see ``summarise``). Sampled answers are not compared with the greedy ones."""
    options = {"max_new_tokens": max_new_tokens, "chat_template_kwargs": chat_template_kwargs, "baseline": baseline}
    held, alone, asked = hold(loop, tokenizer, prompts, on_prompt=on_prompt, **options)
    comparisons: list[Comparison] = []
    for prompt, responses, plain, turns in zip(prompts, held, alone, asked, strict=True) if loop.temperature == 0 else ():
        for turn, (ours, own, ids) in enumerate(zip(responses, plain, turns, strict=False), start=1):
            found = compare(ours, own, dtype=dtype, at_once=partial(loop.decoder.target.at_once, ids, own.tokens))
            comparisons.append(found)
            if found.outcome != "identical":
                kind = "near-tie" if found.outcome == "near_tie" else "DIFFERENT"
                say(
                    f"{name or 'prompt'}: {prompt.where}, turn {turn}: differs from the target's own output first at token {found.index}: "
                    f"{kind} (logits {found.gap:.3g} apart, a tie is up to {found.tolerance:.3g}{', measured' * found.measured})"
                )
    return summarise(held, alone if baseline else None, comparisons, block_size=loop.decoder.block_size) | {"batch": loop.batch}


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

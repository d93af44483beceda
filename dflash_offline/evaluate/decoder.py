"""Draft-and-verify: the drafter proposes a block, the target accepts a part of it and adds one token of its own.

Shapes: T tokens, K taps, H hidden, B block size, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dflash_offline.drafter import Drafter
from dflash_offline.errors import EvaluateError
from dflash_offline.evaluate.sampling import accept_greedy, accept_sampled, distribution, draw
from dflash_offline.evaluate.target_steps import SteppedTarget

TOP = 8  # best logits remembered for each token of the plain loop, to judge near-ties


@dataclass
class Emission:
    """Tokens that one step of the loop emits.

    Attributes:
        tokens: in order; the last one is the target's own unless a stop token ended the response before it.
        accepted: how many of the drafted ones the target accepted, 0 to B - 1; None for the prefill's token.
        num_drafted: leading ``tokens`` that the drafter proposed.
    """

    tokens: list[int]
    accepted: int | None
    num_drafted: int


@dataclass
class Response:
    """One generated answer.

    Attributes:
        tokens: all emitted tokens, a stop token included.
        accepted: drafted tokens accepted in each step.
        step_tokens: tokens emitted by the steps: all but the prefill's.
        prefill_s, draft_s, verify_s, total_s: seconds; ``total_s`` is without the prefill.
        best: for each token of the plain loop the target's ``TOP`` best logits, {token id: logit}.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    step_tokens: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    best: list[dict[int, float]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.accepted)

    def first(self, num_tokens: int) -> "Response":
        """What the response would be had it been limited to ``num_tokens``; without times."""
        kept, emitted = [], 1
        for accepted in self.accepted:
            if emitted >= num_tokens:
                break
            kept.append(accepted)
            emitted += accepted + 1
        tokens = self.tokens[:num_tokens]
        return Response(tokens=tokens, accepted=kept, step_tokens=len(tokens) - 1, best=self.best[:num_tokens])


class Decoder:
    """A target and its drafter, ready to generate.

    Args:
        target: the stepped target; its taps are the drafter's, in the drafter's order.
        drafter: in evaluation mode, on the target's device.
        embedding, head: the target's [V, H] tables in the drafter's dtype.
        stop_ids: tokens that end a response; they are emitted.
    """

    def __init__(
        self, target: SteppedTarget, drafter: Drafter, embedding: torch.Tensor, head: torch.Tensor, *, stop_ids: Sequence[int]
    ) -> None:
        if target.layer_ids != list(drafter.shape.target_layer_ids):
            raise EvaluateError(
                f"the target is tapped at layers {target.layer_ids}, the drafter reads {list(drafter.shape.target_layer_ids)}"
            )
        self.target, self.drafter, self.embedding, self.head = target, drafter, embedding, head
        self.stop_ids = frozenset(stop_ids)
        self.block_size = drafter.shape.block_size
        self._masks = torch.full((self.block_size - 1,), drafter.shape.mask_token_id, dtype=torch.long, device=embedding.device)

    def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Response:
        """Generate a whole response (see ``stream``)."""
        response = Response()
        for _ in self.stream(prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator, into=response):
            pass
        return response

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        into: Response | None = None,
    ) -> Iterator[Emission]:
        """Generate, one ``Emission`` a step.

        Args:
            temperature: 0 is greedy; else the exact rejection rule, drawn from ``generator`` (on the target's device).
            into: filled as the response grows.
        """
        response = into if into is not None else Response()
        clock = self._clock()
        begin = clock()
        first = self.target.prefill(prompt_ids)
        bonus = self._choose(first.logits[-1], temperature, generator)
        rows, start = first.hidden, len(prompt_ids)
        response.prefill_s = clock() - begin
        response.tokens.append(bonus)
        yield Emission([bonus], None, 0)
        cache = self.drafter.start_cache()
        while bonus not in self.stop_ids and len(response.tokens) < max_new_tokens:
            begin = clock()
            block, drafted_from = self._draft(rows, bonus, cache, start, temperature, generator)
            drafted_at = clock()
            step = self.target.step(block)
            if temperature > 0:
                accepted, bonus = accept_sampled(block[1:], drafted_from, distribution(step.logits, temperature), generator)
            else:
                accepted, bonus = accept_greedy(block[1:], step.logits)
            self.target.keep(accepted + 1)
            rows, start = step.hidden[: accepted + 1], start + accepted + 1
            end = clock()
            response.draft_s += drafted_at - begin
            response.verify_s += end - drafted_at
            response.total_s += end - begin
            tokens = self._until_stop([*block[1 : accepted + 1].tolist(), bonus])[: max_new_tokens - len(response.tokens)]
            response.tokens.extend(tokens)
            response.accepted.append(accepted)
            response.step_tokens += len(tokens)
            bonus = tokens[-1] if tokens[-1] in self.stop_ids else bonus
            yield Emission(tokens, accepted, min(accepted, len(tokens)))

    def generate_plain(self, prompt_ids: Sequence[int], *, max_new_tokens: int) -> Response:
        """The target alone, greedily, one token a step: the baseline and the reference output."""
        response = Response()
        clock = self._clock()
        begin = clock()
        logits = self.target.prefill(prompt_ids).logits[-1]
        token = int(logits.argmax())
        response.prefill_s = clock() - begin
        begin = clock()
        seen = [logits]
        response.tokens.append(token)
        while token not in self.stop_ids and len(response.tokens) < max_new_tokens:
            logits = self.target.step(torch.tensor([token], device=self.target.device)).logits[-1]
            self.target.keep(1)
            token = int(logits.argmax())
            seen.append(logits.topk(min(TOP, len(logits))))
            response.tokens.append(token)
        response.total_s = clock() - begin
        seen[0] = seen[0].topk(min(TOP, len(seen[0])))
        response.best = [dict(zip(top.indices.tolist(), top.values.float().tolist(), strict=True)) for top in seen]
        return response

    @torch.inference_mode()
    def _draft(
        self, rows: torch.Tensor, bonus: int, cache: object, start: int, temperature: float, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block [B] (bonus and drafted tokens) and, when sampling, the distributions [B-1, V] it was drawn from."""
        slots = torch.cat([self._masks.new_tensor([bonus]), self._masks])
        hidden = self.drafter.draft(rows.to(self.embedding.dtype), self.embedding[slots], cache, start)
        logits = hidden[1:] @ self.head.T
        drafted_from = distribution(logits, temperature) if temperature > 0 else None
        drafted = draw(drafted_from, generator) if drafted_from is not None else logits.argmax(-1)
        return torch.cat([slots[:1], drafted]), drafted_from

    def _choose(self, logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
        return int(draw(distribution(logits, temperature), generator)) if temperature > 0 else int(logits.argmax())

    def _until_stop(self, tokens: list[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in self.stop_ids:
                return tokens[: index + 1]
        return tokens

    def _clock(self) -> Callable[[], float]:
        if self.target.device.type != "cuda":
            return time.perf_counter

        def clock() -> float:
            torch.cuda.synchronize(self.target.device)
            return time.perf_counter()

        return clock

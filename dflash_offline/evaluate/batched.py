"""The draft-and-verify loop over several sequences at once; on a GPU each step is two recorded CUDA graphs.

A slot that becomes free takes the next prompt, so long answers do not hold up short ones. Greedy only.

Shapes: R slots, B block size, K taps, H hidden, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_offline.errors import EvaluateError
from dflash_offline.evaluate.decoder import TOP, Decoder, Response
from dflash_offline.evaluate.rows import RowsDrafter, RowsTarget, supports
from dflash_offline.graphs import record

ROUND = 128  # buffer lengths are multiples of this, so that few are ever made

__all__ = ["BatchedDecoder", "supports"]

Work = tuple[Hashable, list[int]]  # what names the prompt, and its token ids


@dataclass
class Slot:
    """One sequence in flight."""

    name: Hashable
    response: Response


class BatchedDecoder:
    """A ``Decoder`` for many prompts.

    Args:
        decoder: target and drafter.
        num_rows: sequences in flight at once.
        say: gets a line when steps cannot be recorded as CUDA graphs.

    Raises:
        EvaluateError: this target cannot be batched (see ``supports``).
    """

    def __init__(self, decoder: Decoder, num_rows: int = 8, *, say: Callable[[str], None] = print) -> None:
        if not supports(decoder.target.model):
            raise EvaluateError(
                "several prompts at once need a target with full attention in every layer, run with sdpa or eager; set [evaluate] batch = 1"
            )
        self.decoder, self.num_rows, self.say = decoder, num_rows, say
        self.device, self.block_size = decoder.target.device, decoder.block_size

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Response]:
        """Every prompt's response, in order."""
        return self._in_order(self.run(deque(enumerate(prompts)), max_new_tokens=max_new_tokens), len(prompts))

    def generate_plain(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Response]:
        """Every prompt's response by the target alone, in order."""
        return self._in_order(self.run_plain(deque(enumerate(prompts)), max_new_tokens=max_new_tokens), len(prompts))

    def _in_order(self, finished: Iterator[tuple[Hashable, Response]], count: int) -> list[Response]:
        responses = dict(finished)
        return [responses[index] for index in range(count)]

    def run(self, queue: deque[Work], *, max_new_tokens: int) -> Iterator[tuple[Hashable, Response]]:
        """Draft and verify every prompt of ``queue``; yields each response when it ends. The caller may append more meanwhile."""
        yield from self._run(queue, max_new_tokens=max_new_tokens, size=self.block_size)

    def run_plain(self, queue: deque[Work], *, max_new_tokens: int) -> Iterator[tuple[Hashable, Response]]:
        """The target alone, greedily, in the same batches."""
        yield from self._run(queue, max_new_tokens=max_new_tokens, size=1)

    def _run(self, queue: deque[Work], *, max_new_tokens: int, size: int) -> Iterator[tuple[Hashable, Response]]:
        slots: list[Slot | None] = [None] * self.num_rows
        state: _Steps | None = None
        while queue or any(slots):
            free = [row for row, slot in enumerate(slots) if slot is None]
            taken = [(row, queue.popleft()) for row in free[: len(queue)]]
            if taken:
                needed = max(len(ids) for _, (_, ids) in taken) + max_new_tokens + 2 * size
                if state is None or needed > state.length:
                    waiting = [] if state is None else [(row, slot) for row, slot in enumerate(slots) if slot is not None]
                    state = _Steps(self, length=-(-needed // ROUND) * ROUND, size=size, old=state, live=[row for row, _ in waiting])
                began = self._clock()
                first, best = state.admit([row for row, _ in taken], [ids for _, (_, ids) in taken])
                seconds = (self._clock() - began) / len(taken)
                for (row, (name, _)), token, top in zip(taken, first, best, strict=True):
                    slots[row] = Slot(name, Response(tokens=[token], prefill_s=seconds, best=[top] if size == 1 else []))
            live = [row for row, slot in enumerate(slots) if slot is not None]
            if going := [row for row in live if not self._ended(slots[row].response, max_new_tokens)]:
                self._step(state, [(row, slots[row].response) for row in going], max_new_tokens=max_new_tokens)
            for row in live:
                slot = slots[row]
                if self._ended(slot.response, max_new_tokens):
                    slots[row] = None
                    state.release(row)
                    yield slot.name, slot.response

    def _step(self, state: "_Steps", going: list[tuple[int, Response]], *, max_new_tokens: int) -> None:
        emitted, accepted, best, draft_s, verify_s = state.step(self._clock)
        for row, response in going:
            if state.size == 1:
                response.tokens.append(emitted[row][0])
                response.best.append(best[row])
            else:
                tokens = self.decoder._until_stop(emitted[row][: accepted[row] + 1])[: max_new_tokens - len(response.tokens)]
                response.tokens.extend(tokens)
                response.accepted.append(accepted[row])
                response.step_tokens += len(tokens)
            # a step serves all live sequences; each bears its share, so that sums over responses are wall time
            response.draft_s += draft_s / len(going)
            response.verify_s += verify_s / len(going)
            response.total_s += (draft_s + verify_s) / len(going)

    def _ended(self, response: Response, max_new_tokens: int) -> bool:
        return response.tokens[-1] in self.decoder.stop_ids or len(response.tokens) >= max_new_tokens

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Steps:
    """Buffers and state of all slots, and one step over them. ``size`` is the block: B, or 1 for the target alone."""

    def __init__(self, owner: BatchedDecoder, *, length: int, size: int, old: "_Steps | None", live: list[int]) -> None:
        decoder, self.size, self.length = owner.decoder, size, length
        self.decoder, device, num_rows = decoder, owner.device, owner.num_rows
        self.target = RowsTarget(decoder.target, num_rows=num_rows, length=length)
        self.drafter = RowsDrafter(decoder.drafter, num_rows=num_rows, length=length) if size > 1 else None
        taps = len(decoder.drafter.shape.target_layer_ids) * decoder.drafter.shape.hidden_size
        self.bonus = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.start = torch.zeros(num_rows, dtype=torch.long, device=device)  # position of the bonus token
        self.taps = torch.zeros(num_rows, size, taps, dtype=decoder.embedding.dtype, device=device)  # of the last step
        self.taps_at = torch.zeros(num_rows, dtype=torch.long, device=device)  # position of its first row
        self.block = torch.zeros(num_rows, size, dtype=torch.long, device=device)
        self.taken = torch.zeros(num_rows, dtype=torch.long, device=device)  # 1 where a slot holds a sequence, else 0
        self.offsets = torch.arange(size, device=device)
        if old is not None and live:
            self._take_over(old)
        self.draft, self.verify = _Recorded(self._draft, owner), _Recorded(self._verify, owner)

    def _take_over(self, old: "_Steps") -> None:
        for name in ("bonus", "start", "taps", "taps_at", "taken"):
            getattr(self, name).copy_(getattr(old, name))
        for layer, pair in old.target.cache.buffers.items():
            grown = tuple(buffer.new_zeros(buffer.shape[0], self.length, *buffer.shape[2:]) for buffer in pair)
            for new, buffer in zip(grown, pair, strict=True):
                new[:, : old.length] = buffer
            self.target.cache.buffers[layer] = grown
        if self.drafter is not None:
            for mine, others in ((self.drafter.keys, old.drafter.keys), (self.drafter.values, old.drafter.values)):
                for new, buffer in zip(mine, others, strict=True):
                    new[:, : old.length] = buffer[:, : old.length]

    @torch.inference_mode()
    def admit(self, rows: list[int], prompts: list[list[int]]) -> tuple[list[int], list[dict[int, float]]]:
        """Prefill prompts into free slots -> each one's first token and its best logits."""
        device = self.bonus.device
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        longest = int(lengths.max())
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=device)
        positions, at = torch.arange(longest, device=device).expand(len(rows), -1), torch.tensor(rows, device=device)
        last, which = torch.unique(lengths - 1, return_inverse=True)  # logits of these positions only
        step = self.target.forward(tokens, positions, at, logits_to_keep=last)
        logits = step.logits[torch.arange(len(rows), device=device), which]
        first = logits.argmax(-1)
        if self.drafter is not None:
            self.drafter.add_context(step.hidden, positions, at)
        self.bonus[at], self.start[at], self.taps_at[at] = first, lengths, lengths
        self.taps[at], self.taken[at] = 0, 1
        return first.tolist(), _best(logits)

    def release(self, row: int) -> None:
        """A free slot goes on computing, always at the beginning of its row, where it disturbs nobody and leaves no buffer."""
        for tensor in (self.bonus, self.start, self.taps_at, self.taken):
            tensor[row] = 0

    @torch.inference_mode()
    def step(self, clock: Callable[[], float]) -> tuple[list[list[int]], list[int], list[dict[int, float]], float, float]:
        """One step of every slot -> emitted tokens (drafted ones, then the target's), accepted counts, best logits, seconds."""
        began = clock()
        if self.drafter is not None:
            self.draft()
        else:
            self.block[:, 0] = self.bonus
        drafted_at = clock()
        self.verify()
        own, accepted = self.own, self.accepted
        bonus = own.gather(1, accepted[:, None])
        emitted = torch.where(self.offsets < accepted[:, None], self.block.roll(-1, 1), bonus).tolist()
        best = _best(self.logits[:, 0]) if self.size == 1 else []
        self.taps.copy_(self.hidden)
        self.taps_at.copy_(self.start)
        self.bonus.copy_(bonus[:, 0])
        self.start.add_((accepted + 1) * self.taken)
        counts = accepted.tolist()
        return emitted, counts, best, drafted_at - began, clock() - drafted_at

    def _draft(self) -> None:
        self.drafter.add_context(self.taps, self.taps_at[:, None] + self.offsets)
        slots = torch.cat([self.bonus[:, None], self.decoder._masks.expand(len(self.bonus), -1)], 1)
        hidden = self.drafter.draft(self.decoder.embedding[slots], self.start)
        self.block[:, :1] = self.bonus[:, None]
        self.block[:, 1:] = (hidden[:, 1:] @ self.decoder.head.T).argmax(-1)

    def _verify(self) -> None:
        step = self.target.forward(self.block, self.start[:, None] + self.offsets)
        self.own = step.logits.argmax(-1)  # [R, B]
        self.accepted = leading(self.block, self.own)
        self.hidden = step.hidden
        self.logits = step.logits


def leading(block: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Drafted tokens that are accepted, [R]: the leading ones of blocks [R, B] that are the target's own choice [R, B]."""
    return (block[:, 1:] == own[:, :-1]).long().cumprod(1).sum(1)


def _best(logits: torch.Tensor) -> list[dict[int, float]]:
    top = logits.topk(min(TOP, logits.shape[-1]))
    return [dict(zip(ids, values, strict=True)) for ids, values in zip(top.indices.tolist(), top.values.float().tolist(), strict=True)]


class _Recorded:
    """A function on tensors at fixed places: on a GPU recorded as a CUDA graph at its first call, then replayed."""

    def __init__(self, function: Callable[[], None], owner: BatchedDecoder) -> None:
        self.function, self.owner = function, owner
        self.graph: torch.cuda.CUDAGraph | None = None
        self.plain = owner.device.type != "cuda"

    def __call__(self) -> None:
        if self.plain:
            self.function()
            return
        if self.graph is None:  # the function writes the same values to the same places, so running it more often does no harm
            self.graph = record(self.function, say=self.owner.say)
        if self.graph is None:
            self.plain = True
            self.function()
        else:
            self.graph.replay()

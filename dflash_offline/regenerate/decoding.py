"""Hundreds of conversations answered at once by a model with buffers of fixed shape.

A step takes one token of every row through the model and chooses the next. It is recorded once as a CUDA graph; what a
row is at (token, position, whether it goes on) lives on the device, so many steps are replayed without the host
looking: ``launch`` queues them together with the copy of what came out, ``collect`` waits for that copy. Between the two
the host works on earlier answers and brings prompts into free rows, behind the steps that are queued.

A prompt enters without its last token: that one is the first that the row's steps take, so the first answer token is
chosen like any other.

Shapes: R rows, S steps of a launch, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash_offline.graphs import record
from dflash_offline.regenerate.drawing import next_tokens
from dflash_offline.regenerate.row_attention import NAME, RowBuffers, set_attention

PREFILL_TOKENS = 1 << 15  # of prompts that enter in one forward, padding included
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the self-check; wrong attention gives 0.3 and more, bf16's rounding 0.03


@dataclass(frozen=True)
class Drawing:
    """How a token is chosen, see ``drawing.next_tokens``."""

    temperature: float = 0.0
    top_p: float = 1.0


class RowDecoder:
    """R rows that are answered together.

    Args:
        model: with its head, in evaluation mode, on its device; it attends by ``row_attention`` from now on.
        length: of the buffers: the longest prompt and its answer must fit.
        steps: of one launch.
        stop_ids: tokens that end an answer.
        say: gets a line when steps cannot be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_rows: int,
        length: int,
        steps: int,
        stop_ids: Sequence[int],
        drawing: Drawing,
        say: Callable[[str], None] = print,
    ) -> None:
        set_attention(model, NAME)
        self.model, self.num_rows, self.length, self.steps, self.drawing, self.say = model, num_rows, length, steps, drawing, say
        device = next(model.parameters()).device
        self.device, self.cache, self._cache_name = device, RowBuffers(num_rows, length), cache_name(model)
        self.token, self.position, self.last, self.key = (torch.zeros(num_rows, dtype=torch.long, device=device) for _ in range(4))
        self.active = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.step_number = torch.zeros(1, dtype=torch.long, device=device)
        self.written = torch.full((steps, num_rows), -1, dtype=torch.int32, device=device)
        self.stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)
        self._on_gpu = device.type == "cuda"
        options: dict[str, Any] = {"pin_memory": True} if self._on_gpu else {}
        self._host_written = torch.empty((steps, num_rows), dtype=torch.int32, **options)
        self._host_active = torch.empty(num_rows, dtype=torch.bool, **options)
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recordable = self._on_gpu

    @torch.inference_mode()
    def admit(self, rows: list[int], prompts: list[list[int]], *, most_tokens: list[int], keys: list[int]) -> None:
        """Bring prompts into free rows.

        Args:
            rows: which ones; no two alike.
            prompts: token ids, at least one each.
            most_tokens: of each answer; prompt and answer must fit the buffers.
            keys: int64 that draws are made from, see ``drawing.uniforms``.
        """
        begin = 0
        while begin < len(rows):
            end, longest = begin, 0
            while end < len(rows):
                longest = max(longest, len(prompts[end]) - 1)
                if end > begin and (end + 1 - begin) * longest > PREFILL_TOKENS:
                    break
                end += 1
            self._prefill(rows[begin:end], prompts[begin:end])
            begin = end
        lengths = [len(prompt) for prompt in prompts]
        lasts = [length - 1 + most for length, most in zip(lengths, most_tokens, strict=True)]
        assert max(lasts) < self.length and min(most_tokens) > 0, "prompt and answer do not fit the buffers"
        table = torch.tensor([rows, [prompt[-1] for prompt in prompts], [length - 1 for length in lengths], lasts, keys])
        at, token, position, last, key = self._to_device(table)
        self.token[at], self.position[at], self.last[at], self.key[at] = token, position, last, key
        self.active[at] = True

    def _prefill(self, rows: list[int], prompts: list[list[int]]) -> None:
        """Keys and values of all tokens but the last. What pads a shorter prompt lies behind its end and is overwritten."""
        longest = max(len(prompt) for prompt in prompts) - 1
        if longest < 1:
            return
        table = np.zeros((len(rows), longest), dtype=np.int64)
        for line, prompt in zip(table, prompts, strict=True):
            line[: len(prompt) - 1] = prompt[:-1]
        tokens = self._to_device(torch.from_numpy(table))
        self.cache.enter(self._to_device(torch.tensor(rows)))
        self._forward(tokens, torch.arange(longest, device=self.device).expand(len(rows), -1), tokens.new_empty((0, 1, 1, 1)))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that is queued behind the steps, without waiting for them."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._on_gpu else tensor

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of the last of tokens [rows, Q] at positions [rows, Q]."""
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=lengths,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self.cache},
        )
        return output.logits[:, -1]

    @torch.inference_mode()
    def launch(self) -> None:
        """Queue the next S steps of every row, and the copy of what they write."""
        if self._recordable and self._graph is None:
            self._record()
        self.step_number.zero_()
        for _ in range(self.steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
        self._host_written.copy_(self.written, non_blocking=True)
        self._host_active.copy_(self.active, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def collect(self) -> tuple[np.ndarray, np.ndarray]:
        """What the last launch gave: tokens int32 [S, R], -1 after a row's end; and bool [R], which rows go on."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host_written.numpy(), self._host_active.numpy()

    def _step(self) -> None:
        self.cache.advance(self.position)
        logits = self._forward(self.token[:, None], self.position[:, None], (self.position + 1)[:, None, None, None])
        chosen = next_tokens(
            logits, temperature=self.drawing.temperature, top_p=self.drawing.top_p, keys=self.key, positions=self.position + 1
        )
        going = self.active
        row_out = torch.where(going, chosen, -1).to(torch.int32)
        self.written.scatter_(0, self.step_number.expand(1, self.num_rows), row_out[None])
        self.step_number.add_(1)
        self.token.copy_(torch.where(going, chosen, self.token))
        stays = going & (chosen[:, None] != self.stops).all(1) & (self.position + 1 < self.last)
        # a row that has ended goes on computing at the beginning of its buffer, where it is short and disturbs nobody
        self.position.copy_(torch.where(stays, self.position + 1, 0))
        self.active.copy_(stays)

    def _record(self) -> None:
        """Record a step as a CUDA graph. Running it to warm up changes the rows' state, which is put back."""
        state = (self.token, self.position, self.active, self.step_number, self.written)
        kept = [tensor.clone() for tensor in state]

        def warm_up() -> None:
            self.step_number.zero_()
            self._step()

        self._graph = record(self._step, say=self.say, warm_up=warm_up)
        self._recordable = self._graph is not None
        for tensor, old in zip(state, kept, strict=True):
            tensor.copy_(old)


def cache_name(model: nn.Module) -> str:
    """The name of the model's argument for its cache, which was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def check_rows(model: nn.Module, prompts: Sequence[list[int]], *, attention: str) -> tuple[float, int]:
    """How far the rows' logits are from those of the model's own forward: the root mean square of the worst position's
    differences, in units of its logits' standard deviation. And the bytes of one token's keys and values.

    A few tokens of each prompt are taken through a ``RowDecoder`` step by step and compared. The model attends by its own
    function (``attention``) afterwards.
    """
    rows, taught = len(prompts), 3
    prompts = [prompt if len(prompt) > taught else prompt + [prompt[-1]] * taught for prompt in prompts]
    expected = []
    set_attention(model, attention)
    for prompt in prompts:
        ids = torch.tensor([prompt], device=next(model.parameters()).device)
        expected.append(model(input_ids=ids, use_cache=False, logits_to_keep=taught).logits[0].float())
    length = max(map(len, prompts)) + 8
    decoder = RowDecoder(model, num_rows=rows + 1, length=length, steps=1, stop_ids=[-1], drawing=Drawing(), say=lambda line: None)
    try:
        decoder.admit(
            list(range(rows)),
            [prompt[: 1 - taught] for prompt in prompts],
            most_tokens=[taught + 1] * rows,
            keys=[0] * rows,
        )
        worst = 0.0
        for step in range(taught):
            decoder.cache.advance(decoder.position)
            lengths = (decoder.position + 1)[:, None, None, None]
            logits = decoder._forward(decoder.token[:, None], decoder.position[:, None], lengths)[:rows].float()
            for row, prompt in enumerate(prompts):
                own = expected[row][step]
                worst = max(worst, float((logits[row] - own).pow(2).mean().sqrt() / own.std().clamp_min(1e-6)))
                if step + 1 < taught:
                    decoder.token[row] = prompt[len(prompt) - taught + step + 1]
            decoder.position[:rows] += 1
    finally:
        set_attention(model, attention)
    buffers = [buffer for pair in decoder.cache.buffers.values() for buffer in pair]
    return worst, sum(buffer.nbytes for buffer in buffers) // (decoder.num_rows * decoder.length)

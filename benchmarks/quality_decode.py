"""Acceptance of drafters of one target: every prompt set, then ``tau_replay`` beside the loop. For ``quality.py`` alone.

The target is loaded once; the drafters take turns in it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_offline.config import RunConfig
from dflash_offline.drafter import DrafterShape
from dflash_offline.evaluate.comparison import Comparison, compare
from dflash_offline.evaluate.decoder import Decoder, Response
from dflash_offline.evaluate.heldout import tau_replay
from dflash_offline.evaluate.loading import make_drafter
from dflash_offline.evaluate.prompts import encode
from dflash_offline.evaluate.run import Loop, hold
from dflash_offline.evaluate.stage import heldout_rows
from dflash_offline.evaluate.summary import summarise
from dflash_offline.evaluate.target_steps import SteppedTarget
from dflash_offline.prompts import Prompt, dataset_name, read_prompts
from dflash_offline.target import facts, load_embedding_and_head, load_target, load_tokenizer

RESAMPLES = 2000


@dataclass
class Judge:
    """A target that drafters are decoded with.

    Args:
        folder: of the target.
        layer_ids: taps, the same of all drafters.
        prompts: folder of ``eval-*.jsonl``.
        most: prompts of a set; new_tokens: of an answer; batch: answers in flight.
    """

    folder: Path
    layer_ids: list[int]
    prompts: Path
    device: torch.device
    dtype: torch.dtype
    most: int
    new_tokens: int
    batch: int
    attention: str = "sdpa"
    _plain: dict[str, list[Response]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = load_target(
            self.folder, dtype=self.dtype, device=self.device, attention=self.attention, layer_ids=self.layer_ids, keep_head=True
        )
        self.target = SteppedTarget(target.model, target.layers, self.layer_ids)
        self.embedding, self.head = load_embedding_and_head(self.folder, dtype=self.dtype, device=self.device)
        self.tokenizer = load_tokenizer(self.folder)
        self.stop_ids = sorted({*facts(self.folder).eos_token_ids, int(self.tokenizer.eos_token_id)})
        paths = sorted(self.prompts.glob("eval-*.jsonl"))
        self.sets = {dataset_name(path): read_prompts(path, most=self.most) for path in paths}

    def loop(self, shape: DrafterShape, tensors: dict[str, torch.Tensor]) -> Loop:
        drafter = make_drafter(shape, tensors, device=self.device, dtype=self.dtype)
        return Loop(Decoder(self.target, drafter, self.embedding, self.head, stop_ids=self.stop_ids), batch=self.batch)

    def alone(self, name: str, loop: Loop) -> list[Response]:
        """The target's own answers to the first turns of a set; made once."""
        if name not in self._plain:
            found: dict[int, Response] = {}
            work = ((index, self._first(prompt)) for index, prompt in enumerate(self.sets[name]))
            for index, response in loop.run(deque(work), max_new_tokens=self.new_tokens, plain=True):
                found[index] = response
            self._plain[name] = [found[index] for index in range(len(found))]
        return self._plain[name]

    def _first(self, prompt: Prompt) -> list[int]:
        return encode(self.tokenizer, prompt.messages[: next(prompt.turns())], {}, where=prompt.where)

    def accept(self, shape: DrafterShape, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Decode every set with a drafter.

        Returns:
            By set: ``acceptance_length``, ``interval``, ``prompts``, ``identical``, ``near_ties``, ``different`` (of
            first turns: later ones follow the loop's own history), ``tokens_steps`` (totals of each prompt, in order).
        """
        loop, result = self.loop(shape, tensors), {}
        names = ("acceptance_length", "interval", "prompts", "identical", "near_ties", "different")
        result = {name: {} for name in (*names, "tokens_steps", "decode_s")}
        for name, prompts in self.sets.items():
            began = time.perf_counter()
            held, _, asked = hold(loop, self.tokenizer, prompts, max_new_tokens=self.new_tokens, chat_template_kwargs={}, baseline=False)
            seconds = time.perf_counter() - began
            compared: list[Comparison] = [
                compare(turns[0], plain, dtype=self.dtype, at_once=partial(self.target.at_once, ids[0], plain.tokens))
                for turns, plain, ids in zip(held, self.alone(name, loop), asked, strict=True)
            ]
            found = summarise(held, None, compared, block_size=shape.block_size)
            for each in names:
                result[each][name] = found[each]
            totals = ((sum(r.step_tokens for r in turns), sum(r.steps for r in turns)) for turns in held)
            result["tokens_steps"][name] = " ".join(f"{tokens}/{steps}" for tokens, steps in totals)
            result["decode_s"][name] = round(seconds, 1)
            print(f"  {name}: {found['acceptance_length']:.3f} {rounded(found['interval'])}, {seconds:.1f} s", flush=True)
        result["mean_acceptance_length"] = float(np.mean(list(result["acceptance_length"].values())))
        return result

    def replayed(self, config: RunConfig, shape: DrafterShape, tensors: dict[str, torch.Tensor], *, new_tokens: int) -> dict[str, Any]:
        """``simulated_tau`` (tau_replay) and ``real_tau`` on the held-out answers that the target writes again."""
        rows = heldout_rows(config, shape)
        found = tau_replay(self.loop(shape, tensors), rows, loop_rows=len(rows), max_new_tokens=new_tokens)
        pair = found["loop"] or {}
        print(f"  tau_replay: {pair}", flush=True)
        return {
            "tau_replay_all": found["tau"],
            "simulated_tau": pair.get("replay"),
            "real_tau": pair.get("loop"),
            "tau_difference": pair.get("difference"),
            "tau_rows": {name: pair.get(name) for name in ("rows", "reproduced", "common")},
        }


def rounded(values: list[float] | None) -> list[float] | None:
    return values and [round(value, 3) for value in values]


def ratio(ours: dict[str, str], theirs: dict[str, str], sets: list[str]) -> dict[str, Any]:
    """Mean acceptance length over ``sets``, ours over theirs, with the 95 % interval when prompts are drawn anew, in pairs.

    Args:
        ours, theirs: ``tokens_steps`` of two drafters on the same prompts.
    """
    random = np.random.default_rng(0)

    def lengths(of: dict[str, str], name: str, drawn: np.ndarray) -> np.ndarray:
        totals = np.array([[float(number) for number in each.split("/")] for each in of[name].split()])[drawn].sum(1)
        return totals[..., 0] / totals[..., 1]

    means = np.zeros((2, RESAMPLES + 1))  # the first one is the prompts as they are
    for name in sets:
        count = len(ours[name].split())
        drawn = np.concatenate([np.arange(count)[None], random.integers(0, count, (RESAMPLES, count))])
        means += np.stack([lengths(of, name, drawn) for of in (ours, theirs)]) / len(sets)
    ratios = means[0] / means[1]
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    return {"ratio": float(ratios[0]), "interval": [float(low), float(high)]}

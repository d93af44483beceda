"""What counts as the target's own output in bfloat16: differences that rounding makes pass, those of a wrong loop do not."""

from collections import deque
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tiny_drafters import overfit, own_text, prompt_ids, tensors_of, with_noise

from dflash_offline.evaluate import BatchedDecoder, Decoder, Response, compare, load_decoder
from dflash_offline.evaluate.comparison import MOST_STEPS, bfloat16_step, measured_noise


def never() -> NoReturn:
    raise AssertionError("not to be asked")


def test_noise_is_measured_where_two_steps_do_not_do() -> None:
    plain = Response(tokens=[1, 2], best=[{1: 8.0, 3: 4.0}, {2: 8.0, 4: 7.75}])
    loop = Response(tokens=[1, 4])
    assert bfloat16_step(8.0) == 0.0625  # so a gap of 0.25 is four steps

    def at_once(moved: float) -> torch.Tensor:
        """Token 0's gap moved by ``moved``; a shift of all logits alike is no noise."""
        logits = torch.full((2, 6), -9.0)
        logits[0, 1], logits[0, 3], logits[1, 2], logits[1, 4] = 5.0 + moved, 1.0, 8.0, 7.75
        return logits

    assert measured_noise(plain, at_once(0.5)) == 0.5 == measured_noise(plain, at_once(-0.5))
    quiet, noisy = (compare(loop, plain, dtype=torch.bfloat16, at_once=partial(at_once, moved)) for moved in (0.125, 0.5))
    assert (quiet.outcome, quiet.tolerance, quiet.gap) == ("different", 0.125, 0.25)
    assert (noisy.outcome, noisy.tolerance, noisy.index) == ("near_tie", 0.5, 1) and noisy.measured
    plain.best[1][4] = 6.5
    broken = compare(loop, plain, dtype=torch.bfloat16, at_once=partial(at_once, 100.0))
    assert (broken.outcome, broken.tolerance) == ("different", MOST_STEPS * 0.0625), "what moves further is no rounding"

    unknown = compare(Response(tokens=[1, 5]), plain, dtype=torch.bfloat16, at_once=partial(at_once, 0.5))
    assert (unknown.outcome, unknown.gap) == ("different", 17.0), "not among the best: its own logit is looked up"
    plain.best[1][4] = 7.9
    assert compare(loop, plain, dtype=torch.bfloat16, at_once=never).outcome == "near_tie", "within two steps"
    assert compare(loop, plain, dtype=torch.float32, at_once=never).outcome == "different", "float32 has no such noise"


def test_the_text_at_once_is_the_text_token_by_token(tiny_target: Path) -> None:
    prompt, _ = own_text(tiny_target)
    decoder = bfloat16(tiny_target, torch.float32)
    plain = decoder.generate_plain(prompt, max_new_tokens=30)
    logits = decoder.target.at_once(prompt, plain.tokens)
    assert logits.argmax(-1).tolist() == plain.tokens and measured_noise(plain, logits) < 1e-4


def bfloat16(tiny_target: Path, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    drafter = with_noise(overfit(tiny_target))
    return load_decoder(tiny_target, drafter.shape, tensors_of(drafter), device="cpu", dtype=dtype)


def test_bfloat16_of_random_weights_passes_and_a_wrong_loop_does_not(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are the worst case: their logits lie closer together than any trained target's."""
    decoder = bfloat16(tiny_target)
    prompts = [prompt_ids(seed, 12 + seed) for seed in range(24)]
    together = BatchedDecoder(decoder, 8)
    plain = together.generate_plain(prompts, max_new_tokens=48)

    def outcomes(responses: list[Response]) -> list[str]:
        noise = [partial(decoder.target.at_once, ids, own.tokens) for ids, own in zip(prompts, plain, strict=True)]
        return [
            compare(ours, own, dtype=torch.bfloat16, at_once=each).outcome for ours, own, each in zip(responses, plain, noise, strict=True)
        ]

    found = outcomes(together.generate(prompts, max_new_tokens=48))
    assert found.count("different") == 0 and "identical" in found

    def one_too_many(block: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return ((block[:, 1:] == own[:, :-1]).long().cumprod(1).sum(1) + 1).clamp(max=block.shape[1] - 1)

    from dflash_offline.evaluate import batched

    monkeypatch.setattr(batched, "leading", one_too_many)
    wrong = outcomes([response for _, response in sorted(together.run(deque(enumerate(prompts)), max_new_tokens=48))])
    assert wrong.count("different") > len(prompts) // 2

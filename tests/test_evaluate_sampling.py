"""Sampling keeps the target's distribution exactly; streamed text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_drafters import make_decoder, overfit, own_text, stored_conversation

from dflash_offline.drafter import Drafter
from dflash_offline.evaluate import Response, generate


@pytest.fixture(scope="module")
def greedy_text(tiny_target: Path) -> tuple[list[int], list[int]]:
    return own_text(tiny_target)


@pytest.fixture(scope="module")
def stored_row(tiny_target: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return stored_conversation(tiny_target)


@pytest.fixture(scope="module")
def overfitted(tiny_target: Path) -> Drafter:
    return overfit(tiny_target)


def test_streamed_text_marks_what_the_drafter_said(
    tiny_target: Path, overfitted: Drafter, greedy_text: tuple[list[int], list[int]]
) -> None:
    from dflash_offline.target import load_tokenizer

    tokenizer = load_tokenizer(tiny_target)
    decoder = make_decoder(tiny_target, overfitted)
    into = Response()
    runs = list(generate(decoder, tokenizer, "Tell me more.", max_new_tokens=24, into=into))
    assert "".join(run.text for run in runs) == tokenizer.decode([t for t in into.tokens if t != 2], skip_special_tokens=True)
    assert not runs[0].drafted and runs[0].step == 0
    assert {run.step for run in runs if run.drafted} <= {i + 1 for i, accepted in enumerate(into.accepted) if accepted}
    prompt, text = greedy_text
    emissions = list(decoder.stream(prompt, max_new_tokens=40))
    assert [token for emission in emissions for token in emission.tokens] == text[:40]
    assert all(emission.num_drafted <= emission.accepted for emission in emissions[1:])
    again = [list(generate(decoder, tokenizer, "x", max_new_tokens=12, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    keep = expected > 5
    return float((((counts - expected) ** 2) / expected)[keep].sum() / (keep.sum() - 1))


def sampled_counts(accept: Callable[..., tuple[int, int]], drafter: torch.Tensor, target: torch.Tensor, runs: int) -> torch.Tensor:
    """How often each pair of first two emitted tokens comes out, over many steps of one block."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.shape[-1]
    counts = torch.zeros(vocabulary, vocabulary)
    for _ in range(runs):
        first, second = (int(torch.multinomial(drafter[i], 1, generator=generator)) for i in range(2))
        accepted, own = accept(torch.tensor([first, second]), drafter, target, generator)
        emitted = [first, second][:accepted] + [own]
        if len(emitted) == 1:  # the next step's first token is the target's, from the same row
            emitted.append(int(torch.multinomial(target[1], 1, generator=generator)))
        counts[emitted[0], emitted[1]] += 1
    return counts


def test_sampled_acceptance_has_exactly_the_targets_distribution() -> None:
    """Chi-square against plain sampling, tiny vocabulary; a rule without the remainder max(p - q, 0) fails it."""
    from dflash_offline.evaluate.sampling import accept_sampled

    generator = torch.Generator().manual_seed(5)
    drafter, target = (torch.softmax(1.5 * torch.randn(n, 5, generator=generator), -1) for n in (2, 3))
    joint = target[0][:, None] * target[1][None, :]  # rows do not depend on the tokens before in this toy target
    assert chi_square(sampled_counts(accept_sampled, drafter, target, 5_000).flatten(), joint.flatten()) < 1.8

    def careless(drafted: torch.Tensor, q: torch.Tensor, p: torch.Tensor, generator: torch.Generator) -> tuple[int, int]:
        accepted, _ = accept_sampled(drafted, q, p, generator)
        return accepted, int(torch.multinomial(p[accepted], 1, generator=generator))

    assert chi_square(sampled_counts(careless, drafter, target, 5_000).flatten(), joint.flatten()) > 4


def test_sampling_from_the_loop_is_sampling_from_the_target(
    tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's first token at a temperature, against the target's own probabilities."""
    prompt, text = greedy_text
    decoder = make_decoder(tiny_target, overfitted)
    monkeypatch.setattr(decoder, "_choose", lambda *_: text[0])  # fix the prefill's token, to see the step's first one alone
    temperature = 2.0
    wanted = torch.softmax(decoder.target.prefill(prompt + text[:1]).logits[-1] / temperature, -1)
    best = wanted.topk(10).indices.tolist()
    expected = torch.cat([wanted[best], 1 - wanted[best].sum()[None]])
    generator = torch.Generator().manual_seed(1)
    counts, accepted = torch.zeros(11), 0
    for _ in range(300):
        response = decoder.generate(prompt, max_new_tokens=2, temperature=temperature, generator=generator)
        counts[best.index(response.tokens[1]) if response.tokens[1] in best else 10] += 1
        accepted += response.accepted[0] > 0
    assert 20 < accepted < 280, "both branches of the rule must be taken"
    assert chi_square(counts, expected) < 2.2, (counts, expected * 300)

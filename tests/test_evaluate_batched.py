"""Many prompts at once must give what each gives alone: same tokens, same accepted runs."""

from collections import deque
from pathlib import Path

import pytest
import torch
from tiny_drafters import make_decoder, overfit, own_text, prompt_ids, tensors_of, tiny_shape, with_noise

from dflash_offline.drafter import Drafter
from dflash_offline.evaluate import load_decoder
from dflash_offline.evaluate.batched import BatchedDecoder, _Steps, supports
from dflash_offline.evaluate.comparison import compare


@pytest.fixture(scope="module")
def greedy_text(tiny_target: Path) -> tuple[list[int], list[int]]:
    return own_text(tiny_target)


@pytest.fixture(scope="module")
def overfitted(tiny_target: Path) -> Drafter:
    return overfit(tiny_target)


def test_prompts_of_every_length_decode_together_as_they_do_alone(
    tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter
) -> None:
    prompt, text = greedy_text
    decoder = make_decoder(tiny_target, with_noise(overfitted))
    # the known conversation, itself cut at several places (long accepted runs), and unknown prompts (none)
    prompts = [prompt, prompt + text[:11], prompt_ids(1, 3), prompt_ids(2, 33), prompt + text[:60]]
    together = BatchedDecoder(decoder)
    alone = [decoder.generate(ids, max_new_tokens=40) for ids in prompts]
    lengths = {accepted for response in alone for accepted in response.accepted}
    assert len(lengths) >= 3, f"the case must hold runs of several lengths, not {lengths}"
    for one, many in zip(alone, together.generate(prompts, max_new_tokens=40), strict=True):
        assert (many.tokens, many.accepted, many.step_tokens) == (one.tokens, one.accepted, one.step_tokens)


def test_the_target_alone_and_early_stops(tiny_target: Path, overfitted: Drafter) -> None:
    decoder = make_decoder(tiny_target, overfitted)
    prompts = [prompt_ids(seed, 5 + 4 * seed) for seed in range(5)]
    plain = [decoder.generate_plain(ids, max_new_tokens=30) for ids in prompts]
    stop = plain[0].tokens[12]  # makes one response end early
    decoder.stop_ids = frozenset({stop})
    plain = [decoder.generate_plain(ids, max_new_tokens=30) for ids in prompts]
    assert len({len(response.tokens) for response in plain}) > 1, "responses must end at different places"
    together = BatchedDecoder(decoder)
    loop, alone = together.generate(prompts, max_new_tokens=30), together.generate_plain(prompts, max_new_tokens=30)
    for expected, ours, batched in zip(plain, loop, alone, strict=True):
        assert batched.tokens == expected.tokens and len(batched.best) == len(expected.best)
        assert compare(ours, batched, dtype=torch.float32).outcome == "identical"


def test_only_full_attention_is_supported(tiny_target: Path, overfitted: Drafter) -> None:
    model = make_decoder(tiny_target, overfitted).target.model
    assert supports(model)
    model.config.sliding_window = 16
    assert not supports(model)


def test_slots_are_refilled_and_buffers_grow(tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter) -> None:
    """Three slots, nine prompts of 3 to 250 tokens, one of them added while others run; sliding drafter layers."""
    prompt, text = greedy_text
    noisy = with_noise(overfitted)
    sliding = Drafter(tiny_shape(layer_windows=(None, 7)))
    sliding.load_state_dict(noisy.state_dict())
    for drafter in (noisy, sliding):
        decoder = make_decoder(tiny_target, drafter)
        prompts = [prompt_ids(seed, 3 + 30 * seed) for seed in range(8)] + [prompt + text[:30]]
        alone = [decoder.generate(ids, max_new_tokens=20 + len(ids) % 3) for ids in prompts]
        queue, found = deque(enumerate(prompts[:-1])), {}
        for name, response in BatchedDecoder(decoder, 3).run(queue, max_new_tokens=22):
            if not found:
                queue.append((8, prompts[8]))
            found[name] = response
        assert len(found) == 9
        for name, one in enumerate(alone):
            cut = found[name].first(20 + len(prompts[name]) % 3)
            assert (cut.tokens, cut.accepted) == (one.tokens, one.accepted), name
        assert drafter is sliding or max(found[8].accepted) > 0


def test_free_slots_stay_where_they_are(tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter) -> None:
    """A free slot may accept more than a live one; were it to advance, it would leave its buffer before the live one ends."""
    prompt, text = greedy_text
    decoder = make_decoder(tiny_target, overfitted)
    together = BatchedDecoder(decoder, 3)
    prompts = [prompt_ids(2, 3), prompt, prompt + text[:5]]  # one that accepts little, and two that end and leave their slots
    steps = _Steps(together, length=128, size=decoder.block_size, old=None, live=[])
    steps.admit([0, 1, 2], prompts)
    for number in range(40):
        if number == 2:
            steps.release(1)
            steps.release(2)
        steps.step(together._clock)
        assert number < 2 or (steps.start[1:].tolist(), steps.taps_at[1:].tolist()) == ([0, 0], [0, 0])
        if steps.start[0] > 100:
            break
    assert number > 5


@pytest.mark.gpu
def test_recorded_steps_on_a_gpu_give_the_same(tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter) -> None:
    shape = overfitted.shape
    decoder = load_decoder(tiny_target, shape, tensors_of(with_noise(overfitted)), device="cuda", dtype=torch.float32)
    prompt, text = greedy_text
    prompts = [prompt, prompt + text[:11], prompt_ids(2, 33), prompt + text[:60], prompt_ids(4, 140)]
    said: list[str] = []
    together = BatchedDecoder(decoder, 2, say=said.append)
    loop, plain = together.generate(prompts, max_new_tokens=40), together.generate_plain(prompts, max_new_tokens=40)
    assert not said, "every step must have been recorded"
    for ids, ours, reference in zip(prompts, loop, plain, strict=True):
        assert compare(ours, reference, dtype=torch.float32).outcome != "different"
        assert compare(decoder.generate(ids, max_new_tokens=40), reference, dtype=torch.float32).outcome != "different"
    assert max(max(response.accepted) for response in loop) >= 2

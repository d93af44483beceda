"""Many prompts at once must give what each gives alone: same tokens, same accepted runs."""

from pathlib import Path

import torch
from test_evaluate import greedy_text, make_decoder, overfitted, prompt_ids, stored_row, with_noise

from dflash_offline.drafter import Drafter
from dflash_offline.evaluate.batched import BatchedDecoder, supports
from dflash_offline.evaluate.comparison import compare

__all__ = ["greedy_text", "overfitted", "stored_row"]  # fixtures of test_evaluate


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

"""The draft-and-verify loop on a tiny real target, against the target alone and an independent loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import BLOCK, make_decoder, overfit, own_text, prompt_ids, stored_conversation, tensors_of, tiny_shape, with_noise
from zlab_reference import ReferenceDrafter, draft_and_verify

from dflash_offline.drafter import Drafter
from dflash_offline.evaluate import Decoder, compare
from dflash_offline.evaluate.heldout import HeldoutRow, tau_replay
from dflash_offline.evaluate.run import Loop
from dflash_offline.export import TargetInfo, export_weights
from dflash_offline.replay import ReplayResult, answers, replay


@pytest.fixture(scope="module")
def greedy_text(tiny_target: Path) -> tuple[list[int], list[int]]:
    return own_text(tiny_target)


@pytest.fixture(scope="module")
def stored_row(tiny_target: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return stored_conversation(tiny_target)


@pytest.fixture(scope="module")
def overfitted(tiny_target: Path) -> Drafter:
    return overfit(tiny_target)


def test_an_untrained_drafter_changes_nothing(tiny_target: Path) -> None:
    decoder = make_decoder(tiny_target, Drafter(tiny_shape()))
    for seed in range(1, 5):
        prompt = prompt_ids(seed)
        loop, plain = decoder.generate(prompt, max_new_tokens=40), decoder.generate_plain(prompt, max_new_tokens=40)
        assert compare(loop, plain, dtype=torch.float32).outcome == "identical"
        assert loop.tokens == plain.tokens and loop.step_tokens == len(loop.tokens) - 1


def test_the_target_alone_is_transformers_own_greedy_output(tiny_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = make_decoder(tiny_target, Drafter(tiny_shape()))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    prompt = torch.tensor([prompt_ids(7)])
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)[0, prompt.shape[1] :]
    assert decoder.generate_plain(prompt[0].tolist(), max_new_tokens=30).tokens == expected.tolist()


def test_overfit_export_and_an_independent_loop_accepts_nearly_the_whole_block(
    tmp_path: Path,
    tiny_target: Path,
    greedy_text: tuple[list[int], list[int]],
    stored_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    overfitted: Drafter,
) -> None:
    from transformers import AutoModelForCausalLM

    prompt, text = greedy_text
    ids, mask, hidden = stored_row
    folder = tmp_path / "zlab"
    export_weights(folder, form="zlab", shape=overfitted.shape, tensors=tensors_of(overfitted), target=TargetInfo("tiny", []))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    emitted, accepted = draft_and_verify(model, ReferenceDrafter(folder, torch.float32), prompt, len(text), stop={2})
    assert emitted == text
    independent = (len(emitted) - 1) / len(accepted)
    assert independent > 0.9 * BLOCK, (independent, accepted)

    decoder = make_decoder(tiny_target, overfitted)
    loop = decoder.generate(prompt, max_new_tokens=len(text))
    assert loop.tokens == text and loop.accepted == accepted
    replayed = replay(decoder.drafter, decoder.embedding, decoder.head, hidden, ids, mask)
    assert abs(replayed.tau - independent) < 0.03 * independent
    assert (replayed.tokens, replayed.steps) == (loop.step_tokens, loop.steps)


def test_a_drafter_that_is_often_wrong_still_agrees_with_the_independent_loop(
    tmp_path: Path, tiny_target: Path, overfitted: Drafter, greedy_text: tuple[list[int], list[int]]
) -> None:
    """On the known prompt cut short, or with noise on the weights, blocks are refused at every length."""
    from transformers import AutoModelForCausalLM

    noisy = with_noise(overfitted)
    folder = tmp_path / "zlab"
    export_weights(folder, form="zlab", shape=noisy.shape, tensors=tensors_of(noisy), target=TargetInfo("tiny", []))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    decoder = make_decoder(tiny_target, noisy)
    prompt, text = greedy_text
    emitted, accepted = draft_and_verify(model, ReferenceDrafter(folder, torch.float32), prompt, 60, stop={2})
    loop = decoder.generate(prompt, max_new_tokens=60)
    assert loop.tokens == emitted == text[:60] and loop.accepted == accepted
    assert len(set(accepted)) >= 3, accepted


def test_replay_is_stepping_by_hand(
    stored_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tiny_target: Path, overfitted: Drafter
) -> None:
    ids, mask, hidden = stored_row
    decoder = make_decoder(tiny_target, overfitted)
    mask = mask.clone()
    mask[60:75] = 0  # a user turn in the middle: two answers
    mask[100] = 0
    mask[102:104] = 0  # an answer of one token: no step
    expected = ReplayResult()
    for start, end in answers(mask):
        position = start
        while position < end - 1:
            slots = torch.full((BLOCK,), 511)
            slots[0] = ids[position]
            cache = decoder.drafter.start_cache()
            with torch.inference_mode():
                out = decoder.drafter.draft(hidden[:position].float(), decoder.embedding[slots], cache, position)
            drafted = (out @ decoder.head.T).argmax(-1)
            streak = 0
            while streak + 1 < BLOCK and position + streak + 1 < end and drafted[streak + 1] == ids[position + streak + 1]:
                streak += 1
            expected.accepted.append(streak)
            expected.steps += 1
            expected.tokens += min(streak + 1, end - 1 - position)
            position += streak + 1
    assert answers(mask) == [(20, 60), (75, 100), (104, 140)]
    for at_once in (None, 1, 7):
        found = replay(decoder.drafter, decoder.embedding, decoder.head, hidden, ids, mask, anchors_per_pass=at_once)
        assert found == expected
    second = replay(decoder.drafter, decoder.embedding, decoder.head, hidden, ids, mask, only_answer=1)
    assert second.tokens == 24 and second.steps < expected.steps


def test_replay_is_not_the_mean_over_all_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy case of the definition: runs 3, 2, 1, 0 one after the other are jumped over by a real loop."""
    import dflash_offline.replay as module

    streak_at = {10: 3, 11: 2, 12: 1, 13: 0, 14: 0}
    monkeypatch.setattr(module, "streaks", lambda *args, **kwargs: [streak_at[p] for p in args[5]])
    mask = torch.zeros(16)
    mask[10:16] = 1
    result = module.replay(None, None, None, None, None, mask)
    assert (result.accepted, result.tokens, result.steps) == ([3, 0], 5, 2)


def test_a_stop_token_ends_the_response_inside_a_block(
    tiny_target: Path, greedy_text: tuple[list[int], list[int]], overfitted: Drafter
) -> None:
    prompt, text = greedy_text
    full = make_decoder(tiny_target, overfitted)
    for index in range(1, 12):
        if text[index] in text[:index]:
            continue
        decoder = Decoder(full.target, full.drafter, full.embedding, full.head, stop_ids=[text[index]])
        loop, plain = decoder.generate(prompt, max_new_tokens=60), decoder.generate_plain(prompt, max_new_tokens=60)
        assert loop.tokens == plain.tokens == text[: index + 1]
        assert loop.step_tokens == index
    assert make_decoder(tiny_target, overfitted).generate(prompt, max_new_tokens=1).steps == 0


@pytest.mark.parametrize("family", ["sliding", "hybrid", "moe"])
def test_other_kinds_of_target_keep_their_own_output(tmp_path: Path, tiny_tokenizer_dir: Path, family: str) -> None:
    """Sliding-window keys are not lost, recurrent states are put back and replayed."""
    import shutil

    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    if family == "sliding":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**common, sliding_window=9, head_dim=16))
    elif family == "moe":
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
        )
    else:
        config = transformers.Qwen3NextConfig(
            **common,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            head_dim=16,
            num_experts=0,
            mlp_only_layers=[0, 1, 2, 3],
        )
        model = transformers.Qwen3NextForCausalLM(config)
    model.eval().save_pretrained(tmp_path / "m")
    for path in tiny_tokenizer_dir.iterdir():
        shutil.copy(path, tmp_path / "m" / path.name)
    decoder = make_decoder(tmp_path / "m", Drafter(tiny_shape(target_layer_ids=(0, 2))))
    assert decoder.target.recurrent == (family == "hybrid")
    prompt = prompt_ids(11)
    plain = decoder.generate_plain(prompt, max_new_tokens=40)
    # blocks that are accepted for 0, 1, 2, ... tokens: the drafter is told what to say
    script = iter(range(100))

    def scripted(rows: Any, bonus: int, cache: Any, start: int, *rest: Any) -> tuple[torch.Tensor, None]:
        at = start - len(prompt)
        right = next(script) % BLOCK
        block = [bonus, *plain.tokens[at + 1 : at + BLOCK]]
        block = block + [0] * (BLOCK - len(block))
        wrong = [token if k <= right else (token + 1) % 500 for k, token in enumerate(block)]
        return torch.tensor(wrong), None

    decoder._draft = scripted
    loop = decoder.generate(prompt, max_new_tokens=40)
    assert compare(loop, plain, dtype=torch.float32).outcome == "identical"
    assert set(loop.accepted) >= {0, 1, 2, 3, 4}, loop.accepted
    if family == "hybrid":
        decoder.target.stepwise = True  # the slow path for code that cannot continue a block
        assert decoder.generate(prompt, max_new_tokens=20).tokens == plain.tokens[:20]


def test_taps_of_the_loop_are_what_the_store_holds(
    tiny_target: Path, stored_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor], overfitted: Drafter
) -> None:
    ids, _, hidden = stored_row
    target = make_decoder(tiny_target, overfitted).target
    rows = [target.prefill(ids[:20]).hidden]
    for low in range(20, 140, 4):
        step = target.step(torch.cat([ids[low : low + 3], torch.tensor([5, 6])]))
        target.keep(3)
        rows.append(step.hidden[:3])
        rows.append(target.step(ids[low + 3 : low + 4]).hidden)
        target.keep(1)
    got = torch.cat(rows)
    assert got.shape == hidden.shape
    rms = hidden.float().pow(2).mean(-1, keepdim=True).sqrt()
    assert ((got - hidden.float()).abs() / rms).max() < 0.02  # one bf16 step where rounding went the other way
    assert (got == hidden.float()).float().mean() > 0.99


def test_tau_replay_beside_the_loop(
    tiny_target: Path, stored_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor], overfitted: Drafter, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, mask, hidden = (tensor for tensor in stored_row)
    decoder = make_decoder(tiny_target, overfitted)
    good = HeldoutRow(ids.numpy(), mask.numpy(), lambda: hidden)
    other = ids.clone()
    other[40:] = other[40:].roll(7)  # not what the target would write
    foreign = HeldoutRow(other.numpy(), mask.numpy(), lambda: hidden)
    found = tau_replay(Loop(decoder, batch=1), [good, foreign], loop_rows=2, max_new_tokens=100)
    assert found["rows"] == 2 and found["steps"] > 0
    assert found["loop"]["rows"] == 2 and found["loop"]["reproduced"] == 1
    assert found["loop"]["agrees"] and found["loop"]["replay"] == found["loop"]["loop"] > 0.8 * BLOCK
    assert "WARNING" not in capsys.readouterr().out
    # of the other row, the 20 tokens of its answer that the target writes too
    alone = tau_replay(Loop(decoder, batch=1), [foreign], loop_rows=1, max_new_tokens=100)["loop"]
    assert alone["reproduced"] == 0 and alone["replay"] is None and alone["agrees"] is None
    assert alone["common"]["replay"] == alone["common"]["loop"] > 2 and alone["common"]["difference"] == 0
    # hidden states shifted by one, the fault that training does not show: the tool says so itself
    shifted = HeldoutRow(ids.numpy(), mask.numpy(), lambda: hidden.roll(-1, 0))
    found = tau_replay(Loop(decoder, batch=1), [shifted], loop_rows=1, max_new_tokens=100)
    assert found["loop"]["agrees"] is False and "WARNING" in capsys.readouterr().out


def test_a_response_cut_short_is_what_a_shorter_limit_gives(tiny_target: Path, overfitted: Drafter) -> None:
    decoder = make_decoder(tiny_target, with_noise(overfitted))
    whole = decoder.generate(prompt_ids(0), max_new_tokens=40)
    for limit in (1, 2, 7, 20, 40, 50):
        cut, expected = whole.first(limit), decoder.generate(prompt_ids(0), max_new_tokens=limit)
        assert (cut.tokens, cut.accepted, cut.step_tokens) == (
            expected.tokens[:limit],
            expected.accepted,
            expected.step_tokens,
        ) or limit == 50

"""What an evaluation reports, the prompts it reads, and exported folders as it takes them."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_drafters import make_decoder, tensors_of, tiny_shape

from dflash_offline.config import RunConfig
from dflash_offline.drafter import Drafter
from dflash_offline.errors import EvaluateError, ExportError
from dflash_offline.evaluate import Response, compare, dataset_name, evaluate_folder, load_decoder, read_prompts
from dflash_offline.evaluate.comparison import tie_tolerance
from dflash_offline.evaluate.run import Loop, hold, require_lossless
from dflash_offline.evaluate.sampling import accept_greedy
from dflash_offline.evaluate.summary import bootstrap_interval, overall, summarise, table
from dflash_offline.export import TargetInfo, export_weights
from dflash_offline.prompts import Prompt, data_sets


def test_near_ties_and_differences() -> None:
    plain = Response(tokens=[5, 6, 7], best=[{5: 9.0, 1: 2.0}, {6: 8.0, 4: 7.9995}, {7: 9.0, 3: 1.0}])
    assert compare(Response(tokens=[5, 6, 7]), plain, dtype=torch.float32).outcome == "identical"
    tie = compare(Response(tokens=[5, 4, 1]), plain, dtype=torch.float32)
    assert (tie.outcome, tie.index) == ("near_tie", 1) and math.isclose(tie.gap, 5e-4, rel_tol=1e-3)
    assert compare(Response(tokens=[5, 6, 3]), plain, dtype=torch.float32).outcome == "different"
    assert compare(Response(tokens=[5, 9, 3]), plain, dtype=torch.bfloat16).outcome == "different"  # not among the best
    assert compare(Response(tokens=[5, 6]), plain, dtype=torch.float32).outcome == "different"
    assert tie_tolerance(8.0, torch.bfloat16) == 2 * 8 * 2**-7 and tie_tolerance(-15.9, torch.bfloat16) == 2 * 8 * 2**-7
    assert tie_tolerance(20.0, torch.float32) == pytest.approx(2e-3)
    with pytest.raises(EvaluateError, match="1 of a responses differ"):
        require_lossless({"a": {"different": 1}, "b": {"different": 0}})


def test_greedy_acceptance_by_hand() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 6).float()
    assert accept_greedy(torch.tensor([3, 1, 4]), logits) == (3, 1)
    assert accept_greedy(torch.tensor([3, 2, 4]), logits) == (1, 1)
    assert accept_greedy(torch.tensor([0, 1, 4]), logits) == (0, 3)


def response(step_tokens: int, accepted: list[int], seconds: float = 1.0) -> Response:
    return Response(
        tokens=[0] * (step_tokens + 1),
        accepted=accepted,
        step_tokens=step_tokens,
        total_s=seconds,
        draft_s=seconds / 4,
        verify_s=seconds * 3 / 4,
    )


def test_acceptance_length_is_pooled_and_z_labs_mean_stands_beside_it() -> None:
    prompts = [[response(8, [3, 3])], [response(2, [0, 0]), response(4, [1, 1])]]
    found = summarise(prompts, [[response(9, [], 3.0)], [response(3, [], 1.0), response(3, [], 1.0)]], [], block_size=4)
    assert found["acceptance_length"] == 14 / 6 and found["acceptance_length_zlab_mean"] == (4 + 1 + 2) / 3
    assert found["accepted_per_slot"] == [4 / 6, 2 / 6, 2 / 6]
    assert (found["prompts"], found["responses"], found["tokens"], found["steps"]) == (2, 3, 14, 6)
    assert found["tokens_per_s"] == 14 / 3 and found["baseline_tokens_per_s"] == 3.0 and found["speedup"] == pytest.approx(14 / 9)
    assert found["draft_share"] == 0.25 and found["verify_share"] == 0.75
    low, high = found["interval"]
    assert low == 1.5 and high == 4.0, "two prompts: the interval spans both"
    total = overall({"a": found, "b": found | {"acceptance_length": 1.0, "speedup": None}})
    assert total["acceptance_length"] == (14 / 6 + 1) / 2 and total["speedup"] == found["speedup"] and total["steps"] == 12
    assert any("2.333" in line for line in table({"a": found}, total))
    one = summarise(prompts[:1], None, [], block_size=4)
    assert one["acceptance_length"] == 4.0 and one["interval"] is None, "one prompt says nothing about others"
    assert table({"a": one}, total)[1].split()[:4] == ["a", "4.000", "-", "4.000"]
    nothing = summarise([[response(0, [])]], None, [], block_size=4)
    assert nothing["acceptance_length"] is None and nothing["interval"] is None
    json.dumps(nothing, allow_nan=False)
    assert any(line.startswith("empty") for line in table({"empty": nothing}, overall({"empty": nothing})))


def test_bootstrap_interval_covers_the_truth() -> None:
    """Of 200 experiments with a known mean, about 95 % of the intervals hold it."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        steps = generator.integers(5, 30, 60)
        tokens = generator.binomial(steps, 0.5) + steps  # mean 1.5 a step
        low, high = bootstrap_interval(tokens, steps, samples=300)
        covered += low <= 1.5 <= high
    assert 178 <= covered <= 199, covered


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompt_files(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    path = write_lines(
        tmp_path / "eval-x.jsonl",
        [{"messages": [user, user]}, "", {"prompt": "p"}, {"messages": [user, answer, user, answer]}, {"messages": [user, answer]}],
    )
    prompts = read_prompts(path, most=9)
    assert [prompt.num_turns for prompt in prompts] == [2, 1, 1, 1] and dataset_name(path) == "x"
    assert list(prompts[0].turns()) == [1, 2] and list(prompts[2].turns()) == [3] and prompts[3].messages == [user]
    assert len(read_prompts(path, most=2)) == 2
    parts, turn = (
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"from": "human", "value": "v"},
    )
    (tmp_path / "array.json").write_text(json.dumps([{"messages": [parts]}, {"conversations": [turn]}], indent=1))
    assert [p.messages for p in read_prompts(tmp_path / "array.json", most=9)] == [
        [{"role": "user", "content": "one two"}],
        [{"role": "user", "content": "v"}],
    ]
    empty = {"role": "user", "content": " \n"}
    for row, message in (
        ("{", r"line 2: invalid JSON \(Expecting property name enclosed in double quotes at column 2\)$"),
        ('{"prompt": "cut', r"line 2: invalid JSON \(Unterminated string starting at column 12\)$"),
        ("[" * 100_000, "bad.jsonl:3: row 1 cannot be read"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"line 2: multimodal \(a content part of type 'image_url'\)$",
        ),
        ({"x": 1}, "line 2: no messages"),
        ({"messages": [answer]}, "no user message"),
        ({"messages": [empty]}, "line 2: the user message is empty"),
        ({"messages": [user, empty]}, "line 2: the user message is empty"),
        ({"prompt": ""}, "line 2: the user message is empty"),
    ):
        with pytest.raises(EvaluateError, match=message):
            read_prompts(write_lines(tmp_path / "bad.jsonl", ["", row]), most=9)
    with pytest.raises(EvaluateError, match="holds no prompts"):
        read_prompts(write_lines(tmp_path / "none.jsonl", []), most=9)
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[10] = 0xFF  # the first byte of what is packed: no such kind of block
    (tmp_path / "damaged.gz").write_bytes(packed)
    for name, message in (("absent.jsonl", "cannot be read"), ("damaged.gz", "damaged or cut short")):
        with pytest.raises(EvaluateError, match=message):
            read_prompts(tmp_path / name, most=9)


def test_data_sets_of_a_run_file(tmp_path: Path, run_file: Callable[..., Path]) -> None:
    good = write_lines(tmp_path / "a" / "eval-x.jsonl", [{"prompt": "p"}, {"prompt": "q"}, "{"])
    config = RunConfig.load(run_file(evaluate={"prompts": [str(good)], "max_prompts": 2}))
    assert {name: len(prompts) for name, prompts in data_sets(config).items()} == {"x": 2}, "what is not asked is not read"
    other = write_lines(tmp_path / "b" / "x.jsonl", [{"prompt": "p"}])
    for changes, message in (
        ({"max_prompts": 3}, rf"run\.toml: \[evaluate\] prompts: {good}, line 3: invalid JSON"),
        ({"prompts": [str(good), str(other)]}, rf"run\.toml: \[evaluate\] prompts: {other}: another prompt file is called 'x' too"),
    ):
        with pytest.raises(EvaluateError, match=message):
            data_sets(config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)}))


def test_sampling_follows_the_seed_and_is_not_compared_with_greedy_text(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The distribution itself is tested where the rule is; here that an evaluation samples at all."""
    folder = exported(tmp_path / "zlab", Drafter(tiny_shape()))
    prompts = [write_lines(tmp_path / "eval-a.jsonl", [{"prompt": f"hello {i}"} for i in range(3)])]

    def evaluated(**options: Any) -> tuple[dict[str, Any], str]:
        found = evaluate_folder(tiny_target, folder, prompts, max_new_tokens=12, **options)
        return found["datasets"]["a"], capsys.readouterr().out

    one, said = evaluated(temperature=2.0, seed=1)
    assert "one prompt at a time" in said and "Sampled at temperature 2" in said and "not checked" in said
    assert one["batch"] == 1 and one["identical"] + one["near_ties"] + one["different"] == 0 and one["baseline_tokens_per_s"] > 0
    counts = ("accepted_per_slot", "tokens", "steps")
    again, _ = evaluated(temperature=2.0, seed=1)
    assert [again[name] for name in counts] == [one[name] for name in counts]
    greedy, said = evaluated()
    assert greedy["identical"] == 3 and greedy["batch"] == 8 and "Sampled" not in said


@pytest.mark.parametrize("batch", [1, 3])
def test_turns_are_asked_one_after_the_other(tiny_target: Path, batch: int) -> None:
    from dflash_offline.target import load_tokenizer

    tokenizer = load_tokenizer(tiny_target)
    decoder = make_decoder(tiny_target, Drafter(tiny_shape()))
    loop, seen, done = Loop(decoder, batch=batch), {}, []
    run = loop.run

    def spy(queue: Any, **options: Any) -> Any:
        for index, response in run(queue, **options):
            if not options["plain"]:
                seen.setdefault(index, []).append(response)
            yield index, response
        assert not queue

    loop.run = spy
    prompts = [
        Prompt([{"role": "user", "content": text} for text in texts], "here") for texts in (["first", "second"], ["only"], ["a", "b"])
    ]
    held, plain, asked = hold(
        loop, tokenizer, prompts, max_new_tokens=6, chat_template_kwargs={}, baseline=True, on_prompt=lambda: done.append(1)
    )
    assert [len(responses) for responses in held] == [2, 1, 2] == [len(turns) for turns in asked]
    assert len(done) == 3 and held[2] == seen[2]
    for responses, alone, prompt in zip(held, plain, prompts, strict=True):
        history: list[dict[str, str]] = []
        for message, response, reference in zip(prompt.messages, responses, alone, strict=True):
            history.append(message)
            ids = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=True)["input_ids"]
            expected = decoder.generate(ids, max_new_tokens=6)
            assert response.tokens == reference.tokens == expected.tokens and response.accepted == expected.accepted
            text = tokenizer.decode([t for t in response.tokens if t != 2], skip_special_tokens=True)
            history.append({"role": "assistant", "content": text})


def exported(folder: Path, drafter: Drafter, form: str = "zlab", **training: Any) -> Path:
    export_weights(
        folder, form=form, shape=drafter.shape, tensors=tensors_of(drafter), target=TargetInfo("tiny", []), training=training or None
    )
    return folder


def test_evaluating_an_exported_folder(tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = Drafter(tiny_shape())
    prompts = [write_lines(tmp_path / f"eval-{name}.jsonl", [{"prompt": f"hello {name} {i}"} for i in range(2)]) for name in ("a", "b")]
    found = {}
    for form in ("zlab", "speculators"):
        folder = exported(tmp_path / form, drafter, form, chat_template_kwargs={"enable_thinking": False})
        found[form] = evaluate_folder(tiny_target, folder, prompts, max_new_tokens=8)
        said = capsys.readouterr().out
        assert "WARNING: the drafter was trained on text rendered with chat_template_kwargs = {'enable_thinking': False}" in said
    results = found["zlab"]
    assert set(results["datasets"]) == {"a", "b"} and results["overall"]["identical"] == 4 and results["overall"]["different"] == 0
    for name in ("a", "b"):
        same = ("acceptance_length", "accepted_per_slot", "tokens", "steps")
        assert {k: found["speculators"]["datasets"][name][k] for k in same} == {k: results["datasets"][name][k] for k in same}
    evaluate_folder(
        tiny_target, tmp_path / "zlab", prompts[:1], max_new_tokens=4, baseline=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert "WARNING" not in capsys.readouterr().out
    with pytest.raises(EvaluateError, match="is called 'a' too"):
        evaluate_folder(tiny_target, tmp_path / "zlab", [prompts[0], prompts[0]], max_new_tokens=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 5}, "num_target_layers is 5, the target's is 4"),
        ({"vocab_size": 600}, "vocab_size is 600, the target's is 512"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, tiny_target: Path, changes: dict[str, Any], message: str) -> None:
    folder = exported(tmp_path / "d", Drafter(tiny_shape(**changes)))
    prompts = [write_lines(tmp_path / "p.jsonl", [{"prompt": "x"}])]
    with pytest.raises(ExportError, match=message):
        evaluate_folder(tiny_target, folder, prompts)


@pytest.mark.parametrize("value", [float("nan"), 3.4e38])  # the second one rounds to infinity in bf16
def test_a_drafter_that_is_not_finite_is_refused(tiny_target: Path, value: float) -> None:
    drafter = Drafter(tiny_shape())
    tensors = tensors_of(drafter) | {"fc.weight": torch.full_like(drafter.fc.weight, value)}
    with pytest.raises(ExportError, match="drafter: fc.weight is not finite in bf16"):
        load_decoder(tiny_target, drafter.shape, tensors, device="cpu", dtype=torch.float32)

"""The loss mask on templates like those of real families, with the real template engine and real tokenizers."""

from typing import Any

import chat_templates as templates
import pytest
from conftest import CHATML
from template_bench import ANSWER, FAMILIES, QUESTION, Bench, chat

from dflash_offline.corpus.schema import RowRejected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_supervised_with_its_end_marker_and_nothing_else(byte_level: Any, family: str) -> None:
    template, end, method = FAMILIES[family]
    bench = Bench(byte_level, template)
    messages = chat(QUESTION, ANSWER, "And 3 + 3? \N{GRINNING FACE}", "Six \N{GRINNING FACE}\N{ZERO WIDTH JOINER}é!", "Thanks", "Bye")
    (row,) = bench.rows({"messages": messages})
    space = " " if family == "mistral" else ""
    assert bench.supervised(row) == [space + text + end for text in (ANSWER, "Six \N{GRINNING FACE}\N{ZERO WIDTH JOINER}é!", "Bye")]
    assert set(row.methods) == {method}
    whole = bench.ids(messages)
    assert whole[: len(row.input_ids)] == row.input_ids.tolist()
    assert row.loss_mask[-1] == 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "no generation prompt"])
def test_prompt_tokens_are_those_of_the_server(byte_level: Any, family: str) -> None:
    bench = Bench(byte_level, FAMILIES[family][0])
    messages = chat(QUESTION, ANSWER, "More?", "No.")
    (row,) = bench.rows({"messages": messages})
    assert bench.is_what_a_server_sees(row, messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_answer_has_no_supervised_end_marker(byte_level: Any, family: str) -> None:
    template, end, _ = FAMILIES[family]
    bench = Bench(byte_level, template)
    messages = chat(QUESTION, ANSWER, "More?", "Once upon a")
    (whole,) = bench.rows({"messages": messages, "finish_reason": "stop"})
    (cut,) = bench.rows({"messages": messages, "finish_reason": "length"})
    assert bench.supervised(whole)[-1].endswith(f"a{end}")
    assert bench.supervised(cut)[-1].endswith("Once upon a")
    assert bench.supervised(cut)[0] == bench.supervised(whole)[0]  # the answer before it was not cut
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[:-1]
    assert cut.cut and not whole.cut


def test_white_space_at_a_cut_is_the_targets_own(byte_level: Any) -> None:
    bench = Bench(byte_level, CHATML)
    (row,) = bench.rows({"messages": chat(QUESTION, "1.\n2. \n\n"), "finish_reason": "length"})
    assert bench.supervised(row) == ["1.\n2. \n\n"]


def test_last_turn_only(byte_level: Any) -> None:
    bench = Bench(byte_level, CHATML)
    (row,) = bench.rows({"messages": chat("a?", "first", "b?", "second")}, supervise="last")
    assert bench.supervised(row) == ["second<|im_end|>"]


def test_message_flags_leave_turns_out(byte_level: Any) -> None:
    bench = Bench(byte_level, CHATML)
    for flag in ({"weight": 0}, {"train": False}, {"weight": 0.0}, {"train": "false"}, {"weight": "0"}):
        messages: list[dict[str, Any]] = chat("a?", "first", "b?", "second", "c?", "third")
        messages[1].update(flag)
        messages[5].update({"weight": 1, "train": True})
        (row,) = bench.rows({"messages": messages})
        assert bench.supervised(row) == ["second<|im_end|>", "third<|im_end|>"]
    messages[3]["train"] = messages[5]["train"] = False
    with pytest.raises(RowRejected, match="no answer to train on"):
        bench.rows({"messages": messages})


def test_empty_answer_is_no_answer(byte_level: Any) -> None:
    bench = Bench(byte_level, CHATML)
    for blank in ("", " \n ", None):
        with pytest.raises(RowRejected, match="no answer to train on"):
            bench.rows({"messages": [*chat("a?"), {"role": "assistant", "content": blank}]})
        (row,) = bench.rows({"messages": [*chat("a?"), {"role": "assistant", "content": blank}, *chat("b?", "yes")]})
        assert bench.supervised(row) == ["yes<|im_end|>"]


# ---- thinking


def test_thinking_split_per_answer_is_what_the_server_would_have_generated(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.QWEN3)
    inline = chat("a?", "<think>\nhm\n</think>\n\nfirst", "b?", "<think>\nho\n</think>\n\nsecond", "c?", "<think>\nha\n</think>\n\nthird")
    fields = chat("a?", "first", "b?", "second", "c?", "third")
    closing = chat("a?", "hm\n</think>\n\nfirst", "b?", "ho\n</think>\n\nsecond", "c?", "ha\n</think>\n\nthird")
    for message, thought in zip(fields[1::2], ("hm", "ho", "ha"), strict=True):
        message["reasoning_content"] = thought
    made = []
    for messages in (inline, fields, closing):
        rows = bench.rows({"messages": messages})
        assert [bench.supervised(row) for row in rows] == [
            [f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>"] for thought, text in (("hm", "first"), ("ho", "second"), ("ha", "third"))
        ]
        assert all(bench.is_what_a_server_sees(row, messages[: 2 * i + 2]) for i, row in enumerate(rows))
        made.append([row.input_ids.tolist() for row in rows])
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_empty_thinking_block_of_the_template_is_not_supervised(byte_level: Any, enable_thinking: bool | None) -> None:
    kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    bench = Bench(byte_level, templates.QWEN3, **kwargs)
    rows = bench.rows({"messages": chat("a?", "first", "b?", "second")})
    assert [bench.supervised(row) for row in rows] == [["first<|im_end|>"], ["second<|im_end|>"]]
    if enable_thinking is False:
        assert bench.is_what_a_server_sees(rows[1], chat("a?", "first", "b?", "second"))


def test_an_empty_thinking_block_the_target_wrote_itself_is_supervised(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.QWEN3)
    (row,) = bench.rows({"messages": chat("a? /no_think", "<think>\n\n</think>\n\nfirst")})
    assert bench.supervised(row) == ["<think>\n\n</think>\n\nfirst<|im_end|>"]


def test_thinking_left_out_of_the_loss(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.QWEN3)
    (row,) = bench.rows({"messages": chat("a?", "<think>\nhm\n</think>\n\nfirst")}, supervise_thinking=False)
    assert bench.supervised(row) == ["first<|im_end|>"]
    bench = Bench(byte_level, templates.GPT_OSS)
    message = {"role": "assistant", "content": "first", "thinking": "hm"}
    (row,) = bench.rows({"messages": [*chat("a?"), message]}, supervise_thinking=False)
    assert bench.supervised(row) == ["<|start|>assistant<|channel|>final<|message|>first<|return|>"]


def test_channels(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.GPT_OSS)
    messages = chat("a?", "first", "b?", "second")
    messages[1]["thinking"], messages[3]["thinking"] = "hm", "ho"
    rows = bench.rows({"messages": messages})
    assert [bench.supervised(row) for row in rows] == [
        [f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"]
        for thought, text in (("hm", "first"), ("ho", "second"))
    ]
    assert bench.is_what_a_server_sees(rows[1], messages)


def test_thinking_that_the_template_hides_is_put_back(byte_level: Any) -> None:
    """The generation prompt opens the block, so the target writes what follows, end of the block included."""
    bench = Bench(byte_level, templates.DEEPSEEK)
    fields = chat("a?", "first", "b?", "second")
    fields[1]["reasoning"], fields[3]["reasoning"] = "hm", "ho"
    for messages in (
        chat("a?", "<think>\nhm\n</think>\n\nfirst", "b?", "<think>\nho\n</think>\n\nsecond"),
        chat("a?", "hm\n</think>\n\nfirst", "b?", "ho\n</think>\n\nsecond"),
        fields,
    ):
        rows = bench.rows({"messages": messages})
        assert [bench.supervised(row) for row in rows] == [
            ["hm\n</think>\n\nfirst<｜end▁of▁sentence｜>"],
            ["ho\n</think>\n\nsecond<｜end▁of▁sentence｜>"],
        ]
        assert rows[0].methods == rows[1].methods == ["composed"]
        assert all(bench.is_what_a_server_sees(row, messages[: 2 * i + 2]) for i, row in enumerate(rows))


def test_an_answer_cut_inside_its_thinking(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.DEEPSEEK)
    (row,) = bench.rows({"messages": chat("a?", "<think>\nhm, let me"), "finish_reason": "length"})
    assert bench.supervised(row) == ["hm, let me"]


def test_an_answer_without_the_thinking_its_prompt_opens(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.DEEPSEEK)
    (row,) = bench.rows({"messages": chat("a?", "first")})
    assert bench.supervised(row) == ["first<｜end▁of▁sentence｜>"]
    assert row.methods == ["content"]


# ---- tools


def test_tool_calls_are_supervised_and_results_are_not(byte_level: Any) -> None:
    bench = Bench(byte_level, templates.QWEN25)
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}]
    arguments: tuple[Any, ...] = ({"a": 2, "b": "é"}, '{"a": 2, "b": "é"}')
    made = []
    for value in arguments:
        for given in (tools, '[{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}]'):
            call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": value}}]}
            messages = [*chat(QUESTION), call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
            (row,) = bench.rows({"messages": messages, "tools": given})
            made.append(row.input_ids.tolist())
            assert bench.supervised(row)[-1] == "It is 4.<|im_end|>"
            called = bench.supervised(row)[0]
            assert called.endswith('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "é"}}\n</tool_call><|im_end|>')
            assert "# Tools" in bench.ours.decode(row.input_ids)
    assert all(ids == made[0] for ids in made)


@pytest.mark.parametrize("arguments", ["not json", "[1, 2]", 3])
def test_malformed_tool_calls_are_rejected(byte_level: Any, arguments: Any) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    with pytest.raises(RowRejected, match="malformed tool call"):
        Bench(byte_level, templates.QWEN25).rows({"messages": [*chat(QUESTION), call]})


def test_tool_calls_a_template_would_swallow_are_rejected(byte_level: Any) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(RowRejected, match="refused by the chat template"):
        Bench(byte_level, CHATML).rows({"messages": [*chat(QUESTION), call]})

"""Rows of every shape people have -> one shape, or a rejection with a reason."""

import json
from typing import Any

import pytest

from dflash_offline.corpus.schema import RowRejected, parse_row

PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
]
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PLAIN},
        {"conversations": SHAREGPT},
        {"conversations": PLAIN},
        {"messages": SHAREGPT},
        {"system": "Be brief.", "conversations": SHAREGPT[1:]},
        {"dialogue": PLAIN, "id": 7, "email": "a@b"},
        {"messages": json.dumps(PLAIN)},
        PLAIN,
        {"messages": PLAIN, "conversations": SHAREGPT},
        {
            "messages": [
                {**m, "content": [{"type": "text", "text": m["content"][:2]}, {"type": "text", "text": m["content"][2:]}]} for m in PLAIN
            ]
        },
        {"messages": [*PLAIN, {"role": "user", "content": "and?"}]},
        {"messages": PLAIN, "images": [], "id": "../../etc/passwd" * 40},
    ],
)
def test_dialects_give_the_same_conversation(row: Any) -> None:
    conversation = parse_row(row)
    assert conversation.messages == PLAIN
    assert conversation.trained == [False, False, True]
    assert not conversation.cut


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "not an object"),
        (3, "not an object"),
        ({"messages": []}, "empty conversation"),
        ({"text": "x"}, "no messages"),
        ({"messages": ["a", "b"]}, "malformed messages"),
        ({"messages": PLAIN[:2]}, "no assistant turn"),
        ({"messages": PLAIN[:1]}, "no assistant turn"),
        ({"messages": [PLAIN[2]]}, "no assistant turn"),
        ({"messages": [PLAIN[1], {"role": "laguna_s", "content": "x"}]}, "unknown role"),
        ({"messages": [PLAIN[1], {"role": "critic", "content": "x"}, PLAIN[2]]}, "unknown role"),
        ({"messages": [PLAIN[1], {"role": None, "content": "x"}]}, "unknown role"),
        ({"chosen": PLAIN, "rejected": PLAIN}, "several message lists"),
        ({"messages": PLAIN, "conversations": SHAREGPT[1:]}, "messages and conversations differ"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, PLAIN[2]]}, "multimodal"),
        ({"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, PLAIN[2]]}, "multimodal"),
        ({"messages": PLAIN, "image": "a.png"}, "multimodal"),
        ({"messages": [{"role": "user", "content": 5}, PLAIN[2]]}, "malformed messages"),
        ({"messages": PLAIN, "tools": "not json"}, "malformed tools"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowRejected) as caught:
        parse_row(row)
    assert caught.value.reason == reason


def test_a_role_can_be_mapped() -> None:
    row = {"messages": [{"role": "student", "content": "a"}, {"role": "Teacher", "content": "b"}]}
    with pytest.raises(RowRejected, match="unknown role"):
        parse_row(row)
    conversation = parse_row(row, roles={"student": "user", "teacher": "assistant"})
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_html_in_text_is_not_media() -> None:
    text = "Use <video src=x> inside <p>an <image> tag</p>"
    assert parse_row({"messages": [{"role": "user", "content": text}, PLAIN[2]]}).messages[0]["content"] == text


@pytest.mark.parametrize("reason", ["length", "LENGTH", "max_tokens", ["stop", "length"]])
def test_a_cut_answer_is_known_by_its_finish_reason(reason: Any) -> None:
    assert parse_row({"messages": PLAIN, "finish_reason": reason}).cut
    assert parse_row({"messages": [*PLAIN[:2], {**PLAIN[2], "finish_reason": reason}]}).cut
    # the reason is about the last turn; when that is not the answer, no answer was cut by it
    assert not parse_row({"messages": [*PLAIN, {"role": "user", "content": "x"}], "finish_reason": reason}).cut


@pytest.mark.parametrize("reason", ["stop", None, "", 3, ["length", "stop"]])
def test_other_finish_reasons_cut_nothing(reason: Any) -> None:
    assert not parse_row({"messages": PLAIN, "finish_reason": reason}).cut


def test_reasoning_is_found_wherever_it_stands() -> None:
    answers: list[dict[str, Any]] = [
        {"reasoning_content": "hm", "content": "x"},
        {"reasoning": "hm", "content": "x"},
        {"thinking": "hm", "content": "x"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
    ]
    for answer in answers:
        message = parse_row({"messages": [PLAIN[1], {"role": "assistant", **answer}]}).messages[1]
        assert (message["reasoning_content"], message["content"]) == ("hm", "x")


def test_sharegpt_tool_turns() -> None:
    row = {
        "tools": json.dumps([{"name": "f", "parameters": {}}]),
        "conversations": [
            {"from": "human", "value": "go"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "done"},
            {"from": "gpt", "value": "ok"},
        ],
    }
    conversation = parse_row(row)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert conversation.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert conversation.trained == [False, True, False, True]


def test_null_content_is_empty() -> None:
    conversation = parse_row({"messages": [{"role": "user", "content": None}, PLAIN[2]]})
    assert conversation.messages[0]["content"] == ""


def test_rows_with_the_same_prompt_fall_together_and_others_do_not() -> None:
    first = parse_row({"messages": PLAIN})
    same = parse_row({"conversations": [*SHAREGPT[:2], {"from": "gpt", "value": "Other answer"}]})
    other = parse_row({"messages": [PLAIN[0], {"role": "user", "content": "Ho"}, PLAIN[2]]})
    assert first.prompt_hash() == same.prompt_hash() != other.prompt_hash()


def test_ambiguous_mask_flags_are_named_as_ignored() -> None:
    conversation = parse_row({"messages": [PLAIN[1], {**PLAIN[2], "mask": True}]})
    assert any("'mask' ignored" in note for note in conversation.notes)


def test_control_characters_are_kept_and_named() -> None:
    conversation = parse_row({"messages": [PLAIN[1], {"role": "assistant", "content": "a\x00b\x1b[0m\ttab\r\n"}]})
    assert conversation.messages[-1]["content"] == "a\x00b\x1b[0m\ttab\r\n"
    assert conversation.notes == ["conversations with control characters (kept as they are)"]
    assert parse_row({"messages": [PLAIN[1], {"role": "assistant", "content": "\ttab\r\n\x85\u2028"}]}).notes == []


def test_failed_and_unwanted_answers_are_rejected() -> None:
    with pytest.raises(RowRejected, match="failed answer"):
        parse_row({"messages": PLAIN, "status": "error"})
    assert parse_row({"messages": PLAIN, "status": "ok"}, drop_answers=["ERROR"])
    with pytest.raises(RowRejected, match="unwanted answer"):
        parse_row({"messages": PLAIN}, drop_answers=["ERROR", r"Hel+o\b"])

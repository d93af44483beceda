"""A row of any known shape -> a ``Conversation`` in the shape chat templates expect.

Shapes are told by content, not by key name: a list of ``role``/``content`` or of ``from``/``value`` (ShareGPT)
messages, under ``messages``, ``conversations`` or any other one key, or as the row itself; a ``system`` field beside
it; ``tools`` and tool-call arguments as objects or as JSON strings; content as text, null or a list of text parts;
reasoning in a field of its own or inline. What cannot be used is a ``RowRejected`` with a reason to count by.

What is done to a conversation, each counted as a note: assistant turns before the first user turn are dropped, turns
after the last assistant turn are dropped.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_LIST_FIELDS = ("messages", "conversations")
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_PLACEHOLDER = re.compile(r"(?:\A|\n)\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*(?:\n|\Z)")
_FAILED = {"error", "failed", "failure"}
_NO = {"0", "0.0", "false", "no"}
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_CUT = {"length", "max_tokens", "max_length"}


class RowRejected(Exception):
    """One row that cannot be used. ``reason`` is counted; ``detail`` is shown for the first few."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass
class Conversation:
    """One conversation ready for a chat template.

    Attributes:
        messages: role and content, plus reasoning_content, tool_calls, name, tool_call_id where given. The last one is
            an assistant turn.
        trained: for each message, whether the row wants it trained on (assistant turns; ``weight``, ``train`` flags).
        tools: JSON schemas for the template, or None.
        cut: the last answer was cut by a length limit, so it has no end marker.
        source: the row's ``source`` field.
        notes: what was changed or ignored, to be counted.
    """

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None
    cut: bool = False
    source: str | None = None
    notes: list[str] = field(default_factory=list)

    def prompt_hash(self) -> int:
        """64 bits of the turns before the first answer: rows that share a prompt fall on the same side of a split."""
        digest = xxhash.xxh3_64()
        for message in self.messages:
            if message["role"] == "assistant":
                break
            digest.update(f"{message['role']}\0{message['content']}\0".encode("utf-8", "surrogatepass"))
        return digest.intdigest()


def parse_row(row: Any, *, roles: Mapping[str, str] | None = None, drop_answers: Sequence[str] = ()) -> Conversation:
    """Normalise one decoded row.

    Args:
        row: what the file held: an object, or a bare list of messages.
        roles: the run file's own role names -> system, user, assistant or tool; they win over the known ones.
        drop_answers: regular expressions; a match at the start of any answer rejects the row.

    Raises:
        RowRejected: it holds no conversation that can be trained on.
    """
    notes: list[str] = []
    raw, messages, trained = _read(row, roles, notes)
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    leading = {i for i in range(first_user) if messages[i]["role"] == "assistant"}
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in leading), default=-1)
    if last < 0:
        raise RowRejected("no assistant turn", "no assistant turn after a user turn" if leading else "")
    if isinstance(fields.get("status"), str) and fields["status"].lower() in _FAILED:
        raise RowRejected("failed answer", f"the row's status is {fields['status']!r}")
    if any(_CONTROL_CHARACTERS.search(message["content"]) for message in messages):
        notes.append("conversations with control characters (kept as they are)")
    for pattern in drop_answers:
        if any(message["role"] == "assistant" and re.match(pattern, message["content"]) for message in messages):
            raise RowRejected("unwanted answer", f"an answer matches {pattern!r}")
    if leading:
        notes.append("assistant turns before the first user turn dropped")
    if last + 1 < len(messages):
        notes.append("turns after the last assistant turn dropped")
    cut = _is_cut(raw[-1]) if isinstance(raw[-1], dict) and last + 1 == len(messages) else False
    if last + 1 == len(messages) and _is_cut(fields):
        cut = True
    kept = [i for i in range(last + 1) if i not in leading]
    source = fields.get("source")
    return Conversation(
        messages=[messages[i] for i in kept],
        trained=[trained[i] for i in kept],
        tools=_tools(fields.get("tools") if _given(fields.get("tools")) else fields.get("functions")),
        cut=cut,
        source=source if isinstance(source, str) else None,
        notes=notes,
    )


def read_messages(row: Any, *, roles: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The messages of a row as they stand, whoever speaks last; a ``system`` field comes first.

    Raises:
        RowRejected: it holds no messages, or one of an unknown shape.
    """
    return _read(row, roles, [])[1]


def _read(row: Any, roles: Mapping[str, str] | None, notes: list[str]) -> tuple[list[Any], list[dict[str, Any]], list[bool]]:
    """A row's own list of messages; the same normalised; which of them are to be trained on."""
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    if any(_given(fields.get(name)) for name in _MEDIA_COLUMNS):
        raise RowRejected("multimodal", f"the row has a column {next(name for name in _MEDIA_COLUMNS if _given(fields.get(name)))!r}")
    raw = row if isinstance(row, list) else _message_list(row)
    messages, trained = _messages(raw, ROLES if not roles else {**ROLES, **roles}, notes)
    system = fields.get("system", fields.get("system_prompt"))
    if isinstance(system, str) and system.strip() and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
        trained.insert(0, False)
    if not messages:
        raise RowRejected("empty conversation")
    return raw, messages, trained


def _given(value: Any) -> bool:
    return value is not None and value != [] and value != "" and value != {}


def _is_cut(fields: dict[str, Any]) -> bool:
    reason = fields.get("finish_reason")
    if isinstance(reason, list) and reason:
        reason = reason[-1]
    return isinstance(reason, str) and reason.lower() in _CUT


def _looks_like_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)


def _message_list(row: Any) -> list[Any]:
    """Find the list of messages in a row by its content."""
    if not isinstance(row, dict):
        raise RowRejected("not an object", f"the row is a JSON {type(row).__name__}")
    values = {name: _from_json(row[name]) for name in _LIST_FIELDS if _given(row.get(name))}
    found = {name: value for name, value in values.items() if _looks_like_messages(value)}
    if len(found) == 2 and _plain(found["messages"]) != _plain(found["conversations"]):
        raise RowRejected("messages and conversations differ")
    if found:
        return next(iter(found.values()))
    if any(isinstance(row.get(name), list) and not row[name] for name in _LIST_FIELDS):
        raise RowRejected("empty conversation")
    if values:
        name, value = next(iter(values.items()))
        raise RowRejected("malformed messages", f"{name} is not a list of objects with role/content or from/value")
    others = {name: value for name, value in row.items() if name not in ("tools", "functions") and _looks_like_messages(value)}
    if len(others) == 1:
        return next(iter(others.values()))
    if others:
        raise RowRejected("several message lists", f"{', '.join(sorted(others))}; rename the one to use to 'messages'")
    raise RowRejected("no messages", f"keys are {', '.join(sorted(map(str, row))[:8]) or '(none)'}")


def _plain(messages: list[Any]) -> list[Any]:
    roles = [ROLES.get(str(m.get("role", m.get("from"))).lower(), m.get("role", m.get("from"))) for m in messages]
    return [roles, [m.get("content", m.get("value")) for m in messages]]


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _messages(raw: list[Any], roles: Mapping[str, str], notes: list[str]) -> tuple[list[dict[str, Any]], list[bool]]:
    messages, trained = [], []
    for item in raw:
        if not isinstance(item, dict):
            raise RowRejected("malformed messages", f"a message is a JSON {type(item).__name__}")
        name = item.get("role") if item.get("role") is not None else item.get("from")
        role = roles.get(name) or roles.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise RowRejected("unknown role", f"role {name!r}; known are {', '.join(sorted(set(roles)))}; map others in [corpus] roles")
        content, reasoning = _content(item, role)
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "function_call":
            call = _from_json(content)
            message = {"role": "assistant", "content": "", "tool_calls": _tool_calls(call if isinstance(call, list) else [call])}
        elif role == "assistant":
            calls = _from_json(item.get("tool_calls"))
            if not _given(calls) and _given(item.get("function_call")):
                calls = [item["function_call"]]
            if _given(calls):
                message["tool_calls"] = _tool_calls(calls)
            for field_name in REASONING_FIELDS:
                if isinstance(item.get(field_name), str) and item[field_name].strip():
                    reasoning = item[field_name]
                    break
            if reasoning:
                message["reasoning_content"] = message["thinking"] = message["reasoning"] = reasoning
        for field_name in ("name", "tool_call_id"):
            if isinstance(item.get(field_name), str):
                message[field_name] = item[field_name]
        messages.append(message)
        trained.append(message["role"] == "assistant" and _wanted(item, notes))
    return messages, trained


def _wanted(item: dict[str, Any], notes: list[str]) -> bool:
    """Flags on one message: ``weight`` (0 leaves it out) and ``train``/``trainable`` (false leaves it out)."""
    if item.get("mask") is not None:
        notes.append("per-message 'mask' ignored (it means opposite things in different tools; use weight or train)")
    weight = item.get("weight")
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight not in (0, 1):
        notes.append("message weights other than 0 and 1 taken as 1")
    return not any(_says_no(item.get(name)) for name in ("weight", "train", "trainable"))


def _says_no(flag: Any) -> bool:
    """0, false, and both as text; a flag that is not there says nothing."""
    return flag is not None and (flag.strip().lower() in _NO if isinstance(flag, str) else not flag)


def _content(item: dict[str, Any], role: str) -> tuple[str, str]:
    """Text of a message and reasoning found in its parts."""
    content = next((item[name] for name in ("content", "value", "text") if item.get(name) is not None), "")
    reasoning = ""
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if isinstance(part, str):
                texts.append(part)
            elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind in ("thinking", "reasoning") and isinstance(part.get(kind, part.get("text")), str):
                reasoning += part.get(kind, part.get("text"))
            else:
                raise RowRejected("multimodal" if isinstance(part, dict) else "malformed messages", f"a content part of type {kind!r}")
        content = "".join(texts)
    elif isinstance(content, dict) and role in ("tool", "function_call"):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise RowRejected("malformed messages", f"content of a {role} message is a JSON {type(content).__name__}")
    if role == "user" and "<" in content and _MEDIA_PLACEHOLDER.search(content):
        raise RowRejected("multimodal", "a media placeholder in a user message")
    return content, reasoning


def _without_nulls(value: Any) -> Any:
    """Tables give every object the union of all keys, null where a row has none."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowRejected("malformed tool call", "tool_calls is not a list")
    normal = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRejected("malformed tool call", "a tool call has no function name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                raise RowRejected("malformed tool call", f"arguments of {function['name']!r} are not JSON") from None
        if not isinstance(arguments, dict):
            raise RowRejected("malformed tool call", f"arguments of {function['name']!r} are not a JSON object")
        made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": _without_nulls(arguments)}}
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        normal.append(made)
    return normal


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(tools)
    if not _given(tools):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowRejected("malformed tools", "tools is neither a list of objects nor a JSON string of one")
    return [_without_nulls(tool if "function" in tool else {"type": "function", "function": tool}) for tool in tools]

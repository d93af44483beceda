"""Which tokens of a conversation are trained on: exactly those the target itself would generate, end marker included.

For each answer i of a conversation:

- ``prompt``: messages before it, rendered with the generation prompt: what a server gives the target;
- ``text``: messages up to it, rendered without. Where ``text`` continues ``prompt``, the rest of it, up to and
  including the end marker, is what the target would generate.

Methods, by preference: ``generation`` (the template marks the answers itself), ``prefix`` (as above, token ids of the
prompt checked against those of the text), ``offsets`` (the same span by character offsets, where tokens merge across
its start; a token on the boundary is left out), ``content`` (the answer's own text found in the rendered text, for
templates whose generation prompt the answer does not continue), ``composed`` (prompt + answer as written + end marker,
for templates that cut the thinking out of what they render).

Templates that render an answer otherwise once more turns follow (thinking removed from history) make the contexts of a
conversation's answers contradict one another: such a conversation becomes one row for each answer.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_offline.corpus.schema import Conversation, RowRejected
from dflash_offline.corpus.template import THINKING, ChatTemplate

_OPENS, _CLOSES = {pair[0] for pair in THINKING}, {pair[1] for pair in THINKING[:3]}
# An empty block of thinking, or the rest of one whose start the generation prompt already holds
_EMPTY_THINKING = re.compile(r"\s*(?:" + "|".join(rf"(?:{re.escape(a)})?\s*{re.escape(b)}" for a, b in THINKING[:3]) + r")\s*")
_FENCE_CANDIDATES = ("\U000f5e21", "\U000f5e22")


@dataclass
class Span:
    """Characters ``[start, end)`` of a rendered text that the target generates. ``method`` is how they were found."""

    start: int
    end: int
    method: str


@dataclass
class Rendered:
    """One row to be: text with its spans; ``mark`` stands inside control strings that belong to messages ("" if none)."""

    text: str
    spans: list[Span]
    mark: str
    cut: bool
    notes: list[str]


@dataclass
class EncodedRow:
    """``input_ids`` int32 [T] and ``loss_mask`` uint8 [T], ending at the last supervised token."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    methods: list[str]
    turn_ends: list[int]  # index after each answer's last token, ascending
    num_tokens: int  # of the whole rendered text
    cut: bool


def render_conversation(template: ChatTemplate, conversation: Conversation, *, supervise: str, supervise_thinking: bool) -> list[Rendered]:
    """Render a conversation into one row, or into one for each answer where their contexts contradict (see the module).

    Raises:
        RowRejected: the template raises, or nothing is left to train on.
    """
    messages, tools, mark = template.mark(conversation.messages, conversation.tools)
    notes = list(conversation.notes)
    if mark:
        notes.append("control strings in messages kept as plain text")
    last = len(messages) - 1
    turns = [i for i, wanted in enumerate(conversation.trained) if wanted and _has_text(messages[i]) and (supervise == "all" or i == last)]
    if len(turns) < sum(conversation.trained) and supervise == "all":
        notes.append("empty answers left out of the loss")
    if not turns:
        raise RowRejected("no answer to train on", "every assistant turn is empty or left out by its flags")
    if any("tool_calls" in m for m in messages) and "tool_calls" not in template.tool_template:
        raise RowRejected("refused by the chat template", "it does not render tool calls")
    texts: list[str] = []
    spans: list[Span] = []
    for i in turns:
        text, span = _answer(template, messages[: i + 1], tools, cut=conversation.cut and i == last, notes=notes)
        if not supervise_thinking:
            span = _without_thinking(text, span)
        texts.append(text)
        spans.append(span)
    full = texts[-1]
    if all(full.startswith(text[: span.end]) for text, span in zip(texts, spans, strict=True)):
        return [Rendered(full, spans, mark, conversation.cut and turns[-1] == last, notes)]
    notes.append("conversations split into one row per answer (the template changes earlier answers)")
    rows = []
    for i, text, span in zip(turns, texts, spans, strict=True):
        rows.append(Rendered(text, [span], mark, conversation.cut and i == last, notes if i == turns[0] else []))
    return rows


def _has_text(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _answer(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, *, cut: bool, notes: list[str]) -> tuple[str, Span]:
    """Text up to the last message, an assistant turn, and the span of it that the target generates."""
    if template.has_generation(tools):
        text, found = _generated(template, messages, tools)
        if found and len(found) > sum(message["role"] == "assistant" for message in messages):
            # several blocks in one turn: those that the turns before it do not have are the last turn's
            found = [(found[len(_generated(template, messages[:-1], tools)[1])][0], found[-1][1])]
        if found:
            return text, _finish(template, text, Span(*found[-1], "generation"), messages[-1], cut=cut)
    else:
        text = template.render(messages, tools)
    try:
        prompt = template.render(messages[:-1], tools, generation_prompt=True)
    except RowRejected:
        return text, _content_span(template, text, messages, tools, cut=cut)
    dropped = _dropped_thinking(messages[-1], text)
    if text.startswith(prompt) and not dropped and not _header_follows(template, text, len(prompt), messages[-1]):
        if messages[-1]["content"].strip() not in text[len(prompt) :] and not _thinks(messages[-1]):
            notes.append("answers whose text the chat template changes")
        return text, _finish(template, text, Span(len(prompt), len(text), "prefix"), messages[-1], cut=cut)
    if not text.startswith(prompt) or dropped:
        composed = _compose(template, prompt, text, messages, cut=cut)
        if composed is not None:
            return composed
        opened = any(prompt.rstrip().endswith(opening) for opening, _ in THINKING)
        what = "without the thinking that the generation prompt opens" if opened else "that do not continue the generation prompt"
        notes.append(f"answers {what}; their own text is supervised")
    return text, _content_span(template, text, messages, tools, cut=cut)


def _generated(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """Text and its ``{% generation %}`` spans, blank ones left out."""
    text, found = template.render_with_spans(messages, tools)
    return text, [span for span in found if text[span[0] : span[1]].strip()]


def _finish(template: ChatTemplate, text: str, span: Span, message: dict[str, Any], *, cut: bool) -> Span:
    """Move the end of a span to its end marker (or before it, for a cut answer), its start past boilerplate."""
    start = span.start
    if not _thinks(message) and (boilerplate := _EMPTY_THINKING.match(text, start, span.end)):
        start = boilerplate.end()
    marker = _end_marker(template, text, start, span.end)
    if span.method == "generation" and marker is None:
        # the template closes its block before the end marker: take the marker that follows at once
        space = len(text[span.end :]) - len(text[span.end :].lstrip())
        following = template.control.match(text, span.end + space)
        if following and following[0] in template.enders:
            marker = following.span()
    if marker is None:
        return Span(start, start + len(text[start : span.end].rstrip()), span.method)
    if not cut:
        return Span(start, marker[1], span.method)
    # white space before the marker is the target's if the answer ends with it, else the template's
    kept = text.endswith(message["content"], start, marker[0])
    return Span(start, marker[0] if kept else start + len(text[start : marker[0]].rstrip()), span.method)


def _end_marker(template: ChatTemplate, text: str, start: int, end: int) -> tuple[int, int] | None:
    """The end marker in the run of control tokens and white space that ends ``text[start:end]``.

    The run may hold more: the end of a tool call before it, an end of text after it. The marker learned from the
    template's probe is preferred, else the first control token of the run is taken.
    """
    found = [match for match in template.control.finditer(text, start, end) if match[0] in template.special or match[0] in template.enders]
    run = []
    for match in reversed(found):
        if text[match.end() : end].strip() or match[0] in _OPENS | _CLOSES:
            break
        run.append(match)
        end = match.start()
    run.reverse()
    for match in run:
        if match[0] in template.enders:
            return match.span()
    return run[0].span() if run else None


def _thinks(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) or any(tag in message["content"] for tag in _CLOSES | _OPENS)


def _dropped_thinking(message: dict[str, Any], text: str) -> bool:
    """Whether the template left out inline thinking: a tag pair of the answer's that its text no longer ends with."""
    for _, close in THINKING[:3]:
        if close in message["content"]:
            thinking = message["content"].split(close)[0]
            for opening, _ in THINKING[:3]:
                thinking = thinking.replace(opening, "")
            return bool(thinking.strip()) and thinking.strip() not in text
    return False


def _header_follows(template: ChatTemplate, text: str, start: int, message: dict[str, Any]) -> bool:
    """Whether a role header stands between prompt and answer: the template writes no generation prompt."""
    content = message["content"].strip()
    if message.get("tool_calls") or message.get("reasoning_content") or not content:
        return False
    at = text.find(content[:40], start)
    if at < 0:
        return False
    return any(
        match[0] in template.special and not _EMPTY_THINKING.fullmatch(match[0]) for match in template.control.finditer(text, start, at)
    ) and (
        template.render([{"role": "user", "content": "ping"}])
        == template.render([{"role": "user", "content": "ping"}], generation_prompt=True)
    )


def _compose(template: ChatTemplate, prompt: str, text: str, messages: list[dict[str, Any]], *, cut: bool) -> tuple[str, Span] | None:
    """Prompt, answer as the target wrote it, end marker: for a template whose rendering does not continue its prompt."""
    message = messages[-1]
    if message.get("tool_calls"):
        return None
    content, reasoning = message["content"], message.get("reasoning_content", "")
    opened = next((pair for pair in THINKING[:3] if prompt.rstrip().endswith(pair[0])), None)
    closed = next((pair for pair in THINKING[:3] if prompt.rstrip().endswith(pair[1])), None)
    inline = next((pair for pair in THINKING[:3] if pair[1] in content or content.lstrip().startswith(pair[0])), None)
    if opened:
        if reasoning and not inline:
            answer = reasoning.strip("\n") + f"\n{opened[1]}\n\n" + content.lstrip("\n")
        elif inline == opened:
            answer = content.lstrip()
            answer = answer[len(opened[0]) :].lstrip("\n") if answer.startswith(opened[0]) else answer
        else:
            return None
    elif (inline and not closed) or (closed and not inline and not reasoning):
        answer = content
    else:
        return None
    marker = _end_marker(template, text, 0, len(text))
    tail = "" if cut or marker is None else text[marker[0] : marker[1]]
    if cut:
        answer = answer.rstrip()
    return prompt + answer + tail, Span(len(prompt), len(prompt) + len(answer) + len(tail), "composed")


def _content_span(template: ChatTemplate, text: str, messages: list[dict[str, Any]], tools: Any, *, cut: bool) -> Span:
    """Find the answer's own text by rendering it between two fences."""
    opening, closing = _FENCE_CANDIDATES
    content = messages[-1]["content"]
    if opening in text or closing in text:
        raise RowRejected("private-use characters", "the text uses the characters that answers are fenced with")
    for candidate in (content, content.strip()):
        if not candidate:
            continue
        fenced = template.render([*messages[:-1], {**messages[-1], "content": opening + candidate + closing}], tools)
        if fenced.count(opening) == fenced.count(closing) == 1 and fenced.replace(opening, "").replace(closing, "") == text:
            start, end = fenced.index(opening), fenced.index(closing) - 1
            space = len(text[end:]) - len(text[end:].lstrip())
            marker = template.control.match(text, end + space)
            if cut or marker is None or (template.enders and marker[0] not in template.enders):
                return Span(start, start + len(text[start:end].rstrip()), "content")
            return Span(start, marker.end(), "content")
    raise RowRejected("answer not found", "the chat template changes the answer's text, so its tokens cannot be told apart")


def _without_thinking(text: str, span: Span) -> Span:
    """Move a span's start past its thinking."""
    for opening, close in THINKING:
        at = text.find(close, span.start, span.end)
        begins = text.find(opening, span.start, span.end)
        if at >= 0 and (close != "<|end|>" or (begins >= 0 and begins < at)):
            end = at + len(close)
            end += len(text[end : span.end]) - len(text[end : span.end].lstrip())
            return Span(end, span.end, span.method)
    return span


def encode_row(template: ChatTemplate, rendered: Rendered) -> EncodedRow:
    """Encode a rendered row and turn its spans into a mask.

    Raises:
        RowRejected: fewer than two supervised tokens stand side by side, so no block could start in the row.
    """
    encoding = template.encode(rendered.text, rendered.mark)
    ids = np.asarray(encoding.ids, dtype=np.int32)
    locate = _Locator(template, rendered, encoding, ids)
    mask = np.zeros(len(ids), dtype=np.uint8)
    methods, turn_ends = [], []
    for span in rendered.spans:
        start, exact = locate.index_at(span.start)
        stop = locate.end_at(span.end)
        methods.append(span.method if exact or span.method != "prefix" else "offsets")
        mask[start:stop] = 1
        turn_ends.append(stop)
    supervised = np.flatnonzero(mask)
    if not len(supervised) or not (mask[:-1] & mask[1:]).any():
        raise RowRejected("fewer than two supervised tokens in a row")
    length = int(supervised[-1]) + 1
    return EncodedRow(ids[:length], mask[:length], methods, turn_ends, len(ids), rendered.cut)


class _Locator:
    """Characters of a rendered text -> token indices.

    Control tokens split a text into pieces that are encoded apart from one another, so a boundary is found by counting
    the control tokens before it and encoding only the piece between the last of them and it.
    """

    def __init__(self, template: ChatTemplate, rendered: Rendered, encoding: Any, ids: np.ndarray) -> None:
        self.template, self.rendered, self.encoding, self.ids = template, rendered, encoding, ids
        self.controls = [match.span() for match in template.control.finditer(rendered.text)]
        self.at = np.flatnonzero(template.is_control[ids])
        self.aligned = len(self.at) == len(self.controls)
        self._offsets: np.ndarray | None = None

    def _before(self, position: int) -> int:
        """Number of control tokens that end at or before a character."""
        return sum(1 for span in self.controls if span[1] <= position)

    def index_at(self, position: int) -> tuple[int, bool]:
        """Index of the first token that starts at a character, and whether a token does start exactly there."""
        rendered, template = self.rendered, self.template
        if self.aligned:
            count = self._before(position)
            first = int(self.at[count - 1]) + 1 if count else 0
            piece = rendered.text[self.controls[count - 1][1] if count else 0 : position]
            head = template.encode(piece, rendered.mark).ids if piece else []
            if self.ids[first : first + len(head)].tolist() == head:
                return first + len(head), True
        head = template.encode(rendered.text[:position], rendered.mark).ids
        if self.ids[: len(head)].tolist() == head:
            return len(head), True
        offsets = self.offsets()
        return int(np.searchsorted(offsets[:, 0], self._translated(position), side="left")), False

    def end_at(self, position: int) -> int:
        """Index after the last token that ends at or before a character."""
        if self.aligned:
            count = self._before(position)
            if count and self.controls[count - 1][1] == position:  # right after an end marker
                return int(self.at[count - 1]) + 1
            if count < len(self.controls) and self.controls[count][0] == position:  # right before one
                return int(self.at[count])
        ends = self.offsets()[:, 1]
        return int(np.searchsorted(ends, self._translated(position), side="right"))

    def offsets(self) -> np.ndarray:
        """Character offsets of the tokens, [T, 2], made rising where a tokenizer trims white space from them."""
        if self._offsets is None:
            self._offsets = np.maximum.accumulate(np.asarray(self.encoding.offsets, dtype=np.int64).reshape(-1, 2), axis=0)
        return self._offsets

    def _translated(self, position: int) -> int:
        if not self.rendered.mark:
            return position
        return len(self.template.translate(self.rendered.text[:position], self.rendered.mark))

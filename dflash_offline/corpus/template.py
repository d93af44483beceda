"""The target's chat template and tokenizer: text of a conversation, token ids of a text, control tokens.

Ids are those of ``tokenizer.apply_chat_template`` with one exception: a control string inside a message (``<|im_end|>``
typed by a user) is encoded as the plain text it is. To do so it is marked before rendering, and such a row goes through
a twin of the tokenizer whose control tokens have unguessable names, so that only the template's own are found.

Control tokens are the added tokens that are special or written by the template. In an assistant message only the
special ones are guarded, and not the thinking tags: the target wrote ``<think>`` and ``<tool_call>`` itself.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline import identity
from dflash_offline.config import RunConfig
from dflash_offline.corpus.schema import RowRejected
from dflash_offline.errors import CorpusError
from dflash_offline.gguf import tokenizer_source

# (opening, closing) of thinking text, as target families write it
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
_THINKING_TAGS = {tag for pair in THINKING[:3] for tag in pair}
# Templates that print today's date would change every row at midnight, and everything would be captured again.
FIXED_DATE = datetime(2025, 1, 1)
_DIRECTIVES = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", *"aAbBcdDeFGHIjkmMnprRStTuUVwWxXyYzZ")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK_CANDIDATES = "\U000f5e11\U000f5e12\U000f5e13"
_RENAMED = "\U000f5e1a{}\U000f5e1b"


@dataclass(frozen=True)
class TemplateSource:
    """What a ``ChatTemplate`` is made from; small enough to hand to worker processes.

    Attributes:
        name: how messages call it: the file, or the model folder.
        template, tool_template: Jinja text; the second is used for rows with tools.
        tokenizer_json: the fast tokenizer, serialised.
        special: names such as ``bos_token`` that the template may use, and ``[corpus] chat_template_kwargs``.
        num_embeddings: rows of the target's embedding; no id may reach it.
    """

    name: str
    template: str
    tool_template: str | None
    tokenizer_json: str = field(repr=False)
    special: dict[str, Any]
    num_embeddings: int | None


def with_fixed_date(template: str) -> str:
    """A chat template whose ``strftime_now`` gives ``FIXED_DATE``: in the corpus and wherever else prompts are rendered.

    A macro of that name stands before what transformers offers, on the template's first line so that lines keep their numbers.
    """
    if "strftime_now" not in template:
        return template
    replaced = "".join(f"|replace('%{letter}', '{FIXED_DATE.strftime(f'%{letter}')}')" for letter in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{replaced}|replace('%%', '%') }}}}{{%- endmacro -%}}{template}"


def load_source(config: RunConfig) -> TemplateSource:
    """Load tokenizer and chat template of the run file's target.

    Raises:
        CorpusError: there is no fast tokenizer or no chat template, or the one in a file cannot be read.
        TargetError: there is no such model folder.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    folder = identity.model_folder(config)
    options = {"trust_remote_code": config.target.trust_remote_code, "local_files_only": True} | tokenizer_source(folder)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # every kind of damage raises another type
        from dflash_offline.target.tokens import why_no_tokenizer  # late for torch's sake

        raise CorpusError(why_no_tokenizer(folder, error)) from None
    finally:
        logging.set_verbosity(verbosity)
    if not getattr(tokenizer, "is_fast", False):
        raise CorpusError(
            f"{folder}: {type(tokenizer).__name__} has no fast version (tokenizer.json), which is needed to place the loss mask"
        )
    template, tool_template, name = tokenizer.chat_template, None, f"the chat template of {folder}"
    if config.corpus.chat_template is not None:
        path = config.path(config.corpus.chat_template)
        name = f"the chat template {path}"
        try:
            template = path.read_text(encoding="utf-8")
        except OSError as error:
            raise CorpusError(f"{path}: the chat template cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise CorpusError(f"{path}: the chat template is no UTF-8 text; name a Jinja file in [corpus] chat_template") from None
    if isinstance(template, dict):
        template, tool_template = template.get("default"), template.get("tool_use")
    if not template:
        raise CorpusError(f"{folder}: the tokenizer has no chat template; name a Jinja file in [corpus] chat_template")
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, (str, list))}
    num_embeddings = identity.text_config(identity.target_config(config)).get("vocab_size")
    return TemplateSource(
        name,
        template,
        tool_template,
        tokenizer.backend_tokenizer.to_str(),
        {**special, **config.corpus.chat_template_kwargs},
        num_embeddings,
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class ChatTemplate:
    """Renders and encodes. Everything is deterministic: dates are fixed, control strings in messages stay text."""

    def __init__(self, source: TemplateSource) -> None:
        from tokenizers import Tokenizer

        self.source = source
        self.tokenizer = Tokenizer.from_str(source.tokenizer_json)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.template = with_fixed_date(source.template)
        self.tool_template = with_fixed_date(source.tool_template or source.template)
        written = self._written_by_template()
        added = self.tokenizer.get_added_tokens_decoder()
        self.control_ids = {
            token.content: number
            for number, token in added.items()
            if token.special or (token.content in written and not token.content.isspace())
        }
        self.special = {token.content for token in added.values() if token.special}
        self.control = _any_of(self.control_ids)
        self._guarded_in_answers = _any_of({name for name in self.control_ids if name in self.special and name not in _THINKING_TAGS})
        self.is_control = np.zeros(self.tokenizer.get_vocab_size(with_added_tokens=True) + max(added, default=0) + 1, dtype=bool)
        self.is_control[list(self.control_ids.values())] = True
        self.enders: set[str] = set()
        self._check()

    def has_generation(self, tools: Any) -> bool:
        """Whether the template used for a row with these tools marks the answers with ``{% generation %}``."""
        return _GENERATION.search(self.tool_template if tools else self.template) is not None

    @property
    def uses_date(self) -> bool:
        """Whether the template prints the current date, which is fixed here."""
        return "strftime_now" in self.template or "strftime_now" in self.tool_template

    def _written_by_template(self) -> str:
        """All text the template can write by itself: its data and its string constants."""
        import jinja2

        texts = []
        for template in {self.source.template, self.source.tool_template or self.source.template}:
            try:
                texts += [token[2] for token in jinja2.Environment(autoescape=False).lex(template) if token[1] in ("data", "string")]  # noqa: S701
            except jinja2.TemplateSyntaxError as error:
                raise CorpusError(f"{self.source.name}: not a valid Jinja template (line {error.lineno}: {error.message})") from None
        return "\0".join(texts)

    def _check(self) -> None:
        """Render a probe conversation: a template that cannot do that is refused at once; learn the end markers."""
        probes = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}] * 2
        try:
            text = self.render(probes[:2])
        except RowRejected as error:
            raise CorpusError(f"{self.source.name}: cannot render a user turn and its answer ({error.detail})") from None
        if "pong" not in text:
            raise CorpusError(
                f"{self.source.name}: does not print the assistant's answer, so 0 % would be supervised; is it a template for prompts only?"
            )
        end = self.control.match(text, text.index("pong") + 4 + _leading_space(text[text.index("pong") + 4 :]))
        if end is None:
            return
        self.enders.add(end[0])
        try:
            text = self.render(probes)
        except RowRejected:
            return
        after = text.index("pong") + 4
        if end := self.control.match(text, after + _leading_space(text[after:])):
            self.enders.add(end[0])

    def mark(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]], Any, str]:
        """Put a mark inside every control string of the messages. Returns them (copied if changed), and the mark or ""."""

        def guarded(role: str) -> re.Pattern[str]:
            return self._guarded_in_answers if role == "assistant" else self.control

        if not tools and not any(
            guarded(m["role"]).search(m["content"]) or (m.keys() - {"role", "content"} and guarded(m["role"]).search(repr(m)))
            for m in messages
        ):
            return messages, tools, ""
        everything = json.dumps([messages, tools], ensure_ascii=False)
        if tools and not self.control.search(everything):
            return messages, tools, ""
        mark = next((c for c in _MARK_CANDIDATES if c not in everything), None)
        if mark is None:
            raise RowRejected("private-use characters", "the text uses every character that control strings could be marked with")

        def split(match: re.Match[str]) -> str:
            if len(match[0]) == 1:
                raise RowRejected("control string in text", f"{match[0]!r} is one character and cannot be told from the template's own")
            return match[0][0] + mark + match[0][1:]

        def marked(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(split, value)
            if isinstance(value, dict):
                return {key: item if key in ("role", "type") else marked(item, pattern) for key, item in value.items()}
            return [marked(item, pattern) for item in value] if isinstance(value, list) else value

        return [marked(m, guarded(m["role"])) for m in messages], marked(tools, self.control), mark

    def render(self, messages: list[dict[str, Any]], tools: Any = None, *, generation_prompt: bool = False) -> str:
        """Text of a conversation.

        Raises:
            RowRejected: the template raised.
        """
        return self._render(messages, tools, generation_prompt=generation_prompt, spans=False)[0]

    def render_with_spans(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation and the character spans inside ``{% generation %}``."""
        return self._render(messages, tools, generation_prompt=False, spans=True)

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, *, generation_prompt: bool, spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, indices = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tool_template if tools else self.template,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=spans,
                **self.source.special,
            )
        except Exception as error:  # a template may raise anything, and it is the row that is refused
            raise RowRejected("refused by the chat template", _one_line(error)) from None
        return texts[0], [tuple(span) for span in indices[0]] if spans else []

    def plain(self, text: str, mark: str) -> str:
        """Rendered text without marks."""
        return text.replace(mark, "") if mark else text

    def translate(self, text: str, mark: str) -> str:
        """Marked text -> text for the twin tokenizer: the template's control strings renamed, marks taken out."""
        return self.control.sub(lambda match: _RENAMED.format(self.control_ids[match[0]]), text).replace(mark, "")

    def encode(self, text: str, mark: str) -> Any:
        """Rendered (marked) text -> ``tokenizers.Encoding``; offsets are those of ``translate(text)`` if marked.

        Raises:
            RowRejected: the text holds a lone surrogate, which no tokenizer takes.
        """
        try:
            if mark:
                return self._twin.encode(self.translate(text, mark), add_special_tokens=False)
            return self.tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise RowRejected("lone surrogate", "an unpaired \\ud800-\\udfff escape; it is no character") from None

    @cached_property
    def _twin(self) -> Any:
        """The same tokenizer, with its control tokens renamed."""
        from tokenizers import Tokenizer

        content = json.loads(self.source.tokenizer_json)
        renamed = {name: _RENAMED.format(number) for name, number in self.control_ids.items()}
        for token in content["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        model = content["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {renamed.get(name, name): number for name, number in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[renamed.get(item[0], item[0]), *item[1:]] for item in model["vocab"]]
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        content["post_processor"] = content["padding"] = content["truncation"] = None
        twin = Tokenizer.from_str(json.dumps(content))
        for name, number in self.control_ids.items():
            if twin.token_to_id(renamed[name]) != number:
                raise RowRejected("control string in text", f"{name} cannot be kept as plain text with this tokenizer")
        return twin

    def decode(self, ids: Any) -> str:
        """Text of token ids, control tokens included."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _any_of(names: Any) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))) or r"(?!)")


def _leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())


def load_template(config: RunConfig) -> ChatTemplate:
    """Tokenizer and chat template of the run file, ready to use (see ``load_source`` for errors)."""
    return ChatTemplate(load_source(config))


def template_digest(source: TemplateSource) -> str:
    """What a corpus records of its template: digest of its text."""
    from dflash_offline.manifest import digest

    return digest([source.template, source.tool_template])


def check_ids(ids: np.ndarray, template: ChatTemplate, where: Path | str) -> None:
    """Refuse ids the target has no embedding for.

    Raises:
        CorpusError: tokenizer and target do not belong together.
    """
    limit = template.source.num_embeddings
    if limit is not None and len(ids) and int(ids.max()) >= limit:
        number = int(ids.max())
        token = template.tokenizer.id_to_token(number)
        raise CorpusError(
            f"{where}: the tokenizer gives id {number} ({token!r}), but the target has {limit} embedding rows; "
            "tokenizer and target do not belong together"
        )

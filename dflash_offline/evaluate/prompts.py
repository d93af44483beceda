"""Prompts as token ids: the chat template."""

import json
from typing import Any

from dflash_offline.corpus.template import with_fixed_date
from dflash_offline.errors import EvaluateError


def encode(tokenizer: Any, messages: list[dict[str, Any]], chat_template_kwargs: dict[str, Any], *, where: str) -> list[int]:
    """Token ids of messages, ending where the assistant begins to speak. A date in the template is the corpus's own.

    Raises:
        EvaluateError: the tokenizer has no chat template, or it refuses the messages, or they are no valid Unicode.
    """
    from jinja2 import TemplateError

    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise EvaluateError(f"{where}: the target's tokenizer has no chat template; name one in [corpus] chat_template")
    options = {"chat_template": with_fixed_date(template), "add_generation_prompt": True, **chat_template_kwargs}
    try:
        encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except (TemplateError, ValueError, TypeError) as error:
        if not _is_unicode(messages):
            raise EvaluateError(f"{where}: the text is no valid Unicode (a lone surrogate, or bytes that are no UTF-8); mend it") from None
        raise EvaluateError(f"{where}: the chat template refuses these messages ({error})") from None
    return list(encoded["input_ids"])


def _is_unicode(messages: list[dict[str, Any]]) -> bool:
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

"""The target's tokenizer, and the token id that stands for a masked slot."""

import logging
from pathlib import Path
from typing import Any

from dflash_offline.errors import TargetError
from dflash_offline.gguf import tokenizer_source
from dflash_offline.target.facts import TargetFacts, facts

_log = logging.getLogger(__name__)
# Files that tokens are read from: a folder with none of them has no tokenizer, whatever its settings say
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json", "*.gguf")


def why_no_tokenizer(folder: Path, error: BaseException) -> str:
    """Why a folder's tokenizer could not be loaded, and what to do."""
    if not any(path for pattern in _VOCABULARIES for path in Path(folder).glob(pattern)):
        return f"{folder}: no tokenizer.json in the folder; put the tokenizer's files beside the weights"
    what = " ".join(str(error).split())[:200] or type(error).__name__
    return f"{folder}: its tokenizer cannot be loaded ({what}); copy the tokenizer's files there again"


def load_tokenizer(folder: Path, chat_template_path: Path | None = None) -> Any:
    """The folder's tokenizer, with the chat template of ``chat_template_path`` in place of its own where given.

    Raises:
        TargetError: there is no fast tokenizer in the folder.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **tokenizer_source(folder))
    except Exception as error:  # every kind of damage raises another type
        raise TargetError(why_no_tokenizer(folder, error)) from None
    if not tokenizer.is_fast:
        raise TargetError(
            f"{folder}: its tokenizer has no fast form (tokenizer.json); character offsets, which loss masks are made from, need one"
        )
    if chat_template_path is not None:
        try:
            tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
        except OSError as error:
            raise TargetError(f"{chat_template_path}: the chat template cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise TargetError(f"{chat_template_path}: the chat template is no UTF-8 text; name a Jinja file") from None
    return tokenizer


def _check_wanted(wanted: int, folder: Path, found: TargetFacts, tokenizer: Any) -> int:
    where = f"[drafter] mask_token_id = {wanted}"
    if wanted not in range(found.vocab_size):
        raise TargetError(
            f"{where}: the target's embedding has {found.vocab_size} rows, so ids go from 0 to {found.vocab_size - 1} ({folder})"
        )
    if wanted in {*found.eos_token_ids, *_one(tokenizer.eos_token_id)}:
        raise TargetError(f"{where} is an end token of the target; a masked slot needs an id that text never holds")
    if wanted in {*_one(found.pad_token_id), *_one(tokenizer.pad_token_id)}:
        raise TargetError(f"{where} is the target's padding token; a masked slot needs an id that text never holds")
    if wanted in {*_one(found.bos_token_id), *_one(tokenizer.bos_token_id)}:
        raise TargetError(f"{where} is the target's beginning token; a masked slot needs an id that text never holds")
    if (
        wanted < len(tokenizer)
        and wanted not in tokenizer.added_tokens_decoder
        and (token := tokenizer.convert_ids_to_tokens(wanted)) is not None
    ):
        _log.warning("%s is %r, an ordinary token of the target; one that text never holds would serve better", where, token)
    return wanted


def _one(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def resolve_mask_token_id(folder: Path, wanted: int | None) -> int:
    """The id of a masked slot: ``wanted``, else the tokenizer's mask token, else the first embedding row no token uses.

    Raises:
        TargetError: ``wanted`` is out of range, an end, padding or beginning token; or there is no free row to take.
    """
    folder = Path(folder)
    found, tokenizer = facts(folder), load_tokenizer(folder)
    if wanted is not None:
        return _check_wanted(wanted, folder, found, tokenizer)
    meaningful = {*found.eos_token_ids, *_one(tokenizer.eos_token_id), *_one(tokenizer.pad_token_id), *_one(found.pad_token_id)}
    if (own := tokenizer.mask_token_id) is not None and own in range(found.vocab_size) and own not in meaningful:
        return int(own)
    used = set(tokenizer.get_vocab().values())
    for row in range(found.vocab_size):
        if row not in used:
            return row
    choices = [
        f"{index} {token.content}"
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if index not in meaningful and index not in _one(tokenizer.bos_token_id) and "im_start" not in token.content
    ]
    raise TargetError(
        f"{folder}: every one of the {found.vocab_size} embedding rows belongs to a token, so none can stand for a masked slot by itself; "
        f"set [drafter] mask_token_id to one that your text never holds" + (f" (for example {', '.join(choices[-6:])})" if choices else "")
    )

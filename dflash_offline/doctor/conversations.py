"""What the corpus is made from: the target's tokenizer and chat template, the files, and whether a row of them can be used."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dflash_offline.config import DEMO_MODEL, RunConfig
from dflash_offline.doctor.check import Check
from dflash_offline.errors import DFlashError
from dflash_offline.figures import counted

_ROWS = 100  # looked at, however many there are


def conversations(config: RunConfig) -> Iterator[Check]:
    folder = folder_to_look_into(config)
    renders = False
    if folder is not None:
        found = tokenizer(folder)
        yield found
        if found.level == "ok":
            found = _chat_template(config)
            yield found
            renders = found.level == "ok"
    named, found = _files(config)
    yield found
    if renders and named and found.level == "ok":
        yield _first_row(config, named)


def folder_to_look_into(config: RunConfig) -> Path | None:
    """The target's folder; None where ``target`` has said that there is none, or that the demo model is not converted yet."""
    from dflash_offline import demo, identity

    with contextlib.suppress(DFlashError):
        if config.target.model != DEMO_MODEL or demo.is_converted():
            return identity.target_folder(config)
    return None


def tokenizer(folder: Path) -> Check:
    from dflash_offline.target import load_tokenizer

    try:
        return Check("tokenizer", "ok", counted(len(load_tokenizer(folder)), "token"))
    except DFlashError as error:
        return Check("tokenizer", "fail", str(error), "mend that folder, or name another one in [target] model")


def _chat_template(config: RunConfig) -> Check:
    from dflash_offline.corpus.template import load_template

    try:
        template = load_template(config)
    except (DFlashError, OSError) as error:
        return Check("chat template", "fail", str(error), "name a Jinja file in [corpus] chat_template")
    ends = " or ".join(sorted(template.enders))
    where = "the tokenizer's own" if config.corpus.chat_template is None else config.corpus.chat_template
    return Check("chat template", "ok", f"{where}, an answer ends with {ends or 'no control token'}")


def _files(config: RunConfig) -> tuple[list[str], Check]:
    """Which of the files (or of the prompts to be answered first) lie here, and a line about all of them.

    No stream is read, no data set loaded.
    """
    from dflash_offline.corpus import corpus_files
    from dflash_offline.inputs import STDIN, is_dataset_name

    name = "[regenerate] prompts" if config.regenerates else "[corpus] files"
    patterns = config.regenerate.prompts if config.regenerates else config.corpus.files
    unseen = [each for each in patterns if each == STDIN or (not config.path(each).exists() and is_dataset_name(each, config.path(each)))]
    named = [each for each in patterns if each not in unseen]
    files = 0
    try:
        if config.regenerates:
            files = len(config.files(named, where=name))
        elif named:
            files = len(corpus_files(_only(config, named)))
    except (DFlashError, OSError) as error:
        return named, Check(name, "fail", str(error), f"mend {name} in the run file")
    texts = [counted(files, "file")] if named else []
    texts += ["standard input" if each == STDIN else f"data set {each}" for each in unseen]
    return named, Check(name, "ok", ", ".join(texts))


def _first_row(config: RunConfig, named: list[str]) -> Check:
    """Whether a row can be used, of the first ones of the files."""
    from dflash_offline.corpus import peek

    where = "[regenerate] prompts" if config.regenerates else "[corpus] files"
    try:
        found = peek(_only(config, named), _ROWS)
    except (DFlashError, OSError) as error:
        return Check("first row", "fail", str(error), f"mend that file, or name others in {where}")
    if found.first is None:
        among = f"{counted(found.records, 'row')} looked at, none can be used: " if found.records else ""
        whole = found.share_read >= 1 or not found.records
        return Check("first row", "fail" if whole else "warn", f"{among}{found.why_none}", f"mend the rows, or name other files in {where}")
    text = f"{found.first}, {counted(int(found.lengths[0]), 'token')}"
    if found.is_bound:
        text += " with the longest answers"
    if found.rejected:
        text += f"; {found.rejected} of {counted(found.records, 'row')} looked at cannot be used"
    return Check("first row", "ok", text)


def _only(config: RunConfig, named: list[str]) -> RunConfig:
    """The run file with these files, or prompts, alone."""
    section, field = ("regenerate", "prompts") if config.regenerates else ("corpus", "files")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={field: named})})

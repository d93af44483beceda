"""``[[drafters]]``: several drafters trained from one store. An entry is a name and what it changes of [drafter] and [train]."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from dflash_offline import fields
from dflash_offline.config.drafter import DrafterConfig
from dflash_offline.config.train import TrainConfig

OF_THE_WHOLE_RUN = {"mode", "nodes", "master_address", "master_port"}  # of [train]: said once, not drafter by drafter
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")

Entry = dict[str, Any]


class _Sections(BaseModel):
    drafter: DrafterConfig
    train: TrainConfig


def known_settings() -> dict[str, str]:
    """Setting that an entry may hold -> the section it stands in for."""
    both: tuple[tuple[str, type[BaseModel]], ...] = (("drafter", DrafterConfig), ("train", TrainConfig))
    return {key: section for section, model in both for key in model.model_fields if key not in OF_THE_WHOLE_RUN}


def merge(drafter: DrafterConfig, train: TrainConfig, entry: Entry) -> tuple[DrafterConfig, TrainConfig]:
    """The two sections as one drafter has them.

    Raises:
        ValueError: a setting is not known or not allowed; one line that names the drafter.
    """
    known = known_settings()
    tables: dict[str, dict[str, Any]] = {"drafter": drafter.model_dump(exclude_unset=True), "train": train.model_dump(exclude_unset=True)}
    for key, value in entry.items():
        if key == "name":
            continue
        if key in OF_THE_WHOLE_RUN:
            raise ValueError(f"{where(entry)}: {key} is for the whole run; write it into [train]")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "known are name and every key of [drafter] and [train]"
            raise ValueError(f"{where(entry)}: unknown key {key!r}; {hint}")
        tables[known[key]][key] = value
    try:
        merged = _Sections.model_validate(tables)
    except ValidationError as error:
        lines = [re.sub(r"^\[(drafter|train)\]: ", "", line) for line in fields.explain(_Sections, tables, error)]
        raise ValueError(f"{where(entry)}: {lines[0]}") from None
    return merged.drafter, merged.train


def where(entry: Entry) -> str:
    """How messages name an entry."""
    return f"[[drafters]] {entry['name']}"


def check_names(entries: list[Entry]) -> None:
    """Every entry has a name that can be part of a file name, and no two have the same.

    Raises:
        ValueError: one line that says what is wrong.
    """
    seen: set[str] = set()
    for number, entry in enumerate(entries, 1):
        name = entry.get("name")
        if name is None:
            raise ValueError(f"[[drafters]]: entry {number} has no name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"[[drafters]]: name = {name!r}: must be letters, digits, '-', '_' and '.', at most 40, a letter or digit first"
            )
        if name.lower() in seen:
            raise ValueError(f"[[drafters]]: two entries are called {name!r}; give each a name of its own")
        seen.add(name.lower())


def check_gpus(entries: list[Entry], train: TrainConfig) -> None:
    """No GPU belongs to two drafters, and those without GPUs of their own have some to share.

    Raises:
        ValueError: one line that says what is wrong.
    """
    owner: dict[int, str] = {}
    for entry in entries:
        gpus = entry.get("gpus")
        if gpus == "all" and len(entries) > 1:
            raise ValueError(f'{where(entry)}: gpus = "all" would take those of the others; leave it out to share [train] gpus')
        for gpu in gpus if isinstance(gpus, list) else []:
            if gpu in owner:
                raise ValueError(
                    f"[[drafters]]: GPU {gpu} is named by {owner[gpu]} and by {entry['name']}; "
                    "name it once, or leave gpus out of both to share [train] gpus"
                )
            owner[gpu] = entry["name"]
    sharing = [entry["name"] for entry in entries if "gpus" not in entry]
    if sharing and isinstance(train.gpus, list) and not set(train.gpus) - set(owner):
        raise ValueError(f"[[drafters]]: every GPU of [train] gpus = {train.gpus} is named by an entry, so {sharing[0]} has none")


def own_gpus(entries: list[Entry]) -> Iterator[int]:
    """GPUs that entries name for themselves; the others share what is left of [train] gpus."""
    for entry in entries:
        if isinstance(entry.get("gpus"), list):
            yield from entry["gpus"]

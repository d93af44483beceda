"""Training on the parts committed so far, while capture goes on.

What comes of it is a drafter of its own, with a key made of the full drafter's and of the parts: the full one is never
taken for done, and does not resume from it. A run that was stopped goes on with the parts it began with, however many
there are by then.
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline import identity, keys
from dflash_offline.config import RunConfig
from dflash_offline.errors import TrainError
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, write_json

MARK = "partial.json"


@dataclass(frozen=True)
class Partial:
    """One such run: ``key`` names its folder; it trains on rows that lie in ``parts`` of the store."""

    key: str
    full_key: str
    parts: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"full_key": self.full_key, "parts": self.parts}


def choose(config: RunConfig, full_key: str) -> Partial:
    """The unfinished run on some parts, if there is one, else a new one on all that are committed now.

    All ranks of a run get the same answer: the first to ask writes it down, under a lock.

    Raises:
        TrainError: nothing is committed yet, the parts there are have been trained on already, or the full drafter has been trained.
    """
    from dflash_offline.store import committed_parts

    layout = Layout(config.root_dir)
    drafters = layout.drafter(full_key).parent
    drafters.mkdir(parents=True, exist_ok=True)
    with (drafters / ".partial.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (layout.drafter(full_key) / MANIFEST).is_file():
            raise TrainError(
                f"{layout.drafter(full_key)}: the full drafter is trained already, so there is no need of one on some parts; "
                "`dflash-offline evaluate` tries it"
            )
        if begun := unfinished(drafters, full_key):
            return begun
        store = layout.store(keys.capture_key(config))
        parts = committed_parts(store)
        if not parts:
            raise TrainError(
                f"{store}: no part is committed yet; start the capture, or wait for its first part (`dflash-offline status` shows it)"
            )
        found = Partial(identity.short([full_key, "partial", parts]), full_key, parts)
        folder = layout.drafter(found.key)
        if (folder / MANIFEST).is_file():
            raise TrainError(
                f"{folder}: a drafter was trained on "
                f"the {'1 part there is' if len(parts) == 1 else f'{len(parts)} parts there are'} already; "
                "wait for more, or train the full one"
            )
        folder.mkdir(exist_ok=True)
        write_json(folder / MARK, found.to_dict())
        return found


def unfinished(drafters: Path, full_key: str) -> Partial | None:
    """The newest run on some parts that has been begun and not ended; ``drafters`` is the folder of all drafters."""
    found = []
    for mark in drafters.glob(f"*/{MARK}"):
        content = read_json(mark)
        if content["full_key"] == full_key and not (mark.parent / MANIFEST).exists():
            found.append((mark.stat().st_mtime, Partial(mark.parent.name, full_key, content["parts"])))
    return max(found, key=lambda each: each[0])[1] if found else None

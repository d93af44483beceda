"""The capture plan of a corpus: which parts of the store it needs, and the batches of those that are new.

A plan is made once for a corpus and a store and never changes, so batches (and with them the numbers captured) do not
depend on who runs them, or how often a run was killed. Rows that the store already holds, from this corpus before it
grew or from another one, are not planned again.

Order: buckets from the longest to the shortest, inside a bucket rows by length, batches full up to ``[corpus]
tokens_per_batch``: packed, or with padding where the target's rows cannot be packed. Parts are runs of batches of nearly
equal size, so a part costs as much as another.
"""

import contextlib
import fcntl
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_offline import identity, keys
from dflash_offline.buckets import packed_batches, padded_batches
from dflash_offline.config import RunConfig
from dflash_offline.corpus.storage import Corpus
from dflash_offline.errors import DFlashError, StoreError, TargetError
from dflash_offline.figures import count_text, counted
from dflash_offline.gpus import visible
from dflash_offline.manifest import read_json, write_json

# Encoded bytes of a hidden state over its 2 bytes in bf16, measured on real activations; bf16 is exact
CODEC_SHARE = {"bf16": 1.0, "lossless": 0.70, "int8": 0.51, "int6": 0.40, "int4": 0.29}
_STATISTICS_ROWS = 32  # rows that codecs may take their scales from
_PART_NAME = re.compile(r"part-(\d+)")


@dataclass(frozen=True)
class PlannedPart:
    """One part to be captured: ``batches`` of corpus row numbers, in order; ``tokens`` of its rows, without padding."""

    name: str
    batches: list[list[int]]
    tokens: int

    @property
    def rows(self) -> list[int]:
        """Row numbers in the order they are stored."""
        return [row for batch in self.batches for row in batch]


@dataclass(frozen=True)
class CapturePlan:
    """What a corpus needs of a store.

    Attributes:
        parts: new parts, most expensive batches first.
        reused: names of committed parts that hold rows of this corpus.
        statistics_rows: rows a codec may take statistics from; the same for every part of the plan.
        packed: whether the rows of a batch are meant to be packed.
        why_padded: what speaks against packing, where they are not.
    """

    parts: list[PlannedPart]
    reused: list[str]
    statistics_rows: list[int] = field(default_factory=list)
    packed: bool = False
    why_padded: str | None = None

    @classmethod
    def load(cls, path: Path) -> "CapturePlan":
        """Read a plan.

        Raises:
            DFlashError: it is missing, or was not written by ``make_plan``.
        """
        if not Path(path).is_file():
            raise DFlashError(f"{path}: no capture plan; run `python -m dflash_offline.corpus` (PrepareCorpus) again")
        content = read_json(path)
        try:
            parts = [PlannedPart(part["name"], part["batches"], part["tokens"]) for part in content["parts"]]
            return cls(parts, content["reused"], content["statistics_rows"], content.get("packed", False), content.get("why_padded"))
        except (KeyError, TypeError):
            raise DFlashError(f"{path}: not a capture plan of this version; delete it and run PrepareCorpus again") from None

    def to_json(self) -> dict[str, Any]:
        return {
            "parts": [{"name": part.name, "batches": part.batches, "tokens": part.tokens} for part in self.parts],
            "reused": self.reused,
            "statistics_rows": self.statistics_rows,
            "packed": self.packed,
            "why_padded": self.why_padded,
        }

    @property
    def num_rows(self) -> int:
        """Rows to capture."""
        return sum(len(batch) for part in self.parts for batch in part.batches)

    @property
    def num_tokens(self) -> int:
        """Tokens to capture, without padding."""
        return sum(part.tokens for part in self.parts)

    def summary(self) -> str:
        """One line: ``Capture plan: 5,190 rows, 3.1M tokens, in 12 new parts, packed; 4 parts are reused``."""
        reused = f"; {len(self.reused)} part{'s are' if len(self.reused) != 1 else ' is'} reused" if self.reused else ""
        new = f"{len(self.parts)} new part{'s' if len(self.parts) != 1 else ''}"
        how = "packed" if self.packed else f"padded ({self.why_padded})" if self.why_padded else "padded"
        return f"Capture plan: {counted(self.num_rows, 'row')}, {count_text(self.num_tokens)} tokens, in {new}, {how}{reused}"


def bytes_per_token(config: RunConfig) -> float:
    """Encoded hidden-state bytes of one token: taps x hidden size x 2 x the codec's share (an upper bound for bf16,
    int8, int6, int4; for lossless a measured mean)."""
    hidden_size = identity.text_config(identity.target_config(config))["hidden_size"]
    num_taps = len(identity.capture_layer_ids(config)) + config.store.store_last_hidden
    return num_taps * hidden_size * 2 * CODEC_SHARE[config.store.codec]


def num_replicas(config: RunConfig) -> int:
    """Target processes of the run file on this machine; 1 where ``gpus = "all"`` and there is none yet."""
    gpus = config.target.gpus
    if isinstance(gpus, list):
        return len(gpus)
    return config.target.replicas if gpus == "cpu" else max(1, len(visible()))


def why_padded_batches(config: RunConfig) -> str | None:
    """Why capture batches are padded: the run file says so, or what speaks against packing; None when they are packed.

    Raises:
        TargetError: ``[target] batches = "packed"`` and the target cannot be packed.
    """
    from dflash_offline.target import packing_obstacle

    section = config.target
    if section.batches == "padded":
        return '[target] batches = "padded"'
    folder = identity.model_folder(config)
    reason = packing_obstacle(folder, section)
    if reason and section.batches == "packed":
        raise TargetError(f'[target] batches = "packed": the rows of {folder} cannot be packed: {reason}; set batches = "auto"')
    return reason


def make_plan(config: RunConfig, corpus: Corpus, store_path: Path, plan_path: Path) -> CapturePlan:
    """Plan the rows of ``corpus`` that the store does not hold. An existing plan is kept as it is.

    Part numbers go on after the highest in the store and in the plans beside this one. The number of replicas only
    sets how many parts a small corpus is cut into.

    Raises:
        StoreError: the store cannot be read.
    """
    plan_path = Path(plan_path)
    with _locked(plan_path.parent):
        if plan_path.is_file():
            return CapturePlan.load(plan_path)
        if config.store.url is not None:  # another root may have captured into it
            from dflash_offline.store import create_or_open

            create_or_open(store_path, keys.store_identity(config), url=config.store.location(keys.capture_key(config)))
        held = _committed(store_path)
        names, reused = [name for name, _ in held.values()], set()
        hashes = np.ascontiguousarray(corpus.hashes).view("V32").ravel()
        rows = np.sort(np.unique(hashes, return_index=True)[1])  # the first of each set of equal rows
        if held:
            known = [held.get(corpus.hashes[row].tobytes()) for row in rows]
            reused = {found[0] for found in known if found}
            rows = rows[[found is None for found in known]]
        for other in plan_path.parent.glob("*.json"):
            names += [part.name for part in CapturePlan.load(other).parts]
        why_padded = why_padded_batches(config)
        first = 1 + max((int(match[1]) for name in names if (match := _PART_NAME.search(name))), default=-1)
        parts = plan_parts(
            rows,
            np.asarray(corpus.lengths),
            np.asarray(corpus.buckets),
            tokens_per_batch=config.corpus.tokens_per_batch,
            tokens_per_part=max(1, int(config.store.part_bytes / bytes_per_token(config))),
            min_parts=2 * num_replicas(config),
            first_number=first,
            packed=why_padded is None,
        )
        plan = CapturePlan(parts, sorted(reused), statistics_rows(corpus), why_padded is None, why_padded)
        write_json(plan_path, plan.to_json())
        return plan


def plan_parts(
    rows: np.ndarray,
    lengths: np.ndarray,
    buckets: np.ndarray,
    *,
    tokens_per_batch: int,
    tokens_per_part: int,
    min_parts: int,
    first_number: int,
    packed: bool = False,
) -> list[PlannedPart]:
    """Cut rows into batches and batches into parts of nearly equal padded tokens.

    Args:
        rows: row numbers to plan, [n]; ``lengths`` and ``buckets`` are those of the whole corpus.
        tokens_per_part: tokens of a part at the most, padding included, where a batch is not larger.
        min_parts: fewest parts, as long as there are as many batches.
        first_number: number of the first part.
        packed: fill batches by the sum of their rows' lengths instead of the padded size.
    """
    batches: list[np.ndarray] = []
    make_batches = packed_batches if packed else padded_batches
    for bucket in sorted(set(buckets[rows].tolist()), reverse=True):
        members = rows[buckets[rows] == bucket]
        batches += make_batches(members, lengths[members], tokens_per_batch=tokens_per_batch)
    costs = np.array([int(lengths[batch].sum()) if packed else int(lengths[batch[0]]) * len(batch) for batch in batches], dtype=np.int64)
    if not batches:
        return []
    num_parts = min(len(batches), max(min_parts, math.ceil(costs.sum() / tokens_per_part)))
    # batch i goes to the part its middle falls into; parts left empty by one large batch are dropped
    part_of = np.minimum((np.cumsum(costs) - costs / 2) * num_parts // costs.sum(), num_parts - 1).astype(np.int64)
    parts = []
    for number in np.unique(part_of):
        made = [batches[i].tolist() for i in np.flatnonzero(part_of == number)]
        parts.append(PlannedPart(f"part-{first_number + len(parts):05d}", made, sum(int(lengths[batch].sum()) for batch in made)))
    return parts


def statistics_rows(corpus: Corpus) -> list[int]:
    """A few rows by smallest content hash: an even sample that an appended row rarely changes."""
    first = corpus.hashes[:, :8].copy().view(">u8").ravel()
    order = np.argsort(first, kind="stable")
    return sorted(int(i) for i in order[:_STATISTICS_ROWS])


def _committed(store_path: Path) -> dict[bytes, tuple[str, int]]:
    if not Path(store_path).exists():
        return {}
    from dflash_offline import store

    try:
        return store.committed_hashes(store_path)
    except OSError as error:
        raise StoreError(f"{store_path}: cannot be read ({error.strerror or error})") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two corpora planned at once must not give out the same part numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""The drafters of a run file, best first: by acceptance length of the real loop, else by ``tau_replay`` on held-out rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline import keys
from dflash_offline.config import RunConfig
from dflash_offline.layout import Layout
from dflash_offline.manifest import MANIFEST, read_json, read_manifest


@dataclass(frozen=True)
class Ranked:
    """One evaluated drafter.

    Attributes:
        config: the run file as this drafter has it.
        length: acceptance length, mean of the data sets; None without prompts.
        interval: 95 % interval of ``length``.
        replay: ``tau_replay`` on held-out rows.
        export: folder of its export, which need not be there yet.
    """

    config: RunConfig
    length: float | None
    interval: tuple[float, float] | None
    replay: float | None
    export: Path

    @property
    def name(self) -> str:
        return self.config.name

    def figures(self) -> str:
        """In words: ``2.31 (2.10 to 2.50), tau_replay 2.05``."""
        interval = "" if self.interval is None else f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})"
        measured = [] if self.length is None else [f"{self.length:.2f}{interval}"]
        return ", ".join(measured + ([] if self.replay is None else [f"tau_replay {self.replay:.2f}"])) or "nothing measured"


def ranked(config: RunConfig) -> list[Ranked]:
    """Every drafter of the run file whose evaluation is complete, best first; equals in the order of the run file."""
    layout, found = Layout(config.root_dir), []
    for each in config.each_drafter():
        folder = layout.evaluation(keys.evaluate_key(each))
        if not (folder / MANIFEST).is_file():
            continue
        read_manifest(folder, kind="evaluation")
        found.append(_placed(each, read_json(folder / "results.json"), layout.export(keys.export_key(each))))
    return sorted(found, key=lambda one: (-_or_least(one.length), -_or_least(one.replay)))


def is_tied(found: list[Ranked]) -> bool:
    """Whether the best drafter's interval overlaps that of another one: then the order may be chance."""
    best, *others = found
    return best.interval is not None and any(
        other.interval is not None and other.interval[1] >= best.interval[0] and other.interval[0] <= best.interval[1] for other in others
    )


def _or_least(value: float | None) -> float:
    return -math.inf if value is None or not math.isfinite(value) else value


def _placed(config: RunConfig, results: dict[str, Any], export: Path) -> Ranked:
    length = (results.get("overall") or {}).get("acceptance_length")
    replay = (results.get("tau_replay") or {}).get("tau")
    return Ranked(config, length, interval_of_mean(results.get("datasets") or {}), replay, export)


def interval_of_mean(datasets: Mapping[str, Mapping[str, Any]]) -> tuple[float, float] | None:
    """95 % interval of the mean of the data sets' acceptance lengths, from the intervals of each; None where one has none.

    The sets are independent, so the distances of their means from their bounds add as squares.
    """
    if not datasets or any(found.get("interval") is None or found.get("acceptance_length") is None for found in datasets.values()):
        return None
    count = len(datasets)
    mean = sum(found["acceptance_length"] for found in datasets.values()) / count
    below, above = (
        math.sqrt(sum((found["interval"][side] - found["acceptance_length"]) ** 2 for found in datasets.values())) / count
        for side in (0, 1)
    )
    return mean - below, mean + above

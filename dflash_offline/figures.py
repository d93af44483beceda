"""Numbers for people, in a word each, and numbers for JSON, which knows no infinity."""

import math
import time
from collections.abc import Sequence
from typing import Any


def count_text(number: float) -> str:
    """A count in three or four characters and a unit: 812, 9.8K, 1.2M, 3.1B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.{1 if number < 100 * size else 0}f}{unit}"
    return f"{number:.0f}"


def bytes_text(count: float) -> str:
    """12_345_678 -> ``12.3 MB`` (powers of 1000, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """45s, 2m08s, 14m, 1.3h, 2.5d: to the second below ten minutes, in hours up to two days."""
    if seconds < 119.5:
        return f"{seconds:.0f}s"
    if seconds < 599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m{rest:02}s"
    if seconds < 3600:
        return f"{seconds / 60:.0f}m"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f}h"
    return f"{seconds / 86400:.1f}d"


class Laps:
    """What the parts of a start took: ``12.3s (imports 4.0s, kernels 8.3s)``."""

    def __init__(self) -> None:
        self._began = self._ended = time.monotonic()
        self._parts: list[tuple[str, float]] = []

    def end(self, part: str) -> None:
        """Call what was done since the last one, or since the beginning, ``part``."""
        now = time.monotonic()
        self._parts.append((part, now - self._ended))
        self._ended = now

    def __str__(self) -> str:
        return f"{self._ended - self._began:.1f}s ({', '.join(f'{part} {seconds:.1f}s' for part, seconds in self._parts)})"


def finite(value: Any) -> Any:
    """A JSON value in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """``1 sample``, ``2,000 samples``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def first_of(values: Sequence[object], most: int, separator: str = ", ") -> str:
    """``a, b, c and 1,200 more``: the first ``most`` values, and how many there are besides; ``none`` where there is none."""
    shown = separator.join(map(str, values[:most])) or "none"
    return f"{shown} and {len(values) - most:,} more" if len(values) > most else shown

"""Progress files -> the lines at the bottom of a terminal: a bar per stage, one per replica, the loss as a little curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from dflash_offline.figures import bytes_text, count_text, seconds_text
from dflash_offline.progress import UNITS, sum_of_rates

_NAME_WIDTH, _BAR_WIDTH, _CURVE_POINTS = 14, 24, 16


@dataclass(frozen=True)
class Look:
    """The characters drawn with: bar done and left, levels of a curve."""

    done: str
    left: str
    levels: str


UNICODE = Look("\u2501", "\u2500", "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588")
ASCII = Look("#", "-", "_.-=^")


def curve(values: Sequence[float], *, points: int = _CURVE_POINTS, look: Look = UNICODE) -> str:
    """A little curve of characters, lowest to highest value of ``values``: means over equal stretches, the newest last."""
    if not values:
        return ""
    points = min(points, len(values))
    stretches = [values[i * len(values) // points : (i + 1) * len(values) // points] for i in range(points)]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(means), max(means)
    top = len(look.levels) - 1
    return "".join(look.levels[round((mean - low) / (high - low) * top) if high > low else 0] for mean in means)


def bar(done: float | None, total: float | None, *, width: int = _BAR_WIDTH, look: Look = UNICODE) -> Text:
    """A bar; empty while nothing is known."""
    share = min(1.0, max(0.0, done / total)) if total and done is not None else 0.0
    full = int(share * width)
    return Text(look.done * full, style="green").append(look.left * (width - full), style="bright_black")


def stage_lines(
    stage: str,
    states: Mapping[str, Mapping[str, Any]],
    losses: Sequence[float] = (),
    *,
    title: str = "",
    width: int = 100,
    look: Look = UNICODE,
) -> list[Text]:
    """Lines of one stage that runs.

    Args:
        states: progress files of its processes by name, in the order to show.
        losses: of training so far, oldest first.
        title: heads the first line in place of the stage.
        width: of the terminal; no line is longer.
    """
    whole = max(states.values(), key=lambda state: (state["done"] or 0, state["total"] or 0))
    bar_width = _BAR_WIDTH if width >= 80 else max(6, width // 5)
    details = [_counts(stage, whole)]
    if stage == "train":
        details += _training(whole["numbers"], losses, look)
    elif len(states) == 1 and stage != "capture":
        details += [*_rates(whole["numbers"]), str(whole["text"])]
    else:
        details += _rates(sum_of_rates(state["numbers"] for state in states.values()))
    lines = [_line(title or stage, bar(whole["done"], whole["total"], width=bar_width, look=look), details, width=width, style="bold")]
    if stage == "train" and len(states) > 1 and (texts := {str(state["text"]) for state in states.values()}) != {"training"}:
        lines.append(_line("", Text(" " * bar_width), [f"{len(states)} ranks: {', '.join(sorted(texts))}"], width=width))
    if stage in ("capture", "regenerate") and (len(states) > 1 or stage == "capture"):
        for name, state in states.items():
            numbers = state["numbers"]
            inner = bar(numbers.get("part_rows_done"), numbers.get("part_rows"), width=bar_width, look=look)
            queue = [f"writing {numbers['writer_queue']:.0f}/{numbers['writer_queue_limit']:.0f}"] if "writer_queue" in numbers else []
            rate = _rates({key: value for key, value in numbers.items() if key.endswith("_per_s")})
            lines.append(_line(f"  {name}", inner, [str(state["text"]), *rate, *queue], width=width))
    return lines


def _counts(stage: str, state: Mapping[str, Any]) -> str:
    done, total = state["done"], state["total"]
    if done is None:
        return ""
    if UNITS.get(stage) == "bytes":
        return bytes_text(done) + (f" of {bytes_text(total)}" if total is not None else "")
    return f"{done:,}" + (f" of {total:,}" if total is not None else "") + f" {UNITS.get(stage, '')}".rstrip()


def _rates(numbers: Mapping[str, float]) -> list[str]:
    found = []
    for name, value in numbers.items():
        if name.endswith("_bytes_per_s"):
            found.append(f"{name.removesuffix('_bytes_per_s')} {bytes_text(value)}/s")
        elif name.endswith("_per_s"):
            found.append(f"{count_text(value) if value >= 10 else f'{value:.2g}'} {name.removesuffix('_per_s').replace('_', ' ')}/s")
    if "eta_s" in numbers:
        found.append(f"ETA {seconds_text(numbers['eta_s'])}")
    return found


def _training(numbers: Mapping[str, float], losses: Sequence[float], look: Look) -> list[str]:
    found = []
    if "loss" in numbers:
        found.append(f"loss {numbers['loss']:.2f} {curve(losses, look=look)}".rstrip())
    if "tau" in numbers:
        found.append(f"tau {numbers['tau']:.2f}")
    found += _rates({name: numbers[name] for name in ("tokens_per_s", "eta_s") if name in numbers})
    if "wait_share" in numbers:
        found.append(f"wait {numbers['wait_share']:.0%}")
    return found


def _line(name: str, made: Text, details: Sequence[str], *, width: int, style: str = "") -> Text:
    line = Text(f"{name[:_NAME_WIDTH]:{_NAME_WIDTH}} ", style="", no_wrap=True)
    if style:
        line.stylize(style)
    line.append_text(made).append("  " + "  ".join(text for text in details if text))
    line.truncate(width, overflow="ellipsis" if line.cell_len > width else None)
    line.rstrip()
    return line

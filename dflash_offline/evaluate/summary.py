"""Numbers of an evaluation: acceptance length with its interval, accepted tokens per slot, speed, equality.

acceptance length = emitted tokens / verify steps, pooled over a data set; the prefill's token is not counted, tokens
after a stop token are cut. Beside it z-lab's figure: the mean over responses of each response's own mean. The overall
figure is the mean of the data sets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_offline.evaluate.comparison import Comparison
from dflash_offline.evaluate.decoder import Response

BOOTSTRAP_SAMPLES = 2000


def bootstrap_interval(
    tokens: Sequence[int], steps: Sequence[int], *, samples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> list[float] | None:
    """95 % interval of pooled tokens / steps when prompts are drawn anew, with replacement; None without a step or of one prompt.

    Args:
        tokens, steps: totals of each prompt, all its turns together (turns of one prompt are not independent).
    """
    tokens_, steps_ = np.asarray(tokens, dtype=float), np.asarray(steps, dtype=float)
    if steps_.sum() == 0 or len(steps_) < 2:  # one prompt says nothing about others
        return None
    drawn = np.random.default_rng(seed).integers(0, len(steps_), size=(samples, len(steps_)))
    totals = steps_[drawn].sum(1)
    ratios = tokens_[drawn].sum(1)[totals > 0] / totals[totals > 0]
    return [float(value) for value in np.quantile(ratios, [0.025, 0.975])]


def summarise(
    prompts: Sequence[Sequence[Response]],
    plain: Sequence[Sequence[Response]] | None,
    comparisons: Sequence[Comparison],
    *,
    block_size: int,
) -> dict[str, Any]:
    """Results of one data set, as ``results.json`` holds them.

    Args:
        prompts: the loop's responses, turn by turn, of each prompt.
        plain: the target's own, likewise; None when no baseline was run.
        comparisons: one for each response that has a plain one.
    """
    responses = [response for turns in prompts for response in turns]
    tokens = [sum(response.step_tokens for response in turns) for turns in prompts]
    steps = [sum(response.steps for response in turns) for turns in prompts]
    accepted = np.array([count for response in responses for count in response.accepted], dtype=int)
    own_means = [response.step_tokens / response.steps for response in responses if response.steps]
    total_s = sum(response.total_s for response in responses)
    emitted = sum(tokens)
    result: dict[str, Any] = {
        "acceptance_length": _ratio(emitted, sum(steps)),
        "acceptance_length_zlab_mean": float(np.mean(own_means)) if own_means else None,
        "interval": bootstrap_interval(tokens, steps),
        "accepted_per_slot": [float((accepted >= slot).mean()) if len(accepted) else None for slot in range(1, block_size)],
        "prompts": len(prompts),
        "responses": len(responses),
        "tokens": emitted,
        "steps": sum(steps),
        "tokens_per_s": _ratio(emitted, total_s),
        "draft_share": _ratio(sum(response.draft_s for response in responses), total_s),
        "verify_share": _ratio(sum(response.verify_s for response in responses), total_s),
        "baseline_tokens_per_s": None,
        "speedup": None,
        **{
            name: sum(c.outcome == kind for c in comparisons)
            for name, kind in (("identical", "identical"), ("near_ties", "near_tie"), ("different", "different"))
        },
    }
    if plain is not None:
        alone = [response for turns in plain for response in turns]
        seconds = sum(response.total_s for response in alone)
        rate = _ratio(sum(len(response.tokens) - 1 for response in alone), seconds)
        result["baseline_tokens_per_s"] = rate
        result["speedup"] = result["tokens_per_s"] / rate if rate and result["tokens_per_s"] else None
    return result


def overall(datasets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean of the data sets' acceptance lengths and speed-ups; counts are sums."""
    results = list(datasets.values())
    counts = ("prompts", "tokens", "steps", "identical", "near_ties", "different")
    means = ("acceptance_length", "acceptance_length_zlab_mean", "speedup")
    return {name: _mean([result[name] for result in results]) for name in means} | {
        name: sum(result[name] for result in results) for name in counts
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def number(value: float | None, form: str = ".3f") -> str:
    """A figure for a table; ``-`` where there is none."""
    return "-" if value is None else format(value, form)


def span(interval: Sequence[float] | None, form: str = ".3f") -> str:
    """An interval for a table; ``-`` where there is none."""
    return "-" if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"


def table(datasets: dict[str, dict[str, Any]], total: dict[str, Any]) -> list[str]:
    """Lines of the evaluation table for a terminal."""
    rows = [("data set", "accept length", "95 % interval", "z-lab mean", "tokens/s", "alone", "speed-up", "draft", "verify", "as greedy")]
    for name, r in datasets.items():
        checked = r["identical"] + r["near_ties"] + r["different"]
        same = f"{r['identical']} of {checked}" + (f", {r['near_ties']} near-ties" if r["near_ties"] else "") if checked else "not checked"
        speeds = (number(r["tokens_per_s"], ".1f"), number(r["baseline_tokens_per_s"], ".1f"), number(r["speedup"], ".2f"))
        shares = (number(r["draft_share"], ".0%"), number(r["verify_share"], ".0%"))
        lengths = (number(r["acceptance_length"]), span(r["interval"]), number(r["acceptance_length_zlab_mean"]))
        rows.append((name, *lengths, *speeds, *shares, same))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(f"overall acceptance length (mean of the data sets): {number(total['acceptance_length'])}")
    return lines

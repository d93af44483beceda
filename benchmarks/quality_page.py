"""What ``quality.py`` found, as a page: docs/quality.md with its plot docs/quality.svg.

    python benchmarks/quality_page.py            # from benchmarks/results/quality_h200.json

Every figure of the page is read from that file; run it again after each measurement.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODECS = {name: name for name in ("bf16", "lossless", "int8", "int6", "int4")} | {"lossless-fp8": 'lossless, `head_precision = "fp8"`'}


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def interval(values: list[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.3f} to {values[1]:.3f}"


def percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def gain(found: dict[str, Any]) -> str:
    """A ratio and its interval, as per cent more."""
    return f"{percent(found['ratio'])} ({percent(found['interval'][0])} to {percent(found['interval'][1])})"


def by_chance(codecs: dict[str, Any]) -> str:
    """How large that is: no codec's drafter can truly be better than that of exact values."""
    better = [found["over_lossless"]["ratio"] for found in codecs.values() if "over_lossless" in found]
    if not better or max(better) <= 1:
        return ""
    return f"; it is no less than {percent(max(better))}, by which a drafter from inexact values came out above the one from exact ones"


def acceptance(arms: dict[str, Any], comparisons: dict[str, Any]) -> list[str]:
    """Every set: both arms of equal steps, and what they differ by."""
    ours, peer = arms["equal"], arms["specforge"]
    lines = ["## Equal steps and tokens", ""]
    rows = []
    for name, theirs in peer["acceptance_length"].items():
        found = comparisons[name]
        mine = f"{ours['acceptance_length'][name]:.3f} ({interval(ours['interval'][name])})"
        against = f"{theirs:.3f} ({interval(peer['interval'][name])})"
        rows.append([name, str(ours["prompts"][name]), mine, against, gain(found)])
    lines += table(["set", "prompts", "this project", "SpecForge 0.2.0", "ours over theirs"], rows)
    lines += [
        f"{peer['steps']:,} steps over {peer['tokens']:,} context tokens, {peer['anchors']} anchors a conversation, peak learning rate "
        f"{peer['lr']:g}, the same micro-batches. Training took {ours['train_s']:.0f} s here and {peer['train_s']:.0f} s "
        f"there. Accuracy on held-out conversations is {ours['heldout_acc']:.3f} and {peer['heldout_acc']:.3f}. {told_alike(arms)}",
        "",
    ]
    return lines


def told_alike(arms: dict[str, Any]) -> str:
    """How many answers were the target's own to the last token, and what the others were."""
    kinds = ("identical", "near_ties", "different")
    ours, peer = ({kind: sum(arms[name][kind].values()) for kind in kinds} for name in ("equal", "specforge"))
    return (
        f"Of {sum(ours.values())} answers {ours['identical']} (SpecForge's drafter: {peer['identical']}) are the target's own greedy "
        f"answer token by token; {ours['near_ties']} ({peer['near_ties']}) part from it at a near-tie ([what counts as "
        f"one](drafter.md)), {ours['different']} ({peer['different']}) otherwise."
    )


def equal_time(arms: dict[str, Any], comparisons: dict[str, Any]) -> list[str]:
    peer = arms["specforge"]
    equal = any(found["within_its_seconds"] for found in comparisons.values())
    lines = ["## Equal training seconds" if equal else "## Recipes of this project", ""]
    names = list(peer["acceptance_length"])
    rows = [["SpecForge 0.2.0", f"{peer['train_s']:.0f}", f"{peer['steps']:,}", *[f"{peer['acceptance_length'][n]:.3f}" for n in names]]]
    rows[0] += [f"{peer['mean_acceptance_length']:.3f}", "-"]
    for name, found in comparisons.items():
        arm = arms[name]
        row = [f"`{name}`", f"{arm['train_s']:.0f}", f"{arm['steps']:,}", *[f"{arm['acceptance_length'][n]:.3f}" for n in names]]
        rows.append([*row, f"{arm['mean_acceptance_length']:.3f}", gain(found)])
    lines += table(["recipe", "seconds", "steps", *names, "mean", "over SpecForge"], rows)
    for name, found in comparisons.items():
        arm = arms[name]
        if not found["within_its_seconds"]:
            longer, meant = arm["train_s"] - peer["train_s"], arm.get("peer_train_s")
            why = f" (it was given the {meant:.0f} s of an earlier run of SpecForge)" if meant and abs(meant - peer["train_s"]) > 1 else ""
            lines += [f"`{name}` trained {longer:.0f} s longer than SpecForge{why}: no comparison of equal seconds.", ""]
        if early := [point for point in arm["curve"] if point["elapsed_s"] <= peer["train_s"]]:
            reached = f"a tau_replay of {early[-1]['tau_replay']:.3f} after {early[-1]['elapsed_s']:.0f} s"
            lines += [
                f"On held-out conversations `{name}` was at {reached}, SpecForge at {peer['tau_replay_all']:.3f} when it was done.",
                "",
            ]
    for name in comparisons:
        arm = arms[name]
        extras = [f"EMA {arm['ema']}"] * bool(arm["ema"]) + [f"KL {arm.get('kl_weight')}"] * bool(arm.get("kl_weight"))
        words = [f"{arm['epochs']} epochs", f"{arm['anchors']} anchors", f"loss {arm['loss']}", f"schedule {arm['schedule']}", *extras]
        lines.append(f"- `{name}`: {', '.join(words)}, peak learning rate {arm['lr']:g}, {arm['tokens_per_batch']:,} context tokens a step")
    return [*lines, ""]


def codec_table(codecs: dict[str, Any]) -> list[str]:
    """Acceptance length and bytes a token of every codec, and of the head in fp8."""
    rows = []
    for name, title in CODECS.items():
        if found := codecs.get(name):
            over = gain(found["over_lossless"]) if "over_lossless" in found and name != "lossless" else "-"
            figures = [f"{found['bytes_per_token']:,.0f}", f"{found['acceptance_length']:.3f}", over, f"{found['heldout_acc']:.4f}"]
        else:
            figures = ["not measured", "-", "-", "-"]
        rows.append([title, *figures])
    return table(["codec", "bytes a token", "acceptance length", "over lossless", "held-out accuracy"], rows)


def replay(arms: dict[str, Any]) -> list[str]:
    rows = []
    for name, arm in arms.items():
        if arm.get("simulated_tau") is None:
            continue
        seen, common = arm["tau_rows"], arm["tau_rows"]["common"]
        row = [name, str(seen["reproduced"]), f"{arm['simulated_tau']:.3f}", f"{arm['real_tau']:.3f}", f"{arm['tau_difference']:.1%}"]
        rows.append([*row, f"{common['replay']:.3f}", f"{common['loop']:.3f}", f"{common['difference']:.1%}"])
    head = ["drafter", "answers", "tau_replay", "real loop", "apart", "tau_replay, to the first other token", "real loop", "apart"]
    return table(head, rows)


def page(result: dict[str, Any]) -> str:
    """The page as Markdown."""
    arms = result["arms"]
    lines = [
        "# Do the drafters accept?",
        "",
        f"Target SmolLM2-135M-Instruct, its own answers to 11,836 prompts, {result['device']}. Both projects train from the same store and "
        "are decoded by the same loop, greedily. Acceptance length: emitted tokens per verify step, pooled over a set, with the 95 % "
        f"interval when prompts are drawn anew. One seed each: what training runs that are alike differ by is not in the intervals"
        f"{by_chance(result.get('codecs', {}))}. Written by `benchmarks/quality_page.py` from `benchmarks/results/quality_h200.json`.",
        "",
    ]
    if "equal_over_specforge" in result:
        lines += acceptance(arms, result["equal_over_specforge"])
    if "equal_time_over_specforge" in result:
        lines += equal_time(arms, result["equal_time_over_specforge"])
    if codecs := result.get("codecs"):
        steps = next(iter(codecs.values()))["steps"]
        lines += ["## Codecs of the store", "", f"A short run of {steps:,} steps each, the same rows and seed, mean of the sets.", ""]
        lines += codec_table(codecs)
    lines += ["## tau_replay and the real loop", "", "On held-out answers that the target writes again, token by token.", "", *replay(arms)]
    if curves(arms):
        lines += ["## Learning curve", "", "![acceptance length against context tokens trained](quality.svg)", ""]
    return "\n".join(lines)


def curves(arms: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found = {name: [point for point in arm.get("curve", []) if point["tokens"] and point["tau_replay"]] for name, arm in arms.items()}
    return {name: points for name, points in found.items() if len(points) > 1 and not name.startswith("codec-")}


def plot(arms: dict[str, Any]) -> str:
    """Acceptance on held-out conversations against context tokens trained, an SVG element."""
    from matplotlib.figure import Figure

    from dflash_offline.report.plots import to_svg

    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves(arms).items():
        tokens = [point["tokens"] / 1e6 for point in points]
        low, high = ([(point["tau_replay_interval"] or [point["tau_replay"]] * 2)[end] for point in points] for end in (0, 1))
        (line,) = axes.plot(tokens, [point["tau_replay"] for point in points], marker="o", markersize=3, linewidth=1.4, label=name)
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("context tokens trained, millions")
    axes.set_ylabel("acceptance length (tau_replay)")
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.legend(frameon=False)
    return to_svg(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "quality_h200.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    result = json.loads(options.results.read_text(encoding="utf-8"))
    (options.docs / "quality.md").write_text(page(result), encoding="utf-8")
    if curves(result["arms"]):
        (options.docs / "quality.svg").write_text(plot(result["arms"]) + "\n", encoding="utf-8")
    print("\n".join(codec_table(result.get("codecs", {}))))


if __name__ == "__main__":
    main()

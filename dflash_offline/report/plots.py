"""Curves of a run as SVG. Text stays text, so that pages are searchable and small."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_WIDTH_IN, _HEIGHT_IN = 7.0, 2.8
_BLUE, _ORANGE = "#2458a6", "#c4671a"


def _figure() -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_svg(figure: Figure) -> str:
    """A figure as an ``<svg>`` element: no XML head, no date, the same text for the same data."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dflash_offline"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _curve(steps: list[float], values: list[float], *, label: str, held: tuple[list[float], list[float]] | None = None) -> str:
    figure = _figure()
    axes = figure.add_subplot()
    marker = "o" if len(steps) < 30 else None
    axes.plot(steps, values, color=_BLUE, linewidth=1.4, marker=marker, markersize=3, label="training")
    if held and held[0]:
        axes.plot(*held, color=_ORANGE, marker="s", markersize=4, linewidth=1.4, label="held out")
        axes.legend(frameon=False)
    _finish(axes, x="step", y=label)
    return to_svg(figure)


def _finish(axes: Any, *, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def training_curves(metrics: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> dict[str, str]:
    """``loss``, ``acceptance`` and ``throughput`` over the steps; those whose numbers are there."""
    plots = {}
    wanted: list[tuple[str, str, str, Callable[[dict[str, Any]], Any]]] = [
        ("loss", "loss", "cross-entropy (nats)", lambda row: row["heldout"].get("loss")),
        ("acceptance", "tau", "tau over anchors (streak + 1)", lambda row: row["heldout"].get("tau")),
        ("throughput", "tokens_per_s", "context tokens/s", lambda row: None),
    ]
    for name, field, label, held_value in wanted:
        rows = [row for row in metrics if isinstance(row.get(field), int | float)]
        held = [(row["step"], held_value(row)) for row in heldout if held_value(row) is not None]
        if rows:
            plots[name] = _curve([row["step"] for row in rows], [row[field] for row in rows], label=label, held=_unzip(held))
    return plots


def learning_curve(metrics: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> str | None:
    """``tau_replay`` with its 95 % interval over the context tokens trained; None without two evaluations.

    An evaluation's tokens are those of the last logged step up to it.
    """
    logged = sorted((row["step"], row["tokens"]) for row in metrics if isinstance(row.get("tokens"), int | float))
    points = []
    for row in heldout:
        tokens, found = max((at for step, at in logged if step <= row["step"]), default=None), row["heldout"]
        if tokens is not None and isinstance(found.get("tau_replay"), int | float):
            points.append((tokens, found["tau_replay"], *(found.get("tau_replay_interval") or [found["tau_replay"]] * 2)))
    if len(points) < 2:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    tokens, replayed, low, high = map(list, zip(*sorted(points), strict=True))
    axes.fill_between(tokens, low, high, color=_ORANGE, alpha=0.2, linewidth=0, label="95 % interval")
    axes.plot(tokens, replayed, color=_ORANGE, marker="s", markersize=4, linewidth=1.4, label="held out")
    axes.legend(frameon=False)
    _finish(axes, x="context tokens trained", y="acceptance length (tau_replay)")
    return to_svg(figure)


def _unzip(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def slots(per_slot: dict[str, list[float]], *, label: str) -> str:
    """A value for each slot of a block, one line per data set. Slot 0 is the known token, so slots count from 1."""
    figure = _figure()
    axes = figure.add_subplot()
    for name, values in per_slot.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, linewidth=1.4, label=name)
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    _finish(axes, x="slot", y=label)
    return to_svg(figure)


def store_figure(statistics: dict[str, Any], path: Path) -> None:
    """Norms of the tapped layers and how alike they are, as a file (``dflash-offline stats --plot``)."""
    figure = _figure()
    norms, alike = figure.subplots(1, 2)
    layers = [str(row["layer_id"]) for row in statistics["layers"]]
    for name in ("min", "mean", "max"):
        norms.plot(layers, [row["rms"][name] for row in statistics["layers"]], marker="o", markersize=3, label=name)
    norms.set_yscale("log")
    norms.legend(frameon=False)
    _finish(norms, x="layer", y="RMS of a token's vector")
    image = alike.imshow(statistics["similarity"], vmin=0, vmax=1, cmap="viridis")
    alike.set_xticks(range(len(layers)), layers)
    alike.set_yticks(range(len(layers)), layers)
    alike.set_title("mean cosine between layers", fontsize=9)
    figure.colorbar(image, ax=alike)
    figure.savefig(path)

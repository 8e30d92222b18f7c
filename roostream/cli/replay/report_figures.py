"""Figures of a replay's report as SVG. Imported only for a page, because matplotlib is large."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from roostream.errors import printable

_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "roostream", "text.parse_math": False}
_MAX_BARS = 40


def figures_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Heading → SVG: the learning curve, metrics by day if there are several days, and feature coverage."""
    found = {"Learning curve": _curve(report)}
    if len(report["metrics"]["by_day"]) > 1:
        found["By day"] = _days(report)
    if report["log"]["features"]:
        found["Share of rows with a feature"] = _coverage(report["log"]["features"])
    return to_svg(found)


def to_svg(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Heading → SVG; equal figures give equal bytes."""
    with matplotlib.rc_context(_STYLE):
        return {heading: _svg(figure) for heading, figure in figures.items()}


def _curve(report: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    points = report["metrics"]["curve"]
    for axes, name in zip(figure.subplots(1, 2), ("ne", "request_auc"), strict=True):
        _line(axes, [p["after"] for p in points], [p[name] for p in points], "model")
        for k, (baseline, both) in enumerate(report["baselines"].items()):
            if both["overall"][name] is not None:
                axes.axhline(
                    both["overall"][name],
                    linestyle="--",
                    linewidth=0.8,
                    color=f"C{k + 1}",
                    label=f"by {baseline} alone",
                )
        axes.set(xlabel="requests", title=name.replace("_", " "))
        axes.legend(fontsize="small")
    return figure


def _days(report: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    days = report["metrics"]["by_day"]
    for axes, name in zip(figure.subplots(1, 2), ("ne", "request_auc"), strict=True):
        _line(axes, list(days), [m[name] for m in days.values()], "model")
        axes.set(title=name.replace("_", " "))
        axes.tick_params("x", rotation=60, labelsize="small")
    return figure


def _coverage(features: Mapping[str, Mapping[str, Any]]) -> Figure:
    shares = sorted((f["share"] or 0.0, printable(name)) for name, f in features.items())[:_MAX_BARS]
    figure = Figure(figsize=(9, 0.6 + 0.25 * len(shares)), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for _, name in shares], [share for share, _ in shares])
    axes.set(xlim=(0, 1))
    return figure


def _line(axes: Axes, x: list[Any], y: list[float | None], label: str) -> None:
    axes.plot(x, [float("nan") if v is None else v for v in y], marker=".", label=label)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]

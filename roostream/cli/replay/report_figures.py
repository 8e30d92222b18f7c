"""Figures of the pages of replays and warehouses as SVG. Imported only for a page: matplotlib is large."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from roostream.errors import printable
from trainer.monitoring.verdict import WORDS

_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "roostream", "text.parse_math": False}
_MAX_BARS, _MAX_LINES = 40, 12
ValuesByDay = Mapping[str, Mapping[str, Mapping[str, float | None]]]


def figures_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Heading → SVG: the learning curve, the difference to baselines, metrics by day if there are several
    days, and feature coverage."""
    found = {"Learning curve": _curve(report)}
    if any(window["ne"]["baselines"] for window in report["verdict"]["windows"]):
        found["Model minus baselines, by tenths of the log"] = _differences(report["verdict"])
    if len(report["metrics"]["by_day"]) > 1:
        found["By day"] = _days(report)
    if report["log"]["features"]:
        shares = {name: f["share"] or 0.0 for name, f in report["log"]["features"].items()}
        found["Share of rows with a feature"] = _bars(dict(sorted(shares.items(), key=lambda item: item[1])))
    return _to_svg(found)


def figures_of_table(report: Mapping[str, Any]) -> dict[str, str]:
    """Heading → SVG: bytes by column, coverage, list lengths, and what deduplication saves."""
    return _to_svg(dict(_table_figures(report)))


def _table_figures(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    days = report["days"]
    candidates = max(report["candidates"], 1)
    stored = {name: entry["stored"] / candidates for name, entry in report["columns"].items()}
    yield "Bytes a candidate, by column", _bars(stored)
    changing = _max_changing(days, "coverage")
    if len(days) > 1 and changing:
        yield "Coverage by day of the features that change most", _lines(days, "coverage", changing)
    last = days[max(days)] if days else {}
    yield "Coverage on the last day", _bars({name: f["coverage"] or 0.0 for name, f in last.items()})
    if lists := [name for name, entry in last.items() if entry.get("length") is not None]:
        yield "List lengths by day", _lines(days, "length", lists[:_MAX_LINES])
    if "clustered" in report["duplicates"]["arrangements"]:
        clustered = report["duplicates"]["arrangements"]["clustered"]["features"]
        if clustered:
            saved = {name: figures["partial"] for name, figures in clustered.items()}
            yield "Reduction of entries by partial deduplication in a batch", _bars(saved)


def _max_changing(days: ValuesByDay, key: str) -> list[str]:
    spans = {}
    for name in next(iter(days.values()), {}):
        found = [
            value for features in days.values() if (value := features.get(name, {}).get(key)) is not None
        ]
        spans[name] = max(found, default=0.0) - min(found, default=0.0)
    return sorted(spans, key=lambda name: -spans[name])[:_MAX_LINES]


def _to_svg(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Equal figures give equal bytes."""
    out = {}
    with matplotlib.rc_context(_STYLE):
        for heading, figure in figures.items():
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            out[heading] = "<svg" + file.getvalue().partition("<svg")[2]
    return out


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


def _differences(verdict: Mapping[str, Any]) -> Figure:
    """With intervals; above the line, or below it for NE, the model is better."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (metric, word) in zip(figure.subplots(1, 2), WORDS.items(), strict=True):
        windows = [w for w in verdict["windows"] if w[metric]["baselines"]]
        for name in windows[0][metric]["baselines"] if windows else ():
            points = [w[metric]["baselines"][name] for w in windows]
            errors = [p["high"] - p["difference"] for p in points]
            ends = [w["last_request"] for w in windows]
            axes.errorbar(ends, [p["difference"] for p in points], errors, capsize=2, label=f"minus {name}")
        axes.axhline(0.0, linewidth=0.8, color="black")
        axes.set(xlabel="requests", title=word)
        if windows:
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


def _bars(values: Mapping[str, float]) -> Figure:
    """The first bars, in order."""
    pairs = list(values.items())[:_MAX_BARS][::-1]
    figure = Figure(figsize=(9, 0.8 + 0.25 * len(pairs)), layout="constrained")
    figure.subplots().barh([printable(name) for name, _ in pairs], [value for _, value in pairs])
    return figure


def _lines(days: ValuesByDay, key: str, names: Sequence[str]) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for name in names:
        values = [features.get(name, {}).get(key) for features in days.values()]
        _line(axes, list(days), values, printable(name))
    axes.tick_params("x", rotation=60, labelsize="small")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _line(axes: Axes, x: list[Any], y: list[float | None], label: str) -> None:
    axes.plot(x, [float("nan") if v is None else v for v in y], marker=".", label=label)

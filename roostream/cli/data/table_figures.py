"""Figures of a warehouse report as SVG. Imported only for a page, because matplotlib is large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from roostream.cli.replay.report_figures import to_svg
from roostream.errors import printable

_MAX_BARS, _MAX_LINES = 40, 12


def figures_of_table(report: Mapping[str, Any]) -> dict[str, str]:
    """Heading → SVG."""
    return to_svg(dict(_figures(report)))


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    columns, days = report["columns"], report["days"]
    stored = {
        name: entry["stored"] / max(report["candidates"], 1)
        for name, entry in list(columns.items())[:_MAX_BARS]
    }
    yield "Bytes a candidate, by column", _bars(stored)
    changing = _max_changing(days, "coverage")
    if len(days) > 1 and changing:
        yield "Coverage by day of the features that change most", _lines(days, "coverage", changing)
    last = days[max(days)] if days else {}
    yield (
        "Coverage on the last day",
        _bars({name: entry["coverage"] or 0.0 for name, entry in list(last.items())[:_MAX_BARS]}),
    )
    if lists := [name for name, entry in last.items() if entry.get("length") is not None]:
        yield "List lengths by day", _lines(days, "length", lists[:_MAX_LINES])
    clustered = report["duplicates"]["arrangements"].get("clustered", {"features": {}})["features"]
    if clustered:
        yield (
            "Reduction of entries by partial deduplication in a batch",
            _bars({name: of["partial"] for name, of in list(clustered.items())[:_MAX_BARS]}),
        )


def _max_changing(days: Mapping[str, Mapping[str, Mapping[str, float | None]]], key: str) -> list[str]:
    spans = {}
    for name in next(iter(days.values()), {}):
        found = [
            value for features in days.values() if (value := features.get(name, {}).get(key)) is not None
        ]
        spans[name] = max(found, default=0.0) - min(found, default=0.0)
    return sorted(spans, key=lambda name: -spans[name])[:_MAX_LINES]


def _bars(values: Mapping[str, float]) -> Figure:
    figure = Figure(figsize=(9, 0.8 + 0.25 * len(values)), layout="constrained")
    axes = figure.subplots()
    pairs = list(values.items())[::-1]
    axes.barh([printable(name) for name, _ in pairs], [value for _, value in pairs])
    return figure


def _lines(
    days: Mapping[str, Mapping[str, Mapping[str, float | None]]], key: str, names: Sequence[str]
) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    for name in names:
        values = [features.get(name, {}).get(key) for features in days.values()]
        axes.plot(
            list(days),
            [float("nan") if value is None else value for value in values],
            marker=".",
            label=printable(name),
        )
    axes.tick_params("x", rotation=60, labelsize="small")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure

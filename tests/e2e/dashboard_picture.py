"""Draw a dashboard from the answers of a real Prometheus: `python -m tests.e2e.dashboard_picture URL` writes
docs/overview-dashboard.png.

The panels are placed as in Grafana but drawn by matplotlib, so colors and fonts differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 24  # columns of Grafana's grid
POINTS = 240  # points of a line
COLORS = {"green": "#56a64b", "orange": "#e08400", "red": "#d10e5c"}
MAX_BYTES = 300_000

Series = list[tuple[str, list[tuple[float, float]]]]
"""(legend, [(time in s, value), ...]) of each line; the oldest value comes first."""


def main() -> None:
    """Write the picture.

    Raises:
        OSError: there is no Prometheus at the URL, or it rejects a query.
        SystemExit: the picture is too large for a repository.
    """
    parser = argparse.ArgumentParser(description="Draw a dashboard by its own queries.")
    parser.add_argument("url", help="address of a Prometheus that scrapes a deployment")
    parser.add_argument("--minutes", type=float, default=60, help="time that the lines cover, until now")
    parser.add_argument("--dashboard", default="overview", help="a file of infra/dashboards, without .json")
    arguments = parser.parse_args()
    dashboard = json.loads((ROOT / "infra/dashboards" / f"{arguments.dashboard}.json").read_text())
    picture = ROOT / "docs" / f"{arguments.dashboard}-dashboard.png"
    draw(dashboard, arguments.url, arguments.minutes * 60).savefig(picture, dpi=90)
    if picture.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{picture}: expected at most {MAX_BYTES} bytes, got {picture.stat().st_size}")


def draw(dashboard: dict[str, Any], url: str, seconds: float) -> Figure:
    """Draw the panels with the present answers to their queries. Lines cover the last `seconds`."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    mpl.rcParams.update({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(15, rows * 0.3), facecolor="white")
    for panel in dashboard["panels"]:
        grid_position = panel["gridPos"]
        left, bottom = grid_position["x"] / COLUMNS, 1 - (grid_position["y"] + grid_position["h"]) / rows
        width, height = grid_position["w"] / COLUMNS, grid_position["h"] / rows
        margin = 0.06 if panel["type"] == "bargauge" else 0.03  # labels stand to the left of bars
        inside = (left + margin, bottom + 0.22 * height, width - margin - 0.01, 0.62 * height)
        axes = figure.add_axes(inside)
        axes.set_title(panel["title"], fontsize=8, fontweight="bold", loc="left")
        is_now = panel["type"] != "timeseries"
        series = [
            line for target in panel["targets"] for line in _query(url, target, 0 if is_now else seconds)
        ]
        if not series:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="gray")
            axes.axis("off")
            continue
        {"stat": _boxes, "table": _table, "bargauge": _bars, "timeseries": _lines}[panel["type"]](
            axes, series, panel["fieldConfig"]["defaults"]
        )
    return figure


def _query(url: str, target: dict[str, str], seconds: float) -> Series:
    """The answer to a query over the last `seconds`, or for now if 0."""
    now_s = time.time()
    step_s = max(seconds / POINTS, 1.0)
    parameters = {"query": target["expr"].replace("$namespace", ".*")}
    parameters |= {"start": str(now_s - seconds), "end": str(now_s), "step": str(step_s)} if seconds else {}
    kind = "query_range" if seconds else "query"
    with urllib.request.urlopen(f"{url}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}") as answer:
        found = json.load(answer)["data"]["result"]
    out = []
    for result in found:
        legend = target.get("legendFormat", "")
        for name, value in result["metric"].items():
            legend = legend.replace(f"{{{{{name}}}}}", value)
        values = result["values"] if seconds else [result["value"]]
        out.append((legend, [(at, float(value)) for at, value in values]))
    return sorted(out)


def _color(value: float, settings: dict[str, Any]) -> str:
    steps = settings["thresholds"]["steps"]
    return next(COLORS[s["color"]] for s in reversed(steps) if s["value"] is None or value >= s["value"])


def _text(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "bytes":
        power = next((p for p in (3, 2, 1) if abs(value) >= 1024**p), 0)
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    return f"{value:.3g}{' s' if unit == 's' else ''}"


def _boxes(axes: Axes, series: Series, settings: dict[str, Any]) -> None:
    columns = (len(series) + 1) // 2
    for number, (legend, points) in enumerate(series):
        x, y = number % columns, 1 - number // columns
        axes.add_patch(Rectangle((x, y), 0.95, 0.9, color=_color(points[-1][1], settings), linewidth=0))
        value = _text(points[-1][1], settings["unit"])
        axes.text(x + 0.47, y + 0.45, f"{legend}\n{value}", ha="center", va="center", color="white")
    axes.set_xlim(0, columns)
    axes.set_ylim(0, 2)
    axes.axis("off")


def _table(axes: Axes, series: Series, settings: dict[str, Any]) -> None:
    for number, (legend, points) in enumerate(series):
        axes.text(0, 0.95 - 0.1 * number, f"{points[-1][1]:g}  {legend}", va="top")
    axes.axis("off")


def _bars(axes: Axes, series: Series, settings: dict[str, Any]) -> None:
    values = [points[-1][1] for _, points in series]
    positions = range(len(series))
    bars = axes.barh(positions, values, color=[_color(value, settings) for value in values])
    axes.bar_label(bars, [_text(value, settings["unit"]) for value in values], padding=3)
    axes.set_yticks(positions, [legend for legend, _ in series])
    axes.margins(x=0.1)


def _lines(axes: Axes, series: Series, settings: dict[str, Any]) -> None:
    end_s = max(points[-1][0] for _, points in series)
    steps_s = [after[0] - before[0] for _, points in series for before, after in itertools.pairwise(points)]
    for legend, points in series:
        minutes, values = [(points[0][0] - end_s) / 60], [points[0][1]]
        for before, after in itertools.pairwise(points):
            if after[0] - before[0] > 1.5 * min(steps_s):  # a gap stays one, as in Grafana
                minutes, values = [*minutes, math.nan], [*values, math.nan]
            minutes, values = [*minutes, (after[0] - end_s) / 60], [*values, after[1]]
        axes.plot(minutes, values, label=legend, linewidth=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value, settings["unit"])))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=6, columnspacing=1, frameon=False
    )


if __name__ == "__main__":
    main()

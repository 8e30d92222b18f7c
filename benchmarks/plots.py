"""Plots of the results in docs/benchmarks/json, as SVG.

`make docs` adds them to the benchmark summary. `python -m benchmarks.plots` writes the one in the README.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

from benchmarks.harness.subject_process import ROOT

RESULTS = ROOT / "docs" / "benchmarks" / "json"
README_PLOT = ROOT / "docs" / "requests-against-impressions.svg"

_OURS, _PEER, _OTHER, _LIMIT, _PAPER = "#2563eb", "#d97706", "#7c3aed", "#6b7280", "#16a34a"
_STAGES = ("#93c5fd", "#60a5fa", "#2563eb", "#1e3a8a", "#7c3aed", "#d97706")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "roostream",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
# Speed-ups that the paper reports on GPUs, at 4 to 7 candidates a request.
_PAPER_SPEED_UP = {"retrieval": (1.48, 6.7), "early": (2.25, 3.66), "late": (1.32, 2.0)}
_STAGE_NAMES = {"retrieval": "retrieval", "early": "early-stage ranking", "late": "late-stage ranking"}

Result = Mapping[str, Any]


def load(name: str, folder: Path = RESULTS) -> Result:
    """The result in NAME.json."""
    document: Result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return document


def basis(*results: Result) -> str:
    """One line for the foot of a plot: when it was taken, and whether other work ran on the machine."""
    parts = []
    for result in results:
        here = result["machine"]
        busy = f"MACHINE BUSY, load {here['load_before']}" if here["busy"] else "machine quiet"
        runs = f"{result['runs']} runs" if result.get("runs", 1) > 1 else "1 run"
        parts.append(f"{result['taken']}, {here['cores']} cores, {runs}, {busy}")
    return "; ".join(dict.fromkeys(parts))


def _row(result: Result, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in result["rows"] if row["name"] == name)
    return found


def _subjects(row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {s["name"]: s for s in row["subjects"] if "wall_us" in s}


def _cost_us(row: Mapping[str, Any], subject: Mapping[str, Any], end: str = "median") -> float:
    return float(subject[f"{row['clock']}_us"][end])


def _figure(subject: Mapping[str, Any], name: str) -> float:
    return float(subject["figures"][name]["median"])


def _axes(
    columns: int = 1, height: float = 3.4, sharey: bool = False, width: float = 7.6
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, sharey=sharey)[0])


def _finish(figure: Figure, *results: Result) -> Figure:
    """Plain numbers on logarithmic axes, and the basis at the foot."""
    for ax in figure.axes:
        for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
            if scale == "log" and isinstance(axis.get_major_formatter(), LogFormatter):
                axis.set_major_formatter(
                    FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
                )
    figure.supxlabel(basis(*results), fontsize=8, color=_LIMIT, x=0.01, ha="left")
    return figure


def requests_against_impressions() -> Figure:
    """Speed-up of training on requests over training on impressions, with its bound and the paper's range."""
    result = load("roo-vs-expanded")
    figure, axes = _axes(3, 3.6, width=8.6)
    for ax, (kind, title) in zip(axes, _STAGE_NAMES.items(), strict=True):
        at, ours, low, high, bound = [], [], [], [], []
        for row in result["rows"]:
            if not row["name"].startswith(f"{kind}, ") or "requests" not in _subjects(row):
                continue
            ratio = next((r["times_as_fast"] for r in row["ratios"] if r["to"] == "impressions"), None)
            if ratio is None:
                continue
            figures = _subjects(row)["requests"]["figures"]
            at.append(figures["impressions a request"]["median"])
            ours.append(ratio["median"])
            low.append(ratio["median"] - ratio["least"])
            high.append(ratio["most"] - ratio["median"])
            bound.append(row.get("figures", {}).get("bound K(a+b)/(a+Kb)", {"median": 1.0})["median"])
        order = sorted(range(len(at)), key=at.__getitem__)
        at, ours, low, high, bound = ([xs[i] for i in order] for xs in (at, ours, low, high, bound))
        ax.plot(at, bound, "--", color=_LIMIT, label="bound (measured costs)")
        ax.errorbar(at, ours, [low, high], fmt="o-", color=_OURS, label="Roostream, CPU", capsize=2)
        least, most = _PAPER_SPEED_UP[kind]
        ax.fill_between([4, 7], least, most, color=_PAPER, alpha=0.35, lw=0, label="paper, GPUs")
        ax.set(title=title, xscale="log", yscale="log", xlabel="candidates per request")
        ax.set_xticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
        ax.set_yticks([1, 2, 5, 10, 20], ["1×", "2×", "5×", "10×", "20×"])
        ax.minorticks_off()
        ax.set_ylim(0.8, 40)
    axes[0].set_ylabel("speed-up over impressions")
    axes[0].legend(loc="upper left")
    return _finish(figure, result)


def latency_at_rates() -> Figure:
    """Latency of rank requests at half of what each server can answer, and at all of it."""
    result = load("serving-e2e")
    figure, (ax,) = _axes()
    colors = (_OURS, _PEER, _LIMIT, _OTHER)
    names = list(_subjects(result["rows"][0]))
    for name, color in zip(names, colors, strict=False):
        points = []
        for row in result["rows"][1:]:  # the first row has one connection and no fixed rate
            subject = _subjects(row).get(name)
            if subject:
                points.append(
                    tuple(
                        _figure(subject, f)
                        for f in ("asked a second", "p50 of 200, ms", "p99 of 200, ms", "late or failed %")
                    )
                )
        points.sort()
        rate, p50, p99, failed = zip(*points, strict=True)
        ax.plot(rate, p99, "o-", color=color, label=f"{name.replace('ours', 'Roostream')}: p99")
        ax.plot(rate, p50, "o:", color=color, alpha=0.7)
        for x, y, share in zip(rate, p99, failed, strict=True):
            if share > 1:
                ax.annotate(
                    f"{share:.0f} % late or failed", (x, y), (6, -3), textcoords="offset points", fontsize=8
                )
    ax.set(
        yscale="log",
        xlabel="requests per second asked, 50 candidates each",
        ylabel="ms (solid: p99, dotted: p50)",
    )
    ax.margins(x=0.12)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return _finish(figure, result)


def live_serving() -> Figure:
    """Requests that a CPU second of serving answers inside a running stack, by open connections."""
    result = load("serving-live")
    figure, (ax,) = _axes(height=3.2)
    rows = [row for row in result["rows"] if "connection" in row["name"]]
    connections = [int(re.search(r"(\d+) connection", row["name"])[1]) for row in rows]  # type: ignore[index]
    for name, color in zip(_subjects(rows[0]), (_OURS, _PEER, _OTHER), strict=False):
        rates = [1e6 / _cost_us(row, _subjects(row)[name]) for row in rows]
        ax.plot(connections, rates, "o-", color=color, label=name)
        below = name == "the stack, JSON"
        for x, y in zip(connections, rates, strict=True):
            offset = (0, -12 if below else 5)
            ax.annotate(f"{y:.0f}", (x, y), offset, textcoords="offset points", fontsize=8, ha="center")
    ax.set(
        xscale="log", xlabel="connections with one request in flight each", ylabel="requests per CPU second"
    )
    ax.set_xticks(connections)
    ax.margins(0.08, 0.15)
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return _finish(figure, result)


def overload() -> Figure:
    """Answers in time against offered load."""
    result = load("serving-overload")
    row = result["rows"][0]
    found = sorted(
        (_figure(s, "asked a second"), 1e6 / _cost_us(row, s), _figure(s, "p99 of 200, ms"))
        for s in _subjects(row).values()
    )
    asked, answered, p99 = zip(*found, strict=True)
    figure, (ax,) = _axes(height=3.0)
    ax.plot(asked, answered, "o-", color=_OURS, label="answered within 1 s")
    ax.plot(asked, asked, "--", color=_LIMIT, label="asked")
    for x, y, ms in zip(asked, answered, p99, strict=True):
        ax.annotate(f"p99 {ms:.0f} ms", (x, y), (4, -12), textcoords="offset points", fontsize=8)
    ax.set(xlabel="requests per second asked", ylabel="requests per second", ylim=(0, 1.4 * max(answered)))
    ax.legend(loc="upper left")
    return _finish(figure, result)


def rows_per_second() -> Figure:
    """Rows read and updated per second, beside a peer and a limit."""
    result = load("ps-pull-push")
    bars = []
    for size in ("10.4 k", "104 k"):
        for verb, what in (("pull", "read"), ("push and update", "update")):
            row = _row(result, f"{verb} {size} ids of 26 tables")
            for s in _subjects(row).values():
                bars.append((f"{what} {size}: {s['name']}", s["role"], 1 / _cost_us(row, s)))
        for verb, what in (("pull", "read"), ("push", "update")):
            row = _row(result, f"{verb} {size} ids of 26 tables, over loopback")
            s = _subjects(row)["shard over loopback"]
            bars.append((f"{what} {size}: shard over loopback", "ours", 1 / _cost_us(row, s)))
    return _bars(bars, "million rows per second", result)


def _bars(bars: Sequence[tuple[str, str, float]], label: str, *results: Result) -> Figure:
    """Horizontal bars: (name, role, value)."""
    figure, (ax,) = _axes(height=0.55 + 0.27 * len(bars))
    colors = {"ours": _OURS, "stage": _OTHER, "peer": _PEER, "before": _PEER}
    values = [value for _, _, value in bars]
    ax.barh(range(len(bars)), values, color=[colors.get(role, _LIMIT) for _, role, _ in bars], height=0.7)
    ax.set_yticks(
        range(len(bars)),
        [f"{name} ({role})" if role in ("peer", "limit") else name for name, role, _ in bars],
        fontsize=9,
    )
    for place, value in enumerate(values):
        ax.annotate(
            f"{value:.3g}", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
    ax.invert_yaxis()
    ax.set_xlabel(label, loc="right")
    ax.margins(x=0.1)
    return _finish(figure, *results)


def steps_against_torchrec() -> Figure:
    """CPU time of a training step of the same DLRM."""
    result = load("train-vs-torchrec")
    bars = [
        (
            f"{row['name'].split(', ')[1].split(' of')[0]} per request: {s['name']}",
            s["role"],
            _figure(s, "CPU ms a step"),
        )
        for row in result["rows"]
        for s in _subjects(row).values()
    ]
    return _bars(bars, "CPU ms per step of 2,560 impressions (shorter is better)", result)


def commit_cost() -> Figure:
    """Duration of a commit of a running stack and the pause of training, against changed rows."""
    result = load("commit")
    rows, whole, paused = [], [], []
    for row in result["rows"]:
        subject = _subjects(row).get("every row changed")
        if subject:
            rows.append(_figure(subject, "rows"))
            whole.append(_cost_us(row, subject) / 1e3)
            paused.append(_figure(subject, "training paused, ms"))
    figure, (ax,) = _axes(height=3.0)
    ax.plot(rows, whole, "o-", color=_PEER, label="whole commit, beside training")
    ax.plot(rows, paused, "o-", color=_OURS, label="training paused")
    ax.axhline(50, ls="--", color=_LIMIT)
    ax.annotate("goal for the pause: 50 ms", (rows[0], 50), (0, 4), textcoords="offset points", fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="rows changed since the last commit", ylabel="ms")
    ax.legend(loc="upper left")
    return _finish(figure, result)


def recovery_timeline() -> Figure:
    """From kill -9 to the next trained step, by stage."""
    result = load("recovery")
    row = result["rows"][0]
    steps = ("a new process, ms", "it answers, ms", "restored, ms", "next step, ms")
    labels = ("process started again", "imports done, it answers", "state restored", "next step trained")
    killed = [s for s in _subjects(row).values() if s["role"] != "limit"]
    ends = {f"kill {s['name']}": [_figure(s, step) / 1e3 for step in steps] for s in killed}
    return _timelines(ends, labels, "seconds after kill -9", result)


def _timelines(
    ends: Mapping[str, Sequence[float]], labels: Sequence[str], xlabel: str, result: Result
) -> Figure:
    """A bar for each name, from the ends of its stages in seconds."""
    figure, (ax,) = _axes(height=2.5)
    for place, stages in enumerate(ends.values()):
        for begin, end, label, color in zip((0.0, *stages), stages, labels, _STAGES, strict=False):
            ax.barh(place, end - begin, left=begin, color=color, label=label if place == 0 else None)
    ax.set_yticks(range(len(ends)), list(ends))
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return _finish(figure, result)


def freshness_stages() -> Figure:
    """Where the time from a click to another score of the item goes."""
    result = load("freshness")
    row = _row(result, "from a click to another score of the item")
    labels = {
        "engagement_to_close, s": "request closes",
        "close_to_readable, s": "sample readable in Kafka",
        "readable_to_trained, s": "trained",
        "trained_to_servable, s": "servable",
    }
    subjects = zip(("commit each 10 s", "commit each 1 s"), _subjects(row).values(), strict=False)
    ends = {name: list(itertools.accumulate(_figure(s, key) for key in labels)) for name, s in subjects}
    return _timelines(ends, [*labels.values()], "seconds, means that the programs measure", result)


def joiner_state() -> Figure:
    """Engagements joined per CPU second against the state that is kept."""
    result = load("joiner-core")
    figure, axes = _axes(2, 3.0, sharey=True)
    for ax, what in zip(axes, ("remembered requests of the user", "engagements of its request"), strict=True):
        at, rate, reading = [], [], []
        for row in result["rows"]:
            if row["name"].endswith(what):
                found = _subjects(row)
                at.append(int(row["name"].split(", ")[1].split()[0]))
                rate.append(1e3 / _cost_us(row, found["join with its state's bytes"]))
                reading.append(1e3 / _cost_us(row, found["reading the event"]))
        ax.plot(at, rate, "o-", color=_OURS, label="joined, state read and written")
        ax.plot(at, reading, "--", color=_LIMIT, label="limit: reading the event")
        ax.set(xscale="log", xlabel=what, ylim=(0, 1.5 * max(reading)))
    axes[0].set_ylabel("thousand events per CPU second")
    axes[0].legend(loc="upper left")
    return _finish(figure, result)


def bytes_at_rest() -> Figure:
    """Bytes per impression in the warehouse."""
    result = load("warehouse-bytes")
    bars = []
    for row in result["rows"]:
        found = _subjects(row)
        for name in ("requests, by user", "impressions, by user", "impressions, mixed within the hour"):
            bars.append(
                (f"{row['name']}: {name}", found[name]["role"], _figure(found[name], "bytes an impression"))
            )
    return _bars(bars, "bytes per impression, zstd (shorter is better)", result)


def user_side_once() -> Figure:
    """CPU time of scoring a request whose user side is computed once, or for each candidate."""
    result = load("serving-batch")
    at = [int(row["name"].split(" of ")[1].split()[0]) for row in result["rows"]]
    figure, (ax,) = _axes(height=3.0)
    for name, color, label in (
        ("request's side once", _OURS, "once per request"),
        ("repeated for each candidate", _PEER, "repeated for each candidate"),
    ):
        cost = [_cost_us(row, _subjects(row)[name]) / 1e3 for row in result["rows"]]
        ax.plot(at, cost, "o-", color=color, label=label)
    ax.set(xscale="log", yscale="log", xlabel="candidates per request", ylabel="CPU ms per request")
    ax.legend(loc="upper left")
    return _finish(figure, result)


def quality_over_the_week() -> Figure:
    """Normalized entropy over EB-NeRD's week, trained live and frozen."""
    folder = RESULTS / "replays"
    live, frozen = (load(f"ebnerd-week-{name}", folder) for name in ("live", "frozen"))
    figure, (ax,) = _axes(height=3.2)
    for result, color, label in (
        (frozen, _PEER, f"frozen: learning and counters stop on {frozen['freeze_at']}"),
        (live, _OURS, "live: learns from all traffic so far"),
    ):
        curve = result["curve"]
        ax.plot([p["after"] / 1000 for p in curve], [p["ne"] for p in curve], "o-", color=color, label=label)
    ax.axhline(1, ls="--", color=_LIMIT)
    ax.annotate("always predicting the base rate", (0.5, 1), (0, 4), textcoords="offset points", fontsize=8)
    ax.set(xlabel="thousand requests of the week", ylabel="normalized entropy (lower is better)")
    ax.legend(loc="center right")
    return _finish(figure, live)


def early_quality() -> Figure:
    """Normalized entropy of the default model and of the best baseline, by requests seen."""
    result = load("quality-early")
    rows = [row for row in result["rows"] if _subjects(row)]
    figure = Figure(figsize=(8.6, 5.0), layout="constrained")
    panels = figure.subplots(2, -(-len(rows) // 2), squeeze=False).flat
    for row, ax in zip(rows, panels, strict=False):  # keeps the panels that are left
        (subject,) = _subjects(row).values()
        ends = [int(name.split()[-1]) for name in subject["figures"] if name.startswith("model, NE to ")]
        for of, color, label in (
            ("best baseline", _PEER, "best baseline"),
            ("model", _OURS, "default model"),
        ):
            found = [subject["figures"][f"{of}, NE to {end}"] for end in ends]
            ax.plot(ends, [f["median"] for f in found], "o-", color=color, label=label, ms=3)
            ax.fill_between(
                ends, [f["least"] for f in found], [f["most"] for f in found], color=color, alpha=0.2, lw=0
            )
        ax.set(title=row["name"].split(" of ")[1].split(",")[0], xscale="log", xlabel="requests")
    for ax in panels:
        ax.set_axis_off()  # no log is left for it
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="lower right")
    figure.supylabel("normalized entropy (lower is better)")
    return _finish(figure, result)


PLOTS: dict[str, Callable[[], Figure]] = {
    "requests-against-impressions": requests_against_impressions,
    "quality-over-the-week": quality_over_the_week,
    "early-quality": early_quality,
    "freshness": freshness_stages,
    "latency-at-rates": latency_at_rates,
    "live-serving": live_serving,
    "overload": overload,
    "user-side-once": user_side_once,
    "rows-per-second": rows_per_second,
    "steps-against-torchrec": steps_against_torchrec,
    "joiner-state": joiner_state,
    "commit-cost": commit_cost,
    "recovery": recovery_timeline,
    "bytes-at-rest": bytes_at_rest,
}


def svg(figure: Figure, title: str) -> str:
    """The figure as SVG text with a white ground, so that it can be read on dark pages too."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Title": title}, facecolor="white")
    return out.getvalue()


def plots() -> dict[str, str]:
    """Name → SVG of every plot."""
    with mpl.rc_context(_STYLE):
        return {name: svg(make(), (make.__doc__ or name).strip()) for name, make in PLOTS.items()}


if __name__ == "__main__":
    with mpl.rc_context(_STYLE):
        README_PLOT.write_text(
            svg(requests_against_impressions(), "Requests against impressions"), encoding="utf-8"
        )

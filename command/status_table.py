"""The table of `status` and of the demo, from what `command.status` found."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from rich.table import Table

NONE = "–"
Row = tuple[str, str]


def rows(status: Mapping[str, Any]) -> list[Row]:
    """(what, figures) line by line; the same in the table and as plain lines."""
    return [
        ("programs", _programs(status["programs"])),
        ("rates /s", _rates(status["rates"])),
        ("joiner", _joiner(status["joiner"])),
        ("trainer", _trainer(status["trainer"])),
        ("rows", ", ".join(f"{k} {v:,}" for k, v in status["rows"].items()) or NONE),
        ("commit", _commit(status["commit"])),
        ("freshness", _freshness(status["freshness"])),
        ("quality", _quality(status["metrics"])),
        ("click rate", _click_rate(status["click_rate"])),
        ("accounted", _g1(status["guarantees"]["g1"])),
    ]


def render(status: Mapping[str, Any], title: str, footer: list[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, caption="\n".join(footer) or None, caption_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, text in rows(status):
        table.add_row(name, text)
    return table


def line(status: Mapping[str, Any], elapsed_s: float) -> str:
    """One plain line for logs."""
    trainer, rate, g1 = status["trainer"], status["click_rate"], status["guarantees"]["g1"]
    servable = status["freshness"]["engagement_to_servable"]
    parts = [
        f"{elapsed_s:5.0f} s",
        f"impressions/s {number(status['rates']['impressions'], 1)}",
        f"samples/s {number(status['rates']['samples'], 1)}",
        f"trainer {trainer['state'] or NONE} trained {number(trainer['requests'])}",
        f"commit {number(status['commit']['seq'])}",
        f"NE {number(status['metrics']['ne'], 4)} AUC {number(status['metrics']['auc'], 4)}",
        f"clicks served/random {number(rate['served_to_random'], 2)} (all {number(rate['served_to_random_total'], 2)})",
        f"servable p50 {duration(servable['p50_ms'])}",
        f"accounted {NONE if g1 is None else 'yes' if g1['accounted'] else 'no'}",
    ]
    bad = [n for n, p in status["programs"].items() if p["state"] not in ("ready", "ended")]
    return " · ".join([*parts, *([f"not ready: {', '.join(bad)}"] if bad else [])])


def number(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def duration(ms: float | None) -> str:
    if ms is None:
        return NONE
    if ms < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if ms < 120_000 else f"{ms / 60_000:.1f} min"


def clock(ms: float | None) -> str:
    """Event time, UTC."""
    if not ms or ms < 0:
        return NONE
    return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _programs(programs: Mapping[str, Any]) -> str:
    ready = [n for n, p in programs.items() if p["state"] == "ready"]
    others = [f"{n} {p['state']}" for n, p in programs.items() if p["state"] != "ready"]
    restarts = sum(p["restarts"] for p in programs.values())
    return ", ".join([f"{len(ready)} ready", *others, f"{restarts} restarts"])


def _rates(rates: Mapping[str, float | None]) -> str:
    return ", ".join(f"{topic} {number(rate, 1)}" for topic, rate in rates.items())


def _joiner(joiner: Mapping[str, Any]) -> str:
    counts = f"{number(joiner['checkpoints'])} checkpoints, {number(joiner['restarts'])} restarts"
    return f"{joiner['state'] or NONE}, watermark {clock(joiner['watermark_ms'])}, {counts}"


def _trainer(t: Mapping[str, Any]) -> str:
    where = f"watermark {clock(t['watermark_ms'])}, behind {duration(t['lag_ms'])} / {number(t['lag_records'])} samples"
    eta = f", caught up in {duration(t['eta_s'] * 1000)}" if t["eta_s"] else ""
    counts = f"step {number(t['step'])}, trained {number(t['requests'])}, skipped {number(t['duplicates'])}"
    return f"{t['state'] or NONE}{eta}, {where}, {counts}"


def _commit(c: Mapping[str, Any]) -> str:
    counts = f"{number(c['commits'])} since the start, {number(c['aborts'])} aborted, {number(c['rollbacks'])} rollbacks"
    return f"{c['state'] or NONE}, {c['incarnation'] or 0}-{c['seq'] or 0}, age {duration(c['commit_age_ms'])}, {counts}"


def _freshness(stages: Mapping[str, Mapping[str, float | None]]) -> str:
    return "\n".join(
        f"{s.replace('_', ' ')}: p50 {duration(v['p50_ms'])}, p99 {duration(v['p99_ms'])}" for s, v in stages.items()
    )


def _quality(m: Mapping[str, float | None]) -> str:
    names = {
        "ne": "NE",
        "auc": "AUC",
        "request_auc": "request AUC",
        "mrr": "MRR",
        "ndcg@10": "nDCG@10",
        "calibration": "calibration",
    }
    return ", ".join(f"{label} {number(m[k], 4)}" for k, label in names.items()) + f" over {number(m['requests'])} requests"


def _click_rate(r: Mapping[str, float | None]) -> str:
    orders = ", ".join(f"{o} {NONE if r[o] is None else f'{r[o]:.4f}'}" for o in ("served", "random", "best"))
    now, total = number(r["served_to_random"], 2), number(r["served_to_random_total"], 2)
    return f"{orders}; served is {now} × random now, {total} × since the start"


def _g1(sums: Mapping[str, Any] | None) -> str:
    if sums is None:
        return NONE
    parts = " + ".join(
        f"{sums[k]:,} {label}" for k, label in (("folded", "folded"), ("corrected", "corrected"), ("dead_engagements", "dead"))
    )
    events = f"{sums['engagements']:,} engagements = {parts} + {sums['pending']:,} pending"
    requests = f"{sums['requests']:,} requests: {sums['samples']:,} samples, {sums['pending_requests']:,} pending"
    return f"{'yes' if sums['accounted'] else 'NO'}: {events}; {requests}"

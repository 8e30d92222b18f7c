"""The table in docs/operations/scale.md: the plan for loads from that of the demo to a million requests per
second."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from roostream.cli.plan.sizing import Load, bottleneck, plan

LOADS = (
    Load(requests_per_s=25, rows=10**5, batch_requests=512),
    Load(requests_per_s=1000, rows=10**6),
    Load(requests_per_s=10**4, rows=10**7),
    Load(requests_per_s=10**5, rows=10**8, batch_requests=16_384),
    Load(requests_per_s=10**6, rows=10**9, batch_requests=65_536),
)
_COLUMNS = {
    "serving processes": "serving processes",
    "task managers": "task managers",
    "workers": "workers",
    "shards": "shards",
    "brokers": "brokers",
    "Kafka's disks": "Kafka's disks, TB",
    "row deltas": "row deltas, MB/s",
}
_TABLE = re.compile(r"^\| requests/s \| rows \|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)


def table(figures: Mapping[str, float]) -> str:
    """Markdown with one row per load."""
    head = ["requests/s", "rows", "requests a step", *_COLUMNS.values(), "ends first"]
    lines = [_row(head), "|" + "---:|" * (len(head) - 1) + "---|"]
    for load in LOADS:
        needs = plan(load, figures)
        amounts, first = {need.what: need.amount for need in needs}, bottleneck(needs)
        load_cells = [f"{number:,.0f}" for number in (load.requests_per_s, load.rows, load.batch_requests)]
        lines.append(
            _row(
                [
                    *load_cells,
                    *(_shown(amounts[name]) for name in _COLUMNS),
                    f"{first.what} at {_shown(first.ends_at)}",
                ]
            )
        )
    return "\n".join(lines) + "\n"


def renewed(text: str, figures: Mapping[str, float]) -> str:
    """The page with its table replaced."""
    assert _TABLE.search(text)
    return _TABLE.sub(lambda _: table(figures), text, count=1)


def renew(page: Path, figures: Mapping[str, float]) -> Path:
    """Update the page; returns its path."""
    page.write_text(renewed(page.read_text(encoding="utf-8"), figures), encoding="utf-8")
    return page


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _shown(value: float) -> str:
    """Three significant digits, with thousands separators."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{float(f'{value:.3g}'):g}"

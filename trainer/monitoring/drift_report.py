"""Keys and labels of a drift report (`DriftDetector.report`), and the merge of the reports of several
workers.

A file of its own: the controller imports it and must not import numba.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_BY_FEATURE = ("coverage", "coverage_before", "psi", "lengths")
DRIFT_LABELS = {
    **dict.fromkeys(_BY_FEATURE, "feature"),
    **dict.fromkeys(("base_rate", "base_rate_before"), "task"),
    "new_ids": "table",
}
"""Label of each part of a report."""


def merge_drift_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the reports of several workers: for each feature the report with the larger psi, for each task
    the base rate that moved furthest, for each table the larger share of new ids. {} without reports."""
    given = [report for report in reports if report]
    out: dict[str, Any] = {name: {} for name in DRIFT_LABELS} if given else {}
    for feature in dict.fromkeys(name for report in given for name in report["psi"]):
        worst = max((r for r in given if feature in r["psi"]), key=lambda r: r["psi"][feature])
        for name in _BY_FEATURE:
            if feature in worst[name]:
                out[name][feature] = worst[name][feature]
    for task in dict.fromkeys(name for report in given for name in report["base_rate"]):
        worst = max(
            (r for r in given if task in r["base_rate"]),
            key=lambda r: _moved(r["base_rate"][task], r["base_rate_before"][task]),
        )
        for name in ("base_rate", "base_rate_before"):
            out[name][task] = worst[name][task]
    for report in given:
        for table, share in report["new_ids"].items():
            out["new_ids"][table] = max(share, out["new_ids"].get(table, 0.0))
    return out


def _moved(rate: float | None, before: float | None) -> float:
    """Absolute log ratio of the rates; -1 if either is unknown."""
    if rate is None or before is None:
        return -1.0
    return abs(math.log(max(rate, 1e-9) / max(before, 1e-9)))

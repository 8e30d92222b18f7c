"""Keys and labels of a drift report (`DriftDetector.report`), and the merge of the reports of several workers.

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
"""What each part of a report is by."""


def merge_drift_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Those of several workers as one: of each feature the report with the larger psi, of each task the base rate that moved
    furthest, of each table the larger share of new ids. {} where nobody tells."""
    told = [report for report in reports if report]
    out: dict[str, Any] = {name: {} for name in DRIFT_LABELS} if told else {}
    for feature in dict.fromkeys(name for report in told for name in report["psi"]):
        at = max((r for r in told if feature in r["psi"]), key=lambda r: r["psi"][feature])
        for name in _BY_FEATURE:
            if feature in at[name]:
                out[name][feature] = at[name][feature]
    for task in dict.fromkeys(name for report in told for name in report["base_rate"]):
        at = max(
            (r for r in told if task in r["base_rate"]),
            key=lambda r: _moved(r["base_rate"][task], r["base_rate_before"][task]),
        )
        for name in ("base_rate", "base_rate_before"):
            out[name][task] = at[name][task]
    for report in told:
        for table, share in report["new_ids"].items():
            out["new_ids"][table] = max(share, out["new_ids"].get(table, 0.0))
    return out


def _moved(rate: float | None, before: float | None) -> float:
    """How far, as a ratio's logarithm; -1 where either isn't known."""
    if rate is None or before is None:
        return -1.0
    return abs(math.log(max(rate, 1e-9) / max(before, 1e-9)))

"""What each of RecD's steps takes away, from what subjects of a row tell; imports no torch, since questions do."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common.flop_bound import FLOP
from benchmarks.harness.benchmark import SubjectResult

HISTORY_IDS = "history ids looked up an impression"


def derived(told: Mapping[str, SubjectResult]) -> Mapping[str, float]:
    """Of a row's subjects in one run: history ids and FLOPs of mixed impressions over those of each step."""
    first = told["impressions, mixed"].figures
    found = {}
    for name, its in told.items():
        if name in ("requests, clustered", "requests, clustered, shared", "impressions, clustered, IKJT"):
            found[f"history ids: mixed impressions / {name}"] = first[HISTORY_IDS] / its.figures[HISTORY_IDS]
            found[f"FLOPs: mixed impressions / {name}"] = first[FLOP] / its.figures[FLOP]
    return found

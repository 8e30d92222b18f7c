"""Savings of each of RecD's steps, derived from the figures of a row's subjects. Imports no torch, because a
declaration uses it."""

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

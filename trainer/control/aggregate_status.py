"""The workers' reports as one: worst state, furthest lag, the sum of what is trained, the quality of all.

What one doesn't tell is unknown. While training is held that is its state, whatever a worker told last, and where none is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.monitoring.caught_up import Liveness
from trainer.monitoring.cells import LIVE, SHADOW, pooled_numbers
from trainer.monitoring.drift_report import worst
from trainer.monitoring.quality import pooled

_RANK = {str(state): rank for rank, state in enumerate(Liveness)}


def worker_reports(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Member → its report, of workers that train; not of those that stand by."""
    training = [f"worker {n}" for n in range(int(status["workers"]))]
    return {key: status["reports"][key] for key in training if key in status["reports"]}


def together(status: Mapping[str, Any]) -> dict[str, Any]:
    """`status` as Controller.status gives it. `initial`: how far history is, None where it isn't trained now. `eta_s` and
    `drain_per_s` are [value, low, high], None where not known; `quality` (windows, slices, shadow, drift) and `partitions` are
    as in trainer/monitoring/watch.py, partitions each with its `worker`."""
    reports = worker_reports(status)
    watches = [report.get("watch") or {} for report in reports.values()]
    worst = max(watches, key=lambda watch: _RANK.get(_state(watch), len(_RANK)), default={})
    held = held_by(status)
    return {
        "state": str(Liveness.HELD) if held else _state(worst),
        "reason": str(held.get("reason") or "") if held else str(worst.get("reason") or ""),
        "in_state_s": None if held else worst.get("in_state_s"),
        "initial": status.get("initial"),
        "lag_ms": _of_all(max, (watch.get("lag_ms") for watch in watches)),
        "lag_records": _of_all(sum, (watch.get("lag_records") for watch in watches)),
        "eta_s": max((w.get("eta_s") for w in watches), key=_eta, default=None)
        if all(w.get("eta_s") for w in watches)
        else None,
        "drain_per_s": _added([watch.get("drain_per_s") for watch in watches]),
        "lost_records": sum(watch.get("lost_records") or 0 for watch in watches),
        "requests": _of_all(sum, (report.get("requests") for report in reports.values())),
        "step": _of_all(max, (report.get("step") for report in reports.values())),
        "watermark_ms": _of_all(min, (report.get("watermark_ms") for report in reports.values())),
        "metrics": pooled(report.get("metrics") or {} for report in reports.values()),
        "quality": _quality(watches),
        "partitions": [
            {**row, "worker": key}
            for key, report in reports.items()
            for row in ((report.get("watch") or {}).get("partitions") or ())
        ],
    }


def _quality(watches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Windows and slices of all; a frozen copy where all have the same; drift as the worst worker sees it."""
    shadows = [watch.get("shadow") or {} for watch in watches]
    versions = {shadow.get("version") for shadow in shadows}
    same = versions.pop() if len(versions) == 1 else None
    return {
        "windows": _merged([watch.get("windows") or {} for watch in watches]),
        "slices": _merged([watch.get("slices") or {} for watch in watches]),
        "shadow": {"version": same, **_merged([{n: s[n] for n in (SHADOW, LIVE) if n in s} for s in shadows])}
        if same
        else None,
        "drift": worst([watch.get("drift") or {} for watch in watches]),
    }


def _merged(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trees whose leaves are the numbers of cells as one tree: of each leaf those that have it."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys(key for tree in told for key in tree):
        found = [tree[key] for tree in told if key in tree]
        out[key] = pooled_numbers(found) if "sums" in found[0] else _merged(found)
    return out


def held_by(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The hold of training; {} where there is none."""
    holds = status.get("holds") or ()
    return dict(holds[0]) if holds else {}


def _state(watch: Mapping[str, Any]) -> str:
    state = str(watch.get("state") or "")
    return state if state in _RANK else str(Liveness.UNKNOWN)


def _eta(eta: Any) -> float:
    return float("inf") if eta[0] is None else float(eta[0])


def _added(rates: Sequence[Sequence[float | None] | None]) -> list[float | None] | None:
    """One alone as it is; of several no interval is known."""
    known = [rate for rate in rates if rate]
    if len(known) < max(len(rates), 1):
        return None
    return list(known[0]) if len(known) == 1 else [sum(rate[0] or 0.0 for rate in known), None, None]


def _of_all(fold: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    told = list(values)
    known = [value for value in told if value is not None]
    return fold(known) if known and len(known) == len(told) else None

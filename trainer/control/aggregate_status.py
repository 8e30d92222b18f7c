"""The reports of all workers as one status: worst state, largest lag, sums of counts, overall quality.

A value that one worker does not report, for example because it is not connected, is unknown. While training
is on hold, that is the state, whatever workers reported last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.monitoring.caught_up import TrainingState
from trainer.monitoring.drift_report import merge_drift_reports
from trainer.monitoring.progressive_metrics import merge_summaries
from trainer.monitoring.windowed_metrics import LIVE, SHADOW, merge_cell_reports

_RANK = {str(state): rank for rank, state in enumerate(TrainingState)}


def worker_reports(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Member → its report, for workers that train; workers on standby are left out."""
    training = [f"worker {n}" for n in range(int(status["workers"]))]
    return {key: status["reports"][key] for key in training if key in status["reports"]}


def aggregate_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Aggregate `status` of `Controller.status`.

    `trained`: requests that the committed model has learned from, so it survives restarts; `requests`: those
    that the running worker processes have trained. `initial`: progress of the initial phase, or None.
    `eta_s` and `drain_per_s`: [value, low, high], or None if unknown. `quality` (windows, slices, shadow,
    drift) and `partitions` are as in trainer/worker_monitor.py; each partition names its `worker`."""
    reports, every = worker_reports(status), _expected_reports(status)
    watches = [report.get("watch") or {} for report in every]
    slowest = max(watches, key=lambda watch: _RANK.get(_state(watch), len(_RANK)), default={})
    hold = current_hold(status)
    etas = [watch.get("eta_s") for watch in watches]
    return {
        "state": str(TrainingState.HELD) if hold else _state(slowest),
        "reason": str(hold.get("reason") or "") if hold else str(slowest.get("reason") or ""),
        "in_state_s": None if hold else slowest.get("in_state_s"),
        "initial": status.get("initial"),
        "lag_ms": _fold_known(max, (watch.get("lag_ms") for watch in watches)),
        "lag_records": _fold_known(sum, (watch.get("lag_records") for watch in watches)),
        "eta_s": max(etas, key=_eta, default=None) if all(etas) else None,
        "drain_per_s": _sum_rates([watch.get("drain_per_s") for watch in watches]),
        "lost_records": _fold_known(sum, (watch.get("lost_records") for watch in watches)),
        "trained": status.get("trained"),
        "requests": sum_of_workers(status, "requests"),
        "step": _fold_known(max, (report.get("step") for report in every)),
        "watermark_ms": _fold_known(min, (report.get("watermark_ms") for report in every)),
        "metrics": merge_summaries(report.get("metrics") or {} for report in every) if all(every) else {},
        "quality": _quality(watches),
        "partitions": [
            {**row, "worker": key}
            for key, report in reports.items()
            for row in ((report.get("watch") or {}).get("partitions") or ())
        ],
    }


def sum_of_workers(status: Mapping[str, Any], count: str) -> float | None:
    """Sum of one count in the reports of all workers that should train; None if one does not report it."""
    return _fold_known(sum, (report.get(count) for report in _expected_reports(status)))


def _expected_reports(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The report of each worker that should train; {} for one that is not connected."""
    return [status["reports"].get(f"worker {n}", {}) for n in range(int(status["workers"]))]


def current_hold(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The current hold; {} if there is none."""
    holds = status.get("holds") or ()
    return dict(holds[0]) if holds else {}


def _quality(watches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The quality of the model from the workers that report: metrics by window and by slice are merged.
    The frozen copy of the model is included if all workers compare with the same version. Drift is that of
    the worker with the most."""
    shadows = [watch.get("shadow") or {} for watch in watches]
    versions = {shadow.get("version") for shadow in shadows}
    version = versions.pop() if len(versions) == 1 else None
    shadow_cells = [{name: s[name] for name in (SHADOW, LIVE) if name in s} for s in shadows]
    return {
        "windows": _merge_cells([watch.get("windows") or {} for watch in watches]),
        "slices": _merge_cells([watch.get("slices") or {} for watch in watches]),
        "shadow": {"version": version, **_merge_cells(shadow_cells)} if version else None,
        "drift": merge_drift_reports([watch.get("drift") or {} for watch in watches]),
    }


def _merge_cells(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge trees whose leaves are the numbers of quality cells. Each leaf pools the trees that have it."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        nodes = [tree[key] for tree in trees if key in tree]
        is_leaf = isinstance(nodes[0].get("sums"), list)  # a surface or label may have this name too
        merged[key] = merge_cell_reports(nodes) if is_leaf else _merge_cells(nodes)
    return merged


def _state(watch: Mapping[str, Any]) -> str:
    state = str(watch.get("state") or "")
    return state if state in _RANK else str(TrainingState.UNKNOWN)


def _eta(eta: Any) -> float:
    return float("inf") if eta[0] is None else float(eta[0])


def _sum_rates(rates: Sequence[Sequence[float | None] | None]) -> list[float | None] | None:
    """Sum of the workers' rates. The interval of a sum is unknown; a single worker keeps its interval."""
    known = [rate for rate in rates if rate]
    if len(known) < max(len(rates), 1):
        return None
    return list(known[0]) if len(known) == 1 else [sum(rate[0] or 0.0 for rate in known), None, None]


def _fold_known(fold: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """`fold` of all values; None if any is unknown."""
    reported = list(values)
    known = [value for value in reported if value is not None]
    return fold(known) if known and len(known) == len(reported) else None

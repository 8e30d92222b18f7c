"""`report["watch"]` of a worker's beat: what the status page and `status` show of monitoring, as plain values.

    state, reason, in_state_s        of everything together; states: trainer/monitoring/caught_up.py
    state_seconds                    {state: seconds in it since the worker started}
    lag_records, hidden_records      to the last stable offset, and from there to the high watermark
    lag_ms                           event time
    lost_records                     deleted before they were read
    retention_share                  lag / what retention keeps, null before it deletes anything: at 1 records are lost
    arrival_per_s, consumption_per_s, drain_per_s     [value, low, high] (about 95 %; low and high null: not known), or null
    eta_s                            [value, low, high]; value null = not foreseeable, high null beside a value = no bound
    windows                          {"1h" | "1d" | "all": {task: numbers}}: progressive metrics of event-time windows that
                                     end at the watermark, at most MAX_TASKS tasks; numbers: candidates, base_rate, ne,
                                     ne_online, auc, calibration (cells.py; `ne_online`: against the base rate known before),
                                     and the `sums` behind all but auc
    slices                           {slice: {value: {"1h" | "all": {task: numbers}}}}
    shadow                           null, or {version, rows: "live", shadow: {"1h" | "all": …}, live: {…}}: a frozen dense
                                     part beside the model in training, on the same candidates and rows
    drift                            {} or what `Drift.report` says (drift.py): coverage, psi, lengths {feature: number},
                                     base_rate {task: number}, new_ids {table: share}, and coverage, base_rate …_before
    partitions                       [{topic, partition, and all of the above but state_seconds}], by name; the first MAX_ROWS

Numbers that aren't known are null. Everything is bounded, whatever the schema: see the constants.

Windows, slices and the frozen copy as gauges, from what a beat carries of them (`watch.quality_of`); so as bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.monitoring.caught_up import LagStatus, Observation
from trainer.monitoring.shadow import ShadowModel
from trainer.monitoring.windowed_metrics import LIVE, SHADOW, SLICE_WINDOW

MAX_ROWS = 256
MAX_TASKS = 4


def liveness_report(seen: Observation) -> dict[str, Any]:
    """The part that says how live training is."""
    rows = [
        {"topic": topic, "partition": number, **status_fields(at)}
        for (topic, number), at in seen.partitions.items()
    ]
    return {
        **status_fields(seen.overall),
        "state_seconds": {str(state): seconds for state, seconds in seen.state_seconds.items()},
        "partitions": rows[:MAX_ROWS],
    }


def quality_report(told: Mapping[str, Any], shadow: ShadowModel | None) -> dict[str, Any]:
    """The part that says how well it predicts; `told`: `Windowed.report`."""
    copies = {name: _few(windows) for name, windows in told["shadow"].items()} if told.get("shadow") else {}
    return {
        "windows": _few(told["windows"]),
        "slices": {
            slice_: {v: _few(windows) for v, windows in values.items()}
            for slice_, values in told["slices"].items()
        },
        "shadow": {"version": shadow.version, "rows": "live", **copies} if shadow else None,
    }


def _few(windows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {window: dict(list(tasks.items())[:MAX_TASKS]) for window, tasks in windows.items()}


def status_fields(at: LagStatus) -> dict[str, Any]:
    """One row of it."""
    return {
        "state": str(at.state),
        "reason": at.reason,
        "in_state_s": at.in_state_s,
        "lag_records": at.lag_records,
        "hidden_records": at.hidden_records,
        "lag_ms": at.lag_ms,
        "lost_records": at.lost_records,
        "retention_share": at.retention_share,
        "arrival_per_s": None if at.arrival is None else list(at.arrival),
        "consumption_per_s": None if at.consumption is None else list(at.consumption),
        "drain_per_s": None if at.drain is None else list(at.drain),
        "eta_s": list(at.eta),
    }


_OF_WINDOW = ("candidates", "base_rate", "ne", "ne_online", "auc", "calibration")
_OF_SLICE = ("candidates", "ne", "auc", "calibration")
MAX_TASKS_OF_SLICES = 2  # exported; a beat has more

QUALITY_LABELS: dict[str, str | tuple[str, ...]] = {
    **{f"window_{name}": ("window", "task") for name in _OF_WINDOW},
    **{f"slice_{name}": ("slice", "value", "task") for name in _OF_SLICE},
    **{f"shadow_{name}": ("of", "task") for name in _OF_SLICE},
    "shadow_version": "version",
}
"""Label of each gauge."""


def quality_gauges(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Of slices and the copy: the last hour. `of`: "shadow", or "live" for the model on the same candidates."""
    windows = {
        (window, task): numbers
        for window, tasks in quality["windows"].items()
        for task, numbers in tasks.items()
    }
    slices = {
        (slice_, value, task): numbers
        for slice_, values in quality["slices"].items()
        for value, told in values.items()
        for task, numbers in list(told.get(SLICE_WINDOW, {}).items())[:MAX_TASKS_OF_SLICES]
    }
    shadow = quality["shadow"] or {}
    copies = {
        (name, task): numbers
        for name in (SHADOW, LIVE)
        for task, numbers in shadow.get(name, {}).get(SLICE_WINDOW, {}).items()
    }
    return {
        **{f"window_{name}": {key: numbers[name] for key, numbers in windows.items()} for name in _OF_WINDOW},
        **{f"slice_{name}": {key: numbers[name] for key, numbers in slices.items()} for name in _OF_SLICE},
        **{f"shadow_{name}": {key: numbers[name] for key, numbers in copies.items()} for name in _OF_SLICE},
        "shadow_version": {shadow["version"]: 1} if shadow else {},
    }

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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.monitoring.caught_up import Observation, Standing
from trainer.monitoring.shadow import FrozenCopy

MAX_ROWS = 256
MAX_TASKS = 4


def watch_of(seen: Observation) -> dict[str, Any]:
    """The part that says how live training is."""
    rows = [
        {"topic": topic, "partition": number, **plain(at)} for (topic, number), at in seen.partitions.items()
    ]
    return {
        **plain(seen.overall),
        "state_seconds": {str(state): seconds for state, seconds in seen.state_seconds.items()},
        "partitions": rows[:MAX_ROWS],
    }


def quality_of(told: Mapping[str, Any], shadow: FrozenCopy | None) -> dict[str, Any]:
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


def plain(at: Standing) -> dict[str, Any]:
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

"""Prometheus metrics of the worker and the controller: names, labels and help texts, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class MetricSpec(NamedTuple):
    """A metric. A name that ends with `_total` is a counter, any other a gauge."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    scale: float = 1.0  # from the unit of the value to the unit in the name


_TASK = ("task",)
_WINDOW = ("window", "task")
_SLICE = ("slice", "value", "task")
_SHADOW = ("of", "task")
_FEATURE = ("feature",)
_PARTITION = ("partition",)

WORKER = {
    "requests": MetricSpec("roostream_worker_requests_total", "requests scored"),
    "candidates": MetricSpec("roostream_worker_candidates_total", "candidates scored"),
    "frozen": MetricSpec("roostream_worker_frozen_total", "requests scored but not trained (freeze_at_ms)"),
    "non_finite": MetricSpec("roostream_worker_non_finite_total", "requests with non-finite results"),
    "dead_letters": MetricSpec("roostream_worker_dead_letters_total", "records published as dead letters"),
    "corrections": MetricSpec("roostream_worker_corrections_total", "corrections trained"),
    "rehearsed": MetricSpec("roostream_worker_rehearsed_total", "requests trained again by rehearsal"),
    "outcomes": MetricSpec("roostream_worker_outcomes_total", "requests by outcome", ("outcome",)),
    "skip_share": MetricSpec("roostream_worker_skip_share", "share of requests that selection skipped"),
    "probed": MetricSpec("roostream_worker_probed_total", "skipped requests that were trained as probes"),
    "train_weight_mean": MetricSpec("roostream_worker_train_weight_mean", "mean weight of trained requests"),
    "slipstream_phase": MetricSpec(
        "roostream_worker_slipstream_phase", "0 count, 1 snapshot, 2 skip, 3 over"
    ),
    "slipstream_hot_rows": MetricSpec("roostream_worker_slipstream_hot_rows", "rows that Slipstream tracks"),
    "slipstream_hot_requests_share": MetricSpec(
        "roostream_worker_slipstream_hot_requests_share", "share of requests with hot rows only"
    ),
    "slipstream_unvisited_share": MetricSpec(
        "roostream_worker_slipstream_unvisited_share", "share of hot rows without a lookup"
    ),
    "slipstream_threshold": MetricSpec("roostream_worker_slipstream_threshold", "threshold of row changes"),
    "slipstream_realised_drop": MetricSpec(
        "roostream_worker_slipstream_realised_drop", "share of hot requests that were skipped"
    ),
    "slipstream_half_width": MetricSpec(
        "roostream_worker_slipstream_half_width", "half width of the threshold's interval"
    ),
    "row_visits": MetricSpec("roostream_worker_row_visits_total", "row gradients computed"),
    "row_pushes": MetricSpec("roostream_worker_row_pushes_total", "row gradients pushed"),
    "row_deferred_share": MetricSpec("roostream_worker_row_deferred_share", "share of gradients deferred"),
    "deferred_rows": MetricSpec("roostream_worker_deferred_rows", "rows with a deferred gradient"),
    "unfrozen_rows": MetricSpec("roostream_worker_unfrozen_rows_total", "deferred rows that changed again"),
    "rehearsal_batches": MetricSpec("roostream_worker_rehearsal_batches", "batches kept for rehearsal"),
    "rehearsal_bytes": MetricSpec("roostream_worker_rehearsal_bytes", "memory of batches kept for rehearsal"),
    "step": MetricSpec("roostream_worker_step", "training step"),
    "watermark_ms": MetricSpec(
        "roostream_worker_watermark_timestamp_seconds", "event time up to which rows are trained", scale=1e-3
    ),
    "incarnation": MetricSpec("roostream_worker_incarnation", "incarnation that the worker trains in"),
    "training": MetricSpec("roostream_worker_training", "1 while training is running"),
    "duplicates": MetricSpec("roostream_worker_duplicates_total", "duplicate samples skipped"),
    "lost_records": MetricSpec("roostream_worker_lost_records_total", "samples deleted before training"),
    "row_wait_share": MetricSpec("roostream_worker_row_wait_share", "share of time spent waiting for rows"),
    "stage_seconds": MetricSpec(
        "roostream_worker_stage_seconds_total", "time spent by stage", ("stage", "thread")
    ),
    "max_staleness": MetricSpec("roostream_worker_max_staleness", "most pushes between a pull and training"),
    "shared_rows": MetricSpec("roostream_worker_shared_rows_total", "rows trained from an older value"),
    "lag_records": MetricSpec("roostream_worker_lag_records", "samples that are not trained yet"),
    "lag_ms": MetricSpec("roostream_worker_lag_seconds", "lag in event time", scale=1e-3),
    "hidden_records": MetricSpec("roostream_worker_hidden_records", "samples of open transactions"),
    "retention_share": MetricSpec("roostream_worker_retention_share", "share of the retention time used up"),
    "arrived_per_s": MetricSpec("roostream_worker_arrived_per_second", "samples that arrive per second"),
    "consumed_per_s": MetricSpec("roostream_worker_consumed_per_second", "samples trained per second"),
    "drained_per_s": MetricSpec("roostream_worker_drained_per_second", "decrease of the lag per second"),
    "eta_s": MetricSpec("roostream_worker_eta_seconds", "estimated time until caught up"),
    "eta_low_s": MetricSpec("roostream_worker_eta_low_seconds", "lower bound of the estimated time"),
    "eta_high_s": MetricSpec("roostream_worker_eta_high_seconds", "upper bound of the estimated time"),
    "state": MetricSpec("roostream_worker_state", "1 for the current training state", ("state",)),
    "state_s": MetricSpec("roostream_worker_state_seconds_total", "time spent by training state", ("state",)),
    "partition_lag_records": MetricSpec(
        "roostream_worker_partition_lag_records", "samples that are not trained yet", _PARTITION
    ),
    "partition_lag_ms": MetricSpec(
        "roostream_worker_partition_lag_seconds", "lag in event time", _PARTITION, 1e-3
    ),
    "partition_lost_records": MetricSpec(
        "roostream_worker_partition_lost_records_total", "samples deleted before training", _PARTITION
    ),
    "base_rate": MetricSpec("roostream_worker_base_rate", "mean label", _TASK),
    "ne": MetricSpec("roostream_worker_ne", "normalized entropy", _TASK),
    "auc": MetricSpec("roostream_worker_auc", "AUC", _TASK),
    "request_auc": MetricSpec("roostream_worker_request_auc", "mean AUC within requests", _TASK),
    "mrr": MetricSpec("roostream_worker_mrr", "mean reciprocal rank", _TASK),
    "ndcg_10": MetricSpec("roostream_worker_ndcg_10", "NDCG@10", _TASK),
    "calibration": MetricSpec("roostream_worker_calibration", "predicted divided by observed", _TASK),
    "window_candidates": MetricSpec("roostream_worker_window_candidates", "candidates", _WINDOW),
    "window_base_rate": MetricSpec("roostream_worker_window_base_rate", "mean label", _WINDOW),
    "window_ne": MetricSpec("roostream_worker_window_ne", "normalized entropy", _WINDOW),
    "window_ne_online": MetricSpec(
        "roostream_worker_window_ne_online", "NE by the running base rate", _WINDOW
    ),
    "window_auc": MetricSpec("roostream_worker_window_auc", "AUC", _WINDOW),
    "window_calibration": MetricSpec("roostream_worker_window_calibration", "calibration", _WINDOW),
    "slice_candidates": MetricSpec("roostream_worker_slice_candidates", "candidates", _SLICE),
    "slice_ne": MetricSpec("roostream_worker_slice_ne", "normalized entropy", _SLICE),
    "slice_auc": MetricSpec("roostream_worker_slice_auc", "AUC", _SLICE),
    "slice_calibration": MetricSpec("roostream_worker_slice_calibration", "calibration", _SLICE),
    "shadow_candidates": MetricSpec("roostream_worker_shadow_candidates", "candidates", _SHADOW),
    "shadow_ne": MetricSpec("roostream_worker_shadow_ne", "normalized entropy", _SHADOW),
    "shadow_auc": MetricSpec("roostream_worker_shadow_auc", "AUC", _SHADOW),
    "shadow_calibration": MetricSpec("roostream_worker_shadow_calibration", "calibration", _SHADOW),
    "shadow_version": MetricSpec(
        "roostream_worker_shadow_version", "1 for the shadow's version", ("version",)
    ),
    "drift_coverage": MetricSpec("roostream_worker_drift_coverage", "share of present values", _FEATURE),
    "drift_coverage_before": MetricSpec("roostream_worker_drift_coverage_before", "earlier share", _FEATURE),
    "drift_psi": MetricSpec("roostream_worker_drift_psi", "population stability index", _FEATURE),
    "drift_lengths": MetricSpec("roostream_worker_drift_lengths", "PSI of list lengths", _FEATURE),
    "drift_base_rate": MetricSpec("roostream_worker_drift_base_rate", "mean label", _TASK),
    "drift_base_rate_before": MetricSpec(
        "roostream_worker_drift_base_rate_before", "earlier mean label", _TASK
    ),
    "drift_new_ids": MetricSpec("roostream_worker_drift_new_ids", "share of new ids", ("table",)),
}

CONTROLLER = {
    "incarnation": MetricSpec("roostream_controller_incarnation", "current incarnation"),
    "seq": MetricSpec("roostream_controller_seq", "number of the last commit"),
    "state": MetricSpec("roostream_controller_state", "1 for the coordinator's state", ("state",)),
    "committed_at_ms": MetricSpec(
        "roostream_controller_committed_timestamp_seconds", "time of the last commit", scale=1e-3
    ),
    "commit_ms": MetricSpec("roostream_controller_commit_seconds", "duration of the last commit", scale=1e-3),
    "commit_phase_ms": MetricSpec(
        "roostream_controller_commit_phase_seconds", "duration of its phases", ("phase",), 1e-3
    ),
    "paused_ms": MetricSpec(
        "roostream_controller_paused_seconds", "pause of training by the last commit", scale=1e-3
    ),
    "commits": MetricSpec("roostream_controller_commits_total", "commits"),
    "aborts": MetricSpec("roostream_controller_aborts_total", "aborted commits"),
    "rollbacks": MetricSpec("roostream_controller_rollbacks_total", "restores of all members"),
    "workers": MetricSpec("roostream_controller_workers", "workers in training"),
    "wanted_workers": MetricSpec("roostream_controller_wanted_workers", "wanted number of workers"),
    "device_seconds": MetricSpec(
        "roostream_controller_device_seconds_total", "device time by use", ("spent_on",)
    ),
    "held": MetricSpec("roostream_controller_held", "1 while training is on hold", ("kind",)),
    "history_left_records": MetricSpec(
        "roostream_controller_history_left_records", "historical samples that are not committed"
    ),
    "readers": MetricSpec("roostream_controller_readers", "connected and wanted reader programs", ("what",)),
    "splits_wanted": MetricSpec("roostream_controller_splits_wanted", "splits that workers wait for"),
    "leases_expired": MetricSpec("roostream_controller_leases_expired_total", "leases that expired"),
}


class StateCollector(Collector):
    """Reads the state of a program when it is scraped.

    `read` returns name → number, or → {label values: number} for a metric with labels. None is left out."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], specs: Mapping[str, MetricSpec]) -> None:
        self.read, self.specs = read, specs

    def collect(self) -> list[Metric]:
        families = [self._family(self.specs[name], value) for name, value in self.read().items()]
        return [family for family in families if family.samples]

    def _family(self, spec: MetricSpec, value: Any) -> Metric:
        kind = CounterMetricFamily if spec.name.endswith("_total") else GaugeMetricFamily
        family = kind(spec.name, spec.help, labels=spec.labels)
        for key, number in value.items() if spec.labels else [((), value)]:
            if isinstance(number, (int, float)):
                label_values = [str(part) for part in ((key,) if isinstance(key, str) else key)]
                family.add_metric(label_values, float(number) * spec.scale)
        return family

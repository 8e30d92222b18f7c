"""Prometheus metrics of the worker and the controller: full names, help texts and labels."""

from __future__ import annotations

from roostream.runtime.metrics_collector import MetricSpec

_TASK = ("task",)
_WINDOW = ("window", "task")
_SLICE = ("slice", "value", "task")
_SHADOW = ("of", "task")
_FEATURE = ("feature",)
_PARTITION = ("partition",)

SELECTION = {  # of `Selection.report`
    "roostream_worker_skip_share": MetricSpec("share of requests that selection skipped"),
    "roostream_worker_probed_total": MetricSpec("skipped requests that were scored"),
    "roostream_worker_train_weight_mean": MetricSpec("mean weight of trained requests"),
    "roostream_worker_slipstream_phase": MetricSpec("0 count, 1 snapshot, 2 skip, 3 over"),
    "roostream_worker_slipstream_hot_rows": MetricSpec("rows that Slipstream tracks"),
    "roostream_worker_slipstream_hot_requests_share": MetricSpec("share of requests with hot rows only"),
    "roostream_worker_slipstream_unvisited_share": MetricSpec("share of hot rows without a lookup"),
    "roostream_worker_slipstream_threshold": MetricSpec("threshold of row changes"),
    "roostream_worker_slipstream_realised_drop": MetricSpec("share of hot requests that were skipped"),
    "roostream_worker_slipstream_half_width": MetricSpec("half width of the threshold's interval"),
    "roostream_worker_row_visits_total": MetricSpec("row gradients computed"),
    "roostream_worker_row_pushes_total": MetricSpec("row gradients pushed"),
    "roostream_worker_row_deferred_share": MetricSpec("share of gradients deferred"),
    "roostream_worker_deferred_rows": MetricSpec("rows with a deferred gradient"),
    "roostream_worker_unfrozen_rows_total": MetricSpec("deferred rows that changed again"),
    "roostream_worker_rehearsal_batches": MetricSpec("batches kept for rehearsal"),
    "roostream_worker_rehearsal_bytes": MetricSpec("memory of batches kept for rehearsal"),
}
TASKS = {  # of each task since the start
    "roostream_worker_base_rate": MetricSpec("mean label", _TASK),
    "roostream_worker_ne": MetricSpec("normalized entropy", _TASK),
    "roostream_worker_auc": MetricSpec("AUC", _TASK),
    "roostream_worker_request_auc": MetricSpec("mean AUC within requests", _TASK),
    "roostream_worker_mrr": MetricSpec("mean reciprocal rank", _TASK),
    "roostream_worker_ndcg_10": MetricSpec("NDCG@10", _TASK),
    "roostream_worker_calibration": MetricSpec("predicted divided by observed", _TASK),
}
WINDOWS = {
    "roostream_worker_window_candidates": MetricSpec("candidates", _WINDOW),
    "roostream_worker_window_base_rate": MetricSpec("mean label", _WINDOW),
    "roostream_worker_window_ne": MetricSpec("normalized entropy", _WINDOW),
    "roostream_worker_window_ne_online": MetricSpec("NE by the running base rate", _WINDOW),
    "roostream_worker_window_auc": MetricSpec("AUC", _WINDOW),
    "roostream_worker_window_calibration": MetricSpec("calibration", _WINDOW),
}
SLICES = {
    "roostream_worker_slice_candidates": MetricSpec("candidates", _SLICE),
    "roostream_worker_slice_ne": MetricSpec("normalized entropy", _SLICE),
    "roostream_worker_slice_auc": MetricSpec("AUC", _SLICE),
    "roostream_worker_slice_calibration": MetricSpec("calibration", _SLICE),
}
SHADOW = {
    "roostream_worker_shadow_candidates": MetricSpec("candidates", _SHADOW),
    "roostream_worker_shadow_ne": MetricSpec("normalized entropy", _SHADOW),
    "roostream_worker_shadow_auc": MetricSpec("AUC", _SHADOW),
    "roostream_worker_shadow_calibration": MetricSpec("calibration", _SHADOW),
}
DRIFT = {  # of `DriftDetector.report`
    "roostream_worker_drift_coverage": MetricSpec("share of present values", _FEATURE),
    "roostream_worker_drift_coverage_before": MetricSpec("earlier share", _FEATURE),
    "roostream_worker_drift_psi": MetricSpec("population stability index", _FEATURE),
    "roostream_worker_drift_lengths": MetricSpec("PSI of list lengths", _FEATURE),
    "roostream_worker_drift_base_rate": MetricSpec("mean label", _TASK),
    "roostream_worker_drift_base_rate_before": MetricSpec("earlier mean label", _TASK),
    "roostream_worker_drift_new_ids": MetricSpec("share of new ids", ("table",)),
}

WORKER = {
    "roostream_worker_requests_total": MetricSpec("requests scored, or skipped without a score"),
    "roostream_worker_candidates_total": MetricSpec("candidates scored"),
    "roostream_worker_frozen_total": MetricSpec("requests scored but not trained (freeze_at_ms)"),
    "roostream_worker_non_finite_total": MetricSpec("requests with non-finite results"),
    "roostream_worker_dead_letters_total": MetricSpec("records published as dead letters"),
    "roostream_worker_corrections_total": MetricSpec("corrections trained"),
    "roostream_worker_rehearsed_total": MetricSpec("requests trained again by rehearsal"),
    "roostream_worker_outcomes_total": MetricSpec("requests by outcome", ("outcome",)),
    "roostream_worker_step": MetricSpec("training step"),
    "roostream_worker_watermark_timestamp_seconds": MetricSpec("event time up to which rows are trained"),
    "roostream_worker_incarnation": MetricSpec("incarnation that the worker trains in"),
    "roostream_worker_training": MetricSpec("1 while training is running"),
    "roostream_worker_duplicates_total": MetricSpec("duplicate samples skipped"),
    "roostream_worker_lost_records_total": MetricSpec("samples deleted before training"),
    "roostream_worker_row_wait_share": MetricSpec("share of time spent waiting for rows"),
    "roostream_worker_stage_seconds_total": MetricSpec("time spent by stage", ("stage", "thread")),
    "roostream_worker_max_staleness": MetricSpec("most pushes between a pull and training"),
    "roostream_worker_shared_rows_total": MetricSpec("rows trained from an older value"),
    "roostream_worker_lag_records": MetricSpec("samples that are not trained yet"),
    "roostream_worker_lag_seconds": MetricSpec("lag in event time"),
    "roostream_worker_hidden_records": MetricSpec("samples of open transactions"),
    "roostream_worker_retention_share": MetricSpec("lag as a share of the records that retention keeps"),
    "roostream_worker_arrived_per_second": MetricSpec("samples that arrive per second"),
    "roostream_worker_consumed_per_second": MetricSpec("samples trained per second"),
    "roostream_worker_drained_per_second": MetricSpec("decrease of the lag per second"),
    "roostream_worker_eta_seconds": MetricSpec("estimated time until caught up"),
    "roostream_worker_eta_low_seconds": MetricSpec("lower bound of the estimated time"),
    "roostream_worker_eta_high_seconds": MetricSpec("upper bound of the estimated time"),
    "roostream_worker_state": MetricSpec("1 for the current training state", ("state",)),
    "roostream_worker_state_seconds_total": MetricSpec("time spent by training state", ("state",)),
    "roostream_worker_partition_lag_records": MetricSpec("samples that are not trained yet", _PARTITION),
    "roostream_worker_partition_lag_seconds": MetricSpec("lag in event time", _PARTITION),
    "roostream_worker_partition_lost_records_total": MetricSpec(
        "samples deleted before training", _PARTITION
    ),
    "roostream_worker_shadow_version": MetricSpec("1 for the shadow's version", ("version",)),
    **SELECTION,
    **TASKS,
    **WINDOWS,
    **SLICES,
    **SHADOW,
    **DRIFT,
}


def key_of(metric: str, group: str = "") -> str:
    """The key of a worker's metric in the report that has its value: the name without prefix, `group` (such
    as "window_") and unit."""
    key = metric.removeprefix(f"roostream_worker_{group}").removesuffix("_total")
    return "ndcg@10" if key == "ndcg_10" else key


WORKER_ROWS = {  # of a worker that holds rows in the initial phase
    "roostream_worker_exchanged_bytes_total": MetricSpec("ids, rows and gradients exchanged with workers"),
    "roostream_worker_impression_bytes_total": MetricSpec(
        "bytes that expanded impressions would have exchanged"
    ),
}

CONTROLLER = {
    "roostream_controller_incarnation": MetricSpec("current incarnation"),
    "roostream_controller_seq": MetricSpec("number of the last commit"),
    "roostream_controller_state": MetricSpec("1 for the coordinator's state", ("state",)),
    "roostream_controller_committed_timestamp_seconds": MetricSpec("time of the last commit"),
    "roostream_controller_uncommitted_timestamp_seconds": MetricSpec(
        "since when trained samples wait for a commit; absent while none do"
    ),
    "roostream_controller_commit_seconds": MetricSpec("duration of the last commit"),
    "roostream_controller_commit_phase_seconds": MetricSpec("duration of its phases", ("phase",)),
    "roostream_controller_paused_seconds": MetricSpec("pause of training by the last commit"),
    "roostream_controller_commits_total": MetricSpec("commits"),
    "roostream_controller_aborts_total": MetricSpec("aborted commits"),
    "roostream_controller_rollbacks_total": MetricSpec("restores of all members"),
    "roostream_controller_workers": MetricSpec("workers in training"),
    "roostream_controller_wanted_workers": MetricSpec("wanted number of workers"),
    "roostream_controller_device_seconds_total": MetricSpec("device time by use", ("spent_on",)),
    "roostream_controller_held": MetricSpec("1 while training is on hold", ("kind",)),
    "roostream_controller_history_left_records": MetricSpec("historical samples that are not committed"),
    "roostream_controller_topic_problems": MetricSpec(
        "topics with partitions that nobody reads, deleted or created again, or compacted"
    ),
    "roostream_controller_readers": MetricSpec("connected and wanted reader programs", ("what",)),
    "roostream_controller_splits_wanted": MetricSpec("splits that workers wait for"),
    "roostream_controller_leases_expired_total": MetricSpec("leases that expired"),
}

WORKER_READING = {
    "roostream_worker_reading_fetched_pieces_total": MetricSpec("pieces of splits received from readers"),
    "roostream_worker_reading_fetched_requests_total": MetricSpec("requests received from readers"),
    "roostream_worker_reading_fetched_bytes_total": MetricSpec("bytes received from readers"),
    "roostream_worker_reading_refused_pieces_total": MetricSpec("pieces sent under a lease that had ended"),
    "roostream_worker_reading_buffer_fullness": MetricSpec("share of the buffer's limit in use"),
    "roostream_worker_reading_buffer_pieces": MetricSpec("pieces in the buffer"),
    "roostream_worker_reading_buffer_bytes": MetricSpec("bytes in the buffer"),
    "roostream_worker_reading_splits_in_flight": MetricSpec("splits that are requested at the same time"),
    "roostream_worker_reading_stalled_seconds_total": MetricSpec("time that training waited for rows"),
    "roostream_worker_reading_stall_share": MetricSpec("share of time that training waited for rows"),
}

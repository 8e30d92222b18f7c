"""All metrics that serving exports.

The scoring thread observes the stages `hydrate`, `encode` and `score`, Redis times and scores; the event loop
observes the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from roostream.runtime.histograms import cumulative_buckets
from roostream.runtime.metrics_collector import MetricSpec

MAX_ACTIONS = 20  # names of unused actions that get a series of their own
REQUEST_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STAGE_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
SCORES = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
)

METRICS = {
    "roostream_serving_ready": MetricSpec("1 once embedding rows are loaded"),
    "roostream_serving_in_flight": MetricSpec("rank requests in progress"),
    "roostream_serving_connections": MetricSpec("open HTTP connections"),
    "roostream_serving_reading_bytes": MetricSpec("bytes of request bodies that are being received"),
    "roostream_serving_service_time_seconds": MetricSpec("recent scoring time per rank request"),
    "roostream_serving_keys": MetricSpec("bearer keys in the key file, including expired ones"),
    "roostream_serving_keys_file_refused": MetricSpec(
        "1 if the key file is invalid and the previous keys stay in force"
    ),
    "roostream_serving_log_backlog_records": MetricSpec(
        "records of the feature log that Kafka has not acknowledged"
    ),
    "roostream_serving_log_backlog_bytes": MetricSpec(
        "bytes of the feature log that Kafka has not acknowledged"
    ),
    "roostream_serving_log_refused_records_total": MetricSpec(
        "records of the feature log that Kafka rejected"
    ),
    "roostream_serving_log_damaged_records_total": MetricSpec(
        "records of the feature log that were damaged on disk"
    ),
    "roostream_serving_replica_rows": MetricSpec("embedding rows in memory"),
    "roostream_serving_replica_lag_records": MetricSpec("records of the rows topic that are not applied yet"),
    "roostream_serving_replica_applied_total": MetricSpec("row deltas and barriers applied"),
    "roostream_serving_replica_refused_total": MetricSpec(
        "records of the rows topic that could not be applied"
    ),
    "roostream_serving_replica_bootstraps_total": MetricSpec("times that all rows were read from the shards"),
    "roostream_serving_replica_repaired_buckets_total": MetricSpec(
        "stale buckets that were read from their shards again"
    ),
    "roostream_serving_rows_current_timestamp_seconds": MetricSpec(
        "when all rows were last known to be current"
    ),
    "roostream_serving_row_cache_lookups_total": MetricSpec("row lookups in the cache"),
    "roostream_serving_row_cache_misses_total": MetricSpec("row lookups that the cache could not answer"),
    "roostream_serving_row_cache_initial_values_total": MetricSpec(
        "missed rows scored with their initial value"
    ),
    "roostream_serving_row_cache_evictions_total": MetricSpec("rows evicted from the cache"),
    "roostream_serving_row_cache_absent_keys": MetricSpec("keys that the cache knows to have no row"),
    "roostream_serving_row_reads_failed_total": MetricSpec("failed reads of missing rows from a shard"),
    "roostream_serving_version_swaps_total": MetricSpec("model versions installed"),
    "roostream_serving_versions_refused_total": MetricSpec(
        "committed model versions that cannot be served", ("reason",)
    ),
    "roostream_serving_shadow_scored_total": MetricSpec("requests that the shadow version scored as well"),
    "roostream_serving_shadow_dropped_total": MetricSpec("requests that the shadow version had no time for"),
    "roostream_serving_shadow_failures_total": MetricSpec("requests that the shadow version could not score"),
    "roostream_serving_interleaved_total": MetricSpec(
        "requests answered with the interleaved list of two versions"
    ),
    "roostream_serving_interleave_failures_total": MetricSpec(
        "requests that the rival version could not score"
    ),
    "roostream_serving_interleave_requests": MetricSpec(
        "interleaved requests with an engagement, by the version that won", ("outcome",)
    ),
    "roostream_serving_items": MetricSpec("catalogue items that have a vector"),
    "roostream_serving_items_due": MetricSpec(
        "items whose rows changed and whose vectors wait for an update"
    ),
    "roostream_serving_items_lag_seconds": MetricSpec("how long the oldest due item has waited"),
    "roostream_serving_items_refreshed_total": MetricSpec("item vectors updated because rows changed"),
    "roostream_serving_items_built_total": MetricSpec(
        "times that all vectors were built for a new version or catalogue"
    ),
    "roostream_serving_items_build_seconds": MetricSpec("duration of the last build of all vectors"),
    "roostream_serving_items_refused_total": MetricSpec("catalogues and versions that retrieval cannot use"),
    "roostream_serving_items_recall": MetricSpec(
        "recall of the index against exact search, over recent sampled requests"
    ),
    "roostream_serving_items_recall_samples_total": MetricSpec("requests that the recall was measured with"),
    "roostream_serving_items_exact_searches_total": MetricSpec(
        "searches that compared every item despite an index"
    ),
}
"""Metrics that are read when they are scraped."""


class ServingMetrics:
    """One per registry."""

    def __init__(self, registry: CollectorRegistry, tasks: Sequence[str] = ()) -> None:
        self.registry = registry
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter(
            "roostream_serving_requests_total", "answers by route and status", ["route", "status"]
        )
        self._requests.labels("rank", "200")  # 0 until the first request, which an alert compares
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.candidates = counter("roostream_serving_candidates_total", "candidates scored")
        self.degraded = counter(
            "roostream_serving_degraded_total", "rank answers without online features or up-to-date rows"
        )
        self.engagements = counter("roostream_serving_engagements_total", "engagements accepted")
        self._unused = counter(
            "roostream_serving_engagements_unused_total",
            "engagements accepted whose action no label and no online feature counts",
            ["action"],
        )
        self._unused_actions: set[str] = set()
        self._seconds = Histogram(
            "roostream_serving_request_seconds",
            "response time by route and class of status",
            ["route", "status"],
            buckets=REQUEST_S,
            registry=registry,
        )
        self.stages = StageHistograms()
        self.scores = ScoreHistogram(tasks)
        stages = self.stages
        for histogram in (stages.seconds, stages.queue, stages.redis_seconds, self.scores):
            registry.register(histogram)
        self._version = gauge("roostream_serving_model_version", "1 for the version in use", ["version"])
        self._version_time = gauge(
            "roostream_serving_model_timestamp_seconds", "when the version in use was committed"
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count one answer. Called from the event loop."""
        series = self._series.get((route, status))
        if series is None:
            series = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route, f"{status // 100}xx"),
            )
            self._series[route, status] = series
        series[0].inc()
        series[1].observe(seconds)

    def unused_action(self, action: str, count: int) -> None:
        """Count by name for the first MAX_ACTIONS names, and as `(other)` beyond: names come from clients."""
        if action not in self._unused_actions and len(self._unused_actions) >= MAX_ACTIONS:
            action = "(other)"
        else:
            self._unused_actions.add(action)
        self._unused.labels(action).inc(count)

    def show_version(self, name: str, committed_ms: int) -> None:
        self._version.clear()
        self._version.labels(name).set(1)
        self._version_time.set(committed_ms / 1000)


class StageHistograms:
    """Where the time of a rank request goes, in seconds."""

    def __init__(self) -> None:
        histogram = partial(Histogram, buckets=STAGE_S, registry=None)
        self.seconds = histogram(
            "roostream_serving_stage_seconds", "time of the stages of a rank request", ["stage"]
        )
        self.parse = self.seconds.labels("parse")
        self.hydrate = self.seconds.labels("hydrate")
        self.encode = self.seconds.labels("encode")
        self.score = self.seconds.labels("score")  # the request's share of its scoring pass
        self.log = self.seconds.labels("log")
        self.queue = histogram(
            "roostream_serving_queue_seconds", "time that a parsed rank request waits to be scored"
        )
        self.redis_seconds = histogram(
            "roostream_serving_redis_seconds", "time of a Redis read, by outcome", ["outcome"]
        )
        self.redis_ok = self.redis_seconds.labels("ok")
        self.redis_failed = self.redis_seconds.labels("failed")


class ScoreHistogram(Collector):
    """Histogram of served scores by task.

    `add` only copies the scores into a buffer; they are counted when the buffer is full or scraped. One
    thread adds, any thread collects.
    """

    _BUFFER_ROWS = 8192

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tuple(tasks)
        self._lock = threading.Lock()
        self._buffer_NT = np.empty((self._BUFFER_ROWS, len(self.tasks)), np.float32)
        self._num_buffered = 0
        self._counts_TB = np.zeros((len(self.tasks), len(SCORES) + 1), np.int64)
        self._sum_T = np.zeros(len(self.tasks))

    def add(self, scores_nT: np.ndarray) -> None:
        """Scores of one answer; at most the first `_BUFFER_ROWS` candidates are counted."""
        scores_nT = scores_nT[: self._BUFFER_ROWS]
        begin, end = self._num_buffered, self._num_buffered + len(scores_nT)
        if end > self._BUFFER_ROWS:
            with self._lock:
                self._counts_TB, self._sum_T = self._totals()
                self._num_buffered = 0
            begin, end = 0, len(scores_nT)
        self._buffer_NT[begin:end] = scores_nT
        self._num_buffered = end

    def collect(self) -> list[Metric]:
        with self._lock:
            counts_TB, sum_T = self._totals()
        family = HistogramMetricFamily("roostream_serving_score", "served scores by task", labels=("task",))
        for task, counts_B, total in zip(self.tasks, counts_TB, sum_T, strict=True):
            family.add_metric([task], cumulative_buckets(SCORES, counts_B.tolist()), float(total))
        return [family]

    def _totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts [T, B] and sums [T], including the buffered scores."""
        buffered_NT = self._buffer_NT[: self._num_buffered]
        width = self._counts_TB.shape[1]
        counts = [
            np.bincount(np.searchsorted(SCORES, column_N), minlength=width) for column_N in buffered_NT.T
        ]
        counts_TB = self._counts_TB + counts if counts else self._counts_TB
        return counts_TB, self._sum_T + buffered_NT.sum(axis=0, dtype=np.float64)

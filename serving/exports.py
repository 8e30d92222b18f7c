"""The Prometheus metrics of serving. Scoring threads and the event loop observe them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from roostream.runtime.histograms import cumulative_buckets

MAX_ACTIONS = 20  # that nothing counts, shown by name
REQUEST_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.008, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
STAGE_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
SCORES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    0.99,
)


class ServingMetrics:
    """One per registry."""

    def __init__(self, registry: CollectorRegistry, tasks: Sequence[str] = ()) -> None:
        self.registry = registry
        self._requests = Counter(
            "roostream_serving_requests",
            "answers by route and status",
            ["route", "status"],
            registry=registry,
        )
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.candidates = Counter("roostream_serving_candidates", "candidates scored", registry=registry)
        self.degraded = Counter(
            "roostream_serving_degraded", "answers without hydration or rows", registry=registry
        )
        self.engagements = Counter("roostream_serving_engagements", "engagements taken", registry=registry)
        self._unused = Counter(
            "roostream_serving_engagements_unused",
            "engagements taken whose action no label and no online feature counts",
            ["action"],
            registry=registry,
        )
        self._unused_actions: set[str] = set()
        self._seconds = Histogram(
            "roostream_serving_request_seconds",
            "time of an answer, by route and class of status",
            ["route", "status"],
            buckets=REQUEST_S,
            registry=None,
        )
        self.stages = RankTimes()
        self.scores = ScoreSpread(tasks)
        for collector in (
            self._seconds,
            self.stages.seconds,
            self.stages.queue_seconds,
            self.stages.redis_seconds,
            self.scores,
        ):
            registry.register(collector)
        self.version = Gauge(
            "roostream_serving_model_version", "1 for the version in use", ["version"], registry=registry
        )
        self.version_time = Gauge(
            "roostream_serving_model_timestamp_seconds", "when it was committed", registry=registry
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        """From the event loop."""
        child = self._children.get((route, status))
        if child is None:
            child = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route, f"{status // 100}xx"),
            )
            self._children[route, status] = child
        child[0].inc()
        child[1].observe(seconds)

    def unused_action(self, action: str, count: int) -> None:
        """By name for the first MAX_ACTIONS names, which come from outside; as `(other)` beyond."""
        if action not in self._unused_actions and len(self._unused_actions) >= MAX_ACTIONS:
            action = "(other)"
        else:
            self._unused_actions.add(action)
        self._unused.labels(action).inc(count)

    def show_version(self, name: str, time_ms: int) -> None:
        self.version.clear()
        self.version.labels(name).set(1)
        self.version_time.set(time_ms / 1000)


class RankTimes:
    """Where the time of a rank goes; each is told in seconds as it ends."""

    def __init__(self) -> None:
        self.seconds = Histogram(
            "roostream_serving_stage_seconds",
            "time of a rank's stages",
            ["stage"],
            buckets=STAGE_S,
            registry=None,
        )
        self.parse = self.seconds.labels("parse")  # event loop
        self.hydrate = self.seconds.labels("hydrate")  # who scores, as the next two
        self.encode = self.seconds.labels("encode")
        self.score = self.seconds.labels("score")  # a request's share of the pass that it was scored in
        self.log = self.seconds.labels("log")  # event loop
        self.queue_seconds = Histogram(
            "roostream_serving_queue_seconds",
            "a parsed rank waits to be scored",
            buckets=STAGE_S,
            registry=None,
        )
        self.queue = self.queue_seconds  # event loop
        self.redis_seconds = Histogram(
            "roostream_serving_redis_seconds",
            "a read of Redis, by outcome",
            ["outcome"],
            buckets=STAGE_S,
            registry=None,
        )
        self.redis_ok, self.redis_failed = (
            self.redis_seconds.labels("ok"),
            self.redis_seconds.labels("failed"),
        )


class ScoreSpread(Collector):
    """Scores as served, by task, in fixed buckets. Kept as they come, and counted some thousands at a time: a rank pays for a
    copy. Added to by one thread; read by any."""

    _ROWS = 8192

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tuple(tasks)
        self._lock = threading.Lock()
        self._waiting_NT = np.empty((self._ROWS, len(self.tasks)), np.float32)
        self._num_waiting = 0
        self._counts_TB = np.zeros((len(self.tasks), len(SCORES) + 1), np.int64)
        self._sum_T = np.zeros(len(self.tasks))

    def add(self, scores_nT: np.ndarray) -> None:
        """Of one answer; of a larger one than `_ROWS` the first so many."""
        scores_nT = scores_nT[: self._ROWS]
        begin, end = self._num_waiting, self._num_waiting + len(scores_nT)
        if end > self._ROWS:
            with self._lock:
                self._counts_TB, self._sum_T = self._counted()
                self._num_waiting = 0
            begin, end = 0, len(scores_nT)
        self._waiting_NT[begin:end] = scores_nT
        self._num_waiting = end

    def collect(self) -> list[Metric]:
        with self._lock:
            counts_TB, sum_T = self._counted()
        family = HistogramMetricFamily(
            "roostream_serving_score", "scores as served, by task", labels=("task",)
        )
        for task, counts_B, total in zip(self.tasks, counts_TB, sum_T, strict=True):
            family.add_metric([task], cumulative_buckets(SCORES, counts_B.tolist()), float(total))
        return [family]

    def _counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts and sums with those that wait; nothing is changed."""
        waiting_NT = self._waiting_NT[: self._num_waiting]
        width = self._counts_TB.shape[1]
        spread = [
            np.bincount(np.searchsorted(SCORES, column_N), minlength=width) for column_N in waiting_NT.T
        ]
        counts_TB = self._counts_TB + spread if spread else self._counts_TB
        return counts_TB, self._sum_T + waiting_NT.sum(axis=0, dtype=np.float64)

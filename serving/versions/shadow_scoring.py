"""Shadow scoring: a second version scores requests after they are answered, to compare the two versions
before users depend on it.

Nothing is answered or logged. It runs in its own thread, while no request is in progress; requests that it
has no time for are dropped and counted. Letters: n candidates, T tasks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from roostream.runtime.log_rate_limit import LogRateLimit, error_kind
from serving.scorer import RowReader, Version, probabilities
from serving.versions.idle_gate import IdleGate
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import ScoredRequest

log = logging.getLogger("roostream.serving.versions")

MAX_WAITING = 64
PATIENCE_S = 0.5  # to wait for a moment without requests
_TURN_S = 0.2
_APART = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_ORDERS = (1e-6, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class _Waiting(NamedTuple):
    request: ScoredRequest
    shadow: Version


class ShadowScoring(Collector):
    """Call `offer` in the scoring thread; `run` is a thread."""

    def __init__(self, versions: LoadedVersions, rows: RowReader, task: int, idle_gate: IdleGate) -> None:
        self.versions, self.rows, self.task, self.idle_gate = versions, rows, task, idle_gate
        self.num_scored = self.num_dropped = self.num_failed = 0
        self._waiting: queue.Queue[_Waiting] = queue.Queue(MAX_WAITING)
        self._log_rate_limit = LogRateLimit()
        self._histograms = (
            Histogram(
                "roostream_serving_shadow_difference",
                "mean absolute difference of a request's scores, served and shadow",
                buckets=_APART,
                registry=None,
            ),
            Histogram(
                "roostream_serving_shadow_rank_distance",
                "1 - Spearman's correlation of the two orders: 0 = equal, 2 = reversed",
                buckets=_ORDERS,
                registry=None,
            ),
            Histogram(
                "roostream_serving_shadow_top_overlap",
                "share of the first 10 slots that both orders have in theirs",
                buckets=_SHARES,
                registry=None,
            ),
        )

    def offer(self, request: ScoredRequest) -> None:
        """Queue a request if the shadow's share includes it. Never blocks."""
        shadow = self.versions.choose_shadow(request)
        if shadow is None:
            return
        try:
            self._waiting.put_nowait(_Waiting(request, shadow))
        except queue.Full:
            self.num_dropped += 1

    def run(self, stop: threading.Event) -> None:
        """Process until `stop`."""
        while not stop.is_set():
            self.turn(stop)

    def turn(self, stop: threading.Event | None = None, max_s: float = _TURN_S) -> None:
        """Score the next queued request, if one arrives within `max_s`."""
        try:
            waiting = self._waiting.get(timeout=max_s)
        except queue.Empty:
            return
        if self.idle_gate.wait(PATIENCE_S, stop):
            self._compare(waiting)
        else:
            self.num_dropped += 1

    def collect(self) -> Iterable[Metric]:
        for histogram in self._histograms:
            yield from histogram.collect()

    def _compare(self, waiting: _Waiting) -> None:
        request, shadow = waiting
        try:
            scores_nT = probabilities(request.score_with(shadow, self.rows))
        except Exception as error:  # also a lack of memory: it must not end the process that serves
            self.num_failed += 1
            text = "shadow version %s cannot score a request: %r"
            self._log_rate_limit.warning(log, error_kind(error), text, shadow.name, error)
            return
        self.num_scored += 1
        found: Differences = differences(request.scores_nT, scores_nT, self.task)
        for histogram, value in zip(
            self._histograms, (found.mean_abs, 1 - found.rank_correlation, found.top_overlap), strict=True
        ):
            histogram.observe(value)


TOP = 10


class Differences(NamedTuple):
    """How the scores of two versions differ on one request."""

    mean_abs: float  # of probabilities, over candidates and tasks
    rank_correlation: float  # Spearman's, of the task that orders; 1 for a single candidate
    top_overlap: float  # share of one version's first TOP slots that is in the other's


def differences(one_nT: np.ndarray, other_nT: np.ndarray, task: int) -> Differences:
    """Compare float32 probabilities; equal scores keep the request's order, as in an answer."""
    one, other = _ranks(one_nT[:, task]), _ranks(other_nT[:, task])
    top = min(TOP, len(one))
    overlap = int(((one < top) & (other < top)).sum()) / top
    return Differences(
        float(np.abs(one_nT - other_nT).mean(dtype=np.float64)), _spearman(one, other), overlap
    )


def _ranks(scores_n: np.ndarray) -> np.ndarray:
    """int64 [n]: slot of each candidate."""
    rank_n = np.empty(len(scores_n), dtype=np.int64)
    rank_n[np.argsort(-scores_n, kind="stable")] = np.arange(len(scores_n))
    return rank_n


def _spearman(one_n: np.ndarray, other_n: np.ndarray) -> float:
    """1 − 6 Σ d² / (n (n² − 1)), of ranks without ties."""
    n = len(one_n)
    return 1.0 if n < 2 else float(1 - 6 * int(((one_n - other_n) ** 2).sum()) / (n * (n * n - 1)))

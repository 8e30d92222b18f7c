"""Latency histograms of programs, and quantiles computed from histogram buckets for web pages without a
Prometheus server."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.utils import floatToGoString

BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)


def _log_spaced(first_exponent: int, last_exponent: int, per_decade: int) -> tuple[float, ...]:
    """Bounds from 10^first (included) to 10^last (not included)."""
    steps = range(first_exponent * per_decade, last_exponent * per_decade)
    return tuple(float(f"{10 ** (step / per_decade):.3g}") for step in steps)


FRESHNESS_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    *_log_spaced(-2, 0, per_decade=10),
    *_log_spaced(0, 3, per_decade=20),
    *_log_spaced(3, 5, per_decade=10),
    100_000.0,
)
"""Quantiles of these times are shown on a page, and that of the whole should agree with those of its stages.
A quantile between two bounds is off by at most their distance: 12 % from 1 s to 1,000 s, else 26 %."""

Buckets = Mapping[float, float]
"""Upper bound, including inf → observations up to this bound since the program started."""

_MIN_INTERVAL_S = 2.0  # snapshots that are closer replace each other, so that their number is bounded


class StageHistogram:
    """The Prometheus histogram `name{stage=…}` in seconds, observed in milliseconds. Thread-safe."""

    def __init__(
        self,
        name: str,
        help: str,
        buckets_s: Sequence[float] = BUCKETS_S,
        registry: CollectorRegistry | None = REGISTRY,
    ) -> None:
        self.histogram = Histogram(name, help, ["stage"], buckets=buckets_s, registry=registry)

    def observe(self, stage: str, ms: float) -> None:
        self.histogram.labels(stage).observe(ms / 1000)

    def buckets(self, stage: str) -> Buckets:
        """The cumulative buckets of one stage, as exported."""
        self.histogram.labels(stage)
        return {
            float(sample.labels["le"]): sample.value
            for family in self.histogram.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket") and sample.labels["stage"] == stage
        }


@functools.cache
def freshness_histogram() -> StageHistogram:
    """The process's histogram of the time between stages of the training loop; created and registered
    once."""
    return StageHistogram(
        "roostream_freshness_seconds", "time between stages of the loop", FRESHNESS_BUCKETS_S
    )


def cumulative_buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts a bucket [len(bounds) + 1] → Prometheus' cumulative buckets."""
    return list(zip([*map(floatToGoString, bounds), "+Inf"], itertools.accumulate(counts), strict=True))


class RecentQuantiles:
    """Quantiles of what a histogram counted recently, from snapshots of its cumulative buckets. Not
    thread-safe."""

    def __init__(self, window_s: float = 120.0) -> None:
        self.window_s = window_s
        self._snapshots: deque[tuple[float, Buckets]] = deque()

    def add(self, at_s: float, buckets: Buckets) -> None:
        """Add the cumulative counts of a scrape. `at_s`: of a monotonic clock. Counts that fell belong to a
        restarted process, which began at 0."""
        snapshots = self._snapshots
        if snapshots and any(buckets.get(bound, 0.0) < count for bound, count in snapshots[-1][1].items()):
            snapshots.clear()
            snapshots.append((at_s, {}))
        if len(snapshots) > 1 and snapshots[-1][0] - snapshots[-2][0] < _MIN_INTERVAL_S:
            snapshots.pop()
        snapshots.append((at_s, dict(buckets)))
        while len(snapshots) > 2 and snapshots[1][0] <= at_s - self.window_s:
            snapshots.popleft()

    def quantile(self, q: float) -> float | None:
        """Of the observations within `window_s`, or since the first snapshot; of all if there is only one
        snapshot. None: there were no observations. See `quantile_of`."""
        if not self._snapshots:
            return None
        before = self._snapshots[0][1] if len(self._snapshots) > 1 else {}
        newest = self._snapshots[-1][1]
        return quantile_of({bound: count - before.get(bound, 0.0) for bound, count in newest.items()}, q)


def quantile_of(buckets: Buckets, q: float) -> float | None:
    """In the histogram's unit, interpolated linearly within its bucket. None without observations, and where
    it lies above the highest finite bound, because nothing says how far."""
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank, below, lower = q * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            inside = (rank - below) / (buckets[bound] - below)
            return lower + (bound - lower) * inside if math.isfinite(bound) else None
        below, lower = buckets[bound], bound
    return None

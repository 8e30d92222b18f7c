"""How long what users did takes until it is served, from the histograms of the programs that measure it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roostream.runtime.histograms import RecentQuantiles
from roostream.runtime.scrape import ScrapedMetrics

STAGES = (
    "engagement_to_close",
    "close_to_readable",
    "readable_to_trained",
    "trained_to_servable",
    "engagement_to_servable",
)
UNKNOWN: Mapping[str, float | None] = {"p50_ms": None, "p99_ms": None}
_BUCKETS = "roostream_freshness_seconds_bucket"
_QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99}


class FreshnessTracker:
    """`look` from one thread, `of` from any."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], RecentQuantiles] = {}  # by program and stage
        self._told: dict[str, dict[str, dict[str, float | None]]] = {}

    def look(self, at_s: float, scraped: Mapping[str, ScrapedMetrics]) -> None:
        """What programs tell at a moment of a clock that never goes back; of those that don't answer, what they told before
        stays what theirs is compared with."""
        told: dict[str, dict[str, dict[str, float | None]]] = {}
        for name, answer in scraped.items():
            for stage in STAGES:
                if buckets := answer.by(_BUCKETS, "le", stage=stage):
                    recent = self._recent.setdefault((name, stage), RecentQuantiles())
                    recent.add(at_s, {float(bound): count for bound, count in buckets.items()})
                    told.setdefault(name, {})[stage] = {
                        key: _ms(recent.quantile(q)) for key, q in _QUANTILES.items()
                    }
        self._told = told

    def of(self, programs: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Stage → p50 and p99 in ms of the last minutes, the worst of these programs; None where none of them knows."""
        told = [self._told[name] for name in programs if name in self._told]
        return {
            stage: {key: _worst([its.get(stage, UNKNOWN)[key] for its in told]) for key in _QUANTILES}
            for stage in STAGES
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _worst(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)

"""What other programs report at their /metrics, for the controller's page and `roostream status`.

A program that does not answer reports nothing. A value that no program reports is None, which means unknown,
never 0."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roostream.runtime import scrape
from roostream.runtime.clock import Clock
from roostream.runtime.histograms import RecentQuantiles
from roostream.runtime.scrape import ScrapedMetrics
from trainer.monitoring.audit_parts import accounted
from trainer.monitoring.verdict import report_of

SCRAPE_S = 5.0
STALE_S = 3 * SCRAPE_S  # an older reading is ignored
# Text from a member becomes part of a URL only if it has this form.
_ADDRESS = re.compile(r"(https://)?[\w.:\[\]-]+:\d{1,5}")

FRESHNESS_STAGES = (
    "engagement_to_close",
    "close_to_readable",
    "readable_to_trained",
    "trained_to_servable",
    "engagement_to_servable",
)
UNKNOWN: Mapping[str, float | None] = {"p50_ms": None, "p99_ms": None}
_QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99}

Fetch = Callable[[Mapping[str, str | None]], dict[str, ScrapedMetrics]]


class ScrapeTargets:
    """Scrapes the programs at `urls` (name → URL of /metrics), and workers at the addresses that they report.
    One thread calls `run`. `figures` is safe from any thread."""

    def __init__(
        self,
        urls: Mapping[str, str],
        clock: Clock,
        fetch: Fetch = scrape.fetch_all,
        workers: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`workers()`: connected workers → "host:port" or "https://host:port" of their metrics; "" if
        unknown. Called from any thread."""
        self.settings, self.clock, self._fetch, self._workers = dict(urls), clock, fetch, workers
        self._scraped: tuple[float, dict[str, ScrapedMetrics]] | None = None
        self._freshness = FreshnessTracker()

    @property
    def urls(self) -> dict[str, str]:
        return with_workers(self.settings, self._workers())

    def run(self, stop: threading.Event) -> None:
        """Scrape every SCRAPE_S until `stop`."""
        while not stop.is_set():
            self.scrape()
            self.clock.sleep(SCRAPE_S, stop)

    def scrape(self) -> None:
        """Scrape all programs once, in parallel."""
        if urls := self.urls:
            now_s, scraped = self.clock.monotonic_s(), self._fetch(urls)
            self._freshness.add(now_s, scraped)
            self._scraped = now_s, scraped

    def figures(self) -> dict[str, Any]:
        """The newest values. All are unknown if nothing was scraped, or the last answers are older than
        STALE_S."""
        return read_figures(self.urls, self._answers()) | {"freshness": self.freshness()}

    def freshness(self) -> dict[str, dict[str, float | None]]:
        """Stage → p50 and p99 in ms over the last minutes; None as in `figures`."""
        return self._freshness.worst(self._answers())

    def _answers(self) -> dict[str, ScrapedMetrics]:
        if self._scraped is None or self.clock.monotonic_s() - self._scraped[0] > STALE_S:
            return {}
        return self._scraped[1]


class FreshnessTracker:
    """Latency from user actions to serving, from the histograms of all programs. One thread calls `add`, any
    thread `worst`."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, str], RecentQuantiles] = {}  # by program and stage
        self._quantiles: dict[str, dict[str, dict[str, float | None]]] = {}

    def add(self, now_s: float, scraped: Mapping[str, ScrapedMetrics]) -> None:
        """Add a scrape at a monotonic time. A program that does not answer is compared with its last answer
        later."""
        quantiles: dict[str, dict[str, dict[str, float | None]]] = {}
        for name, answer in scraped.items():
            for stage in FRESHNESS_STAGES:
                if buckets := _buckets(answer, stage):
                    recent = self._recent.setdefault((name, stage), RecentQuantiles())
                    recent.add(now_s, buckets)
                    quantiles.setdefault(name, {})[stage] = {
                        key: None if (seconds := recent.quantile(q)) is None else seconds * 1000
                        for key, q in _QUANTILES.items()
                    }
        self._quantiles = quantiles

    def worst(self, programs: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Stage → p50 and p99 in ms over the last minutes, the worst of `programs`. None if no program knows
        it."""
        known = [self._quantiles[name] for name in programs if name in self._quantiles]

        def worst(stage: str, key: str) -> float | None:
            values = [stages.get(stage, UNKNOWN)[key] for stages in known]
            return max((value for value in values if value is not None), default=None)

        return {stage: {key: worst(stage, key) for key in _QUANTILES} for stage in FRESHNESS_STAGES}


def _buckets(answer: ScrapedMetrics, stage: str) -> dict[float, float]:
    """Upper bound → cumulative count; {} if there are none, or a bound is no number."""
    counts = answer.by("roostream_freshness_seconds_bucket", "le", stage=stage)
    try:
        return {float(bound): count for bound, count in counts.items()}
    except ValueError:
        return {}


def with_workers(urls: Mapping[str, str], workers: Mapping[int, str]) -> dict[str, str]:
    """`urls` of the settings plus the URLs that workers report. `roostream scale` changes the number of
    workers, so a configured worker that is not among `workers` is left out, unless `workers` is empty."""
    connected = {None, *workers}
    configured = {n: url for n, url in urls.items() if not workers or _worker_number(n) in connected}
    known, numbers = set(configured.values()), {_worker_number(name) for name in configured}
    reported = {
        n: f"{address if address.startswith('https://') else f'http://{address}'}/metrics"
        for n, address in sorted(workers.items())
        if _ADDRESS.fullmatch(address) and n not in numbers
    }
    return configured | {
        f"worker-{n}" if n else "worker": url for n, url in reported.items() if url not in known
    }


def _worker_number(name: str) -> int | None:
    """`worker` is 0, `worker-3` is 3."""
    kind, _, number = name.partition("-")
    if kind != "worker":
        return None
    return int(number) if number.isdecimal() else 0


def read_figures(names: Mapping[str, str], scraped: Mapping[str, ScrapedMetrics]) -> dict[str, Any]:
    """Plain values of the programs `names`, as far as they answered."""
    workers = {name: s for name, s in scraped.items() if name.partition("-")[0] == "worker"}
    non_finite = {n: s.value("roostream_worker_non_finite_total") for n, s in workers.items()}
    return {
        "programs": {name: bool(scraped.get(name)) if scraped else None for name in names},
        "click_rate": click_rate(scraped.get("simulate", ScrapedMetrics())),
        "serving": serving_state(names, scraped),
        "joiner_watermark_ms": scraped.get("joiner", ScrapedMetrics()).ms(
            "roostream_joiner_watermark_timestamp_seconds"
        ),
        "shards": {
            name: {
                "rows": {stack: int(n) for stack, n in s.by("roostream_shard_rows", "stack").items()},
                "pulls": s.value("roostream_shard_pulls_total"),
                "bytes": s.value("roostream_shard_bytes"),
                "damaged": s.value("roostream_shard_damaged_segment_parts"),
            }
            for name, s in scraped.items()
            if name.startswith("shard-") and s
        },
        "partition_lag_records": {
            partition: lag
            for s in workers.values()
            for partition, lag in s.by("roostream_worker_partition_lag_records", "partition").items()
        },
        "accounted": accounted(scraped),
        "model_quality": report_of(scraped.get("auditor", ScrapedMetrics())),
        "lost_records": lost_records(scraped),
        "non_finite": {name: count for name, count in non_finite.items() if count is not None},
    }


def lost_records(scraped: Mapping[str, ScrapedMetrics]) -> dict[str, int]:
    """Program → number of records that are gone from Kafka (`RecordConsumer.num_lost`), since the program
    started; only programs with some."""
    lost = {
        name: s.value(_LOST_RECORDS[program])
        for name, s in scraped.items()
        if (program := name.partition("-")[0]) in _LOST_RECORDS
    }
    return {name: int(count) for name, count in lost.items() if count}


_LOST_RECORDS = {
    "worker": "roostream_worker_lost_records_total",
    "joiner": "roostream_joiner_lost_records",
    "features": "roostream_features_lost_records",
    "archiver": "roostream_archiver_lost_total",
}
"""Program → its metric of records that are gone from Kafka."""


def rows_by_stack(programs: Iterable[str], scraped: Mapping[str, ScrapedMetrics]) -> dict[str, int]:
    """Stack → number of rows of all shards among `programs`; {} (unknown) if one of them did not answer."""
    rows: dict[str, int] = {}
    for name in (name for name in programs if name.startswith("shard-")):
        if not scraped.get(name):
            return {}
        for stack, value in scraped[name].by("roostream_shard_rows", "stack").items():
            rows[stack] = rows.get(stack, 0) + int(value)
    return rows


def click_rate(simulate: ScrapedMetrics) -> dict[str, float | None]:
    """Expected clicks per shown candidate of the newest requests: as served, in random order, and in the best
    order. Also the ratio of served to random, for the newest requests and for all. Serving is still improving
    while the first ratio is above the second."""
    name, orders = "roostream_simulator_click_rate", ("served", "random", "best")
    rates, total = (
        {o: simulate.value(name, order=o, window=window) for o in orders} for window in ("recent", "total")
    )
    return {
        **rates,
        "served_to_random": _ratio(rates),
        "served_to_random_total": _ratio(total),
        "requests": simulate.value("roostream_simulator_requests_total"),
    }


def _ratio(rates: Mapping[str, float | None]) -> float | None:
    served, random = rates["served"], rates["random"]
    return served / random if served is not None and random else None


def serving_state(programs: Iterable[str], scraped: Mapping[str, ScrapedMetrics]) -> dict[str, Any]:
    """Number of answers of the serving processes among `programs` since their start, and the committed
    version that they score with. None while one does not answer, or for different versions."""
    each = [scraped.get(name, ScrapedMetrics()) for name in programs if name.partition("-")[0] == "serving"]
    requests = [serving.total("roostream_serving_requests_total") for serving in each]
    degraded = [serving.value("roostream_serving_degraded_total") for serving in each]
    versions = {serving.state("roostream_serving_model_version", "version") for serving in each}
    return {
        "requests": _whole_sum(requests),
        "degraded": _whole_sum(degraded),
        "version": versions.pop() if len(versions) == 1 else None,
    }


def _whole_sum(values: list[float | None]) -> float | None:
    """None if one is unknown, or there are none: a sum of some is no sum."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None

"""What other programs tell about themselves, read from their /metrics: the controller's page and `status` show the same.

A program that doesn't answer tells nothing, and what nobody tells is None: unknown, never 0.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from roostream.runtime import scrape
from roostream.runtime.clock import Clock
from roostream.runtime.scrape import ScrapedMetrics
from trainer.control.neighbour_times import FreshnessTracker

LOOK_S = 5.0
_ADDRESS = re.compile(
    r"(https://)?[\w.:\[\]-]+:\d{1,5}"
)  # nothing else that a member says becomes part of a URL
STALE_S = 3 * LOOK_S  # older than that, a reading says nothing about now

Fetch = Callable[[Mapping[str, str | None]], dict[str, ScrapedMetrics]]


class ScrapeTargets:
    """The programs at `urls` (name → URL of /metrics), and workers where they themselves say that they are; read by a thread that
    calls `run`. `figures` is safe from any thread."""

    def __init__(
        self,
        urls: Mapping[str, str],
        clock: Clock,
        fetch: Fetch = scrape.fetch_all,
        workers: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """`workers()`: those that are there → "host:port" of their metrics, "https://host:port", or "" where they can't say. Any
        thread calls it."""
        self.settings, self.clock, self._fetch, self._workers = dict(urls), clock, fetch, workers
        self._found: tuple[float, dict[str, ScrapedMetrics]] | None = None
        self._seen = FreshnessTracker()

    @property
    def urls(self) -> dict[str, str]:
        return with_workers(self.settings, self._workers())

    def run(self, stop: threading.Event) -> None:
        """Look every LOOK_S until `stop`."""
        while not stop.is_set():
            self.look()
            self.clock.sleep(LOOK_S, stop)

    def look(self) -> None:
        """Ask all of them once, side by side."""
        if urls := self.urls:
            now_s, scraped = self.clock.monotonic_s(), self._fetch(urls)
            self._seen.look(now_s, scraped)
            self._found = now_s, scraped

    def figures(self) -> dict[str, Any]:
        """What they told last; all unknown where nobody was asked, or the last answers are older than STALE_S."""
        return read_figures(self.urls, self._answers()) | {"freshness": self.freshness()}

    def freshness(self) -> dict[str, dict[str, float | None]]:
        """Stage → p50 and p99 in ms of the last minutes; None as in `figures`."""
        return self._seen.of(self._answers())

    def _answers(self) -> dict[str, ScrapedMetrics]:
        found = self._found
        return found[1] if found is not None and self.clock.monotonic_s() - found[0] <= STALE_S else {}


def with_workers(urls: Mapping[str, str], workers: Mapping[int, str]) -> dict[str, str]:
    """`urls` with the workers of a number that `roostream scale` changes: what settings say of one stands, what one says
    of itself is added, and who is not among `workers`, where there are any, is left out."""
    kept = {
        name: url
        for name, url in urls.items()
        if not workers or (number := _worker_number(name)) is None or number in workers
    }
    known, numbers = set(kept.values()), {_worker_number(name) for name in kept}
    told = {n: _url(at) for n, at in sorted(workers.items()) if _ADDRESS.fullmatch(at) and n not in numbers}
    return kept | {f"worker-{n}" if n else "worker": url for n, url in told.items() if url not in known}


def _url(at: str) -> str:
    return f"{at if at.startswith('https://') else f'http://{at}'}/metrics"


def _worker_number(name: str) -> int | None:
    """`worker` is 0, `worker-3` is 3."""
    kind, _, number = name.partition("-")
    if kind != "worker":
        return None
    return int(number) if number.isdecimal() else 0


def read_figures(names: Mapping[str, str], scraped: Mapping[str, ScrapedMetrics]) -> dict[str, Any]:
    """Plain values of programs called `names`, of those that answered."""
    workers = {name: s for name, s in scraped.items() if name.partition("-")[0] == "worker"}
    return {
        "programs": {name: bool(scraped.get(name)) if scraped else None for name in names},
        "click_rate": click_rate(scraped.get("simulate", ScrapedMetrics())),
        "serving": serving_state(scraped.get("serving", ScrapedMetrics())),
        "joiner_watermark_ms": scraped.get("joiner", ScrapedMetrics()).ms(
            "roostream_joiner_watermark_timestamp_seconds"
        ),
        "shards": {name: _shard(s) for name, s in scraped.items() if name.startswith("shard-") and s},
        "partition_lag_records": _merged(
            [s.by("roostream_worker_partition_lag_records", "partition") for s in workers.values()]
        ),
        "accounted": scraped.get("auditor", ScrapedMetrics()).state("roostream_auditor_accounted", "state"),
        "lost_records": lost_records(scraped),
        "non_finite": _merged(
            [{n: v} for n, s in workers.items() if (v := s.value("roostream_worker_non_finite")) is not None]
        ),
    }


def _shard(shard: ScrapedMetrics) -> dict[str, Any]:
    return {
        "rows": {stack: int(n) for stack, n in shard.by("roostream_shard_rows", "stack").items()},
        "pulls": shard.value("roostream_shard_pulls"),
        "bytes": shard.value("roostream_shard_bytes"),
        "damaged": shard.value("roostream_shard_damaged"),
    }


def _merged(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}


def lost_records(scraped: Mapping[str, ScrapedMetrics]) -> dict[str, int]:
    """Program → records that retention deleted before it read them, of programs that count some."""
    told = {
        name: s.value(f"roostream_{name.partition('-')[0]}_lost_records")
        for name, s in scraped.items()
        if name != "auditor"
    }
    return {name: int(count) for name, count in told.items() if count}


def rows_by_stack(scraped: Mapping[str, ScrapedMetrics]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, metrics in scraped.items():
        if name.startswith("shard-"):
            for stack, value in metrics.by("roostream_shard_rows", "stack").items():
                rows[stack] = rows.get(stack, 0) + int(value)
    return rows


def click_rate(simulate: ScrapedMetrics) -> dict[str, float | None]:
    """Expected clicks a shown candidate of the newest requests: as served, in a random order of the same requests, and in the
    best order; and served over random, of the newest and of all. While the newest are above all, serving still gets better."""
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


def serving_state(serving: ScrapedMetrics) -> dict[str, Any]:
    """Answers by status since its start, and which committed version it scores with."""
    return {
        "requests": serving.total("roostream_serving_requests_total"),
        "degraded": serving.value("roostream_serving_degraded_total"),
        "version": serving.state("roostream_serving_model_version", "version"),
    }

"""What a shard exports, read from it when it is scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from param_server.publish import Publisher
from param_server.server import Shard
from runtime.metrics import Quantiles

_NUMBERS = {
    "incarnation": "incarnation in which calls are answered",
    "committed_seq": "number of the last commit",
    "segments": "segments of the last commit",
    "bytes": "memory of the rows",
    "dirty": "rows changed since the last freeze",
    "withheld": "rows not published: not finite, or larger than max_publish_norm",
    "pulls": "pulls answered",
    "pushes": "pushes applied",
    "repeats": "pushes that had been applied before",
    "ready": "1 = restored",
}


class ShardMetrics(Collector):
    """Gauges `roostream_shard_<what>`; rows by stack."""

    def __init__(self, shard: Shard, publisher: Publisher | None, latency: Quantiles) -> None:
        self.shard, self.publisher, self.latency = shard, publisher, latency
        self._registered: list[Collector] = []

    def register(self) -> None:
        for collector in (self, self.latency):
            REGISTRY.register(collector)
            self._registered.append(collector)

    def unregister(self) -> None:
        """What was registered, if anything was."""
        while self._registered:
            REGISTRY.unregister(self._registered.pop())

    def collect(self) -> Iterator[Metric]:
        stats = self.shard.stats()
        rows = GaugeMetricFamily("roostream_shard_rows", "rows in memory", labels=["stack"])
        for stack, count in stats["rows"].items():
            rows.add_metric([stack], count)
        yield rows
        for name, help_ in _NUMBERS.items():
            yield GaugeMetricFamily(f"roostream_shard_{name}", help_, value=float(stats[name]))
        if self.publisher:
            lag_ms = self.publisher.lag_ms
            yield GaugeMetricFamily("roostream_shard_publish_lag_ms", "since readers last had everything", value=lag_ms)
            yield GaugeMetricFamily("roostream_shard_published_keys", "keys sent in deltas", value=self.publisher.num_keys)
            yield GaugeMetricFamily(
                "roostream_shard_republished_keys", "keys seen behind barriers", value=self.publisher.num_republished
            )

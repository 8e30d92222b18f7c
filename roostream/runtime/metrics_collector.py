"""Exports a program's state as Prometheus metrics; the state is read on each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class MetricsCollector(Collector):
    """Exports `roostream_<program>_<name>` for each name that `read` returns.

    `read` returns name → number, or name → {label value: number} if `labels` has the name of the label
    (tuples if there are several labels). Text and None are omitted. Names in `counters` are counters
    (`…_total`), all others gauges. Times are exported in seconds (`in_seconds`).
    """

    def __init__(
        self,
        program: str,
        read: Callable[[], Mapping[str, Any]],
        labels: Mapping[str, str | tuple[str, ...]],
        *,
        helps: Mapping[str, str] | None = None,
        counters: Collection[str] = (),
    ) -> None:
        self.program, self.read, self.labels, self.helps, self.counters = (
            program,
            read,
            labels,
            helps or {},
            counters,
        )
        self._registry: CollectorRegistry | None = None

    def register(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Export the metrics from now on."""
        registry.register(self)
        self._registry = registry

    def unregister(self) -> None:
        """Stop exporting; idempotent."""
        if self._registry is not None:
            self._registry.unregister(self)
            self._registry = None

    def collect(self) -> list[Metric]:
        """Read the state; metrics without a number are omitted."""
        families = [self._family(name, value) for name, value in self.read().items()]
        return [family for family in families if family.samples]

    def _family(self, name: str, value: Any) -> Metric:
        label, (shown, scale) = self.labels.get(name), in_seconds(name)
        labels = (label,) if isinstance(label, str) else label or ()
        family_type = CounterMetricFamily if name in self.counters else GaugeMetricFamily
        family = family_type(
            f"roostream_{self.program}_{shown}", self.helps.get(name, shown.replace("_", " ")), labels=labels
        )
        for key, number in value.items() if labels and isinstance(value, Mapping) else [((), value)]:
            if isinstance(number, (int, float)):
                family.add_metric(
                    [str(part) for part in ((key,) if isinstance(key, str) else key)], float(number) * scale
                )
        return family


_UNITS = (
    ("_at_ms", "_timestamp_seconds", 1e-3),
    ("watermark_ms", "watermark_timestamp_seconds", 1e-3),
    ("since_ms", "since_timestamp_seconds", 1e-3),
    ("_per_s", "_per_second", 1.0),
    ("_ms", "_seconds", 1e-3),
    ("_s", "_seconds", 1.0),
)


def in_seconds(name: str) -> tuple[str, float]:
    """The Prometheus name in base units, and the factor for the value: `lag_ms` → (`lag_seconds`, 0.001).
    Points in time become `…_timestamp_seconds`."""
    for suffix, instead, scale in _UNITS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + instead, scale
    return name, 1.0


def one_of(state: str, states: tuple[str, ...]) -> dict[str, int]:
    """A state as label values: 1 for the current one, 0 for the others."""
    return {name: int(name == state) for name in states}

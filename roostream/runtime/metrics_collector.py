"""Exports the state of a program as Prometheus metrics: read on each scrape, under literal names."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

log = logging.getLogger("roostream.metrics")


class MetricSpec(NamedTuple):
    """Help text and label names of a metric. Its full name is the key in the table of its program."""

    help: str
    labels: tuple[str, ...] = ()


class MetricsCollector(Collector):
    """Reads the state of a program when it is scraped.

    `read` returns full metric name → number, or → {label value, or tuple of them: number} for a metric with
    labels. None is omitted. A name that ends with `_total` is a counter, any other a gauge. `specs` has every
    name.

    If `read` fails, its metrics are missing from this scrape; the other metrics of the program are not
    affected, and the next scrape reads again.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], specs: Mapping[str, MetricSpec]) -> None:
        self.read, self.specs = read, specs
        self._failed = False

    def collect(self) -> list[Metric]:
        try:
            values = self.read()
        except Exception:
            if not self._failed:  # once until it recovers: scrapes are frequent
                log.warning("metrics cannot be read and are missing until they can", exc_info=True)
            self._failed = True
            return []
        self._failed = False
        families = [_family(name, self.specs[name], value) for name, value in values.items()]
        return [family for family in families if family.samples]


@contextlib.contextmanager
def exported(read: Callable[[], Mapping[str, Any]], specs: Mapping[str, MetricSpec]) -> Iterator[None]:
    """Export a `MetricsCollector` of the process within the block."""
    collector = MetricsCollector(read, specs)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


def by_name(specs: Mapping[str, MetricSpec], prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Full metric name → value. The key in `values` is the name without `prefix` and `_total`; `busy_seconds`
    is `busy_s`."""
    keys = {name: name.removeprefix(prefix).removesuffix("_total") for name in specs}
    return {name: values[re.sub("_seconds$", "_s", key)] for name, key in keys.items()}


def _family(name: str, spec: MetricSpec, value: Any) -> Metric:
    family_type = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = family_type(name, spec.help, labels=spec.labels)
    for key, number in value.items() if spec.labels else [((), value)]:
        if number is not None:
            label_values = (key,) if isinstance(key, str) else key
            family.add_metric([str(label) for label in label_values], float(number))
    return family


def one_of(state: str, states: tuple[str, ...]) -> dict[str, int]:
    """A state as label values: 1 for the current one, 0 for the others."""
    return {name: int(name == state) for name in states}

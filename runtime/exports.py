"""A program's state as Prometheus gauges: read when scraped, so that the flow code sets nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Exports(Collector):
    """`read` gives name → number, or name → {label value: number} with the label's name in `labels`; text is left out."""

    def __init__(self, program: str, read: Callable[[], Mapping[str, Any]], labels: Mapping[str, str]) -> None:
        self.program, self.read, self.labels = program, read, labels

    def register(self) -> None:
        REGISTRY.register(self)

    def collect(self) -> list[Metric]:
        families: list[Metric] = []
        for name, value in self.read().items():
            label = self.labels.get(name)
            family = GaugeMetricFamily(
                f"roostream_{self.program}_{name}", name.replace("_", " "), labels=[label] if label else []
            )
            for key, number in value.items() if label and isinstance(value, Mapping) else [("", value)]:
                if isinstance(number, (int, float)):
                    family.add_metric([str(key)] if label else [], float(number))
            if family.samples:
                families.append(family)
        return families


def one_of(state: str, states: tuple[str, ...]) -> dict[str, int]:
    """A state as a label: 1 for the one in force."""
    return {name: int(name == state) for name in states}

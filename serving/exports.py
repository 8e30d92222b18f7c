"""What `/metrics` shows of serving."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from runtime.metrics import Quantiles


class ServingMetrics:
    """One per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "roostream_serving_requests", "answers by route and status", ["route", "status"], registry=registry
        )
        self._children: dict[tuple[str, int], Counter] = {}
        self.candidates = Counter("roostream_serving_candidates", "candidates scored", registry=registry)
        self.degraded = Counter("roostream_serving_degraded", "answers without hydration or rows", registry=registry)
        self.engagements = Counter("roostream_serving_engagements", "engagements taken", registry=registry)
        self.latency = Quantiles("roostream_serving_latency_ms", "time of an answer, by route")
        registry.register(self.latency)
        self.version = Gauge("roostream_serving_model_version", "1 for the version in use", ["version"], registry=registry)
        self.version_time_ms = Gauge("roostream_serving_model_time_ms", "when it was committed", registry=registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        child = self._children.get((route, status))
        if child is None:
            child = self._children[route, status] = self._requests.labels(route, str(status))
        child.inc()
        self.latency.observe(route, seconds * 1000)

    def show_version(self, name: str, time_ms: int) -> None:
        self.version.clear()
        self.version.labels(name).set(1)
        self.version_time_ms.set(time_ms)

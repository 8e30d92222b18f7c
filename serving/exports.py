"""What `/metrics` shows of serving."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from runtime.metrics import Quantiles

MOST_ACTIONS = 20  # that nothing counts, shown by name


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
        self._unused = Counter(
            "roostream_serving_engagements_unused",
            "engagements taken whose action no label and no online feature counts",
            ["action"],
            registry=registry,
        )
        self._unused_actions: set[str] = set()
        self.latency = Quantiles("roostream_serving_latency", "time of an answer, by route")
        registry.register(self.latency)
        self.version = Gauge("roostream_serving_model_version", "1 for the version in use", ["version"], registry=registry)
        self.version_time = Gauge("roostream_serving_model_timestamp_seconds", "when it was committed", registry=registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        child = self._children.get((route, status))
        if child is None:
            child = self._children[route, status] = self._requests.labels(route, str(status))
        child.inc()
        self.latency.observe(route, seconds * 1000)

    def unused_action(self, action: str, count: int) -> None:
        """By name for the first MOST_ACTIONS names, which come from outside; as `(other)` beyond."""
        if action not in self._unused_actions and len(self._unused_actions) >= MOST_ACTIONS:
            action = "(other)"
        else:
            self._unused_actions.add(action)
        self._unused.labels(action).inc(count)

    def show_version(self, name: str, time_ms: int) -> None:
        self.version.clear()
        self.version.labels(name).set(1)
        self.version_time.set(time_ms / 1000)

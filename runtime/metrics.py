"""Prometheus metrics, one registry a process, and sliding quantiles for stage times."""

from __future__ import annotations

import threading
from collections import deque

from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from roo.errors import SetupError
from runtime.deployment import Watched


class Quantiles(Collector):
    """The newest `size` observations of each stage, exported as `name{stage=…, quantile=…}`. Thread-safe."""

    def __init__(self, name: str, help: str, size: int = 2048) -> None:
        self.name, self.help, self.size = name, help, size
        self._lock = threading.Lock()
        self._values: dict[str, deque[float]] = {}

    def observe(self, stage: str, value: float) -> None:
        with self._lock:
            self._values.setdefault(stage, deque(maxlen=self.size)).append(value)

    def quantile(self, stage: str, q: float) -> float | None:
        with self._lock:
            values = sorted(self._values.get(stage, ()))
        return values[min(int(q * len(values)), len(values) - 1)] if values else None

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(self.name, self.help, labels=["stage", "quantile"])
        for stage in list(self._values):
            for q in (0.5, 0.99):
                value = self.quantile(stage, q)
                if value is not None:
                    family.add_metric([stage, str(q)], value)
        return [family]


def freshness() -> Quantiles:
    """The process's stage times, in ms; registered once."""
    global _freshness
    if _freshness is None:
        _freshness = Quantiles("roostream_freshness_ms", "time between stages of the loop")
        REGISTRY.register(_freshness)
    return _freshness


_freshness: Quantiles | None = None


def serve(config: Watched) -> int:
    """Start `/metrics` where the settings say; the port in use.

    Raises:
        SetupError: the port is taken.
    """
    host, port = config.metrics_host, config.metrics_port
    try:
        server, _ = start_http_server(port, addr=host)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"metrics port {host}:{port} can't be used ({reason}); choose another metrics_port, or 0") from None
    return int(server.server_address[1])

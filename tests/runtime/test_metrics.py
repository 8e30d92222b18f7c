from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from roo.errors import SetupError
from runtime import metrics
from runtime.clock import FakeClock
from runtime.deployment import Watched
from runtime.health import Health
from runtime.metrics import Histogram, Quantiles


def test_quantiles_are_of_the_newest_observations() -> None:
    stages = Quantiles("x", "help", size=100)
    for value in range(1000):
        stages.observe("close", value)
    assert stages.quantile("close", 0.5) == 950 and stages.quantile("close", 0.99) == 999 and stages.quantile("close", 0) == 900
    assert stages.quantile("other", 0.5) is None


def test_quantiles_are_exported_by_stage() -> None:
    registry, stages = CollectorRegistry(), Quantiles("x", "help")
    registry.register(stages)
    assert b"x_quantile_seconds{" not in generate_latest(registry)
    stages.observe("close", 5.0)
    assert b'x_quantile_seconds{quantile="0.5",stage="close"} 0.005' in generate_latest(registry)


def test_times_are_a_histogram_in_seconds_too() -> None:
    registry, stages = CollectorRegistry(), Quantiles("x", "help", size=2)
    registry.register(stages)
    for ms in (0.5, 1.5, 40.0, 400_000.0):
        stages.observe("pull", ms)
    told = {
        le: registry.get_sample_value("x_seconds_bucket", {"stage": "pull", "le": le})
        for le in ("0.0005", "0.05", "300.0", "+Inf")
    }
    assert told == {"0.0005": 1, "0.05": 3, "300.0": 3, "+Inf": 4}
    assert registry.get_sample_value("x_seconds_count", {"stage": "pull"}) == 4
    assert registry.get_sample_value("x_seconds_sum", {"stage": "pull"}) == pytest.approx(400.042)


def test_freshness_is_one_a_process() -> None:
    assert metrics.freshness() is metrics.freshness()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def health(clock: FakeClock) -> Health:
    return Health(60, clock)


def asked(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and text of a GET."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_probes_are_served_on_one_drawn_port(health: Health, clock: FakeClock) -> None:
    registry = CollectorRegistry()
    stages = Quantiles("test", "help")
    stages.observe("close", 5.0)
    registry.register(stages)
    port = metrics.serve(Watched(), health, registry)
    status, text = asked(port, "/metrics")
    assert status == 200 and 'test_quantile_seconds{quantile="0.5",stage="close"} 0.005' in text
    assert asked(port, "/livez") == (200, "ok\n") and asked(port, "/readyz") == (503, "it is starting\n")
    health.turned()
    assert asked(port, "/readyz") == (200, "ok\n")
    clock.advance(61)
    assert asked(port, "/livez") == (503, "the main loop has not turned for 61 s\n")
    assert asked(port, "/other") == (404, "expected /metrics, /livez or /readyz\n")


def test_a_port_that_is_taken_is_told(health: Health) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            SetupError, match=r"metrics port 127.0.0.1:\d+ can't be used \(Address already in use\); choose another"
        ):
            metrics.serve(Watched(metrics_port=taken.getsockname()[1]), health)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "[::1]"])
def test_metrics_are_served_on_the_address_that_is_asked_for(health: Health, host: str) -> None:
    port = metrics.serve(Watched(metrics_host=host), health)
    assert asked(port, "/livez", f"[{host.strip('[]')}]" if ":" in host else host)[0] == 200


def test_a_histogram_is_read_as_prometheus_has_them() -> None:
    registry, times = CollectorRegistry(), Histogram("x_seconds", "help", ("stage",), (0.1, 1.0))
    registry.register(times)
    cell = times.cell("a")
    for value in (0.05, 0.1, 0.5, 7.0):
        cell.observe(value)
    assert times.cell("a") is cell and times.cell("b").counts == [0, 0, 0]
    read = [registry.get_sample_value("x_seconds_bucket", {"stage": "a", "le": le}) for le in ("0.1", "1.0", "+Inf")]
    assert read == [2, 3, 4] and registry.get_sample_value("x_seconds_sum", {"stage": "a"}) == pytest.approx(7.65)
    assert registry.get_sample_value("x_seconds_count", {"stage": "b"}) == 0

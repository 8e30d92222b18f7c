from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from roo.errors import SetupError
from runtime import metrics
from runtime.deployment import Watched
from runtime.metrics import Quantiles


def test_quantiles_are_of_the_newest_observations() -> None:
    stages = Quantiles("x_ms", "help", size=100)
    for value in range(1000):
        stages.observe("close", value)
    assert stages.quantile("close", 0.5) == 950 and stages.quantile("close", 0.99) == 999 and stages.quantile("close", 0) == 900
    assert stages.quantile("other", 0.5) is None


def test_quantiles_are_exported_by_stage() -> None:
    registry, stages = CollectorRegistry(), Quantiles("x_ms", "help")
    registry.register(stages)
    assert b"x_ms{" not in generate_latest(registry)
    stages.observe("close", 5.0)
    assert b'x_ms{quantile="0.5",stage="close"} 5.0' in generate_latest(registry)


def test_freshness_is_one_a_process() -> None:
    assert metrics.freshness() is metrics.freshness()


def test_metrics_are_served_on_a_drawn_port_and_a_taken_one_is_told() -> None:
    metrics.freshness().observe("test_stage", 3.0)
    port = metrics.serve(Watched())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b'stage="test_stage"} 3.0' in answer.read()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            SetupError, match=r"metrics port 127.0.0.1:\d+ can't be used \(Address already in use\); choose another"
        ):
            metrics.serve(Watched(metrics_port=taken.getsockname()[1]))


def test_metrics_are_served_on_the_address_that_is_asked_for() -> None:
    port = metrics.serve(Watched(metrics_host="127.0.0.2"))
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=5) as answer:
        assert answer.status == 200

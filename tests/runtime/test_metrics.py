from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from roostream.errors import ConfigError, SetupError
from roostream.runtime import metrics
from roostream.runtime.clock import FakeClock
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.health import Health
from roostream.runtime.metrics import FRESH_S, Histogram, StageTimes
from roostream.runtime.tls import TlsContext
from tests.certificates import Authority, trusting


def test_times_are_observed_in_ms_and_exported_as_a_histogram_in_seconds() -> None:
    registry, stages = CollectorRegistry(), StageTimes("x", "help")
    registry.register(stages)
    assert b"x_seconds_bucket" not in generate_latest(registry)
    for ms in (0.5, 1.5, 40.0, 400_000.0):
        stages.observe("pull", ms)
    told = {
        le: registry.get_sample_value("x_seconds_bucket", {"stage": "pull", "le": le})
        for le in ("0.0005", "0.05", "300.0", "+Inf")
    }
    assert told == {"0.0005": 1, "0.05": 3, "300.0": 3, "+Inf": 4}
    assert registry.get_sample_value("x_seconds_count", {"stage": "pull"}) == 4
    assert registry.get_sample_value("x_seconds_sum", {"stage": "pull"}) == pytest.approx(400.042)
    assert stages.told("pull")[0.05] == 3 and stages.told("pull")[math.inf] == 4
    assert {family.name for family in registry.collect()} == {"x_seconds"}, "no quantile beside it"


def test_no_observation_is_lost_where_several_threads_observe() -> None:
    stages = StageTimes("x", "help")
    threads = [
        threading.Thread(target=lambda: [stages.observe("pull", 1.0) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stages.told("pull")[math.inf] == 8000


def test_buckets_between_stages_are_narrow_where_a_page_takes_quantiles() -> None:
    assert list(FRESH_S) == sorted(set(FRESH_S)) and FRESH_S[0] == 0.001 and FRESH_S[-1] == 1000
    assert max(b / a for a, b in itertools.pairwise(FRESH_S) if a >= 0.01) <= 1.5


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
    stages = StageTimes("test", "help")
    stages.observe("close", 5.0)
    registry.register(stages)
    port = metrics.serve(ProgramSettings(), health, registry)
    status, text = asked(port, "/metrics")
    assert status == 200 and 'test_seconds_bucket{le="0.005",stage="close"} 1.0' in text
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
            SetupError,
            match=r"metrics port 127.0.0.1:\d+ can't be used \(Address already in use\); choose another",
        ):
            metrics.serve(ProgramSettings(metrics_port=taken.getsockname()[1]), health)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "[::1]"])
def test_metrics_are_served_on_the_address_that_is_asked_for(health: Health, host: str) -> None:
    port = metrics.serve(ProgramSettings(metrics_host=host), health)
    assert asked(port, "/livez", f"[{host.strip('[]')}]" if ":" in host else host)[0] == 200


def told(port: int, authority: Authority, *own: str) -> int:
    """Status of a GET of /metrics."""
    with urllib.request.urlopen(
        f"https://127.0.0.1:{port}/metrics", timeout=30, context=trusting(authority, *own)
    ) as answer:
        assert answer.read()
        return int(answer.status)


def test_the_port_speaks_tls_where_the_program_has_a_certificate_and_takes_a_new_one(
    health: Health, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, key = old.issue("program")
    config = ProgramSettings(tls_certificate=certificate, tls_key=key)
    assert config.tls is not None
    tls = TlsContext(config.tls)
    ports = [metrics.serve(config, health), metrics.serve(config, health, tls=tls)]
    assert [told(port, old) for port in ports] == [200, 200]
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        told(ports[0], new)
    with pytest.raises(OSError):
        asked(ports[0], "/livez")
    new.issue("program")
    tls.poll()
    assert told(ports[1], new) == 200


def test_who_brings_no_certificate_is_refused_where_one_is_required(health: Health, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = ours.issue("program")
    asking = {
        "tls_certificate": certificate,
        "tls_key": key,
        "tls_client_ca": str(theirs.pem),
        "tls_client_required": True,
    }
    port = metrics.serve(ProgramSettings(**asking), health)  # type: ignore[arg-type]
    assert told(port, ours, *theirs.issue("friend")) == 200
    for own in ((), ours.issue("stranger")):
        with pytest.raises(OSError):
            told(port, ours, *own)
    assert told(port, ours, *theirs.issue("friend")) == 200


def test_others_reach_the_port_only_where_it_asks_for_certificates() -> None:
    files = {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}
    for settings in ({}, files):
        with pytest.raises(
            ConfigError, match="give it tls_certificate and tls_client_required, or set insecure = true"
        ):
            ProgramSettings(metrics_host="0.0.0.0", **settings)  # type: ignore[arg-type]
    assert ProgramSettings(metrics_host="0.0.0.0", **files, tls_client_required=True).scheme == "https"  # type: ignore[arg-type]
    assert ProgramSettings(metrics_host="0.0.0.0", insecure=True).scheme == "http"
    with pytest.raises(ConfigError, match="expected PEM files of a certificate chain"):
        metrics.serve(ProgramSettings(tls_certificate="none.crt", tls_key="none.key"), Health(60))


@pytest.mark.parametrize(
    "speaks", [b"", b"GET /livez HTTP/1.1\r\nx: "], ids=["silent", "headers without an end"]
)
def test_connections_that_end_nothing_take_no_place_for_ever(
    health: Health, monkeypatch: pytest.MonkeyPatch, speaks: bytes
) -> None:
    monkeypatch.setattr(metrics, "MAX_AT_ONCE", 4)
    monkeypatch.setattr(metrics, "MAX_S", 0.5)
    port = metrics.serve(ProgramSettings(), health)
    held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(4)]
    for line in held:
        line.sendall(speaks)
    more = socket.create_connection(("127.0.0.1", port), timeout=30)
    with contextlib.suppress(ConnectionResetError):
        assert more.recv(100) == b"", "a fifth is closed at once"
    for line in held:
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(100) == b"", "and the others at their time"
        line.close()
    more.close()
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            assert asked(port, "/livez")[0] == 200
            return
    raise AssertionError("no place was given back")


def test_a_histogram_is_read_as_prometheus_has_them() -> None:
    registry, times = CollectorRegistry(), Histogram("x_seconds", "help", ("stage",), (0.1, 1.0))
    registry.register(times)
    cell = times.cell("a")
    for value in (0.05, 0.1, 0.5, 7.0):
        cell.observe(value)
    assert times.cell("a") is cell and times.cell("b").counts == [0, 0, 0]
    read = [
        registry.get_sample_value("x_seconds_bucket", {"stage": "a", "le": le})
        for le in ("0.1", "1.0", "+Inf")
    ]
    assert read == [2, 3, 4] and registry.get_sample_value("x_seconds_sum", {"stage": "a"}) == pytest.approx(
        7.65
    )
    assert registry.get_sample_value("x_seconds_count", {"stage": "b"}) == 0

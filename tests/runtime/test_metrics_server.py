from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from roostream.errors import ConfigError, SetupError
from roostream.runtime import metrics_server
from roostream.runtime.clock import FakeClock
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.health import Health
from roostream.runtime.histograms import StageHistogram
from roostream.runtime.tls import TlsContext
from tests.certificates import Authority, client_context
from tests.runtime.file_descriptors import no_file_descriptors


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def health(clock: FakeClock) -> Health:
    return Health(60, clock)


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and text of a GET."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_probes_are_served_on_one_drawn_port(health: Health, clock: FakeClock) -> None:
    registry = CollectorRegistry()
    stages = StageHistogram("test_seconds", "help", registry=None)
    stages.observe("close", 5.0)
    registry.register(stages.histogram)
    port = metrics_server.serve(ProgramSettings(), health, registry)
    status, text = get(port, "/metrics")
    assert status == 200 and 'test_seconds_bucket{le="0.005",stage="close"} 1.0' in text
    assert get(port, "/livez") == (200, "ok\n") and get(port, "/readyz") == (503, "it is starting\n")
    assert "roostream_ready 0.0" in text.splitlines()
    health.turned()
    assert get(port, "/readyz") == (200, "ok\n")
    assert "roostream_ready 1.0" in get(port, "/metrics")[1].splitlines()
    clock.advance(61)
    assert get(port, "/livez") == (503, "the main loop has not turned for 61 s\n")
    assert get(port, "/other") == (404, "expected /metrics, /livez or /readyz\n")


def test_a_port_in_use_is_reported(health: Health) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            SetupError,
            match=r"metrics port 127.0.0.1:\d+ can't be used \(Address already in use\); choose another",
        ):
            metrics_server.serve(ProgramSettings(metrics_port=taken.getsockname()[1]), health)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "[::1]"])
def test_metrics_are_served_on_the_configured_address(health: Health, host: str) -> None:
    port = metrics_server.serve(ProgramSettings(metrics_host=host), health)
    assert get(port, "/livez", f"[{host.strip('[]')}]" if ":" in host else host)[0] == 200


def get_over_tls(port: int, authority: Authority, *own: str) -> int:
    """Status of a GET of /metrics over TLS; `own` is the client's certificate and key."""
    with urllib.request.urlopen(
        f"https://127.0.0.1:{port}/metrics", timeout=30, context=client_context(authority, *own)
    ) as answer:
        assert answer.read()
        return int(answer.status)


def test_the_metrics_port_uses_tls_and_reloads_certificates(health: Health, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, key = old.issue("program")
    config = ProgramSettings(tls_certificate=certificate, tls_key=key)
    tls = TlsContext(config)
    ports = [metrics_server.serve(config, health), metrics_server.serve(config, health, tls=tls)]
    assert [get_over_tls(port, old) for port in ports] == [200, 200]
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        get_over_tls(ports[0], new)
    with pytest.raises(OSError):
        get(ports[0], "/livez")
    new.issue("program")
    tls.poll()
    assert get_over_tls(ports[1], new) == 200


def test_a_client_that_leaves_before_its_answer_prints_no_traceback(
    health: Health, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("program")
    config = ProgramSettings(tls_certificate=certificate, tls_key=key)
    asked, left = threading.Event(), threading.Event()

    def page() -> metrics_server.PageResponse:
        asked.set()
        assert left.wait(30)
        return metrics_server.PageResponse("text/plain", bytes(8 << 20))

    port = metrics_server.serve(config, health, pages={"/slow": page})
    raw = socket.create_connection(("127.0.0.1", port), timeout=30)
    with client_context(authority).wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        connection.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        assert asked.wait(30)
    left.set()
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(30)
    assert get_over_tls(port, authority) == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_missing_client_certificate_is_refused_if_required(health: Health, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = ours.issue("program")
    settings = {
        "tls_certificate": certificate,
        "tls_key": key,
        "tls_client_ca": str(theirs.pem),
        "tls_client_required": True,
    }
    port = metrics_server.serve(ProgramSettings(**settings), health)  # type: ignore[arg-type]
    assert get_over_tls(port, ours, *theirs.issue("friend")) == 200
    for own in ((), ours.issue("stranger")):
        with pytest.raises(OSError):
            get_over_tls(port, ours, *own)
    assert get_over_tls(port, ours, *theirs.issue("friend")) == 200


def test_a_public_metrics_port_requires_client_certificates() -> None:
    files = {"tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}
    for settings in ({}, files):
        with pytest.raises(
            ConfigError, match="give it tls_certificate and tls_client_required, or set insecure = true"
        ):
            ProgramSettings(metrics_host="0.0.0.0", **settings)  # type: ignore[arg-type]
    assert ProgramSettings(metrics_host="0.0.0.0", **files, tls_client_required=True).scheme == "https"  # type: ignore[arg-type]
    assert ProgramSettings(metrics_host="0.0.0.0", insecure=True).scheme == "http"
    with pytest.raises(ConfigError, match="expected PEM files of a certificate chain"):
        metrics_server.serve(ProgramSettings(tls_certificate="none.crt", tls_key="none.key"), Health(60))


@pytest.mark.slow
def test_idle_connections_never_keep_a_probe_from_being_answered(health: Health) -> None:
    port = metrics_server.serve(ProgramSettings(), health)
    with contextlib.ExitStack() as opened:
        for _ in range(140):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        assert get(port, "/livez") == (200, "ok\n")


def test_without_file_descriptors_the_server_pauses_and_later_answers(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, paused, sleep = metrics_server.serve(ProgramSettings(), health), threading.Event(), time.sleep

    def note_pause(seconds: float) -> None:
        if threading.current_thread().name == "metrics":
            paused.set()
        sleep(seconds)

    monkeypatch.setattr(metrics_server.time, "sleep", note_pause)
    with socket.socket() as client:
        client.settimeout(30)
        with no_file_descriptors():
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert paused.wait(30), "accepting again at once would take a whole core"
        assert client.recv(100).startswith(b"HTTP/1.0 200")

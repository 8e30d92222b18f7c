from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from infra import ports
from infra.ports import HOST, Ports
from roostream.errors import SetupError
from tests.runtime.raw_server import NOT_HTTP, raw_server


@pytest.fixture
def ports_() -> Iterator[Ports]:
    ports_ = Ports()
    yield ports_
    ports_.release()


def test_drawn_ports_differ_and_stay_below_the_kernels_range(ports_: Ports) -> None:
    found = [ports_.draw() for _ in range(30)]
    assert len(set(found)) == 30
    assert all(ports.MIN_PORT <= p < ports.MAX_PORT for p in found)


def test_two_stacks_never_reserve_the_same_port(ports_: Ports) -> None:
    port, other = ports_.draw(), Ports()
    with pytest.raises(SetupError, match="in use"):
        other.take("serving", port)
    ports_.release()
    assert other.take("serving", port) == port
    other.release()


def test_a_port_in_use_is_reported(ports_: Ports) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port}"):
            ports_.take("serving", port)
        assert ports.is_listening(f"{HOST}:{port}")
    assert not ports.is_listening(f"{HOST}:{port}")


def test_a_url_responds_only_with_success() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/good" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://{HOST}:{server.server_port}"
        assert ports.responds_ok(f"{url}/good")
        assert not ports.responds_ok(f"{url}/bad")
        server.shutdown()
        thread.join()
    assert not ports.responds_ok(f"{url}/good", timeout_s=0.2)


@pytest.mark.parametrize("answer", [NOT_HTTP, b""])
def test_a_url_of_something_else_does_not_respond(answer: bytes) -> None:
    with raw_server(answer) as url:
        assert not ports.responds_ok(url)

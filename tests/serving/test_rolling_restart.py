"""A serving process takes over from another on the same port: clients that keep their connections meet no
failure."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_cases import BODY, SCHEMA, Built, build
from serving_fakes import FakeRows

from roostream.errors import SetupError
from serving.http import server as http_server
from tests.serving.live_serving import serving_live
from tests.serving.test_serving_main import Running, write_config

NUM_CLIENTS = 16
PAUSE_S = 0.1


class Client(threading.Thread):
    """Asks again and again on a connection that it keeps; it doesn't try anything twice."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__()
        self.port, self.stop = port, stop
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = json.dumps({**BODY, "ro": {}})
        while not self.stop.is_set():
            try:
                connection.request("POST", "/v1/rank", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                self.outcomes[str(answer.status)] += 1
            except OSError as error:
                self.outcomes[repr(error)] += 1
                connection.close()
            self.stop.wait(PAUSE_S)
        connection.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(home: Path, port: int) -> Iterator[Running]:
    """Listening; ended whatever the test does."""
    home.mkdir()
    process = Running(write_config(home, listen=f"127.0.0.1:{port}", reuse_port=True, deadline_ms=30_000))
    try:
        process.wait_for_address()
        yield process
    finally:
        process.child.kill()
        process.end()


def ended(process: Running) -> int:
    process.child.send_signal(signal.SIGTERM)
    return process.end()


@pytest.mark.timeout(300)
def test_no_request_of_16_clients_fails_during_a_rolling_restart(tmp_path: Path) -> None:
    port, stop = free_port(), threading.Event()
    clients = [Client(port, stop) for _ in range(NUM_CLIENTS)]
    with running(tmp_path / "a", port) as first:
        try:
            for client in clients:
                client.start()
            with running(tmp_path / "b", port) as second:
                assert ended(first) == 0, "".join(first.lines)
                before = sum(c.outcomes["200"] for c in clients)
                while sum(c.outcomes["200"] for c in clients) < before + NUM_CLIENTS:
                    assert second.child.poll() is None
                    time.sleep(0.05)
                stop.set()
                for client in clients:
                    client.join()
                assert ended(second) == 0, "".join(second.lines)
        finally:
            stop.set()
    assert set(sum((c.outcomes for c in clients), Counter())) == {"200"}


def test_a_port_is_shared_only_if_both_processes_allow_it() -> None:
    bound = http_server.bind("127.0.0.1:0", reuse_port=True)
    listen = f"127.0.0.1:{bound.getsockname()[1]}"
    http_server.bind(listen, reuse_port=True).close()
    bound.listen()
    with bound, pytest.raises(SetupError, match="listen"):
        http_server.bind(listen)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path, FakeRows(SCHEMA), drain_ms=60_000)


def test_an_answer_during_shutdown_closes_its_connection(built: Built) -> None:
    with serving_live(built, stop_s=240.0) as live:
        connection = http.client.HTTPConnection(*live.address, timeout=30)
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        assert answer.read() and answer.getheader("connection") is None
        live.stop.set()
        said = ""
        while said != "close":
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            said = answer.getheader("connection") or ""
        assert connection.sock is None, "the client knows that it is over"

"""Rolling restart: a new serving process takes over the port of an old one. Clients that keep their
connections open see no failure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.samples import DEMO, demo_schema
from benchmarks.serving_swap import Commits
from roostream.errors import RoostreamError
from roostream.runtime.store_identity import init_store
from serving.client.client import ServingClient
from serving.examples import rank_example
from tests.serving.live_serving import run_live_serving
from tests.serving.serving_cases import BODY, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows
from tests.serving.test_serving_main import ServingProcess, write_config

NUM_CLIENTS = 16
PAUSE_S = 0.1


class Client(threading.Thread):
    """Sends requests in a loop on one persistent connection, without retries."""

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
def run_process(home: Path, port: int, **changes: object) -> Iterator[ServingProcess]:
    """Start a serving process and wait until it listens. It is killed also after a failed test."""
    home.mkdir()
    settings = {"deadline_ms": 30_000, **changes}
    process = ServingProcess(write_config(home, listen=f"127.0.0.1:{port}", reuse_port=True, **settings))
    try:
        process.wait_for_address()
        yield process
    finally:
        process.child.kill()
        process.end()


def stop_process(process: ServingProcess) -> int:
    process.child.send_signal(signal.SIGTERM)
    return process.end()


@pytest.mark.timeout(300)
def test_no_request_of_16_clients_fails_during_a_rolling_restart(tmp_path: Path) -> None:
    port, stop = free_port(), threading.Event()
    clients = [Client(port, stop) for _ in range(NUM_CLIENTS)]
    with run_process(tmp_path / "a", port) as first:
        try:
            for client in clients:
                client.start()
            with run_process(tmp_path / "b", port) as second:
                assert stop_process(first) == 0, "".join(first.lines)
                before = sum(c.outcomes["200"] for c in clients)
                while sum(c.outcomes["200"] for c in clients) < before + NUM_CLIENTS:
                    assert second.child.poll() is None
                    time.sleep(0.05)
                stop.set()
                for client in clients:
                    client.join()
                assert stop_process(second) == 0, "".join(second.lines)
        finally:
            stop.set()
    assert set(sum((c.outcomes for c in clients), Counter())) == {"200"}


class DefaultClient(threading.Thread):
    """Sends requests in a loop with Roostream's client and its default settings."""

    def __init__(self, port: int, stop: threading.Event, number: int) -> None:
        super().__init__()
        self.url, self.stop, self.number = f"http://127.0.0.1:{port}", stop, number
        self.num_answered, self.failures = 0, list[str]()
        self.versions: set[str] = set()

    def run(self) -> None:
        fields = {**rank_example(demo_schema()), "user_id": 1 + self.number}
        with ServingClient(self.url) as client:
            while not self.stop.is_set():
                fields["request_id"] = f"r-{self.number}-{self.num_answered}"
                try:
                    self.versions.add(client.rank(fields).model_version)
                    self.num_answered += 1
                except RoostreamError as error:
                    self.failures.append(str(error))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_of_the_client_fails_over_many_versions_and_restarts(tmp_path: Path) -> None:
    """90,000 requests, 100 versions and 10 rolling restarts. Environment variables set other numbers."""
    num_requests, num_versions, num_restarts = (
        int(os.environ.get(name, default))
        for name, default in (("REQUESTS", "90000"), ("VERSIONS", "100"), ("RESTARTS", "10"))
    )
    port, stop, swapping = free_port(), threading.Event(), threading.Event()
    init_store(tmp_path / "store")
    commits = Commits(tmp_path / "store")
    settings = {
        "schema": str(DEMO),
        "store": str(tmp_path / "store"),
        "shards": [],
        "redis": "",
        "deadline_ms": 1000,
    }
    clients = [DefaultClient(port, stop, number) for number in range(8)]
    committing = threading.Thread(target=commits.run, args=(swapping,))
    with contextlib.ExitStack() as opened:
        processes = [opened.enter_context(run_process(tmp_path / "0", port, **settings))]
        committing.start()
        for client in clients:
            client.start()
        try:
            for number in range(num_restarts):
                processes.append(
                    opened.enter_context(run_process(tmp_path / str(number + 1), port, **settings))
                )
                assert stop_process(processes[-2]) == 0, "".join(processes[-2].lines)
            while (
                sum(client.num_answered for client in clients) < num_requests
                or len(set[str]().union(*(client.versions for client in clients))) < num_versions
            ):
                assert processes[-1].child.poll() is None
                time.sleep(0.2)
        finally:
            stop.set()
            swapping.set()
            for thread in (*clients, committing):
                thread.join()
    num_answered = sum(client.num_answered for client in clients)
    versions = set[str]().union(*(client.versions for client in clients))
    print(f"{num_answered} answered, {len(versions)} versions, {num_restarts} restarts")
    assert [failure for client in clients for failure in client.failures] == []


@pytest.fixture
def serving(tmp_path: Path) -> InProcessServing:
    return build_serving(tmp_path, FakeRows(SCHEMA), drain_ms=60_000)


def test_an_answer_during_shutdown_closes_its_connection(serving: InProcessServing) -> None:
    with run_live_serving(serving, stop_s=240.0) as live:
        connection = http.client.HTTPConnection(*live.address, timeout=30)
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        assert answer.read() and answer.getheader("connection") is None
        live.stop.set()
        connection_header = ""
        while connection_header != "close":
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            connection_header = answer.getheader("connection") or ""
        assert connection.sock is None, "the client has closed the connection"

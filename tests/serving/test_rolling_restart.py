"""A serving process takes over from another on the same port: clients that keep their connections meet no
failure."""

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
def running(home: Path, port: int, **changes: object) -> Iterator[Running]:
    """Listening; ended whatever the test does."""
    home.mkdir()
    settings = {"deadline_ms": 30_000, **changes}
    process = Running(write_config(home, listen=f"127.0.0.1:{port}", reuse_port=True, **settings))
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


class DefaultClient(threading.Thread):
    """Roostream's client with its defaults, in a closed loop."""

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
    """90,000 requests, 100 versions and 10 rolling restarts; other numbers by the environment."""
    num_requests, num_versions, num_restarts = (
        int(os.environ.get(name, default))
        for name, default in (("REQUESTS", "90000"), ("VERSIONS", "100"), ("RESTARTS", "10"))
    )
    port, stop, swapping = free_port(), threading.Event(), threading.Event()
    init_store(tmp_path / "store")
    commits = Commits(tmp_path / "store")
    own = {
        "schema": str(DEMO),
        "store": str(tmp_path / "store"),
        "shards": [],
        "redis": "",
        "deadline_ms": 1000,
    }
    clients = [DefaultClient(port, stop, number) for number in range(8)]
    committing = threading.Thread(target=commits.run, args=(swapping,))
    with contextlib.ExitStack() as opened:
        processes = [opened.enter_context(running(tmp_path / "0", port, **own))]
        committing.start()
        for client in clients:
            client.start()
        try:
            for number in range(num_restarts):
                processes.append(opened.enter_context(running(tmp_path / str(number + 1), port, **own)))
                assert ended(processes[-2]) == 0, "".join(processes[-2].lines)
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
        said = ""
        while said != "close":
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            said = answer.getheader("connection") or ""
        assert connection.sock is None, "the client knows that it is over"

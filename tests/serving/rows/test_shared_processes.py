"""Several serving processes on one port over one copy of the rows, with Kafka, Redis and the shards away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from serving_cases import BODY, SCHEMA

from param_server.replica.shared_files import SharedFolder
from param_server.replica.shared_rows import SharedOwner
from roostream.runtime.clock import SystemClock
from roostream.wire import records as wire
from serving.feature_log.log import FeatureLog
from tests.serving.test_serving_main import Running, write_config


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def processes(place: Path, port: int, count: int) -> Iterator[list[Running]]:
    started = []
    for number in range(count):
        home = place / f"serving-{number}"
        home.mkdir()
        settings = {"reuse_port": True, "rows": "shared", "rows_home": str(place / "rows"), "redis": ""}
        started.append(Running(write_config(home, listen=f"127.0.0.1:{port}", **settings)))
    try:
        for process in started:
            process.wait_for_address()
        yield started
    finally:
        for process in started:
            if process.child.poll() is None:
                process.child.send_signal(signal.SIGTERM)
            process.end()


def ask(port: int) -> dict[str, object]:
    """On a connection of its own, which the kernel gives to one of them."""
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        answer = http.post("/v1/rank", json={**BODY, "ro": {}})
        assert answer.status_code == 200
        return dict(answer.json())


def logged(home: Path) -> int:
    log = FeatureLog.open(home / "log")
    kinds = [wire.decode(e.record.value)[0] for e in log.read(log.cursor, 1 << 30) if e.record]
    log.close()
    return kinds.count(wire.IMPRESSION)


def ages(port: int) -> list[float | None]:
    """What /readyz says, of several connections."""
    told = []
    for _ in range(8):
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            answer = http.get("/readyz")
            assert answer.status_code == 200
            told.append(answer.json()["rows_age_s"])
    return told


@pytest.mark.slow
def test_processes_on_one_port_have_the_same_rows_and_log_for_themselves(tmp_path: Path) -> None:
    owner = SharedOwner(SharedFolder(tmp_path / "rows", SCHEMA, 0), SCHEMA, 0, 64, SystemClock()).open()
    owner.publish()
    port = free_port()
    with processes(tmp_path, port, 2) as (first, second):
        assert ages(port) == [None] * 8
        owner.show(time.monotonic())
        told = ages(port)
        assert all(age_s is not None and age_s < 60 for age_s in told)
        assert not any(ask(port)["degraded"] for _ in range(16)), "rows are here, and nothing else was needed"
        owner.close()  # the owner goes; nobody stops
        os.kill(first.child.pid, signal.SIGKILL)
        first.child.wait(30)
        assert second.child.poll() is None
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx2.TransportError):  # what the kernel had given to the one that died
                ask(port)
                break
        assert [ask(port)["order"] for _ in range(4)] and min(a or 0.0 for a in ages(port)) > min(
            a or 0.0 for a in told
        )
    counts = [logged(tmp_path / f"serving-{n}") for n in range(2)]
    assert min(counts) > 0 and sum(counts) >= 21

"""Clients that mean harm and end nothing: slow headers, slow and endless bodies, half-open connections.
Others notice nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_serving import LiveServing, answer_of, live_of
from serving_cases import BODY

from serving.http import connection
from serving.http.connection import State

RANK = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = RANK + b"transfer-encoding: chunked\r\n\r\n"


def ranked(live: LiveServing, times: int = 5) -> None:
    """On a new connection each."""
    for _ in range(times):
        assert httpx2.post(f"{live.url}/v1/rank", json=BODY, timeout=30).status_code == 200


@contextlib.contextmanager
def dripping(lines: list[socket.socket], start: bytes, piece: bytes) -> Iterator[None]:
    """Each line sends `start`, then `piece` again and again until it is closed or the block is left."""
    stop = threading.Event()

    def drip(line: socket.socket) -> None:
        with contextlib.suppress(OSError):
            line.sendall(start)
            while not stop.wait(0.02):
                line.sendall(piece)

    threads = [threading.Thread(target=drip, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for line in lines:
            line.close()


def test_headers_that_drip_are_cut_off_by_their_time_however_steadily_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    with live_of(tmp_path) as live:
        lines = [live.connect() for _ in range(20)]
        with dripping(lines, RANK + b"x: ", b"a"):
            ranked(live)
            assert {answer_of(line)[0] for line in lines} <= {408, 0}
            ranked(live)


def test_who_drips_headers_on_every_connection_keeps_nobody_out(tmp_path: Path) -> None:
    with live_of(tmp_path, max_connections=8) as live:
        lines = [live.connect() for _ in range(8)]
        with dripping(lines, RANK + b"x: ", b"a"):
            until_s = time.monotonic() + 60
            while (
                len([c for c in connections(live) if c.state is State.HEAD]) < 8
                and time.monotonic() < until_s
            ):
                time.sleep(0.02)
            ranked(live, 20)


def connections(live: LiveServing) -> list[Any]:
    return list(live.app.connections)


@pytest.mark.parametrize(
    "start", [CHUNKED, RANK + b"content-length: 99999999999\r\n\r\n"], ids=["chunks", "a length"]
)
def test_a_body_without_an_end_is_413_and_what_came_of_it_is_forgotten(tmp_path: Path, start: bytes) -> None:
    piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n" if start is CHUNKED else b" " * 0x8000
    with live_of(tmp_path, max_body_bytes=1 << 17) as live, live.connect() as endless:
        sent = 0
        with contextlib.suppress(OSError):
            endless.sendall(start)
            while sent < 1 << 26:
                sent += endless.send(piece)
        assert sent < 1 << 26, "it was closed"
        ranked(live)
        assert live.app.body_reader.num_bytes == 0


def test_who_vanishes_in_the_middle_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps(BODY).encode()
    answered = RANK + b"content-length: %d\r\n\r\n" % len(body) + body
    with live_of(tmp_path) as live:
        for start in (RANK, RANK + b"content-length: 500\r\n\r\n{", CHUNKED + b"10\r\n", answered * 20):
            for _ in range(5):
                gone = live.connect()
                gone.sendall(start)
                gone.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # a reset, not an end
                gone.close()
        ranked(live)
        until_s = time.monotonic() + 60
        while (live.app.body_reader.num_bytes or len(connections(live)) > 0) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert live.app.body_reader.num_bytes == 0 and live.app.gate.in_flight == 0
    assert not [r for r in caplog.records if r.exc_info]

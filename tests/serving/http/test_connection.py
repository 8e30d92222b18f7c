"""Hostile or broken clients on real sockets: slow, endless, half-open, or not HTTP. Their connections are
closed, and other clients are served normally."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serving.http import connection
from serving.http.connection import MAX_HEAD_BYTES, MAX_PIPELINED, State
from tests.serving.live_serving import LiveServing, read_answer, start_live_serving
from tests.serving.serving_cases import BODY

RANK = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
ENDLESS_BYTES = 1 << 26  # more than the kernel buffers
HALF_REQUEST = RANK + b"content-length: 500\r\n\r\n{"
CHUNKED = RANK + b"transfer-encoding: chunked\r\n\r\n"


def error_code(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


def rank_status(live: LiveServing) -> int:
    return httpx2.post(f"{live.url}/v1/rank", json=BODY, timeout=30).status_code


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (RANK + b"x: ", b"a" * 4096),
        (RANK, b"x: " + b"a" * 100 + b"\r\n"),
        (b"GET /", b"a" * 4096),
        (b"", b"\r\n" * 2048),
        (RANK + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 4096),
        (RANK + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
    ],
    ids=["a header", "many headers", "an address", "empty lines", "a trailer", "a chunk's extension"],
)
def test_an_endless_request_is_cut_off(tmp_path: Path, start: bytes, piece: bytes) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as endless:
        sent = endless.send(start) if start else 0
        try:
            while sent < ENDLESS_BYTES:
                sent += endless.send(piece)
        except OSError:
            pass
        assert sent < ENDLESS_BYTES, "the connection was closed"
        assert rank_status(live) == 200


def test_headers_beyond_the_size_limit_are_431(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as large:
        large.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
        status, answer = read_answer(large)
        assert status == 431 and error_code(answer) == "headers_too_large"
        fitting = httpx2.get(f"{live.url}/healthz", headers={"x": "a" * (MAX_HEAD_BYTES - 1000)})
        assert fitting.status_code == 200


def test_incomplete_headers_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with (
        start_live_serving(tmp_path) as live,
        live.connect() as half,
        live.connect() as silent,
        live.connect() as second,
    ):
        half.sendall(RANK)
        second.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in second.recv(4096)
        second.sendall(b"GET /healthz HT")
        status, answer = read_answer(half)
        assert status == 408 and error_code(answer) == "header_timeout"
        assert read_answer(silent) == (0, b"")
        assert read_answer(second)[0] == 408, "the limit also holds for later requests of a connection"


def test_an_incomplete_body_is_408_and_does_not_block_other_requests(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_in_flight=2, deadline_ms=1500) as live:
        for route in (b"rank", b"engagements"):
            stuck = [live.connect() for _ in range(20)]
            for one in stuck:
                one.sendall(HALF_REQUEST.replace(b"/rank", b"/" + route))
            while live.app.body_reader.num_bytes < len(stuck):
                time.sleep(0.01)
            assert rank_status(live) == 200
            click = {"request_id": "r-1", "item_id": 8, "action": "click"}
            assert httpx2.post(f"{live.url}/v1/engagements", json=click, timeout=30).status_code == 200
            for one in stuck:
                status, answer = read_answer(one)
                assert (
                    status == 408 and error_code(answer) == "body_timeout" and b"connection: close" in answer
                )
                one.close()
        assert live.app.body_reader.num_bytes == 0 and live.serving.context.watermark.horizon_ms() > 0


def test_the_bytes_of_all_bodies_being_read_are_bounded(tmp_path: Path) -> None:
    with (
        start_live_serving(tmp_path, max_reading_bytes=100_000) as live,
        live.connect() as first,
        live.connect() as second,
    ):
        for one in (first, second):
            one.sendall(RANK + b"content-length: 90000\r\n\r\n" + b" " * 60_000)
            while live.app.body_reader.num_bytes not in (60_000, 0):
                time.sleep(0.01)
        second.settimeout(30)
        assert b"429" in second.recv(4096).split(b"\r\n")[0]
        first.sendall(b" " * 30_000)
        assert b"400" in first.recv(4096).split(b"\r\n")[0], "the first body is read to its end"


def test_a_new_connection_replaces_the_longest_idle_one(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_connections=4, deadline_ms=3000) as live:
        idle = [live.connect() for _ in range(4)]
        for one in idle:
            one.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200 OK" in one.recv(4096)
        assert rank_status(live) == 200
        assert read_answer(idle[0]) == (0, b""), "the first connection was idle longest"
        for one in idle[1:]:
            one.sendall(HALF_REQUEST)
        busy = live.connect()
        busy.sendall(HALF_REQUEST)
        while live.app.body_reader.num_bytes < 4:
            time.sleep(0.01)
        with live.connect() as late:
            status, answer = read_answer(late)
            assert status == 503 and b"retry-after: 1" in answer and error_code(answer) == "unavailable"
        for one in (*idle, busy):
            one.close()
        assert rank_status(live) == 200


def test_a_pipeline_is_bounded(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as flood, live.connect() as fair:
        fair.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        received = b""
        while received.count(b'{"status":"ok"}') < 20:
            received += fair.recv(65536)
        flood.sendall(
            HALF_REQUEST + b" " * 499 + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 10)
        )
        assert read_answer(flood)[1].count(b"200 OK") <= MAX_PIPELINED
        assert rank_status(live) == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/rank HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
    ids=[
        "TLS",
        "version",
        "method",
        "address",
        "path",
        "header",
        "length",
        "two lengths",
        "chunk",
        "CONNECT",
        "*",
    ],
)
def test_input_that_is_not_http_is_refused_without_a_traceback(
    tmp_path: Path, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with start_live_serving(tmp_path, deadline_ms=500) as live, live.connect() as odd:
        odd.sendall(raw)
        odd.shutdown(socket.SHUT_WR)
        status, _ = read_answer(odd)
        assert status in (0, 400, 404, 405, 408)
        assert rank_status(live) == 200
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize(
    ("version", "num_hosts", "expected"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 2, 400)],
)
def test_a_request_has_one_host(tmp_path: Path, version: str, num_hosts: int, expected: int) -> None:
    """RFC 9112, section 3.2: proxies could disagree about the host of another request."""
    lines = [f"GET /healthz HTTP/{version}", *["host: x"] * num_hosts, "connection: close", "", ""]
    with start_live_serving(tmp_path) as live, live.connect() as connection:
        connection.sendall("\r\n".join(lines).encode())
        status, answer = read_answer(connection)
    assert status == expected
    assert (f"expected one Host header, got {num_hosts}".encode() in answer) == (expected == 400)


@pytest.mark.parametrize(
    ("coding", "expected"),
    [("chunked", 200), ("Chunked", 200), ("gzip, chunked", 400), ("identity, chunked", 400)],
)
def test_a_transfer_encoding_other_than_chunked_is_refused(
    tmp_path: Path, coding: str, expected: int
) -> None:
    """The body would reach the routes as it was encoded, and a proxy could decode it to another request."""
    lines = ["GET /healthz HTTP/1.1", "host: x", f"transfer-encoding: {coding}", "connection: close", ""]
    with start_live_serving(tmp_path) as live, live.connect() as connection:
        connection.sendall("\r\n".join([*lines, "0", "", ""]).encode())
        status, answer = read_answer(connection)
    assert status == expected
    assert (b"expected the Transfer-Encoding 'chunked'" in answer) == (expected == 400)


@pytest.mark.parametrize(
    "header", ["authorization", "content-encoding", "content-type", "x-deadline-ms", "X-Model-Version"]
)
def test_a_header_with_one_meaning_is_given_once(tmp_path: Path, header: str) -> None:
    """A proxy may read the first one and serving the last one."""
    lines = ["POST /v1/rank HTTP/1.1", "host: x", f"{header}: a", f"{header}: b", "content-length: 2"]
    with start_live_serving(tmp_path) as live, live.connect() as connection:
        connection.sendall("\r\n".join([*lines, "", "{}"]).encode())
        status, answer = read_answer(connection)
    assert status == 400 and f"expected one header {header.lower()}".encode() in answer


def test_log_lines_that_a_client_can_cause_appear_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), start_live_serving(tmp_path) as live:
        for _ in range(20):
            with live.connect() as odd:
                odd.sendall(b"FOO / HTTP/1.1\r\n\r\n")
                assert read_answer(odd)[0] == 400
    assert (
        len([r for r in caplog.records if r.name == "uvicorn.error" and "Invalid HTTP" in r.getMessage()])
        == 1
    )


def test_a_stop_answers_unfinished_requests_and_does_not_wait_for_idle_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        start_live_serving(tmp_path, deadline_ms=60_000) as live,
        live.connect() as half,
        live.connect() as head,
        live.connect() as idle,
    ):
        half.sendall(HALF_REQUEST)
        head.sendall(RANK)
        idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in idle.recv(4096)
        while live.app.body_reader.num_bytes < 1:
            time.sleep(0.01)
        begin_s = time.monotonic()
        live.end()
        assert time.monotonic() - begin_s < live.budget.seconds / 2, (
            "the stop did not wait for its time limit"
        )
        status, answer = read_answer(half)
        assert status == 503 and error_code(answer) == "unavailable"
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]


@contextlib.contextmanager
def send_slowly(sockets: list[socket.socket], start: bytes, piece: bytes) -> Iterator[None]:
    """Let each connection send `start`, then `piece` repeatedly, until it is closed or the block ends."""
    stop = threading.Event()

    def send_pieces(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client.sendall(start)
            while not stop.wait(0.02):
                client.sendall(piece)

    threads = [threading.Thread(target=send_pieces, args=(client,)) for client in sockets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in sockets:
            client.close()


def test_slowly_sent_headers_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    with start_live_serving(tmp_path) as live:
        sockets = [live.connect() for _ in range(20)]
        with send_slowly(sockets, RANK + b"x: ", b"a"):
            assert rank_status(live) == 200
            assert {read_answer(client)[0] for client in sockets} <= {408, 0}
            assert rank_status(live) == 200


def test_clients_that_send_headers_slowly_keep_no_other_client_out(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_connections=8) as live:
        sockets = [live.connect() for _ in range(8)]
        with send_slowly(sockets, RANK + b"x: ", b"a"):
            until_s = time.monotonic() + 60
            while (
                len([c for c in live.app.connections if c.state is State.HEAD]) < 8
                and time.monotonic() < until_s
            ):
                time.sleep(0.02)
            assert {rank_status(live) for _ in range(20)} == {200}


@pytest.mark.parametrize(
    "start", [CHUNKED, RANK + b"content-length: 99999999999\r\n\r\n"], ids=["chunks", "a length"]
)
def test_an_endless_body_is_413_and_its_bytes_are_released(tmp_path: Path, start: bytes) -> None:
    piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n" if start is CHUNKED else b" " * 0x8000
    with start_live_serving(tmp_path, max_body_bytes=1 << 17) as live, live.connect() as endless:
        sent = 0
        with contextlib.suppress(OSError):
            endless.sendall(start)
            while sent < 1 << 26:
                sent += endless.send(piece)
        assert sent < 1 << 26, "the connection was closed"
        assert rank_status(live) == 200
        assert live.app.body_reader.num_bytes == 0


def test_a_client_that_vanishes_leaves_no_state_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps(BODY).encode()
    answered = RANK + b"content-length: %d\r\n\r\n" % len(body) + body
    with start_live_serving(tmp_path) as live:
        for start in (RANK, RANK + b"content-length: 500\r\n\r\n{", CHUNKED + b"10\r\n", answered * 20):
            for _ in range(5):
                leaving_client = live.connect()
                leaving_client.sendall(start)
                leaving_client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # close with a reset instead of a normal end
                leaving_client.close()
        assert rank_status(live) == 200
        until_s = time.monotonic() + 60
        while (
            live.app.body_reader.num_bytes or len(live.app.connections) > 0
        ) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert live.app.body_reader.num_bytes == 0 and live.app.gate.in_flight == 0
    assert not [r for r in caplog.records if r.exc_info]

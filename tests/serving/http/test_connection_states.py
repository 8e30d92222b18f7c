"""Every state of a connection has a time limit, whatever the client does, and every complete request gets
exactly one answer."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import httpx2
import pytest

from serving.http import connection
from serving.http.connection import MAX_HEAD_BYTES
from tests.serving.live_serving import LiveServing, read_answer, start_live_serving
from tests.serving.serving_cases import BODY

JSON_BODY = json.dumps(BODY).encode()
OK = b"HTTP/1.1 200 OK\r\n"
PING = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
HUGE_BODY = b"content-length: 1000000000\r\n\r\n{"


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/rank") -> bytes:
    sockets = [b"POST %b HTTP/1.1" % path, b"host: x", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join(sockets) + b"\r\n\r\n" + body


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def wait_until_closed(live: LiveServing) -> None:
    deadline_s = time.monotonic() + 60
    while live.app.connections and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not live.app.connections


ANSWERED_EARLY = {
    "healthz": b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + HUGE_BODY,
    "no such path": b"POST /nowhere HTTP/1.1\r\nhost: x\r\n" + HUGE_BODY,
    "method": b"PUT /v1/rank HTTP/1.1\r\nhost: x\r\n" + HUGE_BODY,
    "deadline": b"POST /v1/rank HTTP/1.1\r\nhost: x\r\nx-deadline-ms: soon\r\n" + HUGE_BODY,
    "too large": b"POST /v1/rank HTTP/1.1\r\nhost: x\r\n" + HUGE_BODY,
    "chunks": b"GET /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
}


def test_a_request_that_is_answered_before_its_body_ends_does_not_keep_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REST_S", 0.2)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    with start_live_serving(tmp_path) as live, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(live.connect()) for _ in ANSWERED_EARLY]
        for client, start in zip(sockets, ANSWERED_EARLY.values(), strict=True):
            client.sendall(start)
        for client, name in zip(sockets, ANSWERED_EARLY, strict=True):
            status, received = read_answer(client)
            assert status in (200, 400, 404, 405, 413) and len(statuses(received)) == 1, name
        wait_until_closed(live)


def test_requests_with_unfinished_bodies_make_room_for_a_new_client(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_connections=4) as live, contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(live.connect())
            client.sendall(ANSWERED_EARLY["healthz"])
            assert client.recv(65536).startswith(OK)
        assert httpx2.get(f"{live.url}/healthz", timeout=30).status_code == 200


def test_the_rest_of_a_body_may_come_after_the_answer(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        assert statuses(client.recv(65536)) == [404]
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n".ljust(100) + PING)
        assert statuses(client.recv(65536)) == [200], (
            "the next request starts after the body and not inside it"
        )


def test_a_broken_rest_of_an_answered_request_gets_no_second_answer(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as client:
        client.sendall(ANSWERED_EARLY["chunks"])
        assert statuses(client.recv(65536)) == [200]
        client.sendall(b"zz\r\n" + PING)
        assert read_answer(client) == (0, b"")


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALLED_S", 0.3)
    with start_live_serving(tmp_path) as live, live.connect() as not_reading:
        not_reading.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n" * 12)
        wait_until_closed(live)


def test_a_client_that_reads_slowly_gets_the_whole_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)
    monkeypatch.setattr(connection, "MIN_READ_BYTES", 1)
    with start_live_serving(tmp_path) as live, live.connect() as slow:
        slow.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = 0
        for _ in range(8):
            time.sleep(0.05)
            received += len(slow.recv(1 << 16))
        while chunk := slow.recv(1 << 20):
            received += len(chunk)
        assert received > 1_500_000


def test_clients_that_do_not_read_make_room_for_a_new_client(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_connections=2) as live, contextlib.ExitStack() as stack:
        for _ in range(2):
            not_reading = stack.enter_context(live.connect())
            not_reading.sendall(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\n\r\n" * 12)
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{live.url}/healthz", timeout=30).status_code == 200:
                    break
            time.sleep(0.05)
        while len(live.app.connections) > 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert time.monotonic() < deadline_s


H2C = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAAA")


@pytest.mark.parametrize("upgrade", [H2C, (b"connection: upgrade", b"upgrade: websocket")])
@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_an_upgrade_is_ignored_and_the_request_keeps_its_body(
    tmp_path: Path, upgrade: tuple[bytes, ...], is_in_pieces: bool
) -> None:
    data = post(JSON_BODY, *upgrade)
    at = data.index(b"{")
    pieces = (data[:20], data[20:at], data[at:]) if is_in_pieces else (data,)
    with start_live_serving(tmp_path) as live, live.connect() as client:
        for _ in range(2):
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.02)
        client.sendall(post(b"{}", b"connection: close"))
        assert statuses(read_answer(client)[1]) == [200, 200, 400]
        assert len(live.serving.records()) == 2


def test_a_body_behind_an_upgrade_is_not_taken_as_a_request(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as client:
        head, _, body = post(PING, *H2C, b"connection: close", path=b"/v1/engagements").partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        time.sleep(0.05)
        client.sendall(body)
        assert statuses(read_answer(client)[1]) == [400]


def test_a_draining_process_closes_the_connections_of_refused_requests(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, drain_ms=5000) as live, live.connect() as client:
        client.sendall(PING)
        assert client.recv(65536).startswith(OK)
        live.app.gate.in_flight = live.app.gate.max_in_flight
        live.stop.set()
        time.sleep(0.5)
        client.sendall(post(JSON_BODY))
        status, received = read_answer(client)
        assert status == 429 and b"connection: close" in received
        live.app.gate.in_flight = 0


def test_an_overloaded_process_reads_each_body_to_its_end(tmp_path: Path) -> None:
    """A refused request is read to the end that the parser finds, however its headers are spelled."""
    with start_live_serving(tmp_path) as live, live.connect() as client:
        live.app.gate.in_flight = live.app.gate.max_in_flight
        smuggled = post(b"{}")
        data = post(smuggled).replace(
            b"content-length: %d" % len(smuggled), b"content-length:%d" % len(smuggled)
        )
        client.sendall(data + PING + PING.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert statuses(read_answer(client)[1]) == [429, 200, 200]
        live.app.gate.in_flight = 0


def test_a_proxy_connection_header_does_not_confuse_the_end_of_a_connection(tmp_path: Path) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as client:
        client.sendall(PING.replace(b"host: x", b"host: x\r\nproxy-connection: close"))
        status, received = read_answer(client)
        assert status == 200 and b"connection: close" in received


def test_a_half_closed_client_gets_its_answer_however_its_request_arrives(tmp_path: Path) -> None:
    data = post(JSON_BODY)
    with start_live_serving(tmp_path) as live:
        for pieces in ((data,), (data[:50], data[50:]), (data + data,)):
            with live.connect() as half:
                for piece in pieces:
                    half.sendall(piece)
                    time.sleep(0.02)
                half.shutdown(socket.SHUT_WR)
                assert set(statuses(read_answer(half)[1])) == {200}, len(pieces)
        with live.connect() as incomplete:
            incomplete.sendall(data[:-1])
            incomplete.shutdown(socket.SHUT_WR)
            assert read_answer(incomplete) == (0, b"")


def test_a_refusal_reaches_a_client_that_is_still_sending(tmp_path: Path) -> None:
    with start_live_serving(tmp_path, max_body_bytes=4096) as live, live.connect() as client:
        client.sendall(post(b" " * (4 << 20)))
        status, received = read_answer(client)
        assert status == 413 and b"too_large" in received


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff garbage\r\n\r\n", b"x: " + b"a" * 2 * MAX_HEAD_BYTES, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_a_valid_request_before_garbage_is_answered(tmp_path: Path, garbage: bytes) -> None:
    with start_live_serving(tmp_path) as live, live.connect() as client:
        client.sendall(post(JSON_BODY) + post(JSON_BODY) + garbage)
        received = statuses(read_answer(client)[1])
        assert received[:2] == [200, 200] and len(received) <= 3 and len(live.serving.records()) == 2


def test_a_broken_body_is_refused_after_the_answers_before_it(tmp_path: Path) -> None:
    chunked = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with start_live_serving(tmp_path) as live:
        for data, expected in ((chunked + b"zz\r\n", [400]), (post(JSON_BODY) + chunked + b"zz\r\n", [200])):
            with live.connect() as client:
                client.sendall(data)
                assert statuses(read_answer(client)[1]) == expected

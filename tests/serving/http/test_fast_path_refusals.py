"""While the gate is closed a plain rank request is refused unread; what isn't plain is left to the parser."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_serving import serving_live
from serving_cases import BODY, SCHEMA, build
from serving_fakes import FakeRows

from serving.http.fast_path import is_whole_post, overload_answer

PATH = b"/v1/rank"
PLAIN = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd"


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        PLAIN.replace(b"rank HTTP", b"rank?append=true HTTP"),
        PLAIN.replace(b"content-length", b"Content-Length"),
        PLAIN.replace(b"host: x\r\n", b""),
        PLAIN.replace(b"4\r\n\r\nabcd", b"0\r\n\r\n"),
        PLAIN.replace(b"host: x", b"Host: x\r\nConnection: Keep-Alive"),
        PLAIN.replace(b"content-length: 4", b"content-length: 4\r\naccept: */*"),
    ],
)
def test_a_request_with_all_of_its_bytes_is_whole(data: bytes) -> None:
    assert is_whole_post(data, PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PLAIN[:-1],
        PLAIN + b"P",
        PLAIN + PLAIN,
        PLAIN[: PLAIN.index(b"\r\n\r\n")],
        PLAIN.replace(b"POST", b"PUT"),
        PLAIN.replace(b"/v1/rank", b"/v1/ranks"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"content-length: 4", b"x: 4"),
        PLAIN.replace(b"content-length: 4", b"content-length: 4\r\ncontent-length: 4"),
        PLAIN.replace(b"content-length: 4", b"content-length: -4"),
        PLAIN.replace(b"content-length: 4", b"content-length:4"),
        PLAIN.replace(b"content-length: 4", b"content-length: 000000000000004"),
        PLAIN.replace(b"content-length: 4", b"content-length: 4 "),
        PLAIN.replace(b"host: x", b"host: content-length"),
        PLAIN.replace(b"host: x", b"connection: close"),
        PLAIN.replace(b"host: x", b"connection: keep-alive, upgrade"),
        PLAIN.replace(b"host: x", b"expect: 100-continue"),
        PLAIN.replace(b"host: x", b"Transfer-Encoding: chunked"),
        PLAIN.replace(b"host: x", b"upgrade: h2c"),
        PLAIN.replace(b"host: x", b" folded"),
        PLAIN.replace(b"host: x", b"host: x\r\n\tfolded"),
    ],
)
def test_what_a_parser_may_see_otherwise_is_not(data: bytes) -> None:
    assert not is_whole_post(data, PATH)


class Parsed:
    """What the server's parser makes of bytes."""

    def __init__(self, data: bytes) -> None:
        self.bodies: list[bytes] = []
        self.num_complete = 0
        self.url = b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.bodies.append(body)

    def on_message_complete(self) -> None:
        self.num_complete += 1


HEADERS = st.sampled_from(
    [
        b"host: x",
        b"content-length: 4",
        b"Content-Length: 3",
        b"connection: keep-alive",
        b"Connection: close",
        b"x: content-length: 4",
        b"a:b",
        b" folded",
        b"TE: x",
    ]
)


@given(
    st.lists(HEADERS, max_size=4),
    st.sampled_from([b"", b"abc", b"abcd", b"abcd\r\n\r\n"]),
    st.sampled_from([b"", b"?a=b", b"x"]),
)
def test_what_is_whole_is_so_for_the_parser_too(headers: list[bytes], body: bytes, query: bytes) -> None:
    data = b"\r\n".join([b"POST /v1/rank" + query + b" HTTP/1.1", *headers]) + b"\r\n\r\n" + body
    if is_whole_post(data, PATH):
        parsed = Parsed(data)
        assert (
            parsed.num_complete == 1 and b"".join(parsed.bodies) == body and parsed.parser.should_keep_alive()
        )
        assert parsed.url.partition(b"?")[0] == PATH


def test_the_answer_is_that_of_every_error() -> None:
    head, _, body = overload_answer("too much").partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 429 ")
        and b"\r\nretry-after: 1" in head
        and f"content-length: {len(body)}".encode() in head
    )
    assert json.loads(body) == {"error": {"code": "overloaded", "message": "too much"}}


def asked(connection: socket.socket, body: bytes) -> tuple[int, bytes]:
    """(status, body) of one rank request on a connection that stays."""
    head = (
        "POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    received = connection.recv(65536)
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head_, _, answer = received.partition(b"\r\n\r\n")
    length = int(head_.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(answer) < length:
        answer += connection.recv(65536)
    return int(received[9:12]), answer


def test_g7_requests_are_refused_unread_on_connections_that_stay_and_counted(tmp_path: Path) -> None:
    built = build(tmp_path, FakeRows(SCHEMA))
    good = json.dumps(BODY).encode()
    with serving_live(built) as live, live.connect() as connection:
        assert asked(connection, good)[0] == 200
        live.app.gate.in_flight = live.app.gate.max_in_flight
        for body in (good, b"{", good):
            status, answer = asked(connection, body)
            assert status == 429 and json.loads(answer)["error"]["code"] == "overloaded", "whatever is in it"
        live.app.gate.in_flight = 0
        assert asked(connection, good)[0] == 200 and asked(connection, b"{")[0] == 400
        refused = built.context.metrics.registry.get_sample_value(
            "roostream_serving_requests_total", {"route": "rank", "status": "429"}
        )
        assert refused == 3


def test_other_traffic_and_pages_are_answered_while_the_gate_is_closed(tmp_path: Path) -> None:
    with serving_live(build(tmp_path, FakeRows(SCHEMA))) as live, live.connect() as connection:
        live.app.gate.in_flight = live.app.gate.max_in_flight
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        body = b'{"request_id": "r", "user_id": 1, "item_id": 2, "action": "click"}'
        connection.sendall(
            f"POST /v1/engagements HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


class Written(asyncio.Transport):
    """What a connection wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[bytes] = []

    def write(self, data: Any) -> None:
        self.data.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

"""Request smuggling: for requests that two HTTP parsers could read differently, serving closes the connection
or sends exactly one answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.serving.live_serving import read_answer, run_live_serving
from tests.serving.serving_cases import SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows

SMUGGLED = b"GET /healthz?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH = len(SMUGGLED)
CHUNKED_SMUGGLED = b"0\r\n\r\n" + SMUGGLED


def head(*lines: bytes, request_line: bytes = b"POST /nowhere HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    return end.join([request_line, b"host: x", *lines]) + end + end


def corpus() -> list[bytes]:
    """Return ambiguous requests, each with a second request hidden in its body."""
    correct_length = b"content-length: %d" % LENGTH
    chunked_length = b"content-length: %d" % len(CHUNKED_SMUGGLED)
    separators = (b":", b":\t", b":  ", b" :", b"\t:", b" : ", b":\x0b")
    ends = (b" ", b"\t", b"\x00", b"\x0b", b",", b", %d" % LENGTH, b";", b".0", b"e1")
    texts = (b"+%d" % LENGTH, b"0%d" % LENGTH, b"0x%x" % LENGTH, b"-1", b"")
    lengths = [
        *(correct_length.replace(b": ", separator) for separator in separators),
        *(correct_length + end for end in ends),
        *(b"content-length: " + text for text in texts),
        b"content-length: %d" % (1 << 64),
        b"content-length: %d" % ((1 << 64) + LENGTH),
        correct_length.upper(),
        b"\x00" + correct_length,
        b" " + correct_length,
        b"x: y\n" + correct_length,
        b"x: y\r" + correct_length,
        b"x: \r\n " + correct_length,
        b"x\r\n" + correct_length,
        correct_length + b"\r\n" + correct_length,
        correct_length + b"\r\ncontent-length: 0",
        b"content-length: 0\r\n" + correct_length,
        correct_length + b"\r\ncontent-length: %d" % (LENGTH + 1),
    ]
    values = (b"chunked", b"Chunked", b"CHUNKED", b"identity", b"gzip", b"xchunked", b"chunkedx")
    values += (b'"chunked"', b"chunked;x=y", b"chunked, identity", b"identity, chunked", b",chunked")
    spellings = (b":chunked", b" : chunked", b":\tchunked", b":\x0bchunked")
    codings = [
        *(b"transfer-encoding: " + value for value in values),
        *(b"transfer-encoding" + rest for rest in spellings),
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
        b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
        b"transfer_encoding: chunked",
        b"x: y\ntransfer-encoding: chunked",
        b"x: y\rtransfer-encoding: chunked",
        b"x: \r\n transfer-encoding: chunked",
        b"transfer-encoding:\r\n chunked",
        b"transfer-encoding: chunked\x00",
    ]
    request_lines = [
        b"POST /nowhere http/1.1",
        b"POST /nowhere HTTP/1.1 ",
        b"POST  /nowhere HTTP/1.1",
        b"POST /nowhere\tHTTP/1.1",
        b"POST /no\x00where HTTP/1.1",
        b"POST /nowhere HTTP/1.2",
        b"POST /nowhere HTTP/01.1",
        b"POST /nowhere",
        b"post /nowhere HTTP/1.1",
        b"POST /nowhere HTTP/1.0",
    ]
    return [
        *(head(line) + SMUGGLED for line in lengths),
        *(head(coding, chunked_length) + CHUNKED_SMUGGLED for coding in codings),
        *(head(chunked_length, coding) + CHUNKED_SMUGGLED for coding in codings),
        *(head(correct_length, request_line=request_line) + SMUGGLED for request_line in request_lines),
        head(correct_length, end=b"\n") + SMUGGLED,
        head(b"connection: upgrade", b"upgrade: h2c", correct_length) + SMUGGLED,
        head(b"connection: close", b"content-length: 0") + SMUGGLED,
    ]


def test_ambiguous_requests_are_closed_or_answered_once(tmp_path: Path) -> None:
    cases = corpus()
    assert len(cases) >= 60
    with run_live_serving(build_serving(tmp_path, FakeRows(SCHEMA))) as live, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(live.connect()) for _ in cases]
        for client, data in zip(sockets, cases, strict=True):
            with contextlib.suppress(OSError):
                client.sendall(data)
                client.shutdown(1)
        for client, data in zip(sockets, cases, strict=True):
            received = read_answer(client)[1]
            assert received.count(b"HTTP/1.1 ") <= 1 and b'{"status":"ok"}' not in received, data

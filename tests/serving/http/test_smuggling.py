"""Heads that two parsers could read differently: the connection is closed, or there is exactly one answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.serving.live_serving import answer_of, serving_live
from tests.serving.serving_cases import SCHEMA, build
from tests.serving.serving_fakes import FakeRows

SMUGGLED = b"GET /healthz?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH = len(SMUGGLED)
CHUNKED_SMUGGLED = b"0\r\n\r\n" + SMUGGLED


def head(*lines: bytes, first: bytes = b"POST /nowhere HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    return end.join([first, b"host: x", *lines]) + end + end


def corpus() -> list[bytes]:
    """Each head with a body that holds a request."""
    right = b"content-length: %d" % LENGTH
    longer = b"content-length: %d" % len(CHUNKED_SMUGGLED)
    separators = (b":", b":\t", b":  ", b" :", b"\t:", b" : ", b":\x0b")
    ends = (b" ", b"\t", b"\x00", b"\x0b", b",", b", %d" % LENGTH, b";", b".0", b"e1")
    texts = (b"+%d" % LENGTH, b"0%d" % LENGTH, b"0x%x" % LENGTH, b"-1", b"")
    lengths = [
        *(right.replace(b": ", separator) for separator in separators),
        *(right + end for end in ends),
        *(b"content-length: " + text for text in texts),
        b"content-length: %d" % (1 << 64),
        b"content-length: %d" % ((1 << 64) + LENGTH),
        right.upper(),
        b"\x00" + right,
        b" " + right,
        b"x: y\n" + right,
        b"x: y\r" + right,
        b"x: \r\n " + right,
        b"x\r\n" + right,
        right + b"\r\n" + right,
        right + b"\r\ncontent-length: 0",
        b"content-length: 0\r\n" + right,
        right + b"\r\ncontent-length: %d" % (LENGTH + 1),
    ]
    values = (b"chunked", b"Chunked", b"CHUNKED", b"identity", b"gzip", b"xchunked", b"chunkedx")
    values += (b'"chunked"', b"chunked;x=y", b"chunked, identity", b"identity, chunked", b",chunked")
    rests = (b":chunked", b" : chunked", b":\tchunked", b":\x0bchunked")
    codings = [
        *(b"transfer-encoding: " + value for value in values),
        *(b"transfer-encoding" + rest for rest in rests),
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
        b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
        b"transfer_encoding: chunked",
        b"x: y\ntransfer-encoding: chunked",
        b"x: y\rtransfer-encoding: chunked",
        b"x: \r\n transfer-encoding: chunked",
        b"transfer-encoding:\r\n chunked",
        b"transfer-encoding: chunked\x00",
    ]
    firsts = [
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
        *(head(coding, longer) + CHUNKED_SMUGGLED for coding in codings),
        *(head(longer, coding) + CHUNKED_SMUGGLED for coding in codings),
        *(head(right, first=first) + SMUGGLED for first in firsts),
        head(right, end=b"\n") + SMUGGLED,
        head(b"connection: upgrade", b"upgrade: h2c", right) + SMUGGLED,
        head(b"connection: close", b"content-length: 0") + SMUGGLED,
    ]


def test_ambiguous_requests_are_closed_or_answered_once(tmp_path: Path) -> None:
    cases = corpus()
    assert len(cases) >= 60
    with serving_live(build(tmp_path, FakeRows(SCHEMA))) as live, contextlib.ExitStack() as stack:
        lines = [stack.enter_context(live.connect()) for _ in cases]
        for line, data in zip(lines, cases, strict=True):
            with contextlib.suppress(OSError):
                line.sendall(data)
                line.shutdown(1)
        for line, data in zip(lines, cases, strict=True):
            received = answer_of(line)[1]
            assert received.count(b"HTTP/1.1 ") <= 1 and b'{"status":"ok"}' not in received, data

"""Refusing without reading: while nobody more can be let in, a request that plainly is one more is answered as its bytes come.

A refusal on the usual way (parser, task, routes) costs a good part of an answer, in the interpreter that the answers need too: at
three times what can be answered, refusals took a third and more of it (docs/decisions/0035). Whatever isn't plain goes the usual
way and is refused there.
"""

from __future__ import annotations

import functools

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serving.http.admission import overloaded
from serving.http.body import JSON

_END = b"\r\n\r\n"
_ODD = (b"\ntransfer-encoding", b"\nexpect", b"\nupgrade", b"\n ", b"\n\t")
_MAX_KEPT = 1024  # answers and heads
_MAX_HEAD = 1024  # bytes of one that is kept
_LENGTH = b"\ncontent-length: "


def is_whole_post(data: bytes, path: bytes) -> bool:
    """Whether these bytes are one request, from its first to its last byte: HTTP/1.1, one length, and a connection that stays.
    False also of what only a parser can tell."""
    end = data.find(_END)
    if end < 0:
        return False
    length_of = _kept_length if end <= _MAX_HEAD else _length
    length = length_of(data[:end], path)
    return length is not None and end + len(_END) + length == len(data)


def _length(head: bytes, path: bytes) -> int | None:
    """Of the body behind a plain head, which is all before the empty line; None: it isn't plain."""
    line = b"POST " + path
    if not head.startswith(line) or head[len(line) : len(line) + 1] not in (b" ", b"?"):
        return None
    head = (head + b"\r\n").lower()
    first, _, headers = head.partition(b"\r\n")
    if not first.endswith(b" http/1.1") or any(word in head for word in _ODD):
        return None
    at = headers.find(_LENGTH[1:]) if headers.startswith(_LENGTH[1:]) else headers.find(_LENGTH) + 1
    if head.count(b"content-length") != 1 or head.count(b"\nconnection:") != head.count(
        b"\nconnection: keep-alive\r\n"
    ):
        return None
    length = headers[at + len(_LENGTH) - 1 : headers.find(b"\r", at)]
    return int(length) if length.isdigit() and len(length) < 12 else None


_kept_length = functools.lru_cache(_MAX_KEPT)(_length)
"""A client's heads differ in little but their length."""


@functools.lru_cache(_MAX_KEPT)
def overload_answer(why: str) -> bytes:
    """The whole answer of a gate that lets nobody in, after which the connection stays open."""
    error = overloaded(why)
    body = msgspec.json.encode(error.body())
    headers = {"content-type": JSON, "content-length": str(len(body)), **error.headers()}
    return (
        STATUS_LINE[error.status]
        + b"".join(f"{n}: {v}\r\n".encode() for n, v in headers.items())
        + b"\r\n"
        + body
    )

"""Refusing without reading: while nobody more can be let in, a request that plainly is one more is answered as its bytes come.

A refusal on the usual way (parser, task, routes) costs a good part of an answer, in the interpreter that the answers need too: at
three times what can be answered, refusals took a third and more of it (docs/decisions/0035). Whatever isn't plain goes the usual
way and is refused there.
"""

from __future__ import annotations

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serving.errors import RequestError
from serving.http.body import JSON

_END = b"\r\n\r\n"
_ODD = (b"\ntransfer-encoding", b"\nexpect", b"\nupgrade", b"\n ", b"\n\t")
_MOST_ANSWERS = 1000
_answers: dict[str, bytes] = {}  # message → answer
_LENGTH = b"\ncontent-length: "


def is_whole_post(data: bytes, path: bytes) -> bool:
    """Whether these bytes are one request, from its first to its last byte: HTTP/1.1, one length, and a connection that stays.
    False also of what only a parser can tell."""
    line = b"POST " + path
    if not data.startswith(line) or data[len(line) : len(line) + 1] not in (b" ", b"?"):
        return False
    end = data.find(_END)
    head = data[: end + 2].lower()  # the last header with its end of line
    first, _, headers = head.partition(b"\r\n")
    if end < 0 or not first.endswith(b" http/1.1") or any(word in head for word in _ODD):
        return False
    at = headers.find(_LENGTH[1:]) if headers.startswith(_LENGTH[1:]) else headers.find(_LENGTH) + 1
    if head.count(b"content-length") != 1 or head.count(b"\nconnection:") != head.count(b"\nconnection: keep-alive\r\n"):
        return False
    length = headers[at + len(_LENGTH) - 1 : headers.find(b"\r", at)]
    return length.isdigit() and len(length) < 12 and end + len(_END) + int(length) == len(data)


def answer_of(error: RequestError) -> bytes:
    """The whole answer, after which the connection stays open. Few are different, so they are kept."""
    known = _answers.get(str(error))
    if known is None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        known = _answers[str(error)] = _answer_of(error)
    return known


def _answer_of(error: RequestError) -> bytes:
    body = msgspec.json.encode(error.body())
    headers = {"content-type": JSON, "content-length": str(len(body)), **error.headers()}
    return STATUS_LINE[error.status] + b"".join(f"{n}: {v}\r\n".encode() for n, v in headers.items()) + b"\r\n" + body

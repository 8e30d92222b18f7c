"""Reading a request's body with its size bounded before memory is taken, and answering, straight on ASGI."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from serving.answer import RankAnswer
from serving.errors import RequestError

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
_WINDOW = {"gzip": 31, "deflate": 15}


class ClientGoneError(Exception):
    """The client closed the connection before its body was complete: there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> tuple[bytes, str]:
    """(body, media type), inflated.

    Raises:
        RequestError: 413 beyond `max_bytes` (as sent or inflated), 415 unknown encoding, 400 damaged compression.
        ClientGoneError: it hung up.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name.startswith(b"content-")}
    stated = headers.get(b"content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise _too_large(max_bytes)
    body = await _receive_all(receive, max_bytes)
    encoding = headers.get(b"content-encoding", "identity").strip().lower()
    if encoding != "identity":
        body = _inflate(body, encoding, max_bytes)
    return body, headers.get(b"content-type", JSON).partition(";")[0].strip().lower()


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    """Counts as it comes: a stated length may be a lie or absent."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def _inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """At most `max_bytes` of output are made, whatever the input claims to hold."""
    if encoding not in _WINDOW:
        raise RequestError(415, f"expected content-encoding gzip, deflate or none, got {encoding!r}")
    inflater = zlib.decompressobj(_WINDOW[encoding])
    try:
        out = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RequestError(400, f"expected a {encoding} body: {error}") from None
    if len(out) > max_bytes:
        raise _too_large(max_bytes)
    if not inflater.eof:
        raise RequestError(400, f"expected a whole {encoding} body, got one that was cut")
    return out


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"expected a body of at most {max_bytes} bytes (also inflated)")


def accepts_protobuf(scope: Scope) -> bool:
    """Whether the client named protobuf among what it accepts; JSON is for everybody else."""
    return any(name == b"accept" and PROTOBUF.encode() in value.lower() for name, value in scope["headers"])


def encoded(answer: object, protobuf: bool) -> tuple[bytes, str]:
    """(body, its media type). Only a rank's answer has a form in protobuf; everything else, errors too, is JSON."""
    if isinstance(answer, RankAnswer):
        return (answer.protobuf(), PROTOBUF) if protobuf else (answer.json(), JSON)
    return msgspec.json.encode(answer), JSON


async def respond(send: Send, status: int, body: bytes, media: str, headers: dict[str, str]) -> None:
    """One whole answer."""
    raw: list[tuple[bytes, bytes]] = [(b"content-type", media.encode()), (b"content-length", str(len(body)).encode())]
    raw += [(name.encode(), value.encode()) for name, value in headers.items()]
    start: dict[str, Any] = {"type": "http.response.start", "status": status, "headers": raw}
    await send(start)
    await send({"type": "http.response.body", "body": body})

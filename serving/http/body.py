"""Reads request bodies with a deadline and bounded memory, and encodes answers."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from serving.answer import ENCODER
from serving.errors import RequestError, shown
from serving.http.admission import RETRY_AFTER_S

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
MAX_GZIP_MEMBERS = 64
_WINDOW = {"gzip": 31, "deflate": 15}
_CHARSETS = ("utf-8", "utf8", "us-ascii")


class ClientGoneError(Exception):
    """The client closed the connection before its body was complete: there is no one to answer."""


class BodyReader:
    """Reads the request bodies of all routes. A request enters no queue before its body is complete. Not
    thread-safe: it belongs to one event loop."""

    def __init__(self, max_body_bytes: int, max_bytes: int) -> None:
        """`max_body_bytes`: per body; `max_bytes`: received so far of all bodies that are being read."""
        self.max_body_bytes, self.max_bytes = max_body_bytes, max_bytes
        self.num_bytes = 0
        self.is_stopping = False
        self._waits: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        """Answer 503 to all requests whose bodies are incomplete, now and from now on."""
        self.is_stopping = True
        for wait in self._waits:
            if not wait.expired():  # else its task has not run since, and an expired limit cannot be changed
                wait.reschedule(asyncio.get_running_loop().time())

    async def read(self, request: Request, until_s: float) -> bytes:
        """Return the body, decompressed; `until_s` is a time of the event loop's clock.

        Raises:
            RequestError: 408 incomplete at the deadline; 413 more than `max_body_bytes`, as sent or
            decompressed; 415 unknown encoding; 400 corrupt compression; 429 too many bytes are being read;
            503 the process is stopping.
            ClientGoneError: the client hung up.
        """
        headers = _content_headers(request.scope)
        stated = headers.get(b"content-length", "")
        if stated.isdecimal() and int(stated[:20]) > self.max_body_bytes:
            raise _too_large(self.max_body_bytes)
        try:
            async with asyncio.timeout_at(until_s) as wait:
                self._waits.add(wait)
                try:
                    body = await self._receive_all(request.receive)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self.is_stopping:
                raise stopping_error() from None
            raise RequestError(
                408, "expected a complete body within the deadline, got a part of it"
            ) from None
        encoding = headers.get(b"content-encoding", "identity").strip().lower()
        if encoding == "x-gzip":  # an old name (RFC 9110, section 8.4.1.3)
            encoding = "gzip"
        return body if encoding == "identity" else _inflate(body, encoding, self.max_body_bytes)

    async def _receive_all(self, receive: Receive) -> bytes:
        """Count bytes as they arrive: a stated length may be wrong or absent."""
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk: bytes = message.get("body", b"")
                size += len(chunk)
                self.num_bytes += len(chunk)
                if size > self.max_body_bytes:
                    raise _too_large(self.max_body_bytes)
                if not message.get("more_body", False):
                    return b"".join((*chunks, chunk)) if chunks else chunk
                if self.num_bytes > self.max_bytes:
                    full = (
                        f"{self.max_bytes} bytes of bodies are being received, the maximum of this "
                        "process; try again"
                    )
                    raise RequestError(429, full, retry_after_s=RETRY_AFTER_S)
                if self.is_stopping:
                    raise stopping_error()
                chunks.append(chunk)
        finally:
            self.num_bytes -= size


def _content_headers(scope: Scope) -> dict[bytes, str]:
    return {name: value.decode("latin-1") for name, value in scope["headers"] if name.startswith(b"content-")}


def stopping_error() -> RequestError:
    """The answer to a request that arrives while the process stops: status 503 with a time to retry."""
    return RequestError(503, "this process is stopping; use another one", retry_after_s=RETRY_AFTER_S)


def _inflate(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Produce at most `max_bytes` of output, whatever the input claims to hold. A gzip body may have up to
    MAX_GZIP_MEMBERS members, of which the outputs are joined."""
    if encoding not in _WINDOW:
        raise RequestError(415, f"expected content-encoding gzip, deflate or none, got {shown(encoding)!r}")
    out, rest = b"", body
    for _ in range(MAX_GZIP_MEMBERS if encoding == "gzip" else 1):
        inflater = zlib.decompressobj(_WINDOW[encoding])
        try:
            out += inflater.decompress(rest, max_bytes + 1 - len(out))
        except zlib.error as error:
            raise RequestError(400, f"expected a {encoding} body: {error}") from None
        if len(out) > max_bytes:
            raise _too_large(max_bytes)
        if not inflater.eof:
            raise RequestError(400, f"expected a complete {encoding} body, got a truncated one")
        rest = inflater.unused_data
        if not rest:
            return out
    got = f"{len(rest)} bytes after its end"
    raise RequestError(400, f"expected one {encoding} body of at most {MAX_GZIP_MEMBERS} parts, got {got}")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"expected a body of at most {max_bytes} bytes (also inflated)")


def request_media_type(scope: Scope, expected: tuple[str, ...]) -> str:
    """Return JSON or PROTOBUF. `application/…+json`, an empty type and no type at all are JSON.

    Raises:
        RequestError: 415 for a type that is not in `expected`, or for JSON that is not UTF-8.
    """
    media, _, parameters = Headers(scope=scope).get("content-type", "").partition(";")
    media = media.strip().lower()
    if media in ("", JSON) or (media.startswith("application/") and media.endswith("+json")):
        charset = _charset(parameters)
        if charset not in _CHARSETS:
            raise RequestError(415, f"expected charset utf-8, got {shown(charset)!r}")
        return JSON
    if media not in expected:
        wanted = " or ".join(expected)
        raise RequestError(
            415, f"expected content-type {wanted}, got {shown(media)!r}; curl: add -H 'content-type: {JSON}'"
        )
    return media


def _charset(parameters: str) -> str:
    for part in parameters.split(";"):
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower()
    return _CHARSETS[0]


def prefers(scope: Scope, media: str) -> bool:
    """Whether the client accepts `media` rather than JSON: with a greater `q`, or named first. Ranges such as
    `*/*` stand for JSON."""
    stated = b",".join(value for name, value in scope["headers"] if name == b"accept")
    accepted = stated.decode("latin-1").lower()
    preferred, best = JSON, 0.0
    for part in accepted.split(",") if media in accepted else ():
        kind, *parameters = (text.strip() for text in part.split(";"))
        if kind in (media, JSON) and (quality := _quality(parameters)) > best:
            preferred, best = kind, quality
    return preferred == media


def _quality(parameters: list[str]) -> float:
    """Return the `q` of a media type, at most 1 (RFC 9110, section 12.4.2), 1 if it is absent or invalid."""
    stated = next((text[2:] for text in parameters if text.startswith("q=")), "")
    return float(stated) if re.fullmatch(r"0(\.\d{0,3})?", stated) else 1.0


def json_response(answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `answer` as JSON."""
    return Response(ENCODER.encode(answer), status, headers, JSON)


def error_response(scope: Scope, error: RequestError, **headers: str) -> Response:
    """The answer to a request that fails, in the format of its interface: paths below `/v2` have the errors
    of the Open Inference Protocol."""
    fault: object = error.body()
    if scope["path"].startswith("/v2"):
        fault = {"error": f"{error} (at {error.path})" if error.path else str(error)}
    return json_response(fault, error.status, {**error.headers(), **headers})

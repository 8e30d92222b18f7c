"""The admin port: token check, bodies of at most MAX_BODY_BYTES, JSON; in its own thread and event loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import threading
from pathlib import Path

import msgspec
import uvloop
from starlette.types import Receive, Scope, Send

from roostream.runtime.tls import TlsContext
from roostream.schema.settings import SettingError
from serving.access.bearer_keys import Keyring
from serving.admin.admin_service import AdminService
from serving.errors import RequestError
from serving.http import server as http_server
from serving.http.body import JSON, BodyReader, ClientGoneError, send_answer

MIN_BYTES = 16
_SCHEME = "bearer "


class AdminToken:
    """The admin token. Only its digest is kept; it is compared in constant time and never shown."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token)

    def fits(self, authorization: str) -> bool:
        """Whether an `Authorization: Bearer …` header has the token."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return False
        return hmac.compare_digest(_digest(authorization[len(_SCHEME) :].strip()), self._digest)


def read_token(file: str) -> AdminToken:
    """Read the first line of the file. Raises SettingError: it cannot be read or is too short."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            "admin_token_file", f"expected a file with a token, got {file!r}: {error}"
        ) from None
    token = lines[0].strip() if lines else ""
    if len(token.encode()) < MIN_BYTES:
        do = "write one with: openssl rand -hex 32"
        raise SettingError(
            "admin_token_file",
            f"expected a first line of at least {MIN_BYTES} bytes in {file!r}, got fewer; {do}",
        )
    return AdminToken(token)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


log = logging.getLogger("roostream.serving.admin")

MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 32
DEADLINE_S = 5.0  # for a body
_LOOK_S = 0.2  # poll interval for the stop


class AdminInterface:
    """The ASGI application."""

    def __init__(self, admin_service: AdminService, token: AdminToken | Keyring) -> None:
        self.admin_service, self.token = admin_service, token
        self.body_reader = BodyReader(MAX_BODY_BYTES, MAX_CONNECTIONS * MAX_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[str, str] = {}
        answer: object
        try:
            status, answer = 200, await self._answer(scope, receive)
        except ClientGoneError:
            return
        except RequestError as error:
            status, answer, headers = error.status, error.body(), error.headers()
        except Exception:
            log.exception("an admin request failed: this is a defect of Roostream")
            status, answer = (
                500,
                RequestError(500, "this could not be done; the cause is in serving's log").body(),
            )
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        await send_answer(send, status, msgspec.json.encode(answer), JSON, headers)

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, object]:
        given = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), ""
        )
        if not self.token.fits(given):
            raise RequestError(
                401, "expected the header 'authorization: Bearer TOKEN' with the token of admin_token_file"
            )
        body = await self.body_reader.read(scope, receive, asyncio.get_running_loop().time() + DEADLINE_S)
        return self.admin_service.answer(scope["method"], scope["path"], body)


def run(app: AdminInterface, bound: socket.socket, tls: TlsContext | None, stop: threading.Event) -> None:
    """Serve until `stop`; then `bound` is closed."""
    uvloop.run(_serve(app, bound, tls, stop))


async def _serve(
    app: AdminInterface, bound: socket.socket, tls: TlsContext | None, stop: threading.Event
) -> None:
    server = http_server.second_server(app, MAX_CONNECTIONS, tls)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not stop.is_set() and not serving.done():
        await asyncio.sleep(_LOOK_S)
    server.should_exit = True
    await serving

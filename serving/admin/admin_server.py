"""The admin port: a token, bodies of at most MAX_BODY_BYTES, JSON; in a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import msgspec
import uvloop
from starlette.types import Receive, Scope, Send

from roostream.runtime.tls import TlsContext
from serving.access.key_file import Keyring
from serving.admin.admin_token import AdminToken
from serving.admin.desk import AdminDesk
from serving.errors import RequestError
from serving.http import http_server
from serving.http.body import JSON, ClientGoneError, Intake, respond

log = logging.getLogger("roostream.serving.admin")

MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 32
DEADLINE_S = 5.0  # for a body
_LOOK_S = 0.2  # for the stop


class AdminInterface:
    """The ASGI application."""

    def __init__(self, desk: AdminDesk, token: AdminToken | Keyring) -> None:
        self.desk, self.token = desk, token
        self.intake = Intake(MAX_BODY_BYTES, MAX_CONNECTIONS * MAX_BODY_BYTES)

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
        await respond(send, status, msgspec.json.encode(answer), JSON, headers)

    async def _answer(self, scope: Scope, receive: Receive) -> dict[str, object]:
        given = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), ""
        )
        if not self.token.fits(given):
            raise RequestError(
                401, "expected the header 'authorization: Bearer TOKEN' with the token of admin_token_file"
            )
        body = await self.intake.read(scope, receive, asyncio.get_running_loop().time() + DEADLINE_S)
        return self.desk.answer(scope["method"], scope["path"], body)


def run(app: AdminInterface, bound: socket.socket, tls: TlsContext | None, stop: threading.Event) -> None:
    """Answer until `stop`; `bound` is closed then."""
    uvloop.run(_serve(app, bound, tls, stop))


async def _serve(
    app: AdminInterface, bound: socket.socket, tls: TlsContext | None, stop: threading.Event
) -> None:
    server = http_server.other_server(app, MAX_CONNECTIONS, tls)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not stop.is_set() and not serving.done():
        await asyncio.sleep(_LOOK_S)
    server.should_exit = True
    await serving

"""The admin port: token check, bodies of at most MAX_BODY_BYTES, JSON; in its own thread and event loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import threading
from pathlib import Path

import uvloop
from fastapi import FastAPI, Request
from fastapi.middleware import Middleware
from starlette.datastructures import Headers
from starlette.types import Scope

from roostream.runtime.tls import TlsContext
from roostream.schema.settings import SettingError
from serving.access.bearer_keys import Keyring
from serving.admin.admin_service import SPLITS, AdminService, Answer
from serving.errors import RequestError
from serving.http import server as http_server
from serving.http.body import BodyReader
from serving.http.error_handlers import EXCEPTION_HANDLERS
from serving.http.middleware import AccessMiddleware

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


ROOT = "/admin/v1"
MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 32
DEADLINE_S = 5.0  # for a body
_LOOK_S = 0.2  # poll interval for the stop


class AdminInterface(FastAPI):
    """The application of the admin port.

    GET  /admin/v1/versions                  loaded versions, and refused ones with the reason
    POST /admin/v1/versions/<name>/activate  serve this loaded version until `resume`
    POST /admin/v1/versions/resume           serve the newest version again
    GET, PUT /admin/v1/canary | shadow | interleave   {"version", "share"}; a share of 0 is off
    GET  /admin/v1/slow                      the slowest requests of the last ten minutes
    """

    def __init__(self, admin_service: AdminService, token: AdminToken | Keyring) -> None:
        def check(scope: Scope) -> None:
            if not token.fits(Headers(scope=scope).get("authorization", "")):
                expected = "expected the header 'authorization: Bearer TOKEN' with the token of "
                raise RequestError(401, expected + "admin_token_file")

        super().__init__(
            openapi_url=None,
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False},
            middleware=[Middleware(AccessMiddleware, check, lambda status: None)],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        bodies = BodyReader(MAX_BODY_BYTES, MAX_CONNECTIONS * MAX_BODY_BYTES)

        @self.get(f"{ROOT}/versions")
        async def versions() -> Answer:
            return admin_service.list_versions()

        @self.post(f"{ROOT}/versions/resume")
        async def resume() -> Answer:
            return admin_service.resume()

        @self.post(f"{ROOT}/versions/{{name}}/activate")
        async def activate(name: str) -> Answer:
            return admin_service.activate(name)

        @self.get(f"{ROOT}/slow")
        async def slow() -> Answer:
            return admin_service.slow()

        def add_split(name: str) -> None:
            @self.get(f"{ROOT}/{name}")
            async def get_split() -> Answer:
                return admin_service.split(name)

            @self.put(f"{ROOT}/{name}")
            async def put_split(request: Request) -> Answer:
                until_s = asyncio.get_running_loop().time() + DEADLINE_S
                return admin_service.put_split(name, await bodies.read(request, until_s))

        for name in SPLITS:
            add_split(name)


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

"""The admin port of a serving process: which versions are loaded and served. It has a token, a thread and an
event loop of its own."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop
from fastapi import FastAPI, Request
from fastapi.middleware import Middleware
from msgspec import Meta
from starlette.types import Scope

from roostream.runtime.tls import TlsContext
from roostream.schema.settings import SettingError
from serving.access.bearer_keys import Keyring
from serving.errors import RequestError
from serving.http import server as http_server
from serving.http.body import BodyReader
from serving.http.error_handlers import EXCEPTION_HANDLERS
from serving.http.middleware import AccessMiddleware
from serving.rank_json import decode_body
from serving.versions.interleaving_stats import InterleavingStats
from serving.versions.loaded_versions import LoadedVersion, LoadedVersions
from serving.versions.recent_requests import RecentRequests
from serving.versions.routing import TrafficSplit
from serving.versions.shadow_scoring import ShadowScoring

log = logging.getLogger("roostream.serving.admin")

ROOT = "/admin/v1"
SPLITS = ("canary", "shadow", "interleave")
MIN_TOKEN_BYTES = 16
MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 32
DEADLINE_S = 5.0  # for a body
_STOP_POLL_S = 0.2
_SCHEME = b"bearer"
Answer = dict[str, Any]


class AdminToken:
    """The admin token. Only its digest is kept; it is compared in constant time and never shown."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token.encode())

    def check(self, authorization: bytes, scope: str = "admin") -> None:
        """Raises RequestError 401: an `Authorization` header without the token, which has every scope."""
        scheme, _, token = authorization.strip().partition(b" ")
        if scheme.lower() != _SCHEME or not hmac.compare_digest(_digest(token.strip()), self._digest):
            raise RequestError(
                401,
                "expected the header 'authorization: Bearer TOKEN' with the token of admin_token_file",
            )


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def read_token(file: str) -> AdminToken:
    """Read the first line of the file. Raises SettingError: it cannot be read or is too short."""
    key = "admin_token_file"
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(key, f"expected a file with a token, got {file!r}: {error}") from None
    token = lines[0].strip() if lines else ""
    if len(token.encode()) < MIN_TOKEN_BYTES:
        expected = f"expected a first line of at least {MIN_TOKEN_BYTES} bytes in {file!r}, got fewer"
        raise SettingError(key, f"{expected}; write one with: openssl rand -hex 32")
    return AdminToken(token)


class SplitBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a PUT."""

    share: Annotated[float, Meta(ge=0, le=1)]  # required: without it a split would be switched off
    version: str = ""


_SPLIT = msgspec.json.Decoder(SplitBody)
_KNOWN = {"$": SplitBody.__struct_fields__}


class AdminService:
    """The operations of the port. Used by one thread; the objects that it works on are thread-safe."""

    def __init__(
        self,
        versions: LoadedVersions,
        recent: RecentRequests,
        shadow: ShadowScoring,
        interleaving_stats: InterleavingStats,
        now_ms: Callable[[], int],
    ) -> None:
        self.versions, self.recent, self.shadow = versions, recent, shadow
        self.interleaving_stats, self.now_ms = interleaving_stats, now_ms

    def list_versions(self) -> Answer:
        versions = self.versions
        return {
            "served": versions.served.version.name,
            "activated": versions.routing.activated or None,
            "versions": [self._describe(loaded) for loaded in versions.loaded],
            "refused": [refused._asdict() for refused in reversed(versions.refused.copy().values())],
        }

    def _describe(self, loaded: LoadedVersion) -> Answer:
        versions, now_ms = self.versions, self.now_ms()
        return {
            "name": loaded.version.name,
            "state": "served" if loaded is versions.served else "held",
            "roles": [role for role in SPLITS if versions.resolve(getattr(versions.routing, role)) is loaded],
            "committed_ms": loaded.committed_ms or None,
            "installed_ms": loaded.installed_ms,
            "age_s": round((now_ms - loaded.committed_ms) / 1000, 1) if loaded.committed_ms else None,
        }

    def activate(self, name: str) -> Answer:
        """Serve this version until `resume`. Raises RequestError 400, 404: nothing was changed."""
        self.versions.activate(name)
        log.info("version %s is served until resume", name)
        return self.list_versions()

    def resume(self) -> Answer:
        self.versions.resume()
        log.info("the newest version is served again: %s", self.versions.served.version.name)
        return self.list_versions()

    def split(self, name: str) -> Answer:
        """The current split of this kind. `name`: one of SPLITS."""
        split: TrafficSplit = getattr(self.versions.routing, name)
        loaded = self.versions.resolve(split)
        means = loaded.version.name if loaded is not None else None
        results = self._results(name)
        return {"version": split.version or None, "share": split.share, "means": means, **results}

    def put_split(self, name: str, body: bytes) -> Answer:
        """Set the split of this kind. Raises RequestError 400, 404: nothing was changed."""
        try:
            given = decode_body(_SPLIT, body, _KNOWN)
        except RequestError as error:
            message = f'expected {{"version": "newest", "share": 0.05}}: {error}'
            raise RequestError(400, message, error.path) from None
        self.versions.put(**{name: TrafficSplit(given.version if given.share else "", given.share)})
        log.info("%s: %s", name, getattr(self.versions.routing, name) or "none")
        return self.split(name)

    def _results(self, name: str) -> Answer:
        if name == "shadow":
            shadow = self.shadow
            return {"scored": shadow.num_scored, "dropped": shadow.num_dropped, "failed": shadow.num_failed}
        if name == "interleave":
            stats = self.interleaving_stats
            won_by = stats.outcomes_by_pair()
            return {
                "lists": stats.num_lists,
                "engagements": stats.num_engaged,
                "failed": stats.num_failed,
                "results": [{**pair._asdict(), "won_by": outcomes} for pair, outcomes in won_by.items()],
            }
        return {}

    def slow(self) -> Answer:
        """Request contents are left out: features belong to users."""
        return {
            "requests": [
                {
                    "request_id": request.request_id,
                    "time_ms": request.time_ms,
                    "took_ms": round(1e3 * request.took_s, 3),
                    "candidates": len(request.item_ids),
                    "model_version": request.model_version,
                }
                for request in self.recent.slowest()
            ]
        }


class AdminInterface(FastAPI):
    """The application of the admin port.

    GET  /admin/v1/versions                  loaded versions, and refused ones with the reason
    POST /admin/v1/versions/<name>/activate  serve this loaded version until `resume`
    POST /admin/v1/versions/resume           serve the newest version again
    GET, PUT /admin/v1/canary | shadow | interleave   {"version", "share"}; a share of 0 is off
    GET  /admin/v1/slow                      the slowest requests of the last ten minutes
    """

    def __init__(self, service: AdminService, token: AdminToken | Keyring) -> None:
        def check(scope: Scope) -> None:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            token.check(given, "admin")

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
            return service.list_versions()

        @self.post(f"{ROOT}/versions/resume")
        async def resume() -> Answer:
            return service.resume()

        @self.post(f"{ROOT}/versions/{{name}}/activate")
        async def activate(name: str) -> Answer:
            return service.activate(name)

        @self.get(f"{ROOT}/slow")
        async def slow() -> Answer:
            return service.slow()

        def add_split(name: str) -> None:
            @self.get(f"{ROOT}/{name}")
            async def get_split() -> Answer:
                return service.split(name)

            @self.put(f"{ROOT}/{name}")
            async def put_split(request: Request) -> Answer:
                until_s = asyncio.get_running_loop().time() + DEADLINE_S
                return service.put_split(name, await bodies.read(request, until_s))

        for name in SPLITS:
            add_split(name)


def run(app: AdminInterface, bound: socket.socket, tls: TlsContext | None, stop: threading.Event) -> None:
    """Serve until `stop`; then `bound` is closed."""

    async def serve() -> None:
        server = http_server.second_server(app, MAX_CONNECTIONS, tls)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not stop.is_set() and not serving.done():
            await asyncio.sleep(_STOP_POLL_S)
        server.should_exit = True
        await serving

    uvloop.run(serve())

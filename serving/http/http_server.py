"""uvicorn in this process, started and stopped by us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from roo.errors import SetupError
from runtime.address import parse_address
from runtime.crew import StopBudget
from serving.access.tls import Tls
from serving.http.app import HttpInterface
from serving.http.connection import LimitedProtocol, limited_to

log = logging.getLogger("roostream.serving")

STOP_POLL_S = 0.1


class _PlainServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to runtime.program."""
        yield


class _OwnServer(_PlainServer):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log.info(
                "serving on http%s://%s:%d, /docs for its interface", "s" if self.config.ssl else "", *bound.getsockname()[:2]
            )


def bind(listen: str, key: str = "listen", reuse_port: bool = False) -> socket.socket:
    """A bound socket; port 0 draws one. `key`: the setting that says where. With `reuse_port` others of this user may have the
    same one, if they say so too: the kernel spreads connections over those that listen.

    Raises:
        SetupError: the port is taken, or the address isn't this machine's.
    """
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise SetupError(f"can't listen on {listen}: {error.strerror}; stop what uses it or choose another {key}") from None
    return bound


def run(app: HttpInterface, bound: socket.socket, budget: StopBudget, turned: Callable[[], None]) -> None:
    """Serve until `budget.stop` is set; then accept nothing more, wait for no more bodies, and finish what is in flight for at
    most half of `budget`. `turned` is called from the event loop, over and over, until then."""
    limits = limited_to(app.parts.config.max_connections, app.refuses)
    config = _settings(app, limits, max(int(budget.seconds / 2), 1), app.parts.tls)

    def begin_stop() -> None:
        budget.left_s()  # counts from here
        app.stop()

    with _filtered(logging.getLogger("uvicorn.error"), app.log_filter):
        uvloop.run(_serve(_OwnServer(config), bound, budget.stop, turned, begin_stop))


def plain_server(app: ASGIApp, max_connections: int) -> uvicorn.Server:
    """With the limits of every connection (serving/http/connection.py), for whoever runs it in a loop of its own."""
    return _PlainServer(_settings(app, limited_to(max_connections, lambda data: None), 1))


def _settings(app: ASGIApp, protocol: type[LimitedProtocol], graceful_s: int, tls: Tls | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=graceful_s,
        ssl_context_factory=None if tls is None else lambda config, default: tls.context,
    )


@contextlib.contextmanager
def _filtered(logger: logging.Logger, by: logging.Filter) -> Iterator[None]:
    logger.addFilter(by)
    try:
        yield
    finally:
        logger.removeFilter(by)


async def _serve(
    server: uvicorn.Server,
    bound: socket.socket,
    stop: threading.Event,
    turned: Callable[[], None],
    begin_stop: Callable[[], None],
) -> None:
    async def watch() -> None:
        while not stop.is_set():
            turned()
            await asyncio.sleep(STOP_POLL_S)
        begin_stop()
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()

"""Runs uvicorn inside this process, with its own start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from roostream.errors import SetupError
from roostream.runtime.address import parse_address
from roostream.runtime.thread_group import StopBudget
from roostream.runtime.tls import TlsContext
from serving.http.app import HttpInterface
from serving.http.connection import LimitedProtocol, limited_to

log = logging.getLogger("roostream.serving")

STOP_POLL_S = 0.1
_DRAIN_POLL_S = 0.02


class _PlainServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """roostream.runtime.program handles signals."""
        yield


class _AnnouncingServer(_PlainServer):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log.info("serving on %s, /docs for its interface", url_of(bound, bool(self.config.ssl)))


def bind(listen: str, key: str = "listen", reuse_port: bool = False) -> socket.socket:
    """Return a bound socket; port 0 picks a free port. `key` is the name of the setting, for errors. With
    `reuse_port`, processes of the same user can share the port, and the kernel distributes connections over
    them.

    Raises:
        SetupError: the port is taken, or the address is not one of this machine.
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
        raise SetupError(
            f"cannot listen on {listen}: {error.strerror}; stop what uses it or choose another {key}"
        ) from None
    return bound


def url_of(bound: socket.socket, has_tls: bool) -> str:
    """The url at which a bound socket is reached; IPv6 addresses stand in brackets."""
    host, port = bound.getsockname()[:2]
    return f"http{'s' * has_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def run(app: HttpInterface, bound: socket.socket, budget: StopBudget, turned: Callable[[], None]) -> None:
    """Serve until `budget.stop` is set. Then drain open connections (`_drain`), accept no more, stop waiting
    for bodies, and finish requests in flight within half of `budget`. `turned` is called from the event loop
    periodically until then.
    """
    limits = limited_to(app.context.config.max_connections)
    config = _settings(app, limits, max(int(budget.seconds / 2), 1), app.context.tls)

    server = _AnnouncingServer(config)
    app.connections = server.server_state.connections

    async def end() -> None:
        remaining_s = budget.left_s()  # the budget starts here
        turned()
        await _drain(
            server,
            bound,
            min(app.context.config.drain_ms / 1000, remaining_s / 4),
            app.context.config.reuse_port,
        )
        app.stop()

    with _filtered(logging.getLogger("uvicorn.error"), app.log_filter):
        uvloop.run(_serve(server, bound, budget.stop, turned, end))


def second_server(app: ASGIApp, max_connections: int, tls: TlsContext | None) -> uvicorn.Server:
    """A server with the same connection limits for another application; the caller runs it in its own event
    loop."""
    return _PlainServer(_settings(app, limited_to(max_connections), 1, tls))


def _settings(
    app: ASGIApp, protocol: type[LimitedProtocol], graceful_s: int, tls: TlsContext | None
) -> uvicorn.Config:
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
    end: Callable[[], Awaitable[None]],
) -> None:
    async def watch() -> None:
        try:
            while not stop.is_set():
                turned()
                await asyncio.sleep(STOP_POLL_S)
            await end()
        finally:
            server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching  # raises its error


async def _drain(server: uvicorn.Server, bound: socket.socket, max_s: float, has_successor: bool) -> None:
    """For at most `max_s`, answer every request with `connection: close`, so that no busy client meets a
    connection that is being closed. Ends when no connection is open.

    With a successor on the same port, no new connections are accepted. Without one they are still answered,
    and clients learn from `/readyz` to use another process.
    """
    last = (b"connection", b"close")
    # uvicorn copies these into the headers of all answers once a second
    server.config.encoded_headers.append(last)
    server.server_state.default_headers = [*server.server_state.default_headers, last]
    if has_successor:
        for listener in server.servers:
            listener.close()
        bound.close()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + max_s
    while server.server_state.connections and loop.time() < until_s:
        await asyncio.sleep(_DRAIN_POLL_S)

"""uvicorn in this process, started and stopped by us."""

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
_LEAVE_POLL_S = 0.02


class _PlainServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to roostream.runtime.program."""
        yield


class _OwnServer(_PlainServer):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log.info(
                "serving on http%s://%s:%d, /docs for its interface",
                "s" if self.config.ssl else "",
                *bound.getsockname()[:2],
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
        raise SetupError(
            f"can't listen on {listen}: {error.strerror}; stop what uses it or choose another {key}"
        ) from None
    return bound


def run(app: HttpInterface, bound: socket.socket, budget: StopBudget, turned: Callable[[], None]) -> None:
    """Serve until `budget.stop` is set; then let open connections take leave (`_take_leave`), accept nothing more, wait for no
    more bodies, and finish what is in flight: the last for at most half of `budget`. `turned` is called from the event loop, over
    and over, until then."""
    limits = limited_to(app.context.config.max_connections, app.refuses, app.whole)
    config = _settings(app, limits, max(int(budget.seconds / 2), 1), app.context.tls)

    server = _OwnServer(config)
    app.connections = server.server_state.connections

    async def end() -> None:
        remaining_s = budget.left_s()  # counts from here
        turned()
        await _take_leave(
            server,
            bound,
            min(app.context.config.drain_ms / 1000, remaining_s / 4),
            app.context.config.reuse_port,
        )
        app.stop()

    with _filtered(logging.getLogger("uvicorn.error"), app.log_filter):
        uvloop.run(_serve(server, bound, budget.stop, turned, end))


def other_server(app: ASGIApp, max_connections: int, tls: TlsContext | None) -> uvicorn.Server:
    """With the limits of every connection (serving/http/connection.py), for whoever runs it in a loop of its own."""
    return _PlainServer(_settings(app, limited_to(max_connections, lambda data: None), 1, tls))


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
        while not stop.is_set():
            turned()
            await asyncio.sleep(STOP_POLL_S)
        await end()
        server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[bound])
    finally:
        watching.cancel()


async def _take_leave(
    server: uvicorn.Server, bound: socket.socket, max_s: float, has_successor: bool
) -> None:
    """Before open connections are closed: for at most so long every answer says that it is the connection's last, so that a
    client which asks again and again never meets one that is being closed. Ends once no connection is open.

    With a successor on the same port nobody new is taken from the beginning. Without one, whoever comes is answered, and learns
    from `/readyz` to go elsewhere.
    """
    last = (b"connection", b"close")
    server.config.encoded_headers.append(
        last
    )  # uvicorn makes the headers of all answers of these, once a second
    server.server_state.default_headers = [*server.server_state.default_headers, last]
    if has_successor:
        for listener in server.servers:
            listener.close()
        bound.close()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + max_s
    while server.server_state.connections and loop.time() < until_s:
        await asyncio.sleep(_LEAVE_POLL_S)

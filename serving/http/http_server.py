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

from roo.errors import SetupError
from runtime.address import parse_address
from runtime.crew import StopBudget
from serving.http.app import HttpInterface
from serving.http.connection import limited_to

log = logging.getLogger("roostream.serving")

STOP_POLL_S = 0.1


class _OwnServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to runtime.program."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log.info("serving on http://%s:%d, /docs for its interface", *bound.getsockname()[:2])


def bind(listen: str) -> socket.socket:
    """A bound socket; port 0 draws one.

    Raises:
        SetupError: the port is taken, or the address isn't this machine's.
    """
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise SetupError(f"can't listen on {listen}: {error.strerror}; stop what uses it or choose another listen") from None
    return bound


def run(app: HttpInterface, bound: socket.socket, budget: StopBudget, turned: Callable[[], None]) -> None:
    """Serve until `budget.stop` is set; then accept nothing more, wait for no more bodies, and finish what is in flight for at
    most half of `budget`. `turned` is called from the event loop, over and over, until then."""
    config = uvicorn.Config(
        app,
        http=limited_to(app.parts.config.max_connections, app.refuses),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(int(budget.seconds / 2), 1),
    )

    def begin_stop() -> None:
        budget.left_s()  # counts from here
        app.stop()

    with _filtered(logging.getLogger("uvicorn.error"), app.log_filter):
        uvloop.run(_serve(_OwnServer(config), bound, budget.stop, turned, begin_stop))


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

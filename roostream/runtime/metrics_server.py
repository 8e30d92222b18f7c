"""The HTTP server of a program's metrics, health probes and pages: `/metrics`, `/livez`, `/readyz`."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from roostream.errors import SetupError
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.health import Health
from roostream.runtime.tls import TlsContext

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


log = logging.getLogger("roostream.metrics")

_IDLE_S = 10.0  # a connection that sends nothing for so long is closed
_REQUEST_S = 60.0  # for a request and its answer; a slower connection is closed
_MAX_CONNECTIONS = 128  # beyond it the oldest one is closed, so that probes are always answered


class PageResponse(NamedTuple):
    """A page that a program serves beside its metrics."""

    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = (
    ("Content-Security-Policy", _CONTENT_SECURITY_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Of every web page of Roostream: no content from other origins, no inline scripts, no embedding in
frames."""

Pages = Mapping[str, Callable[[], PageResponse]]


def serve(
    config: ProgramSettings,
    health: Health,
    registry: CollectorRegistry = REGISTRY,
    pages: Pages | None = None,
    tls: TlsContext | None = None,
) -> int:
    """Start the server in background threads, where the settings say; it runs until the process ends. Returns
    the port.

    Both probes answer 200, or 503 with the reason as one line of text. `pages` (by path) may be extended
    later. `tls`: the context of the program's other ports, which the caller keeps up to date; without it, one
    is made if the settings have a certificate.

    Raises:
        SetupError: the port is taken, or the address is not one of this machine.
        SettingError: certificate or key can't be used.
    """
    host, port = config.metrics_host.strip("[]"), config.metrics_port
    tls = tls or _own_tls(config)
    try:
        server = make_server(
            host,
            port,
            _application(health, registry, {} if pages is None else pages),
            _Server6 if ":" in host else _Server,
            _Handler,
        )
    except OSError as error:
        reason = error.strerror or error
        raise SetupError(
            f"metrics port {host}:{port} can't be used ({reason}); choose another metrics_port, or 0"
        ) from None
    server.context = tls.context if tls else None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    bound_port = int(server.server_address[1])
    log.info("metrics at %s://%s:%d/metrics", config.scheme, config.metrics_host, bound_port)
    return bound_port


def _own_tls(config: ProgramSettings) -> TlsContext | None:
    if not config.tls_certificate:
        return None
    tls = TlsContext(config)
    threading.Thread(target=tls.run, args=(threading.Event(),), name="metrics-tls", daemon=True).start()
    return tls


class _Readiness(Collector):
    def __init__(self, health: Health) -> None:
        self.health = health

    def collect(self) -> Iterable[Metric]:
        ready = not self.health.unready()
        yield GaugeMetricFamily("roostream_ready", "1 while the program can do its work", value=ready)


def _application(health: Health, registry: CollectorRegistry, pages: Pages) -> WSGIApplication:
    exported = CollectorRegistry(auto_describe=False)
    exported.register(registry)
    exported.register(_Readiness(health))
    metrics = make_wsgi_app(exported)

    def text(status: str, body: str, start: StartResponse) -> Iterable[bytes]:
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{body}\n".encode()]

    def respond(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start)
            case "/livez":
                reason = health.dead()
            case "/readyz":
                reason = health.unready()
            case path if path in pages:
                return _page(pages[path], environ["REQUEST_METHOD"], start)
            case _:
                *some, last = ("/metrics", "/livez", "/readyz", *pages)
                return text("404 Not Found", f"expected {', '.join(some)} or {last}", start)
        return text("503 Service Unavailable" if reason else "200 OK", reason or "ok", start)

    return respond


def _page(page: Callable[[], PageResponse], method: str, start: StartResponse) -> Iterable[bytes]:
    if method not in ("GET", "HEAD"):
        plain = ("Content-Type", "text/plain; charset=utf-8")
        start("405 Method Not Allowed", [plain, ("Allow", "GET, HEAD")])
        return [b"expected GET or HEAD\n"]
    response = page()
    length = ("Content-Length", str(len(response.body)))
    start("200 OK", [("Content-Type", response.content_type), length, *response.headers])
    return [response.body if method == "GET" else b""]


class _Server(ThreadingWSGIServer):
    """One thread a connection; number and duration of connections are limited."""

    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._since_s: dict[Any, float] = {}  # open connection → when it was accepted
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._since_s[request] = time.monotonic()
            oldest = min(self._since_s, key=self._since_s.__getitem__)
            full = len(self._since_s) > _MAX_CONNECTIONS
        if full:
            self._end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every half second."""
        limit_s = time.monotonic() - _REQUEST_S
        with self._lock:
            late = [request for request, since_s in self._since_s.items() if since_s < limit_s]
        for request in late:
            self._end(request)

    def _end(self, request: Any) -> None:
        """Shut a connection down. The thread that serves it then fails at once and closes the socket."""
        with self._lock:
            self._since_s.pop(request, None)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def get_request(self) -> tuple[Any, Any]:
        """The TLS handshake is left to the connection's own thread."""
        try:
            connection, address = super().get_request()
        except OSError:  # probably out of file descriptors; the server tries again at once
            time.sleep(0.1)
            raise
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client closed the connection, was idle, or failed the TLS handshake."""
        log.debug("a connection of the metrics port ended", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Answer:
    """The stream of an answer. wsgiref says nothing of a client that has left if that is a BrokenPipeError;
    of any other error, such as those of TLS, it prints the traceback."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: bytes) -> int:
        try:
            return int(self._stream.write(data))
        except OSError as error:
            raise BrokenPipeError("the client has left") from error


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def setup(self) -> None:
        super().setup()
        self.wfile = _Answer(self.wfile)  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: one line a probe would be most of the log."""

"""A process's one HTTP server of metrics and probes, and histograms."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import math
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from roostream.errors import SetupError
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.health import Health
from roostream.runtime.tls import TlsContext

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


log = logging.getLogger("roostream.metrics")

MAX_AT_ONCE = 64  # connections; more are closed at once
MAX_S = 30.0  # of a connection, from its beginning to its end
SILENT_S = 10.0  # that it may say nothing
BUCKETS_S = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
FRESH_S = (
    0.001,
    0.002,
    0.005,
    *(round(m * 10.0**e, 6) for e in range(-2, 3) for m in (1, 1.5, 2, 3, 4, 5, 7)),
    1000.0,
)
"""Of times between stages: a page takes quantiles of them, so buckets are narrow where a join's window and training lie."""

Buckets = Mapping[float, float]
"""Upper bound, inf among them → observations that are at most so large, since the program began."""
WINDOW_S = 120.0
_APART_S = 2.0  # looks that are nearer replace each other, so that their number is bounded


class Cell:
    """One series of a Histogram. Observed by one thread, without a lock; read by any, and never goes back."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram(Collector):
    """Values in fixed buckets, in the unit that `name` ends with; a series for each `cell` that was asked for. To be observed
    thousands of times a second: whoever observes holds on to its cell."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self.name, self.help, self.labels, self.bounds = name, help, labels, bounds
        self._cells: dict[tuple[str, ...], Cell] = {}

    def cell(self, *values: str) -> Cell:
        """The series with these values of the labels, made with the first asking; thread-safe."""
        return self._cells.get(values) or self._cells.setdefault(values, Cell(self.bounds))

    def collect(self) -> list[Metric]:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for values, cell in sorted(self._cells.items()):
            family.add_metric(values, cumulative(self.bounds, list(cell.counts)), cell.sum)
        return [family]


class StageTimes(Histogram):
    """Times of stages as the histogram `<name>_seconds{stage=…}`; observed in ms, by any thread."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = BUCKETS_S) -> None:
        super().__init__(f"{name}_seconds", help, ("stage",), bounds)
        self._lock = threading.Lock()

    def observe(self, stage: str, ms: float) -> None:
        with self._lock:
            self.cell(stage).observe(ms / 1000)

    def told(self, stage: str) -> Buckets:
        """What is exported of a stage, for `Recent`."""
        with self._lock:
            counts = list(self.cell(stage).counts)
        return dict(zip((*self.bounds, math.inf), itertools.accumulate(counts), strict=True))


def cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """As Prometheus has buckets: each with all that is below its bound."""
    return list(zip([*map(floatToGoString, bounds), "+Inf"], itertools.accumulate(counts), strict=True))


class RecentQuantiles:
    """What a histogram counted lately, for pages that have no Prometheus to take rates. `look` hands over what it tells now;
    `quantile` is of what was observed in the last `window_s`, or since the first look where that is later; after one look, of
    all. Not thread-safe."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._looks: deque[tuple[float, Buckets]] = deque()

    def look(self, at_s: float, told: Buckets) -> None:
        """`at_s`: of a clock that never goes back. Counts that fell are those of a new process, which began with none."""
        if self._looks and any(told.get(bound, 0.0) < count for bound, count in self._looks[-1][1].items()):
            self._looks.clear()
            self._looks.append((at_s, {}))
        if len(self._looks) > 1 and self._looks[-1][0] - self._looks[-2][0] < _APART_S:
            self._looks.pop()
        self._looks.append((at_s, dict(told)))
        while len(self._looks) > 2 and self._looks[1][0] <= at_s - self.window_s:
            self._looks.popleft()

    def quantile(self, q: float) -> float | None:
        """In the histogram's unit, linear within a bucket; the highest finite bound where it lies above that. None: nothing was
        observed."""
        if not self._looks:
            return None
        before = self._looks[0][1] if len(self._looks) > 1 else {}
        return quantile_of(
            {bound: count - before.get(bound, 0.0) for bound, count in self._looks[-1][1].items()}, q
        )


def quantile_of(told: Buckets, q: float) -> float | None:
    """Of everything that `told` has."""
    bounds = sorted(told)
    if not bounds or told[bounds[-1]] <= 0:
        return None
    rank, below, from_ = q * told[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if told[bound] >= rank and told[bound] > below:
            inside = (rank - below) / (told[bound] - below)
            return from_ + (bound - from_) * inside if math.isfinite(bound) else from_
        below, from_ = told[bound], bound
    return from_


def freshness() -> StageTimes:
    """The process's times between stages of the loop, in ms; registered once."""
    global _freshness
    if _freshness is None:
        _freshness = StageTimes("roostream_freshness", "time between stages of the loop", FRESH_S)
        REGISTRY.register(_freshness)
    return _freshness


_freshness: StageTimes | None = None


class Answer(NamedTuple):
    """To a GET of a page."""

    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Of every page of ours: nothing from anywhere else, no inline script, nobody's frame."""

Pages = Mapping[str, Callable[[], Answer]]


def serve(
    config: ProgramSettings,
    health: Health,
    registry: CollectorRegistry = REGISTRY,
    pages: Pages | None = None,
    tls: TlsContext | None = None,
) -> int:
    """Answer `/metrics`, `/livez` and `/readyz`, and `pages` by their paths, where the settings say, from threads of their own
    until the process ends; the port in use. Both probes answer 200, or 503 with the reason as one line of text. What is added to
    `pages` later is answered from then on. `tls`: that of the program's other ports, which somebody keeps up to date; without it
    one is made where the settings have a certificate.

    Raises:
        SetupError: the port is taken, or the address isn't this machine's.
        Refusal: certificate or key can't be used.
    """
    host, port = config.metrics_host.strip("[]"), config.metrics_port
    tls = tls or _own_tls(config)
    try:
        server = make_server(
            host,
            port,
            _routes(health, registry, {} if pages is None else pages),
            _server_of(host),
            _QuietHandler,
        )
    except OSError as error:
        reason = error.strerror or error
        raise SetupError(
            f"metrics port {host}:{port} can't be used ({reason}); choose another metrics_port, or 0"
        ) from None
    server.context = tls.context if tls else None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_address[1])


def _own_tls(config: ProgramSettings) -> TlsContext | None:
    if config.tls is None:
        return None
    tls = TlsContext(config.tls)
    threading.Thread(target=tls.run, args=(threading.Event(),), name="metrics-tls", daemon=True).start()
    return tls


def _routes(health: Health, registry: CollectorRegistry, pages: Pages) -> WSGIApplication:
    exported = make_wsgi_app(registry)

    def text(status: str, body: str, start: StartResponse) -> Iterable[bytes]:
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{body}\n".encode()]

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return exported(environ, start)
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

    return answer


def _page(answer: Callable[[], Answer], method: str, start: StartResponse) -> Iterable[bytes]:
    if method not in ("GET", "HEAD"):
        start(
            "405 Method Not Allowed", [("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET, HEAD")]
        )
        return [b"expected GET or HEAD\n"]
    found = answer()
    start(
        "200 OK",
        [("Content-Type", found.content_type), ("Content-Length", str(len(found.body))), *found.headers],
    )
    return [found.body if method == "GET" else b""]


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a connection, so many and for so long as the bounds say: whoever is slow or silent takes no place for ever."""

    daemon_threads = True
    context: ssl.SSLContext | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.BoundedSemaphore(MAX_AT_ONCE)
        self._begun_s: dict[socket.socket, float] = {}

    def get_request(self) -> tuple[Any, Any]:
        """The handshake is for the connection's own thread."""
        connection, address = super().get_request()
        if self.context is not None:
            connection = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._begun_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._begun_s.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """Twice a second, from the accepting thread."""
        for connection, begun_s in list(self._begun_s.items()):
            if time.monotonic() - begun_s > MAX_S:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(
                        connection, socket.SHUT_RDWR
                    )  # TLS' own would take it from beneath its thread

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went, was silent, or isn't let in."""
        log.debug("a connection of the metrics port ended", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _server_of(host: str) -> type[_Server]:
    return _Server6 if ":" in host else _Server


class _QuietHandler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: object) -> None:
        """A line a probe would be most of the log."""

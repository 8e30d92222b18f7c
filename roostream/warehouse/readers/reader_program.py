"""`roostream reader`: reads splits of a warehouse session for workers.

1 listen; poll the controller for the session that is trained and for leases of its splits
2 on a new session open its table version; on a new incarnation forget all leases
3 read the leased splits in order while there is room; answer workers that fetch pieces
4 on stop take no more leases, serve the buffer for at most DRAIN_S, then tell the controller
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import tomllib
from collections.abc import Callable

from roostream.errors import CheckpointError, RoostreamError, UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.address import parse_address
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricSpec, by_name, exported
from roostream.runtime.program import Stop
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Arrays, Header, Transport
from roostream.runtime.thread_group import ThreadGroup
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.toml_file import SourceLocation
from roostream.warehouse.readers.config import ReaderConfig
from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.readers.piece_frames import schema_digest_of
from roostream.warehouse.readers.split_reader import SplitReader
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session_rows import LocalSessionRows

log = logging.getLogger("roostream.reader")

_STEP_S = 0.5
_CALL_TIMEOUT_S = 5.0
_MIN_RENEW_S = 0.02  # shortest pause
_MAX_RENEW_S = 0.5  # longest pause between two calls of the controller
_MAX_WAIT_S = 5.0  # a call for a piece is held at most this long
DRAIN_S = 5.0  # less than the time that infra gives a program to end
METRICS = {
    "roostream_reader_pieces_total": MetricSpec("pieces of splits read"),
    "roostream_reader_requests_total": MetricSpec("requests read"),
    "roostream_reader_sent_bytes_total": MetricSpec("bytes sent to workers"),
    "roostream_reader_splits_total": MetricSpec("leases of splits accepted"),
    "roostream_reader_busy_seconds_total": MetricSpec("time spent reading"),
    "roostream_reader_held_splits": MetricSpec("leases held"),
    "roostream_reader_held_pieces": MetricSpec("pieces that no worker has taken yet"),
    "roostream_reader_held_bytes": MetricSpec("bytes of these pieces"),
}

OpenTable = Callable[[TableInput, Schema], tuple[LocalSessionRows, Schema]]
"""Opens a session: its rows, and the schema of its batches."""


def open_table(table: TableInput, schema: Schema) -> tuple[LocalSessionRows, Schema]:
    """Open the session's table version. Raises as `SampleTable.open_session`."""
    session, files = SampleTable(table.table).open_session(table, schema)
    return LocalSessionRows(session, files), files.schema


class ReaderAgent:
    """Connects a `SplitReader` to the controller. `renew_leases` is called by one thread, `handle` by any."""

    def __init__(
        self, reader: SplitReader, at: str, max_splits: int, open_rows: OpenTable = open_table
    ) -> None:
        """`at`: "host:port" under which workers reach this reader."""
        self.reader, self.at, self.max_splits, self.open_rows = reader, at, max_splits, open_rows
        self.name = f"{at}/{random.SystemRandom().getrandbits(32):08x}"
        self.incarnation, self.session = 0, ""
        self.takes_more = True

    def renew_leases(self, controller: Transport, *, leaving: bool = False) -> None:
        """Report to the controller; renew the leases, and take over those that it grants.

        Raises:
            UnavailableError: the controller, or the table of a new session, is away. The leases are
            unchanged. RoostreamError: this program cannot read the session; the message says why.
        """
        header: Header = {
            "reader": self.name,
            "at": self.at,
            "incarnation": self.incarnation,
            "session": self.session,
            "free": self.reader.num_free_slots(self.max_splits) if self.session and self.takes_more else 0,
            "leaving": leaving,
            "report": self.reader.report(),
        }
        answer, _ = controller.call("lease", header, timeout_s=_CALL_TIMEOUT_S)
        if leaving:
            return
        incarnation, session = int(answer["incarnation"]), str(answer["session"])
        if (incarnation, session) != (self.incarnation, self.session):
            self._begin_session(incarnation, session, answer)
        elif self.session:
            self.reader.set_leases([Lease(*lease) for lease in answer["leases"]])

    def _begin_session(self, incarnation: int, session: str, answer: Header) -> None:
        """Open another session, or forget all leases because the incarnation is new. "" = no session."""
        if not session:
            self.reader.start_session(None)
        elif session != self.session:
            table = TableInput.of(answer.get("input"))
            assert table is not None and table.digest == session
            schema = schema_from_dict(
                tomllib.loads(str(answer["schema"])), SourceLocation("the controller's schema")
            )
            rows, read_schema = self.open_rows(table, schema)
            days = f"{table.spec['first_day']}..{table.spec['last_day']}"
            log.info("reading %s, version %d, days %s", table.table, table.version, days)
            self.reader.start_session(rows, schema_digest_of(read_schema))
        else:
            self.reader.set_leases([])
        self.incarnation, self.session = incarnation, session

    def handle(self, method: str, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """RPC method `piece`: a piece of a leased split; no arrays if it is not read yet.

        Raises:
            FencedError: this reader does not have that lease.
            CheckpointError: a file is damaged.
            RoostreamError: an unknown method.
        """
        if method != "piece":
            raise RoostreamError(f"expected a call of piece, got {method!r}")
        wait_s = min(float(header["wait_s"]), _MAX_WAIT_S)
        piece = self.reader.next_piece(
            int(header["split"]), int(header["grant"]), int(header["position"]), wait_s
        )
        return (piece.header, piece.arrays) if piece else ({}, ())


def read(config: ReaderConfig, stop: Stop) -> None:
    """Run a reader until `stop`.

    Raises:
        RoostreamError: this program cannot read the session, or a port is taken.
    """
    health = Health(config.stalled_after_ms / 1000)
    clock = SystemClock()
    credentials = config.link_credentials()
    metrics_server.serve(config, health)
    reader = SplitReader(
        clock, max_bytes=config.max_bytes, max_pieces=config.max_pieces, max_requests_s=config.max_requests_s
    )
    host, port = parse_address(config.listen)
    # The agent needs the server's port, and the server the agent: the handler looks it up when it is called.
    server = RpcServer(lambda *call: agent.handle(*call), host, port, credentials=credentials).start()
    agent = ReaderAgent(reader, advertised_address(config, server.port), config.max_splits)
    controller = SocketTransport(config.controller, credentials=credentials)
    threads, drained = ThreadGroup(stop), threading.Event()
    with exported(lambda: metrics_of(reader), METRICS):
        try:
            log.info("reader listens on %s, advertised as %s", server.address, agent.at)
            threads.start("reader-leases", poll_leases, agent, controller, clock, stop, drained)
            run_reader_loop(reader, health, agent, drained)
        finally:
            leave(agent, controller)
            server.stop()
            threads.join(_CALL_TIMEOUT_S)
            controller.close()
    threads.check()


def metrics_of(reader: SplitReader) -> dict[str, float]:
    """Full metric name → value."""
    return by_name(METRICS, "roostream_reader_", reader.report())


def advertised_address(config: ReaderConfig, port: int) -> str:
    """The address that workers use: the setting, else `listen`; a wildcard address is replaced by the host
    name."""
    host, chosen = parse_address(config.advertised_address or config.listen)
    if host in ("0.0.0.0", "[::]", "::"):
        host = socket.gethostname()
    return f"{host}:{chosen or port}"


def poll_leases(
    agent: ReaderAgent, controller: Transport, clock: Clock, stop: threading.Event, drained: threading.Event
) -> None:
    """Poll the controller until `stop`, then drain."""
    backoff = Backoff(what="the controller, or the warehouse", clock=clock, max_s=0.5)
    try:
        while not stop.is_set():
            try:
                agent.renew_leases(controller)
                backoff.reached()
            except UnavailableError as error:
                if not stop.is_set():
                    backoff.wait(error, stop)
            except CheckpointError as error:  # the table version has changed: workers get the same error
                log.error("%s", error)
                clock.sleep(_MAX_RENEW_S, stop)
            clock.sleep(_MIN_RENEW_S if agent.session else _MAX_RENEW_S, stop)
            if agent.session and not stop.is_set():
                agent.reader.wait_free_slot(agent.max_splits, _MAX_RENEW_S)
        drain(agent, controller, clock)
    finally:
        drained.set()


def drain(agent: ReaderAgent, controller: Transport, clock: Clock) -> None:
    """Serve what is buffered and take no more leases, for at most DRAIN_S. Returns early if the controller is
    gone."""
    agent.takes_more, ends_s = False, clock.monotonic_s() + DRAIN_S
    while agent.reader.has_leases and clock.monotonic_s() < ends_s:
        try:
            agent.renew_leases(controller)
        except RoostreamError as error:
            log.debug("the controller is gone, so no worker waits: %s", error)
            return
        clock.sleep(_MIN_RENEW_S)


def run_reader_loop(reader: SplitReader, health: Health, agent: ReaderAgent, stop: threading.Event) -> None:
    """Read leased splits until `stop`; wait while the table is away."""
    backoff = Backoff(what="the warehouse", max_s=1.0)
    while not stop.is_set():
        try:
            reader.step(_STEP_S)
            backoff.reached()
            health.turned("" if agent.incarnation else "waiting for the controller")
        except UnavailableError as error:
            if stop.is_set():
                return
            health.turned(str(error))
            backoff.wait(error, stop)


def leave(agent: ReaderAgent, controller: Transport) -> None:
    """Tell the controller, so that other readers get the leases at once."""
    try:
        agent.renew_leases(controller, leaving=True)
    except RoostreamError as error:
        log.debug("the controller is gone: %s", error)

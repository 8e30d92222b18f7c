"""`roostream reader`.

1 listen, and ask the controller what is trained and for leases of its splits, again and again
2 another session: open its version of the table; another incarnation: forget every lease
3 read what is leased, in order, while there is room; give units to whoever trains
4 on stop: take no more leases and give what it has, for DRAIN_S at most, so that training waits for nothing that has to be read
  again; then tell the controller, whose leases are anybody's at once
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import tomllib
from collections.abc import Callable

from roostream.errors import CheckpointError, RoostreamError, UnavailableError
from roostream.runtime import metrics_server, program
from roostream.runtime.address import parse_address
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricsCollector
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
_CALL_S = 5.0
_BETWEEN_S = 0.02
_RENEW_S = 0.5  # between two words with the controller at most, where no room comes for more
_MAX_WAIT_S = 5.0  # that a call for a unit is held
DRAIN_S = 5.0  # below infra's limits for its end
_COUNTERS = ("units", "requests", "sent_bytes", "splits", "busy_s")

OpenTable = Callable[[TableInput, Schema], tuple[LocalSessionRows, Schema]]
"""A session's rows, and the schema of its batches."""


def run_reader(config: ReaderConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `roostream.runtime.program.run`."""
    return program.run("reader", lambda stop: read(config, stop), config.log_format)


def open_table(told: TableInput, schema: Schema) -> tuple[LocalSessionRows, Schema]:
    """Raises as `SampleTable.opened`."""
    session, files = SampleTable(told.table).opened(told, schema)
    return LocalSessionRows(session, files), files.schema


class ReaderAgent:
    """A `SplitReader` that does what the controller says. `ask` is called by one thread, `handle` by any."""

    def __init__(
        self, reader: SplitReader, at: str, max_splits: int, open_rows: OpenTable = open_table
    ) -> None:
        """`at`: "host:port" where workers reach it."""
        self.reader, self.at, self.max_splits, self.open_rows = reader, at, max_splits, open_rows
        self.name = f"{at}/{random.SystemRandom().getrandbits(32):08x}"
        self.incarnation, self.session = 0, ""
        self.takes_more = True

    def ask(self, controller: Transport, *, leaving: bool = False) -> None:
        """One call: say that it lives, hear what is its own.

        Raises:
            UnavailableError: the controller, or the table of a session that is new, is away; what it has it keeps.
            RoostreamError: the session can't be read by this program; says why.
        """
        header: Header = {
            "reader": self.name,
            "at": self.at,
            "incarnation": self.incarnation,
            "session": self.session,
            "free": self.reader.free(self.max_splits) if self.session and self.takes_more else 0,
            "leaving": leaving,
            "report": self.reader.shown(),
        }
        answer, _ = controller.call("lease", header, timeout_s=_CALL_S)
        if leaving:
            return
        told = int(answer["incarnation"]), str(answer["session"])
        if told != (self.incarnation, self.session):
            self._begin(*told, answer)
        elif self.session:
            self.reader.hold([Lease(*lease) for lease in answer["leases"]])

    def _begin(self, incarnation: int, session: str, answer: Header) -> None:
        if not session:
            self.reader.begin(None)
        elif session != self.session:
            told = TableInput.of(answer.get("input"))
            assert told is not None and told.digest == session
            schema = schema_from_dict(
                tomllib.loads(str(answer["schema"])), SourceLocation("the controller's schema")
            )
            rows, its = self.open_rows(told, schema)
            log.info(
                "reading %s, version %d, days %s..%s",
                told.table,
                told.version,
                told.spec["first_day"],
                told.spec["last_day"],
            )
            self.reader.begin(rows, schema_digest_of(its))
        else:
            self.reader.hold([])
        self.incarnation, self.session = incarnation, session

    def handle(self, method: str, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """`unit`: a unit of a split that this reader has, without arrays while it isn't there yet.

        Raises:
            FencedError: it doesn't have that lease. CheckpointError: a file is damaged. RoostreamError: an unknown method.
        """
        if method != "unit":
            raise RoostreamError(f"expected a call of unit, got {method!r}")
        wait_s = min(float(header["wait_s"]), _MAX_WAIT_S)
        unit = self.reader.unit(int(header["split"]), int(header["grant"]), int(header["position"]), wait_s)
        return (unit.header, unit.arrays) if unit else ({}, ())


def read(config: ReaderConfig, stop: Stop) -> None:
    """`roostream reader`, until `stop`.

    Raises:
        RoostreamError: what is trained can't be read by this program, or a port is taken.
    """
    health, clock, keys = Health(config.stalled_after_ms / 1000), SystemClock(), config.link_credentials()
    log.info(
        "metrics at %s://%s:%d/metrics",
        config.scheme,
        config.metrics_host,
        metrics_server.serve(config, health),
    )
    limits = {
        "max_bytes": config.max_bytes,
        "max_units": config.max_units,
        "max_requests_s": config.max_requests_s,
    }
    reader = SplitReader(clock, **limits)
    host, port = parse_address(config.listen)
    leased: list[ReaderAgent] = []
    server = RpcServer(lambda *call: leased[0].handle(*call), host, port, keys=keys).start()
    leased.append(ReaderAgent(reader, advertised_address(config, server.port), config.max_splits))
    exports = MetricsCollector("reader", reader.shown, {}, counters=_COUNTERS)
    exports.register()
    controller = SocketTransport(config.controller, keys=keys)
    crew, drained = ThreadGroup(stop), threading.Event()
    try:
        log.info("reader on %s, told as %s", server.address, leased[0].at)
        crew.start("reader-leases", poll_leases, leased[0], controller, clock, stop, drained)
        run_reader_loop(reader, health, leased[0], drained)
    finally:
        leave(leased[0], controller)
        server.stop()
        crew.join(_CALL_S)
        controller.close()
        exports.unregister()
    crew.check()


def advertised_address(config: ReaderConfig, port: int) -> str:
    """Where workers reach it: as the settings say, else where it listens; on all addresses, by this machine's name."""
    host, chosen = parse_address(config.told) if config.told else parse_address(config.listen)
    if host in ("0.0.0.0", "[::]", "::"):
        host = socket.gethostname()
    return f"{host}:{chosen or port}"


def poll_leases(
    leased: ReaderAgent, controller: Transport, clock: Clock, stop: threading.Event, drained: threading.Event
) -> None:
    """Until `stop`, and then until nothing is held; a controller that is away is waited for."""
    waits = Backoff(what="the controller, or the warehouse", clock=clock, max_s=0.5)
    try:
        while not stop.is_set():
            try:
                leased.ask(controller)
                waits.reached()
            except UnavailableError as error:
                if not stop.is_set():
                    waits.wait(error, stop)
            except CheckpointError as error:  # the version isn't what it was: whoever trains is told the same
                log.error("%s", error)
                clock.sleep(_RENEW_S, stop)
            clock.sleep(_BETWEEN_S if leased.session else _RENEW_S, stop)
            if leased.session and not stop.is_set():
                leased.reader.wait_free(leased.max_splits, _RENEW_S)
        drain(leased, controller, clock)
    finally:
        drained.set()


def drain(leased: ReaderAgent, controller: Transport, clock: Clock) -> None:
    """Give what it has, and take no more. Whoever trains may have gone, too: then it is for nothing, and DRAIN_S long."""
    leased.takes_more, ends_s = False, clock.monotonic_s() + DRAIN_S
    while leased.reader.holds_any and clock.monotonic_s() < ends_s:
        try:
            leased.ask(controller)
        except RoostreamError as error:
            log.debug("the controller isn't there, so nobody waits: %s", error)
            return
        clock.sleep(_BETWEEN_S)


def run_reader_loop(reader: SplitReader, health: Health, leased: ReaderAgent, stop: threading.Event) -> None:
    """Until `stop`; a table that is away is waited for."""
    waits = Backoff(what="the warehouse", max_s=1.0)
    while not stop.is_set():
        try:
            reader.step(_STEP_S)
            waits.reached()
            health.turned("" if leased.incarnation else "it waits for the controller")
        except UnavailableError as error:
            if stop.is_set():
                return
            health.turned(str(error))
            waits.wait(error, stop)


def leave(leased: ReaderAgent, controller: Transport) -> None:
    """Its leases are anybody's at once, if the controller hears it."""
    try:
        leased.ask(controller, leaving=True)
    except RoostreamError as error:
        log.debug("the controller isn't there to be told: %s", error)

"""A session's rows from `reader` programs, as a worker gets them (Zhao et al., §III: a DPP client).

    source thread      expect, piece: takes pieces in order and waits for the one that is missing
    asking thread      sends the wanted splits and the buffer's fullness to the controller; gets their readers
    fetching threads   request one piece each, of the first splits that have a reader, while there is room

A reader that does not answer is reported to the controller, which leases its splits to another one. The rows
of a split are the same for every reader, so the batches are too.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roostream.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    RoostreamError,
    UnavailableError,
    WireError,
)
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Transport
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.readers.piece_frames import decode_piece, schema_digest_of, total_bytes
from roostream.warehouse.readers.prefetch_buffer import Fetch, PrefetchBuffer
from roostream.warehouse.readers.prefetch_scaler import PrefetchScaler
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import OpenSession, Piece, SessionRows

if TYPE_CHECKING:
    from roostream.warehouse.sessions.sample_table import TableFiles

log = logging.getLogger("roostream.reading")

_ASK_EVERY_S, _ASK_SOON_S = 0.25, 0.05  # between two calls of the controller; while a split has no reader
_MIN_BETWEEN_S = 0.02
_CALL_S = 10.0
_AWAY_S = 0.2  # pause after the controller did not answer
_WARN_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadersLink:
    """How a worker reaches the controller and the readers."""

    controller: Callable[[], Transport]
    dial: Callable[[str], Transport]  # a reader's "host:port" → a connection
    worker: int
    incarnation: Callable[[], int]  # of the worker's last restore
    wait_s: float = 1.0  # a reader holds a call this long for a piece that is not ready


class RemoteSessionRows:
    """Implements `SessionRows`. Call `open` first."""

    def __init__(
        self, digest: str, schema: Schema, link: ReadersLink, config: ReadersConfig, clock: Clock
    ) -> None:
        """`digest`: of the session. `schema`: without the features that the session leaves out."""
        self.digest, self.schema, self.link, self.config, self.clock = digest, schema, link, config, clock
        self.schema_digest = schema_digest_of(schema)
        self.buffer = PrefetchBuffer(max_pieces=config.max_pieces, max_bytes=config.max_bytes)
        self.scaler = PrefetchScaler(max_in_flight=config.max_in_flight)
        self.waited_s = 0.0
        self._name = random.SystemRandom().getrandbits(63)
        self._began_s = clock.monotonic_s()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._error: RoostreamError | None = None  # of one piece
        self._defect: RoostreamError | None = None  # why a thread has ended
        self._voided: list[tuple[int, int]] = []  # (split, grant) of readers that did not answer
        self._connections: dict[str, Transport] = {}
        self._stalled = False  # since the last call of the controller
        self._sent_splits: list[int] = []
        self._is_read = True  # every wanted split has a reader
        self._unread_since_s: float | None = None
        loops = {"readers-ask": self._ask_loop}
        loops |= {f"readers-fetch-{n}": self._fetch_loop for n in range(config.max_in_flight)}
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for name, loop in loops.items()
        ]

    def open(self) -> RemoteSessionRows:
        for thread in self._threads:
            thread.start()
        return self

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        with self._changed:
            self.buffer.expect(splits, positions, at_once)
            self._changed.notify_all()

    def piece(self, split: TableSplit, position: int, timeout_s: float) -> Piece | None:
        began_s = self.clock.monotonic_s()
        with self._changed:
            found = self._take(split, position)
            if found is None:
                self._stalled = True
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._error or self._defect or self.buffer.is_buffered(split, position), timeout_s
                )
                found = self._take(split, position)
            self.waited_s += self.clock.monotonic_s() - began_s
            if found is not None:
                self._changed.notify_all()
            return found

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            connections, self._connections = self._connections, {}
        for transport in connections.values():
            transport.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CALL_S)

    def report(self) -> dict[str, float]:
        """Counts and times since the session was opened, and the state of the buffer."""
        with self._changed:
            num_pieces, num_bytes = self.buffer.size
            counts = self.buffer.counts
            return {
                "fetched_pieces": counts["pieces"],
                "fetched_requests": counts["requests"],
                "fetched_bytes": counts["bytes"],
                "refused_pieces": counts["refused"],
                "buffer_fullness": self.buffer.fullness,
                "buffer_pieces": num_pieces,
                "buffer_bytes": num_bytes,
                "splits_in_flight": self.scaler.in_flight,
                "stalled_s": self.waited_s,
                "stall_share": self.waited_s / max(self.clock.monotonic_s() - self._began_s, 1e-9),
            }

    def _take(self, split: TableSplit, position: int) -> Piece | None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._defect is not None:
            raise self._defect
        return self.buffer.take(split, position)

    def _run(self, loop: Callable[[], None]) -> None:
        """Run a thread's loop. If it fails, reading a piece fails too, and the session is opened again."""
        try:
            loop()
        except Exception as error:
            log.exception("reading by readers failed: this is a defect of Roostream")
            with self._changed:
                self._defect = UnavailableError(f"reading by readers failed: {error!r}")
                self._changed.notify_all()

    def _ask_loop(self) -> None:
        transport = self.link.controller()
        try:
            while not self._stop.is_set():
                try:
                    self.ask(transport)
                except RoostreamError as error:  # the controller is away, or this worker is being restored
                    log.debug("the controller did not answer: %s", error)
                    self._stop.wait(_AWAY_S)
                self._stop.wait(_MIN_BETWEEN_S)
                with self._changed:
                    self._changed.wait_for(self._has_news, _ASK_EVERY_S if self._is_read else _ASK_SOON_S)
        finally:
            transport.close()

    def _has_news(self) -> bool:
        now = [number for number, _ in self.buffer.wanted(self.scaler.in_flight)]
        return self._stop.is_set() or bool(self._voided) or now != self._sent_splits

    def ask(self, transport: Transport) -> None:
        """Tell the controller what is wanted and hear which readers hold the leases.

        Raises:
            RoostreamError: the controller is away, or belongs to another deployment.
        """
        with self._changed:
            stalled, self._stalled = self._stalled or self.buffer.is_starved, False
            voided, self._voided = self._voided, []
            in_flight = self.scaler.observe(
                self.buffer.fullness, stalled=stalled, now_s=self.clock.monotonic_s()
            )
            header = self._header(in_flight, voided)
        try:
            answer, _ = transport.call("want", header, timeout_s=_CALL_S)
        except RoostreamError:
            with self._changed:
                self._voided += voided
            raise
        holders = [Lease(*lease) for lease in answer["holders"]]
        with self._changed:
            self.buffer.set_holders(holders, answer["readers"])
            self._is_read = len(holders) == len(header["wanted"])
            self._changed.notify_all()
        self._warn_if_unread(header["wanted"], holders, len(answer["readers"]))

    def _header(self, in_flight: int, voided: list[tuple[int, int]]) -> dict[str, Any]:
        wanted = self.buffer.wanted(in_flight)
        self._sent_splits = [number for number, _ in wanted]
        return {
            "worker": self.link.worker,
            "client": self._name,
            "incarnation": self.link.incarnation(),
            "session": self.digest,
            "wanted": wanted,
            "voided": voided,
            "in_flight": len(wanted),
            "fullness": self.buffer.fullness,
            "stalled_s": self.waited_s,
            "stall_share": self.waited_s / max(self.clock.monotonic_s() - self._began_s, 1e-9),
            "pieces": self.buffer.size[0],
        }

    def _warn_if_unread(self, wanted: Sequence[Any], holders: Sequence[Lease], num_readers: int) -> None:
        now_s = self.clock.monotonic_s()
        if not wanted or holders:
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= _WARN_EVERY_S:
            self._unread_since_s = now_s
            log.warning(
                "no reader reads the wanted splits: %d readers are registered; start `roostream reader`",
                num_readers,
            )

    def _fetch_loop(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                fetch = self.buffer.next_fetch(self.scaler.in_flight)
                if fetch is None:
                    self._changed.wait(_ASK_EVERY_S)
                    continue
                transport = self._transport(fetch.address)
            self.fetch(fetch, transport)

    def fetch(self, fetch: Fetch, transport: Transport) -> None:
        """Request one piece and buffer it."""
        header = {
            "split": fetch.split.number,
            "grant": fetch.grant,
            "position": fetch.position,
            "wait_s": self.link.wait_s,
        }
        try:
            answer, arrays = transport.call("piece", header, timeout_s=_CALL_S)
            piece = decode_piece(answer, arrays, self.schema, self.schema_digest) if arrays else None
        except (CheckpointError, ConfigError) as error:  # a damaged file: no other reader can read it either
            self._failed(fetch, error)
        except (FencedError, WireError) as error:
            log.info("the reader at %s has no rows of split %d: %s", fetch.address, fetch.split.number, error)
            self._failed(fetch, None)
        except RoostreamError as error:
            log.info("the reader at %s is away: %s", fetch.address, error)
            self._failed(fetch, None)
        else:
            with self._changed:
                if piece is None:
                    self.buffer.failed(fetch, lost=False)
                else:
                    self.buffer.receive(fetch, piece, total_bytes(arrays))
                self._changed.notify_all()

    def _failed(self, fetch: Fetch, error: RoostreamError | None) -> None:
        with self._changed:
            self.buffer.failed(fetch, lost=True)
            self._voided.append((fetch.split.number, fetch.grant))
            self._error = self._error or error
            self._changed.notify_all()

    def _transport(self, address: str) -> Transport:
        """The connection to a reader; called with the lock held. Connections that are not used any more are
        closed."""
        if address not in self._connections:
            for silent in [at for at in self._connections if not self.buffer.uses(at)]:
                self._connections.pop(silent).close()
            self._connections[address] = self.link.dial(address)
        return self._connections[address]


class RemoteSessionOpener:
    """Opens a worker's sessions. The newest session's metrics are those of the worker."""

    def __init__(self, link: ReadersLink, config: ReadersConfig, clock: Clock) -> None:
        self.link, self.config, self.clock = link, config, clock
        self._now: RemoteSessionRows | None = None

    def __call__(self, table: TableInput, session: OpenSession, rows: TableFiles) -> SessionRows:
        """As `OpenRows` of trainer/sessions/session_source.py."""
        self._now = RemoteSessionRows(table.digest, rows.schema, self.link, self.config, self.clock).open()
        return self._now

    def report(self) -> dict[str, float]:
        """As `RemoteSessionRows.report`; empty before the first session. Any thread."""
        return self._now.report() if self._now else {}

    def metrics(self) -> dict[str, float]:
        """Full metric name → value. Any thread."""
        report = self.report()
        if not report:
            return {}
        return {
            "roostream_worker_reading_fetched_pieces_total": report["fetched_pieces"],
            "roostream_worker_reading_fetched_requests_total": report["fetched_requests"],
            "roostream_worker_reading_fetched_bytes_total": report["fetched_bytes"],
            "roostream_worker_reading_refused_pieces_total": report["refused_pieces"],
            "roostream_worker_reading_buffer_fullness": report["buffer_fullness"],
            "roostream_worker_reading_buffer_pieces": report["buffer_pieces"],
            "roostream_worker_reading_buffer_bytes": report["buffer_bytes"],
            "roostream_worker_reading_splits_in_flight": report["splits_in_flight"],
            "roostream_worker_reading_stalled_seconds_total": report["stalled_s"],
            "roostream_worker_reading_stall_share": report["stall_share"],
        }

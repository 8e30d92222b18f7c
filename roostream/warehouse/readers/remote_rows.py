"""A session's rows from `reader` programs: a trainer's side of it (Zhao et al., §III: a DPP client).

    source's thread    expect, piece: takes units in order, waits for the one that isn't here
    asking thread      tells the controller what is waited for and how full the buffer is, hears who reads it
    fetching threads   one unit each at a time, of the first splits that have a reader and that there is room for

A reader that doesn't answer is told to the controller, which gives its splits to another one; the rows of a split are the same
whoever reads them, so the batches are too.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, WireError
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Transport
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.readers.piece_frames import decode_piece, num_bytes, schema_digest_of
from roostream.warehouse.readers.prefetch_buffer import Fetch, PrefetchBuffer
from roostream.warehouse.readers.prefetch_scaler import PrefetchScaler
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import OpenSession, Piece, SessionRows

if TYPE_CHECKING:
    from roostream.warehouse.sessions.sample_table import TableFiles

log = logging.getLogger("roostream.reading")

_LOOK_S, _SOON_S = (
    0.25,
    0.05,
)  # between two words with the controller, where nothing happens; where nobody reads a split yet
_MIN_BETWEEN_S = 0.02
READING_COUNTERS = ("fetched_units", "fetched_requests", "fetched_bytes", "refused_units", "stalled_s")
_CALL_S = 10.0
_AWAY_S = 0.2  # before the controller is asked again that didn't answer
_SAY_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadersLink:
    """How a worker reaches whoever reads for it."""

    controller: Callable[[], Transport]
    dial: Callable[[str], Transport]  # "host:port" of a reader
    worker: int
    incarnation: Callable[[], int]  # of the worker, as it was restored last
    wait_s: float = 1.0  # that a reader holds a call for a unit that isn't there yet


class RemoteSessionRows:
    """See `SessionRows`. `open` before the first call."""

    def __init__(
        self, digest: str, schema: Schema, link: ReadersLink, config: ReadersConfig, clock: Clock
    ) -> None:
        """`digest`: of the session; `schema`: with what the session leaves out left out."""
        self.digest, self.schema, self.link, self.config, self.clock = digest, schema, link, config, clock
        self.schema_digest = schema_digest_of(schema)
        self.ahead = PrefetchBuffer(max_units=config.max_units, max_bytes=config.max_bytes)
        self.appetite = PrefetchScaler(most=config.max_in_flight)
        self.waited_s = 0.0
        self._name = random.SystemRandom().getrandbits(63)
        self._began_s = clock.monotonic_s()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._error: RoostreamError | None = None
        self._voided: list[tuple[int, int]] = []  # (split, grant) of readers that don't answer
        self._dialled: dict[str, Transport] = {}
        self._stalled = False  # since the controller was told last
        self._told_splits: list[int] = []
        self._is_read = True  # all that is waited for has a reader
        self._unread_since_s: float | None = None
        self._threads = [threading.Thread(target=self._ask, name="readers-ask", daemon=True)]
        self._threads += [
            threading.Thread(target=self._fetch_loop, name=f"readers-fetch-{n}", daemon=True)
            for n in range(config.max_in_flight)
        ]

    def open(self) -> RemoteSessionRows:
        for thread in self._threads:
            thread.start()
        return self

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        with self._changed:
            self.ahead.expect(splits, positions, at_once)
            self._changed.notify_all()

    def piece(self, split: TableSplit, position: int, timeout_s: float) -> Piece | None:
        began_s = self.clock.monotonic_s()
        with self._changed:
            found = self._take(split, position)
            if found is None:
                self._stalled = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._error or self.ahead.is_here(split, position), timeout_s)
                found = self._take(split, position)
            self.waited_s += self.clock.monotonic_s() - began_s
            if found is not None:
                self._changed.notify_all()
            return found

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
            dialled, self._dialled = self._dialled, {}
        for transport in dialled.values():
            transport.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CALL_S)

    def shown(self) -> dict[str, float]:
        """Numbers by the names that they are exported under."""
        with self._changed:
            units, held_bytes = self.ahead.held
            counts: dict[str, float] = {
                f"fetched_{name}": self.ahead.counts[name] for name in ("units", "requests", "bytes")
            }
            open_s = max(self.clock.monotonic_s() - self._began_s, 1e-9)
            return {
                **counts,
                "refused_units": self.ahead.counts["refused"],
                "buffer_fullness": self.ahead.fullness,
                "buffer_units": units,
                "buffer_bytes": held_bytes,
                "splits_in_flight": self.appetite.in_flight,
                "stalled_s": self.waited_s,
                "stall_share": self.waited_s / open_s,
            }

    def _take(self, split: TableSplit, position: int) -> Piece | None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.ahead.take(split, position)

    # Who reads what

    def _ask(self) -> None:
        transport = self.link.controller()
        try:
            while not self._stop.is_set():
                try:
                    self.ask(transport)
                except RoostreamError as error:  # it is away, or this worker is being restored
                    log.debug("the controller can't be asked for readers now: %s", error)
                    self._stop.wait(_AWAY_S)
                self._stop.wait(_MIN_BETWEEN_S)
                with self._changed:
                    self._changed.wait_for(self._has_news, _LOOK_S if self._is_read else _SOON_S)
        finally:
            transport.close()

    def _has_news(self) -> bool:
        now = [number for number, _ in self.ahead.wanted(self.appetite.in_flight)]
        return self._stop.is_set() or bool(self._voided) or now != self._told_splits

    def ask(self, transport: Transport) -> None:
        """One call: tell what is waited for, hear who reads it. Raises RoostreamError: the controller is away, or not ours."""
        with self._changed:
            stalled, self._stalled = self._stalled or self.ahead.waits, False
            voided, self._voided = self._voided, []
            in_flight = self.appetite.observe(
                self.ahead.fullness, stalled=stalled, now_s=self.clock.monotonic_s()
            )
            header = self._header(in_flight, voided)
        try:
            answer, _ = transport.call("want", header, timeout_s=_CALL_S)
        except RoostreamError:
            with self._changed:
                self._voided += voided
            raise
        holders = [Lease(*held) for held in answer["holders"]]
        with self._changed:
            self.ahead.told(holders, answer["readers"])
            self._is_read = len(holders) == len(header["wanted"])
            self._changed.notify_all()
        self._say_whether_read(header["wanted"], holders, len(answer["readers"]))

    def _header(self, in_flight: int, voided: list[tuple[int, int]]) -> dict[str, Any]:
        wanted = self.ahead.wanted(in_flight)
        self._told_splits = [number for number, _ in wanted]
        return {
            "worker": self.link.worker,
            "client": self._name,
            "incarnation": self.link.incarnation(),
            "session": self.digest,
            "wanted": wanted,
            "voided": voided,
            "in_flight": len(wanted),
            "fullness": self.ahead.fullness,
            "stalled_s": self.waited_s,
            "stall_share": self.waited_s / max(self.clock.monotonic_s() - self._began_s, 1e-9),
            "units": self.ahead.held[0],
        }

    def _say_whether_read(self, wanted: Sequence[Any], holders: Sequence[Lease], num_readers: int) -> None:
        now_s = self.clock.monotonic_s()
        if not wanted or holders:
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= _SAY_EVERY_S:
            self._unread_since_s = now_s
            log.warning(
                "nobody reads what training waits for: %d readers ask the controller; start `roostream reader`",
                num_readers,
            )

    # Units

    def _fetch_loop(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                fetch = self.ahead.fetch(self.appetite.in_flight)
                if fetch is None:
                    self._changed.wait(_LOOK_S)
                    continue
                transport = self._transport(fetch.address)
            self.fetch(fetch, transport)

    def fetch(self, fetch: Fetch, transport: Transport) -> None:
        """Ask for one unit, and keep it."""
        header = {
            "split": fetch.split.number,
            "grant": fetch.grant,
            "position": fetch.position,
            "wait_s": self.link.wait_s,
        }
        try:
            answer, arrays = transport.call("unit", header, timeout_s=_CALL_S)
            piece = decode_piece(answer, arrays, self.schema, self.schema_digest) if arrays else None
        except (CheckpointError, ConfigError) as error:  # a file is damaged: no other reader would read it
            self._failed(fetch, error)
        except (FencedError, WireError) as error:
            log.info(
                "the reader at %s gives no unit of split %d: %s", fetch.address, fetch.split.number, error
            )
            self._failed(fetch, None)
        except RoostreamError as error:
            log.info("the reader at %s is away: %s", fetch.address, error)
            self._failed(fetch, None)
        else:
            with self._changed:
                if piece is None:
                    self.ahead.failed(fetch, lost=False)
                else:
                    self.ahead.came(fetch, piece, num_bytes(arrays))
                self._changed.notify_all()

    def _failed(self, fetch: Fetch, error: RoostreamError | None) -> None:
        with self._changed:
            self.ahead.failed(fetch, lost=True)
            self._voided.append((fetch.split.number, fetch.grant))
            self._error = self._error or error
            self._changed.notify_all()

    def _transport(self, address: str) -> Transport:
        """Inside the lock. Of readers that are talked to no more, connections are closed."""
        if address not in self._dialled:
            for silent in [at for at in self._dialled if not self.ahead.knows(at)]:
                self._dialled.pop(silent).close()
            self._dialled[address] = self.link.dial(address)
        return self._dialled[address]


class RemoteSessionOpener:
    """Opens a worker's sessions; the newest one's numbers are those of the worker."""

    def __init__(self, link: ReadersLink, config: ReadersConfig, clock: Clock) -> None:
        self.link, self.config, self.clock = link, config, clock
        self._now: RemoteSessionRows | None = None

    def __call__(self, told: TableInput, session: OpenSession, rows: TableFiles) -> SessionRows:
        """See `OpenRows` of trainer/sessions/session_source.py."""
        self._now = RemoteSessionRows(told.digest, rows.schema, self.link, self.config, self.clock).open()
        return self._now

    def shown(self) -> dict[str, float]:
        """See `RemoteSessionRows.shown`; nothing before the first session. Any thread."""
        return self._now.shown() if self._now else {}

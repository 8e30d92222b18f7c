"""Assigns splits of the current warehouse session to input readers, and decides how many readers are wanted
(the master of Zhao et al., "Understanding data storage and ingestion", §III).

A `reader` program calls `lease` to get splits to read. A worker calls `want` to say which splits it waits
for, and learns which readers have them (docs/protocols.md, "Readers"). The master has no durable state:
training progress is in the manifest, so a new controller starts from what workers report. A new incarnation
voids all leases, and calls of an older incarnation are rejected.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from roostream.errors import FencedError, RoostreamError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import newest_incarnation
from roostream.runtime.rpc.transport import Arrays, Handler, Header
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import to_toml
from roostream.schema.schema import Schema
from roostream.warehouse.readers.config import ReaderCountConfig
from roostream.warehouse.readers.leases import MAX_WANTED, LeaseLog, Leases, plain_lease
from roostream.warehouse.readers.prefetch_scaler import ReaderScaler

log = logging.getLogger("roostream.controller")

LONG_POLL_S = 0.25  # a call of `lease` waits this long for splits
SILENT_S = 10.0  # a reader or worker without a call for longer is forgotten
LEASES_FILE = "control/leases"
"""Plain JSON of `LeaseLog.body`, for inspection only: no program continues from it."""
SAVE_S = 5.0

Trained = Callable[[], tuple[int, TableInput | None]]
"""The controller's incarnation, and the session that is trained (None = none)."""


@dataclasses.dataclass(kw_only=True)
class _Caller:
    """The last call of a reader or a worker."""

    seen_s: float
    header: Header


class ReaderMaster:
    """Leases splits to readers. `handle` serves calls from any thread."""

    def __init__(
        self,
        trained: Trained,
        schema: Schema,
        clock: Clock,
        limits: ReaderCountConfig | None = None,
        long_poll_s: float = LONG_POLL_S,
    ) -> None:
        limits = limits or ReaderCountConfig()
        self.trained, self.schema, self.clock, self.long_poll_s = trained, schema, clock, long_poll_s
        self.scaler = ReaderScaler(min_readers=limits.min_readers, max_readers=limits.max_readers)
        self.log = LeaseLog()
        self.leases = self._no_leases()
        self._current: tuple[int, str] = 0, ""  # incarnation, digest of the session
        self._session: TableInput | None = None  # the newest one that was trained
        self._readers: dict[str, _Caller] = {}
        self._workers: dict[int, _Caller] = {}
        self._changed = threading.Condition()

    def handle(self, method: str, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """Serve `lease` and `want`.

        Raises:
            FencedError: the caller is of another incarnation or session.
            RoostreamError: an unknown method.
        """
        match method:
            case "lease":
                return self._lease(header), ()
            case "want":
                return self._want(header), ()
        raise RoostreamError(f"expected a call of lease or want, got {method!r}")

    def extend(self, handler: Handler) -> Handler:
        """`handler` plus the calls of this master."""

        def handle(method: str, header: Header, arrays: Any) -> tuple[Header, Arrays]:
            return (self.handle if method in ("lease", "want") else handler)(method, header, arrays)

        return handle

    def _lease(self, header: Header) -> Header:
        """Renew a reader's leases and grant up to `free` more. A reader with another session gets the current
        one, without leases."""
        reader, free = str(header["reader"]), min(int(header["free"]), MAX_WANTED)
        with self._changed:
            session = self._current_session()
            now_s = self.clock.monotonic_s()
            self._readers[reader] = _Caller(seen_s=now_s, header=header)
            if header.get("leaving"):
                self.leases.release(reader)
                del self._readers[reader]
                return {"incarnation": self._current[0], "session": "", "leases": []}
            had = {lease.grant for lease in self.leases.renew(reader, now_s)}
            if free and not self._is_outdated(header) and not self._grant(reader, free) and self.long_poll_s:
                self._changed.wait_for(
                    lambda: self._grant(reader, free) or self._is_outdated(header), self.long_poll_s
                )
            leases = self.leases.renew(reader, self.clock.monotonic_s())
            if any(lease.grant not in had for lease in leases):
                self._changed.notify_all()
            answer: Header = {"incarnation": self._current[0], "session": self._current[1]}
            answer["leases"] = [tuple(lease) for lease in leases]
            if session is not None and header["session"] != session.digest:
                answer |= {"input": session.plain(), "schema": to_toml(self.schema)}
            return answer

    def _grant(self, reader: str, free: int) -> bool:
        """Grant up to `free` leases; return whether there was any to grant."""
        leases = [self.leases.lease(reader, self.clock.monotonic_s()) for _ in range(free)]
        return any(lease is not None for lease in leases)

    def _is_outdated(self, header: Header) -> bool:
        """Whether the caller knows another incarnation or session than the current one."""
        self._current_session()
        return (int(header["incarnation"]), str(header["session"])) != self._current

    def _want(self, header: Header) -> Header:
        """Record the splits that a worker waits for; the answer says which readers have them."""
        worker = int(header["worker"])
        with self._changed:
            if self._is_outdated(header):
                raise FencedError(
                    f"expected a worker of incarnation {self._current[0]} and its session, got another; "
                    "wait for RESTORE"
                )
            self._workers[worker] = _Caller(seen_s=self.clock.monotonic_s(), header=header)
            for split, grant in header["voided"]:
                self.leases.void(int(split), int(grant))
            self.leases.set_wanted(worker, [(int(split), int(at)) for split, at in header["wanted"]])
            self._changed.notify_all()
            holders = self.leases.holders(worker, self.clock.monotonic_s())
            known = {name: str(seen.header["at"]) for name, seen in self._readers.items()}
            return {"holders": [tuple(lease) for lease in holders], "readers": known}

    def _current_session(self) -> TableInput | None:
        """The session that is trained now. If the incarnation or session is new, all leases end. The caller
        holds the lock."""
        incarnation, session = self.trained()
        current = incarnation, session.digest if session else ""
        if current != self._current:
            self.leases.end_all()
            self._session = session or self._session
            self._current, self.leases, self._workers = current, self._no_leases(), {}
            self._changed.notify_all()
        self._forget_silent()
        return session

    def _forget_silent(self) -> None:
        """Forget readers and workers without a call for SILENT_S."""
        now_s = self.clock.monotonic_s()
        for name in [name for name, seen in self._readers.items() if now_s - seen.seen_s > SILENT_S]:
            del self._readers[name]
        for number in [number for number, seen in self._workers.items() if now_s - seen.seen_s > SILENT_S]:
            del self._workers[number]

    def _no_leases(self) -> Leases:
        return Leases(note=lambda what, lease: self.log.note(self.clock.now_ms(), what, lease))

    def lease_log(self) -> dict[str, Any]:
        """Past and current leases as plain JSON (`lease_log.read_log`)."""
        with self._changed:
            self._current_session()
            held = [plain_lease(lease) for lease in self.leases.held(self.clock.monotonic_s())]
            session = self._session.plain() if self._session else None
            current = {"incarnation": self._current[0], "session": session, "trained": bool(self._current[1])}
            return self.log.body(at_ms=self.clock.now_ms(), held=held, **current)

    def status(self) -> dict[str, Any]:
        """Plain values for `status` and metrics: connected and wanted readers, splits, and the workers'
        buffers."""
        with self._changed:
            session = self._current_session()
            now_s, workers = self.clock.monotonic_s(), {n: seen.header for n, seen in self._workers.items()}
            in_flight = sum(int(header["in_flight"]) for header in workers.values())
            return {
                "wanted": self.scaler.update(max(in_flight, 1) if session else 0, now_s),
                "least": self.scaler.min_readers,
                "most": self.scaler.max_readers,
                "there": len(self._readers),
                "splits_wanted": self.leases.num_wanted,
                "splits_leased": self.leases.num_granted,
                "leases_expired": self.leases.num_expired,
                "buffers": {
                    str(n): {
                        name: header.get(name)
                        for name in ("fullness", "in_flight", "stalled_s", "stall_share", "pieces")
                    }
                    for n, header in workers.items()
                },
                "readers": {
                    name: {**seen.header.get("report", {}), "silent_s": now_s - seen.seen_s}
                    for name, seen in self._readers.items()
                },
                "leases": [plain_lease(lease) for lease in self.leases.held(now_s)],
            }


class LeaseRecorder:
    """Saves the lease log in the store for `roostream inspect session --leases`, during a run and after it.
    One thread only."""

    def __init__(self, master: ReaderMaster, store: CheckpointStore, clock: Clock) -> None:
        self.master, self.store, self.clock = master, store, clock
        self._version, self._due_s = 0, 0.0

    def save_if_due(self, *, last: bool = False) -> None:
        """Save new events, at most every SAVE_S. If the store is unavailable, the next call after SAVE_S
        tries again. Once a newer controller has claimed an incarnation, nothing is saved."""
        now_s = self.clock.monotonic_s()
        if (now_s < self._due_s and not last) or self.master.log.version == self._version:
            return
        self._due_s, version = now_s + SAVE_S, self.master.log.version
        try:
            body = self.master.lease_log()
            if newest_incarnation(self.store) > body["incarnation"]:
                return
            self.store.put(LEASES_FILE, json.dumps(body).encode())
            self._version = version
        except UnavailableError as error:
            log.debug("leases could not be saved: %s", error)

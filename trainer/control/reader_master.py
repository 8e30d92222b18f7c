"""Readers' part of the controller: who reads which split of the session that is trained, and how many readers are wanted (the
master of Zhao et al., §III). `reader` programs call `lease`, workers call `want` (docs/protocols.md, "Readers").

It keeps nothing: how far all is trained is in the manifest, so another controller's begins with what workers tell it. Of another
incarnation all leases are void, and who calls for an older one is refused.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from roostream.errors import FencedError, RoostreamError
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Arrays, Handler, Header
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import to_toml
from roostream.schema.schema import Schema
from roostream.warehouse.readers.config import ReaderCountConfig
from roostream.warehouse.readers.leases import MAX_WANTED, LeaseLog, Leases, plain_lease
from roostream.warehouse.readers.prefetch_scaler import ReaderScaler

HOLD_S = 0.25  # a call is held this long when there is nothing to say
SILENT_S = 10.0  # behind it nobody counts any more

Trained = Callable[[], tuple[int, TableInput | None]]
"""The controller's incarnation, and the session that is trained; None = none is."""


@dataclasses.dataclass(kw_only=True)
class _Seen:
    """A reader or a worker, as it told last."""

    seen_s: float
    told: Header


class ReaderMaster:
    """`handle` serves calls from any thread."""

    def __init__(
        self,
        trained: Trained,
        schema: Schema,
        clock: Clock,
        count: ReaderCountConfig | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        count = count or ReaderCountConfig()
        self.trained, self.schema, self.clock, self.hold_s = trained, schema, clock, hold_s
        self.count = ReaderScaler(least=count.least, most=count.most)
        self.log = LeaseLog()
        self.leases = self._no_leases()
        self._of: tuple[int, str] = 0, ""  # incarnation, digest of the session
        self._session: TableInput | None = None  # the newest that was trained
        self._readers: dict[str, _Seen] = {}
        self._workers: dict[int, _Seen] = {}
        self._changed = threading.Condition()

    def handle(self, method: str, header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
        """`lease` and `want`.

        Raises:
            FencedError: the caller is of another incarnation or session. RoostreamError: an unknown method.
        """
        match method:
            case "lease":
                return self._lease(header), ()
            case "want":
                return self._want(header), ()
        raise RoostreamError(f"expected a call of lease or want, got {method!r}")

    def beside(self, handler: Handler) -> Handler:
        """`handler`, and these calls."""

        def handle(method: str, header: Header, arrays: Any) -> tuple[Header, Arrays]:
            return (self.handle if method in ("lease", "want") else handler)(method, header, arrays)

        return handle

    def _lease(self, header: Header) -> Header:
        """A reader lives: what it still has, and what it gets of the `free` that it has room for. With a session that it doesn't
        know, that; of an older incarnation it has nothing."""
        reader, free = str(header["reader"]), min(int(header["free"]), MAX_WANTED)
        with self._changed:
            session = self._look()
            now_s = self.clock.monotonic_s()
            self._readers[reader] = _Seen(seen_s=now_s, told=header)
            if header.get("leaving"):
                self.leases.lost(reader)
                del self._readers[reader]
                return {"incarnation": self._of[0], "session": "", "leases": []}
            known = (int(header["incarnation"]), str(header["session"])) == self._of
            had = {lease.grant for lease in self.leases.renew(reader, now_s)}
            if free and known and not self._granted(reader, free) and self.hold_s:
                self._changed.wait_for(
                    lambda: self._granted(reader, free) or self._look_changed(header), self.hold_s
                )
            its = self.leases.renew(reader, self.clock.monotonic_s())
            if any(lease.grant not in had for lease in its):
                self._changed.notify_all()
            answer: Header = {"incarnation": self._of[0], "session": self._of[1]}
            answer["leases"] = (
                [tuple(lease) for lease in its]
                if (answer["incarnation"], answer["session"]) == self._of
                else []
            )
            if session is not None and header["session"] != session.digest:
                answer |= {"input": session.plain(), "schema": to_toml(self.schema)}
            return answer

    def _granted(self, reader: str, free: int) -> bool:
        """Something was leased to it."""
        got = [self.leases.lease(reader, self.clock.monotonic_s()) for _ in range(free)]
        return any(lease is not None for lease in got)

    def _look_changed(self, header: Header) -> bool:
        self._look()
        return (int(header["incarnation"]), str(header["session"])) != self._of

    def _want(self, header: Header) -> Header:
        """What a worker waits for, and who reads it."""
        worker = int(header["worker"])
        with self._changed:
            self._look()
            if (int(header["incarnation"]), str(header["session"])) != self._of:
                raise FencedError(
                    f"expected a worker of incarnation {self._of[0]} and its session, got another: it is restored"
                )
            self._workers[worker] = _Seen(seen_s=self.clock.monotonic_s(), told=header)
            for split, grant in header["voided"]:
                self.leases.void(int(split), int(grant))
            self.leases.tell(worker, [(int(split), int(at)) for split, at in header["wanted"]])
            self._changed.notify_all()
            holders = self.leases.holders(worker, self.clock.monotonic_s())
            known = {name: str(seen.told["at"]) for name, seen in self._readers.items()}
            return {"holders": [tuple(lease) for lease in holders], "readers": known}

    def _look(self) -> TableInput | None:
        """Inside the lock: what is trained now; another incarnation or session begins without leases."""
        incarnation, session = self.trained()
        of = incarnation, session.digest if session else ""
        if of != self._of:
            self.leases.end()
            self._session = session or self._session
            self._of, self.leases, self._workers = of, self._no_leases(), {}
            self._changed.notify_all()
        self._forget()
        return session

    def _forget(self) -> None:
        now_s = self.clock.monotonic_s()
        for name in [name for name, seen in self._readers.items() if now_s - seen.seen_s > SILENT_S]:
            del self._readers[name]
        for number in [number for number, seen in self._workers.items() if now_s - seen.seen_s > SILENT_S]:
            del self._workers[number]

    def _no_leases(self) -> Leases:
        return Leases(note=lambda what, lease: self.log.note(self.clock.now_ms(), what, lease))

    def kept(self) -> dict[str, Any]:
        """What became of leases, and those of now: plain JSON (`lease_log.read_log`)."""
        with self._changed:
            self._look()
            held = [plain_lease(it) for it in self.leases.held(self.clock.monotonic_s())]
            more: dict[str, Any] = {
                "incarnation": self._of[0],
                "session": self._session.plain() if self._session else None,
            }
            more |= {"trained": bool(self._of[1]), "held": held}
            return self.log.body(at_ms=self.clock.now_ms(), **more)

    def status(self) -> dict[str, Any]:
        """Plain values for `status` and metrics: readers that are there and wanted, splits, and how full workers' buffers are."""
        with self._changed:
            session = self._look()
            now_s, workers = self.clock.monotonic_s(), {n: seen.told for n, seen in self._workers.items()}
            in_flight = sum(int(told["in_flight"]) for told in workers.values())
            return {
                "wanted": self.count.of(max(in_flight, 1) if session else 0, now_s),
                "least": self.count.least,
                "most": self.count.most,
                "there": len(self._readers),
                "splits_wanted": self.leases.num_wanted,
                "splits_leased": self.leases.num_granted,
                "leases_expired": self.leases.num_expired,
                "buffers": {
                    str(n): {
                        name: told.get(name)
                        for name in ("fullness", "in_flight", "stalled_s", "stall_share", "units")
                    }
                    for n, told in workers.items()
                },
                "readers": {
                    name: {**seen.told.get("report", {}), "silent_s": now_s - seen.seen_s}
                    for name, seen in self._readers.items()
                },
                "leases": [plain_lease(it) for it in self.leases.held(now_s)],
            }

"""Who reads which split: the core of a DPP master (Zhao et al., *Understanding Data Storage and Ingestion for Large-Scale Deep
Recommendation Model Training*, §III), pure.

    a trainer's worker ── splits that it waits for, in order, each from where ──► Leases ◄── asks, or renews ── readers
                       ◄── who reads which of them ────────────────────────────────┘

A worker names no more than its splits in flight, so what readers hold is bounded. A split is one reader's at a time, the first of
each worker before the second of any. Nothing of it is kept anywhere: how far all is read is in the manifest's positions, and
whoever begins anew begins without leases. Each lease has a number of its own, its *grant*: a reader that is silent loses what it
has, and what it gives under that grant is refused by whoever has heard of another one. Even that changes no batch, since the rows
of a split depend on the split alone.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from roostream.errors import CheckpointError

LEASE_S = 3.0
MAX_WANTED = 64  # splits of one worker


class Lease(NamedTuple):
    """A reader's right to be asked for a split."""

    split: int  # its number in the session's order
    position: int  # of its partition, from which rows are wanted
    grant: int  # no two leases have the same
    reader: str


class HeldLease(NamedTuple):
    """A lease, and who waits for its rows."""

    lease: Lease
    worker: int
    held_s: float


class _Granted(NamedTuple):
    lease: Lease
    until_s: float
    since_s: float


class Leases:
    """Of one session and one incarnation. Times are seconds of one monotonic clock. Not thread-safe."""

    def __init__(
        self, lease_s: float = LEASE_S, note: Callable[[str, Lease], None] = lambda what, lease: None
    ) -> None:
        """`note` hears of each that is granted, and why it ends (`lease_log.ENDS`)."""
        self.lease_s, self._note = lease_s, note
        self.num_granted = self.num_expired = 0
        self._wanted: dict[int, dict[int, int]] = {}  # worker → number of a split → position, in its order
        self._held: dict[int, _Granted] = {}

    # Workers

    def tell(self, worker: int, wanted: Sequence[tuple[int, int]]) -> None:
        """(split, position) of all that this worker waits for now, in order. What nobody waits for any more is no lease."""
        self._wanted[worker] = dict(wanted[:MAX_WANTED])
        known = {number for its in self._wanted.values() for number in its}
        self._end("done", [number for number in self._held if number not in known])

    def void(self, split: int, grant: int) -> None:
        """Its reader doesn't answer whoever waits for it: the split is anybody's. A grant that is over changes nothing."""
        held = self._held.get(split)
        if held is not None and held.lease.grant == grant:
            self._end("voided", [split])

    def holders(self, worker: int, now_s: float) -> list[Lease]:
        """Of what this worker waits for, what is leased, in its order."""
        self._expire(now_s)
        return [self._held[number].lease for number in self._wanted.get(worker, {}) if number in self._held]

    # Readers

    def lease(self, reader: str, now_s: float) -> Lease | None:
        """The first split that somebody waits for and nobody reads, for `lease_s` unless renewed. None: there is none now."""
        self._expire(now_s)
        split = next((split for split in self._in_turn() if split[0] not in self._held), None)
        if split is None:
            return None
        self.num_granted += 1
        lease = Lease(*split, self.num_granted, reader)
        self._held[lease.split] = _Granted(lease, now_s + self.lease_s, now_s)
        self._note("granted", lease)
        return lease

    def renew(self, reader: str, now_s: float) -> list[Lease]:
        """The reader lives; the leases that are still its own, those that are waited for most first. What else it holds it may
        forget."""
        self._expire(now_s)
        its = [
            held.lease
            for number, _ in self._in_turn()
            if (held := self._held.get(number)) and held.lease.reader == reader
        ]
        for lease in its:
            self._held[lease.split] = self._held[lease.split]._replace(until_s=now_s + self.lease_s)
        return its

    def lost(self, reader: str) -> None:
        """It ends, or began anew: what it had is anybody's."""
        self._end("left", [number for number, held in self._held.items() if held.lease.reader == reader])

    def held(self, now_s: float) -> list[HeldLease]:
        """All of now, by their splits."""
        self._expire(now_s)
        workers = {number: worker for worker, its in self._wanted.items() for number in its}
        return [
            HeldLease(held.lease, workers[number], now_s - held.since_s)
            for number, held in sorted(self._held.items())
        ]

    def end(self) -> None:
        """Another incarnation or session begins: all are void."""
        self._end("over", list(self._held))

    @property
    def num_wanted(self) -> int:
        """Splits that somebody waits for."""
        return len(self._in_turn())

    # Inside

    def _in_turn(self) -> list[tuple[int, int]]:
        """(split, position): the first of each worker, then the second of each; among those the first of the session."""
        turns = [
            (place, number, at)
            for its in self._wanted.values()
            for place, (number, at) in enumerate(its.items())
        ]
        return [(number, at) for _, number, at in sorted(turns)]

    def _expire(self, now_s: float) -> None:
        late = [number for number, held in self._held.items() if now_s >= held.until_s]
        self.num_expired += len(late)
        self._end("expired", late)

    def _end(self, why: str, splits: Sequence[int]) -> None:
        for number in splits:
            self._note(why, self._held.pop(number).lease)


FORMAT = 1
MAX_EVENTS, MAX_READERS = 2048, 512
ENDS = ("done", "voided", "expired", "left", "over")
"""Nobody waits for it any more · its reader didn't answer whoever waited · was silent · ended · another incarnation began."""


class LeaseEvent(NamedTuple):
    """A lease that was granted, or ended."""

    at_ms: int
    what: str  # "granted" or one of ENDS
    split: int
    position: int
    reader: str


class LeaseLog:
    """Of one process, over all of its incarnations and sessions. Not thread-safe."""

    def __init__(self) -> None:
        self.events: deque[LeaseEvent] = deque(maxlen=MAX_EVENTS)
        self.by_reader: dict[str, Counter[str]] = {}
        self.version = 0  # changes with each event

    def note(self, at_ms: int, what: str, lease: Lease) -> None:
        self.version += 1
        self.events.append(LeaseEvent(at_ms, what, lease.split, lease.position, lease.reader))
        if lease.reader not in self.by_reader and len(self.by_reader) >= MAX_READERS:
            del self.by_reader[next(iter(self.by_reader))]  # that came first
        self.by_reader.setdefault(lease.reader, Counter())[what] += 1

    def body(self, **more: Any) -> dict[str, Any]:
        """Plain values, which `read_log` takes."""
        readers = {reader: dict(counts) for reader, counts in self.by_reader.items()}
        return {
            "format": FORMAT,
            **more,
            "readers": readers,
            "events": [list(event) for event in self.events],
        }


def plain_lease(held: HeldLease) -> dict[str, Any]:
    """As `status` and the log show a lease of now."""
    its = held.lease
    return {
        "split": its.split,
        "worker": held.worker,
        "position": its.position,
        "reader": its.reader,
        "for_s": held.held_s,
    }


def read_log(body: bytes) -> Mapping[str, Any]:
    """What `LeaseLog.body` made, of its JSON. CheckpointError: it is none."""
    try:
        found = json.loads(body)
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"expected leases of format {FORMAT}, got {found['format']!r}; look with the Roostream that wrote them"
            )
        return {**found, "events": [LeaseEvent(*event) for event in found["events"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"expected leases as the controller keeps them, got another thing ({error!r:.100})"
        ) from None

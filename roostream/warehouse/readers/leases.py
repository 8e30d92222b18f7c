"""Leases: which reader reads which split. The core of a DPP master (Zhao et al., *Understanding Data Storage
and Ingestion for Large-Scale Deep Recommendation Model Training*, §III). No I/O here.

Workers name the splits that they wait for, in order; readers lease them and renew the leases. The first split
of each worker comes before the second of any. Each lease has a unique *grant* number: a reader that is silent
loses its leases, and rows sent under an old grant are rejected. Leases are not stored: how far a session is
read is in the manifest's positions, and a new controller starts without leases.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from roostream.errors import CheckpointError

LEASE_S = 3.0
MAX_WANTED = 64  # splits that one worker may name
FORMAT = 1  # of the lease log
MAX_EVENTS, MAX_READERS = 2048, 512  # that the lease log remembers
ENDS = ("done", "voided", "expired", "left", "over")
"""Why a lease ended: no worker waits for the split any more · its reader did not answer a worker · the reader
was silent · the reader left · another incarnation or session began."""


class Lease(NamedTuple):
    """A reader's right to read a split and to serve its rows."""

    split: int  # number in the session's order
    position: int  # of its partition, from which on rows are wanted
    grant: int  # unique
    reader: str


class HeldLease(NamedTuple):
    """A lease, and the worker that waits for its rows."""

    lease: Lease
    worker: int
    held_s: float


class _Granted(NamedTuple):
    lease: Lease
    until_s: float
    since_s: float


class Leases:
    """Leases of one session and incarnation. Times are seconds of one monotonic clock. Not thread-safe."""

    def __init__(
        self, lease_s: float = LEASE_S, note: Callable[[str, Lease], None] = lambda what, lease: None
    ) -> None:
        """`note` is called with `"granted"` or one of `ENDS`, and the lease."""
        self.lease_s, self._note = lease_s, note
        self.num_granted = self.num_expired = 0
        self._wanted: dict[int, dict[int, int]] = {}  # worker → split → position, in the worker's order
        self._held: dict[int, _Granted] = {}

    def set_wanted(self, worker: int, wanted: Sequence[tuple[int, int]]) -> None:
        """Set the (split, position) pairs that this worker waits for, in order. Leases that no worker waits
        for end."""
        self._wanted[worker] = dict(wanted[:MAX_WANTED])
        known = {number for splits in self._wanted.values() for number in splits}
        self._end("done", [number for number in self._held if number not in known])

    def void(self, split: int, grant: int) -> None:
        """End a lease whose reader does not answer a worker. An outdated grant changes nothing."""
        held = self._held.get(split)
        if held is not None and held.lease.grant == grant:
            self._end("voided", [split])

    def holders(self, worker: int, now_s: float) -> list[Lease]:
        """Leases of the splits that this worker waits for, in its order."""
        self._expire(now_s)
        return [self._held[number].lease for number in self._wanted.get(worker, {}) if number in self._held]

    def lease(self, reader: str, now_s: float) -> Lease | None:
        """Lease the first split that is waited for and not leased, for `lease_s` unless renewed. None: there
        is none."""
        self._expire(now_s)
        split = next((split for split in self._by_urgency() if split[0] not in self._held), None)
        if split is None:
            return None
        self.num_granted += 1
        lease = Lease(*split, self.num_granted, reader)
        self._held[lease.split] = _Granted(lease, now_s + self.lease_s, now_s)
        self._note("granted", lease)
        return lease

    def renew(self, reader: str, now_s: float) -> list[Lease]:
        """Renew all leases of a reader, most urgent first. It may forget every split that is not returned."""
        self._expire(now_s)
        leases = [
            held.lease
            for number, _ in self._by_urgency()
            if (held := self._held.get(number)) and held.lease.reader == reader
        ]
        for lease in leases:
            self._held[lease.split] = self._held[lease.split]._replace(until_s=now_s + self.lease_s)
        return leases

    def release(self, reader: str) -> None:
        """End all leases of a reader that leaves or has restarted."""
        self._end("left", [number for number, held in self._held.items() if held.lease.reader == reader])

    def held(self, now_s: float) -> list[HeldLease]:
        """All leases, ordered by split."""
        self._expire(now_s)
        workers = {number: worker for worker, splits in self._wanted.items() for number in splits}
        return [
            HeldLease(held.lease, workers[number], now_s - held.since_s)
            for number, held in sorted(self._held.items())
        ]

    def end_all(self) -> None:
        """End all leases: another incarnation or session begins."""
        self._end("over", list(self._held))

    @property
    def num_wanted(self) -> int:
        """Number of splits that workers wait for."""
        return len(self._by_urgency())

    def _by_urgency(self) -> list[tuple[int, int]]:
        """(split, position): the first split of each worker, then the second of each; ties in the session's
        order."""
        ranked = [
            (rank, number, position)
            for splits in self._wanted.values()
            for rank, (number, position) in enumerate(splits.items())
        ]
        return [(number, position) for _, number, position in sorted(ranked)]

    def _expire(self, now_s: float) -> None:
        late = [number for number, held in self._held.items() if now_s >= held.until_s]
        self.num_expired += len(late)
        self._end("expired", late)

    def _end(self, why: str, splits: Sequence[int]) -> None:
        for number in splits:
            self._note(why, self._held.pop(number).lease)


class LeaseEvent(NamedTuple):
    """A lease that was granted or ended."""

    at_ms: int
    what: str  # "granted" or one of ENDS
    split: int
    position: int
    reader: str


class LeaseLog:
    """Recent lease events and totals by reader, for `roostream inspect session --leases`. Bounded. Not
    thread-safe.

    It covers all incarnations and sessions of one process. No program reads it to continue its work.
    """

    def __init__(self) -> None:
        self.events: deque[LeaseEvent] = deque(maxlen=MAX_EVENTS)
        self.by_reader: dict[str, Counter[str]] = {}
        self.version = 0  # changes with each event

    def note(self, at_ms: int, what: str, lease: Lease) -> None:
        self.version += 1
        self.events.append(LeaseEvent(at_ms, what, lease.split, lease.position, lease.reader))
        if lease.reader not in self.by_reader and len(self.by_reader) >= MAX_READERS:
            del self.by_reader[next(iter(self.by_reader))]  # the oldest one
        self.by_reader.setdefault(lease.reader, Counter())[what] += 1

    def body(self, **more: Any) -> dict[str, Any]:
        """Plain values; `read_log` is the inverse."""
        readers = {reader: dict(counts) for reader, counts in self.by_reader.items()}
        events = [list(event) for event in self.events]
        return {"format": FORMAT, **more, "readers": readers, "events": events}


def plain_lease(held: HeldLease) -> dict[str, Any]:
    """A lease as `status` and the log show it."""
    lease = held.lease
    return {
        "split": lease.split,
        "worker": held.worker,
        "position": lease.position,
        "reader": lease.reader,
        "for_s": held.held_s,
    }


def read_log(body: bytes) -> Mapping[str, Any]:
    """Parse the JSON of `LeaseLog.body`.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        found = json.loads(body)
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"expected leases of format {FORMAT}, got {found['format']!r}; "
                "use the version of Roostream that wrote it"
            )
        return {**found, "events": [LeaseEvent(*event) for event in found["events"]]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"expected a lease log of the controller, got something else ({error!r:.100})"
        ) from None

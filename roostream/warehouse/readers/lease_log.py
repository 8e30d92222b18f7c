"""What became of leases, for whoever wants to look at a run: of its readers, the newest of what happened, and sums. Bounded.

Nothing reads it to go on: how far a session is trained is in the manifest (docs/decisions/0060).
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from roostream.errors import CheckpointError
from roostream.warehouse.readers.leases import HeldLease, Lease

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

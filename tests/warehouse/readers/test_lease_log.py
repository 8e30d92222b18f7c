"""The log of lease events: it is bounded, it has each end of a lease once, and it is read back as written."""

from __future__ import annotations

import json

import pytest

from roostream.errors import CheckpointError
from roostream.warehouse.readers.leases import (
    MAX_EVENTS,
    MAX_READERS,
    Lease,
    LeaseEvent,
    LeaseLog,
    Leases,
    read_log,
)


def test_the_newest_events_and_readers_are_kept() -> None:
    log = LeaseLog()
    for number in range(MAX_EVENTS + 10):
        log.note(number, "granted", Lease(number, 0, number, f"r{number % (MAX_READERS + 1)}"))
    body = read_log(json.dumps(log.body(at_ms=7)).encode())
    assert len(body["events"]) == MAX_EVENTS
    assert body["events"][-1] == LeaseEvent(
        MAX_EVENTS + 9, "granted", MAX_EVENTS + 9, 0, f"r{(MAX_EVENTS + 9) % (MAX_READERS + 1)}"
    )
    assert len(body["readers"]) == MAX_READERS and body["at_ms"] == 7


def test_each_end_of_a_lease_is_reported_once() -> None:
    events: list[tuple[str, int]] = []
    leases = Leases(lease_s=3.0, note=lambda outcome, lease: events.append((outcome, lease.split)))
    leases.set_wanted(0, [(n, 0) for n in range(6)])
    granted = [leases.lease(reader, 0.0) for reader in ("a", "a", "b", "c", "c")]
    leases.set_wanted(0, [(n, 0) for n in range(1, 6)])
    leases.void(1, granted[1].grant if granted[1] else 0)
    leases.release("b")
    assert [lease_held.lease.split for lease_held in leases.held(1.0)] == [3, 4]
    leases.renew("c", 3.5)
    assert events[5:] == [("done", 0), ("voided", 1), ("left", 2), ("expired", 3), ("expired", 4)]
    leases.lease("d", 4.0)
    leases.end_all()
    leases.end_all()
    assert events[10:] == [("granted", 1), ("over", 1)]


@pytest.mark.parametrize(
    ("body", "message_part"),
    [
        (b'{"format": 9}', "expected leases of format 1, got 9"),
        (b"[]", "something else"),
        (b'{"format": 1, "eve', "something else"),
        (b'{"format": 1, "events": [[1]]}', "something else"),
    ],
)
def test_invalid_data_is_rejected_as_lease_log(body: bytes, message_part: str) -> None:
    with pytest.raises(CheckpointError, match=message_part):
        read_log(body)

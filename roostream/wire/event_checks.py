"""Checks of single events that every reader of the event topics makes. The joiner writes the dead letters of
events that fail them; other readers leave these events out, so that all count the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

from roostream.errors import WireError
from roostream.schema.ids import key_bytes
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

MAX_TIME_MS = 253_402_300_799_999  # the last millisecond of the year 9999
MAX_NAME_BYTES = 64
MAX_PRODUCER_BYTES = 1024  # the joiner stores the names of the producers that send heartbeats


def check_header(record: Record, header: pb.Header) -> None:
    """Check the header of an impression or engagement.

    Raises:
        WireError: `bad_shape`: its texts, or the record's key. `bad_time`: its time, or the record's
        timestamp.
    """
    if not 1 <= len(header.request_id.encode()) <= MAX_NAME_BYTES:
        text = f"expected a request id of 1..{MAX_NAME_BYTES} bytes, got {len(header.request_id.encode())}"
        raise WireError("bad_shape", text)
    if len(header.surface.encode()) > MAX_NAME_BYTES:
        text = f"expected a surface of at most {MAX_NAME_BYTES} bytes, got {len(header.surface.encode())}"
        raise WireError("bad_shape", text)
    if len(header.traceparent) > MAX_NAME_BYTES:
        text = f"expected a traceparent of at most {MAX_NAME_BYTES} characters, got {len(header.traceparent)}"
        raise WireError("bad_shape", text)
    if not 1 <= header.time_ms <= MAX_TIME_MS:
        raise WireError("bad_time", f"expected a time in 1..{MAX_TIME_MS} ms, got {header.time_ms}")
    if header.time_ms != record.timestamp_ms:
        text = f"expected the record's timestamp {record.timestamp_ms}, got event time {header.time_ms}"
        raise WireError("bad_time", text)
    key = key_bytes(header.user_id, header.session_id, header.request_id)
    if record.key != key:
        got = "none" if record.key is None else record.key[:16].hex()
        text = f"expected key {key.hex()} of user {header.user_id}, session {header.session_id}, got {got}"
        raise WireError("bad_shape", text)


def check_engagement(message: pb.Engagement) -> None:
    """Check the fields of an engagement without its header. Raises WireError: `bad_shape` or `non_finite`."""
    if not message.event_id:
        text = "expected an event id, got 0: without one a retry looks like a second engagement"
        raise WireError("bad_shape", text)
    if not 1 <= len(message.action.encode()) <= MAX_NAME_BYTES:
        text = f"expected an action of 1..{MAX_NAME_BYTES} bytes, got {len(message.action.encode())}"
        raise WireError("bad_shape", text)
    check_finite("value", (message.value,))


def check_num_candidates(message: pb.Impression, max_candidates: int) -> None:
    """Raises WireError: `oversized`: the list has more than `max_candidates` items."""
    if len(message.item_ids) > max_candidates:
        raise WireError(
            "oversized", f"expected at most {max_candidates} candidates, got {len(message.item_ids)}"
        )


def check_finite(name: str, values: Iterable[float]) -> None:
    """Raises WireError: `non_finite`: a value is an infinity or NaN. `name`: what the values are, for the
    message."""
    if not all(map(math.isfinite, values)):
        raise WireError("non_finite", f"expected finite {name}, got an infinity or NaN")

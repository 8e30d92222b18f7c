"""From records to events: what can't be joined becomes a dead letter here, before it reaches any state (G6).

A record is read alone: nothing in here depends on what came before it, so a bad record costs itself and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from joiner.build import Output, dead_letter
from joiner.spans import ITEMS, payload, spans_of
from joiner.state import Engagement, Impression, Origin, Page
from roostream.errors import CheckpointError, UnavailableError, WireError
from roostream.schema.ids import NO_KEY, hash64, key_bytes
from roostream.schema.schema import Limits, Registry
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import check_block
from roostream.wire.records import Record

LATEST_MS = 253_402_300_799_999  # the last millisecond of the year 9999
MAX_NAME_BYTES = 64
MAX_ERROR = 512
"""Characters of what a dead letter says is wrong."""

Event: TypeAlias = Impression | Engagement
Beat: TypeAlias = pb.Heartbeat | pb.EndMarker
"""What only tells how far time has come."""


class Reader:
    """Decodes the records of both event topics.

    `registry` gives a schema by fingerprint, None if it is unknown; `limits` are those of the joiner's own schema, since the
    writer's schema can't be trusted with them.
    """

    def __init__(self, registry: Registry, limits: Limits) -> None:
        self.registry, self.limits = registry, limits

    def read(self, record: Record) -> Event | Beat | Output:
        """An event; a heartbeat or end marker; else a dead letter. Never raises for what a record holds.

        Raises:
            CheckpointError, UnavailableError: the record's schema is registered, but can't be read now: nothing is wrong with the
                record, and it can be read once that is mended.
        """
        origin = Origin(record.topic, record.partition, record.offset)
        found: pb.Impression | pb.Engagement | Beat | None = None
        try:
            found = self._decode(record.value)
            return (
                found
                if isinstance(found, (pb.Heartbeat, pb.EndMarker))
                else self._event(record, origin, found)
            )
        except WireError as error:
            return self._dead(record, origin, found, error.reason, str(error))
        except (CheckpointError, UnavailableError):
            raise
        except Exception as error:
            return self._dead(record, origin, found, "undecodable", f"could not be read: {error!r}")

    def _decode(self, value: bytes | None) -> pb.Impression | pb.Engagement | Beat:
        if value is not None and len(value) > self.limits.max_record_bytes:
            raise WireError(
                "oversized", f"expected at most {self.limits.max_record_bytes} bytes, got {len(value)}"
            )
        kind, message = wire.decode(value)
        if isinstance(message, (pb.Impression, pb.Engagement, pb.Heartbeat, pb.EndMarker)):
            return message
        raise WireError("unknown_type", f"expected an impression or an engagement, got type {kind}")

    def _event(self, record: Record, origin: Origin, message: pb.Impression | pb.Engagement) -> Event:
        _check_header(record, message.header)
        if isinstance(message, pb.Engagement):
            _check_engagement(message)
            return _engagement(record, origin, message)
        self._check_impression(message)
        return _impression(record, origin, message)

    def _check_impression(self, message: pb.Impression) -> None:
        schema = self.registry(message.header.schema)
        if schema is None:
            raise WireError(
                "unknown_schema",
                f"expected the fingerprint of a registered schema, got {message.header.schema:016x}",
            )
        n, t = len(message.item_ids), len(schema.labels)
        if n > self.limits.max_candidates:
            raise WireError("oversized", f"expected at most {self.limits.max_candidates} candidates, got {n}")
        for name, length, expected in (
            ("scores", len(message.scores), n * t),
            ("positions", len(message.positions), n),
            ("propensities", len(message.propensities), n),
        ):
            if length not in (0, expected):
                raise WireError(
                    "bad_shape", f"expected {expected} {name} for {n} candidates (or none), got {length}"
                )
        _check_finite("scores", message.scores)
        _check_finite("weight and propensities", (message.weight, *message.propensities))
        if not 0 <= message.weight <= wire.MAX_WEIGHT or not all(0 < p <= 1 for p in message.propensities):
            raise WireError(
                "bad_number", f"expected a weight in 0..{wire.MAX_WEIGHT:g} and propensities in (0, 1]"
            )
        if message.HasField("ro"):
            check_block(schema, "ro", message.ro, 1, self.limits)
        check_block(schema, "nro", message.nro, n, self.limits)

    def _dead(self, record: Record, origin: Origin, found: object, reason: str, error: str) -> Output:
        """Nothing of it is larger than we make it, whatever the record holds: no sink may ever refuse a dead letter."""
        request_id = found.header.request_id if isinstance(found, (pb.Impression, pb.Engagement)) else ""
        if len(request_id.encode()) > MAX_NAME_BYTES:
            request_id = ""
        event_id = found.event_id if isinstance(found, pb.Engagement) else 0
        key = record.key if record.key is not None and len(record.key) == len(NO_KEY) else NO_KEY
        return dead_letter(
            key, origin, record.value, reason, error[:MAX_ERROR], event_id=event_id, request_id=request_id
        )


def _check_header(record: Record, header: pb.Header) -> None:
    if not 1 <= len(header.request_id.encode()) <= MAX_NAME_BYTES:
        raise WireError(
            "bad_shape",
            f"expected a request id of 1..{MAX_NAME_BYTES} bytes, got {len(header.request_id.encode())}",
        )
    if len(header.surface.encode()) > MAX_NAME_BYTES:
        raise WireError(
            "bad_shape",
            f"expected a surface of at most {MAX_NAME_BYTES} bytes, got {len(header.surface.encode())}",
        )
    if len(header.traceparent) > MAX_NAME_BYTES:
        raise WireError(
            "bad_shape",
            f"expected a traceparent of at most {MAX_NAME_BYTES} characters, got {len(header.traceparent)}",
        )
    if not 1 <= header.time_ms <= LATEST_MS:
        raise WireError("bad_time", f"expected a time in 1..{LATEST_MS} ms, got {header.time_ms}")
    if header.time_ms != record.timestamp_ms:
        raise WireError(
            "bad_time",
            f"expected the record's timestamp {record.timestamp_ms}, got event time {header.time_ms}",
        )
    key = key_bytes(header.user_id, header.session_id, header.request_id)
    if record.key != key:
        got = "none" if record.key is None else record.key[:16].hex()
        raise WireError(
            "bad_shape",
            f"expected key {key.hex()} (user {header.user_id}, session {header.session_id}, this request), got {got}",
        )


def _check_engagement(message: pb.Engagement) -> None:
    if not message.event_id:
        raise WireError(
            "bad_shape",
            "expected an event id, got 0: without one a retry can't be told from a second engagement",
        )
    if not 1 <= len(message.action.encode()) <= MAX_NAME_BYTES:
        raise WireError(
            "bad_shape",
            f"expected an action of 1..{MAX_NAME_BYTES} bytes, got {len(message.action.encode())}",
        )
    _check_finite("value", (message.value,))


def _check_finite(name: str, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise WireError("non_finite", f"expected finite {name}, got an infinity or NaN")


def _impression(record: Record, origin: Origin, message: pb.Impression) -> Impression:
    """The record with the places of its columns, which are copied from there later. A producer need not write a message as
    protobuf does: of another one, what protobuf writes is kept beside what came."""
    header, raw = message.header, record.value
    written = message.SerializeToString(deterministic=True)
    canonical = b"" if raw[2:] == written else raw[:2] + written
    spans = spans_of(canonical or raw)
    page = Page(
        time_ms=header.time_ms,
        digest=hash64(raw),
        schema=header.schema,
        session_id=header.session_id,
        surface=header.surface,
        items=payload(canonical or raw, spans, ITEMS),
        num_distinct=len(set(message.item_ids)),
    )
    return Impression(
        origin=origin, request_id=header.request_id, page=page, spans=spans, raw=raw, canonical=canonical
    )


def _engagement(record: Record, origin: Origin, message: pb.Engagement) -> Engagement:
    return Engagement(
        origin=origin,
        request_id=message.header.request_id,
        event_id=message.event_id,
        item_id=message.item_id,
        action=message.action,
        value=message.value,
        time_ms=message.header.time_ms,
        raw=record.value,
    )

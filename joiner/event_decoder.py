"""Decodes Kafka records into events. Records that can't be joined become dead letters here, before they reach
any state (guarantee G6).

Each record is decoded alone, independent of earlier ones, so a bad record affects nothing else.
"""

from __future__ import annotations

from typing import TypeAlias

from joiner.outputs import Output, dead_letter
from joiner.state import Engagement, Impression, Origin, Page
from joiner.wire_offsets import ITEMS, field_offsets, field_value
from roostream.errors import CheckpointError, UnavailableError, WireError
from roostream.schema.ids import NO_KEY, hash64
from roostream.schema.schema import Limits, Registry
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import check_block
from roostream.wire.event_checks import (
    MAX_NAME_BYTES,
    MAX_PRODUCER_BYTES,
    check_engagement,
    check_finite,
    check_header,
    check_num_candidates,
)
from roostream.wire.records import Record

MAX_ERROR_CHARS = 512  # of the error in a dead letter

Event: TypeAlias = Impression | Engagement
TimeMark: TypeAlias = pb.Heartbeat | pb.EndMarker
"""Records that only advance event time."""


class EventDecoder:
    """Decodes the records of both event topics.

    `registry` returns a schema by fingerprint, None if it is unknown. `limits` are those of the joiner's own
    schema, because the producer's schema can't be trusted with limits.
    """

    def __init__(self, registry: Registry, limits: Limits) -> None:
        self.registry, self.limits = registry, limits

    def decode(self, record: Record) -> Event | TimeMark | Output:
        """An event, a heartbeat or end marker, or a dead letter. Never raises for the content of a record.

        Raises:
            CheckpointError, UnavailableError: the record's schema is registered but can't be loaded now. The
            record itself may be good; decode it again later.
        """
        origin = Origin(record.topic, record.partition, record.offset)
        message: pb.Impression | pb.Engagement | TimeMark | None = None
        try:
            message = self._parse(record.value)
            if isinstance(message, (pb.Heartbeat, pb.EndMarker)):
                return message
            check_header(record, message.header)
            if isinstance(message, pb.Engagement):
                check_engagement(message)
                return _engagement(record, origin, message)
            self._check_impression(message)
            return _impression(record, origin, message)
        except WireError as error:
            return self._dead_letter(record, origin, message, error.reason, str(error))
        except (CheckpointError, UnavailableError):
            raise
        except Exception as error:
            return self._dead_letter(
                record, origin, message, "undecodable", f"could not be decoded: {error!r}"
            )

    def _parse(self, value: bytes | None) -> pb.Impression | pb.Engagement | TimeMark:
        if value is not None and len(value) > self.limits.max_record_bytes:
            text = f"expected at most {self.limits.max_record_bytes} bytes, got {len(value)}"
            raise WireError("oversized", text)
        kind, message = wire.decode(value)
        if isinstance(message, pb.Heartbeat) and len(message.producer.encode()) > MAX_PRODUCER_BYTES:
            text = f"expected a producer's name of at most {MAX_PRODUCER_BYTES} bytes, got a longer one"
            raise WireError("bad_shape", text)
        if isinstance(message, (pb.Impression, pb.Engagement, pb.Heartbeat, pb.EndMarker)):
            return message
        raise WireError("unknown_type", f"expected an impression or an engagement, got type {kind}")

    def _check_impression(self, message: pb.Impression) -> None:
        schema = self.registry(message.header.schema)
        if schema is None:
            text = f"expected the fingerprint of a registered schema, got {message.header.schema:016x}"
            raise WireError("unknown_schema", text)
        check_num_candidates(message, self.limits.max_candidates)
        n, t = len(message.item_ids), len(schema.labels)
        for name, length, expected in (
            ("scores", len(message.scores), n * t),
            ("positions", len(message.positions), n),
            ("propensities", len(message.propensities), n),
        ):
            if length not in (0, expected):
                text = f"expected {expected} {name} for {n} candidates (or none), got {length}"
                raise WireError("bad_shape", text)
        check_finite("scores", message.scores)
        check_finite("weight and propensities", (message.weight, *message.propensities))
        if not 0 <= message.weight <= wire.MAX_WEIGHT or not all(0 < p <= 1 for p in message.propensities):
            text = f"expected a weight in 0..{wire.MAX_WEIGHT:g} and propensities in (0, 1]"
            raise WireError("bad_number", text)
        if message.HasField("ro"):
            check_block(schema, "ro", message.ro, 1, self.limits)
        check_block(schema, "nro", message.nro, n, self.limits)

    def _dead_letter(
        self, record: Record, origin: Origin, message: object, reason: str, error: str
    ) -> Output:
        """Every part has a bounded size, whatever the record contains: a sink must never refuse a dead
        letter."""
        request_id = message.header.request_id if isinstance(message, (pb.Impression, pb.Engagement)) else ""
        if len(request_id.encode()) > MAX_NAME_BYTES:
            request_id = ""
        event_id = message.event_id if isinstance(message, pb.Engagement) else 0
        key = record.key if record.key is not None and len(record.key) == len(NO_KEY) else NO_KEY
        return dead_letter(
            key,
            origin,
            record.value,
            reason,
            error[:MAX_ERROR_CHARS],
            event_id=event_id,
            request_id=request_id,
        )


def _impression(record: Record, origin: Origin, message: pb.Impression) -> Impression:
    """The event with the offsets of its columns, which are copied from the record later. If a producer
    encoded the message differently from protobuf, protobuf's encoding is kept beside the original bytes."""
    header, raw = message.header, record.value
    encoded = message.SerializeToString(deterministic=True)
    canonical = b"" if raw[2:] == encoded else raw[:2] + encoded
    offsets = field_offsets(canonical or raw)
    page = Page(
        time_ms=header.time_ms,
        digest=hash64(raw),
        schema=header.schema,
        session_id=header.session_id,
        surface=header.surface,
        items=field_value(canonical or raw, offsets, ITEMS),
        num_distinct=len(set(message.item_ids)),
    )
    return Impression(
        origin=origin, request_id=header.request_id, page=page, offsets=offsets, raw=raw, canonical=canonical
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

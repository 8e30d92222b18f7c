"""Records of all topics and of serving's feature log: type byte, version byte, protobuf message of
`roo.proto`.

Records of embedding rows (version 2) have a checksum before the message. `decode` returns a complete message
or raises WireError with the reason of the dead letter.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError, Message

from roostream.errors import WireError
from roostream.wire import roo_pb2 as pb

VERSION, CHECKED_VERSION = 1, 2
MAX_WEIGHT = 1e6
"""List entries have weights within ±MAX_WEIGHT, samples within 0..MAX_WEIGHT; a propensity is in (0, 1]. All
inputs are checked, since a single larger value would dominate training. Cached kernels contain it, so it may
not change."""

(
    IMPRESSION,
    ENGAGEMENT,
    SAMPLE,
    CORRECTION,
    DEAD_LETTER,
    HEARTBEAT,
    END_MARKER,
    ROW_DELTA,
    BARRIER,
    PREDICTION,
) = range(1, 11)

CHECKED = (ROW_DELTA, BARRIER)
"""Types with a checksum, since a damaged embedding row would be served until its next update. Version 1,
without a checksum, is read too."""

TYPES: dict[int, type[Message]] = {
    IMPRESSION: pb.Impression,
    ENGAGEMENT: pb.Engagement,
    SAMPLE: pb.Sample,
    CORRECTION: pb.Sample,
    DEAD_LETTER: pb.DeadLetter,
    HEARTBEAT: pb.Heartbeat,
    END_MARKER: pb.EndMarker,
    ROW_DELTA: pb.RowDelta,
    BARRIER: pb.Barrier,
    PREDICTION: pb.Prediction,
}

# All reasons of dead letters: those of decoding, then those of joining.
REASONS = (
    "undecodable",  # not a record, or not the message that its type byte names
    "unknown_type",  # an unknown type or version byte
    "unknown_schema",  # a fingerprint without a registered schema
    "bad_shape",  # columns whose lengths disagree
    "non_finite",  # an infinity, or a NaN that does not mean missing
    "bad_number",  # a weight or propensity out of bounds
    "oversized",  # more bytes, candidates or list entries than the limits
    "bad_time",  # an impossible event time, or another than the record's timestamp
    "no_request",  # an engagement whose request never arrived
    "item_not_shown",  # an engagement with an item that its request did not show
    "after_close",  # an impression of a request that is closed
    "too_late",  # an engagement beyond the late horizon
    "internal_error",  # the joiner failed because of a defect; the job goes on without the event
    "overflow",  # beyond the limits of a user (open requests, orphans) or of a request (bytes, events)
)


class Record(NamedTuple):
    """A consumed record, from Kafka or from a file."""

    topic: str  # without the stack's prefix
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes


def encode(kind: int, message: Message) -> bytes:
    """The record of a message, in deterministic protobuf."""
    return frame(kind, message.SerializeToString(deterministic=True))


def frame(kind: int, body: bytes) -> bytes:
    """The record of a message with the bytes `body`."""
    if kind in CHECKED:
        head = bytes((kind, CHECKED_VERSION))
        return head + xxhash.xxh3_64_digest(head + body) + body
    return bytes((kind, VERSION)) + body


def kind_of(record: bytes) -> int:
    """The type byte of a record; 0 if it is shorter than two bytes."""
    return record[0] if len(record) >= 2 else 0


def decode(record: bytes | None) -> tuple[int, Message]:
    """Decode a record to (type, message).

    Raises:
        WireError: `undecodable` or `unknown_type`.
    """
    if record is None or len(record) < 2:
        text = f"expected a record of 2 bytes or more, got {0 if record is None else len(record)}"
        raise WireError("undecodable", text)
    kind = record[0]
    checked = kind in CHECKED and record[1] == CHECKED_VERSION
    if kind not in TYPES or not (record[1] == VERSION or checked):
        text = f"expected type 1..{len(TYPES)} version {VERSION}, got type {kind} version {record[1]}"
        raise WireError("unknown_type", text)
    body = record[10:] if checked else record[2:]
    if checked and xxhash.xxh3_64_digest(record[:2] + body) != record[2:10]:
        text = f"expected bytes with the checksum {record[2:10].hex()}, got others; the record is damaged"
        raise WireError("undecodable", text)
    message = TYPES[kind]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError("undecodable", f"expected a {message.DESCRIPTOR.name}: {error}") from None
    return kind, message

"""Records: a type byte, a version byte, then the protobuf message of `roo.proto`; of rows, a checksum in between (version 2).

Every record on every topic, and in serving's log, is one of these. `decode` never returns half a message: bytes that
can't be read raise WireError with the reason that the dead letter then carries. `Record` is one as it was consumed.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError, Message

from roostream.errors import WireError
from roostream.wire import roo_pb2 as pb

VERSION, CHECKED_VERSION = 1, 2
MAX_WEIGHT = 1e6
"""Weights of list entries lie in ±MAX_WEIGHT, weights of samples in 0..MAX_WEIGHT; a propensity is above 0, at most 1. Checked
wherever they enter: one value beyond would be all that a model learns from. Kernels are cached with it (wire_fields.py)."""

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
"""Types written with a checksum: nobody reads rows twice, so that a wrong one is served until it is pushed again. Version 1 of
them, without one, is read too."""

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

# Reasons of dead letters, all of them. Decoding: the record itself is bad. Joining: it has no place to go.
REASONS = (
    "undecodable",  # not a record, or not the message that its type byte names
    "unknown_type",  # a type or version byte that this build doesn't know
    "unknown_schema",  # a fingerprint that no registered schema has
    "bad_shape",  # columns whose lengths disagree
    "non_finite",  # an infinity, or a NaN where NaN doesn't mean missing
    "bad_number",  # a weight or propensity out of its bounds
    "oversized",  # more bytes, candidates or list entries than the hard caps
    "bad_time",  # an event time that can't be, or isn't its record's timestamp
    "no_request",  # an engagement whose request never came
    "item_not_shown",  # an engagement with an item that its request didn't show
    "after_close",  # an impression of a request that is closed
    "too_late",  # an engagement beyond the late horizon
    "overflow",  # beyond the caps of a user (open requests, orphans) or of a request (bytes, impressions, engagements)
)


class Record(NamedTuple):
    """A consumed record, the same from Kafka, from a file and from a test."""

    topic: str  # without the stack's prefix
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes


def encode(kind: int, message: Message) -> bytes:
    """The record of a message, as deterministic protobuf."""
    return framed(kind, message.SerializeToString(deterministic=True))


def framed(kind: int, body: bytes) -> bytes:
    """The record whose message has the bytes `body`."""
    if kind in CHECKED:
        head = bytes((kind, CHECKED_VERSION))
        return head + xxhash.xxh3_64_digest(head + body) + body
    return bytes((kind, VERSION)) + body


def kind_of(record: bytes) -> int:
    """The type byte of a record that has two bytes or more, else 0."""
    return record[0] if len(record) >= 2 else 0


def decode(record: bytes | None) -> tuple[int, Message]:
    """(type, message).

    Raises:
        WireError: `undecodable` or `unknown_type`; nothing was consumed.
    """
    if record is None or len(record) < 2:
        raise WireError(
            "undecodable", f"expected a record of 2 bytes or more, got {0 if record is None else len(record)}"
        )
    kind = record[0]
    checked = kind in CHECKED and record[1] == CHECKED_VERSION
    if kind not in TYPES or not (record[1] == VERSION or checked):
        raise WireError(
            "unknown_type",
            f"expected type 1..{len(TYPES)} version {VERSION}, got type {kind} version {record[1]}",
        )
    body = record[10:] if checked else record[2:]
    if checked and xxhash.xxh3_64_digest(record[:2] + body) != record[2:10]:
        raise WireError(
            "undecodable",
            f"expected bytes with the checksum {record[2:10].hex()}, got others: the record is damaged",
        )
    message = TYPES[kind]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError("undecodable", f"expected a {message.DESCRIPTOR.name}: {error}") from None
    return kind, message

"""A consumed record, the same from Kafka, from a file and from a test."""

from __future__ import annotations

from typing import NamedTuple


class Record(NamedTuple):
    topic: str  # without the stack's prefix
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes

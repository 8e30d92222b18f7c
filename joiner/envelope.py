"""The byte layouts that cross between Java and Python; joiner/java/Envelope.java is the other side and draws them."""

from __future__ import annotations

import struct

from joiner.build import Output
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, EVENTS, SAMPLES
from roostream.wire.records import Record

OUTPUTS = (SAMPLES, CORRECTIONS, DEAD_LETTERS)
NOW = -(1 << 63)

_IN = struct.Struct("<BiqqiI")
_OUT = struct.Struct("<Bqi")
_NULL = 0xFFFFFFFF


def unpack(data: bytes) -> Record:
    """What the deserializer packed; a null value stays None in the record."""
    topic, partition, offset, timestamp_ms, key_bytes, value_bytes = _IN.unpack_from(data)
    at = _IN.size + max(key_bytes, 0)
    key = None if key_bytes < 0 else data[_IN.size : at]
    value: bytes = None if value_bytes == _NULL else data[at:]  # type: ignore[assignment]
    return Record(EVENTS[topic], partition, offset, timestamp_ms, key, value)


def pack(output: Output) -> bytes:
    """What the serializer reads."""
    timestamp_ms = NOW if output.timestamp_ms is None else output.timestamp_ms
    return _OUT.pack(OUTPUTS.index(output.topic), timestamp_ms, len(output.key)) + output.key + output.value

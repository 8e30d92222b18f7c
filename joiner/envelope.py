"""The byte layouts exchanged between Java and Python in the Flink job; joiner/java/Envelope.java documents
them."""

from __future__ import annotations

import struct

from joiner.outputs import OUTPUTS, Output
from roostream.runtime.kafka.topics import EVENTS
from roostream.wire.records import Record

NOW = -(1 << 63)

_IN = struct.Struct("<BiqqiI")
_OUT = struct.Struct("<Bqi")
_NULL = 0xFFFFFFFF


def unpack(data: bytes) -> Record:
    """A record packed by the Java deserializer. A null value stays None."""
    topic, partition, offset, timestamp_ms, key_bytes, value_bytes = _IN.unpack_from(data)
    value_at = _IN.size + max(key_bytes, 0)
    key = None if key_bytes < 0 else data[_IN.size : value_at]
    value: bytes = None if value_bytes == _NULL else data[value_at:]  # type: ignore[assignment]
    return Record(EVENTS[topic], partition, offset, timestamp_ms, key, value)


def pack(output: Output) -> bytes:
    """Bytes for the Java serializer."""
    timestamp_ms = NOW if output.timestamp_ms is None else output.timestamp_ms
    return _OUT.pack(OUTPUTS.index(output.topic), timestamp_ms, len(output.key)) + output.key + output.value

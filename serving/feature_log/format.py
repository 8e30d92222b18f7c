"""Bytes of the feature log: segment files of records, readable after any crash of the writing process.

    segment   header (64 bytes) · record · record · … · zeros
    header    magic "ROOLOG1\\0" · version u32 · 0 u32 · number u64 · first sequence u64
              · xxh3 of those 32 bytes u64 · zeros
    record    body bytes u32 · MARK u32 · xxh3 of (sequence u64 ‖ body) u64 · body
              · zeros up to a multiple of 8
    body      topic u8 · key bytes u8 · 0 u16 · partition i32 · timestamp ms i64 · key · value

Little-endian. The first 8 bytes of a record are stored last, so that an incomplete record reads as the end.
The checksum covers what those bytes cannot (half-written pages, damage), and the sequence number, so that old
bytes never pass for a newer record. Pure: buffers in, records out.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import xxhash

from roostream.runtime.kafka.topics import ENGAGEMENTS, IMPRESSIONS

MAGIC, VERSION, MARK = b"ROOLOG1\0", 1, 0x4F4F5253
HEADER_BYTES = 64
TOPICS = (IMPRESSIONS, ENGAGEMENTS)  # indices are stored on disk: append only

_HEADER = struct.Struct("<8sIIQQ")
_PREFIX = struct.Struct("<IIQ")
_BODY = struct.Struct("<BBHiq")
_U64 = struct.Struct("<Q")

Buffer: TypeAlias = bytes | bytearray | mmap.mmap


class LogRecord(NamedTuple):
    """A record for Kafka: to the partition of `key`, or to `partition` if it is not negative."""

    topic: str  # without the deployment's prefix
    partition: int
    timestamp_ms: int
    key: bytes
    value: bytes


class ScannedRecord(NamedTuple):
    """A record and its place in the segment."""

    sequence: int
    next_offset: int
    record: LogRecord | None  # None: damaged and skipped


def record_bytes(record: LogRecord) -> int:
    """Bytes that the record takes in a segment."""
    return _padded(_PREFIX.size + _BODY.size + len(record.key) + len(record.value))


def encode_record(record: LogRecord, sequence: int) -> bytes:
    """`record_bytes(record)` bytes."""
    head = _BODY.pack(TOPICS.index(record.topic), len(record.key), 0, record.partition, record.timestamp_ms)
    body = b"".join((head, record.key, record.value))
    raw = _PREFIX.pack(len(body), MARK, _checksum(sequence, body)) + body
    return raw.ljust(_padded(len(raw)), b"\0")


def encode_header(number: int, first_sequence: int) -> bytes:
    """The first HEADER_BYTES of segment `number`."""
    raw = _HEADER.pack(MAGIC, VERSION, 0, number, first_sequence)
    return (raw + _U64.pack(xxhash.xxh3_64_intdigest(raw))).ljust(HEADER_BYTES, b"\0")


def decode_header(data: Buffer) -> tuple[int, int] | None:
    """Return (number, first sequence), or None if this is not a segment header."""
    raw = bytes(data[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES or raw != encode_header(*_HEADER.unpack_from(raw)[3:]):
        return None
    _, _, _, number, first_sequence = _HEADER.unpack_from(raw)
    return number, first_sequence


def scan(data: Buffer, sequence: int, offset: int = HEADER_BYTES) -> Iterator[ScannedRecord]:
    """Yield the records of a segment from `offset`, whose first has `sequence`, up to the first place without
    a record.

    A damaged record is yielded as None if the record after it is intact. At the end of the segment, damage
    cannot be distinguished from a record that was being written during a crash, and ends the scan.
    """
    while (size := _size_at(data, offset)) is not None:
        record = _record_at(data, offset, sequence)
        if record is None and not _whole_at(data, offset + size, sequence + 1):
            return
        offset += size
        yield ScannedRecord(sequence, offset, record)
        sequence += 1


def _size_at(data: Buffer, offset: int) -> int | None:
    """Padded bytes of the record that starts at `offset`; None if there is none."""
    if offset + _PREFIX.size > len(data):
        return None
    length, mark, _ = _PREFIX.unpack_from(data, offset)
    if mark != MARK or length < _BODY.size or offset + _PREFIX.size + length > len(data):
        return None
    return _padded(_PREFIX.size + length)


def _whole_at(data: Buffer, offset: int, sequence: int) -> bool:
    return _size_at(data, offset) is not None and _record_at(data, offset, sequence) is not None


def _record_at(data: Buffer, offset: int, sequence: int) -> LogRecord | None:
    length, _, checksum = _PREFIX.unpack_from(data, offset)
    body = bytes(data[offset + _PREFIX.size : offset + _PREFIX.size + length])
    if _checksum(sequence, body) != checksum:
        return None
    topic, key_bytes, _, partition, timestamp_ms = _BODY.unpack_from(body)
    end = _BODY.size + key_bytes
    return LogRecord(TOPICS[topic], partition, timestamp_ms, body[_BODY.size : end], body[end:])


def _checksum(sequence: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_U64.pack(sequence) + body)


def _padded(size: int) -> int:
    return -(-size // 8) * 8

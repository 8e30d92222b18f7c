"""The feature log's file format: wherever the writer dies, no complete record is lost, and nothing is read
that was not appended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.feature_log.format import (
    HEADER_BYTES,
    TOPICS,
    LogRecord,
    decode_header,
    encode_header,
    encode_record,
    record_bytes,
    scan,
)

records = st.builds(
    LogRecord,
    topic=st.sampled_from(TOPICS),
    partition=st.integers(-1, 3),
    timestamp_ms=st.integers(-(2**63), 2**63 - 1),
    key=st.sampled_from([b"", b"12345678"]),
    value=st.binary(max_size=60),
)


def segment_of(items: list[LogRecord], sequence: int = 5, room: int = 200) -> tuple[bytes, list[int]]:
    """Return a segment with these records, and the end offset of each record."""
    data, ends = encode_header(1, sequence), []
    for i, record in enumerate(items):
        data += encode_record(record, sequence + i)
        ends.append(len(data))
    return data + bytes(room), ends


@given(st.lists(records, max_size=6))
def test_records_round_trip(items: list[LogRecord]) -> None:
    data, ends = segment_of(items)
    found = list(scan(data, 5))
    assert [f.record for f in found] == items
    assert [f.next_offset for f in found] == ends
    assert [f.sequence for f in found] == list(range(5, 5 + len(items)))
    assert all(len(encode_record(r, 0)) == record_bytes(r) for r in items)


@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_a_truncated_segment_keeps_exactly_the_records_before_the_cut(
    items: list[LogRecord], data: st.DataObject
) -> None:
    raw, ends = segment_of(items, room=0)
    cut = data.draw(st.integers(HEADER_BYTES, len(raw)))
    complete = [r for r, end in zip(items, ends, strict=True) if end <= cut]
    # If only the zeros that pad the last record are cut off, the record itself is complete.
    read = [f.record for f in scan(raw[:cut], 5)]
    assert read[: len(complete)] == complete and read == items[: len(read)]


@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_a_partly_written_record_is_not_read(items: list[LogRecord], data: st.DataObject) -> None:
    """After a crash, any subset of a record's 8-byte words may have been written, but the first word is
    written last.
    """
    raw, ends = segment_of(items)
    start = ends[-2] if len(ends) > 1 else HEADER_BYTES
    torn = bytearray(raw)
    words = range(start, ends[-1], 8)
    lost = data.draw(st.sets(st.sampled_from(words), min_size=1)) | {start}
    for at in lost:
        torn[at : at + 8] = bytes(8)
    assert [f.record for f in scan(torn, 5)] == items[:-1]


@given(st.lists(records, min_size=2, max_size=6), st.data())
def test_a_flipped_bit_never_yields_another_record(items: list[LogRecord], data: st.DataObject) -> None:
    raw, ends = segment_of(items)
    bit = data.draw(st.integers(HEADER_BYTES * 8, ends[-1] * 8 - 1))
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    for found in scan(damaged, 5):
        assert found.record is None or found.record == items[found.sequence - 5]


def test_a_damaged_record_is_skipped_where_the_next_one_is_whole() -> None:
    items = [LogRecord("impressions", -1, i, b"12345678", bytes([i]) * 20) for i in range(3)]
    raw, ends = segment_of(items)
    damaged = bytearray(raw)
    damaged[ends[1] - 9] ^= 0xFF
    assert [f.record for f in scan(damaged, 5)] == [items[0], None, items[2]]


def test_stale_bytes_of_a_reused_segment_are_not_read_as_records() -> None:
    record = LogRecord("engagements", 2, 7, b"", b"x")
    stale = encode_header(1, 0) + encode_record(record, 0) + encode_record(record, 0)
    assert len(list(scan(stale, 0))) == 1


def test_a_truncated_header_is_not_read() -> None:
    header = encode_header(7, 99)
    assert decode_header(header) == (7, 99)
    assert decode_header(header[:-1]) is None
    assert decode_header(bytes(64)) is None
    for at in range(0, 40, 8):
        assert decode_header(header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]) is None

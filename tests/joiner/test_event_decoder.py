"""Decoding of events. Every kind of bad record gives a dead letter with its reason, and none raises an
error."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joiner.outputs import MAX_RAW_BYTES, Output
from joiner.state import Engagement, Impression
from roostream.errors import CheckpointError, RoostreamError, UnavailableError
from roostream.schema.ids import key_bytes
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner.cases import SCHEMA, engagement, impression, make_decoder, record, view_of

T = 1_000


def changed(message: Any, **fields: Any) -> Record:
    """The record of a message after these fields were set in its header or body. The key is made from the
    changed message."""
    for name, value in fields.items():
        setattr(
            message.header
            if name in ("request_id", "surface", "time_ms", "schema", "traceparent")
            else message,
            name,
            value,
        )
    return record(message)


def with_columns(**columns: list[float]) -> Record:
    return record(impression(T, (1, 2), **columns))


GOOD = record(impression(T))
TRUNCATED = GOOD.value[: len(GOOD.value) // 2]

CASES: list[tuple[str, Record, str]] = [
    ("no value", GOOD._replace(value=None), "undecodable"),  # type: ignore[arg-type]
    ("one byte", GOOD._replace(value=b"\x01"), "undecodable"),
    ("half a message", GOOD._replace(value=TRUNCATED), "undecodable"),
    ("not UTF-8", GOOD._replace(value=b"\x01\x01\x0a\x04\x0a\x02\xff\xfe"), "undecodable"),
    ("unknown type", GOOD._replace(value=b"\x63" + GOOD.value[1:]), "unknown_type"),
    ("unknown version", GOOD._replace(value=GOOD.value[:1] + b"\x09" + GOOD.value[2:]), "unknown_type"),
    (
        "a sample on an event topic",
        GOOD._replace(value=wire.encode(wire.SAMPLE, pb.Sample())),
        "unknown_type",
    ),
    ("too many bytes", GOOD._replace(value=GOOD.value + bytes(SCHEMA.limits.max_record_bytes)), "oversized"),
    (
        "too many candidates",
        record(_many := pb.Impression(header=impression(T).header, item_ids=range(1_001))),
        "oversized",
    ),
    ("unknown schema", changed(impression(T), schema=99), "unknown_schema"),
    ("no request id", changed(impression(T), request_id=""), "bad_shape"),
    ("long request id", changed(impression(T), request_id="x" * 65), "bad_shape"),
    ("long surface", changed(impression(T), surface="x" * 65), "bad_shape"),
    ("long traceparent", changed(impression(T), traceparent="0" * 65), "bad_shape"),
    ("another record timestamp", GOOD._replace(timestamp_ms=T + 1), "bad_time"),
    ("no key", GOOD._replace(key=None), "bad_shape"),
    ("another key", GOOD._replace(key=bytes(8)), "bad_shape"),
    (
        "an anonymous request under another request's key",
        record(impression(T, user=0, session=0))._replace(key=key_bytes(0, 0, "q")),
        "bad_shape",
    ),
    ("scores of another length", with_columns(scores=[0.5]), "bad_shape"),
    ("positions of another length", with_columns(positions=[0]), "bad_shape"),
    ("propensities of another length", with_columns(propensities=[0.5]), "bad_shape"),
    ("propensity 0", with_columns(propensities=[0.5, 0.0]), "bad_number"),
    ("negative weight", changed(impression(T), weight=-1.0), "bad_number"),
    ("too large a weight", changed(impression(T), weight=1.1e6), "bad_number"),
    ("infinite score", with_columns(scores=[float("inf")] * 8), "non_finite"),
    ("NaN propensity", with_columns(propensities=[0.5, float("nan")]), "non_finite"),
    ("infinite weight", changed(impression(T), weight=float("inf")), "non_finite"),
    ("damaged RO block", changed(impression(T), ro=b"\xff\xff"), "undecodable"),
    (
        "NRO block of other rows",
        changed(impression(T, (1, 2)), nro=impression(T, (1, 2, 3)).nro),
        "bad_shape",
    ),
    ("no event id", changed(engagement(T, event=1), event_id=0), "bad_shape"),
    ("no action", changed(engagement(T, event=1), action=""), "bad_shape"),
    ("infinite value", changed(engagement(T, event=1), value=float("inf")), "non_finite"),
    ("NaN value", changed(engagement(T, event=1), value=float("nan")), "non_finite"),
]


@pytest.mark.parametrize(
    ("time_ms", "is_event"),
    [(0, False), (1, True), (253_402_300_799_999, True), (253_402_300_800_000, False)],
)
def test_times_from_1970_to_9999_are_accepted(time_ms: int, is_event: bool) -> None:
    assert (
        isinstance(
            make_decoder().decode(changed(impression(T), time_ms=time_ms)._replace(timestamp_ms=time_ms)),
            Impression,
        )
        is is_event
    )


@pytest.mark.parametrize(("bad", "reason"), [pytest.param(r, reason, id=name) for name, r, reason in CASES])
def test_a_bad_record_becomes_a_dead_letter_with_its_reason(bad: Record, reason: str) -> None:
    found = make_decoder().decode(bad)
    assert isinstance(found, Output) and (found.topic, found.reason) == ("dead_letters", reason)
    m = view_of(found).message
    assert (m.topic, m.partition, m.offset, m.raw_bytes) == (
        bad.topic,
        bad.partition,
        bad.offset,
        len(bad.value or b""),
    )
    assert m.error and "\n" not in m.error


def test_valid_events_are_decoded() -> None:
    shown, acted = (
        make_decoder().decode(GOOD),
        make_decoder().decode(record(engagement(T, 2, event=7, value=2.5))),
    )
    assert isinstance(shown, Impression) and (shown.request_id, shown.page.items, shown.raw) == (
        "r",
        struct.pack("<2Q", 1, 2),
        GOOD.value,
    )
    assert isinstance(acted, Engagement) and (acted.event_id, acted.item_id, acted.value) == (7, 2, 2.5)


@pytest.mark.parametrize("message", [pb.Heartbeat(time_ms=T), pb.EndMarker(time_ms=T)])
def test_heartbeats_and_end_markers_are_decoded_as_such(message: Any) -> None:
    assert make_decoder().decode(record(message)) == message


def test_a_dead_letter_carries_a_bounded_part_of_a_large_record_and_the_ids_that_could_be_read() -> None:
    large = GOOD._replace(value=GOOD.value + bytes(SCHEMA.limits.max_record_bytes))
    m = view_of(make_decoder().decode(large)).message  # type: ignore[arg-type]
    assert len(m.raw) == MAX_RAW_BYTES and m.raw_bytes == len(large.value)
    m = view_of(make_decoder().decode(changed(engagement(T, event=7), action=""))).message  # type: ignore[arg-type]
    assert (m.event_id, m.request_id) == (7, "r")
    m = view_of(make_decoder().decode(changed(impression(T), schema=99))).message  # type: ignore[arg-type]
    assert (m.event_id, m.request_id) == (0, "r")


@pytest.mark.parametrize(
    "key", [None, b"", b"1234567", bytes((4 << 20) - 120)], ids=["none", "empty", "7 bytes", "4 MiB"]
)
def test_an_invalid_key_is_not_copied_to_the_dead_letter(key: bytes | None) -> None:
    dead = make_decoder().decode(GOOD._replace(key=key, value=b"\x01"))
    assert isinstance(dead, Output) and dead.key == bytes(8)


def test_dead_letters_have_a_bounded_size() -> None:
    """The name of a request is as long as its record, and an error message may contain the bytes that are
    wrong."""
    long_name = make_decoder().decode(changed(impression(T), request_id="x" * 500_000))
    assert isinstance(long_name, Output)
    assert len(long_name.value) < MAX_RAW_BYTES + 1_000
    assert not view_of(long_name).message.request_id

    def fail_with_long_message(fingerprint: int) -> None:
        raise UnicodeDecodeError("utf-8", bytes(1_000_000), 0, 1, "a text of its own")

    found = make_decoder()
    found.registry = fail_with_long_message  # type: ignore[assignment]
    dead = found.decode(GOOD)
    assert isinstance(dead, Output) and len(dead.value) < 2_000


def test_anonymous_events_are_keyed_by_request() -> None:
    anonymous = {"user": 0, "session": 0}
    shown = make_decoder().decode(record(impression(T, request="a", **anonymous)))  # type: ignore[arg-type]
    acted = make_decoder().decode(record(engagement(T, request="a", event=1, **anonymous)))
    assert isinstance(shown, Impression) and isinstance(acted, Engagement)


@pytest.mark.parametrize(
    "error", [CheckpointError("the schema file is damaged"), UnavailableError("the mount is gone")]
)
def test_a_schema_that_can_not_be_read_now_makes_no_dead_letter(error: RoostreamError) -> None:
    def fail(fingerprint: int) -> None:
        raise error

    found = make_decoder()
    found.registry = fail  # type: ignore[assignment]
    with pytest.raises(type(error), match=str(error)):
        found.decode(GOOD)


def test_a_registry_with_a_defect_costs_the_record_and_not_the_partition() -> None:
    def fail(fingerprint: int) -> None:
        raise KeyError(fingerprint)

    found = make_decoder()
    found.registry = fail  # type: ignore[assignment]
    dead = found.decode(GOOD)
    assert isinstance(dead, Output) and dead.reason == "undecodable"


@settings(max_examples=150)
@given(st.data())
def test_any_bytes_give_an_event_or_a_dead_letter(data: Any) -> None:
    """Random bytes, and good records with changed bytes."""
    value = bytearray(data.draw(st.sampled_from([GOOD.value, record(engagement(T, event=1)).value])))
    for at in data.draw(st.lists(st.integers(0, len(value) - 1), max_size=4)):
        value[at] = data.draw(st.integers(0, 255))
    mixed = data.draw(st.sampled_from([bytes(value), data.draw(st.binary(max_size=40))]))
    found = make_decoder().decode(GOOD._replace(value=mixed))
    assert isinstance(found, (Output, Impression, Engagement, pb.Heartbeat, pb.EndMarker))

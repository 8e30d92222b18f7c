"""What a sample may not be: damage, row by row and at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import WireError
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.wire.decode_reference import check_reference, decoder, same_as_reference, valid

Samples = Callable[[int], list[pb.Sample]]
ToRecord = Callable[..., Record]


def damaged_nro(**changes: Any) -> Callable[[pb.Sample], None]:
    def change(s: pb.Sample) -> None:
        block = pb.Block.FromString(s.parts[0].nro)
        for name, value in changes.items():
            if name == "missing":
                block.missing = value
            else:
                getattr(block, name)[:] = value
        s.parts[0].nro = block.SerializeToString()

    return change


def damaged_ro(weights: list[float]) -> Callable[[pb.Sample], None]:
    def change(s: pb.Sample) -> None:
        block = pb.Block.FromString(s.ro)
        block.weights[:] = weights
        s.ro = block.SerializeToString()

    return change


def setter(**changes: Any) -> Callable[[pb.Sample], None]:
    def change(s: pb.Sample) -> None:
        for name, value in changes.items():
            if name == "weight":
                s.weight = value
            elif name == "ro":
                s.ro = value
            else:
                getattr(s, name)[:] = value

    return change


def event(candidate: int = 0, action: int = 0, value: float = 1.0) -> Callable[[pb.Sample], None]:
    columns = {
        "event_candidates": [candidate],
        "event_actions": [action],
        "event_values": [value],
        "event_times": [1],
    }
    return setter(event_ids=[1], **columns)


def part(**changes: Any) -> Callable[[pb.Sample], None]:
    def change(s: pb.Sample) -> None:
        if "num_rows" in changes:
            s.parts[0].num_rows = changes["num_rows"]
        if "rows" in changes:
            s.parts[0].rows[:] = changes["rows"]

    return change


INF, NAN = float("inf"), float("nan")
DAMAGE = [
    ("labels for another number of candidates", setter(labels=[0.0] * 3), "bad_shape"),
    ("labels before for another number", setter(labels_before=[0.0]), "bad_shape"),
    ("scores for another number", setter(scores=[0.5]), "bad_shape"),
    ("positions for another number", setter(positions=[1]), "bad_shape"),
    ("a position beyond int32", setter(positions=[1, 1 << 31]), "bad_shape"),
    ("propensities for another number", setter(propensities=[1.0]), "bad_shape"),
    ("more items than rows", setter(item_ids=[1, 2, 3], labels=[0.0] * 6), "bad_shape"),
    ("rows that don't ascend", part(rows=[1, 1]), "bad_shape"),
    ("rows beyond the block", part(rows=[0, 2]), "bad_shape"),
    ("more rows than the block has", part(num_rows=3, rows=[0, 1]), "bad_shape"),
    ("more rows than a request may have", part(num_rows=0xFFFFFFFF, rows=[0, 1]), "oversized"),
    ("an event without a time", setter(event_ids=[1]), "bad_shape"),
    ("an event of no candidate", event(candidate=2), "bad_shape"),
    ("an event of no action", event(action=1), "bad_shape"),
    ("an infinite event value", event(value=INF), "non_finite"),
    ("an infinite label", setter(labels=[0, 0, INF, 0]), "non_finite"),
    ("a NaN label", setter(labels=[0, 0, NAN, 0]), "non_finite"),
    ("a NaN label before", setter(labels_before=[0, 0, NAN, 0]), "non_finite"),
    ("an infinite score", setter(scores=[0, 0, INF, 0]), "non_finite"),
    ("a NaN propensity", setter(propensities=[1, NAN]), "non_finite"),
    ("a NaN weight", setter(weight=NAN), "non_finite"),
    ("a negative weight", setter(weight=-1.0), "bad_number"),
    ("a weight beyond its bound", setter(weight=1.1e6), "bad_number"),
    ("a propensity of 0", setter(propensities=[1, 0]), "bad_number"),
    ("a propensity of minus 0", setter(propensities=[1, -0.0]), "bad_number"),
    ("a negative propensity", setter(propensities=[-0.5, 1]), "bad_number"),
    ("a propensity above 1", setter(propensities=[1, 1.001]), "bad_number"),
    ("a list weight beyond its bound", damaged_ro(weights=[1.1e6]), "bad_number"),
    ("a list weight beyond its bound below 0", damaged_ro(weights=[-3e38]), "bad_number"),
    ("an infinite list weight", damaged_ro(weights=[INF]), "non_finite"),
    ("an infinite float", damaged_nro(floats=[1.0, INF]), "non_finite"),
    ("a float too few", damaged_nro(floats=[1.0]), "bad_shape"),
    ("a length too few", damaged_nro(lengths=[1, 0, 0, 1, 0]), "bad_shape"),
    ("lengths that sum to more", damaged_nro(lengths=[1, 0, 0, 2, 0, 0], missing=b""), "bad_shape"),
    ("an id too many", damaged_nro(ids=[1, 2, 3]), "bad_shape"),
    ("a weight too many", damaged_nro(weights=[1.0]), "bad_shape"),
    ("a time too many", damaged_nro(times=[1]), "bad_shape"),
    ("more missing bits than lists", damaged_nro(missing=b"\0\0"), "bad_shape"),
    ("a missing list with entries", damaged_nro(missing=b"\1"), "bad_shape"),
    ("a list beyond the cap", damaged_nro(lengths=[1, 0, 0, 31, 0, 0], ids=range(32), missing=b""), "oversized"),
    ("a block that is no message", setter(ro=b"\x0a\x05ab"), "undecodable"),
    ("another schema", lambda s: s.header.__setattr__("schema", 5), "unknown_schema"),
    ("too many candidates", lambda s: (s.item_ids.__setitem__(slice(None), range(41)), s.labels.extend([0.0] * 78)), "oversized"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change", "reason"), DAMAGE, ids=[d[0] for d in DAMAGE])
def test_a_damaged_sample_is_rejected_and_its_neighbors_are_kept(
    schema: Schema, what: str, change: Callable[[pb.Sample], Any], reason: str, to_record: ToRecord
) -> None:
    bad = valid(schema)
    change(bad)
    batch, rejects = decoder(schema).decode(
        [to_record(valid(schema), 0), to_record(bad, 1), to_record(valid(schema), 2)]
    )
    assert [(r.index, r.reason) for r in rejects] == [(1, reason)], rejects
    assert rejects[0].reason in wire.REASONS and len(rejects[0].error) > 20
    assert batch.offset_R.tolist() == [0, 2]
    same_as_reference(schema, batch, [valid(schema), valid(schema)])
    with pytest.raises(WireError) as refusal:
        check_reference(schema, wire.encode(wire.SAMPLE, bad))
    assert refusal.value.reason == reason


def test_weights_and_propensities_at_their_bounds_are_accepted(schema: Schema, to_record: ToRecord) -> None:
    changes = [
        setter(weight=wire.MAX_WEIGHT),
        setter(weight=0.0),
        setter(weight=-0.0),
        setter(propensities=[1.0, 1e-30]),
    ]
    changes += [
        damaged_ro(weights=[wire.MAX_WEIGHT]),
        damaged_ro(weights=[-wire.MAX_WEIGHT]),
        damaged_ro(weights=[0.0]),
    ]
    made = [valid(schema) for _ in changes]
    for sample, change in zip(made, changes, strict=True):
        change(sample)
    batch, rejects = decoder(schema).decode([to_record(sample, n) for n, sample in enumerate(made)])
    assert rejects == []
    same_as_reference(schema, batch, made)


def test_the_close_time_of_a_sample_is_its_records_timestamp(schema: Schema, to_record: ToRecord) -> None:
    late = to_record(valid(schema))._replace(timestamp_ms=7)
    batch, (reject,) = decoder(schema).decode([late, to_record(valid(schema), 1)])
    assert (reject.index, reject.reason) == (
        0,
        "bad_time",
    ) and "timestamp 7, got close time 0" in reject.error
    assert batch.offset_R.tolist() == [1]
    correction = to_record(valid(schema), 0, wire.CORRECTION)._replace(timestamp_ms=7)
    assert decoder(schema).decode([correction], corrections=True)[0].num_requests == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "undecodable"),
        (b"", "undecodable"),
        (b"\x03", "undecodable"),
        (b"\x03\x02", "unknown_type"),
        (b"\x01\x01", "unknown_type"),
        (b"\x03\x01\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "undecodable"),
        (b"\x03\x01\xff", "undecodable"),
        (b"\x03\x01\x00\x00", "undecodable"),
        (b"\x03\x01" + bytes(4 << 20), "oversized"),
    ],
)
def test_records_that_are_not_samples_are_rejected(schema: Schema, value: bytes | None, reason: str) -> None:
    batch, rejects = decoder(schema).decode([Record("", 0, 0, 0, None, value)])  # type: ignore[arg-type]
    assert [r.reason for r in rejects] == [reason] and batch.num_requests == 0


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "delete"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=9),
    ),
    max_size=3,
)


def mutated(value: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    for what, where, data in edits:
        at = int(where * len(value))
        if what == "flip":
            value = value[:at] + data + value[at + len(data) :]
        elif what == "cut":
            value = value[:at]
        elif what == "insert":
            value = value[:at] + data + value[at:]
        else:
            value = value[:at] + value[at + len(data) :]
    return value


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 200), edits=EDITS)
def test_mutated_bytes_are_read_like_protobuf_or_rejected(
    schema_and_maker: Any, seed: int, edits: Any
) -> None:
    schema, make = schema_and_maker
    made = make(schema, seed)
    value = mutated(wire.encode(wire.SAMPLE, made), edits)
    batch, rejects = decoder(schema).decode([Record("", 0, 0, made.close_ms, None, value)])
    try:
        expected = check_reference(schema, value)
        if expected.close_ms != made.close_ms:
            raise WireError("bad_time", "its record's timestamp is another")
    except WireError as error:
        assert [r.reason in wire.REASONS for r in rejects] == [True], (error.reason, rejects)
        return
    assert rejects == []
    same_as_reference(schema, batch, [expected])


@pytest.fixture(scope="module")
def schema_and_maker(schema: Schema, samples: Samples) -> tuple[Schema, Callable[[Schema, int], pb.Sample]]:
    made = samples(201)
    return schema, lambda _, seed: made[seed]

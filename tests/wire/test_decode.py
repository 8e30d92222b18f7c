"""The decoder's kernels equal the reference implementation in decode_reference.py: for valid samples, for
unusual encodings, and in the reasons for which they reject samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import CheckpointError, SchemaError, WireError
from roostream.schema.schema import Label, Schema, reading_plan
from roostream.wire import decode, decode_scan
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder, precompile
from roostream.wire.records import Record
from tests.wire.decode_reference import assert_equals_reference, check_reference, make_decoder, valid_sample
from tests.wire.sample_builders import parse_schema

Samples = Callable[[int], list[pb.Sample]]
ToRecord = Callable[..., Record]


def test_decoded_records_equal_the_reference(schema: Schema, samples: Samples, to_record: ToRecord) -> None:
    made_samples = samples(60)
    decoder = make_decoder(schema)
    batch, rejects = decoder.decode([to_record(s, i) for i, s in enumerate(made_samples)])
    assert rejects == []
    assert batch.offset_R.tolist() == list(range(60))
    assert batch.partition_R.tolist() == [i % 4 for i in range(60)]
    assert not batch.correction_R.any() and np.isnan(batch.label_before_BT).all()
    assert_equals_reference(schema, batch, made_samples)


def test_a_request_may_have_no_candidates_and_no_ro_block(schema: Schema, to_record: ToRecord) -> None:
    batch, _ = make_decoder(schema).decode(
        [to_record(pb.Sample(header=pb.Header(schema=schema.fingerprint)))]
    )
    assert (batch.num_requests, batch.num_candidates) == (1, 0)
    assert batch.ro_float_RF.tolist() == [[-1.0, 0.0]]
    assert not batch.ro_present_RF.any()
    assert not batch.ro_lists.present_KN.any()


def encode_unpacked(number: int, wire_type: int, elements: list[bytes]) -> bytes:
    return b"".join(bytes((number << 3 | wire_type,)) + e for e in elements)


def equivalent_encodings(sample: pb.Sample) -> dict[str, bytes]:
    """Encode the same sample in unusual forms that protobuf reads as equal. The fast path of the kernels
    handles none of them."""
    whole = sample.SerializeToString(deterministic=True)
    items = [i.to_bytes(8, "little") for i in sample.item_ids]
    without_items = pb.Sample()
    without_items.CopyFrom(sample)
    del without_items.item_ids[:]
    rest = without_items.SerializeToString(deterministic=True)
    long_text = pb.Sample()
    long_text.CopyFrom(sample)
    long_text.header.surface = "größe"
    split = pb.Sample()
    split.CopyFrom(sample)
    block = pb.Block.FromString(sample.parts[0].nro)
    first = pb.Block(floats=list(block.floats)[:1])
    del block.floats[:1]
    split.parts[0].nro = first.SerializeToString() + block.SerializeToString()
    return {
        "unpacked ids": encode_unpacked(6, 1, items) + rest,
        "ids in two packed pieces": pb.Sample(item_ids=sample.item_ids[:1]).SerializeToString()
        + pb.Sample(item_ids=sample.item_ids[1:]).SerializeToString()
        + rest,
        "a header twice": pb.Sample(header=pb.Header(time_ms=1)).SerializeToString() + whole,
        "unknown fields before, as a group too": b"\xfb\x07\xfc\x07" + whole,
        "text that isn't ASCII": long_text.SerializeToString(),
        "a block's column in two pieces": split.SerializeToString(),
        "a tag of two bytes where one would do": whole[:1].replace(b"\x0a", b"\x8a\x00") + whole[1:],
    }


def test_every_encoding_that_protobuf_accepts_is_read_alike(schema: Schema, samples: Samples) -> None:
    sample = next(s for s in samples(60) if len(s.item_ids) > 2 and s.parts[0].nro)
    plain, _ = make_decoder(schema).decode(
        [Record("", 0, 0, sample.close_ms, None, wire.encode(wire.SAMPLE, sample))]
    )
    for form, body in equivalent_encodings(sample).items():
        value = bytes((wire.SAMPLE, wire.VERSION)) + body
        batch, rejects = make_decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, value)])
        assert rejects == [], (form, rejects)
        assert_equals_reference(schema, batch, [sample])
        assert batch.item_B.tolist() == plain.item_B.tolist(), form


@pytest.mark.parametrize(
    ("surface", "expected"),
    [("home", b"home"), ("", b""), ("größe", "größe".encode()), ("x" * 99, b"x" * 64)],
)
def test_a_batch_has_the_surface_of_each_request(
    schema: Schema, samples: Samples, surface: str, expected: bytes
) -> None:
    sample, other = samples(2)
    sample.header.surface = surface
    records = [
        Record("", 0, n, s.close_ms, None, wire.encode(wire.SAMPLE, s)) for n, s in enumerate((other, sample))
    ]
    batch, rejects = make_decoder(schema).decode(records)
    assert rejects == [] and batch.surface_R.tolist() == [b"home", expected]


OLD = """
[tables.item]
dim = 8
[tables.tag]
dim = 4
[[ro]]
name = "gone"
[[ro]]
name = "gap"
[[ro]]
name = "old_tags"
kind = "weighted_ids"
table = "tag"
[[ro]]
name = "tags"
kind = "weighted_ids"
table = "tag"
[[nro]]
name = "old_seen"
kind = "sequence"
table = "item"
columns = { time = "time_ms" }
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[label]]
name = "share"
action = "share"
[[label]]
name = "dwell"
action = "read"
fold = "max"
"""


def test_samples_of_an_older_schema_lack_new_features_and_skip_removed_ones(
    schema: Schema, to_record: ToRecord
) -> None:
    old = parse_schema(OLD)
    two = {"ids": [7, 8], "weights": [0.5, 0.25]}
    sample = pb.Sample(
        header=pb.Header(schema=old.fingerprint),
        ro=encode_ro(old, {"gone": 1.0, "gap": 2.0, "old_tags": {"ids": [9], "weights": [9.0]}, "tags": two}),
        item_ids=[5],
        parts=[
            pb.Part(
                nro=encode_nro(old, {"old_seen": [{"item": [1, 2], "time": [3, 4]}], "item": [[6]]}, 1),
                num_rows=1,
            )
        ],
        labels=[1.0, 30.0],
    )
    decoder = make_decoder(schema, old)
    batch, rejects = decoder.decode([to_record(valid_sample(schema), 0), to_record(sample, 1)])
    assert rejects == []
    batch = batch.take_requests(np.array([1]))
    assert batch.ro_float_RF.tolist() == [[-1.0, 2.0]] and batch.ro_present_RF.tolist() == [[False, True]]
    assert batch.ro_lists.values_of("tags").tolist() == [7, 8]
    assert batch.ro_lists.weights_of("tags").tolist() == [0.5, 0.25]  # type: ignore[union-attr]
    assert not batch.ro_lists.present_KN[batch.ro_lists.index("history")].any()
    assert batch.nro_lists.values_of("item").tolist() == [6]
    assert batch.label_BT.tolist() == [[0.0, 30.0]] and batch.weight_BT.tolist() == [[0.0, 1.0]]


def test_a_changed_kind_and_an_unknown_schema_are_rejected_with_the_reason(
    schema: Schema, to_record: ToRecord
) -> None:
    changed = parse_schema(OLD.replace('name = "gap"', 'name = "hour"\nkind = "ids"\ntable = "item"'))
    sample = pb.Sample(header=pb.Header(schema=changed.fingerprint))
    decoder = make_decoder(schema, changed)
    for _ in range(2):
        _, rejects = decoder.decode([to_record(sample), to_record(pb.Sample(header=pb.Header(schema=99)))])
        assert [r.reason for r in rejects] == ["unknown_schema"] * 2
        assert "'hour': expected kind 'float'" in rejects[0].error and "0000000000000063" in rejects[1].error
    with pytest.raises(SchemaError):
        decoder.plans.number_of(changed.fingerprint)


def test_corrections_are_decoded_only_on_request(schema: Schema, to_record: ToRecord) -> None:
    correction = valid_sample(schema)
    bare = pb.Sample(header=pb.Header(schema=schema.fingerprint), untrainable=True)
    correction.labels_before[:] = [0.0, 1.0, 0.0, 0.0]
    records = [
        to_record(valid_sample(schema), 0),
        *(to_record(s, i, wire.CORRECTION) for i, s in enumerate((correction, bare), 1)),
    ]
    decoder = make_decoder(schema)
    batch, rejects = decoder.decode(records)
    assert batch.offset_R.tolist() == [0] and rejects == []
    batch, rejects = decoder.decode(records, corrections=True)
    assert batch.offset_R.tolist() == [0, 1] and rejects == []
    assert batch.correction_R.tolist() == [False, True]
    np.testing.assert_array_equal(batch.label_before_BT, [[np.nan] * 2, [np.nan] * 2, [0, 1], [0, 0]])
    alone = batch.take_requests(np.array([1]))
    assert alone.correction_R.tolist() == [True] and alone.label_before_BT.tolist() == [[0, 1], [0, 0]]
    assert batch.expand().correction_R.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("kind", "labels", "expected_reasons"),
    [(wire.CORRECTION, 2, []), (wire.CORRECTION, 1, ["bad_shape"]), (wire.SAMPLE, 2, ["bad_shape"])],
)
def test_only_an_untrainable_correction_may_lack_features(
    schema: Schema, to_record: ToRecord, kind: int, labels: int, expected_reasons: list[str]
) -> None:
    message = pb.Sample(header=pb.Header(schema=schema.fingerprint), untrainable=True, item_ids=[7])
    message.labels[:] = [1.0] * labels
    _, rejects = make_decoder(schema).decode([to_record(message, 0, kind)], corrections=True)
    assert [r.reason for r in rejects] == expected_reasons


def test_a_request_is_decoded_like_its_later_sample(schema: Schema, to_record: ToRecord) -> None:
    sample = valid_sample(schema)
    decoder = make_decoder(schema)
    trained, _ = decoder.decode([to_record(sample)])
    served = decoder.decode_request(sample.ro, sample.parts[0].nro, np.array([1, 2]), 123)
    for name in ("ro_float_RF", "ro_present_RF", "nro_float_BF", "nro_present_BF", "item_B"):
        assert getattr(served, name).tobytes() == getattr(trained, name).tobytes()
    for side in ("ro_lists", "nro_lists"):
        assert getattr(served, side).values.tobytes() == getattr(trained, side).values.tobytes()
        assert getattr(served, side).lengths_KN.tobytes() == getattr(trained, side).lengths_KN.tobytes()
    assert served.time_ms_R.tolist() == [123] and served.offset_R.tolist() == [-1]
    assert decoder.decode_request(None, b"", np.zeros(0, np.int64), 1).num_candidates == 0


def test_an_unreadable_request_is_rejected_with_the_reason(schema: Schema) -> None:
    decoder = make_decoder(schema)
    with pytest.raises(WireError) as error:
        decoder.decode_request(None, encode_nro(schema, {"age": [1.0]}, 1), np.array([1, 2]), 1)
    assert error.value.reason == "bad_shape"
    with pytest.raises(WireError) as error:
        decoder.decode_request(b"\x0a", b"", np.array([1]), 1)
    assert error.value.reason == "undecodable"
    with pytest.raises(WireError, match="at most 40 candidates, got 41") as error:
        decoder.decode_request(None, b"", np.arange(41), 1)
    assert error.value.reason == "oversized"
    with pytest.raises(WireError, match="ro block") as error:
        decoder.decode_request(
            pb.Block(floats=[float("inf"), 0.0], lengths=[0] * 3).SerializeToString(), b"", np.array([1]), 1
        )
    assert error.value.reason in ("non_finite", "bad_shape")


def test_precompile_covers_every_kernel_and_shape(
    schema: Schema, samples: Samples, to_record: ToRecord
) -> None:
    modules = (decode_scan, decode)
    kernels = {
        k: v for module in modules for k, v in vars(module).items() if hasattr(v, "nopython_signatures")
    }
    precompile()
    before = {name: len(kernel.nopython_signatures) for name, kernel in kernels.items()}
    made_samples = [to_record(s) for s in samples(30)]
    bare = parse_schema('[[label]]\nname = "c"\naction = "c"')
    for decoder in (make_decoder(schema), make_decoder(bare, schema)):
        for count in (0, 1, 2, 30):
            decoder.decode(made_samples[:count], corrections=True)
    assert {name: len(kernel.nopython_signatures) for name, kernel in kernels.items()} == before
    assert len(kernels) > 20


CLICK, DWELL = Label(name="click", action="click"), Label(name="dwell", action="read", fold="max")
SCHEMA = Schema(labels=(CLICK, DWELL))


def record(body: bytes, close_ms: int = 0) -> Record:
    return Record("samples", 0, 0, close_ms, None, bytes((wire.SAMPLE, wire.VERSION)) + body)


def sample(schema: Schema = SCHEMA, **fields: object) -> pb.Sample:
    fields = {"item_ids": [1], "labels": [1.0, 30.0], "parts": [pb.Part(num_rows=1)]} | fields
    return pb.Sample(header=pb.Header(schema=schema.fingerprint), **fields)  # type: ignore[arg-type]


def reject_reasons(body: bytes) -> list[str]:
    _, rejects = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get).decode([record(body)])
    return [reject.reason for reject in rejects]


def column(number: int, payload: bytes) -> bytes:
    return bytes((number << 3 | 2, len(payload))) + payload


NUM_ROWS = pb.Part.DESCRIPTOR.fields_by_name["num_rows"].number
PARTS = pb.Sample.DESCRIPTOR.fields_by_name["parts"].number


def test_a_number_of_rows_beyond_32_bits_is_read_like_protobuf() -> None:
    rows = b"\x81\x80\x80\x80\x10"  # 2^32 + 1
    body = sample(parts=[]).SerializeToString()
    part = column(PARTS, bytes((NUM_ROWS << 3,)) + rows)
    whole = pb.Sample.FromString(body + part)
    assert whole.parts[0].num_rows == 1
    batch, rejects = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get).decode([record(body + part)])
    assert rejects == [] and batch.item_B.tolist() == [1] and batch.label_BT.tolist() == [[1.0, 30.0]]


@pytest.mark.parametrize("field", ["request_id", "surface", "model_version", "action"])
@pytest.mark.parametrize(
    "text",
    [b"gr\xc3\xb6\xc3\x9fe", b"\xff", b"\xc3", b"\xed\xa0\x80"],
    ids=["größe", "byte", "cut", "surrogate"],
)
def test_text_is_utf_8_or_the_sample_is_undecodable(field: str, text: bytes) -> None:
    placeholder = "x" * len(text)
    whole = sample(actions=[placeholder]) if field == "action" else sample()
    if field != "action":
        setattr(whole.header, field, placeholder)
    good = text.startswith(b"gr")
    assert reject_reasons(whole.SerializeToString().replace(placeholder.encode(), text)) == (
        [] if good else ["undecodable"]
    )


@given(st.binary(max_size=6) | st.text(max_size=4).map(str.encode))
def test_the_utf_8_check_equals_that_of_python(data: bytes) -> None:
    try:
        data.decode()
        expected = True
    except UnicodeDecodeError:
        expected = False
    assert (
        decode_scan.is_utf8(np.frombuffer(b"\x80" + data + b"\x80", np.uint8), 1, 1 + len(data)) == expected
    )


@pytest.mark.parametrize(
    "change", [{"action": "open"}, {"fold": "sum"}, {"window_ms": 5}, {"threshold": 2.0}]
)
def test_a_label_with_a_changed_meaning_is_rejected(change: dict[str, object]) -> None:
    writer = Schema(labels=(CLICK, dataclasses.replace(DWELL, **change)))
    decoder = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA, writer.fingerprint: writer}.get)
    batch, rejects = decoder.decode(
        [record(sample(writer).SerializeToString()), record(sample().SerializeToString())]
    )
    assert [reject.reason for reject in rejects] == ["unknown_schema"] and batch.item_B.tolist() == [1]
    (key,) = change
    assert rejects[0].error.startswith(
        f"label 'dwell': expected {key} {getattr(DWELL, key)!r} (schema in use), got {change[key]!r}"
    )
    assert rejects[0].error.endswith("give the changed label a new name")


def test_the_prior_of_a_label_may_change() -> None:
    writer = Schema(labels=(dataclasses.replace(CLICK, prior=0.3),))
    assert reading_plan(writer, SCHEMA)["label"] == [0]


def test_a_damaged_schema_rejects_only_its_own_samples() -> None:
    def registry(fingerprint: int) -> Schema | None:
        if fingerprint != SCHEMA.fingerprint:
            raise CheckpointError("schema 5 can't be read: damaged")
        return SCHEMA

    other = pb.Sample(header=pb.Header(schema=5)).SerializeToString()
    batch, rejects = Decoder(SCHEMA, registry).decode([record(other), record(sample().SerializeToString())])
    assert [(reject.reason, reject.error) for reject in rejects] == [
        ("unknown_schema", "schema 5 can't be read: damaged")
    ]
    assert batch.item_B.tolist() == [1]


Change = Callable[[pb.Sample], None]


def assign(message: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, list | range):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)


def change_sample(**fields: Any) -> Change:
    return lambda s: assign(s, fields)


def change_part(**fields: Any) -> Change:
    return lambda s: assign(s.parts[0], fields)


def change_nro(**fields: Any) -> Change:
    def change(s: pb.Sample) -> None:
        block = pb.Block.FromString(s.parts[0].nro)
        assign(block, fields)
        s.parts[0].nro = block.SerializeToString()

    return change


def change_ro(weights: list[float]) -> Change:
    def change(s: pb.Sample) -> None:
        block = pb.Block.FromString(s.ro)
        block.weights[:] = weights
        s.ro = block.SerializeToString()

    return change


def set_event(candidate: int = 0, action: int = 0, value: float = 1.0) -> Change:
    return change_sample(
        event_ids=[1],
        event_candidates=[candidate],
        event_actions=[action],
        event_values=[value],
        event_times=[1],
    )


INF, NAN = float("inf"), float("nan")


DAMAGE = [
    ("labels for another number of candidates", change_sample(labels=[0.0] * 3), "bad_shape"),
    ("labels before for another number", change_sample(labels_before=[0.0]), "bad_shape"),
    ("scores for another number", change_sample(scores=[0.5]), "bad_shape"),
    ("positions for another number", change_sample(positions=[1]), "bad_shape"),
    ("a position beyond int32", change_sample(positions=[1, 1 << 31]), "bad_shape"),
    ("propensities for another number", change_sample(propensities=[1.0]), "bad_shape"),
    ("more items than rows", change_sample(item_ids=[1, 2, 3], labels=[0.0] * 6), "bad_shape"),
    ("rows that don't ascend", change_part(rows=[1, 1]), "bad_shape"),
    ("rows beyond the block", change_part(rows=[0, 2]), "bad_shape"),
    ("more rows than the block has", change_part(num_rows=3, rows=[0, 1]), "bad_shape"),
    ("more rows than a request may have", change_part(num_rows=0xFFFFFFFF, rows=[0, 1]), "oversized"),
    ("an event without a time", change_sample(event_ids=[1]), "bad_shape"),
    ("an event of no candidate", set_event(candidate=2), "bad_shape"),
    ("an event of no action", set_event(action=1), "bad_shape"),
    ("an infinite event value", set_event(value=INF), "non_finite"),
    ("an infinite label", change_sample(labels=[0, 0, INF, 0]), "non_finite"),
    ("a NaN label", change_sample(labels=[0, 0, NAN, 0]), "non_finite"),
    ("a NaN label before", change_sample(labels_before=[0, 0, NAN, 0]), "non_finite"),
    ("an infinite score", change_sample(scores=[0, 0, INF, 0]), "non_finite"),
    ("a NaN propensity", change_sample(propensities=[1, NAN]), "non_finite"),
    ("a NaN weight", change_sample(weight=NAN), "non_finite"),
    ("a negative weight", change_sample(weight=-1.0), "bad_number"),
    ("a weight beyond its bound", change_sample(weight=1.1e6), "bad_number"),
    ("a propensity of 0", change_sample(propensities=[1, 0]), "bad_number"),
    ("a propensity of minus 0", change_sample(propensities=[1, -0.0]), "bad_number"),
    ("a negative propensity", change_sample(propensities=[-0.5, 1]), "bad_number"),
    ("a propensity above 1", change_sample(propensities=[1, 1.001]), "bad_number"),
    ("a list weight beyond its bound", change_ro(weights=[1.1e6]), "bad_number"),
    ("a list weight beyond its bound below 0", change_ro(weights=[-3e38]), "bad_number"),
    ("an infinite list weight", change_ro(weights=[INF]), "non_finite"),
    ("an infinite float", change_nro(floats=[1.0, INF]), "non_finite"),
    ("a float too few", change_nro(floats=[1.0]), "bad_shape"),
    ("a length too few", change_nro(lengths=[1, 0, 0, 1, 0]), "bad_shape"),
    ("lengths that sum to more", change_nro(lengths=[1, 0, 0, 2, 0, 0], missing=b""), "bad_shape"),
    ("an id too many", change_nro(ids=[1, 2, 3]), "bad_shape"),
    ("a weight too many", change_nro(weights=[1.0]), "bad_shape"),
    ("a time too many", change_nro(times=[1]), "bad_shape"),
    ("more missing bits than lists", change_nro(missing=b"\0\0"), "bad_shape"),
    ("a missing list with entries", change_nro(missing=b"\1"), "bad_shape"),
    ("a list beyond the cap", change_nro(lengths=[1, 0, 0, 31, 0, 0], ids=range(32), missing=b""),
     "oversized"),
    ("a block that is no message", change_sample(ro=b"\x0a\x05ab"), "undecodable"),
    ("another schema", lambda s: assign(s.header, {"schema": 5}), "unknown_schema"),
    ("too many candidates", change_sample(item_ids=range(41), labels=[0.0] * 82), "oversized"),
]  # fmt: skip


@pytest.mark.parametrize(("description", "change", "reason"), DAMAGE, ids=[d[0] for d in DAMAGE])
def test_a_damaged_sample_is_rejected_and_its_neighbors_are_kept(
    schema: Schema, description: str, change: Change, reason: str, to_record: ToRecord
) -> None:
    bad = valid_sample(schema)
    change(bad)
    batch, rejects = make_decoder(schema).decode(
        [to_record(valid_sample(schema), 0), to_record(bad, 1), to_record(valid_sample(schema), 2)]
    )
    assert [(r.index, r.reason) for r in rejects] == [(1, reason)], rejects
    assert rejects[0].reason in wire.REASONS and len(rejects[0].error) > 20
    assert batch.offset_R.tolist() == [0, 2]
    assert_equals_reference(schema, batch, [valid_sample(schema), valid_sample(schema)])
    with pytest.raises(WireError) as refusal:
        check_reference(schema, wire.encode(wire.SAMPLE, bad))
    assert refusal.value.reason == reason


def test_weights_and_propensities_at_their_bounds_are_accepted(schema: Schema, to_record: ToRecord) -> None:
    changes = [
        *(change_sample(weight=weight) for weight in (wire.MAX_WEIGHT, 0.0, -0.0)),
        change_sample(propensities=[1.0, 1e-30]),
        *(change_ro(weights=[weight]) for weight in (wire.MAX_WEIGHT, -wire.MAX_WEIGHT, 0.0)),
    ]
    made_samples = [valid_sample(schema) for _ in changes]
    for sample, change in zip(made_samples, changes, strict=True):
        change(sample)
    batch, rejects = make_decoder(schema).decode(
        [to_record(sample, n) for n, sample in enumerate(made_samples)]
    )
    assert rejects == []
    assert_equals_reference(schema, batch, made_samples)


def test_the_close_time_of_a_sample_is_its_records_timestamp(schema: Schema, to_record: ToRecord) -> None:
    late = to_record(valid_sample(schema))._replace(timestamp_ms=7)
    batch, (reject,) = make_decoder(schema).decode([late, to_record(valid_sample(schema), 1)])
    assert (reject.index, reject.reason) == (0, "bad_time")
    assert "timestamp 7, got close time 0" in reject.error
    assert batch.offset_R.tolist() == [1]
    correction = to_record(valid_sample(schema), 0, wire.CORRECTION)._replace(timestamp_ms=7)
    assert make_decoder(schema).decode([correction], corrections=True)[0].num_requests == 1


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
    batch, rejects = make_decoder(schema).decode([Record("", 0, 0, 0, None, value)])  # type: ignore[arg-type]
    assert [r.reason for r in rejects] == [reason] and batch.num_requests == 0


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "delete"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=9),
    ),
    max_size=3,
)


def apply_edits(value: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    for operation, position, data in edits:
        at = int(position * len(value))
        if operation == "flip":
            value = value[:at] + data + value[at + len(data) :]
        elif operation == "cut":
            value = value[:at]
        elif operation == "insert":
            value = value[:at] + data + value[at:]
        else:
            value = value[:at] + value[at + len(data) :]
    return value


@settings(max_examples=600)
@given(seed=st.integers(0, 200), edits=EDITS)
def test_mutated_bytes_are_read_like_protobuf_or_rejected(
    schema_and_maker: Any, seed: int, edits: Any
) -> None:
    schema, make = schema_and_maker
    sample = make(schema, seed)
    value = apply_edits(wire.encode(wire.SAMPLE, sample), edits)
    batch, rejects = make_decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, value)])
    try:
        expected = check_reference(schema, value)
        if expected.close_ms != sample.close_ms:
            raise WireError("bad_time", "its record's timestamp is another")
    except WireError as error:
        assert [r.reason in wire.REASONS for r in rejects] == [True], (error.reason, rejects)
        return
    assert rejects == []
    assert_equals_reference(schema, batch, [expected])


@pytest.fixture(scope="module")
def schema_and_maker(schema: Schema, samples: Samples) -> tuple[Schema, Callable[[Schema, int], pb.Sample]]:
    made_samples = samples(201)
    return schema, lambda _, seed: made_samples[seed]

"""The kernels against a decoder written with protobuf and `decode_block` only; then damage, row by row and at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roo import decode_kernels, wire, wire_kernels
from roo import roo_pb2 as pb
from roo.batch import Batch
from roo.block import check_block, decode_block, encode_nro, encode_ro, main_key
from roo.decode import Decoder, rewritten, warm
from roo.errors import SchemaError, WireError
from roo.ids import signed
from roo.jagged import Jagged
from roo.schema import Schema
from roo.wire import Record

Samples = Callable[[int], list[pb.Sample]]
ToRecord = Callable[..., Record]


def decoder(schema: Schema, *others: Schema) -> Decoder:
    known = {s.fingerprint: s for s in (schema, *others)}
    return Decoder(schema, known.get)


def check_reference(schema: Schema, value: bytes) -> pb.Sample:
    """The message, if it is acceptable; otherwise WireError with a reason."""
    limits = schema.limits
    if len(value) < 2:
        raise WireError("undecodable", "")
    if value[0] != wire.SAMPLE or value[1] != wire.VERSION:
        raise WireError("unknown_type", "")
    if len(value) > limits.max_sample_bytes:
        raise WireError("oversized", "")
    sample = wire.decode(value)[1]
    assert isinstance(sample, pb.Sample)
    for block in (sample.ro, *(p.nro for p in sample.parts)):
        if not block:
            continue
        try:
            pb.Block.FromString(block)
        except Exception:
            raise WireError("undecodable", "") from None
    if sample.header.schema != schema.fingerprint:
        raise WireError("unknown_schema", "")
    check_columns_of(schema, sample)
    check_block(schema, "ro", sample.ro, 1, limits)
    for part in sample.parts:
        check_block(schema, "nro", part.nro, part.num_rows, limits)
    return sample


def check_columns_of(schema: Schema, s: pb.Sample) -> None:
    n, t, e = len(s.item_ids), len(schema.labels), len(s.event_ids)
    used = 0
    for part in s.parts:
        rows = list(part.rows) or list(range(min(part.num_rows, schema.limits.max_candidates + 1)))
        used += len(rows)
        if rows != sorted(set(rows)) or any(r >= part.num_rows for r in rows):
            raise WireError("bad_shape", "rows")
    if n > schema.limits.max_candidates:
        raise WireError("oversized", "candidates")
    optional = [(s.labels_before, n * t), (s.scores, n * t), (s.positions, n), (s.propensities, n)]
    columns = (s.event_candidates, s.event_actions, s.event_values, s.event_times)
    if used != n or len(s.labels) != n * t or any(len(c) not in (0, m) for c, m in optional) or any(len(c) != e for c in columns):
        raise WireError("bad_shape", "columns")
    if any(c >= n for c in s.event_candidates) or any(a >= len(s.actions) for a in s.event_actions):
        raise WireError("bad_shape", "events")
    if any(p > 0x7FFFFFFF for p in s.positions):
        raise WireError("bad_shape", "positions")
    numbers = [*s.labels, *s.propensities, s.weight, *s.event_values, *s.labels_before]
    if not np.isfinite(numbers).all() or np.isinf(list(s.scores)).any():
        raise WireError("non_finite", "numbers")
    if not 0 <= s.weight <= wire.MAX_WEIGHT or not all(0 < p <= 1 for p in s.propensities):
        raise WireError("bad_number", "weights")


def same_floats(got: np.ndarray, present: np.ndarray, wanted: list[float | None], default: float) -> None:
    assert present.tolist() == [v is not None and not np.isnan(v) for v in wanted]
    filled = [default if v is None or np.isnan(v) else v for v in wanted]
    assert got.tolist() == np.array(filled, np.float32).tolist()


def same_lists(schema: Schema, side: str, lists: Jagged, name: str, wanted: list[Any]) -> None:
    f = next(f for f in getattr(schema, side) if f.name == name)
    cut = f.max_len or schema.limits.max_list
    k = lists.index(name)
    assert lists.present_KN[k].tolist() == [v is not None for v in wanted]
    keys = {"": "", "weights": "weights", **{c: c for c in f.columns}}
    for key in keys:
        flat: list[Any] = []
        for value in wanted:
            if value is None:
                continue
            if isinstance(value, list):
                entries = value if not key else [1.0] * len(value)
            else:
                main = main_key(f) if f.kind == "sequence" else "ids"
                entries = value[main] if not key else value.get(key, [1.0] * len(value[main]))
            flat += entries[:cut]
        if not key:
            assert lists.values_of(name).tolist() == flat
            assert lists.lengths_KN[k].sum() == len(flat)
        elif key == "weights":
            weights = lists.weights_of(name)
            assert weights is None or weights.tolist() == np.array(flat, np.float32).tolist()
        else:
            assert lists.columns[f"{name}.{key}"].tolist() == flat


def same_as_reference(schema: Schema, batch: Batch, kept: list[pb.Sample]) -> None:
    ro = [decode_block(schema, "ro", s.ro, 1) for s in kept]
    for i, f in enumerate(schema.floats("ro")):
        same_floats(batch.ro_float_RF[:, i], batch.ro_present_RF[:, i], [v.get(f.name) for v in ro], f.default)
    for f in schema.lists("ro"):
        same_lists(schema, "ro", batch.ro_lists, f.name, [v.get(f.name) for v in ro])
    nro: dict[str, list[Any]] = {f.name: [] for f in schema.nro}
    for s in kept:
        for part in s.parts:
            block = decode_block(schema, "nro", part.nro, part.num_rows)
            for name, column in block.items():
                nro[name] += [column[row] for row in (part.rows or range(part.num_rows))]
    for i, f in enumerate(schema.floats("nro")):
        same_floats(batch.nro_float_BF[:, i], batch.nro_present_BF[:, i], nro[f.name], f.default)
    for f in schema.lists("nro"):
        same_lists(schema, "nro", batch.nro_lists, f.name, nro[f.name])
    same_scalars(batch, kept, len(schema.labels))


def same_scalars(batch: Batch, kept: list[pb.Sample], t: int) -> None:
    def column(values: list[list[float]], dtype: type = np.float32) -> list[float]:
        return np.array([v for row in values for v in row], dtype).tolist()

    n = [len(s.item_ids) for s in kept]
    assert batch.num_candidates_R.tolist() == n
    assert batch.item_B.tolist() == [signed(i) for s in kept for i in s.item_ids]
    assert batch.request_index_B.tolist() == [r for r, count in enumerate(n) for _ in range(count)]
    assert batch.label_BT.ravel().tolist() == column([list(s.labels) for s in kept])
    assert batch.weight_BT.ravel().tolist() == column([[s.weight or 1.0] * (len(s.item_ids) * t) for s in kept])
    assert batch.position_B.tolist() == column([list(s.positions) or [-1] * len(s.item_ids) for s in kept], np.int32)
    assert batch.propensity_B.tolist() == column([list(s.propensities) or [1.0] * len(s.item_ids) for s in kept])
    scores = [list(s.scores) or [np.nan] * (len(s.item_ids) * t) for s in kept]
    np.testing.assert_array_equal(batch.served_score_BT.ravel(), column(scores))
    assert batch.time_ms_R.tolist() == [s.header.time_ms for s in kept]
    assert batch.close_ms_R.tolist() == [s.close_ms for s in kept]
    assert batch.sample_id_R.tolist() == [signed(s.sample_id) for s in kept]
    assert batch.oldest_engagement_ms_R.tolist() == [min(s.event_times, default=0) for s in kept]


def test_a_poll_equals_the_decoder_written_with_protobuf(schema: Schema, samples: Samples, to_record: ToRecord) -> None:
    made = samples(60)
    reader = decoder(schema)
    batch, rejects = reader.decode([to_record(s, i) for i, s in enumerate(made)])
    assert rejects == [] and reader.num_skipped_features == 0
    assert batch.offset_R.tolist() == list(range(60))
    assert batch.partition_R.tolist() == [i % 4 for i in range(60)]
    assert not batch.correction_R.any() and np.isnan(batch.label_before_BT).all()
    same_as_reference(schema, batch, made)


def test_nothing_at_all_is_an_empty_batch(schema: Schema) -> None:
    batch, _ = decoder(schema).decode([])
    assert (batch.num_requests, batch.num_candidates) == (0, 0)


def test_a_request_without_candidates_or_ro_block_is_ordinary(schema: Schema, to_record: ToRecord) -> None:
    batch, _ = decoder(schema).decode([to_record(pb.Sample(header=pb.Header(schema=schema.fingerprint)))])
    assert (batch.num_requests, batch.num_candidates) == (1, 0)
    assert batch.ro_float_RF.tolist() == [[-1.0, 0.0]] and not batch.ro_present_RF.any() and not batch.ro_lists.present_KN.any()


def unpacked(number: int, wire_type: int, elements: list[bytes]) -> bytes:
    return b"".join(bytes((number << 3 | wire_type,)) + e for e in elements)


def odd_forms(sample: pb.Sample) -> dict[str, bytes]:
    """The same sample in forms that protobuf must read as equal, each of which the kernels don't walk themselves."""
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
        "unpacked ids": unpacked(6, 1, items) + rest,
        "ids in two packed pieces": pb.Sample(item_ids=sample.item_ids[:1]).SerializeToString()
        + pb.Sample(item_ids=sample.item_ids[1:]).SerializeToString()
        + rest,
        "a header twice": pb.Sample(header=pb.Header(time_ms=1)).SerializeToString() + whole,
        "unknown fields before, as a group too": b"\xfb\x07\xfc\x07" + whole,
        "text that isn't ASCII": long_text.SerializeToString(),
        "a block's column in two pieces": split.SerializeToString(),
        "a tag of two bytes where one would do": whole[:1].replace(b"\x0a", b"\x8a\x00") + whole[1:],
    }


def test_every_form_that_protobuf_reads_is_read_alike(schema: Schema, samples: Samples) -> None:
    sample = next(s for s in samples(60) if len(s.item_ids) > 2 and s.parts[0].nro)
    plain, _ = decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, wire.encode(wire.SAMPLE, sample))])
    for form, body in odd_forms(sample).items():
        value = bytes((wire.SAMPLE, wire.VERSION)) + body
        batch, rejects = decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, value)])
        assert rejects == [], (form, rejects)
        same_as_reference(schema, batch, [sample])
        assert batch.item_B.tolist() == plain.item_B.tolist(), form


def test_unknown_fields_behind_the_known_ones_are_stepped_over(schema: Schema, samples: Samples) -> None:
    sample = samples(1)[0]
    body = (
        wire.encode(wire.SAMPLE, sample) + b"\xf8\x07\x01" + b"\xf9\x07" + bytes(8) + b"\xfa\x07\x02hi" + b"\xfd\x07" + bytes(4)
    )
    batch, rejects = decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, body)])
    assert rejects == []
    same_as_reference(schema, batch, [sample])


def valid(schema: Schema) -> pb.Sample:
    nro = encode_nro(schema, {"age": [1.0, 2.0], "item": [[1], [2]]}, 2)
    ro = encode_ro(schema, {"hour": 1.0, "tags": {"ids": [1], "weights": [0.5]}})
    return pb.Sample(
        header=pb.Header(schema=schema.fingerprint),
        item_ids=[1, 2],
        labels=[0.0] * 4,
        parts=[pb.Part(nro=nro, num_rows=2)],
        ro=ro,
        actions=["click"],
    )


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
    columns = {"event_candidates": [candidate], "event_actions": [action], "event_values": [value], "event_times": [1]}
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
def test_damage_is_a_reject_and_the_neighbours_go_on(
    schema: Schema, what: str, change: Callable[[pb.Sample], Any], reason: str, to_record: ToRecord
) -> None:
    bad = valid(schema)
    change(bad)
    batch, rejects = decoder(schema).decode([to_record(valid(schema), 0), to_record(bad, 1), to_record(valid(schema), 2)])
    assert [(r.index, r.reason) for r in rejects] == [(1, reason)], rejects
    assert rejects[0].reason in wire.REASONS and len(rejects[0].error) > 20
    assert batch.offset_R.tolist() == [0, 2]
    same_as_reference(schema, batch, [valid(schema), valid(schema)])
    with pytest.raises(WireError) as refusal:
        check_reference(schema, wire.encode(wire.SAMPLE, bad))
    assert refusal.value.reason == reason


def test_the_bounds_of_weights_and_propensities_are_in_bounds(schema: Schema, to_record: ToRecord) -> None:
    changes = [setter(weight=wire.MAX_WEIGHT), setter(weight=0.0), setter(weight=-0.0), setter(propensities=[1.0, 1e-30])]
    changes += [damaged_ro(weights=[wire.MAX_WEIGHT]), damaged_ro(weights=[-wire.MAX_WEIGHT]), damaged_ro(weights=[0.0])]
    made = [valid(schema) for _ in changes]
    for sample, change in zip(made, changes, strict=True):
        change(sample)
    batch, rejects = decoder(schema).decode([to_record(sample, n) for n, sample in enumerate(made)])
    assert rejects == []
    same_as_reference(schema, batch, made)


def test_a_sample_is_of_its_records_timestamp_and_a_correction_of_any(schema: Schema, to_record: ToRecord) -> None:
    late = to_record(valid(schema))._replace(timestamp_ms=7)
    batch, (reject,) = decoder(schema).decode([late, to_record(valid(schema), 1)])
    assert (reject.index, reject.reason) == (0, "bad_time") and "timestamp 7, got close time 0" in reject.error
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
def test_records_that_are_no_samples(schema: Schema, value: bytes | None, reason: str) -> None:
    batch, rejects = decoder(schema).decode([Record("", 0, 0, 0, None, value)])  # type: ignore[arg-type]
    assert [r.reason for r in rejects] == [reason] and batch.num_requests == 0


EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "delete"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
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
def test_mutated_bytes_are_read_as_protobuf_reads_them_or_rejected(schema_and_maker: Any, seed: int, edits: Any) -> None:
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


def test_samples_of_an_older_schema_are_read_with_gaps_and_skips(
    schema: Schema, parse_schema: Callable[[str], Schema], to_record: ToRecord
) -> None:
    old = parse_schema(OLD)
    two = {"ids": [7, 8], "weights": [0.5, 0.25]}
    sample = pb.Sample(
        header=pb.Header(schema=old.fingerprint),
        ro=encode_ro(old, {"gone": 1.0, "gap": 2.0, "old_tags": {"ids": [9], "weights": [9.0]}, "tags": two}),
        item_ids=[5],
        parts=[pb.Part(nro=encode_nro(old, {"old_seen": [{"item": [1, 2], "time": [3, 4]}], "item": [[6]]}, 1), num_rows=1)],
        labels=[1.0, 30.0],
    )
    reader = decoder(schema, old)
    batch, rejects = reader.decode([to_record(valid(schema), 0), to_record(sample, 1)])
    assert rejects == [] and reader.num_skipped_features == 3
    batch = batch.take_requests(np.array([1]))
    assert batch.ro_float_RF.tolist() == [[-1.0, 2.0]] and batch.ro_present_RF.tolist() == [[False, True]]
    assert batch.ro_lists.values_of("tags").tolist() == [7, 8]
    assert batch.ro_lists.weights_of("tags").tolist() == [0.5, 0.25]  # type: ignore[union-attr]
    assert not batch.ro_lists.present_KN[batch.ro_lists.index("history")].any()
    assert batch.nro_lists.values_of("item").tolist() == [6]
    assert batch.label_BT.tolist() == [[0.0, 30.0]] and batch.weight_BT.tolist() == [[0.0, 1.0]]


def test_a_changed_kind_and_an_unknown_schema_are_rejects_that_say_why(
    schema: Schema, parse_schema: Callable[[str], Schema], to_record: ToRecord
) -> None:
    changed = parse_schema(OLD.replace('name = "gap"', 'name = "hour"\nkind = "ids"\ntable = "item"'))
    sample = pb.Sample(header=pb.Header(schema=changed.fingerprint))
    reader = decoder(schema, changed)
    for _ in range(2):
        _, rejects = reader.decode([to_record(sample), to_record(pb.Sample(header=pb.Header(schema=99)))])
        assert [r.reason for r in rejects] == ["unknown_schema"] * 2
        assert "'hour': expected kind 'float'" in rejects[0].error and "0000000000000063" in rejects[1].error
    with pytest.raises(SchemaError):
        reader.plans.number_of(changed.fingerprint)


def test_corrections_are_left_out_and_reported_unless_asked_for(schema: Schema, to_record: ToRecord) -> None:
    correction, bare = valid(schema), pb.Sample(header=pb.Header(schema=schema.fingerprint), untrainable=True)
    correction.labels_before[:] = [0.0, 1.0, 0.0, 0.0]
    records = [to_record(valid(schema), 0), *(to_record(s, i, wire.CORRECTION) for i, s in enumerate((correction, bare), 1))]
    reader = decoder(schema)
    batch, rejects = reader.decode(records)
    assert batch.offset_R.tolist() == [0] and rejects == [] and reader.num_skipped_corrections == 2
    batch, rejects = reader.decode(records, corrections=True)
    assert batch.offset_R.tolist() == [0, 1] and rejects == [] and reader.num_skipped_corrections == 3
    assert batch.correction_R.tolist() == [False, True]
    np.testing.assert_array_equal(batch.label_before_BT, [[np.nan] * 2, [np.nan] * 2, [0, 1], [0, 0]])
    alone = batch.take_requests(np.array([1]))
    assert alone.correction_R.tolist() == [True] and alone.label_before_BT.tolist() == [[0, 1], [0, 0]]
    assert batch.expand().correction_R.tolist() == [False, False, True, True]


def test_a_request_is_decoded_as_its_sample_will_be(schema: Schema, to_record: ToRecord) -> None:
    sample = valid(schema)
    reader = decoder(schema)
    trained, _ = reader.decode([to_record(sample)])
    served = reader.decode_request(sample.ro, sample.parts[0].nro, np.array([1, 2]), 123)
    for name in ("ro_float_RF", "ro_present_RF", "nro_float_BF", "nro_present_BF", "item_B"):
        assert getattr(served, name).tobytes() == getattr(trained, name).tobytes()
    for side in ("ro_lists", "nro_lists"):
        assert getattr(served, side).values.tobytes() == getattr(trained, side).values.tobytes()
        assert getattr(served, side).lengths_KN.tobytes() == getattr(trained, side).lengths_KN.tobytes()
    assert served.time_ms_R.tolist() == [123] and served.offset_R.tolist() == [-1]
    assert reader.decode_request(None, b"", np.zeros(0, np.int64), 1).num_candidates == 0


def test_a_request_that_cannot_be_read_says_why(schema: Schema) -> None:
    reader = decoder(schema)
    with pytest.raises(WireError) as error:
        reader.decode_request(None, encode_nro(schema, {"age": [1.0]}, 1), np.array([1, 2]), 1)
    assert error.value.reason == "bad_shape"
    with pytest.raises(WireError) as error:
        reader.decode_request(b"\x0a", b"", np.array([1]), 1)
    assert error.value.reason == "undecodable"
    with pytest.raises(WireError, match="at most 40 candidates, got 41") as error:
        reader.decode_request(None, b"", np.arange(41), 1)
    assert error.value.reason == "oversized"
    with pytest.raises(WireError, match="ro block") as error:
        reader.decode_request(pb.Block(floats=[float("inf"), 0.0], lengths=[0] * 3).SerializeToString(), b"", np.array([1]), 1)
    assert error.value.reason in ("non_finite", "bad_shape")


def test_rewriting_refuses_what_protobuf_refuses() -> None:
    with pytest.raises(WireError) as error:
        rewritten(b"\x03\x01\xff\xff")
    assert error.value.reason == "undecodable"


def test_warming_compiles_every_kernel_for_every_shape_of_poll(
    schema: Schema, parse_schema: Callable[[str], Schema], samples: Samples, to_record: ToRecord
) -> None:
    modules = (wire_kernels, decode_kernels)
    kernels = {k: v for module in modules for k, v in vars(module).items() if hasattr(v, "nopython_signatures")}
    warm()
    before = {name: len(kernel.nopython_signatures) for name, kernel in kernels.items()}
    made = [to_record(s) for s in samples(30)]
    bare = parse_schema('[[label]]\nname = "c"\naction = "c"')
    for reader in (decoder(schema), decoder(bare, schema)):
        for count in (0, 1, 2, 30):
            reader.decode(made[:count], corrections=True)
    assert {name: len(kernel.nopython_signatures) for name, kernel in kernels.items()} == before
    assert len(kernels) > 20

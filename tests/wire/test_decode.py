"""The kernels against a decoder written with protobuf and `decode_block` only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from roostream.errors import SchemaError, WireError
from roostream.schema.schema import Schema
from roostream.wire import decode, decode_scan
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import precompile
from roostream.wire.records import Record
from tests.wire.decode_reference import decoder, same_as_reference, valid
from tests.wire.sample_builders import parse_schema

Samples = Callable[[int], list[pb.Sample]]
ToRecord = Callable[..., Record]


def test_a_poll_equals_the_decoder_written_with_protobuf(
    schema: Schema, samples: Samples, to_record: ToRecord
) -> None:
    made = samples(60)
    reader = decoder(schema)
    batch, rejects = reader.decode([to_record(s, i) for i, s in enumerate(made)])
    assert rejects == [] and reader.num_skipped_features == 0
    assert batch.offset_R.tolist() == list(range(60))
    assert batch.partition_R.tolist() == [i % 4 for i in range(60)]
    assert not batch.correction_R.any() and np.isnan(batch.label_before_BT).all()
    same_as_reference(schema, batch, made)


def test_a_request_may_have_no_candidates_and_no_ro_block(schema: Schema, to_record: ToRecord) -> None:
    batch, _ = decoder(schema).decode([to_record(pb.Sample(header=pb.Header(schema=schema.fingerprint)))])
    assert (batch.num_requests, batch.num_candidates) == (1, 0)
    assert batch.ro_float_RF.tolist() == [[-1.0, 0.0]]
    assert not batch.ro_present_RF.any()
    assert not batch.ro_lists.present_KN.any()


def unpacked(number: int, wire_type: int, elements: list[bytes]) -> bytes:
    return b"".join(bytes((number << 3 | wire_type,)) + e for e in elements)


def odd_forms(sample: pb.Sample) -> dict[str, bytes]:
    """The same sample in forms that protobuf must read as equal, each of which the kernels don't walk
    themselves."""
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


def test_every_encoding_that_protobuf_accepts_is_read_alike(schema: Schema, samples: Samples) -> None:
    sample = next(s for s in samples(60) if len(s.item_ids) > 2 and s.parts[0].nro)
    plain, _ = decoder(schema).decode(
        [Record("", 0, 0, sample.close_ms, None, wire.encode(wire.SAMPLE, sample))]
    )
    for form, body in odd_forms(sample).items():
        value = bytes((wire.SAMPLE, wire.VERSION)) + body
        batch, rejects = decoder(schema).decode([Record("", 0, 0, sample.close_ms, None, value)])
        assert rejects == [], (form, rejects)
        same_as_reference(schema, batch, [sample])
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
    batch, rejects = decoder(schema).decode(records)
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


def test_a_changed_kind_and_an_unknown_schema_are_rejected_with_the_reason(
    schema: Schema, to_record: ToRecord
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


def test_corrections_are_decoded_only_on_request(schema: Schema, to_record: ToRecord) -> None:
    correction, bare = valid(schema), pb.Sample(header=pb.Header(schema=schema.fingerprint), untrainable=True)
    correction.labels_before[:] = [0.0, 1.0, 0.0, 0.0]
    records = [
        to_record(valid(schema), 0),
        *(to_record(s, i, wire.CORRECTION) for i, s in enumerate((correction, bare), 1)),
    ]
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


def test_a_request_is_decoded_like_its_later_sample(schema: Schema, to_record: ToRecord) -> None:
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


def test_an_unreadable_request_is_rejected_with_the_reason(schema: Schema) -> None:
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
        reader.decode_request(
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
    made = [to_record(s) for s in samples(30)]
    bare = parse_schema('[[label]]\nname = "c"\naction = "c"')
    for reader in (decoder(schema), decoder(bare, schema)):
        for count in (0, 1, 2, 30):
            reader.decode(made[:count], corrections=True)
    assert {name: len(kernel.nopython_signatures) for name, kernel in kernels.items()} == before
    assert len(kernels) > 20

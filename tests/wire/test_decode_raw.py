"""Bytes that no protobuf writer makes by itself, and schemas whose labels moved or changed their meaning."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import CheckpointError
from roostream.schema.schema import Label, Schema, reading_plan
from roostream.wire import decode_scan
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

CLICK, DWELL = Label(name="click", action="click"), Label(name="dwell", action="read", fold="max")
SCHEMA = Schema(labels=(CLICK, DWELL))


def record(body: bytes, close_ms: int = 0) -> Record:
    return Record("samples", 0, 0, close_ms, None, bytes((wire.SAMPLE, wire.VERSION)) + body)


def sample(schema: Schema = SCHEMA, **fields: object) -> pb.Sample:
    fields = {"item_ids": [1], "labels": [1.0, 30.0], "parts": [pb.Part(num_rows=1)]} | fields
    return pb.Sample(header=pb.Header(schema=schema.fingerprint), **fields)  # type: ignore[arg-type]


def reasons(body: bytes) -> list[str]:
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


@pytest.mark.parametrize("where", ["request_id", "surface", "model_version", "action"])
@pytest.mark.parametrize(
    "text",
    [b"gr\xc3\xb6\xc3\x9fe", b"\xff", b"\xc3", b"\xed\xa0\x80"],
    ids=["größe", "byte", "cut", "surrogate"],
)
def test_text_is_utf_8_or_the_sample_is_undecodable(where: str, text: bytes) -> None:
    placed = "x" * len(text)
    whole = sample(actions=[placed]) if where == "action" else sample()
    if where != "action":
        setattr(whole.header, where, placed)
    good = text.startswith(b"gr")
    assert reasons(whole.SerializeToString().replace(placed.encode(), text)) == (
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


def test_labels_are_matched_by_name() -> None:
    writer = Schema(labels=(DWELL, CLICK))
    reader = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA, writer.fingerprint: writer}.get)
    batch, rejects = reader.decode([record(sample(writer, labels=[30.0, 1.0]).SerializeToString())])
    assert rejects == [] and batch.label_BT.tolist() == [[1.0, 30.0]]


@pytest.mark.parametrize(
    "change", [{"action": "open"}, {"fold": "sum"}, {"window_ms": 5}, {"threshold": 2.0}]
)
def test_a_label_with_a_changed_meaning_is_rejected(change: dict[str, object]) -> None:
    writer = Schema(labels=(CLICK, dataclasses.replace(DWELL, **change)))
    reader = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA, writer.fingerprint: writer}.get)
    batch, rejects = reader.decode(
        [record(sample(writer).SerializeToString()), record(sample().SerializeToString())]
    )
    assert [reject.reason for reject in rejects] == ["unknown_schema"] and batch.item_B.tolist() == [1]
    (what,) = change
    assert rejects[0].error.startswith(
        f"label 'dwell': expected {what} {getattr(DWELL, what)!r} (schema in use), got {change[what]!r}"
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

"""Converting records to rows of a file: the records can be rebuilt byte for byte, and the rows of a day are
ordered by user."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from roostream.runtime.checkpoint_store import FileStore
from roostream.schema.schema import Schema
from roostream.warehouse.archive import (
    correction_rows,
    group_by_day,
    group_by_writer,
    sample_rows,
    sample_types,
    split_rows,
)
from roostream.warehouse.data_file import day_of
from roostream.warehouse.file_reader import SampleFile
from roostream.warehouse.parquet_file import write_rows
from roostream.warehouse.record_columns import rebuild_records
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner import generated
from tests.joiner.cases import SCHEMA as JOINED
from tests.joiner.cases import SCHEMAS
from tests.warehouse.sample_cases import (
    assert_same_batch,
    decode_records,
    file_key,
    make_correction,
    rich_records,
    rich_schema,
    with_joiner_keys,
)

SCHEMA = rich_schema()


def read_back(store: FileStore, schema: Schema, records: list[Record]) -> list[tuple[bytes, bytes]]:
    rows, dead = sample_rows(schema, records)
    assert not dead
    reading = SampleFile(store, "samples", write_rows(store, rows, file_key(schema)))
    return [*rebuild_records(schema, *reading.columns(sample_types(schema)))]


def test_samples_rebuilt_from_a_file_equal_those_of_the_topic(tmp_path: Path) -> None:
    records = with_joiner_keys(rich_records(SCHEMA, 300))
    assert read_back(FileStore(tmp_path), SCHEMA, records) == [(r.key, r.value) for r in records]
    rows, _ = sample_rows(SCHEMA, records)
    kept_whole = [r for r, raw in zip(records, rows.columns["raw"].values, strict=True) if raw is not None]
    used_in_part = [any(p.rows for p in pb.Sample.FromString(r.value[2:]).parts) for r in kept_whole]
    assert 0 < len(kept_whole) < 300 and sum(used_in_part) > 0.8 * len(kept_whole)


def test_samples_of_the_joiner_are_rebuilt_from_their_columns(tmp_path: Path) -> None:
    schema = JOINED
    engine = LocalEngine(JoinerConfig(**generated.SETTINGS), schema, SCHEMAS.get)  # type: ignore[arg-type]
    outputs = [
        out for record in generated.with_offsets(generated.arrivals(3)) for out in engine.process(record)
    ]
    sample_outputs = [out for out in outputs if out.topic == "samples"]
    records = [
        Record("samples", 3, n, out.timestamp_ms or 0, out.key, out.value)
        for n, out in enumerate(sample_outputs)
    ]
    assert len(records) > 100
    assert read_back(FileStore(tmp_path), schema, records) == [(r.key, r.value) for r in records]
    rows, _ = sample_rows(schema, records)
    whole = [raw for raw in rows.columns["raw"].values if raw is not None]
    assert len(whole) < 0.5 * len(records)
    assert all(any(p.rows for p in pb.Sample.FromString(raw[2:]).parts) for raw in whole)


def unusual_encodings(record: Record) -> dict[str, bytes]:
    """Encode the same sample with fields that have no column, or with bytes that the project's encoder does
    not write."""
    text, actions, traced = (pb.Sample.FromString(record.value[2:]) for _ in range(3))
    text.header.surface = "x" * 100
    actions.actions.append("never used")
    traced.header.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    return {
        "long surface": wire.encode(wire.SAMPLE, text),
        "actions": wire.encode(wire.SAMPLE, actions),
        "traced": wire.encode(wire.SAMPLE, traced),
        "unknown field": record.value + bytes((0xF8, 0x7F, 1)),
        "explicit zero": record.value + bytes((0xA8, 1, 0)),
    }


def test_unusual_bytes_of_a_sample_are_rebuilt(tmp_path: Path) -> None:
    for n, record in enumerate(with_joiner_keys(rich_records(SCHEMA, 12))):
        for form, value in unusual_encodings(record).items():
            unusual = record._replace(value=value)
            assert read_back(FileStore(tmp_path / str(n)), SCHEMA, [unusual]) == [
                (unusual.key, unusual.value)
            ], form


def test_a_damaged_sample_becomes_a_dead_record_and_other_samples_become_rows() -> None:
    records = with_joiner_keys(rich_records(SCHEMA, 20))
    broken = pb.Sample.FromString(records[7].value[2:])
    broken.labels.append(1.0)
    records[7] = records[7]._replace(value=wire.encode(wire.SAMPLE, broken))
    rows, dead = sample_rows(SCHEMA, records)
    assert [(d.record.offset, d.reason) for d in dead] == [(7, "bad_shape")]
    assert rows.columns["offset"].values.tolist() == [n for n in range(20) if n != 7]


def test_records_are_grouped_by_writer_and_others_are_dead() -> None:
    records = with_joiner_keys(rich_records(SCHEMA, 3))
    strange = records[0]._replace(value=b"\x09\x01xx")
    garbage = records[1]._replace(value=b"\x03\x01\xff\xff\xff")
    mixed = [records[0], strange, garbage, records[2]]
    by_writer, dead = group_by_writer(mixed, {SCHEMA.fingerprint: SCHEMA}.get, wire.SAMPLE)
    assert by_writer == {SCHEMA.fingerprint: [records[0], records[2]]}
    assert [d.reason for d in dead] == ["unknown_type", "undecodable"]
    by_writer, dead = group_by_writer(mixed[:1], {}.get, wire.SAMPLE)
    assert by_writer == {} and dead[0].reason == "unknown_schema"


def test_rows_are_grouped_by_day_and_ordered_by_user(tmp_path: Path) -> None:
    records = []
    for n, record in enumerate(rich_records(SCHEMA, 60)):
        sample = pb.Sample.FromString(record.value[2:])
        sample.header.user_id = (7 * n) % 5 + 1
        sample.close_ms += (n % 2) * 86_400_000
        records.append(record._replace(value=wire.encode(wire.SAMPLE, sample), timestamp_ms=sample.close_ms))
    rows, _ = sample_rows(SCHEMA, with_joiner_keys(records))
    days = group_by_day(rows)
    assert [len(day.counts_R) for day in days.values()] == [30, 30]
    for day, part in days.items():
        users = part.columns["user_id"].values
        assert (np.diff(users) >= 0).all()
        assert {day_of(int(ms)) for ms in part.columns["close_ms"].values} == {day}
    expected = decode_records(SCHEMA, with_joiner_keys(records))
    order = np.concatenate([part.columns["offset"].values for part in days.values()])
    store = FileStore(tmp_path)
    for part, places in zip(days.values(), np.split(order, [30]), strict=True):
        assert_same_batch(
            SampleFile(store, "samples", write_rows(store, part, file_key(SCHEMA))).read(SCHEMA, SCHEMA),
            expected.take_requests(places),
        )


def test_a_correction_names_its_sample_and_its_labels(tmp_path: Path) -> None:
    sample = with_joiner_keys(rich_records(SCHEMA, 5))[4]
    corrections = [
        make_correction(sample, 77, 0.0, 1.0, offset=0, event=5),
        make_correction(sample, 78, 1.0, 0.0, offset=1, event=6),
    ]
    rows, dead = correction_rows(SCHEMA, corrections)
    assert not dead
    store = FileStore(tmp_path)
    reading = SampleFile(store, "corrections", write_rows(store, rows, file_key(SCHEMA, table="corrections")))
    columns, counts_R = reading.columns(rows.column_types)
    assert counts_R.tolist() == [1, 1] and columns["item"].values.tolist() == [77, 78]
    assert columns["label__click"].values.tolist() == [1.0, 0.0]
    assert columns["label_before__click"].values.tolist() == [0.0, 1.0]
    assert len(set(columns["of_sample"].values.tolist())) == 1
    assert columns["event__action"].values.tolist() == ["click", "click"]


def test_rows_with_too_many_values_for_one_file_are_split_between_requests() -> None:
    rows, _ = sample_rows(SCHEMA, with_joiner_keys(rich_records(SCHEMA, 40)))
    max_values = max(
        len(column.values)
        for name, column in rows.columns.items()
        if rows.column_types[name].of == "candidate"
    )
    pieces = split_rows(rows, max_values=max_values // 3)
    assert len(pieces) > 3 and split_rows(rows) == [rows]
    for name, column in rows.columns.items():
        parts = [piece.columns[name].values for piece in pieces]
        assert (
            np.concatenate(parts).tolist() == column.values.tolist() or rows.column_types[name].dtype == "f4"
        )
        assert all(
            len(part) <= max_values // 3 or len(piece.counts_R) == 1
            for part, piece in zip(parts, pieces, strict=True)
        )
    assert all(len(piece.counts_R) == 1 for piece in split_rows(rows, max_values=1))

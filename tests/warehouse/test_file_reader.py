"""Reading sample files: a batch from a file equals the batch decoded from Kafka. Damage is detected, and an
unavailable store is not reported as damage."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from roostream.errors import CheckpointError, SchemaError, UnavailableError
from roostream.runtime.checkpoint_store import FileStore, check_name
from roostream.warehouse import parquet_file
from roostream.warehouse.data_file import DataFile, candidates_of, topic_of
from roostream.warehouse.file_reader import SMALL_BYTES, ByteRange, SampleFile, merged, writer_of
from roostream.warehouse.parquet_file import FOOTER_KEY, write_rows
from roostream.wire.columnar import project_schema
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.sample_cases import (
    assert_same_batch,
    decode_records,
    file_key,
    file_rows,
    rich_records,
    rich_schema,
)
from tests.wire.sample_builders import RICH, parse_schema

SCHEMA = rich_schema()
RECORDS = rich_records(SCHEMA, 300)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def test_a_batch_from_a_file_equals_the_batch_from_the_wire_in_every_bit(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    assert (file.rows, file.first_offset, file.last_offset, file.partition) == (300, 0, 299, 3)
    assert_same_batch(
        SampleFile(store, "samples", file).read(SCHEMA, SCHEMA), decode_records(SCHEMA, RECORDS)
    )


def write_file_of_format(store: FileStore, number: int, topic: str | None) -> DataFile:
    """Write a file whose footer has the given format number and topic."""
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    path = store.root / "samples" / file.path
    table = pq.read_table(path)
    footer = {**json.loads(table.schema.metadata[FOOTER_KEY]), "format": number, "topic": topic}
    if topic is None:
        del footer["topic"]
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: json.dumps(footer).encode()}), path)
    return dataclasses.replace(file, bytes=path.stat().st_size)


def test_format_1_without_a_topic_is_read_and_a_later_format_is_rejected(store: FileStore) -> None:
    old = write_file_of_format(store, 1, None)
    assert old.topic == "" and topic_of(old.path) == "" and candidates_of(old.path) == old.candidates
    assert_same_batch(SampleFile(store, "samples", old).read(SCHEMA, SCHEMA), decode_records(SCHEMA, RECORDS))
    with pytest.raises(CheckpointError):
        SampleFile(store, "samples", write_file_of_format(store, 3, ""))


def test_a_file_whose_footer_names_another_topic_is_rejected(store: FileStore) -> None:
    topic = "Ex/UIEt9S0+qXk1vJmBZcA"  # in the form of Kafka's client
    file = write_rows(store, file_rows(SCHEMA, RECORDS), dataclasses.replace(file_key(SCHEMA), topic=topic))
    assert (file.topic, topic_of(file.path), candidates_of(file.path)) == (topic, topic, file.candidates)
    assert check_name(file.path) == file.path
    assert SampleFile(store, "samples", file).footer_info["topic"] == topic
    with pytest.raises(CheckpointError):
        SampleFile(store, "samples", dataclasses.replace(file, topic="topic-2"))


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_without_candidates_is_read(store: FileStore, count: int) -> None:
    records = [r for r in rich_records(SCHEMA, 40) if not decode_records(SCHEMA, [r]).num_candidates][:1]
    assert records
    file = write_rows(store, file_rows(SCHEMA, records * count or RECORDS[:1]), file_key(SCHEMA))
    assert_same_batch(
        SampleFile(store, "samples", file).read(SCHEMA, SCHEMA),
        decode_records(SCHEMA, records * count or RECORDS[:1]),
    )


def test_another_schema_reads_a_file_as_it_reads_the_wire(store: FileStore) -> None:
    text = RICH.replace("max_len = 3\n", "max_len = 2\n").replace(
        'name = "gap"', 'name = "new_gap"\ndefault = 3.5'
    )
    text = text.replace('name = "seen"', 'name = "other"').replace(
        'name = "dwell"\naction = "read"', 'name = "like"\naction = "like"'
    )
    reader = parse_schema(text.replace("default = 7.0", "default = 8.0"))
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    assert_same_batch(
        SampleFile(store, "samples", file).read(SCHEMA, reader), decode_records(reader, RECORDS, SCHEMA)
    )


def test_a_feature_that_changed_its_kind_is_rejected(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    reader = parse_schema(RICH.replace('name = "tags"\nkind = "weighted_ids"', 'name = "tags"\nkind = "ids"'))
    with pytest.raises(SchemaError, match="tags"):
        SampleFile(store, "samples", file).read(SCHEMA, reader)


def test_a_projection_reads_only_its_columns(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    few = project_schema(SCHEMA, frozenset({"history", "age"}))
    reading = SampleFile(store, "samples", file)
    batch = reading.read(SCHEMA, few)
    assert_same_batch(batch, decode_records(few, RECORDS, SCHEMA))
    assert batch.ro_lists.keys == ("history",) and batch.nro_float_BF.shape[1] == 1
    with pytest.raises(SchemaError, match="hystory"):
        project_schema(SCHEMA, frozenset({"hystory"}))


def test_single_row_groups_are_read(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_OF_GROUP", 64)
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    reading = SampleFile(store, "samples", file)
    assert reading.rows_of_groups == [64, 64, 64, 64, 44]
    assert_same_batch(
        reading.read(SCHEMA, SCHEMA, [1, 2]),
        decode_records(SCHEMA, RECORDS).take_requests(np.arange(64, 192)),
    )


def test_reads_are_merged_within_the_bound_and_counted(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    reading = SampleFile(store, "samples", file)
    plan = reading.reading_plan(["item", "nro__age"], [0])
    unmerged = SampleFile(store, "samples", file, over_read=0).reading_plan(["item", "nro__age"], [0])
    assert len(plan) <= len(unmerged)
    assert sum(b - a for a, b in plan) <= 1.08 * sum(b - a for a, b in unmerged) + SMALL_BYTES
    before = reading.source.num_requests
    reading.read(SCHEMA, SCHEMA)
    assert reading.source.num_requests == before + 1, (
        "all columns of a small file must be read with one request"
    )


@pytest.mark.parametrize(
    ("over_read", "expected"),
    [(0.0, [(0, 100), (101, 200), (210, 300)]), (0.01, [(0, 200), (210, 300)]), (0.08, [(0, 300)])],
)
def test_the_smallest_gaps_between_reads_are_merged_first(
    over_read: float, expected: list[tuple[int, int]]
) -> None:
    needed = [ByteRange(210, 300), ByteRange(0, 50), ByteRange(50, 100), ByteRange(101, 200)]
    assert merged(needed, over_read, small=0) == expected


def test_columns_of_one_width_are_merged_within_the_bound() -> None:
    needed = [ByteRange(20 * n, 20 * n + 10) for n in range(100)]
    plan = merged(needed, 0.08, small=0)
    assert sum(b - a for a, b in plan) == 1080 and len(plan) == 92
    assert all(any(a <= r.start and r.end <= b for a, b in plan) for r in needed)


def test_a_damaged_byte_is_reported_with_the_file_or_changes_nothing(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS[:40]), file_key(SCHEMA))
    path, expected = store.path(f"samples/{file.path}"), decode_records(SCHEMA, RECORDS[:40])
    good, refused = path.read_bytes(), 0
    for at in np.random.default_rng(0).integers(0, len(good), 60):
        path.write_bytes(good[:at] + bytes((good[at] ^ 0x10,)) + good[at + 1 :])
        try:
            assert_same_batch(SampleFile(store, "samples", file).read(SCHEMA, SCHEMA), expected)
        except CheckpointError as error:
            assert file.path in str(error)
            refused += 1
    assert refused > 30


def test_a_file_that_is_cut_off_or_absent_is_damaged(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    path = store.path(f"samples/{file.path}")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=file.path):
        SampleFile(store, "samples", file)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{file.path} is absent.*; restore it"):
        SampleFile(store, "samples", file)


def test_a_file_with_another_number_of_rows_than_the_log_is_damaged(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    with pytest.raises(CheckpointError, match="299"):
        SampleFile(store, "samples", dataclasses.replace(file, rows=299))


def test_an_unavailable_store_is_not_reported_as_damage() -> None:
    store = MemoryStore()
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    store.fail_next("get")
    with pytest.raises(UnavailableError):
        SampleFile(store, "samples", file)
    reading = SampleFile(store, "samples", file)
    store.fail_next("get")
    with pytest.raises(UnavailableError):
        reading.read(SCHEMA, SCHEMA)
    assert_same_batch(reading.read(SCHEMA, SCHEMA), decode_records(SCHEMA, RECORDS))


def test_a_file_with_an_unknown_schema_is_rejected(store: FileStore) -> None:
    file = write_rows(store, file_rows(SCHEMA, RECORDS), file_key(SCHEMA))
    assert writer_of(file, {SCHEMA.fingerprint: SCHEMA}.get) is SCHEMA
    with pytest.raises(SchemaError, match=f"unknown schema {SCHEMA.fingerprint:016x}"):
        writer_of(file, lambda _: None)

"""A batch from a file is the batch from the wire; what can't be read is told apart from what is damaged."""

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
from tests.warehouse.sample_cases import decoded, place_of, rich_records, rich_schema, rows_of, same_batch
from tests.wire.sample_builders import RICH, parse_schema

SCHEMA = rich_schema()
RECORDS = rich_records(SCHEMA, 300)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def test_a_batch_from_a_file_equals_the_batch_from_the_wire_in_every_bit(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    assert (file.rows, file.first_offset, file.last_offset, file.partition) == (300, 0, 299, 3)
    same_batch(SampleFile(store, "samples", file).read(SCHEMA, SCHEMA), decoded(SCHEMA, RECORDS))


def of_format(store: FileStore, number: int, topic: str | None) -> DataFile:
    """A file whose footer says so."""
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    path = store.root / "samples" / file.path
    table = pq.read_table(path)
    said = json.loads(table.schema.metadata[FOOTER_KEY])
    said = {name: value for name, value in said.items() if name != "topic"} | {"format": number}
    said |= {} if topic is None else {"topic": topic}
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: json.dumps(said).encode()}), path)
    return dataclasses.replace(file, bytes=path.stat().st_size)


def test_a_file_of_before_topics_were_told_is_read_and_one_of_a_later_format_is_refused(
    store: FileStore,
) -> None:
    old = of_format(store, 1, None)
    assert old.topic == "" and topic_of(old.path) == "" and candidates_of(old.path) == old.candidates
    same_batch(SampleFile(store, "samples", old).read(SCHEMA, SCHEMA), decoded(SCHEMA, RECORDS))
    with pytest.raises(CheckpointError):
        SampleFile(store, "samples", of_format(store, 3, ""))


def test_a_file_that_another_topic_filled_than_its_name_says_is_refused(store: FileStore) -> None:
    its = "Ex/UIEt9S0+qXk1vJmBZcA"  # as Kafka's client says it
    file = write_rows(store, rows_of(SCHEMA, RECORDS), dataclasses.replace(place_of(SCHEMA), topic=its))
    assert (file.topic, topic_of(file.path), candidates_of(file.path)) == (its, its, file.candidates)
    assert (
        check_name(file.path) == file.path and SampleFile(store, "samples", file).footer_info["topic"] == its
    )
    with pytest.raises(CheckpointError):
        SampleFile(store, "samples", dataclasses.replace(file, topic="topic-2"))


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_of_few_samples_without_candidates_is_ordinary(store: FileStore, count: int) -> None:
    records = [r for r in rich_records(SCHEMA, 40) if not decoded(SCHEMA, [r]).num_candidates][:1]
    assert records
    file = write_rows(store, rows_of(SCHEMA, records * count or RECORDS[:1]), place_of(SCHEMA))
    same_batch(
        SampleFile(store, "samples", file).read(SCHEMA, SCHEMA),
        decoded(SCHEMA, records * count or RECORDS[:1]),
    )


def test_another_schema_reads_a_file_as_it_reads_the_wire(store: FileStore) -> None:
    text = RICH.replace("max_len = 3\n", "max_len = 2\n").replace(
        'name = "gap"', 'name = "new_gap"\ndefault = 3.5'
    )
    text = text.replace('name = "seen"', 'name = "other"').replace(
        'name = "dwell"\naction = "read"', 'name = "like"\naction = "like"'
    )
    reader = parse_schema(text.replace("default = 7.0", "default = 8.0"))
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    same_batch(SampleFile(store, "samples", file).read(SCHEMA, reader), decoded(reader, RECORDS, SCHEMA))


def test_a_feature_that_changed_its_kind_is_refused(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    reader = parse_schema(RICH.replace('name = "tags"\nkind = "weighted_ids"', 'name = "tags"\nkind = "ids"'))
    with pytest.raises(SchemaError, match="tags"):
        SampleFile(store, "samples", file).read(SCHEMA, reader)


def test_a_projection_reads_its_columns_alone(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    few = project_schema(SCHEMA, frozenset({"history", "age"}))
    reading = SampleFile(store, "samples", file)
    batch = reading.read(SCHEMA, few)
    same_batch(batch, decoded(few, RECORDS, SCHEMA))
    assert batch.ro_lists.keys == ("history",) and batch.nro_float_BF.shape[1] == 1
    with pytest.raises(SchemaError, match="hystory"):
        project_schema(SCHEMA, frozenset({"hystory"}))


def test_row_groups_are_read_alone(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_OF_GROUP", 64)
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    reading = SampleFile(store, "samples", file)
    assert reading.rows_of_groups == [64, 64, 64, 64, 44]
    same_batch(
        reading.read(SCHEMA, SCHEMA, [1, 2]), decoded(SCHEMA, RECORDS).take_requests(np.arange(64, 192))
    )


def test_columns_that_are_asked_for_most_lie_in_front(store: FileStore) -> None:
    popular = ["nro__age", "ro__history", "ro__history__time"]
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA), popular)
    reading = SampleFile(store, "samples", file)
    assert reading.footer.schema.to_arrow_schema().names[:5] == ["offset", "close_ms", *popular]
    same_batch(reading.read(SCHEMA, SCHEMA), decoded(SCHEMA, RECORDS))


def test_reads_are_merged_within_the_bound_and_counted(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    reading = SampleFile(store, "samples", file)
    plan = reading.reading_plan(["item", "nro__age"], [0])
    apart = SampleFile(store, "samples", file, over_read=0).reading_plan(["item", "nro__age"], [0])
    assert (
        len(plan) <= len(apart)
        and sum(b - a for a, b in plan) <= 1.08 * sum(b - a for a, b in apart) + SMALL_BYTES
    )
    before = reading.source.num_requests
    reading.read(SCHEMA, SCHEMA)
    assert reading.source.num_requests == before + 1, "all columns of a small file are one read"


@pytest.mark.parametrize(
    ("over_read", "expected"),
    [
        (0.0, [(0, 100), (101, 200), (210, 300)]),
        (0.01, [(0, 200), (210, 300)]),
        (0.08, [(0, 300)]),
    ],
)
def test_the_smallest_holes_are_filled_first(over_read: float, expected: list[tuple[int, int]]) -> None:
    needed = [ByteRange(210, 300), ByteRange(0, 50), ByteRange(50, 100), ByteRange(101, 200)]
    assert merged(needed, over_read, small=0) == expected


def test_columns_of_one_width_are_merged_within_the_bound() -> None:
    """Every hole is as wide as the next: some are filled, not all."""
    needed = [ByteRange(20 * n, 20 * n + 10) for n in range(100)]
    plan = merged(needed, 0.08, small=0)
    assert sum(b - a for a, b in plan) == 1080 and len(plan) == 92
    assert all(any(a <= r.start and r.end <= b for a, b in plan) for r in needed)


def test_every_damaged_byte_of_a_file_is_told_with_its_name_or_changes_nothing(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS[:40]), place_of(SCHEMA))
    path, wanted = store.path(f"samples/{file.path}"), decoded(SCHEMA, RECORDS[:40])
    good, refused = path.read_bytes(), 0
    for at in np.random.default_rng(0).integers(0, len(good), 60):
        path.write_bytes(good[:at] + bytes((good[at] ^ 0x10,)) + good[at + 1 :])
        try:
            same_batch(SampleFile(store, "samples", file).read(SCHEMA, SCHEMA), wanted)
        except CheckpointError as error:
            assert file.path in str(error)
            refused += 1
    assert refused > 30


def test_a_file_that_is_cut_off_or_absent_is_damaged(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    path = store.path(f"samples/{file.path}")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=file.path):
        SampleFile(store, "samples", file)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{file.path} is absent"):
        SampleFile(store, "samples", file)


def test_a_file_of_other_rows_than_the_log_says_is_damaged(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    with pytest.raises(CheckpointError, match="299"):
        SampleFile(store, "samples", dataclasses.replace(file, rows=299))


def test_a_store_that_is_away_is_no_damage() -> None:
    store = MemoryStore()
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    store.fail_next("get")
    with pytest.raises(UnavailableError):
        SampleFile(store, "samples", file)
    reading = SampleFile(store, "samples", file)
    store.fail_next("get")
    with pytest.raises(UnavailableError):
        reading.read(SCHEMA, SCHEMA)
    same_batch(reading.read(SCHEMA, SCHEMA), decoded(SCHEMA, RECORDS))


def test_a_file_whose_schema_nobody_knows_is_told(store: FileStore) -> None:
    file = write_rows(store, rows_of(SCHEMA, RECORDS), place_of(SCHEMA))
    assert writer_of(file, {SCHEMA.fingerprint: SCHEMA}.get) is SCHEMA
    with pytest.raises(SchemaError, match=f"unknown schema {SCHEMA.fingerprint:016x}"):
        writer_of(file, lambda _: None)

"""A session of files under a real log: as it was fixed, whatever is written there later."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import pytest

from roo.columnar import columns_of, forms
from roo.decode import Decoder
from roo.errors import CheckpointError, ConfigError
from roo.schema_registry import register
from roo.wire import Record
from runtime.checkpoint_store import open_store
from tests.trainer import samples
from warehouse.delta_table import Step, WarehouseTable
from warehouse.file_writer import FilePlace, FileRows, write_rows
from warehouse.pins import held_versions
from warehouse.readers.reading import LocalRows
from warehouse.readers.session import SessionSpec
from warehouse.readers.table_session import SampleTable

TOPICS = {"samples": "topic-1"}
WANTED = SessionSpec(table="", version=0, shuffle_seed=None)


def archive(place: Path, records: list[Record], topic: str = "topic-1") -> None:
    """These records as a file of each partition, after what is there."""
    store, schema = open_store(str(place)), samples.schema()
    register(store, schema)
    table = WarehouseTable(str(place), "samples")
    table.create()
    for partition in sorted({record.partition for record in records}):
        its = [record for record in records if record.partition == partition]
        batch, _ = Decoder(schema, {}.get).decode(its)
        rows = FileRows(columns=columns_of(batch), forms=forms(schema), counts_R=batch.num_candidates_R)
        day = datetime.fromtimestamp(its[0].timestamp_ms // 1000, UTC).date()
        file = write_rows(store, rows, FilePlace(table="samples", day=day, partition=partition, fingerprint=schema.fingerprint))
        name = f"samples/{topic}/{partition}"
        table.commit([file], progress={name: Step(table.snapshot().progress(name), its[-1].offset + 1)})


def ids(place: Path, told: object) -> list[int]:
    session, files = SampleTable(str(place)).opened(told, samples.schema())  # type: ignore[arg-type]
    rows, found = LocalRows(session, files), []
    for split in session.order.splits:
        found += rows.piece(split, split.at).batch.sample_id_R.tolist()
    return found


def test_a_session_has_what_its_version_had_and_ends_where_the_archive_was(tmp_path: Path) -> None:
    records = samples.records(list(range(1, 21)))
    archive(tmp_path, records[:12])
    told = SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    assert told is not None and told.rows == {0: 6, 1: 6} and told.ends == {("samples", 0): 6, ("samples", 1): 6}
    assert told.last_close_ms == samples.T0 + 12_500
    archive(tmp_path, records[12:])
    assert sorted(ids(tmp_path, told)) == list(range(1, 13))
    more = SampleTable(str(tmp_path)).newest(WANTED, TOPICS, told.ends)
    assert more is not None and more.version > told.version
    assert sorted(ids(tmp_path, more)) == list(range(13, 21)) and more.ends == {("samples", 0): 10, ("samples", 1): 10}


def test_a_part_of_a_row_group_is_read_as_such(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 21))))
    table = SampleTable(str(tmp_path))
    told = table.newest(WANTED, TOPICS)
    assert told is not None
    session, files = table.opened(told, samples.schema())
    path = session.order.splits[0].path
    assert files.batch(path, 3, 7).sample_id_R.tolist() == files.batch(path, 0, 10).sample_id_R.tolist()[3:7]
    assert files.marks(path).offset_R.tolist() == list(range(10))


def test_an_archive_of_another_topic_is_refused_where_a_stream_follows(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]), topic="deleted-since")
    with pytest.raises(ConfigError, match="expected an archive of topic samples with id topic-1, got one of another topic"):
        SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    alone = SampleTable(str(tmp_path)).newest(WANTED, {})
    assert alone is not None and alone.ends == {("samples", 0): 1, ("samples", 1): 1}


def test_an_empty_table_has_no_session_and_no_table_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no table"):
        SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    WarehouseTable(str(tmp_path), "samples").create()
    assert SampleTable(str(tmp_path)).newest(WANTED, TOPICS) is None


def test_what_lies_there_instead_is_refused(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]))
    told = SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    assert told is not None
    with pytest.raises(CheckpointError, match="expected 9 rows of version 2, got 2: another table lies there"):
        SampleTable(str(tmp_path)).opened(dataclasses.replace(told, rows={0: 9}), samples.schema())


def test_a_version_is_held_while_it_is_read(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]))
    table = SampleTable(str(tmp_path))
    told = table.newest(WANTED, TOPICS)
    assert told is not None
    table.hold(told, "session-a", until_ms=1000)
    assert held_versions(table.store, "samples", 999) == {told.version}
    assert held_versions(table.store, "samples", 1001) == set()

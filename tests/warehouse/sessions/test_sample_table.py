"""Sessions over a real table: a session reads a fixed version, even if the table changes later."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from roostream.errors import CheckpointError, ConfigError, SchemaError, UnavailableError
from roostream.runtime.checkpoint_store import open_store
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import OF_SAMPLE, correction_rows
from roostream.warehouse.column_popularity import recent_session_features
from roostream.warehouse.delta_table import ProgressStep, WarehouseTable
from roostream.warehouse.parquet_file import FileKey, FileRows, write_rows
from roostream.warehouse.scan import TableScan
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from roostream.warehouse.version_pins import pinned_versions
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import FlatColumn, column_types, columns_of
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples

TOPICS = {"samples": "topic-1"}
SPEC = SessionSpec(table="", version=0, shuffle_seed=None)


def archive(location: Path, records: list[Record], topic: str = "topic-1") -> None:
    """Append the records to the table, with one file for each partition."""
    store, schema = open_store(str(location)), samples.schema()
    register(store, schema)
    Warehouse(location).create()
    table = WarehouseTable(str(location), "samples")
    for partition in sorted({record.partition for record in records}):
        partition_records = [record for record in records if record.partition == partition]
        batch, _ = Decoder(schema, {}.get).decode(partition_records)
        rows = FileRows(
            columns=columns_of(batch), column_types=column_types(schema), counts_R=batch.num_candidates_R
        )
        day = datetime.fromtimestamp(partition_records[0].timestamp_ms // 1000, UTC).date()
        key = FileKey(
            table="samples", day=day, partition=partition, fingerprint=schema.fingerprint, topic=topic
        )
        file = write_rows(store, rows, key)
        name = f"samples/{topic}/{partition}"
        table.commit(
            [file],
            progress={name: ProgressStep(table.snapshot().progress(name), partition_records[-1].offset + 1)},
        )


def archive_corrections(location: Path, records: list[Record]) -> None:
    """Append corrections of one partition and day. The ids of samples in these tests are their numbers."""
    store = open_store(str(location))
    schema = samples.schema()
    table = WarehouseTable(str(location), "corrections")
    table.create()
    rows, dead = correction_rows(schema, records)
    assert not dead
    of_sample = FlatColumn(np.array([int.from_bytes(record.key or b"", "little") for record in records]))
    rows = dataclasses.replace(rows, columns={**rows.columns, OF_SAMPLE: of_sample})
    number, day = records[0].partition, datetime.fromtimestamp(samples.T0 // 1000, UTC).date()
    table.widen(rows.column_types)
    file = write_rows(
        store, rows, FileKey(table="corrections", day=day, partition=number, fingerprint=schema.fingerprint)
    )
    table.commit(
        [file], progress={f"corrections/topic-2/{number}": ProgressStep(None, records[-1].offset + 1)}
    )


def ids(location: Path, table_input: object) -> list[int]:
    session, files = SampleTable(str(location)).open_session(table_input, samples.schema())  # type: ignore[arg-type]
    rows, found = LocalSessionRows(session, files), []
    for split in session.order.splits:
        found += rows.piece(split, split.at).batch.sample_id_R.tolist()
    return found


def test_a_session_has_the_rows_of_its_version_and_ends_at_the_progress_of_the_archive(
    tmp_path: Path,
) -> None:
    records = samples.records(list(range(1, 21)))
    archive(tmp_path, records[:12])
    table_input = SampleTable(str(tmp_path)).newest(SPEC, TOPICS)
    assert (
        table_input is not None
        and table_input.rows == {0: 6, 1: 6}
        and table_input.ends == {("samples", 0): 6, ("samples", 1): 6}
    )
    assert table_input.last_close_ms == samples.T0 + 12_500
    archive(tmp_path, records[12:])
    assert sorted(ids(tmp_path, table_input)) == list(range(1, 13))
    later_input = SampleTable(str(tmp_path)).newest(SPEC, TOPICS, table_input.ends)
    assert later_input is not None and later_input.version > table_input.version
    assert sorted(ids(tmp_path, later_input)) == list(range(13, 21))
    assert later_input.ends == {("samples", 0): 10, ("samples", 1): 10}


def test_a_schema_without_a_label_of_the_archive_is_rejected_before_training(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 5))))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    table_input = table.newest(SPEC, TOPICS)
    assert table_input is not None

    def labelled(*names: str) -> Schema:
        labels = tuple(dataclasses.replace(schema.labels[0], name=name, action=name) for name in names)
        return dataclasses.replace(schema, labels=labels)

    for ask in (table.check_reader, table.open_session):
        with pytest.raises(ConfigError, match="click"):
            ask(table_input, labelled("order"))
        for known in (schema, labelled("order", "click"), labelled()):
            ask(table_input, known)


def test_a_schema_that_cannot_read_a_file_of_the_session_is_rejected_before_training(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 5))))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    hour = next(f for f in schema.ro if f.name == "hour")
    changed = dataclasses.replace(schema, ro=(dataclasses.replace(hour, kind="ids", table="item"),))
    table_input = table.newest(SPEC, TOPICS)
    without = table.newest(dataclasses.replace(SPEC, features=("age",)), TOPICS)
    assert table_input is not None and without is not None
    for ask in (table.check_reader, table.open_session):
        with pytest.raises(SchemaError, match=rf"2023-11-14.*{schema.name}.*hour"):
            ask(table_input, changed)
        ask(without, changed)
    with pytest.raises(SchemaError, match="choose other days"):
        next(TableScan(tmp_path).batches(changed))


def test_a_part_of_a_row_group_can_be_read(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 21))))
    table = SampleTable(str(tmp_path))
    table_input = table.newest(SPEC, TOPICS)
    assert table_input is not None
    session, files = table.open_session(table_input, samples.schema())
    path = session.order.splits[0].path
    assert files.batch(path, 3, 7).sample_id_R.tolist() == files.batch(path, 0, 10).sample_id_R.tolist()[3:7]
    assert files.marks(path).offset_R.tolist() == list(range(10))


def test_an_unmounted_volume_is_unavailable_and_a_missing_file_is_damage(
    tmp_path: Path,
) -> None:
    location, unmounted = tmp_path / "mount", tmp_path / "away"
    archive(location, samples.records(list(range(1, 21))))
    table = SampleTable(str(location))
    table_input = table.newest(SPEC, TOPICS)
    assert table_input is not None
    session, files = table.open_session(table_input, samples.schema())
    path = session.order.splits[0].path
    before = files.batch(path, 0, 10).sample_id_R.tolist()
    location.rename(unmounted)
    location.mkdir()
    for read in (lambda: files.batch(path, 0, 10), lambda: files.marks(path)):
        with pytest.raises(UnavailableError, match="mount"):
            read()
    location.rmdir()
    unmounted.rename(location)
    assert files.batch(path, 0, 10).sample_id_R.tolist() == before
    (location / "samples" / path).unlink()
    with pytest.raises(CheckpointError, match=path):
        files.batch(path, 0, 10)


def test_a_session_has_latest_or_streamed_labels_and_the_stream_continues_after_its_corrections(
    tmp_path: Path,
) -> None:
    numbers = list(range(1, 12, 2))
    plain, _ = Decoder(samples.schema(), {}.get).decode(samples.records(numbers))
    # The first sample whose three candidates are different items.
    first = next(r for r in range(len(numbers)) if len(set(plain.item_B[3 * r : 3 * r + 3])) == 3)
    archive(tmp_path, samples.records(numbers))
    archive_corrections(tmp_path, [samples.correction(numbers[first], 0, after=1.0, before=0.0)])
    table, topics, found = SampleTable(str(tmp_path)), {**TOPICS, "corrections": "topic-2"}, {}
    positions = {("samples", 1): 0, ("corrections", 1): 0, ("corrections", 0): 0}
    for labels, behind in (("latest", 1), ("as_streamed", 0)):
        table_input = table.newest(dataclasses.replace(SPEC, labels=labels), topics)
        assert table_input is not None
        assert table_input.stream_behind(positions) == {
            ("samples", 1): 6,
            ("corrections", 1): behind,
            ("corrections", 0): 0,
        }
        session, files = table.open_session(table_input, samples.schema())
        found[labels] = files.batch(session.order.splits[0].path, 0, 6).label_BT[:, 0].tolist()
        table.pin_session(table_input, f"session-{labels}", until_ms=1000)
    assert found["as_streamed"] == plain.label_BT[:, 0].tolist()
    corrected = plain.label_BT[:, 0].copy()
    corrected[3 * first] = 1.0
    assert found["latest"] == corrected.tolist()
    store = table.warehouse.store
    assert len(pinned_versions(store, "corrections", 999)) == 1, (
        "only the session with corrected labels must pin the table of corrections"
    )
    assert len(pinned_versions(store, "samples", 999)) == 1 and not pinned_versions(store, "samples", 1001)


def test_an_archive_of_another_topic_is_rejected_if_a_stream_follows(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]), topic="deleted-since")
    with pytest.raises(
        ConfigError,
        match="expected an archive of topic samples with id topic-1, got one of deleted-since: its offsets",
    ):
        SampleTable(str(tmp_path)).newest(SPEC, TOPICS)
    alone = SampleTable(str(tmp_path)).newest(SPEC, {})
    assert alone is not None and alone.ends == {("samples", 0): 1, ("samples", 1): 1}


def test_rows_of_a_deleted_topic_belong_to_earlier_sessions(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 21))), topic="deleted-since")
    archive(tmp_path, samples.records(list(range(31, 35))))
    table = SampleTable(str(tmp_path))
    table_input = table.newest(SPEC, TOPICS)
    assert table_input is not None and table_input.ends == {("samples", 0): 2, ("samples", 1): 2}
    assert sorted(ids(tmp_path, table_input)) == [*range(1, 21), *range(31, 35)]
    archive(tmp_path, [r._replace(offset=r.offset + 2) for r in samples.records(list(range(41, 47)))])
    later_input = table.newest(SPEC, TOPICS, table_input.ends)
    assert later_input is not None
    assert later_input.spec["topic"] == "topic-1"
    assert sorted(ids(tmp_path, later_input)) == list(range(41, 47))
    assert "topic" not in table_input.spec, (
        "a spec without a topic must keep the digest that older versions computed"
    )


@pytest.mark.parametrize(
    ("name", "value", "message_part"),
    [
        (
            "retired/topic-1/0",
            7,
            "expected samples of partition 0 from offset 6 on, got them retired up to 7",
        ),
        ("cut/2023-11-14", 1, "expected all of 2023-11-14, got a day of which keep_bytes has retired a part"),
    ],
)
def test_a_session_over_partly_retired_rows_is_rejected(
    tmp_path: Path, name: str, value: int, message_part: str
) -> None:
    records = samples.records(list(range(1, 21)))
    archive(tmp_path, records[:12])
    table = SampleTable(str(tmp_path))
    table_input = table.newest(SPEC, TOPICS)
    assert table_input is not None
    archive(tmp_path, records[12:])
    assert table.newest(SPEC, TOPICS, table_input.ends) is not None
    log = WarehouseTable(str(tmp_path), "samples")
    log.commit((), progress={name: ProgressStep(None, value), "retired/topic-1/1": ProgressStep(None, 6)})
    with pytest.raises(CheckpointError, match=message_part):
        table.newest(SPEC, TOPICS, table_input.ends)
    assert table.newest(SPEC, TOPICS) is not None


def test_an_empty_table_has_no_session_and_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        SampleTable(str(tmp_path)).newest(SPEC, TOPICS)
    Warehouse(tmp_path).create()
    assert SampleTable(str(tmp_path)).newest(SPEC, TOPICS) is None


def test_a_session_with_latest_labels_needs_the_table_of_corrections(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 3]))
    (tmp_path / "corrections").rename(tmp_path / "away")
    table = SampleTable(str(tmp_path))
    with pytest.raises(CheckpointError, match="corrections"):
        table.newest(SPEC, TOPICS)
    assert table.newest(dataclasses.replace(SPEC, labels="as_streamed"), TOPICS) is not None


def test_a_table_with_other_rows_is_rejected(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]))
    table_input = SampleTable(str(tmp_path)).newest(SPEC, TOPICS)
    assert table_input is not None
    with pytest.raises(CheckpointError):
        SampleTable(str(tmp_path)).open_session(
            dataclasses.replace(table_input, rows={0: 9}), samples.schema()
        )


@pytest.mark.parametrize("features", [(), ("age",)])
def test_a_session_records_the_features_that_it_reads(tmp_path: Path, features: tuple[str, ...]) -> None:
    archive(tmp_path, samples.records([1, 2]))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    session = table.newest(dataclasses.replace(SPEC, features=features), TOPICS)
    assert session is not None
    table.open_session(session, schema)
    every = {feature.name for feature in (*schema.ro, *schema.nro)}
    assert recent_session_features(table.warehouse.store) == [frozenset(features) or frozenset(every)]
    assert table.warehouse.column_order()

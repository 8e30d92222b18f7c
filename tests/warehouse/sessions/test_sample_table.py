"""A session of files under a real log: as it was fixed, whatever is written there later."""

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
from roostream.wire.columnar import FlatColumn, column_types, columns_of
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples

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
        rows = FileRows(
            columns=columns_of(batch), column_types=column_types(schema), counts_R=batch.num_candidates_R
        )
        day = datetime.fromtimestamp(its[0].timestamp_ms // 1000, UTC).date()
        where = FileKey(
            table="samples", day=day, partition=partition, fingerprint=schema.fingerprint, topic=topic
        )
        file = write_rows(store, rows, where)
        name = f"samples/{topic}/{partition}"
        table.commit(
            [file], progress={name: ProgressStep(table.snapshot().progress(name), its[-1].offset + 1)}
        )


def archive_corrections(place: Path, records: list[Record]) -> None:
    """Of one partition and day. These tests' samples have their numbers as ids."""
    store, schema, table = open_store(str(place)), samples.schema(), WarehouseTable(str(place), "corrections")
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


def ids(place: Path, told: object) -> list[int]:
    session, files = SampleTable(str(place)).open_session(told, samples.schema())  # type: ignore[arg-type]
    rows, found = LocalSessionRows(session, files), []
    for split in session.order.splits:
        found += rows.piece(split, split.at).batch.sample_id_R.tolist()
    return found


def test_a_session_has_the_rows_of_its_version_and_ends_at_the_progress_of_the_archive(
    tmp_path: Path,
) -> None:
    records = samples.records(list(range(1, 21)))
    archive(tmp_path, records[:12])
    told = SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    assert (
        told is not None and told.rows == {0: 6, 1: 6} and told.ends == {("samples", 0): 6, ("samples", 1): 6}
    )
    assert told.last_close_ms == samples.T0 + 12_500
    archive(tmp_path, records[12:])
    assert sorted(ids(tmp_path, told)) == list(range(1, 13))
    more = SampleTable(str(tmp_path)).newest(WANTED, TOPICS, told.ends)
    assert more is not None and more.version > told.version
    assert sorted(ids(tmp_path, more)) == list(range(13, 21))
    assert more.ends == {("samples", 0): 10, ("samples", 1): 10}


def test_a_schema_without_a_label_of_the_archive_is_rejected_before_training(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 5))))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    told = table.newest(WANTED, TOPICS)
    assert told is not None

    def labelled(*names: str) -> Schema:
        labels = tuple(dataclasses.replace(schema.labels[0], name=name, action=name) for name in names)
        return dataclasses.replace(schema, labels=labels)

    for ask in (table.check_reader, table.open_session):
        with pytest.raises(ConfigError, match="click"):
            ask(told, labelled("order"))
        for known in (schema, labelled("order", "click"), labelled()):
            ask(told, known)


def test_a_schema_that_cannot_read_a_file_of_the_session_is_rejected_before_training(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 5))))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    hour = next(f for f in schema.ro if f.name == "hour")
    changed = dataclasses.replace(schema, ro=(dataclasses.replace(hour, kind="ids", table="item"),))
    told = table.newest(WANTED, TOPICS)
    without = table.newest(dataclasses.replace(WANTED, features=("age",)), TOPICS)
    assert told is not None and without is not None
    for ask in (table.check_reader, table.open_session):
        with pytest.raises(SchemaError, match=rf"2023-11-14.*{schema.name}.*hour"):
            ask(told, changed)
        ask(without, changed)
    with pytest.raises(SchemaError, match="choose other days"):
        next(TableScan(tmp_path).batches(changed))


def test_a_part_of_a_row_group_is_read_as_such(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 21))))
    table = SampleTable(str(tmp_path))
    told = table.newest(WANTED, TOPICS)
    assert told is not None
    session, files = table.open_session(told, samples.schema())
    path = session.order.splits[0].path
    assert files.batch(path, 3, 7).sample_id_R.tolist() == files.batch(path, 0, 10).sample_id_R.tolist()[3:7]
    assert files.marks(path).offset_R.tolist() == list(range(10))


def test_a_mount_that_goes_away_during_a_session_is_waited_for_and_a_missing_file_is_not(
    tmp_path: Path,
) -> None:
    place, away = tmp_path / "mount", tmp_path / "away"
    archive(place, samples.records(list(range(1, 21))))
    table = SampleTable(str(place))
    told = table.newest(WANTED, TOPICS)
    assert told is not None
    session, files = table.open_session(told, samples.schema())
    path = session.order.splits[0].path
    before = files.batch(path, 0, 10).sample_id_R.tolist()
    place.rename(away)
    place.mkdir()
    for read in (lambda: files.batch(path, 0, 10), lambda: files.marks(path)):
        with pytest.raises(UnavailableError, match="mount"):
            read()
    place.rmdir()
    away.rename(place)
    assert files.batch(path, 0, 10).sample_id_R.tolist() == before
    (place / "samples" / path).unlink()
    with pytest.raises(CheckpointError, match=path):
        files.batch(path, 0, 10)


def test_labels_are_corrected_or_as_streamed_and_the_stream_brings_the_other_corrections(
    tmp_path: Path,
) -> None:
    numbers = list(range(1, 12, 2))
    plain, _ = Decoder(samples.schema(), {}.get).decode(samples.records(numbers))
    first = next(
        r for r in range(len(numbers)) if len(set(plain.item_B[3 * r : 3 * r + 3])) == 3
    )  # of different items
    archive(tmp_path, samples.records(numbers))
    archive_corrections(tmp_path, [samples.correction(numbers[first], 0, after=1.0, before=0.0)])
    table, topics, found = SampleTable(str(tmp_path)), {**TOPICS, "corrections": "topic-2"}, {}
    at = {("samples", 1): 0, ("corrections", 1): 0, ("corrections", 0): 0}
    for labels, behind in (("latest", 1), ("as_streamed", 0)):
        told = table.newest(dataclasses.replace(WANTED, labels=labels), topics)
        assert told is not None
        assert told.stream_behind(at) == {
            ("samples", 1): 6,
            ("corrections", 1): behind,
            ("corrections", 0): 0,
        }
        session, files = table.open_session(told, samples.schema())
        found[labels] = files.batch(session.order.splits[0].path, 0, 6).label_BT[:, 0].tolist()
        table.pin_session(told, f"session-{labels}", until_ms=1000)
    assert found["as_streamed"] == plain.label_BT[:, 0].tolist()
    corrected = plain.label_BT[:, 0].copy()
    corrected[3 * first] = 1.0
    assert found["latest"] == corrected.tolist()
    store = table.warehouse.store
    assert len(pinned_versions(store, "corrections", 999)) == 1, "only of the session that reads corrections"
    assert len(pinned_versions(store, "samples", 999)) == 1 and not pinned_versions(store, "samples", 1001)


def test_an_archive_of_another_topic_is_rejected_if_a_stream_follows(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]), topic="deleted-since")
    with pytest.raises(
        ConfigError,
        match="expected an archive of topic samples with id topic-1, got one of deleted-since: its offsets",
    ):
        SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    alone = SampleTable(str(tmp_path)).newest(WANTED, {})
    assert alone is not None and alone.ends == {("samples", 0): 1, ("samples", 1): 1}


def test_rows_of_a_deleted_topic_belong_to_earlier_sessions(tmp_path: Path) -> None:
    archive(tmp_path, samples.records(list(range(1, 21))), topic="deleted-since")
    archive(tmp_path, samples.records(list(range(31, 35))))
    table = SampleTable(str(tmp_path))
    told = table.newest(WANTED, TOPICS)
    assert told is not None and told.ends == {("samples", 0): 2, ("samples", 1): 2}
    assert sorted(ids(tmp_path, told)) == [*range(1, 21), *range(31, 35)]
    archive(tmp_path, [r._replace(offset=r.offset + 2) for r in samples.records(list(range(41, 47)))])
    more = table.newest(WANTED, TOPICS, told.ends)
    assert more is not None
    assert more.spec["topic"] == "topic-1"
    assert sorted(ids(tmp_path, more)) == list(range(41, 47))
    assert "topic" not in told.spec, "digests of sessions that begin at the beginning are what they were"


@pytest.mark.parametrize(
    ("name", "value", "said"),
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
    tmp_path: Path, name: str, value: int, said: str
) -> None:
    records = samples.records(list(range(1, 21)))
    archive(tmp_path, records[:12])
    table = SampleTable(str(tmp_path))
    told = table.newest(WANTED, TOPICS)
    assert told is not None
    archive(tmp_path, records[12:])
    assert table.newest(WANTED, TOPICS, told.ends) is not None
    log = WarehouseTable(str(tmp_path), "samples")
    log.commit((), progress={name: ProgressStep(None, value), "retired/topic-1/1": ProgressStep(None, 6)})
    with pytest.raises(CheckpointError, match=said):
        table.newest(WANTED, TOPICS, told.ends)
    assert table.newest(WANTED, TOPICS) is not None


def test_an_empty_table_has_no_session_and_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    WarehouseTable(str(tmp_path), "samples").create()
    assert SampleTable(str(tmp_path)).newest(WANTED, TOPICS) is None


def test_a_table_with_other_rows_is_rejected(tmp_path: Path) -> None:
    archive(tmp_path, samples.records([1, 2]))
    told = SampleTable(str(tmp_path)).newest(WANTED, TOPICS)
    assert told is not None
    with pytest.raises(CheckpointError):
        SampleTable(str(tmp_path)).open_session(dataclasses.replace(told, rows={0: 9}), samples.schema())


@pytest.mark.parametrize("named", [(), ("age",)])
def test_a_session_records_the_features_that_it_reads(tmp_path: Path, named: tuple[str, ...]) -> None:
    archive(tmp_path, samples.records([1, 2]))
    table, schema = SampleTable(str(tmp_path)), samples.schema()
    session = table.newest(dataclasses.replace(WANTED, features=named), TOPICS)
    assert session is not None
    table.open_session(session, schema)
    every = {feature.name for feature in (*schema.ro, *schema.nro)}
    assert recent_session_features(table.warehouse.store) == [frozenset(named) or frozenset(every)]
    assert table.warehouse.column_order()

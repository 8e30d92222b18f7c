"""The archiver stores every record of a topic exactly once, even if programs are killed, compete or are
unavailable."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roostream.errors import CheckpointError, FencedError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import (
    MAX_PENDING_MS,
    DeadRecord,
    check_has_schemas,
    progress_name,
    rows_by_day,
    sample_rows,
    sample_types,
)
from roostream.warehouse.archiver_program import METRICS, metrics_of, own_partitions
from roostream.warehouse.config import ArchiverConfig
from roostream.warehouse.parquet_file import FileRows
from roostream.warehouse.record_columns import rebuild_records
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.archive_runs import (
    FLUSH_POLICY,
    TOPIC_IDS,
    FullDisk,
    count_offsets,
    kill_competing_processes,
    make_archiver,
    make_topic_records,
    stored_files,
)
from tests.warehouse.sample_cases import assert_same_batch, decode_records, rich_schema
from tests.wire.sample_builders import parse_schema, record_of

SCHEMA = rich_schema()
RECORDS = make_topic_records(SCHEMA, 40)
EACH_ONCE = Counter((r.partition, r.offset) for r in RECORDS)


def plain_sample(schema: Schema, ro: Mapping[str, Any]) -> pb.Sample:
    """Build a sample with one candidate and these request features."""
    return pb.Sample(
        header=pb.Header(request_id="r", user_id=1, time_ms=1, schema=schema.fingerprint),
        sample_id=1,
        close_ms=2,
        item_ids=[1],
        ro=encode_ro(schema, ro),
        parts=[pb.Part(nro=encode_nro(schema, {}, 1), num_rows=1)],
        labels=[0.0] * len(schema.labels),
    )


def test_every_record_becomes_one_row_and_progress_is_the_end_of_the_topic(tmp_path: Path) -> None:
    archiver, reader, _ = make_archiver(tmp_path, RECORDS)
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0, max_records=9)
    archiver.flush()
    assert count_offsets(tmp_path) == EACH_ONCE and archiver.counts.commits > 1
    found = Warehouse(tmp_path).samples.snapshot()
    assert [found.progress(progress_name(("samples", p), "topic-1")) for p in (0, 1)] == [40, 40]
    assert found.progress(progress_name(("samples", 0), "topic-1-made-again")) is None
    assert metrics_of(archiver, 1).keys() == METRICS.keys()
    assert archiver.counts.rows == 80 and archiver.counts.bytes == sum(f.bytes for f in found.files)


def test_of_two_archivers_of_a_partition_one_commits_and_the_other_continues_from_there(
    tmp_path: Path,
) -> None:
    one, two = (make_archiver(tmp_path, RECORDS)[0] for _ in range(2))
    for archiver in (one, two):
        archiver.open()
        archiver.turn(0.0, max_records=4)
    one.flush()
    two.flush()
    assert two.counts.refused == 1 and two.num_buffered_bytes == 0
    for _ in range(4):
        for archiver in (two, one):
            archiver.turn(0.0, max_records=25)
            archiver.flush()
    assert count_offsets(tmp_path) == EACH_ONCE


def test_several_archivers_share_the_partitions() -> None:
    config = {"bootstrap": "a:1", "store": "/s", "warehouse": "/w", "partitions": 5}
    shares = [own_partitions(ArchiverConfig(**config, index=i, num_archivers=2)) for i in range(2)]  # type: ignore[arg-type]
    assert sorted(n for share in shares for topic, n in share if topic == "samples") == list(range(5))
    assert all(
        {n for t, n in share if t == "samples"} == {n for t, n in share if t == "corrections"}
        for share in shares
    )


def test_files_are_written_by_size_or_by_time(tmp_path: Path) -> None:
    clock = FakeClock()
    archiver, _, _ = make_archiver(tmp_path, RECORDS, clock=clock)
    archiver.open()
    archiver.turn(0.0, max_records=2)
    assert archiver.num_buffered_bytes > 0 and archiver.counts.commits == 0
    clock.advance(FLUSH_POLICY.after_ms / 1000)
    archiver.turn(0.0, max_records=2)
    assert archiver.num_buffered_bytes == 0 and archiver.counts.commits == 1
    while archiver.counts.commits == 1:
        archiver.turn(0.0, max_records=2)
        assert archiver.num_buffered_bytes < FLUSH_POLICY.bytes + 8000, (
            "the number of buffered bytes must be bounded"
        )


def test_an_unavailable_warehouse_loses_nothing_and_stops_reading(tmp_path: Path) -> None:
    archiver, reader, _ = make_archiver(tmp_path, RECORDS)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    store, unavailable_store = archiver.warehouse.store, MemoryStore()
    archiver.warehouse.store = unavailable_store
    archiver.rule = dataclasses.replace(FLUSH_POLICY, bytes=1)
    for _ in range(3):
        unavailable_store.fail_next("create")
        with pytest.raises(UnavailableError):
            archiver.turn(0.0)
    assert sum(reader.positions().values()) == 5
    archiver.warehouse.store = store
    while not reader.at_end() or archiver.num_buffered_bytes:
        archiver.turn(0.0)
    assert count_offsets(tmp_path) == EACH_ONCE


def test_records_that_do_not_fit_on_a_disk_leave_no_file(tmp_path: Path) -> None:
    archiver, _, _ = make_archiver(tmp_path, RECORDS)
    archiver.rule = dataclasses.replace(FLUSH_POLICY, bytes=1 << 30)
    archiver.open()
    archiver.turn(0.0, max_records=len(RECORDS))
    store = archiver.warehouse.store
    for _ in range(3):
        archiver.warehouse.store = FullDisk(tmp_path, 1)  # there is a file for each partition
        with pytest.raises(UnavailableError, match="No space left"):
            archiver.flush()
        assert not stored_files(tmp_path)
    archiver.warehouse.store = store
    archiver.flush()
    assert count_offsets(tmp_path) == EACH_ONCE


def test_unreadable_records_become_dead_letters_and_are_skipped(tmp_path: Path) -> None:
    records = [r for r in RECORDS if r.partition == 0]
    records[3] = records[3]._replace(value=b"\x03\x01\xff\xff")
    records[5] = records[5]._replace(value=wire.encode(wire.HEARTBEAT, wire.TYPES[wire.HEARTBEAT]()))
    archiver, _, dead = make_archiver(tmp_path, records, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert [(d.record.offset, d.reason) for d in dead] == [(3, "undecodable"), (5, "unknown_type")]
    assert set(count_offsets(tmp_path)) == {(0, n) for n in range(40)} - {(0, 3), (0, 5)}
    restarted, reader, dead_again = make_archiver(tmp_path, records, [0])
    restarted.open()
    assert reader.positions()["samples", 0] == 40 and not dead_again


def test_a_partition_of_only_dead_records_makes_progress(tmp_path: Path) -> None:
    unreadable = [Record("samples", 0, n, 0, None, b"") for n in range(3)]
    archiver, _, dead = make_archiver(tmp_path, unreadable, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert len(dead) == 3
    found = Warehouse(tmp_path).samples.snapshot()
    assert found.files == () and found.progress(progress_name(("samples", 0), TOPIC_IDS["samples"])) == 3


def test_a_record_that_cannot_be_stored_becomes_a_dead_letter_and_others_are_archived(tmp_path: Path) -> None:
    records = [r for r in RECORDS if r.partition == 0]
    late, early, cut = (pb.Sample.FromString(records[n].value[2:]) for n in (3, 5, 7))
    late.close_ms, early.close_ms, cut.header.surface = 1 << 62, -(1 << 62), "x" * 63 + "é"
    for n, sample in ((3, late), (5, early), (7, cut)):
        records[n] = records[n]._replace(value=wire.encode(wire.SAMPLE, sample))
    records[9] = records[9]._replace(value=b"")
    archiver, _, dead = make_archiver(tmp_path, records, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    expected_reasons = {3: "bad_time", 5: "bad_time", 9: "unknown_type"}
    assert {d.record.offset: d.reason for d in dead} == expected_reasons
    assert set(count_offsets(tmp_path)) == {(0, n) for n in range(40) if n not in expected_reasons}
    warehouse = Warehouse(tmp_path)
    stored = {}
    for file in warehouse.samples.snapshot().files:
        opened = warehouse.open_file("samples", file)
        columns, counts_R = opened.columns(sample_types(SCHEMA))
        rebuilt = rebuild_records(SCHEMA, columns, counts_R)
        stored |= dict(zip(columns["offset"].values.tolist(), rebuilt, strict=True))
        wire_batch = decode_records(SCHEMA, [records[n] for n in sorted(columns["offset"].values.tolist())])
        assert_same_batch(
            opened.read(SCHEMA, SCHEMA),
            wire_batch.take_requests(np.argsort(np.argsort(columns["offset"].values))),
        )
    assert stored[7] == (records[7].key, records[7].value)


def test_a_damaged_schema_file_stops_only_its_own_records_unless_the_warehouse_has_a_copy(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    store.put(f"schemas/{SCHEMA.fingerprint:016x}.toml", b"cut off [")
    for copied in (False, True):
        location = tmp_path / str(copied)
        archiver, _, dead = make_archiver(location, RECORDS)
        archiver.registry = open_registry(store)
        archiver.open()
        if copied:
            register(archiver.warehouse.store, SCHEMA)
        archiver.turn(0.0)
        archiver.flush()
        assert count_offsets(location) == (EACH_ONCE if copied else Counter()) and len(dead) == (
            0 if copied else 80
        )


def test_no_record_becomes_a_dead_letter_while_the_folder_of_schemas_is_away(tmp_path: Path) -> None:
    memory = MemoryStore()
    archiver, _, dead = make_archiver(tmp_path, RECORDS, memory=memory)
    archiver.registry = open_registry(memory)
    (name,) = memory.list("schemas")
    away = memory.get(name)
    memory.delete(name)
    archiver.open()
    with pytest.raises(UnavailableError, match="schemas"):
        archiver.turn(0.0)
    memory.put(name, away)
    archiver.flush()
    assert count_offsets(tmp_path) == EACH_ONCE and not dead


def test_a_record_that_causes_an_internal_error_is_isolated_and_others_are_kept() -> None:
    def fails_on_offset_5(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[DeadRecord]]:
        if any(record.offset == 5 for record in records):
            raise ZeroDivisionError
        return sample_rows(writer, records)

    records = [r for r in RECORDS if r.partition == 0]
    days, dead = rows_by_day(fails_on_offset_5, SCHEMA, records)
    (rows,) = days.values()
    assert sorted(rows.columns["offset"].values.tolist()) == [n for n in range(40) if n != 5]
    assert [(d.record.offset, d.reason) for d in dead] == [(5, "internal_error")]
    whole, _ = rows_by_day(sample_rows, SCHEMA, records[:5])
    assert whole.keys() == days.keys()


def test_files_that_are_gone_before_their_commit_are_written_again(tmp_path: Path) -> None:
    clock = FakeClock()
    archiver, _, _ = make_archiver(tmp_path, RECORDS, clock=clock)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    archiver.flush()
    archiver.turn(0.0, max_records=5)
    log = tmp_path / "samples/_delta_log"
    log.rename(tmp_path / "away")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            archiver.flush()
    (tmp_path / "away").rename(log)
    committed = {file.path for file in Warehouse(tmp_path).samples.snapshot().files}
    waiting = [
        p for p in (tmp_path / "samples").rglob("*.parquet") if not p.as_posix().endswith(tuple(committed))
    ]
    assert waiting
    for path in waiting:
        path.unlink()
    with pytest.raises(UnavailableError):
        archiver.flush()
    archiver.flush()
    assert sum(count_offsets(tmp_path).values()) == 10


def test_files_that_waited_a_day_for_their_commit_are_written_again(tmp_path: Path) -> None:
    clock = FakeClock()
    archiver, _, _ = make_archiver(tmp_path, RECORDS, clock=clock)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    archiver.flush()
    archiver.turn(0.0, max_records=5)
    first = {path.name for path in (tmp_path / "samples").rglob("*.parquet")}
    (tmp_path / "samples/_delta_log").rename(tmp_path / "away")
    with pytest.raises(CheckpointError):
        archiver.flush()
    waiting = {path.name for path in (tmp_path / "samples").rglob("*.parquet")} - first
    assert waiting
    (tmp_path / "away").rename(tmp_path / "samples/_delta_log")
    clock.jump(MAX_PENDING_MS + 1)
    archiver.flush()
    committed = {Path(file.path).name for file in Warehouse(tmp_path).samples.snapshot().files}
    assert sum(count_offsets(tmp_path).values()) == 10 and not committed & waiting


def test_nothing_is_archived_into_an_empty_mount_point(tmp_path: Path) -> None:
    memory, location = MemoryStore(), tmp_path / "warehouse"
    make_archiver(location, RECORDS, memory=memory)[0].open()
    location.rename(tmp_path / "unmounted")
    location.mkdir()
    archiver, _, _ = make_archiver(location, RECORDS, memory=memory)
    with pytest.raises(UnavailableError, match="mount"):
        archiver.open()
    assert not list(location.iterdir())
    location.rmdir()
    (tmp_path / "unmounted").rename(location)
    archiver.open()


def test_nothing_is_archived_into_a_foreign_or_partial_warehouse(tmp_path: Path) -> None:
    memory, location = MemoryStore(), tmp_path / "warehouse"
    make_archiver(location, RECORDS, memory=memory)[0].open()
    (location / "corrections").rename(tmp_path / "corrections")
    archiver, _, _ = make_archiver(location, RECORDS, memory=memory)
    with pytest.raises(UnavailableError, match="corrections"):
        archiver.open()
    Warehouse(location).create()
    with pytest.raises(CheckpointError, match="corrections"):
        archiver.open()
    (name,) = memory.list("warehouses")
    memory.put(name, b"cut off")
    with pytest.raises(CheckpointError, match="damaged"):
        archiver.open()
    memory.delete(name)
    archiver.open()


def test_records_of_a_topic_that_was_created_again_are_not_archived_under_the_old_id(tmp_path: Path) -> None:
    topics = dict(TOPIC_IDS)
    archiver, _, _ = make_archiver(tmp_path, RECORDS, topics=topics)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    topics["samples"] = "made-again"
    with pytest.raises(FencedError, match="samples"):
        archiver.flush()
    assert not Warehouse(tmp_path).samples.snapshot().files
    restarted, _, _ = make_archiver(tmp_path, RECORDS, topics=topics)
    restarted.open()
    restarted.turn(0.0)
    restarted.flush()
    assert {file.topic for file in Warehouse(tmp_path).samples.snapshot().files} == {"made-again"}


def test_a_column_of_another_type_is_archived_and_its_file_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"float": "", "ids": 'kind = "ids"\ntable = "item"\n'}
    for kind, feature_text in kinds.items():
        head = f'name = "{kind}"\n[tables.item]\ndim = 4\n[[label]]\nname = "click"\naction = "click"\n'
        schema = parse_schema(f'{head}[[ro]]\nname = "age"\n{feature_text}')
        record = record_of(plain_sample(schema, {"age": [7, 8] if kind == "ids" else 7.5}), 0)._replace(
            partition=0
        )
        archiver, _, dead = make_archiver(tmp_path, [record], [0], topics={**TOPIC_IDS, "samples": kind})
        archiver.registry = {schema.fingerprint: schema}.get
        archiver.open()
        archiver.turn(0.0)
        archiver.flush()
        assert not dead
        warehouse = Warehouse(tmp_path)
        (file,) = [f for f in warehouse.samples.snapshot().files if f.topic == kind]
        assert_same_batch(
            warehouse.open_file("samples", file).read(schema, schema), decode_records(schema, [record])
        )
    assert "rename the feature" in caplog.text


def test_programs_killed_at_any_moment_store_every_record_once(tmp_path: Path) -> None:
    kill_counts = kill_competing_processes(tmp_path, kills=4, per_partition=150, seed=2)
    assert kill_counts.archivers + kill_counts.compactors == 4
    assert count_offsets(tmp_path) == Counter((p, n) for p in (0, 1) for n in range(150))


def test_a_store_without_any_schema_is_rejected() -> None:
    store = MemoryStore()
    with pytest.raises(UnavailableError, match="give the archiver their `store`"):
        check_has_schemas(store, "s3://bucket/other")
    register(store, rich_schema())
    check_has_schemas(store, "s3://bucket/other")

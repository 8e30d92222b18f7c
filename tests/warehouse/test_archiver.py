"""Every record of a topic is in the table exactly once, whoever dies, rivals or is away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.warehouse.archive import progress_name
from roostream.warehouse.archiver_program import own_partitions
from roostream.warehouse.config import ArchiverConfig
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire.records import Record
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.archive_runs import RULE, TOPIC_IDS, an_archiver, kill_rivals, places, topic
from tests.warehouse.sample_cases import rich_schema

SCHEMA = rich_schema()
RECORDS = topic(SCHEMA, 40)
ALL = Counter((r.partition, r.offset) for r in RECORDS)


def test_every_record_is_a_row_once_and_progress_is_the_topics_end(tmp_path: Path) -> None:
    archiver, reader, _ = an_archiver(tmp_path, RECORDS)
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0, max_records=9)
    archiver.flush()
    assert places(tmp_path) == ALL and archiver.counts.commits > 1
    found = Warehouse(tmp_path).samples.snapshot()
    assert [found.progress(progress_name(("samples", p), "topic-1")) for p in (0, 1)] == [40, 40]
    assert found.progress(progress_name(("samples", 0), "topic-1-made-again")) is None
    assert archiver.counts.rows == 80 and archiver.counts.bytes == sum(f.bytes for f in found.files)


def test_another_goes_on_where_one_stopped(tmp_path: Path) -> None:
    first, _, _ = an_archiver(tmp_path, RECORDS)
    first.open()
    first.turn(0.0, max_records=30)
    first.flush()
    first.turn(0.0, max_records=7)  # read, never committed
    second, reader, _ = an_archiver(tmp_path, RECORDS)
    second.open()
    assert sum(reader.positions().values()) == 30
    second.turn(0.0)
    second.flush()
    assert places(tmp_path) == ALL


def test_a_rival_lands_nothing_twice_and_reads_on_where_the_other_is(tmp_path: Path) -> None:
    one, two = (an_archiver(tmp_path, RECORDS)[0] for _ in range(2))
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
    assert places(tmp_path) == ALL


def test_several_share_the_partitions(tmp_path: Path) -> None:
    for number in (0, 1):
        archiver, _, _ = an_archiver(tmp_path, RECORDS, [number])
        archiver.open()
        archiver.turn(0.0)
        archiver.flush()
    assert places(tmp_path) == ALL
    config = {"bootstrap": "a:1", "store": "/s", "warehouse": "/w", "partitions": 5}
    shares = [own_partitions(ArchiverConfig(**config, index=i, num_archivers=2)) for i in range(2)]  # type: ignore[arg-type]
    assert sorted(n for share in shares for topic, n in share if topic == "samples") == list(range(5))
    assert all(
        {n for t, n in share if t == "samples"} == {n for t, n in share if t == "corrections"}
        for share in shares
    )


def test_files_are_written_by_size_or_by_time(tmp_path: Path) -> None:
    clock = FakeClock()
    archiver, _, _ = an_archiver(tmp_path, RECORDS, clock=clock)
    archiver.open()
    archiver.turn(0.0, max_records=2)
    assert archiver.num_buffered_bytes > 0 and archiver.counts.commits == 0
    clock.advance(RULE.after_ms / 1000)
    archiver.turn(0.0, max_records=2)
    assert archiver.num_buffered_bytes == 0 and archiver.counts.commits == 1
    while archiver.counts.commits == 1:
        archiver.turn(0.0, max_records=2)
        assert archiver.num_buffered_bytes < RULE.bytes + 8000, "what waits is bounded"


def test_a_warehouse_that_is_away_loses_nothing_and_reads_no_more_meanwhile(tmp_path: Path) -> None:
    archiver, reader, _ = an_archiver(tmp_path, RECORDS)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    store, away = archiver.warehouse.store, MemoryStore()
    archiver.warehouse.store = away
    archiver.rule = RULE.__class__(bytes=1, after_ms=RULE.after_ms)
    for _ in range(3):
        away.fail_next("create")
        with pytest.raises(UnavailableError):
            archiver.turn(0.0)
    assert sum(reader.positions().values()) == 5
    archiver.warehouse.store = store
    while not reader.at_end() or archiver.num_buffered_bytes:
        archiver.turn(0.0)
    assert places(tmp_path) == ALL


def test_records_that_make_no_row_are_dead_letters_and_are_passed(tmp_path: Path) -> None:
    records = [r for r in RECORDS if r.partition == 0]
    records[3] = records[3]._replace(value=b"\x03\x01\xff\xff")
    records[5] = records[5]._replace(value=wire.encode(wire.HEARTBEAT, wire.TYPES[wire.HEARTBEAT]()))
    archiver, _, morgue = an_archiver(tmp_path, records, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert [(d.record.offset, d.reason) for d in morgue.letters] == [(3, "undecodable"), (5, "unknown_type")]
    assert set(places(tmp_path)) == {(0, n) for n in range(40)} - {(0, 3), (0, 5)}
    again, reader, none = an_archiver(tmp_path, records, [0])
    again.open()
    assert reader.positions()["samples", 0] == 40 and not none.letters


def test_a_partition_of_dead_records_alone_makes_progress(tmp_path: Path) -> None:
    archiver, _, morgue = an_archiver(
        tmp_path, [Record("samples", 0, n, 0, None, b"") for n in range(3)], [0]
    )
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert len(morgue.letters) == 3
    found = Warehouse(tmp_path).samples.snapshot()
    assert found.files == () and found.progress(progress_name(("samples", 0), TOPIC_IDS["samples"])) == 3


def test_the_schemas_of_what_is_archived_are_in_the_warehouse(tmp_path: Path) -> None:
    archiver, _, _ = an_archiver(tmp_path, RECORDS)
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    found = Warehouse(tmp_path).registry(SCHEMA.fingerprint)
    assert found is not None and found.fingerprint == SCHEMA.fingerprint


def test_rivals_that_are_killed_at_any_moment_land_every_record_once(tmp_path: Path) -> None:
    killed = kill_rivals(tmp_path, kills=4, per_partition=150, seed=2)
    assert killed.archivers + killed.compactors == 4
    assert places(tmp_path) == Counter((p, n) for p in (0, 1) for n in range(150))

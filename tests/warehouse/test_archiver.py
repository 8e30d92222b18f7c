"""Every record of a topic is in the table exactly once, whatever program is killed, competes or is away."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.warehouse.archive import progress_name
from roostream.warehouse.archiver_program import METRICS, metrics_of, own_partitions
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


def test_every_record_becomes_one_row_and_progress_is_the_end_of_the_topic(tmp_path: Path) -> None:
    archiver, reader, _ = an_archiver(tmp_path, RECORDS)
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0, max_records=9)
    archiver.flush()
    assert places(tmp_path) == ALL and archiver.counts.commits > 1
    found = Warehouse(tmp_path).samples.snapshot()
    assert [found.progress(progress_name(("samples", p), "topic-1")) for p in (0, 1)] == [40, 40]
    assert found.progress(progress_name(("samples", 0), "topic-1-made-again")) is None
    assert metrics_of(archiver).keys() == METRICS.keys()
    assert archiver.counts.rows == 80 and archiver.counts.bytes == sum(f.bytes for f in found.files)


def test_of_two_archivers_of_a_partition_one_commits_and_the_other_continues_from_there(
    tmp_path: Path,
) -> None:
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


def test_an_unavailable_warehouse_loses_nothing_and_stops_reading(tmp_path: Path) -> None:
    archiver, reader, _ = an_archiver(tmp_path, RECORDS)
    archiver.open()
    archiver.turn(0.0, max_records=5)
    store, away = archiver.warehouse.store, MemoryStore()
    archiver.warehouse.store = away
    archiver.rule = dataclasses.replace(RULE, bytes=1)
    for _ in range(3):
        away.fail_next("create")
        with pytest.raises(UnavailableError):
            archiver.turn(0.0)
    assert sum(reader.positions().values()) == 5
    archiver.warehouse.store = store
    while not reader.at_end() or archiver.num_buffered_bytes:
        archiver.turn(0.0)
    assert places(tmp_path) == ALL


def test_unreadable_records_become_dead_letters_and_are_passed(tmp_path: Path) -> None:
    records = [r for r in RECORDS if r.partition == 0]
    records[3] = records[3]._replace(value=b"\x03\x01\xff\xff")
    records[5] = records[5]._replace(value=wire.encode(wire.HEARTBEAT, wire.TYPES[wire.HEARTBEAT]()))
    archiver, _, dead = an_archiver(tmp_path, records, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert [(d.record.offset, d.reason) for d in dead] == [(3, "undecodable"), (5, "unknown_type")]
    assert set(places(tmp_path)) == {(0, n) for n in range(40)} - {(0, 3), (0, 5)}
    again, reader, dead_again = an_archiver(tmp_path, records, [0])
    again.open()
    assert reader.positions()["samples", 0] == 40 and not dead_again


def test_a_partition_of_only_dead_records_makes_progress(tmp_path: Path) -> None:
    unreadable = [Record("samples", 0, n, 0, None, b"") for n in range(3)]
    archiver, _, dead = an_archiver(tmp_path, unreadable, [0])
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    assert len(dead) == 3
    found = Warehouse(tmp_path).samples.snapshot()
    assert found.files == () and found.progress(progress_name(("samples", 0), TOPIC_IDS["samples"])) == 3


def test_programs_killed_at_any_moment_store_every_record_once(tmp_path: Path) -> None:
    killed = kill_rivals(tmp_path, kills=4, per_partition=150, seed=2)
    assert killed.archivers + killed.compactors == 4
    assert places(tmp_path) == Counter((p, n) for p in (0, 1) for n in range(150))

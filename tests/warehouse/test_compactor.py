"""The compactor seals days: a sealed day has each sample once, ordered by user, with the latest labels and
the labels at the close. It also retires old days and deletes unreferenced files."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import threading
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import key_bytes, sample_id
from roostream.warehouse.archive import sample_types
from roostream.warehouse.compact import (
    Compactor,
    Seal,
    compact_name,
    files_to_retire,
    folded_name,
    max_runs,
    merge_files,
    next_offset_by_topic,
    partly_retired_days,
    partly_retired_name,
    retired_name,
)
from roostream.warehouse.compactor_program import METRICS, metrics_of
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import DataFile, new_path
from roostream.warehouse.latest_labels import files_of_part, overlay_batch, read_latest
from roostream.warehouse.record_columns import rebuild_records
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.version_pins import VersionPin, pin_version
from roostream.warehouse.warehouse import COLUMN_ORDER, Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.records import Record
from tests.runtime.full_disk import limited_file_size
from tests.warehouse.archive_runs import TOPIC_IDS, FullDisk, count_offsets, make_archiver, stored_files
from tests.warehouse.sample_cases import (
    assert_same_batch,
    decode_records,
    make_correction,
    rich_records,
    rich_schema,
    with_joiner_keys,
)
from tests.warehouse.test_delta_table import make_file

SCHEMA = rich_schema()
DAY_MS = 86_400_000


def closed_on(records: list[Record], day: int, first_offset: int = 0, user: int = 0) -> list[Record]:
    """Change samples to close on the given day. Users alternate unless `user` is given."""
    out = []
    for n, record in enumerate(records):
        sample = pb.Sample.FromString(record.value[2:])
        sample.close_ms += day * DAY_MS
        sample.header.user_id = user or n % 7 + 1
        request = sample.header.request_id
        sample.sample_id = sample_id(key_bytes(sample.header.user_id, 0, request), request)
        offset = first_offset + n
        out.append(
            record._replace(
                value=wire.encode(wire.SAMPLE, sample), timestamp_ms=sample.close_ms, offset=offset
            )
        )
    return with_joiner_keys(out)


FIRST_DAY = closed_on(rich_records(SCHEMA, 50, partition=0), 0)
LATER_DAY = closed_on(rich_records(SCHEMA, 3, partition=0), 3, first_offset=50)


def archive(
    location: Path, records: list[Record], per_flush: int = 9, topics: Mapping[str, str] = TOPIC_IDS
) -> None:
    archiver, reader, dead = make_archiver(location, records, [0], topics=topics)
    archiver.open()
    while not reader.at_end():
        archiver.turn(0.0, max_records=per_flush)
        archiver.flush()
    assert not dead


def make_compactor(location: Path, **settings: int) -> Compactor:
    config = CompactorConfig(**{"warehouse": str(location), "seal_after_ms": 0, **settings})  # type: ignore[arg-type]
    return Compactor(Warehouse(location), config, FakeClock())


def seal_all(compactor: Compactor) -> int:
    return sum(compactor.seal(seal) for seal in compactor.due())


def batches(location: Path, day: int, labels: str = "as_streamed") -> list[Batch]:
    warehouse = Warehouse(location)
    files = [f for f in warehouse.samples.snapshot().files if f.day == date(1970, 1, 1) + timedelta(days=day)]
    return [warehouse.open_file("samples", f).read(SCHEMA, SCHEMA, labels=labels) for f in files]  # type: ignore[arg-type]


def test_the_files_of_a_day_become_one_file_ordered_by_user(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    assert len(batches(tmp_path, 0)) > 4
    compactor = make_compactor(tmp_path)
    assert seal_all(compactor) == 1 and compactor.counts.repeated == 0
    (sealed,) = batches(tmp_path, 0)
    users = [pb.Sample.FromString(FIRST_DAY[n].value[2:]).header.user_id for n in sealed.offset_R.tolist()]
    assert users == sorted(users) and sorted(sealed.offset_R.tolist()) == list(range(50))
    assert_same_batch(sealed, decode_records(SCHEMA, FIRST_DAY).take_requests(sealed.offset_R))
    assert len(batches(tmp_path, 3)) == 1, "the newest day must not be sealed"
    assert compactor.due() == []


def test_sealed_samples_are_rebuilt_byte_for_byte(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    seal_all(make_compactor(tmp_path, max_rows=20))
    warehouse, found = Warehouse(tmp_path), dict[int, tuple[bytes, bytes]]()
    for file in warehouse.samples.snapshot().files:
        columns, counts_R = warehouse.open_file("samples", file).columns(sample_types(SCHEMA))
        found |= dict(
            zip(columns["offset"].values.tolist(), rebuild_records(SCHEMA, columns, counts_R), strict=True)
        )
    assert found == {r.offset: (r.key, r.value) for r in (*FIRST_DAY, *LATER_DAY)}
    assert [f.rows for f in warehouse.samples.snapshot().files if f.sealed].count(20) == 2


def test_a_duplicate_sample_is_stored_once_after_the_seal(tmp_path: Path) -> None:
    copies = [record._replace(offset=50 + n) for n, record in enumerate(FIRST_DAY[:20])]
    later = closed_on(rich_records(SCHEMA, 3, partition=0), 3, first_offset=70)
    archive(tmp_path, [*FIRST_DAY, *copies, *later])
    compactor = make_compactor(tmp_path)
    seal_all(compactor)
    (sealed,) = batches(tmp_path, 0)
    assert sorted(sealed.offset_R.tolist()) == list(range(50)) and compactor.counts.repeated == 20


def test_samples_after_a_seal_are_merged_by_the_next_seal(tmp_path: Path) -> None:
    late = closed_on(rich_records(SCHEMA, 60, partition=0)[50:], 0, first_offset=53)
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    seal_all(make_compactor(tmp_path))
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *late])
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(63))
    assert seal_all(make_compactor(tmp_path)) == 1
    (sealed,) = batches(tmp_path, 0)
    assert sealed.num_requests == 60 and count_offsets(tmp_path) == Counter((0, n) for n in range(63))


def make_corrections() -> tuple[list[Record], int]:
    """Build corrections of a sample with several candidates; return them and the sample's offset."""
    offset = next(n for n, r in enumerate(FIRST_DAY) if len(pb.Sample.FromString(r.value[2:]).item_ids) > 2)
    items = pb.Sample.FromString(FIRST_DAY[offset].value[2:]).item_ids
    return [
        make_correction(FIRST_DAY[offset], items[1], 0.0, 1.0, offset=0, event=5),
        make_correction(FIRST_DAY[offset], items[2], 0.0, 1.0, offset=1, event=6),
        make_correction(FIRST_DAY[offset], items[2], 1.0, 0.0, offset=2, event=7),
    ], offset


def test_a_seal_stores_corrected_labels_beside_those_at_the_close(tmp_path: Path) -> None:
    corrections, corrected_offset = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    seal_all(make_compactor(tmp_path))
    (streamed,), (latest,) = batches(tmp_path, 0), batches(tmp_path, 0, "latest")
    assert_same_batch(streamed, decode_records(SCHEMA, FIRST_DAY).take_requests(streamed.offset_R))
    row = int(np.flatnonzero(latest.offset_R == corrected_offset)[0])
    before, after = (b.label_BT[b.request_index_B == row] for b in (streamed, latest))
    assert after[1].tolist() == [1.0, 0.0] and after[2].tolist() == [0.0, 0.0]
    others = latest.request_index_B != row
    assert (latest.label_BT[others] == streamed.label_BT[others]).all() and before.shape == after.shape
    snapshot = Warehouse(tmp_path).samples.snapshot()
    assert snapshot.progress(folded_name(date(1970, 1, 1), 0, TOPIC_IDS["corrections"])) == 3


def test_a_reader_applies_corrections_that_no_seal_has_folded(tmp_path: Path) -> None:
    corrections, corrected_offset = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    warehouse = Warehouse(tmp_path)
    files = files_of_part(warehouse.corrections.snapshot().files, date(1970, 1, 1), 0)
    latest = read_latest(warehouse, files, SCHEMA.tasks)
    assert next_offset_by_topic(files) == {TOPIC_IDS["corrections"]: 3}
    assert files_of_part(files, date(1970, 1, 2), 0) == []
    unsealed = [overlay_batch(batch, latest) for batch in batches(tmp_path, 0)]
    seal_all(make_compactor(tmp_path))
    (sealed,) = batches(tmp_path, 0, "latest")
    expected = {
        o: sealed.label_BT[sealed.request_index_B == r].tolist()
        for r, o in enumerate(sealed.offset_R.tolist())
    }
    assert {
        o: b.label_BT[b.request_index_B == r].tolist()
        for b in unsealed
        for r, o in enumerate(b.offset_R.tolist())
    } == expected
    assert corrected_offset in expected


@pytest.mark.parametrize("sealed_with", [0, 1, 3])
def test_a_session_reads_latest_labels_from_sealed_files_and_adds_later_corrections(
    tmp_path: Path, sealed_with: int
) -> None:
    corrections, corrected_offset = make_corrections()
    if sealed_with:
        archive(
            tmp_path,
            [*FIRST_DAY, *LATER_DAY, *corrections[:sealed_with]],
            per_flush=1 if sealed_with == 1 else 9,
        )
        seal_all(make_compactor(tmp_path))
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    table = SampleTable(str(tmp_path))
    streamed = decode_records(SCHEMA, FIRST_DAY)
    after = streamed.label_BT[streamed.request_index_B == corrected_offset].copy()
    after[1], after[2] = [1.0, 0.0], [0.0, 0.0]
    for labels in ("latest", "as_streamed"):
        spec = SessionSpec(table="", version=0, last_day="1970-01-01", labels=labels)
        fixed = table.newest(spec, {})
        assert fixed is not None
        session, rows = table.open_session(fixed, SCHEMA)
        for split in session.order.splits:
            batch = rows.batch(split.path, split.start, split.end)
            for row, offset in enumerate(batch.offset_R.tolist()):
                label_BT = batch.label_BT[batch.request_index_B == row]
                changed = labels == "latest" and offset == corrected_offset
                expected = after if changed else streamed.label_BT[streamed.request_index_B == offset]
                assert label_BT.tolist() == expected.tolist()


def test_corrections_that_come_after_a_seal_make_the_day_due_again(tmp_path: Path) -> None:
    corrections, corrected_offset = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, corrections[0]])
    seal_all(make_compactor(tmp_path))
    assert make_compactor(tmp_path).due() == []
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    assert seal_all(make_compactor(tmp_path)) == 1
    (latest,) = batches(tmp_path, 0, "latest")
    row = int(np.flatnonzero(latest.offset_R == corrected_offset)[0])
    assert latest.label_BT[latest.request_index_B == row][1].tolist() == [1.0, 0.0], (
        "corrections of the first seal must stay applied"
    )


def test_a_seal_in_several_passes_changes_no_row_and_leaves_no_file_of_a_pass(tmp_path: Path) -> None:
    records = closed_on(rich_records(SCHEMA, 120, partition=0), 0)
    later = closed_on(rich_records(SCHEMA, 30, partition=0), 3, first_offset=120)
    archive(tmp_path, records + later, per_flush=5)
    compactor = make_compactor(tmp_path, merge_bytes=8_000)
    warehouse = compactor.warehouse
    unsealed = warehouse.samples.snapshot().files
    (seal,) = compactor.due()
    runs = [[warehouse.open_file("samples", file)] for file in seal.files]
    assert len(runs) == 24 and max_runs(runs, 8_000) == 8 and max_runs(runs, 1 << 27) > 24
    beats: list[int] = []
    assert compactor.seal(seal, lambda: beats.append(1))
    assert len(beats) > 24, "a long seal must report its progress, or it is killed as stalled"

    users: list[list[int]] = []
    found: dict[int, tuple[bytes, bytes]] = {}
    sealed = [file for file in warehouse.samples.snapshot().files if file.sealed]
    for file in sealed:
        columns, counts_R = warehouse.open_file("samples", file).columns(sample_types(SCHEMA))
        users.append(columns["user_id"].values.tolist())
        found |= dict(
            zip(columns["offset"].values.tolist(), rebuild_records(SCHEMA, columns, counts_R), strict=True)
        )
    assert found == {r.offset: (r.key, r.value) for r in records}
    in_order = [user for of_file in sorted(users) for user in of_file]
    assert len(sealed) > 8 and in_order == sorted(in_order)
    stored = {
        str(path.relative_to(tmp_path / "samples")) for path in tmp_path.glob("samples/1970-*/**/*.parquet")
    }
    assert stored == {file.path for file in (*unsealed, *sealed)}


class CountingStore(FileStore):
    """Counts the requests for files since the last beat."""

    num_silent = max_silent = 0

    def get_range(self, name: str, start: int, size: int) -> bytes:
        self.num_silent += 1
        self.max_silent = max(self.max_silent, self.num_silent)
        return super().get_range(name, start, size)

    def beat(self) -> None:
        self.num_silent = 0


def test_the_time_between_two_beats_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """Else a compactor of a day with thousands of files is restarted as stalled, again and again."""
    max_silent: list[int] = []
    beats: list[int] = []
    for num_files in (12, 36):
        samples = closed_on(rich_records(SCHEMA, num_files, partition=0), 0)
        later = closed_on(rich_records(SCHEMA, 1, partition=0), 3, first_offset=num_files)
        corrections: list[Record] = []
        for record in samples:
            for item in pb.Sample.FromString(record.value[2:]).item_ids[:1]:
                n = len(corrections)
                corrections.append(make_correction(record, item, 0.0, 1.0, offset=n, event=n + 1))
        location = tmp_path / str(num_files)
        archive(location, [*samples, *later, *corrections], per_flush=1)
        compactor = make_compactor(location)
        compactor.warehouse.store = store = CountingStore(location)
        compactor.run_once(threading.Event(), store.beat)
        assert compactor.counts.seals == 1 and compactor.counts.damaged == 0
        assert len(compactor.warehouse.corrections.snapshot().files) == 1
        max_silent.append(store.max_silent)
        beats.clear()
        deleted = compactor.warehouse.samples.vacuum(0, beat=lambda: beats.append(1))
        assert len(beats) == len(deleted) == num_files
    assert max_silent[0] == max_silent[1]


def test_the_memory_of_a_seal_does_not_grow_with_the_day(tmp_path: Path) -> None:
    peaks = []
    for num_samples in (100, 400):
        records = closed_on(rich_records(SCHEMA, num_samples, partition=0), 0)
        archive(tmp_path / str(num_samples), records, per_flush=30)
        compactor = make_compactor(tmp_path / str(num_samples), merge_bytes=20_000)
        files = compactor.warehouse.samples.snapshot().files
        opened = [compactor.warehouse.open_file("samples", file) for file in files]
        tracemalloc.start()
        merged = merge_files(opened, sample_types(SCHEMA), 10**6, 20_000)
        pieces = [len(rows.counts_R) for rows in merged]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(pieces) == num_samples and len(pieces) >= 5
    assert peaks[1] < 1.5 * peaks[0]


def test_popular_columns_come_first_in_a_sealed_file(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    Warehouse(tmp_path).store.put(COLUMN_ORDER, b'["nro__age", "gone__feature", "ro__tags"]')
    seal_all(make_compactor(tmp_path))
    warehouse = Warehouse(tmp_path)
    (file,) = [f for f in warehouse.samples.snapshot().files if f.sealed]
    names = warehouse.open_file("samples", file).footer.schema.to_arrow_schema().names
    assert names[:4] == ["offset", "close_ms", "nro__age", "ro__tags"]
    warehouse.store.put(COLUMN_ORDER, b"no list")
    assert warehouse.column_order() == []


def test_of_two_compactors_one_seals_and_no_row_is_duplicated(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    one, two = make_compactor(tmp_path), make_compactor(tmp_path)
    (due,), (same,) = one.due(), two.due()
    assert one.seal(due) and not two.seal(same)
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(53))


def test_compactors_take_the_partitions_of_a_day_in_different_orders_and_the_oldest_day_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    days = [date(1970, 1, 1), date(1970, 1, 2)]
    parts = [Seal(day, partition, (), ()) for day in days for partition in range(8)]
    taken: list[list[tuple[date, int]]] = []
    for seed in range(2):
        compactor = make_compactor(tmp_path)
        compactor.rng = random.Random(seed)
        order: list[tuple[date, int]] = []
        monkeypatch.setattr(compactor, "due", lambda: parts)
        monkeypatch.setattr(compactor, "seal", lambda seal, beat, order=order: order.append(seal[:2]))
        compactor.run_once(threading.Event())
        assert sorted(order) == [seal[:2] for seal in parts] and [d for d, _ in order] == sorted(
            d for d, _ in order
        )
        taken.append(order)
    assert taken[0] != taken[1]


def test_a_damaged_file_stops_only_its_day_and_is_named(tmp_path: Path) -> None:
    second = closed_on(rich_records(SCHEMA, 12, partition=0), 1, first_offset=50)
    last = closed_on(rich_records(SCHEMA, 3, partition=0), 4, first_offset=62)
    archive(tmp_path, [*FIRST_DAY, *second, *last])
    compactor = make_compactor(tmp_path)
    first_day = compactor.due()[0]
    path = tmp_path / "samples" / first_day.files[0].path
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=first_day.files[0].path):
        compactor.seal(first_day)
    compactor.run_once(threading.Event())
    assert metrics_of(compactor).keys() == METRICS.keys()
    assert compactor.counts.damaged == 1 and len(batches(tmp_path, 1)) == 1
    assert compactor.counts.seals == 1 and path.exists()


def test_a_missing_schema_stops_only_the_days_that_it_wrote(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    (schema,) = (tmp_path / "schemas").iterdir()
    text = schema.read_bytes()
    schema.unlink()
    compactor = make_compactor(tmp_path)
    compactor.run_once(threading.Event())
    assert (compactor.counts.damaged, compactor.counts.seals) == (1, 0)
    schema.write_bytes(text)
    compactor.run_once(threading.Event())
    assert (compactor.counts.damaged, compactor.counts.seals) == (1, 1)


@pytest.mark.parametrize("stored", [b"null", b"7", b"not JSON"])
def test_an_unusable_column_order_is_ignored(tmp_path: Path, stored: bytes) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    Warehouse(tmp_path).store.put(COLUMN_ORDER, stored)
    assert seal_all(make_compactor(tmp_path)) == 1


def test_corrections_of_a_recreated_topic_are_folded_from_offset_0(tmp_path: Path) -> None:
    corrections, corrected_offset = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    assert seal_all(make_compactor(tmp_path)) == 1 and make_compactor(tmp_path).due() == []
    archive(
        tmp_path, [*FIRST_DAY, *LATER_DAY, corrections[0]], topics={**TOPIC_IDS, "corrections": "made-again"}
    )
    assert seal_all(make_compactor(tmp_path)) == 1 and make_compactor(tmp_path).due() == []
    found = Warehouse(tmp_path).samples.snapshot()
    names = [folded_name(date(1970, 1, 1), 0, topic) for topic in (TOPIC_IDS["corrections"], "made-again")]
    assert [found.progress(name) for name in names] == [3, 1] and corrected_offset < 50


@pytest.mark.parametrize("made_again", ["another", "topic-10"])  # sorted before and after the first id
def test_a_correction_of_a_recreated_topic_counts_after_those_of_the_topic_before(
    tmp_path: Path, made_again: str
) -> None:
    corrections, corrected_offset = make_corrections()
    item = pb.Sample.FromString(corrections[2].value[2:]).item_ids[0]
    sample = FIRST_DAY[corrected_offset]
    late = make_correction(sample, item, 0.0, 1.0, offset=0, event=8, after_ms=9)
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    topics = {**TOPIC_IDS, "corrections": made_again}
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, late], topics=topics)
    assert seal_all(make_compactor(tmp_path)) == 1
    (latest,) = batches(tmp_path, 0, "latest")
    row = int(np.flatnonzero(latest.offset_R == corrected_offset)[0])
    assert latest.label_BT[latest.request_index_B == row][1:3, 0].tolist() == [1.0, 1.0]


def test_rows_of_two_topics_stay_in_separate_files(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    others = closed_on(rich_records(SCHEMA, 60, partition=0)[50:], 0)
    archive(tmp_path, others, topics={**TOPIC_IDS, "samples": "made-again"})
    assert seal_all(make_compactor(tmp_path)) == 1
    sealed = {
        f.topic: (f.rows, f.last_offset) for f in Warehouse(tmp_path).samples.snapshot().files if f.sealed
    }
    assert sealed == {TOPIC_IDS["samples"]: (50, 49), "made-again": (10, 9)}


def test_whole_days_are_retired_oldest_first_and_the_newest_day_stays() -> None:
    day = date(2023, 5, 18)
    files = [dataclasses.replace(make_file(0, 9), day=day + timedelta(days=n)) for n in (0, 0, 1, 2)]
    assert files_to_retire(files, 0, 0) == [] and files_to_retire([], 1, 1) == []
    assert files_to_retire(files, 2, 0) == files_to_retire(files, 0, 250) == files[:2]
    assert files_to_retire(files, 1, 0) == files_to_retire(files, 0, 1) == files[:3]
    assert partly_retired_days(files, files[:3]) == []


def test_a_few_samples_of_a_future_day_retire_nothing() -> None:
    day = date(2023, 5, 18)
    files = [dataclasses.replace(make_file(0, 999), day=day + timedelta(days=n)) for n in range(3)]
    future = dataclasses.replace(make_file(1000, 1001), day=day + timedelta(days=4000))
    assert files_to_retire([*files, future], 3, 0) == []
    assert files_to_retire([*files, future], 2, 0) == files[:1]
    assert files_to_retire([*files, future], 0, files[2].bytes + future.bytes) == files[:2]


def test_a_day_that_is_too_large_loses_its_oldest_files_but_each_partition_keeps_one() -> None:
    def closed(first: int, ms: int, partition: int = 0) -> DataFile:
        return dataclasses.replace(make_file(first, first + 9, partition), last_close_ms=ms)

    files = [closed(20, 30), closed(0, 10), closed(10, 20), closed(0, 5, partition=1)]
    assert files_to_retire(files, 0, 400) == [] and files_to_retire(files, 0, 399) == [files[1]]
    assert files_to_retire(files, 0, 201) == files_to_retire(files, 0, 1) == [files[1], files[2]]
    old = dataclasses.replace(make_file(0, 9), day=date(2023, 5, 1))
    assert files_to_retire([*files, old], 0, 400) == [old]
    assert files_to_retire([*files, old], 0, 399) == [old, files[1]]
    assert partly_retired_days([*files, old], [old, files[1]]) == [files[1].day]


def test_files_of_the_current_day_are_retired_after_those_of_the_day_before() -> None:
    day = date(2023, 5, 18)
    yesterday = [
        dataclasses.replace(make_file(100 * n, 100 * n + 99), day=day, last_close_ms=n) for n in range(3)
    ]
    today = dataclasses.replace(make_file(300, 301), day=day + timedelta(days=1), last_close_ms=9)
    assert files_to_retire([*yesterday, today], 0, 300) == yesterday[:1]
    assert files_to_retire([*yesterday, today], 0, 100) == yesterday


def test_a_partly_retired_day_is_recorded_and_keeps_its_corrections(tmp_path: Path) -> None:
    corrections, _ = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *corrections])
    compactor = make_compactor(tmp_path, keep_bytes=1)
    retired = compactor.retire()
    assert retired == compactor.counts.cut > 3 and compactor.retire() == 0
    warehouse = Warehouse(tmp_path)
    found = warehouse.samples.snapshot()
    (left,) = found.files
    assert found.progress(retired_name(TOPIC_IDS["samples"], 0)) == left.first_offset
    assert left.last_offset == 49
    assert found.progress(partly_retired_name(date(1970, 1, 1))) == 1
    assert warehouse.corrections.snapshot().files
    late = closed_on(rich_records(SCHEMA, 80, partition=0)[50:], 0, first_offset=50)
    archive(tmp_path, [*FIRST_DAY, *late, *corrections])
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(left.first_offset, 80)), (
        "the progress of the archive must stay"
    )


def test_samples_of_a_future_day_seal_nothing(tmp_path: Path) -> None:
    future = closed_on(rich_records(SCHEMA, 1, partition=0), 4000, first_offset=50)
    archive(tmp_path, [*FIRST_DAY, *future])
    assert make_compactor(tmp_path).due() == []


def test_a_day_that_has_not_ended_by_the_clock_is_not_sealed(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    config = CompactorConfig(warehouse=str(tmp_path), seal_after_ms=60_000)
    running, ended = (
        Compactor(Warehouse(tmp_path), config, FakeClock(now_ms=DAY_MS + ms)) for ms in (59_000, 60_000)
    )
    assert running.due() == [] and len(ended.due()) == 1


def test_corrections_that_come_after_their_day_was_retired_are_removed(tmp_path: Path) -> None:
    corrections, _ = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections[:1]])
    make_compactor(tmp_path, keep_days=1).retire()
    unseen = closed_on(rich_records(SCHEMA, 60, partition=0)[55:], 5)
    ahead = make_correction(unseen[0], 1, 0.0, 1.0, offset=3, event=9)
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections, ahead])
    table = Warehouse(tmp_path).corrections
    assert {file.day for file in table.snapshot().files} == {date(1970, 1, 1), date(1970, 1, 6)}
    assert make_compactor(tmp_path).retire() == 0
    assert {file.day for file in table.snapshot().files} == {date(1970, 1, 6)}, (
        "corrections of a later day are kept, because their samples may follow"
    )


def test_many_files_of_corrections_of_a_sealed_day_are_merged_without_a_change(tmp_path: Path) -> None:
    corrections, _ = make_corrections()
    item = pb.Sample.FromString(corrections[0].value[2:]).item_ids[0]
    more = [make_correction(FIRST_DAY[0], item, 0.0, 1.0, offset=3 + n, event=20 + n) for n in range(9)]
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections, *more], per_flush=1)
    warehouse, compactor = Warehouse(tmp_path), make_compactor(tmp_path)
    files = warehouse.corrections.snapshot().files
    before = read_latest(warehouse, files, SCHEMA.tasks)
    compactor.run_once(threading.Event())
    (merged,) = warehouse.corrections.snapshot().files
    assert (merged.rows, merged.first_offset, merged.last_offset) == (12, 0, 11) and len(files) == 12
    after = read_latest(warehouse, [merged], SCHEMA.tasks)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
    assert compactor.due() == [] and compactor.merge_corrections() == 0
    assert warehouse.corrections.snapshot().progress(compact_name(date(1970, 1, 1), 0)) == 1


def test_two_compactors_at_once_lose_or_duplicate_no_row(tmp_path: Path) -> None:
    corrections, _ = make_corrections()
    old = closed_on(rich_records(SCHEMA, 12, partition=0), 0)
    records = [*old, *closed_on(rich_records(SCHEMA, 40, partition=0), 2, first_offset=12), *corrections]
    records += closed_on(rich_records(SCHEMA, 30, partition=0), 4, first_offset=52)
    archive(tmp_path, records, per_flush=10)
    compactors = [make_compactor(tmp_path, keep_days=3) for _ in range(2)]
    threads = [threading.Thread(target=each.run_once, args=(threading.Event(),)) for each in compactors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    compactors[0].run_once(threading.Event())
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(12, 82))
    assert all(compactor.counts.damaged == 0 for compactor in compactors)
    for file in Warehouse(tmp_path).samples.snapshot().files:
        assert (tmp_path / "samples" / file.path).exists()


def test_a_compactor_creates_nothing_in_an_empty_mount_and_notices_another_warehouse(tmp_path: Path) -> None:
    location = tmp_path / "mount"
    location.mkdir()
    compactor = make_compactor(location)
    with pytest.raises(UnavailableError, match="mount"):
        compactor.run_once(threading.Event())
    assert not list(location.iterdir())
    archive(location, [*FIRST_DAY, *LATER_DAY])
    compactor.run_once(threading.Event())
    location.rename(tmp_path / "away")
    archive(location, [*FIRST_DAY, *LATER_DAY])
    with pytest.raises(CheckpointError, match="another warehouse"):
        compactor.run_once(threading.Event())


def test_a_compactor_that_starts_while_a_table_is_away_continues_when_it_is_back(tmp_path: Path) -> None:
    location, away = tmp_path / "warehouse", tmp_path / "away"
    archive(location, [*FIRST_DAY, *LATER_DAY])
    (location / "corrections").rename(away)
    compactor = make_compactor(location)
    with pytest.raises(UnavailableError, match="corrections"):
        compactor.run_once(threading.Event())
    away.rename(location / "corrections")
    compactor.run_once(threading.Event())
    assert compactor.counts.seals


def test_a_file_that_cannot_be_read_now_delays_only_its_day(tmp_path: Path) -> None:
    second = closed_on(rich_records(SCHEMA, 12, partition=0), 1, first_offset=50)
    last = closed_on(rich_records(SCHEMA, 3, partition=0), 4, first_offset=62)
    archive(tmp_path, [*FIRST_DAY, *second, *last])
    compactor = make_compactor(tmp_path)
    path = tmp_path / "samples" / compactor.due()[0].files[0].path
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(UnavailableError):
        compactor.run_once(threading.Event())
    assert compactor.counts.seals == 1 and len(batches(tmp_path, 1)) == 1
    path.rmdir()
    path.write_bytes(content)
    compactor.run_once(threading.Event())
    assert compactor.counts.seals == 2


@pytest.mark.parametrize(
    ("settings", "room"),
    [
        ({"max_rows": 20}, 2),  # of three sealed files
        ({"merge_bytes": 4_000}, 3),  # in the first pass of a seal in several
    ],
)
def test_a_seal_that_does_not_fit_on_a_disk_leaves_no_file(
    tmp_path: Path, settings: dict[str, int], room: int
) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY], per_flush=5)
    compactor, before = make_compactor(tmp_path, **settings), stored_files(tmp_path)
    run_with_room(compactor, tmp_path, room)
    assert stored_files(tmp_path) == before
    compactor.run_once(threading.Event())
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(53)) and compactor.due() == []


def test_merged_corrections_that_do_not_fit_on_a_disk_leave_no_file(tmp_path: Path) -> None:
    item = pb.Sample.FromString(FIRST_DAY[0].value[2:]).item_ids[0]
    corrections = [make_correction(FIRST_DAY[0], item, 0.0, 1.0, offset=n, event=20 + n) for n in range(5)]
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    archive(tmp_path, corrections, per_flush=1)
    archive(tmp_path, corrections, per_flush=1, topics={**TOPIC_IDS, "corrections": "created again"})
    compactor = make_compactor(tmp_path)
    assert seal_all(compactor) == 1
    before = stored_files(tmp_path)
    run_with_room(compactor, tmp_path, room=1)
    assert stored_files(tmp_path) == before
    compactor.run_once(threading.Event())
    assert len(Warehouse(tmp_path).corrections.snapshot().files) == 2, "one of each topic"


def test_a_full_disk_does_not_stop_the_vacuum(tmp_path: Path) -> None:
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY])
    compactor = make_compactor(tmp_path, keep_days=1)
    path = tmp_path / "samples" / new_path(date(1970, 1, 1), 0, SCHEMA.fingerprint, 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(1000))
    os.utime(path, (0, 0))  # of a program that was killed long ago
    with limited_file_size(64), pytest.raises(UnavailableError):
        compactor.run_once(threading.Event())  # neither a seal nor a retirement can be written
    assert not path.exists() and compactor.counts.seals == compactor.counts.retired == 0


def run_with_room(compactor: Compactor, location: Path, room: int) -> None:
    """Let three runs fail because the disk has room for `room` more files."""
    store = compactor.warehouse.store
    for _ in range(3):
        compactor.warehouse.store = FullDisk(location, room)
        with pytest.raises(UnavailableError, match="No space left"):
            compactor.run_once(threading.Event())
    compactor.warehouse.store = store


def test_retired_days_leave_the_table_and_the_vacuum_deletes_their_files(tmp_path: Path) -> None:
    corrections, _ = make_corrections()
    archive(tmp_path, [*FIRST_DAY, *LATER_DAY, *corrections])
    compactor = make_compactor(tmp_path, keep_days=1)
    retired = [f.path for f in Warehouse(tmp_path).samples.snapshot().files if f.day == date(1970, 1, 1)]
    assert compactor.retire() == len(retired) > 0 and compactor.retire() == 0
    warehouse = Warehouse(tmp_path)
    assert count_offsets(tmp_path) == Counter((0, n) for n in range(50, 53))
    assert warehouse.corrections.snapshot().files == ()
    assert compactor.vacuum() == []
    assert warehouse.samples.vacuum(0) == sorted(retired)
    assert not any((tmp_path / "samples" / path).exists() for path in retired)


def test_a_sample_of_long_ago_retires_no_corrections_that_wait_for_their_samples(tmp_path: Path) -> None:
    """Else one wrong close time cost the labels of all days between it and the oldest day of the archive."""
    long_ago, recent = FIRST_DAY[:1], closed_on(rich_records(SCHEMA, 20, partition=0), 400, first_offset=1)
    archive(tmp_path, [*long_ago, *recent])
    compactor = make_compactor(tmp_path, keep_days=30)
    assert compactor.retire() == 1
    early = closed_on(rich_records(SCHEMA, 1, partition=0), 390)[0]  # its archiver has not committed it yet
    item = pb.Sample.FromString(early.value[2:]).item_ids[0]
    archive(tmp_path, [*long_ago, *recent, make_correction(early, item, 0.0, 1.0, offset=0, event=5)])
    assert compactor.retire() == 0
    assert len(Warehouse(tmp_path).corrections.snapshot().files) == 1


def test_the_vacuum_waits_while_the_folder_of_pins_is_away(tmp_path: Path) -> None:
    archive(tmp_path, FIRST_DAY)
    make_compactor(tmp_path).vacuum()
    (tmp_path / "pins").rename(tmp_path / "away")
    for _ in range(2):  # also for a compactor that has just started
        with pytest.raises(UnavailableError, match="folder `pins`"):
            make_compactor(tmp_path).run_once(threading.Event())
    pin_version(Warehouse(tmp_path).store, "reader", VersionPin("samples", 1, 9 * DAY_MS))
    with pytest.raises(UnavailableError):
        make_compactor(tmp_path).vacuum()  # this pin may not be the only one
    shutil.rmtree(tmp_path / "pins")
    (tmp_path / "away").rename(tmp_path / "pins")
    make_compactor(tmp_path).vacuum()


def test_a_pin_that_its_reader_renews_holds_although_the_reader_has_a_slow_clock(tmp_path: Path) -> None:
    archive(tmp_path, FIRST_DAY)
    compactor = make_compactor(tmp_path)
    store, now_ms = compactor.warehouse.store, compactor.clock.now_ms()

    def pins() -> list[str]:
        return [name for name in store.list("pins") if name.startswith("pins/samples.")]

    for renewed_ms in (now_ms - 3_600_000, now_ms - 60_000):
        pin_version(store, "reader", VersionPin("samples", 1, renewed_ms))
        compactor.vacuum()
        assert pins() == ["pins/samples.reader"]
    compactor.vacuum()
    assert pins() == [], "its reader has ended"
    pin_version(store, "gone", VersionPin("samples", 1, now_ms - 2 * DAY_MS))
    make_compactor(tmp_path).vacuum()
    assert pins() == [], "no compactor needs to run until its second vacuum"

"""A warehouse on an S3 server: two archivers compete, days are sealed, read and retired, and files are
deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import date

import pytest

from roostream.runtime.clock import FakeClock
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.scan import is_warehouse
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import REQUEST
from tests.runtime import s3_server
from tests.warehouse.archive_runs import count_rows, make_archiver, make_topic_records
from tests.warehouse.sample_cases import assert_same_batch, decode_records, rich_schema

SCHEMA = rich_schema()
RECORDS = make_topic_records(SCHEMA, 24, days=3)
EACH_ONCE = Counter((p, n, 2 * n + p + 1) for p in (0, 1) for n in range(24))


@pytest.fixture(scope="module")
def location() -> Iterator[str]:
    with s3_server.running():
        yield f"s3://{s3_server.BUCKET}/whole"


def test_archiving_sealing_reading_and_retiring_work_on_s3(location: str) -> None:
    (first, _, _), (other, _, _) = make_archiver(location, RECORDS), make_archiver(location, RECORDS)
    for archiver in (first, other):
        archiver.open()
        archiver.turn(0.0, max_records=20)
    first.flush()
    other.flush()
    assert other.counts.refused == 1, "the second archiver must continue after the first one's records"
    while not all(archiver.reader.at_end() for archiver in (first, other)):  # type: ignore[attr-defined]
        for archiver in (other, first):
            archiver.turn(0.0, max_records=20)
            archiver.flush()
    assert count_rows(location) == EACH_ONCE
    assert is_warehouse(location) and not is_warehouse(f"{location}/none")

    compactor = Compactor(
        Warehouse(location), CompactorConfig(warehouse=location, seal_after_ms=0, keep_days=2), FakeClock()
    )
    before = Warehouse(location).samples.snapshot()
    assert sum(compactor.seal(seal) for seal in compactor.due()) == 4 and compactor.due() == [], (
        "two days of two partitions"
    )
    assert count_rows(location) == EACH_ONCE

    table = SampleTable(location)
    table_input = table.newest(SessionSpec(table=location, version=0, shuffle_seed=None), {})
    assert table_input is not None and table_input.rows == {0: 24, 1: 24}
    session, files = table.open_session(table_input, SCHEMA)
    rows = LocalSessionRows(session, files)
    for split in session.order.splits:
        batch = rows.piece(split, split.at).batch
        record_by_offset = {
            record.offset: record for record in RECORDS if record.partition == split.partition
        }
        assert_same_batch(
            batch, decode_records(SCHEMA, [record_by_offset[offset] for offset in batch.offset_R.tolist()])
        )

    assert compactor.retire() > 0
    assert {file.day for file in Warehouse(location).samples.snapshot().files} == {
        date(1970, 1, 2),
        date(1970, 1, 3),
    }
    old = before.files[0]
    assert (
        Warehouse(location).open_file("samples", old).columns({"offset": REQUEST["offset"]})[1].sum()
        == old.candidates
    )
    assert old.path in Warehouse(location).samples.vacuum(0), "no snapshot uses the file any more"

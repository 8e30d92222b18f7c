"""The whole of a warehouse on a store that speaks S3: archived by rivals, sealed, read, retired and swept."""

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
from tests.warehouse.archive_runs import an_archiver, rows_at, topic
from tests.warehouse.sample_cases import decoded, rich_schema, same_batch

SCHEMA = rich_schema()
RECORDS = topic(SCHEMA, 24, days=3)
EACH_ONCE = Counter((p, n, 2 * n + p + 1) for p in (0, 1) for n in range(24))


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with s3_server.running():
        yield f"s3://{s3_server.BUCKET}/whole"


def test_archiving_sealing_reading_and_retiring_work_on_s3(place: str) -> None:
    (first, _, _), (rival, _, _) = an_archiver(place, RECORDS), an_archiver(place, RECORDS)
    for archiver in (first, rival):
        archiver.open()
        archiver.turn(0.0, max_records=20)
    first.flush()
    rival.flush()
    assert rival.counts.refused == 1, "it reads on from where the first one is"
    while not all(archiver.reader.at_end() for archiver in (first, rival)):  # type: ignore[attr-defined]
        for archiver in (rival, first):
            archiver.turn(0.0, max_records=20)
            archiver.flush()
    assert rows_at(place) == EACH_ONCE
    assert is_warehouse(place) and not is_warehouse(f"{place}/none")

    compactor = Compactor(
        Warehouse(place), CompactorConfig(warehouse=place, seal_after_ms=0, keep_days=2), FakeClock()
    )
    before = Warehouse(place).samples.snapshot()
    assert sum(compactor.seal(seal) for seal in compactor.due()) == 4 and compactor.due() == [], (
        "two days of two partitions"
    )
    assert rows_at(place) == EACH_ONCE

    table = SampleTable(place)
    told = table.newest(SessionSpec(table=place, version=0, shuffle_seed=None), {})
    assert told is not None and told.rows == {0: 24, 1: 24}
    session, files = table.open_session(told, SCHEMA)
    rows = LocalSessionRows(session, files)
    for split in session.order.splits:
        batch = rows.piece(split, split.at).batch
        its = {record.offset: record for record in RECORDS if record.partition == split.partition}
        same_batch(batch, decoded(SCHEMA, [its[offset] for offset in batch.offset_R.tolist()]))

    assert compactor.retire() > 0
    assert {file.day for file in Warehouse(place).samples.snapshot().files} == {
        date(1970, 1, 2),
        date(1970, 1, 3),
    }
    old = before.files[0]
    assert (
        Warehouse(place).open_file("samples", old).columns({"offset": REQUEST["offset"]})[1].sum()
        == old.candidates
    )
    assert old.path in Warehouse(place).samples.vacuum(0), "nobody holds it any more"

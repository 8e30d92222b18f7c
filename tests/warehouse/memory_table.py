"""An in-memory table of sample files, as an archiver and a compactor write them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime

import numpy as np

from roostream.warehouse.data_file import DataFile
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import OpenSession, SampleMarks
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples

ROW_GROUP = 4


def data_file(
    path: str,
    day: date,
    partition: int = 0,
    rows: int = 10,
    candidates: int = 50,
    first_offset: int = 0,
    *,
    sealed: bool = False,
    topic: str = "",
) -> DataFile:
    """Build the entry of a file in the log of a table."""
    return DataFile(
        path=path,
        bytes=100,
        rows=rows,
        candidates=candidates,
        day=day,
        partition=partition,
        fingerprint=(1 << 64) - 5,
        first_offset=first_offset,
        last_offset=first_offset + rows - 1,
        first_close_ms=5,
        last_close_ms=1_700_000_000_123,
        sealed=sealed,
        topic=topic,
    )


class MemoryTable:
    """Implements `TableRows` for the files of one version. `reads` records (path, start, end) of each
    read."""

    def __init__(self, files: Sequence[tuple[DataFile, Batch]]) -> None:
        self.files = [file for file, _ in files]
        self.batches = {file.path: batch for file, batch in files}
        self.reads: list[tuple[str, int, int]] = []

    def empty(self) -> Batch:
        """Return a batch without requests."""
        return next(iter(self.batches.values())).take_requests(np.arange(0))

    @property
    def ends(self) -> dict[int, int]:
        """Return the next offset that is not archived, by partition."""
        found: dict[int, int] = {}
        for file in self.files:
            found[file.partition] = max(found.get(file.partition, 0), file.last_offset + 1)
        return found

    def batch(self, path: str, start: int, end: int) -> Batch:
        self.reads.append((path, start, end))
        return self.batches[path].take_requests(np.arange(start, end))

    def marks(self, path: str) -> SampleMarks:
        batch = self.batches[path]
        return SampleMarks(batch.sample_id_R, batch.offset_R, batch.close_ms_R)

    def session(self, **spec: object) -> OpenSession:
        return OpenSession(SessionSpec(**{"table": "memory", "version": 1, **spec}), self.files, ROW_GROUP)  # type: ignore[arg-type]


def table_of(records: Sequence[Record], *, rows_of_file: int = 6, seed: int | None = None) -> MemoryTable:
    """Build a table with files of `rows_of_file` rows for each (day, partition), ordered by offset. A `seed`
    shuffles the rows of each file."""
    decoder = Decoder(samples.schema(), {}.get)
    groups: dict[tuple[date, int], list[Record]] = {}
    for record in records:
        day = datetime.fromtimestamp(record.timestamp_ms // 1000, UTC).date()
        groups.setdefault((day, record.partition), []).append(record)
    files = []
    for (day, partition), group in sorted(groups.items()):
        for start in range(0, len(group), rows_of_file):
            file_records = group[start : start + rows_of_file]
            if seed is not None:
                file_records = random.Random(seed + start).sample(file_records, len(file_records))
            batch, _ = decoder.decode(file_records)
            path = f"{day}/{partition}/{start}.parquet"
            offset_R = batch.offset_R
            file = data_file(path, day, partition, batch.num_requests, batch.num_candidates)
            bounds = {"first_offset": int(offset_R.min()), "last_offset": int(offset_R.max())}
            last_close_ms = int(batch.close_ms_R.max())
            files.append((dataclasses.replace(file, **bounds, last_close_ms=last_close_ms), batch))
    return MemoryTable(files)

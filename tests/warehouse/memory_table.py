"""A table in memory: records of `samples` as files of rows, as an archiver and a compactor leave them."""

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
    """A file as a table's log describes it."""
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
    """Implements `TableRows` for the files of one version. `reads`: (path, start, end) of each read."""

    def __init__(self, files: Sequence[tuple[DataFile, Batch]]) -> None:
        self.files = [file for file, _ in files]
        self.batches = {file.path: batch for file, batch in files}
        self.reads: list[tuple[str, int, int]] = []

    def empty(self) -> Batch:
        """A batch without requests."""
        return next(iter(self.batches.values())).take_requests(np.arange(0))

    @property
    def ends(self) -> dict[int, int]:
        """Partition → next offset that is not archived."""
        found: dict[int, int] = {}
        for file in self.files:
            found[file.partition] = max(found.get(file.partition, 0), file.last_offset + 1)
        return found

    def batch(self, path: str, start: int, end: int) -> Batch:
        self.reads.append((path, start, end))
        return self.batches[path].take_requests(np.arange(start, end))

    def marks(self, path: str) -> SampleMarks:
        it = self.batches[path]
        return SampleMarks(it.sample_id_R, it.offset_R, it.close_ms_R)

    def session(self, **spec: object) -> OpenSession:
        return OpenSession(SessionSpec(**{"table": "memory", "version": 1, **spec}), self.files, ROW_GROUP)  # type: ignore[arg-type]


def table_of(records: Sequence[Record], *, rows_of_file: int = 6, seed: int | None = None) -> MemoryTable:
    """Files of `rows_of_file` rows of a (day, partition), by offset. A `seed` shuffles each file's rows."""
    decoder = Decoder(samples.schema(), {}.get)
    groups: dict[tuple[date, int], list[Record]] = {}
    for record in records:
        day = datetime.fromtimestamp(record.timestamp_ms // 1000, UTC).date()
        groups.setdefault((day, record.partition), []).append(record)
    files = []
    for (day, partition), its in sorted(groups.items()):
        for start in range(0, len(its), rows_of_file):
            some = its[start : start + rows_of_file]
            if seed is not None:
                some = random.Random(seed + start).sample(some, len(some))
            batch, _ = decoder.decode(some)
            path = f"{day}/{partition}/{start}.parquet"
            offset_R = batch.offset_R
            file = data_file(path, day, partition, batch.num_requests, batch.num_candidates)
            bounds = {"first_offset": int(offset_R.min()), "last_offset": int(offset_R.max())}
            last_close_ms = int(batch.close_ms_R.max())
            files.append((dataclasses.replace(file, **bounds, last_close_ms=last_close_ms), batch))
    return MemoryTable(files)

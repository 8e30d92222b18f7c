"""A table in memory: records of `samples` as files of rows, as an archiver and a compactor might leave
them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime

import numpy as np

from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import OpenSession, SampleMarks
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples

ROW_GROUP = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    path: str
    day: date
    partition: int
    rows: int
    candidates: int
    first_offset: int
    last_offset: int
    last_close_ms: int
    sealed: bool = False
    topic: str = ""


class MemoryTable:
    """`TableRows`, and the files of one version. `reads`: (path, start, end) of what was read."""

    def __init__(self, files: Sequence[tuple[File, Batch]]) -> None:
        self.files = [file for file, _ in files]
        self.batches = {file.path: batch for file, batch in files}
        self.reads: list[tuple[str, int, int]] = []

    @property
    def ends(self) -> dict[int, int]:
        """Partition → next offset behind what is archived."""
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
    """Files of so many rows of a (day, partition), by offset; with a `seed` the rows of each file lie in some
    other order."""
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
            offsets = batch.offset_R
            file = File(
                path=path,
                day=day,
                partition=partition,
                rows=batch.num_requests,
                candidates=batch.num_candidates,
                first_offset=int(offsets.min()),
                last_offset=int(offsets.max()),
                last_close_ms=int(batch.close_ms_R.max()),
            )
            files.append((file, batch))
    return MemoryTable(files)

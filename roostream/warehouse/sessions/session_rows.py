"""A session's rows in this process, split by split: what any reader does, and all that small work needs.

Of each (day, partition) a sample is read once, also where the joiner emitted it again and no seal has removed that yet: the row
with the lowest offset counts. A sample that comes again has the id and the close of its first, so it lies in the same
(day, partition), and which rows count follows from the files of the version alone: nothing has to be remembered, and whoever goes
on in the middle leaves out the same.

Letters: R rows of a file, or of a piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from roostream.runtime.event_time import NUM_RECENT
from roostream.warehouse.sessions.session import FileStats, ReadOrder, SessionSpec, TableSplit, plan
from roostream.wire.batch import Batch

_GROUPS_KEPT = 8  # of which the rows that count are known, at once


class Marks(NamedTuple):
    """What tells rows of a file apart, in the order of its rows; int64 [R] each."""

    sample_id_R: np.ndarray
    offset_R: np.ndarray
    close_ms_R: np.ndarray


class TableRows(Protocol):
    """Rows of the table's files. May be called by several threads."""

    def batch(self, path: str, start: int, end: int) -> Batch:
        """Rows `start` up to `end`, with the session's features and labels.

        Raises:
            UnavailableError: it can't be read now. CheckpointError: it is damaged; names it.
        """

    def marks(self, path: str) -> Marks:
        """Of all its rows. Raises as `batch`."""


class Piece(NamedTuple):
    """Rows that lie together in the order of a partition, without those that are left out."""

    batch: Batch
    at_R: np.ndarray  # int64 [R]: the position of each
    end: int  # the position behind the piece

    @property
    def num_rows(self) -> int:
        return len(self.at_R)

    def between(self, start: int, end: int) -> Piece:
        """Its rows `start` up to `end`; all of it is itself."""
        if (start, end) == (0, self.num_rows):
            return self
        behind = int(self.at_R[end]) if end < self.num_rows else self.end
        return Piece(self.batch.requests_between(start, end), self.at_R[start:end], behind)

    def parted(self, count: int) -> tuple[Piece, Piece]:
        """Its first `count` rows, and the others."""
        count = min(count, self.num_rows)
        return self.between(0, count), self.between(count, self.num_rows)


class SessionRows(Protocol):
    """Pieces of the splits of one session, whoever reads them. One thread."""

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """These come next, in this order, from these positions of their partitions; any others may be forgotten. The first
        `at_once` are asked for in turns. Returns at once."""

    def piece(self, split: TableSplit, position: int, timeout_s: float) -> Piece | None:
        """From `position` on, some rows of `split`; its `end` is beyond `position`. None: it isn't there yet.

        Raises:
            UnavailableError: it can't be read now; call again. CheckpointError: a file is damaged; names it.
        """

    def close(self) -> None:
        """Idempotent."""


class OpenSession:
    """A spec with the files of its version. Immutable, but for what is kept of files read."""

    def __init__(self, spec: SessionSpec, files: Iterable[FileStats], row_group: int) -> None:
        self.spec, self.row_group = spec, row_group
        self.files = tuple(files)
        self.order: ReadOrder = plan(self.files, spec, row_group)
        self._of_group: dict[tuple[str, int], list[FileStats]] = {}
        for file in self.files:
            if file.rows:
                self._of_group.setdefault((file.day.isoformat(), file.partition), []).append(file)

    def group(self, split: TableSplit) -> Sequence[FileStats]:
        """All files of its (day, partition), also those that the session doesn't read."""
        return self._of_group[split.day, split.partition]

    def is_distinct(self, split: TableSplit) -> bool:
        """No sample of its (day, partition) is there twice: all is in one file, which was sealed."""
        group = self.group(split)
        return len(group) == 1 and group[0].sealed

    def files_of(self, partition: int) -> list[FileStats]:
        """All files of a partition, also those that the session doesn't read, the latest days first."""
        its = [file for file in self.files if file.partition == partition and file.rows]
        return sorted(its, key=lambda file: (file.day, file.first_offset), reverse=True)


class LocalSessionRows:
    """See `SessionRows`: in the thread that calls, a row group at a time."""

    def __init__(self, session: OpenSession, rows: TableRows) -> None:
        self.session, self.rows = session, rows
        self._counts: OrderedDict[tuple[str, int], Mapping[str, np.ndarray]] = OrderedDict()

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """Nothing is read ahead."""

    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        """To the end of the row group."""
        start = split.row(position)
        end = min((start // self.session.row_group + 1) * self.session.row_group, split.end)
        batch = self.rows.batch(split.path, start, end)
        at_R = np.arange(position, position + end - start, dtype=np.int64)
        counts_R = batch.offset_R >= self.session.spec.from_offsets.get(split.partition, 0)
        if not self.session.is_distinct(split):
            counts_R &= self._first_of(split)[start:end]
        if not counts_R.all():
            rows_M = np.flatnonzero(counts_R)
            batch, at_R = batch.take_requests(rows_M), at_R[rows_M]
        return Piece(batch, at_R, position + end - start)

    def close(self) -> None:
        """Nothing is held."""

    def _first_of(self, split: TableSplit) -> np.ndarray:
        """bool, of the rows of its file: no row of its (day, partition) with a lower offset is of the same sample."""
        key = split.day, split.partition
        if key not in self._counts:
            self._counts[key] = first_copies(
                {file.path: self.rows.marks(file.path) for file in self.session.group(split)}
            )
            while len(self._counts) > _GROUPS_KEPT:
                self._counts.popitem(last=False)
        return self._counts[key][split.path]


def first_copies(marks: Mapping[str, Marks]) -> dict[str, np.ndarray]:
    """Of each file, bool [R]: of the rows of one sample the one with the lowest offset."""
    ids, offsets = (np.concatenate([m[column] for m in marks.values()]) for column in (0, 1))
    order = np.lexsort((offsets, ids))
    sorted_ids = ids[order]
    counts = np.zeros(len(ids), np.bool_)
    counts[order] = np.concatenate([[True], sorted_ids[1:] != sorted_ids[:-1]])[: len(ids)]
    ends = np.cumsum([len(m.sample_id_R) for m in marks.values()])
    return dict(zip(marks, np.split(counts, ends[:-1]), strict=True))


def recent_sample_ids(
    session: OpenSession, rows: TableRows, partition: int, horizon_ms: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, close times), int64 [N] by close time: samples of a partition that closed within the horizon of the newest ones,
    which the stream must not train again, whichever session had them. The newest close is taken as `MedianEventTime` takes it: no
    single wrong time moves it.

    Raises:
        UnavailableError, CheckpointError: as `TableRows.marks`.
    """
    ids, times = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for file in session.files_of(partition):
        if len(times) >= NUM_RECENT and file.last_close_ms < _middle(times) - horizon_ms:
            continue
        marks = rows.marks(file.path)
        ids, times = np.concatenate([ids, marks.sample_id_R]), np.concatenate([times, marks.close_ms_R])
        newest = times >= (_middle(times) - horizon_ms)
        ids, times = ids[newest], times[newest]
    order = np.argsort(times, kind="stable")
    return ids[order], times[order]


def _middle(times: np.ndarray) -> int:
    newest = np.sort(times)[-NUM_RECENT:]
    return int(newest[(len(newest) - 1) // 2]) if len(newest) else 0

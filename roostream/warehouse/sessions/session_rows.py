"""Reading a session's rows, split by split, in this process.

In each (day, partition) a sample is read once, also if the joiner emitted it again and no seal has removed
the copy yet: the row with the lowest offset counts. A repeated sample has the id and close time of the first,
so it lies in the same (day, partition). Which rows count follows from the files of the version alone, so a
session can be resumed anywhere without further state.

Letters: R rows of a file or of a piece, M chosen rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from roostream.runtime.event_time import NUM_RECENT
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.sessions.session import ReadOrder, SessionSpec, TableSplit, plan
from roostream.wire.batch import Batch

_MAX_GROUPS = 8  # (day, partition) groups whose duplicates are cached


class SampleMarks(NamedTuple):
    """Ids, offsets and close times of a file's rows, in their order; int64 [R] each."""

    sample_id_R: np.ndarray
    offset_R: np.ndarray
    close_ms_R: np.ndarray


class TableRows(Protocol):
    """Rows of a table's files. May be called by several threads."""

    def batch(self, path: str, start: int, end: int) -> Batch:
        """Rows `start` up to `end` with the session's features and labels.

        Raises:
            UnavailableError: the file cannot be read now.
            CheckpointError: it is damaged; the message names it.
        """

    def marks(self, path: str) -> SampleMarks:
        """Of all rows of a file. Raises as `batch`."""


class Piece(NamedTuple):
    """Consecutive rows in the order of a partition, without those that do not count."""

    batch: Batch
    at_R: np.ndarray  # int64 [R]: position of each row
    end: int  # position after the piece

    @property
    def num_rows(self) -> int:
        return len(self.at_R)

    def between(self, start: int, end: int) -> Piece:
        """Rows `start` up to `end`."""
        if (start, end) == (0, self.num_rows):
            return self
        end_position = int(self.at_R[end]) if end < self.num_rows else self.end
        return Piece(self.batch.requests_between(start, end), self.at_R[start:end], end_position)

    def split_at(self, count: int) -> tuple[Piece, Piece]:
        """The first `count` rows, and the others."""
        count = min(count, self.num_rows)
        return self.between(0, count), self.between(count, self.num_rows)


class SessionRows(Protocol):
    """Pieces of one session's splits, read locally or by reader programs. One thread."""

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """Announce the splits that are read next, in this order, from these positions. Other splits may be
        forgotten.

        The first `at_once` are read in turns. Returns at once.
        """

    def piece(self, split: TableSplit, position: int, timeout_s: float) -> Piece | None:
        """Some rows of `split` from `position` on; the piece's `end` is larger. None: they are not there yet.

        Raises:
            UnavailableError: they cannot be read now; call again.
            CheckpointError: a file is damaged; the message names it.
        """

    def close(self) -> None:
        """Idempotent."""


class OpenSession:
    """A session spec with the files of its version."""

    def __init__(self, spec: SessionSpec, files: Iterable[DataFile], row_group: int) -> None:
        self.spec, self.row_group = spec, row_group
        self.files = tuple(files)
        self.order: ReadOrder = plan(self.files, spec, row_group)
        self._of_group: dict[tuple[str, int], list[DataFile]] = {}
        for file in self.files:
            if file.rows:
                self._of_group.setdefault((file.day.isoformat(), file.partition), []).append(file)

    def files_of_group(self, day: str, partition: int) -> Sequence[DataFile]:
        """All files of a day and partition, also those that the session does not read."""
        return self._of_group[day, partition]

    def is_distinct(self, split: TableSplit) -> bool:
        """Whether no sample of the split's (day, partition) can be there twice: all are in one sealed
        file."""
        group = self.files_of_group(split.day, split.partition)
        return len(group) == 1 and group[0].sealed

    def files_of(self, partition: int) -> list[DataFile]:
        """All files of a partition, also those that the session does not read, the latest days first."""
        files = [file for file in self.files if file.partition == partition and file.rows]
        return sorted(files, key=lambda file: (file.day, file.first_offset), reverse=True)


class LocalSessionRows:
    """Implements `SessionRows` in the calling thread, a row group at a time."""

    def __init__(self, session: OpenSession, rows: TableRows) -> None:
        self.session, self.rows = session, rows
        self._first_copies = functools.lru_cache(_MAX_GROUPS)(self._find_first_copies)

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """Nothing is read ahead."""

    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        """The rows up to the end of the row group."""
        start = split.row(position)
        end = min((start // self.session.row_group + 1) * self.session.row_group, split.end)
        batch = self.rows.batch(split.path, start, end)
        at_R = np.arange(position, position + end - start, dtype=np.int64)
        counts_R = batch.offset_R >= self.session.spec.from_offsets.get(split.partition, 0)
        if not self.session.is_distinct(split):
            counts_R &= self._first_copies(split.day, split.partition)[split.path][start:end]
        if not counts_R.all():
            rows_M = np.flatnonzero(counts_R)
            batch, at_R = batch.take_requests(rows_M), at_R[rows_M]
        return Piece(batch, at_R, position + end - start)

    def close(self) -> None:
        """Nothing to close."""

    def _find_first_copies(self, day: str, partition: int) -> Mapping[str, np.ndarray]:
        files = self.session.files_of_group(day, partition)
        return first_copies({file.path: self.rows.marks(file.path) for file in files})


def first_copies(marks: Mapping[str, SampleMarks]) -> dict[str, np.ndarray]:
    """File → bool [R]: True for the copy of each sample with the lowest offset."""
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
    """(ids, close times), int64 [N] by close time: a partition's samples that closed within the horizon of
    the newest ones.

    The stream must not train them again, whichever session had them. The newest close time is the median that
    `MedianEventTime` (roostream/runtime/event_time.py) uses, so that a single wrong time does not move it.

    Raises:
        UnavailableError, CheckpointError: as `TableRows.marks`.
    """
    ids, times = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for file in session.files_of(partition):
        if len(times) >= NUM_RECENT and file.last_close_ms < _newest_close(times) - horizon_ms:
            continue
        marks = rows.marks(file.path)
        ids, times = np.concatenate([ids, marks.sample_id_R]), np.concatenate([times, marks.close_ms_R])
        newest = times >= (_newest_close(times) - horizon_ms)
        ids, times = ids[newest], times[newest]
    order = np.argsort(times, kind="stable")
    return ids[order], times[order]


def _newest_close(times: np.ndarray) -> int:
    newest = np.sort(times)[-NUM_RECENT:]
    return int(newest[(len(newest) - 1) // 2]) if len(newest) else 0

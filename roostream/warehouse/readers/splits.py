"""The order in which a session's rows are read: days, the files of a day shuffled by seed, the rows of a file as they lie.

    files of a version ──► splits in one order, numbered ──► of each partition its own part of that order
                             day 1: f3 f1 f2                   partition 0:  f3 f2 | ...      rows 0 .. N0
                             day 2: ...                        partition 1:  f1    | ...      rows 0 .. N1

A file holds rows of one Kafka partition. So each partition has an order of its own, and how far it is read is one number, its
*position*: rows of the order that lie before. A partition moves to another worker with its position, as it does with its offset
(docs/decisions/0060). Rows that are left out count as rows all the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import NamedTuple, Protocol

import xxhash

from roostream.warehouse.readers.session import SessionSpec

MAX_CANDIDATES = 1 << 16  # in a split, unless a single row group has more


class FileFacts(Protocol):
    """What planning needs to know of a file."""

    @property
    def path(self) -> str: ...
    @property
    def day(self) -> date: ...
    @property
    def partition(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def candidates(self) -> int: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...
    @property
    def last_close_ms(self) -> int: ...
    @property
    def sealed(self) -> bool: ...
    @property
    def topic(self) -> str: ...


class TableSplit(NamedTuple):
    """Rows `start` up to `end` of a file, which lie at `at` in the order of their partition."""

    number: int  # in the order of all
    path: str
    day: str
    partition: int
    start: int
    end: int
    at: int

    @property
    def behind(self) -> int:
        """The position behind it."""
        return self.at + self.end - self.start

    def row(self, position: int) -> int:
        """Of the file, at this position of the partition."""
        return self.start + position - self.at


class ReadOrder:
    """All splits of a session. Immutable."""

    def __init__(self, splits: Sequence[TableSplit]) -> None:
        self.splits = tuple(splits)

    @cached_property
    def by_partition(self) -> Mapping[int, Sequence[TableSplit]]:
        found: dict[int, list[TableSplit]] = {}
        for split in self.splits:
            found.setdefault(split.partition, []).append(split)
        return found

    @cached_property
    def rows(self) -> dict[int, int]:
        """Partition → its rows, where it has any."""
        return {partition: its[-1].behind for partition, its in self.by_partition.items()}

    def split_at(self, partition: int, position: int) -> TableSplit | None:
        """The split that holds this position; None behind the last."""
        its = self.by_partition.get(partition, ())
        found = bisect.bisect_right(its, position, key=lambda split: split.behind)
        return its[found] if found < len(its) else None

    def from_here(self, positions: Mapping[int, int], most: int) -> list[TableSplit]:
        """The next splits of these partitions, in the order of all, `most` of them; those begun first."""
        heads = [self._from(partition, position, most) for partition, position in positions.items()]
        return sorted((split for its in heads for split in its), key=lambda split: split.number)[:most]

    def _from(self, partition: int, position: int, most: int) -> Sequence[TableSplit]:
        its = self.by_partition.get(partition, ())
        first = bisect.bisect_right(its, position, key=lambda split: split.behind)
        return its[first : first + most]


def plan(files: Iterable[FileFacts], spec: SessionSpec, row_group: int) -> ReadOrder:
    """The splits of what `spec` reads of a version's `files`; `row_group`: rows of each row group but a file's last."""
    splits: list[TableSplit] = []
    behind: dict[int, int] = {}
    for file in sorted(
        filter(lambda file: is_read(file, spec), files), key=lambda file: _place(file, spec.shuffle_seed)
    ):
        for start, end in _runs(file, row_group):
            at = behind.get(file.partition, 0)
            splits.append(
                TableSplit(len(splits), file.path, file.day.isoformat(), file.partition, start, end, at)
            )
            behind[file.partition] = splits[-1].behind
    return ReadOrder(splits)


def is_read(file: FileFacts, spec: SessionSpec) -> bool:
    """It may hold rows of the session."""
    if spec.topic and file.topic not in ("", spec.topic):
        return False
    return (
        spec.has_day(file.day.isoformat())
        and file.rows > 0
        and file.last_offset >= spec.from_offsets.get(file.partition, 0)
    )


def dealt(partitions: Collection[int], worker: int, workers: int) -> list[int]:
    """Those whose splits are this worker's, as those of the topic are."""
    return sorted(partition for partition in partitions if partition % workers == worker)


def _place(file: FileFacts, seed: int | None) -> tuple[date, int, int, str]:
    shuffled = 0 if seed is None else xxhash.xxh3_64_intdigest(f"{seed} {file.path}".encode())
    return file.day, shuffled, file.first_offset, file.path


def _runs(file: FileFacts, row_group: int) -> Iterable[tuple[int, int]]:
    """Runs of whole row groups with nearly the same number of candidates."""
    groups = -(-file.rows // row_group)
    count = min(max(-(-file.candidates // MAX_CANDIDATES), 1), groups)
    for number in range(count):
        start, end = groups * number // count * row_group, groups * (number + 1) // count * row_group
        yield start, min(end, file.rows)

"""What a reading session reads: a table version, its days and rows, their order, and the labels.

Two sessions with equal digests read the same rows in the same order, in any process.

    files of a version ──► splits in one order, numbered ──► each partition's part of that order
                             day 1: f3 f1 f2                   partition 0:  f3 f2 | ...      rows 0 .. N0
                             day 2: ...                        partition 1:  f1    | ...      rows 0 .. N1

A file holds rows of one Kafka partition. So each partition has an order of its own, and how far it is read is
one number, its *position*: the number of rows before. A partition moves to another worker with its position,
as it does with its offset (docs/decisions/0060). Rows that are skipped count as rows too.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import xxhash

from roostream.errors import ConfigError
from roostream.warehouse.data_file import DataFile

Labels = Literal["latest", "as_streamed"]
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """The definition of a session. `from_offsets`: partition of `samples` → rows with smaller offsets are
    skipped, because earlier sessions had them."""

    table: str
    version: int  # of the table's log; later commits change nothing
    first_day: str = ""  # YYYY-MM-DD in UTC, by close time; "" = the first
    last_day: str = ""  # inclusive; "" = the last
    features: tuple[str, ...] = ()  # features that are read, () = all; others read as missing
    topic: str = ""  # id of the topic of `from_offsets`; files of other topics are skipped; "" = no check
    graph: str = ""  # digest of the transforms that readers run; "" = the schema's
    from_offsets: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shuffle_seed: int | None = 0  # order of a day's files; None = by offset
    labels: Labels = "latest"  # with corrections; "as_streamed": as they were at the close
    batch_requests: int = 1024  # requests of a piece that a reader program makes

    def __post_init__(self) -> None:
        """Raises ConfigError: a malformed day, days in the wrong order, or unknown labels."""
        for day in (self.first_day, self.last_day):
            if day and not is_day(day):
                raise ConfigError(f"expected a day as YYYY-MM-DD, got {day!r}")
        if self.first_day and self.last_day and self.last_day < self.first_day:
            raise ConfigError(f"expected days in order, got {self.first_day}..{self.last_day}")
        if self.labels not in get_args(Labels):
            raise ConfigError(f"expected labels {' or '.join(get_args(Labels))}, got {self.labels!r}")

    def has_day(self, day: str) -> bool:
        return self.first_day <= day and (not self.last_day or day <= self.last_day)

    def plain(self) -> dict[str, Any]:
        """Plain values for manifests and RPC calls."""
        body = dataclasses.asdict(self)
        if not self.topic:
            del body["topic"]  # digests stay as they were before topics were recorded
        return {
            **body,
            "features": list(self.features),
            "from_offsets": {str(p): at for p, at in sorted(self.from_offsets.items())},
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SessionSpec:
        """Inverse of `plain`. Raises TypeError, ValueError or KeyError for anything else."""
        offsets = {int(p): int(at) for p, at in plain["from_offsets"].items()}
        return cls(**{**plain, "features": tuple(plain["features"]), "from_offsets": offsets})

    @property
    def digest(self) -> str:
        """16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.plain(), sort_keys=True).encode())


def days_of(text: str) -> tuple[str, str]:
    """First and last day of "A..B", "A.." or "..B"; a single day is both.

    Raises:
        ConfigError: the text has another form.
    """
    first, dots, last = text.partition("..")
    days = (first, last) if dots else (first, first)
    if not any(days) or not all(is_day(day) for day in days if day):
        raise ConfigError(f"expected days as 2024-05-01..2024-05-07, got {text!r}; either end may be omitted")
    return days


def is_day(text: str) -> bool:
    """Whether this is a day of the calendar as YYYY-MM-DD."""
    try:
        return bool(_DAY.fullmatch(text) and date.fromisoformat(text))
    except ValueError:
        return False


MAX_CANDIDATES = 1 << 16  # of a split; a single row group may have more


class TableSplit(NamedTuple):
    """The rows of a file from `start` to before `end`; `at` is the place of the first one among the rows of
    its partition."""

    number: int  # in the order of all
    path: str
    day: str
    partition: int
    start: int
    end: int
    at: int

    @property
    def end_position(self) -> int:
        """The position after the split."""
        return self.at + self.end - self.start

    def row(self, position: int) -> int:
        """The file's row at this position of the partition."""
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
        """Partition → its number of rows, for partitions that have any."""
        return {partition: splits[-1].end_position for partition, splits in self.by_partition.items()}

    def split_at(self, partition: int, position: int) -> TableSplit | None:
        """The split that contains this position; None after the last one."""
        return next(iter(self._from(partition, position, 1)), None)

    def next_splits(self, positions: Mapping[int, int], count: int) -> list[TableSplit]:
        """The next `count` splits of these partitions in the session's order; splits that have been started
        come first."""
        heads = [self._from(partition, position, count) for partition, position in positions.items()]
        return sorted(itertools.chain.from_iterable(heads), key=lambda split: split.number)[:count]

    def _from(self, partition: int, position: int, count: int) -> Sequence[TableSplit]:
        splits = self.by_partition.get(partition, ())
        first = bisect.bisect_right(splits, position, key=lambda split: split.end_position)
        return splits[first : first + count]


def plan(files: Iterable[DataFile], spec: SessionSpec, row_group: int) -> ReadOrder:
    """Plan the splits of a session over a version's `files`. `row_group`: rows of each row group but the last
    of a file."""
    splits: list[TableSplit] = []
    behind: dict[int, int] = {}
    for file in sorted(
        filter(lambda file: is_read(file, spec), files), key=lambda file: _sort_key(file, spec.shuffle_seed)
    ):
        for start, end in _row_runs(file, row_group):
            at = behind.get(file.partition, 0)
            splits.append(
                TableSplit(len(splits), file.path, file.day.isoformat(), file.partition, start, end, at)
            )
            behind[file.partition] = splits[-1].end_position
    return ReadOrder(splits)


def is_read(file: DataFile, spec: SessionSpec) -> bool:
    """Whether a file may hold rows of the session."""
    if spec.topic and file.topic not in ("", spec.topic):
        return False
    return (
        spec.has_day(file.day.isoformat())
        and file.rows > 0
        and file.last_offset >= spec.from_offsets.get(file.partition, 0)
    )


def _sort_key(file: DataFile, seed: int | None) -> tuple[date, int, int, str]:
    shuffled = 0 if seed is None else xxhash.xxh3_64_intdigest(f"{seed} {file.path}".encode())
    return file.day, shuffled, file.first_offset, file.path


def _row_runs(file: DataFile, row_group: int) -> Iterable[tuple[int, int]]:
    """Cut a file into runs of whole row groups with about equal numbers of candidates."""
    groups = -(-file.rows // row_group)
    count = min(max(-(-file.candidates // MAX_CANDIDATES), 1), groups)
    for number in range(count):
        start, end = groups * number // count * row_group, groups * (number + 1) // count * row_group
        yield start, min(end, file.rows)

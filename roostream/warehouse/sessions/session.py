"""What a session reads: a version of the table, which days and rows of it, in which order, with which labels.

Two sessions with one digest read the same rows in the same order, whoever plans them.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, get_args

import xxhash

from roostream.errors import ConfigError

Labels = Literal["latest", "as_streamed"]
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """`from_offsets`: partition of `samples` → rows of the topic below it are left out: earlier sessions had them."""

    table: str
    version: int  # of the table's log: fixed, so that what comes later changes nothing
    first_day: str = ""  # YYYY-MM-DD, UTC, by close time; "" = from the first
    last_day: str = ""  # of the same, in it; "" = up to the last
    features: tuple[str, ...] = ()  # columns that are read, () = all; others are as if they were missing
    topic: str = ""  # id of the topic that `from_offsets` are of: files of another were an earlier session's; "" = all are of it
    graph: str = ""  # digest of the transforms that readers run; "" = those of the schema
    from_offsets: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shuffle_seed: int | None = 0  # of the files of a day; None = by their offsets
    labels: Labels = (
        "latest"  # with the corrections that came until then; "as_streamed": as they were at the close
    )
    batch_requests: int = 1024  # what a reader makes at once

    def __post_init__(self) -> None:
        """Raises ConfigError: a day that is none, days the wrong way round, or unknown labels."""
        for day in (self.first_day, self.last_day):
            if day and not DAY.fullmatch(day):
                raise ConfigError(f"expected a day as YYYY-MM-DD, got {day!r}")
        if self.first_day and self.last_day and self.last_day < self.first_day:
            raise ConfigError(
                f"expected days in order, got {self.first_day}..{self.last_day}; the first comes first"
            )
        if self.labels not in get_args(Labels):
            raise ConfigError(f"expected labels {' or '.join(get_args(Labels))}, got {self.labels!r}")

    def has_day(self, day: str) -> bool:
        return self.first_day <= day and (not self.last_day or day <= self.last_day)

    def plain(self) -> dict[str, Any]:
        """As manifests and calls carry it."""
        body = dataclasses.asdict(self)
        if not self.topic:
            del body["topic"]  # as before it was known, so that digests stay
        return {
            **body,
            "features": list(self.features),
            "from_offsets": {str(p): at for p, at in sorted(self.from_offsets.items())},
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SessionSpec:
        """Inverse of `plain`. TypeError, ValueError, KeyError: it is none."""
        offsets = {int(p): int(at) for p, at in told["from_offsets"].items()}
        return cls(**{**told, "features": tuple(told["features"]), "from_offsets": offsets})

    @property
    def digest(self) -> str:
        """16 hex digits."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.plain(), sort_keys=True).encode())


def days_of(text: str) -> tuple[str, str]:
    """First and last day of "A..B", "A.." or "..B"; a day alone is both.

    Raises:
        ConfigError: it is none of these.
    """
    first, dots, last = text.partition("..")
    days = (first, last) if dots else (first, first)
    if not any(days) or not all(DAY.fullmatch(day) for day in days if day):
        raise ConfigError(
            f"expected days as 2024-05-01..2024-05-07, got {text!r}; either end may be left out"
        )
    return days


MAX_CANDIDATES = 1 << 16  # in a split, unless a single row group has more


class FileStats(Protocol):
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

    def next_splits(self, positions: Mapping[int, int], most: int) -> list[TableSplit]:
        """The next splits of these partitions, in the order of all, `most` of them; those begun first."""
        heads = [self._from(partition, position, most) for partition, position in positions.items()]
        return sorted((split for its in heads for split in its), key=lambda split: split.number)[:most]

    def _from(self, partition: int, position: int, most: int) -> Sequence[TableSplit]:
        its = self.by_partition.get(partition, ())
        first = bisect.bisect_right(its, position, key=lambda split: split.behind)
        return its[first : first + most]


def plan(files: Iterable[FileStats], spec: SessionSpec, row_group: int) -> ReadOrder:
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


def is_read(file: FileStats, spec: SessionSpec) -> bool:
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


def _place(file: FileStats, seed: int | None) -> tuple[date, int, int, str]:
    shuffled = 0 if seed is None else xxhash.xxh3_64_intdigest(f"{seed} {file.path}".encode())
    return file.day, shuffled, file.first_offset, file.path


def _runs(file: FileStats, row_group: int) -> Iterable[tuple[int, int]]:
    """Runs of whole row groups with nearly the same number of candidates."""
    groups = -(-file.rows // row_group)
    count = min(max(-(-file.candidates // MAX_CANDIDATES), 1), groups)
    for number in range(count):
        start, end = groups * number // count * row_group, groups * (number + 1) // count * row_group
        yield start, min(end, file.rows)

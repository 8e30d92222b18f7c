"""Work units: ranges of training input that the controller hands out to workers.

A source is a partition of `samples`, named like "samples/3". The bounds of a range are Kafka offsets or,
while a warehouse session is trained (`TableInput`), *positions*: numbers of records in the session's order
(roostream/warehouse/readers). Only the reader of a source interprets them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress, flat, nested


@dataclasses.dataclass(frozen=True)
class WorkUnit:
    """The range from `start` to `end` (exclusive) of `source`. It is done once a commit contains it."""

    source: str
    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.end, self

    def __len__(self) -> int:
        return self.end - self.start

    def part(self, number: int, num_parts: int) -> WorkUnit:
        """Part `number` (from 0) of `num_parts` parts of nearly equal length."""
        return WorkUnit(
            self.source,
            self.start + len(self) * number // num_parts,
            self.start + len(self) * (number + 1) // num_parts,
        )

    def after(self, at: int) -> WorkUnit:
        """The rest when everything below `at` is done."""
        return WorkUnit(self.source, min(max(at, self.start), self.end), self.end)


def source_of(partition: Partition) -> str:
    """The source name of a partition."""
    return f"{partition[0]}/{partition[1]}"


def partition_of(source: str) -> Partition:
    """Inverse of `source_of`. Raises ValueError for other names."""
    topic, _, number = source.rpartition("/")
    return topic, int(number)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What a worker may read until the next epoch: one unit of each of its sources. Number 0 is the stream,
    which has no units and no end."""

    number: int
    units: tuple[WorkUnit, ...]

    def plain(self) -> dict[str, Any]:
        """As in commands."""
        return {"number": self.number, "units": plain_units(self.units)}

    @classmethod
    def of(cls, plain: Mapping[str, Any] | None) -> Epoch:
        """Inverse of `plain`; None is the stream."""
        return cls(int(plain["number"]), units_of(plain["units"])) if plain else STREAM


STREAM = Epoch(0, ())


def plain_units(units: Sequence[WorkUnit]) -> list[list[Any]]:
    """As in calls and files."""
    return [[unit.source, unit.start, unit.end] for unit in units]


def units_of(plain: Sequence[Sequence[Any]]) -> tuple[WorkUnit, ...]:
    """Inverse of `plain_units`. Raises ValueError or TypeError for malformed input."""
    return tuple(WorkUnit(str(source), int(start), int(end)) for source, start, end in plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableInput:
    """A warehouse session, as in commits, incarnations and commands. Sessions with equal digests have the
    same records at the same positions."""

    table: str  # the warehouse's location
    version: int  # of the table's log of samples
    digest: str  # of the session's spec
    spec: Mapping[str, Any]  # as `SessionSpec.plain`
    rows: Mapping[int, int]  # partition → number of records
    begins: Progress  # stream offsets: earlier sessions or the stream contained everything below
    ends: Progress  # stream offsets: everything below is in this session or was trained before
    topics: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name → id of the topics of `ends`
    last_close_ms: int = 0  # of its samples
    corrections: int = -1  # version of the log of corrections that its labels include; -1 = none

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        numbers = {
            name: getattr(self, name)
            for name in ("table", "version", "digest", "last_close_ms", "corrections")
        }
        rows = {str(number): count for number, count in sorted(self.rows.items())}
        offsets = {name: _texts(getattr(self, name)) for name in ("begins", "ends")}
        return {
            **numbers,
            **offsets,
            "phase": "initial",
            "spec": dict(self.spec),
            "rows": rows,
            "topics": dict(self.topics),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any] | None) -> TableInput | None:
        """Inverse of `plain`; None for None (the stream). Raises KeyError, TypeError, ValueError or
        AttributeError if malformed."""
        if not plain:
            return None
        fields = {name: value for name, value in plain.items() if name != "phase"}
        rows = {int(number): int(count) for number, count in plain["rows"].items()}
        return cls(**{**fields, "rows": rows, "begins": flat(plain["begins"]), "ends": flat(plain["ends"])})

    @property
    def units(self) -> tuple[WorkUnit, ...]:
        """The complete session, one unit a partition."""
        return tuple(
            WorkUnit(source_of((SAMPLES, number)), 0, count)
            for number, count in sorted(self.rows.items())
            if count
        )

    def is_trained(self, at: Progress) -> bool:
        """Whether these positions are at the end of the session."""
        return all(at.get((SAMPLES, number), 0) >= count for number, count in self.rows.items())

    def stream_at(self, positions: Progress) -> Progress:
        """The stream offsets of these partitions before this session."""
        return {partition: self.begins.get(partition, 0) for partition in positions}

    def stream_behind(self, positions: Progress) -> Progress:
        """The stream offsets after this session. If the session's labels include no corrections, all
        corrections of the stream remain. Without a known stream: its beginning."""
        if not self.topics:
            return dict.fromkeys(positions, 0)
        return {
            p: self.ends.get(p, 0) if p[0] != CORRECTIONS or self.corrections >= 0 else 0 for p in positions
        }


def _texts(at: Progress) -> dict[str, dict[str, int]]:
    return {
        topic: {str(number): offset for number, offset in offsets.items()}
        for topic, offsets in nested(at).items()
    }

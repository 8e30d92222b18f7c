"""What training is given to do: ranges of sources, handed out by the controller, read by whoever reads that source.

A source is named by text: a partition of `samples` ("samples/3"). A range has offsets; or, while a model is trained from a
session of the warehouse (`TableInput`), *positions*: rows of the session's order that lie before (roostream/warehouse/sessions/session.py).
Whoever reads a source knows what its numbers mean; nobody else needs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress, flat, nested


@dataclasses.dataclass(frozen=True)
class WorkUnit:
    """What lies from `start` up to `end` of `source`, `end` not in it. Done when a commit contains it, and not before."""

    source: str
    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.end, self

    def __len__(self) -> int:
        return self.end - self.start

    def part(self, number: int, of: int) -> WorkUnit:
        """The one numbered `number` (from 0) of so many of nearly the same length."""
        return WorkUnit(
            self.source, self.start + len(self) * number // of, self.start + len(self) * (number + 1) // of
        )

    def after(self, at: int) -> WorkUnit:
        """What is left of it when everything below `at` is done."""
        return WorkUnit(self.source, min(max(at, self.start), self.end), self.end)


def source_of(partition: Partition) -> str:
    """How a partition is called as a source."""
    return f"{partition[0]}/{partition[1]}"


def partition_of(source: str) -> Partition:
    """Inverse of `source_of`. ValueError: it is no partition's name."""
    topic, _, number = source.rpartition("/")
    return topic, int(number)


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What a worker may read until it is told more: of each of its sources one unit, and nothing behind it. Number 0 is the
    stream, which has no units and no end."""

    number: int
    units: tuple[WorkUnit, ...]

    def plain(self) -> dict[str, Any]:
        """As commands carry it."""
        return {"number": self.number, "units": plain_units(self.units)}

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> Epoch:
        """Inverse of `plain`; nothing told is the stream."""
        return cls(int(told["number"]), units_of(told["units"])) if told else STREAM


STREAM = Epoch(0, ())


def plain_units(units: Sequence[WorkUnit]) -> list[list[Any]]:
    """As calls and files carry them."""
    return [[unit.source, unit.start, unit.end] for unit in units]


def units_of(told: Sequence[Sequence[Any]]) -> tuple[WorkUnit, ...]:
    """Inverse of `plain_units`. ValueError, TypeError: these are none."""
    return tuple(WorkUnit(str(source), int(start), int(end)) for source, start, end in told)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableInput:
    """A session of the warehouse, as commits, incarnations and commands carry it. Two with equal digests have the same rows
    at the same positions."""

    table: str  # the warehouse's place
    version: int  # of the log of its samples
    digest: str  # of the session's spec
    spec: Mapping[str, Any]  # as `SessionSpec.plain`
    rows: Mapping[int, int]  # partition → positions of the session
    begins: (
        Progress  # offsets of the stream: below them earlier sessions, or the stream itself, had everything
    )
    ends: Progress  # of the stream: below them everything is in this session, or was before
    topics: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # name → id of what `ends` are offsets of
    last_close_ms: int = 0  # of its samples
    corrections: int = -1  # version of the log of its corrections, which its labels have; -1 = they have none

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        told = {
            name: getattr(self, name)
            for name in ("table", "version", "digest", "last_close_ms", "corrections")
        }
        rows = {str(number): count for number, count in sorted(self.rows.items())}
        offsets = {name: _texts(getattr(self, name)) for name in ("begins", "ends")}
        return {
            **told,
            **offsets,
            "phase": "initial",
            "spec": dict(self.spec),
            "rows": rows,
            "topics": dict(self.topics),
        }

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> TableInput | None:
        """Inverse of `plain`; None of nothing: the stream. KeyError, TypeError, ValueError, AttributeError: it is none."""
        if not told:
            return None
        plain = {name: value for name, value in told.items() if name != "phase"}
        rows = {int(number): int(count) for number, count in told["rows"].items()}
        return cls(**{**plain, "rows": rows, "begins": flat(told["begins"]), "ends": flat(told["ends"])})

    @property
    def units(self) -> tuple[WorkUnit, ...]:
        """All of it, by partition."""
        return tuple(
            WorkUnit(source_of((SAMPLES, number)), 0, count)
            for number, count in sorted(self.rows.items())
            if count
        )

    def is_trained(self, at: Progress) -> bool:
        """These positions lie behind all of it."""
        return all(at.get((SAMPLES, number), 0) >= count for number, count in self.rows.items())

    def stream_at(self, positions: Progress) -> Progress:
        """Of the partitions that are trained: where the stream would go on before this session, below which all is trained."""
        return {partition: self.begins.get(partition, 0) for partition in positions}

    def stream_behind(self, positions: Progress) -> Progress:
        """The same behind this session. Corrections that the session's labels don't have are the stream's, all of them. Where no
        stream is known, its beginning."""
        if not self.topics:
            return dict.fromkeys(positions, 0)
        return {
            p: self.ends.get(p, 0) if p[0] != CORRECTIONS or self.corrections >= 0 else 0 for p in positions
        }


def _texts(at: Progress) -> dict[str, dict[str, int]]:
    return {topic: {str(number): offset for number, offset in of.items()} for topic, of in nested(at).items()}

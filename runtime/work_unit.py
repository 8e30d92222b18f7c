"""What training is given to do: ranges of sources, handed out by the controller, read by whoever reads that source.

A source is named by text. Today it is a partition of `samples` ("samples/3"), and a range has offsets; of a file it will be the
file's name, and a range its rows. Whoever reads a source knows what its numbers mean; nobody else needs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.kafka.topics import Partition


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
        return WorkUnit(self.source, self.start + len(self) * number // of, self.start + len(self) * (number + 1) // of)

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

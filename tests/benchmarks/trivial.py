"""Subjects whose cost is known: they move the clock of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from benchmarks.harness.benchmark import Work


class Clock:
    """Seconds, moved by the subjects."""

    now_s = 0.0
    kept: ClassVar[list[str]] = []


@contextlib.contextmanager
def takes(seconds: float, units: float = 1.0) -> Iterator[Work]:
    def step() -> None:
        Clock.now_s += seconds

    yield Work(step, units)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    Clock.kept.append("open")
    yield
    Clock.kept.append("closed")


@contextlib.contextmanager
def part() -> Iterator[Work]:
    """A step of which two seconds are what is asked about."""

    def step() -> None:
        Clock.now_s += 7
        Clock.kept.append("step")

    yield Work(step, lambda: 4.0, took_s=lambda: 2.0)


@contextlib.contextmanager
def fails(text: str) -> Iterator[Work]:
    raise ValueError(text)
    yield  # type: ignore[unreachable]


@contextlib.contextmanager
def tells(seconds: float, *units: float) -> Iterator[Work]:
    """A step is a turn, and says afterwards what it did."""
    left = list(units)

    def step() -> None:
        Clock.now_s += seconds
        left.append(left.pop(0))

    yield Work(step, lambda: left[-1], lambda: {"twice": 2 * left[-1]})

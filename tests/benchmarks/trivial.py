"""Subjects whose cost is known: they move the clock of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from benchmarks.harness.benchmark import TurnResult, WholeTurn, Work


class Clock:
    """Seconds, moved by the subjects."""

    now_s = 0.0
    events: ClassVar[list[str]] = []


@contextlib.contextmanager
def takes(seconds: float, units: float = 1.0) -> Iterator[Work]:
    def step() -> None:
        Clock.now_s += seconds

    yield Work(step, units)


@contextlib.contextmanager
def run_setup() -> Iterator[None]:
    Clock.events.append("open")
    yield
    Clock.events.append("closed")


@contextlib.contextmanager
def part() -> Iterator[WholeTurn]:
    """A turn of seven seconds, of which two count."""

    def turn() -> TurnResult:
        Clock.now_s += 7
        Clock.events.append("turn")
        return TurnResult(4.0, 2.0)

    yield WholeTurn(turn, warm_up=lambda: Clock.events.append("warm-up"))


@contextlib.contextmanager
def fails(text: str) -> Iterator[Work]:
    raise ValueError(text)
    yield  # type: ignore[unreachable]


@contextlib.contextmanager
def reports(seconds: float, *units: float) -> Iterator[WholeTurn]:
    """Turns with these units, one after the other."""
    remaining = list(units)

    def turn() -> TurnResult:
        Clock.now_s += seconds
        done = remaining.pop(0)
        return TurnResult(done, None, {"twice": 2 * done})

    yield WholeTurn(turn)

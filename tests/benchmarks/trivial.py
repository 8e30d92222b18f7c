"""Fake benchmark subjects with a known cost: they advance a fake clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from benchmarks.harness.benchmark import TurnResult, WholeTurn, Work


class Clock:
    """The fake clock, in seconds, and the events that the subjects record."""

    now_s = 0.0
    events: ClassVar[list[str]] = []


@contextlib.contextmanager
def constant_cost(seconds: float, units: float = 1.0) -> Iterator[Work]:
    def step() -> None:
        Clock.now_s += seconds

    yield Work(step, units)


@contextlib.contextmanager
def run_setup() -> Iterator[None]:
    Clock.events.append("open")
    yield
    Clock.events.append("closed")


@contextlib.contextmanager
def partly_timed() -> Iterator[WholeTurn]:
    """Turns of seven seconds, of which two are measured."""

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
def varying_units(seconds: float, *units: float) -> Iterator[WholeTurn]:
    """Turns that process as many units as `units` lists, one after the other."""
    remaining = list(units)

    def turn() -> TurnResult:
        Clock.now_s += seconds
        done = remaining.pop(0)
        return TurnResult(done, None, {"twice": 2 * done})

    yield WholeTurn(turn)

"""Subjects whose cost is known: they move the clock of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.question import Work


class Clock:
    """Seconds, moved by the subjects."""

    now_s = 0.0


@contextlib.contextmanager
def takes(seconds: float, units: float = 1.0) -> Iterator[Work]:
    def step() -> None:
        Clock.now_s += seconds

    yield Work(step, units)


@contextlib.contextmanager
def fails(text: str) -> Iterator[Work]:
    raise ValueError(text)
    yield  # type: ignore[unreachable]

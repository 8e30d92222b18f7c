"""What the page shows of the past: a bounded series of numbers, and what changed when. Kept in memory, gone with the process.

Times are seconds of one monotonic clock, so that a wall clock that jumps draws no wrong line.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

Values = Mapping[str, float | None]


class Resolution(NamedTuple):
    """One resolution: at most `points`, one each `step_s`."""

    step_s: float
    points: int


GRAINS = (Resolution(10, 360), Resolution(60, 360), Resolution(600, 432))  # an hour, six hours, three days
MAX_CHANGES = 200


@dataclasses.dataclass(kw_only=True)
class Point:
    """All readings of one step folded into one."""

    slot: int
    at_s: float  # of the newest reading in it
    values: dict[str, float | None]


class History:
    """Readings by name in several grains. A step without any reading has no point, so a gap stays a gap; a value that nobody knew
    during a whole step is None.

    Within a step the newest known value counts, but for names in `worst`, where the largest does: a coarse line must not hide
    a peak. Not thread-safe.
    """

    def __init__(self, worst: frozenset[str] = frozenset(), grains: tuple[Resolution, ...] = GRAINS) -> None:
        self.worst, self.grains = worst, grains
        self._points: list[deque[Point]] = [deque(maxlen=grain.points) for grain in grains]

    def add(self, at_s: float, values: Values) -> None:
        """A reading, not earlier than the one before."""
        for grain, points in zip(self.grains, self._points, strict=True):
            slot = int(at_s // grain.step_s)
            if not points or points[-1].slot != slot:
                points.append(Point(slot=slot, at_s=at_s, values=dict(values)))
            else:
                self._fold(points[-1], at_s, values)

    def _fold(self, point: Point, at_s: float, values: Values) -> None:
        point.at_s = at_s
        for name, value in values.items():
            known = point.values.get(name)
            if value is not None and known is not None and name in self.worst:
                value = max(value, known)
            if value is not None:
                point.values[name] = value

    def newest(self) -> dict[str, Any] | None:
        """The newest point of the finest grain, as `series` would give it; it may still be added to."""
        points = self._points[0]
        return (
            {"slot": points[-1].slot, "at_s": points[-1].at_s, "values": points[-1].values}
            if points
            else None
        )

    def series(self) -> list[dict[str, Any]]:
        """By grain: `step_s`, and as columns of one length the slots, times and values by name."""
        out = []
        for grain, points in zip(self.grains, self._points, strict=True):
            names = sorted({name for point in points for name in point.values})
            out.append(
                {
                    "step_s": grain.step_s,
                    "slot": [point.slot for point in points],
                    "at_s": [point.at_s for point in points],
                    "values": {name: [point.values.get(name) for point in points] for name in names},
                }
            )
        return out


class Change(NamedTuple):
    """What became of something, when, and what it was."""

    at_s: float
    time_ms: int  # wall time, for people
    what: str
    was: str
    now: str


class ChangeLog:
    """Facts by name as they change, and since when each is as it is. Not thread-safe."""

    def __init__(self, most: int = MAX_CHANGES) -> None:
        self.newest: deque[Change] = deque(maxlen=most)  # newest last
        self._now: dict[str, tuple[str, float]] = {}

    def observe(self, at_s: float, time_ms: int, facts: Mapping[str, str]) -> None:
        """All facts at one moment; one that isn't named is no more. The first value of a fact is no change."""
        for what, now in facts.items():
            was = self._now.get(what)
            if was is None:
                self._now[what] = now, at_s
            elif was[0] != now:
                self.newest.append(Change(at_s, time_ms, what, was[0], now))
                self._now[what] = now, at_s
        for what in self._now.keys() - facts.keys():
            del self._now[what]

    def add(self, at_s: float, time_ms: int, what: str, now: str, was: str = "") -> None:
        """Something that happened and is over."""
        self.newest.append(Change(at_s, time_ms, what, was, now))

    def since_s(self, what: str) -> float | None:
        """When this fact became what it is, or was first seen; None where it isn't known."""
        found = self._now.get(what)
        return found[1] if found else None


class Rate:
    """Growth of a count a second between two readings; None at the first, and where it went back (a restart, a rollback)."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def of(self, at_s: float, count: float | None) -> float | None:
        before, self._before = self._before, None if count is None else (at_s, count)
        if count is None or before is None or at_s <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (at_s - before[0])

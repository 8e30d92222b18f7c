"""Expected click rates of what was served, over the whole run, the newest requests, and each minute."""

from __future__ import annotations

from collections import deque

from roostream.replay.world import Expected

ORDERS = ("served", "random", "best")


class Tally:
    """Rates are expected clicks a shown candidate under the hidden model: no luck in them, so small changes show."""

    def __init__(self, window: int = 1000) -> None:
        self.total = _Sum()
        self.recent = _Sum()
        self._window: deque[Expected] = deque()
        self._size = window
        self._minutes: dict[int, _Sum] = {}

    def add(self, expected: Expected, elapsed_s: float) -> None:
        """One answered request, `elapsed_s` after the start; beyond a day the oldest minute is forgotten."""
        self.total.add(expected)
        self.recent.add(expected)
        self._window.append(expected)
        if len(self._window) > self._size:
            self.recent.add(self._window.popleft(), -1)
        self._minutes.setdefault(int(elapsed_s // 60), _Sum()).add(expected)
        if len(self._minutes) > 1440:
            del self._minutes[next(iter(self._minutes))]

    def by_minute(self) -> list[dict[str, float]]:
        """The last day's minutes with traffic."""
        return [{"minute": minute, **sums.rates()} for minute, sums in self._minutes.items()]


class _Sum:
    def __init__(self) -> None:
        self.clicks = dict.fromkeys(ORDERS, 0.0)
        self.shown = 0

    def add(self, expected: Expected, sign: int = 1) -> None:
        for order in ORDERS:
            self.clicks[order] += sign * getattr(expected, order)
        self.shown += sign * expected.shown

    def rates(self) -> dict[str, float]:
        return {order: self.clicks[order] / self.shown if self.shown else 0.0 for order in ORDERS}

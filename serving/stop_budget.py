"""The time of a whole stop, shared by its steps: what one doesn't need, the next has."""

from __future__ import annotations

from runtime.clock import Clock


class StopBudget:
    def __init__(self, all_s: float, clock: Clock) -> None:
        self.all_s, self.clock = all_s, clock
        self._end_s: float | None = None

    def begin(self) -> None:
        """The stop was asked for; only the first call counts."""
        if self._end_s is None:
            self._end_s = self.clock.monotonic_s() + self.all_s

    def left_s(self, kept_s: float = 0.0) -> float:
        """What is left but for `kept_s`, at least 0; begins if nobody did."""
        self.begin()
        assert self._end_s is not None
        return max(self._end_s - self.clock.monotonic_s() - kept_s, 0.0)

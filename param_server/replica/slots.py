"""Which slots of a shared stack may be written. Pure: no memory, no clock.

    never used ─► taken (a key's row is there) ─► freed, at a time ─► after the grace: taken again

A reader looks a slot up, then copies what is there. It finds out by itself when the slot was written meanwhile
(shared_kernels.py) and begins anew; the grace, which is longer than a gather takes, makes that rare.
"""

from __future__ import annotations

from collections import deque

import numpy as np

GRACE_S = 0.25


class RowSlots:
    """Of one file; each slot has one owner at a time. `now_s` is monotonic."""

    def __init__(self, capacity: int, used: int = 0, grace_s: float = GRACE_S) -> None:
        """The first `used` are taken already."""
        self.capacity, self.grace_s = capacity, grace_s
        self._next = used
        self._resting: deque[tuple[float, np.ndarray]] = deque()  # (when freed, slots), in that order

    def free(self, slots_M: np.ndarray, now_s: float) -> None:
        """No key names these (int64 [M]) from now on."""
        if len(slots_M):
            self._resting.append((now_s, slots_M))

    def available(self, now_s: float) -> int:
        """How many `take` can give at most."""
        return (
            self.capacity
            - self._next
            + sum(len(slots_M) for freed_s, slots_M in self._resting if self._rested(freed_s, now_s))
        )

    def take(self, most: int, now_s: float) -> np.ndarray:
        """int64 [M], at most `most`: those that have rested longest, then new ones; fewer where there are no more."""
        parts, missing = [], most
        while missing and self._resting and self._rested(self._resting[0][0], now_s):
            freed_s, slots_M = self._resting.popleft()
            parts.append(slots_M[:missing])
            if len(slots_M) > missing:
                self._resting.appendleft((freed_s, slots_M[missing:]))
            missing -= len(parts[-1])
        first, self._next = self._next, min(self._next + missing, self.capacity)
        return np.concatenate([*parts, np.arange(first, self._next, dtype=np.int64)])

    def give_back(self, slots_M: np.ndarray) -> None:
        """Taken, and no key was given them: they need no rest."""
        if len(slots_M):
            self._resting.appendleft((float("-inf"), slots_M))

    def _rested(self, freed_s: float, now_s: float) -> bool:
        return now_s - freed_s >= self.grace_s

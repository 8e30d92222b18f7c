"""Which items wait for a new vector, and since when: the one that waits longest is first.

Letters: I items, N some of them.
"""

from __future__ import annotations

import numpy as np

_NEVER = np.inf


class DueItems:
    """Pure. An item that is marked twice waits since the first time."""

    def __init__(self, num_items: int) -> None:
        self._since_I = np.full(num_items, _NEVER)

    def __len__(self) -> int:
        return int(np.isfinite(self._since_I).sum())

    @property
    def oldest_s(self) -> float | None:
        """When the one that waits longest was marked; None: nobody waits."""
        oldest = float(self._since_I.min(initial=_NEVER))
        return oldest if oldest < _NEVER else None

    def mark(self, slot_N: np.ndarray, now_s: float) -> None:
        self._since_I[slot_N] = np.minimum(self._since_I[slot_N], now_s)

    def take(self, most: int) -> np.ndarray:
        """int64 [N], at most so many, the longest waiting ones; they wait no more."""
        waiting_N = np.flatnonzero(np.isfinite(self._since_I))
        taken_N = waiting_N[np.argsort(self._since_I[waiting_N], kind="stable")[:most]]
        self._since_I[taken_N] = _NEVER
        return taken_N

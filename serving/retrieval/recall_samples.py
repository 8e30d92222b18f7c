"""How much of what every comparison would have found the index finds, by live requests: one now and then is searched once more.

Letters: D width, I items.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from roostream.runtime.clock import Clock
from serving.retrieval.item_space import ItemSpace
from serving.retrieval.nearest_items import NearestFound, recall

EVERY_S = 1.0
_SMOOTH = 0.05  # weight of the newest sample


class _Searched(NamedTuple):
    space: ItemSpace
    query_D: np.ndarray
    k: int
    allowed_I: np.ndarray | None
    found: NearestFound


class RecallSamples:
    """`offer` from the scoring thread, `measure` from another: it compares every item."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_measured = 0
        self.recall: float | None = None  # of recent samples; None: none yet
        self._lock = threading.Lock()
        self._asked: _Searched | None = None
        self._next_s = 0.0

    def offer(
        self, space: ItemSpace, query_D: np.ndarray, k: int, allowed_I: np.ndarray | None, found: NearestFound
    ) -> None:
        """Kept if it is its turn; never waits."""
        now_s = self.clock.monotonic_s()
        if now_s >= self._next_s:
            with self._lock:
                self._asked = _Searched(space, query_D, k, allowed_I, found)
            self._next_s = now_s + EVERY_S

    def measure(self) -> bool:
        """The one that is kept, if there is one; vectors may have been replaced since it was asked."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is None:
            return False
        value = recall(asked.found, asked.space.nearest.exact(asked.query_D, asked.k, asked.allowed_I))
        self.recall = value if self.recall is None else self.recall + (value - self.recall) * _SMOOTH
        self.num_measured += 1
        return True

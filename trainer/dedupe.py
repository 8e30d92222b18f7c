"""Skips samples that the joiner emits again within the horizon (guarantee G2). Exact, not probabilistic.

Time is the samples' close time: a replay of a month remembers one hour of it, however fast it runs. A single
sample cannot move the clock (`MedianEventTime`).

    claim ──► claimed: later claims see its ids ──► settle ──► trained
              (ids older than the horizon                      (included in the state)
               are forgotten)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from roostream.runtime.event_time import MedianEventTime


class _Unsettled(NamedTuple):
    """Changes of an unsettled claim, so that `state` can leave them out."""

    num_new: int
    forgotten: list[tuple[int, int]]  # (id, close time)
    recent_ms: list[int]  # before the claim


class Dedupe:
    """Sample ids of one partition.

    The key of a sample decides its partition, so duplicates are in the same one. Ids are int64, times ms.
    Memory: about 100 bytes per id within the horizon.

    Everything is decided at the claim, in the order of the chunks. So the result does not depend on how many
    chunks are claimed ahead of training."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self.num_skipped = 0
        self._close_ms: dict[int, int] = {}  # in the order of claims, which is nearly that of close times
        self._claims: deque[_Unsettled] = deque()  # oldest first
        self._recent = MedianEventTime()

    def __len__(self) -> int:
        """Number of trained ids."""
        return len(self.state()["id"])

    def claim(self, sample_id_R: np.ndarray, close_ms_R: np.ndarray) -> np.ndarray:
        """Claim ids. Returns bool [R]: True for the first occurrence of an id. The claim is not in `state`
        until `settle`; claims are settled in their order."""
        new_R = np.zeros(len(sample_id_R), dtype=np.bool_)
        for r, (id_, close_ms) in enumerate(zip(sample_id_R.tolist(), close_ms_R.tolist(), strict=True)):
            if id_ not in self._close_ms:
                self._close_ms[id_] = close_ms
                new_R[r] = True
        recent_ms = self._recent.times_ms
        self._recent.add(close_ms_R.tolist())
        self._claims.append(_Unsettled(int(new_R.sum()), self._forget(), recent_ms))
        return new_R

    def settle(self, new_R: np.ndarray) -> None:
        """The samples of the oldest claim, whose result was `new_R`, are trained or skipped."""
        self._claims.popleft()
        self.num_skipped += int(len(new_R) - new_R.sum())

    def state(self) -> dict[str, np.ndarray]:
        """`id` and `close_ms` (int64 [N]) of trained samples, oldest training first; `recent_ms` (int64)."""
        if not self._claims:
            n, recent_ms = len(self._close_ms), np.array(self._recent.times_ms, np.int64)
            ids, times = (np.fromiter(x, np.int64, n) for x in (self._close_ms, self._close_ms.values()))
            return {"id": ids, "close_ms": times, "recent_ms": recent_ms}
        kept = list(self._close_ms.items())
        for claim in reversed(self._claims):
            kept = [*claim.forgotten, *kept]
            del kept[len(kept) - claim.num_new :]
        pairs = np.array(kept, dtype=np.int64).reshape(-1, 2)
        return {
            "id": pairs[:, 0].copy(),
            "close_ms": pairs[:, 1].copy(),
            "recent_ms": np.array(self._claims[0].recent_ms, np.int64),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a state, without claims.

        Old files have no `recent_ms`; the close times of the ids replace it."""
        self._close_ms = dict(zip(state["id"].tolist(), state["close_ms"].tolist(), strict=True))
        self._claims.clear()
        self._recent = MedianEventTime()
        self._recent.add(state.get("recent_ms", state["close_ms"]).tolist())

    def _forget(self) -> list[tuple[int, int]]:
        """Drop ids from the front that are older than the horizon. An id out of order waits for those before
        it."""
        limit_ms = self._recent.middle_ms - self.horizon_ms
        old = []
        for id_, close_ms in self._close_ms.items():
            if close_ms >= limit_ms:
                break
            old.append((id_, close_ms))
        for id_, _ in old:
            del self._close_ms[id_]
        return old

"""Sample ids trained within the horizon: a sample that the joiner emits again is skipped (G2).

Exact, not probabilistic. Time is the sample's close time: a replay of a month remembers an hour of it, however fast it runs.
Which time it is by now is never said by one sample alone (`MedianEventTime`).

    claim ──► claimed, seen by the claims that follow ──► settle ──► trained
              (forgotten: what lies a horizon behind                 (what was claimed and
               the recent close times)                                forgotten, in a cut)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from roostream.runtime.event_time import MedianEventTime


class _Unsettled(NamedTuple):
    """What a claim that isn't settled has changed, so that a cut leaves it out."""

    num_new: int
    forgotten: list[tuple[int, int]]  # (id, close time)
    recent_ms: list[int]  # of before


class Dedupe:
    """Of one partition: a sample's key decides its partition, so it comes again in the same one. Ids are int64, times ms.
    Memory: about 100 bytes an id within the horizon.

    Everything is decided at the claim, in the order of the chunks, so that it doesn't matter how many chunks are claimed ahead
    of the one that is trained."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self.num_skipped = 0
        self._close_ms: dict[int, int] = {}  # in the order of claims, which is nearly that of close times
        self._claims: deque[_Unsettled] = deque()  # oldest first
        self._recent = MedianEventTime()

    def __len__(self) -> int:
        """Ids trained."""
        return len(self.state()["id"])

    def claim(self, sample_id_R: np.ndarray, close_ms_R: np.ndarray) -> np.ndarray:
        """bool [R]: True for the first sight of an id. It is claimed from now on, in no cut until `settle`; claims are settled
        in their order."""
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
        """The samples of the oldest claim, which answered `new_R`, are trained or skipped."""
        self._claims.popleft()
        self.num_skipped += int(len(new_R) - new_R.sum())

    def state(self) -> dict[str, np.ndarray]:
        """`id` and `close_ms` (int64 [N]) of what is trained, oldest training first; `recent_ms` (int64)."""
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
        """Become what `state` gave; nothing is claimed. Without `recent_ms` (files of before) the newest ids say it."""
        self._close_ms = dict(zip(state["id"].tolist(), state["close_ms"].tolist(), strict=True))
        self._claims.clear()
        self._recent = MedianEventTime()
        self._recent.add(state.get("recent_ms", state["close_ms"]).tolist())

    def _forget(self) -> list[tuple[int, int]]:
        """Drop ids from the front that lie behind the horizon; one out of order waits for those before it."""
        limit_ms = self._recent.middle_ms - self.horizon_ms
        old = []
        for id_, close_ms in self._close_ms.items():
            if close_ms >= limit_ms:
                break
            old.append((id_, close_ms))
        for id_, _ in old:
            del self._close_ms[id_]
        return old

"""Sample ids trained within the horizon: a sample that the joiner emits again is skipped (G2).

Exact, not probabilistic. Time is the sample's close time: a replay of a month remembers an hour of it, however fast it runs.
Which time it is by now is never said by one sample alone (`RecentTimes`).

    claim ──► claimed ──► settle ──► trained ──► forgotten, a horizon behind the recent close times
              (in a chunk that is     (in a cut)
               prepared: in no cut)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

NUM_RECENT = 15
"""Wrong times among so many, up to NUM_RECENT // 2 of them, don't move their middle beyond the others."""


class RecentTimes:
    """The close times of the newest NUM_RECENT samples trained, in that order; as an array (int64, ms) in checkpoints."""

    def __init__(self) -> None:
        self.time_ms_N = np.zeros(0, np.int64)

    def add(self, time_ms_R: np.ndarray) -> None:
        self.time_ms_N = np.concatenate([self.time_ms_N, time_ms_R])[-NUM_RECENT:]

    @property
    def middle_ms(self) -> int:
        """As many are later as are not; of two middles the earlier. 0 of none."""
        n = len(self.time_ms_N)
        return int(np.sort(self.time_ms_N)[(n - 1) // 2]) if n else 0


class Dedupe:
    """Of one partition: a sample's key decides its partition, so it comes again in the same one. Ids are int64, times ms.
    Memory: about 100 bytes an id within the horizon."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self.num_skipped = 0
        self._close_ms: dict[int, int] = {}  # in the order of training, which is nearly that of close times
        self._claimed: set[int] = set()
        self._recent = RecentTimes()

    def __len__(self) -> int:
        """Ids trained."""
        return len(self._close_ms)

    def claim(self, sample_id_R: np.ndarray) -> np.ndarray:
        """bool [R]: True for the first sight of an id. It is claimed from now on, in no cut until `settle`."""
        new_R = np.zeros(len(sample_id_R), dtype=np.bool_)
        for r, id_ in enumerate(sample_id_R.tolist()):
            if id_ not in self._close_ms and id_ not in self._claimed:
                self._claimed.add(id_)
                new_R[r] = True
        return new_R

    def settle(self, sample_id_R: np.ndarray, close_ms_R: np.ndarray, new_R: np.ndarray) -> None:
        """The samples given to one `claim`, which answered `new_R`, are trained or skipped."""
        for id_, close_ms in zip(sample_id_R[new_R].tolist(), close_ms_R[new_R].tolist(), strict=True):
            self._claimed.discard(id_)
            self._close_ms[id_] = close_ms
        self.num_skipped += int(len(new_R) - new_R.sum())
        self._recent.add(close_ms_R)
        self._forget()

    def state(self) -> dict[str, np.ndarray]:
        """`id` and `close_ms` (int64 [N]) of what is trained, oldest training first; `recent_ms` (int64)."""
        n = len(self._close_ms)
        return {
            "id": np.fromiter(self._close_ms, np.int64, n),
            "close_ms": np.fromiter(self._close_ms.values(), np.int64, n),
            "recent_ms": self._recent.time_ms_N,
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what `state` gave; nothing is claimed. Without `recent_ms` (files of before) the newest ids say it."""
        self._close_ms = dict(zip(state["id"].tolist(), state["close_ms"].tolist(), strict=True))
        self._claimed.clear()
        self._recent = RecentTimes()
        self._recent.add(state.get("recent_ms", state["close_ms"]))

    def _forget(self) -> None:
        """Drop ids from the front that lie behind the horizon; one out of order waits for those before it."""
        limit_ms = self._recent.middle_ms - self.horizon_ms
        old = []
        for id_, close_ms in self._close_ms.items():
            if close_ms >= limit_ms:
                break
            old.append(id_)
        for id_ in old:
            del self._close_ms[id_]

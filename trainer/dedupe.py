"""Sample ids trained within the horizon: a sample that the joiner emits again is skipped (G2).

Exact, not probabilistic. Time is the sample's close time: a replay of a month remembers an hour of it, however fast it runs.

    claim ──► claimed ──► settle ──► trained ──► forgotten, a horizon behind the newest close time
              (in a chunk that is     (in a cut)
               prepared: in no cut)
"""

from __future__ import annotations

import numpy as np


class Dedupe:
    """Of one partition: a sample's key decides its partition, so it comes again in the same one. Ids are int64, times ms.
    Memory: about 100 bytes an id within the horizon."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self.num_skipped = 0
        self._close_ms: dict[int, int] = {}  # in the order of training, which is nearly that of close times
        self._claimed: set[int] = set()
        self._newest_ms = 0

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
        self._newest_ms = max(self._newest_ms, int(close_ms_R.max(initial=0)))
        self._forget()

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(id int64 [N], close_ms int64 [N]) of what is trained, oldest training first."""
        n = len(self._close_ms)
        return np.fromiter(self._close_ms, np.int64, n), np.fromiter(self._close_ms.values(), np.int64, n)

    def load(self, id_N: np.ndarray, close_ms_N: np.ndarray) -> None:
        """Become what `arrays` gave; nothing is claimed."""
        self._close_ms = dict(zip(id_N.tolist(), close_ms_N.tolist(), strict=True))
        self._claimed.clear()
        self._newest_ms = int(close_ms_N.max(initial=0))

    def _forget(self) -> None:
        """Drop ids from the front that lie behind the horizon; one out of order waits for those before it."""
        limit_ms = self._newest_ms - self.horizon_ms
        old = []
        for id_, close_ms in self._close_ms.items():
            if close_ms >= limit_ms:
                break
            old.append(id_)
        for id_ in old:
            del self._close_ms[id_]

"""Sample ids trained within the horizon: a sample that the joiner emits again is skipped (G2).

Exact, not probabilistic. Time is the sample's close time: a replay of a month remembers an hour of it, however fast it runs.
"""

from __future__ import annotations

import numpy as np


class Dedupe:
    """Ids are int64, times ms. Memory: about 100 bytes an id within the horizon."""

    def __init__(self, horizon_ms: int) -> None:
        self.horizon_ms = horizon_ms
        self.num_skipped = 0
        self._close_ms: dict[int, int] = {}  # in the order of training, which is nearly that of close times
        self._newest_ms = 0

    def __len__(self) -> int:
        return len(self._close_ms)

    def take_new(self, sample_id_R: np.ndarray, close_ms_R: np.ndarray) -> np.ndarray:
        """bool [R]: True for the first sight of an id, which is remembered from now on."""
        new_R = np.zeros(len(sample_id_R), dtype=np.bool_)
        seen = self._close_ms
        for r, (id_, close_ms) in enumerate(zip(sample_id_R.tolist(), close_ms_R.tolist(), strict=True)):
            if id_ not in seen:
                seen[id_] = close_ms
                new_R[r] = True
        self.num_skipped += int(len(new_R) - new_R.sum())
        if len(close_ms_R):
            self._newest_ms = max(self._newest_ms, int(close_ms_R.max()))
        self._forget()
        return new_R

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(id int64 [N], close_ms int64 [N]), oldest training first."""
        n = len(self._close_ms)
        return np.fromiter(self._close_ms, np.int64, n), np.fromiter(self._close_ms.values(), np.int64, n)

    def load(self, id_N: np.ndarray, close_ms_N: np.ndarray) -> None:
        """Become what `arrays` gave."""
        self._close_ms = dict(zip(id_N.tolist(), close_ms_N.tolist(), strict=True))
        self._newest_ms = int(close_ms_N.max()) if len(close_ms_N) else 0

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

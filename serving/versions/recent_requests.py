"""Recent scored requests: new versions are warmed up with them, the slowest are listed for operators, and the
front page shows their items.

Letters: n candidates, T tasks.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque

import numpy as np

from serving.request_batch import read_request
from serving.scorer import RowReader, Version

MAX_BYTES = 4 << 20
MAX_SLOW = 32
SLOW_FOR_MS = 600_000  # how long a slow request is remembered
_OVERHEAD_BYTES = 512  # estimate for the objects around the arrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRequest:
    """What is needed to score a request again, and its scores."""

    request_id: str
    key: bytes
    model_version: str
    ro: bytes
    nro: bytes
    item_ids: np.ndarray  # int64 [n]
    time_ms: int
    scores_nT: np.ndarray  # float32 probabilities
    took_s: float  # time for completing, scoring and encoding, without queueing

    def score_with(self, version: Version, rows: RowReader) -> np.ndarray:
        """float32 logits [n, T]. Raises as `Version.score`."""
        return version.score(
            rows, read_request(version.schema, self.ro, self.nro, self.item_ids, self.time_ms)
        )

    @property
    def num_bytes(self) -> int:
        return len(self.ro) + len(self.nro) + self.item_ids.nbytes + self.scores_nT.nbytes + _OVERHEAD_BYTES


class RecentRequests:
    """Keeps the newest requests within `max_bytes`, and the slowest of the last SLOW_FOR_MS: at most
    MAX_SLOW, within as many bytes again. Thread-safe.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._ring: deque[ScoredRequest] = deque()
        self._num_warm_up = 0  # number of requests of the ring, the oldest, that warmed up the process
        self._slow: list[ScoredRequest] = []  # slowest first

    def add(self, request: ScoredRequest) -> None:
        """Keep a request, and drop the oldest ones beyond `max_bytes`; a larger request is not kept."""
        with self._lock:
            self._ring.append(request)
            self.num_bytes += request.num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._ring.popleft().num_bytes
                self._num_warm_up = max(self._num_warm_up - 1, 0)
            if (
                len(self._slow) < MAX_SLOW
                or request.took_s > self._slow[-1].took_s
                or self._is_old(request.time_ms)
            ):
                self._remember_slow(request)

    def newest(self, max_requests: int) -> list[ScoredRequest]:
        """Return at most `max_requests`, newest first."""
        with self._lock:
            return [self._ring[-1 - i] for i in range(min(max_requests, len(self._ring)))]

    def newest_traffic(self, max_requests: int) -> list[ScoredRequest]:
        """As `newest`, without the requests that warmed up the process, which were not traffic."""
        with self._lock:
            return [self._ring[-1 - i] for i in range(min(max_requests, len(self._ring) - self._num_warm_up))]

    def find(self, request_id: str) -> ScoredRequest | None:
        """The newest request of this id, or None."""
        with self._lock:
            return next((r for r in reversed(self._ring) if r.request_id == request_id), None)

    def slowest(self) -> list[ScoredRequest]:
        """The slow requests, slowest first."""
        with self._lock:
            return list(self._slow)

    def warm_up_sample(self, max_requests: int) -> list[ScoredRequest]:
        """Requests that show best whether a version works: half of them the slowest, which have the longest
        lists, then the newest."""
        slow = self.slowest()[: max_requests // 2]
        others = (r for r in self.newest(max_requests) if not any(r is s for s in slow))
        return [*slow, *itertools.islice(others, max_requests - len(slow))]

    def end_warm_up(self) -> None:
        """Call at the end of the warm-up: forget the slow requests so far, which were not traffic. New
        versions are still warmed up with them."""
        with self._lock:
            self._slow.clear()
            self._num_warm_up = len(self._ring)

    def _is_old(self, now_ms: int) -> bool:
        return any(r.time_ms < now_ms - SLOW_FOR_MS for r in self._slow)

    def _remember_slow(self, request: ScoredRequest) -> None:
        kept = [r for r in self._slow if r.time_ms >= request.time_ms - SLOW_FOR_MS]
        slowest = sorted((*kept, request), key=lambda r: -r.took_s)[:MAX_SLOW]
        sizes = itertools.accumulate(r.num_bytes for r in slowest)
        self._slow = [r for r, size in zip(slowest, sizes, strict=True) if size <= self.max_bytes]

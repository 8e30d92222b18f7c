"""Plans new maps from buckets (the units in which rows are placed) to shards, which balance the load with few
moves. The maps themselves are in `roostream/runtime/bucket_map.py`.

Letters: B buckets, N owners.
"""

from __future__ import annotations

import numpy as np

from roostream.errors import ConfigError
from roostream.runtime.bucket_map import BucketMap


def _best_move(owner_B: np.ndarray, weight_B: np.ndarray, total_N: np.ndarray) -> tuple[int, int] | None:
    """The bucket whose move to the least loaded owner balances the load best, and that owner. It is a bucket
    of the most loaded owner that has a suitable one."""
    to = int(np.argmin(total_N))
    for source in np.argsort(-total_N, kind="stable").tolist():
        gap = total_N[source] - total_N[to]
        fitting = [b for b in np.flatnonzero(owner_B == source).tolist() if weight_B[b] < gap]
        if fitting:
            return min(fitting, key=lambda b: (abs(gap / 2 - weight_B[b]), b)), to
    return None


def balanced_map(before: BucketMap, num_owners: int, load_B: np.ndarray, max_moved: float = 1.0) -> BucketMap:
    """Move few buckets from `before` to a map of `num_owners` owners that is about even in `load_B` (float64,
    not negative).

    Buckets of removed owners move first. Then buckets move from the most to the least loaded owner until no
    move helps, or a share of `max_moved` of the buckets has moved. Each owner gets at least one bucket.

    Raises:
        ConfigError: there are fewer buckets than owners.
    """
    if len(load_B) < num_owners:
        raise ConfigError(f"expected at most {len(load_B)} owners of as many buckets, got {num_owners}")
    # An empty bucket gets a small weight, so that empty buckets are spread evenly too.
    weight_B = np.asarray(load_B, np.float64) + max(float(np.max(load_B)), 1.0) * 1e-9
    owner_B, gone_B = before.owner_B.copy(), before.owner_B >= num_owners
    total_N = np.bincount(owner_B[~gone_B], weight_B[~gone_B], num_owners)
    for b in sorted(np.flatnonzero(gone_B).tolist(), key=lambda b: (-weight_B[b], b)):
        owner_B[b] = int(np.argmin(total_N))
        total_N[owner_B[b]] += weight_B[b]
    max_moves = max(int(max_moved * len(load_B)) - int(gone_B.sum()), num_owners - before.num_owners, 0)
    for _ in range(max_moves):
        if (move := _best_move(owner_B, weight_B, total_N)) is None:
            break
        b, to = move
        total_N[[owner_B[b], to]] += (-weight_B[b], weight_B[b])
        owner_B[b] = to
    return BucketMap(owner_B, num_owners, before.version + 1)

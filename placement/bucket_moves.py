"""Maps of buckets that are worth going to, and how far one step goes there. What a map is: `runtime/layout/bucket_map.py`.

Letters: B buckets, N owners.
"""

from __future__ import annotations

import numpy as np

from runtime.layout.bucket_map import BucketMap, moved


def towards(before: BucketMap, goal: BucketMap, load_B: np.ndarray, most_moved: float) -> BucketMap:
    """A step from `before` to `goal` that moves a share of `most_moved` of the buckets at most: those first that take the most
    from owners which have too much of `load_B` (float64). Buckets whose owner is gone in `goal` move all the same."""
    must_B = before.owner_B >= goal.num_owners
    wanted = [b for b in moved(before, goal).tolist() if not must_B[b]]
    owned_N = np.bincount(before.owner_B, load_B, max(before.num_owners, goal.num_owners))
    mean = load_B.sum() / goal.num_owners
    wanted.sort(key=lambda b: (-(min(owned_N[before.owner_B[b]] - mean, load_B[b])), b))
    room = max(int(most_moved * len(load_B)) - int(must_B.sum()), 0)
    owner_B = np.where(must_B, goal.owner_B, before.owner_B).astype(np.int32)
    owner_B[wanted[:room]] = goal.owner_B[wanted[:room]]
    return BucketMap(owner_B, goal.num_owners, before.version + 1)


def balanced(load_B: np.ndarray, num_owners: int, version: int = 1) -> BucketMap:
    """The heaviest bucket first, each to the owner that has the least so far; the same for equal loads."""
    owner_B, total_N = np.zeros(len(load_B), np.int32), np.zeros(num_owners)
    for b in np.argsort(-load_B, kind="stable").tolist():
        owner_B[b] = int(np.argmin(total_N))
        total_N[owner_B[b]] += load_B[b]
    return BucketMap(owner_B, num_owners, version)

"""Maps of buckets that are worth going to, and how far one step goes there. What a map is: `roostream/runtime/bucket_map.py`.

Letters: B buckets, N owners.
"""

from __future__ import annotations

import numpy as np

from roostream.errors import ConfigError
from roostream.runtime.bucket_map import BucketMap, moved


def towards(before: BucketMap, goal: BucketMap, load_B: np.ndarray, max_moved: float) -> BucketMap:
    """A step from `before` to `goal` that moves a share of `max_moved` of the buckets at most: those first that take the most
    from owners which have too much of `load_B` (float64). Buckets whose owner is gone in `goal` move all the same."""
    must_B = before.owner_B >= goal.num_owners
    wanted = [b for b in moved(before, goal).tolist() if not must_B[b]]
    owned_N = np.bincount(before.owner_B, load_B, max(before.num_owners, goal.num_owners))
    mean = load_B.sum() / goal.num_owners
    wanted.sort(key=lambda b: (-(min(owned_N[before.owner_B[b]] - mean, load_B[b])), b))
    room = max(int(max_moved * len(load_B)) - int(must_B.sum()), 0)
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


def _nearer(owner_B: np.ndarray, weight_B: np.ndarray, total_N: np.ndarray) -> tuple[int, int] | None:
    """A bucket of the owner with the most, or else of the next, and the owner with the least, which it brings nearest; None: no
    bucket does."""
    least = int(np.argmin(total_N))
    for most in np.argsort(-total_N, kind="stable").tolist():
        gap = total_N[most] - total_N[least]
        fitting = [b for b in np.flatnonzero(owner_B == most).tolist() if weight_B[b] < gap]
        if fitting:
            return min(fitting, key=lambda b: (abs(gap / 2 - weight_B[b]), b)), least
    return None


def evened(before: BucketMap, num_owners: int, load_B: np.ndarray, max_moved: float = 1.0) -> BucketMap:
    """From `before` to a map of so many owners that is about even in `load_B` (float64, none negative), by few moves: buckets of
    owners that are gone move all, then from the owner with the most to the one with the least whatever brings both nearest,
    until nothing does or a share of `max_moved` of the buckets has moved. Each owner gets a bucket or more where there are
    as many.

    Raises:
        ConfigError: there are fewer buckets than owners.
    """
    if len(load_B) < num_owners:
        raise ConfigError(f"expected at most {len(load_B)} owners of as many buckets, got {num_owners}")
    weight_B = (
        np.asarray(load_B, np.float64) + max(float(np.max(load_B)), 1.0) * 1e-9
    )  # a bucket of nothing counts a little
    owner_B, gone_B = before.owner_B.copy(), before.owner_B >= num_owners
    total_N = np.bincount(owner_B[~gone_B], weight_B[~gone_B], num_owners)
    for b in sorted(np.flatnonzero(gone_B).tolist(), key=lambda b: (-weight_B[b], b)):
        owner_B[b] = int(np.argmin(total_N))
        total_N[owner_B[b]] += weight_B[b]
    room = max(int(max_moved * len(load_B)) - int(gone_B.sum()), num_owners - before.num_owners, 0)
    for _ in range(room):
        if (found := _nearer(owner_B, weight_B, total_N)) is None:
            break
        b, least = found
        total_N[[owner_B[b], least]] += (-weight_B[b], weight_B[b])
        owner_B[b] = least
    return BucketMap(owner_B, num_owners, before.version + 1)

"""Which owner has which bucket. Total by construction: every bucket has one owner, so no row is anywhere twice or nowhere.

Letters: B buckets, N owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from roo.errors import CheckpointError, ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class BucketMap:
    """`owner_B[b]` has bucket b; `version` goes up with each change, 0 = `modulo`."""

    owner_B: np.ndarray  # int32
    num_owners: int
    version: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError: a bucket's owner isn't one."""
        wrong_M = np.flatnonzero((self.owner_B < 0) | (self.owner_B >= self.num_owners))
        if self.owner_B.ndim != 1 or not len(self.owner_B) or len(wrong_M):
            got = f"{self.owner_B[wrong_M[0]]} for bucket {wrong_M[0]}" if len(wrong_M) else f"shape {self.owner_B.shape}"
            raise ConfigError(f"expected an owner of 0..{self.num_owners - 1} for every bucket, got {got}")

    @classmethod
    def modulo(cls, num_buckets: int, num_owners: int) -> Self:
        """Bucket b at owner b mod N: what manifests without a map mean."""
        return cls(np.arange(num_buckets, dtype=np.int32) % np.int32(num_owners), num_owners)

    @property
    def is_modulo(self) -> bool:
        return bool((self.owner_B == np.arange(len(self.owner_B)) % self.num_owners).all())

    def buckets_of(self, owner: int) -> list[int]:
        """Ascending."""
        return np.flatnonzero(self.owner_B == owner).tolist()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"owners": self.owner_B.tolist(), "num_owners": self.num_owners, "version": self.version}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `plain`.

        Raises:
            CheckpointError: it isn't one.
        """
        try:
            return cls(np.array(plain["owners"], np.int32), int(plain["num_owners"]), int(plain["version"]))
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"expected a map of buckets to owners, got another thing: {error}") from None


def moved(before: BucketMap, after: BucketMap) -> np.ndarray:
    """int64 [M]: buckets that change their owner.

    Raises:
        ConfigError: the maps are of different numbers of buckets; rows can't be told apart by both.
    """
    if len(before.owner_B) != len(after.owner_B):
        raise ConfigError(f"expected {len(before.owner_B)} buckets, got {len(after.owner_B)}; the number of buckets can't change")
    return np.flatnonzero(before.owner_B != after.owner_B)


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

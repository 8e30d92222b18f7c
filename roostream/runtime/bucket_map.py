"""Maps buckets of embedding rows to owners (shards). Every bucket has exactly one owner.

A manifest contains the map by which its rows are distributed (`Manifest.owners`); all routing uses it. The
map changes only with a commit, never within an incarnation.

Letters: B buckets, N owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from roostream.errors import CheckpointError, ConfigError


@dataclasses.dataclass(frozen=True, eq=False)
class BucketMap:
    """`owner_B[b]` owns bucket b. `version` increases with each change; 0 is `modulo`."""

    owner_B: np.ndarray  # int32
    num_owners: int
    version: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError: an owner is out of range."""
        is_list = self.owner_B.ndim == 1 and len(self.owner_B) > 0
        wrong_M = (
            np.flatnonzero((self.owner_B < 0) | (self.owner_B >= self.num_owners))
            if is_list
            else np.zeros(0, np.int64)
        )
        if not is_list or len(wrong_M):
            got = (
                f"{self.owner_B[wrong_M[0]]} for bucket {wrong_M[0]}"
                if is_list
                else f"shape {self.owner_B.shape}"
            )
            raise ConfigError(f"expected an owner of 0..{self.num_owners - 1} for every bucket, got {got}")

    @classmethod
    def modulo(cls, num_buckets: int, num_owners: int) -> Self:
        """Owner of bucket b is b mod N, as in manifests without a map."""
        return cls(np.arange(num_buckets, dtype=np.int32) % np.int32(num_owners), num_owners)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketMap) and self.plain() == other.plain()

    def __hash__(self) -> int:
        return hash((self.owner_B.tobytes(), self.num_owners, self.version))

    @property
    def is_modulo(self) -> bool:
        return bool((self.owner_B == np.arange(len(self.owner_B)) % self.num_owners).all())

    def check(self, num_buckets: int, num_owners: int) -> None:
        """Raises ConfigError: the map has other numbers of buckets or owners."""
        if (len(self.owner_B), self.num_owners) != (num_buckets, num_owners):
            raise ConfigError(
                f"expected a map of {num_buckets} buckets to {num_owners} owners, got {len(self.owner_B)} to "
                f"{self.num_owners}; use the committed numbers, or `roostream placement apply`"
            )

    def buckets_of(self, owner: int) -> list[int]:
        """Ascending."""
        return np.flatnonzero(self.owner_B == owner).tolist()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"owners": self.owner_B.tolist(), "num_owners": self.num_owners, "version": self.version}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `plain`.

        Raises:
            CheckpointError: the value is malformed.
        """
        try:
            if any(type(owner) is not int for owner in plain["owners"]):
                raise TypeError("owners must be integers")
            return cls(np.array(plain["owners"], np.int32), int(plain["num_owners"]), int(plain["version"]))
        except (KeyError, TypeError, ValueError, OverflowError, ConfigError) as error:
            raise CheckpointError(f"expected a map of buckets to owners: {error}") from None


def moved(before: BucketMap, after: BucketMap) -> np.ndarray:
    """Buckets that change their owner, int64 [M].

    Raises:
        ConfigError: the maps have different numbers of buckets.
    """
    if len(before.owner_B) != len(after.owner_B):
        raise ConfigError(
            f"expected {len(before.owner_B)} buckets, got {len(after.owner_B)}; the number of buckets "
            "can't change"
        )
    return np.flatnonzero(before.owner_B != after.owner_B)

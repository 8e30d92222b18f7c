"""Which owner has which bucket of rows. Total by construction: every bucket has one owner, so no row is twice or nowhere.

A manifest has the map by which its rows lie (`Manifest.owners`); everyone who routes takes the owner from it. It changes with a
commit, and never within an incarnation.

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
    """`owner_B[b]` has bucket b; `version` goes up with each change, 0 = `modulo`. Equal where all three are."""

    owner_B: np.ndarray  # int32
    num_owners: int
    version: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError: a bucket's owner isn't one."""
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
        """Bucket b at owner b mod N: what manifests without a map mean."""
        return cls(np.arange(num_buckets, dtype=np.int32) % np.int32(num_owners), num_owners)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketMap) and self.plain() == other.plain()

    def __hash__(self) -> int:
        return hash((self.owner_B.tobytes(), self.num_owners, self.version))

    @property
    def is_modulo(self) -> bool:
        return bool((self.owner_B == np.arange(len(self.owner_B)) % self.num_owners).all())

    def check(self, num_buckets: int, num_owners: int) -> None:
        """Raises ConfigError: it is of others."""
        if (len(self.owner_B), self.num_owners) != (num_buckets, num_owners):
            raise ConfigError(
                f"expected a map of {num_buckets} buckets to {num_owners} owners, got one of {len(self.owner_B)} to "
                f"{self.num_owners}; use the committed numbers, or `roostream placement apply`"
            )

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
            if any(type(owner) is not int for owner in plain["owners"]):
                raise TypeError("owners are whole numbers")
            return cls(np.array(plain["owners"], np.int32), int(plain["num_owners"]), int(plain["version"]))
        except (KeyError, TypeError, ValueError, OverflowError, ConfigError) as error:
            raise CheckpointError(
                f"expected a map of buckets to owners, got another thing: {error}"
            ) from None


def moved(before: BucketMap, after: BucketMap) -> np.ndarray:
    """int64 [M]: buckets that change their owner.

    Raises:
        ConfigError: the maps are of different numbers of buckets; rows can't be told apart by both.
    """
    if len(before.owner_B) != len(after.owner_B):
        raise ConfigError(
            f"expected {len(before.owner_B)} buckets, got {len(after.owner_B)}; the number of buckets can't change"
        )
    return np.flatnonzero(before.owner_B != after.owner_B)

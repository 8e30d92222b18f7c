"""(table, id) → place: which of a growing set of places holds a key. The arrays beside it (rows, their state) are its owner's.

Letters: U keys asked for, N places, C slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from param_server import index_kernels as kernels


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """Some rows' keys."""

    table_U: np.ndarray  # uint32
    id_U: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.id_U)

    def take(self, chosen: np.ndarray) -> Keys:
        """Those at int64 positions, or where a bool mask is True."""
        return Keys(self.table_U[chosen], self.id_U[chosen])


def no_keys() -> Keys:
    return Keys(np.zeros(0, np.uint32), np.zeros(0, np.int64))


def join_keys(*parts: Keys) -> Keys:
    return Keys(np.concatenate([p.table_U for p in parts]), np.concatenate([p.id_U for p in parts]))


class KeyIndex:
    """Places are stable until their key is removed; a removed key's place is used again. Not thread-safe."""

    def __init__(self, num_buckets: int, capacity: int = 256) -> None:
        self.num_buckets = num_buckets
        self.table_N = np.zeros(capacity, np.uint32)
        self.id_N = np.zeros(capacity, np.int64)
        self.bucket_N = np.zeros(capacity, np.int32)
        self.flags_N = np.zeros(capacity, np.uint8)
        self._free_N = np.zeros(capacity, np.uint32)
        self._counts = np.zeros(3, np.int64)
        self._slots_C2, self._shift = _slots(2 * capacity)

    @property
    def capacity(self) -> int:
        return len(self.id_N)

    @property
    def used(self) -> int:
        """Places below this may hold rows; `flags_N` tells which do."""
        return int(self._counts[0])

    @property
    def num_live(self) -> int:
        return int(self._counts[2])

    def reserve(self, num_more: int) -> bool:
        """Make room for `num_more` keys; True if `capacity` grew (amortised: it doubles).

        **If it fails** (MemoryError): the index is as it was.
        """
        need = self.used - int(self._counts[1]) + num_more
        if need <= self.capacity:
            return False
        capacity = max(2 * self.capacity, 1 << (need - 1).bit_length())
        names = ("table_N", "id_N", "bucket_N", "flags_N", "_free_N")
        arrays, slots = [grown(getattr(self, name), capacity) for name in names], _slots(2 * capacity)
        for name, array in zip(names, arrays, strict=True):
            setattr(self, name, array)
        self._slots_C2, self._shift = slots
        kernels.rebuild(self._slots_C2, self._shift, self.used, self.table_N, self.id_N, self.flags_N)
        return True

    def find(self, keys: Keys) -> np.ndarray:
        """int64 [U]: each key's place, -1 where it has none."""
        place_U = np.empty(len(keys), np.int64)
        kernels.find(self._slots_C2, self._shift, keys.table_U, keys.id_U, place_U)
        return place_U

    def add(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        """(places int64 [U], new bool [U]); room must have been reserved. A key given twice is new the first time only."""
        assert self.used - self._counts[1] + len(keys) <= self.capacity
        place_U, new_U = np.empty(len(keys), np.int64), np.empty(len(keys), np.bool_)
        kernels.find_or_insert(
            self._slots_C2,
            self._shift,
            keys.table_U,
            keys.id_U,
            self.num_buckets,
            self._counts,
            self._free_N,
            self.table_N,
            self.id_N,
            self.bucket_N,
            self.flags_N,
            place_U,
            new_U,
        )
        return place_U, new_U

    def add_new(self, keys: Keys) -> np.ndarray:
        """Add, making room; bool [U]: which were not there before."""
        self.reserve(len(keys))
        return self.add(keys)[1]

    def remove(self, keys: Keys) -> int:
        """Forget the keys that are there; how many were."""
        return int(
            kernels.remove(
                self._slots_C2, self._shift, keys.table_U, keys.id_U, self._counts, self._free_N, self.flags_N
            )
        )

    def keys_at(self, place_M: np.ndarray) -> Keys:
        return Keys(self.table_N[place_M], self.id_N[place_M])

    def flagged(self, flags: int) -> np.ndarray:
        """int64 [M]: places of live rows with any of `flags`."""
        return kernels.flagged(self.flags_N, self.used, flags)

    def count_flagged(self, flags: int) -> int:
        """How many live rows have any of `flags`."""
        return int(kernels.count_flagged(self.flags_N, self.used, flags))

    def replace_flags(self, flags: int, by: int = 0, also: int = 0) -> None:
        """Take `flags` from all rows; those that had any of them lose `also` and get `by`."""
        kernels.replace_flags(self.flags_N, self.used, flags, by, also)

    def in_bucket(self, bucket: int) -> np.ndarray:
        """int64 [M]: places of a bucket's live rows."""
        return self.in_buckets((bucket,))

    def in_buckets(self, buckets: Iterable[int], flags: int = 0) -> np.ndarray:
        """int64 [M]: places of these buckets' live rows, and of those with any of `flags`. One pass over all places."""
        chosen_B = np.zeros(self.num_buckets, np.bool_)
        chosen_B[list(buckets)] = True
        return kernels.in_buckets(self.flags_N, self.bucket_N, self.used, chosen_B, flags)


def grown(array: np.ndarray, capacity: int) -> np.ndarray:
    """A copy with `capacity` rows, the new ones 0."""
    out = np.zeros((capacity, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


def _slots(at_min: int) -> tuple[np.ndarray, np.uint64]:
    """Free slots, a power of two of them, and how far to shift a hash down to one."""
    bits = max(at_min - 1, 15).bit_length()
    return np.zeros((1 << bits, 2), np.uint64), np.uint64(64 - bits)

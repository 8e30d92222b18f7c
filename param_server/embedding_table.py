"""Embedding rows in memory: a hash index from (table, id) to a row number, and the array of rows beside it.

Letters: U requested keys, N rows of the array, M chosen rows, C slots of the index, D width, K tables of the
stack.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from param_server import kernels
from roostream.schema.schema import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Keys:
    """Keys of embedding rows."""

    table_U: np.ndarray  # uint32
    id_U: np.ndarray  # int64

    def __len__(self) -> int:
        return len(self.id_U)

    def take(self, chosen: np.ndarray) -> Keys:
        """The keys at int64 positions, or where a bool mask is True."""
        return Keys(self.table_U[chosen], self.id_U[chosen])


def no_keys() -> Keys:
    """Zero keys."""
    return Keys(np.zeros(0, np.uint32), np.zeros(0, np.int64))


def join_keys(*parts: Keys) -> Keys:
    """The keys of all parts, one after the other."""
    parts = (no_keys(), *parts)
    return Keys(np.concatenate([p.table_U for p in parts]), np.concatenate([p.id_U for p in parts]))


_SECRET = np.uint64(secrets.randbits(64))
"""Of this process; see param_server/kernels.py."""


class KeyIndex:
    """Map from (table, id) to a row number in growing arrays. Not thread-safe.

    A row number is stable until its key is removed; a removed key's number is used again. Row numbers do not
    depend on `secret`, which only decides where the index keeps a key.
    """

    def __init__(self, num_buckets: int, capacity: int = 256, secret: np.uint64 = _SECRET) -> None:
        self.num_buckets, self.secret = num_buckets, secret
        self.table_N = np.zeros(capacity, np.uint32)
        self.id_N = np.zeros(capacity, np.int64)
        self.bucket_N = np.zeros(capacity, np.int32)
        self.flags_N = np.zeros(capacity, np.uint8)
        self._free_N = np.zeros(capacity, np.uint32)
        self._counts = np.zeros(3, np.int64)
        self.slots_C2, self.shift = _slots(2 * capacity)

    @property
    def capacity(self) -> int:
        return len(self.id_N)

    @property
    def used(self) -> int:
        """Row numbers below this may be in use; `flags_N` tells which are."""
        return int(self._counts[0])

    @property
    def num_live(self) -> int:
        return int(self._counts[2])

    def reserve(self, num_more: int) -> bool:
        """Make room for `num_more` keys; return whether `capacity` grew. It doubles, so that the cost is
        amortized.

        **If it fails** (MemoryError): the index is unchanged.
        """
        need = self.used - int(self._counts[1]) + num_more
        if need <= self.capacity:
            return False
        capacity = max(2 * self.capacity, 1 << (need - 1).bit_length())
        names = ("table_N", "id_N", "bucket_N", "flags_N", "_free_N")
        arrays, slots = [grown(getattr(self, name), capacity) for name in names], _slots(2 * capacity)
        for name, array in zip(names, arrays, strict=True):
            setattr(self, name, array)
        self.slots_C2, self.shift = slots
        kernels.rebuild(
            self.slots_C2, self.secret, self.shift, self.used, self.table_N, self.id_N, self.flags_N
        )
        return True

    def find(self, keys: Keys) -> np.ndarray:
        """int64 [U]: each key's row number, -1 if it is absent."""
        row_U = np.empty(len(keys), np.int64)
        kernels.find(self.slots_C2, self.secret, self.shift, keys.table_U, keys.id_U, row_U)
        return row_U

    def add(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        """Insert keys; return (row numbers int64 [U], new bool [U]).

        Room must have been reserved. A key given twice is new the first time only.
        """
        assert self.used - self._counts[1] + len(keys) <= self.capacity
        row_U, new_U = np.empty(len(keys), np.int64), np.empty(len(keys), np.bool_)
        kernels.find_or_insert(
            self.slots_C2,
            self.secret,
            self.shift,
            keys.table_U,
            keys.id_U,
            self.num_buckets,
            self._counts,
            self._free_N,
            self.table_N,
            self.id_N,
            self.bucket_N,
            self.flags_N,
            row_U,
            new_U,
        )
        return row_U, new_U

    def add_new(self, keys: Keys) -> np.ndarray:
        """Reserve room and insert keys; return bool [U]: which were absent."""
        self.reserve(len(keys))
        return self.add(keys)[1]

    def remove(self, keys: Keys) -> int:
        """Remove the keys that are present; return how many were."""
        return int(
            kernels.remove(
                self.slots_C2,
                self.secret,
                self.shift,
                keys.table_U,
                keys.id_U,
                self._counts,
                self._free_N,
                self.flags_N,
            )
        )

    def keys_at(self, row_M: np.ndarray) -> Keys:
        return Keys(self.table_N[row_M], self.id_N[row_M])

    def flagged(self, flags: int, rows: range | None = None) -> np.ndarray:
        """int64 [M]: live rows with any of `flags`, among row numbers `rows` (None = all), ascending."""
        rows = range(self.used) if rows is None else rows
        return kernels.flagged(self.flags_N, rows.start, rows.stop, flags)

    def replace_flags(self, flags: int, by: int = 0, also: int = 0) -> None:
        """Clear `flags` in all rows. Rows that had any of them also lose the flags `also` and get the flags
        `by`."""
        kernels.replace_flags(self.flags_N, self.used, flags, by, also)

    def replace_flags_at(self, row_M: np.ndarray, flags: int, by: int = 0, also: int = 0) -> int:
        """As `replace_flags`, of these rows (int64) only. Return how many of those that were changed had none
        of `by` before."""
        return int(kernels.replace_flags_at(self.flags_N, row_M, flags, by, also))

    def in_buckets(self, buckets: Iterable[int], flags: int = 0, rows: range | None = None) -> np.ndarray:
        """int64 [M]: live rows of these buckets, and live rows with any of `flags`, among row numbers `rows`
        (None = all), ascending."""
        chosen_B = np.zeros(self.num_buckets, np.bool_)
        chosen_B[list(buckets)] = True
        rows = range(self.used) if rows is None else rows
        return kernels.in_buckets(self.flags_N, self.bucket_N, rows.start, rows.stop, chosen_B, flags)

    def slices(self, num_rows: int) -> Iterator[range]:
        """The row numbers that may be in use now, in ranges of at most `num_rows`."""
        used = self.used
        return (range(start, min(start + num_rows, used)) for start in range(0, used, num_rows))


class EmbeddingTable:
    """Embedding rows of one stack by key, as shards train them and replicas read them. Not thread-safe.

    Growing replaces `index` arrays and `rows_ND`, so read the attributes again for each use. Optimizer state
    is kept by the shard (`param_server.table`).
    """

    def __init__(self, tables: Sequence[Table], *, seed: int, num_buckets: int) -> None:
        self.width, self.num_buckets = tables[0].dim, num_buckets
        self.seed = np.uint64(seed & (1 << 64) - 1)
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.scale_K = np.array([t.init_scale for t in tables], np.float32)
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self.index = KeyIndex(self.num_buckets)
        self.rows_ND = np.zeros((self.index.capacity, self.width), np.float32)

    def reserve(self, num_more: int) -> None:
        """Allocate memory for `num_more` rows. **If it fails** (MemoryError): the rows are unchanged."""
        self.index.reserve(num_more)
        if len(self.rows_ND) < self.index.capacity:
            self.rows_ND = grown(self.rows_ND, self.index.capacity)

    def put(self, keys: Keys, rows_UD: np.ndarray) -> np.ndarray:
        """Store float32 [U, D] under the keys; return their row numbers, int64 [U]. Room must have been
        reserved."""
        row_U, _ = self.index.add(keys)
        kernels.put_rows(self.rows_ND, row_U, rows_UD)
        return row_U

    def replace_bucket(self, bucket: int, keys: Keys, rows_UD: np.ndarray) -> None:
        """Make these keys the only ones of a bucket."""
        self.index.remove(self.index.keys_at(self.index.in_buckets((bucket,))))
        self.reserve(len(keys))
        self.put(keys, rows_UD)

    def gather(self, keys: Keys) -> np.ndarray:
        """float32 [U, D]. A key without a row reads as its initial value, and no row is created."""
        return self.gather_at(keys, self.index.find(keys))

    def gather_at(self, keys: Keys, row_U: np.ndarray) -> np.ndarray:
        """float32 [U, D]: the rows with these numbers (int64), initial values for -1."""
        out_UD = np.empty((len(keys), self.width), np.float32)
        kernels.gather(
            self.rows_ND, row_U, keys.table_U, keys.id_U, self.seed, self.table_K, self.scale_K, out_UD
        )
        return out_UD

    def rows_by_bucket(self, buckets: Sequence[int]) -> list[np.ndarray]:
        """Row numbers (int64 [M]) of each bucket. One pass over all rows."""
        row_M = self.index.in_buckets(buckets)
        bucket_M = self.index.bucket_N[row_M]
        order_M = np.argsort(bucket_M, kind="stable")
        edges = np.searchsorted(bucket_M[order_M], [[b, b + 1] for b in buckets])
        return [row_M[order_M[start:end]] for start, end in edges]


MAX_SLICES = 1 << 20


def slices_of(keys: Keys, num_buckets: int, num_slices: int) -> np.ndarray:
    """int32 [U]: the slice of its bucket that each key belongs to, below `num_slices`. A function of the key
    alone, so that a bucket can be read slice by slice while it changes."""
    slice_U: np.ndarray = kernels.buckets(keys.table_U, keys.id_U, num_buckets * num_slices) // num_buckets
    return slice_U


def grown(array: np.ndarray, capacity: int) -> np.ndarray:
    """Copy an array into one with `capacity` rows; the new rows are 0."""
    out = np.zeros((capacity, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


def _slots(min_slots: int) -> tuple[np.ndarray, np.uint64]:
    """Empty slots, a power of two of them, and the shift that maps a hash to a slot."""
    bits = max(min_slots - 1, 15).bit_length()
    return np.zeros((1 << bits, 2), np.uint64), np.uint64(64 - bits)

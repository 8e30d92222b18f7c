"""Dense numbers for remembered rows of a stack: (table, id) → 0..N-1, with the hash table of
`roostream.wire.lookup`.

    slots_C         int32, open addressing: number of a row, -1 = free; at least twice the capacity
    table_N, id_N   keys by number, with spare capacity

Adding a row takes amortized constant time.

Letters: N rows, U requested rows, C slots.
"""

from __future__ import annotations

import numpy as np

from roostream.schema.ids import splitmix64_of
from roostream.wire.lookup import find_keys, number_keys, put_keys, touch_keys

_MIN_CAPACITY = 16


class RowIndex:
    """Numbers increase as rows are added, and are reassigned when rows are dropped."""

    def __init__(
        self, table_N: np.ndarray | None = None, id_N: np.ndarray | None = None, *, capacity: int = 0
    ) -> None:
        """uint32 and int64 [N], distinct rows: row n gets number n."""
        self._num, self._table, self._id = 0, np.zeros(0, np.uint32), np.zeros(0, np.int64)
        self._slots_C = np.full(2 * _MIN_CAPACITY, -1, np.int32)
        self._reserve(capacity)
        if table_N is not None and id_N is not None:
            self.number(table_N, id_N)

    def __len__(self) -> int:
        return self._num

    @property
    def table_N(self) -> np.ndarray:
        """uint32; valid until rows are dropped."""
        return self._table[: self._num]

    @property
    def id_N(self) -> np.ndarray:
        """int64; valid until rows are dropped."""
        return self._id[: self._num]

    @property
    def hashed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, tables and ids for kernels (`roostream.wire.lookup.slot_of`); valid until rows are added or
        dropped."""
        return self._slots_C, self._table, self._id

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """int64 [U]; -1 = absent."""
        number_U = np.empty(len(id_U), np.int64)
        if len(self._id):
            touch_keys(self._slots_C, self._table, self._id, table_U, id_U)
        find_keys(self._slots_C, self._table, self._id, table_U, id_U, number_U)
        return number_U

    def number(self, table_U: np.ndarray, id_U: np.ndarray, max_rows: int | None = None) -> np.ndarray:
        """As `find`, but absent rows get the next numbers, in order, until there are `max_rows` rows (None:
        no limit)."""
        number_U = np.empty(len(id_U), np.int64)
        ends = len(self) + len(id_U)
        ends = ends if max_rows is None else max(len(self), min(ends, max_rows))
        self._reserve(ends)
        if len(self._id):
            touch_keys(self._slots_C, self._table, self._id, table_U, id_U)
        self._num = number_keys(
            self._slots_C, self._table, self._id, len(self), ends, table_U, id_U, number_U
        )
        return number_U

    def drop(self, gone_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forget the rows with these numbers (int64, rising). The last rows move to the freed numbers: (from,
        to), int64 each."""
        left = self._num - len(gone_M)
        to_K = gone_M[gone_M < left]
        stays = np.ones(self._num - left, np.bool_)
        stays[gone_M[len(to_K) :] - left] = False
        from_K = left + np.flatnonzero(stays)
        self._table[to_K], self._id[to_K] = self._table[from_K], self._id[from_K]
        self._num = left
        self._slots_C.fill(-1)
        put_keys(self._slots_C, self._table, self._id, 0, left)
        return from_K, to_K

    def _reserve(self, num: int) -> None:
        """At least double the capacity."""
        if num <= len(self._id):
            return
        capacity = max(num, 2 * len(self._id), _MIN_CAPACITY)
        more = capacity - len(self._id)
        self._table = np.concatenate([self._table, np.zeros(more, np.uint32)])
        self._id = np.concatenate([self._id, np.zeros(more, np.int64)])
        self._slots_C = np.full(1 << (2 * capacity - 1).bit_length(), -1, np.int32)
        put_keys(self._slots_C, self._table, self._id, 0, self._num)


def hashed(table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
    """uint64 [U]."""
    return splitmix64_of(splitmix64_of(table_U.astype(np.uint64)) ^ id_U.view(np.uint64))

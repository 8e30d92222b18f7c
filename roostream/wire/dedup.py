"""Deduplication of lists within a batch (RecD: Zhao et al. 2022, §4.2 and §7).

    rows of b        exact (`Inverse`)                    partial (`PartialDedup`): rows share entries
    [3 4 5]          values   [3 4 5] [4 5 6]             values   [3 4 5 6]
    [4 5 6]          row_N    0 1 0                       span_N2  [0 3] [1 3] [0 3]
    [3 4 5]

A group of features has one `Inverse` (a grouped IKJT): two rows are equal if all features of the group are.
What is computed from the group alone is then computed U times. `PartialDedup` keeps an entry of a sequence
with all of its columns. Rows are found by a hash and then compared, so rows that only share a hash stay
distinct. Both take time linear in the entries of the batch.

Letters: N rows, U distinct rows, L entries of all rows, V entries kept, C columns of an entry, M rows in the
order of visits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged, ranges

MIN_FACTOR = 1.5
"""Smallest deduplication factor that pays (RecD §4.2)."""


def dedupe_len(length: float, rows: float, session_rows: float, same: float) -> float:
    """Expected values left in a batch: l(f) · B · (1 - (S - 1) / S · d(f)) (RecD §4.2). `length`: l, mean
    length of a list; `rows`: B; `session_rows`: S, rows of a session; `same`: d, probability that a session's
    next row has the same list."""
    return length * rows * (1 - (session_rows - 1) / session_rows * same)


def dedupe_factor(length: float, rows: float, session_rows: float, same: float) -> float:
    """Values before over values after, l(f) · B / DedupeLen(f); 1 for empty lists."""
    remain = dedupe_len(length, rows, session_rows, same)
    return length * rows / remain if remain else 1.0


class RowValues(NamedTuple):
    """Values of rows as integers: row n has bits_L[offset_N1[n] : offset_N1[n + 1]]."""

    offset_N1: np.ndarray  # int64
    bits_L: np.ndarray  # int64


@dataclasses.dataclass(frozen=True, eq=False)
class Inverse:
    """The distinct rows of a group, in the order of their first occurrence."""

    row_N: np.ndarray  # int64: the distinct row that row n is; RecD's inverse_lookup
    first_U: np.ndarray  # int64: the first row that has these values

    @property
    def num_unique(self) -> int:
        return len(self.first_U)

    def unique(self, lists: Jagged) -> Jagged:
        """The distinct rows of the group's features, or of features that are equal where the group is."""
        return lists.take_rows(self.first_U)

    def expand(self, unique: Jagged) -> Jagged:
        """All N rows again."""
        return unique.take_rows(self.row_N)


@dataclasses.dataclass(frozen=True, eq=False)
class PartialDedup:
    """The kept entries of a feature, of which the rows are overlapping spans (RecD's partial IKJT)."""

    entry_V: np.ndarray  # int64: the kept ones of L entries; their values are x_L[entry_V]
    span_N2: np.ndarray  # int64: start of a row among the kept entries, and its length

    @cached_property
    def at_L(self) -> np.ndarray:
        """int64 [L]: the kept entry of each entry: x_V[at_L] is x_L."""
        return ranges(self.span_N2[:, 0], self.span_N2[:, 1])


def find_inverse(group: Sequence[RowValues], num_rows: int) -> Inverse:
    """Find the distinct ones of `num_rows` rows; with an empty group all rows are equal."""
    hash_N = np.zeros(num_rows, dtype=np.uint64)
    for values in group:
        _hash_rows(values.offset_N1, values.bits_L, hash_N)
    like_N = np.arange(num_rows, dtype=np.int64)
    slots = np.full(1 << max(4, (2 * num_rows - 1).bit_length()), -1, dtype=np.int64)
    _find_first(hash_N, slots, like_N)
    same_N = np.ones(num_rows, dtype=np.bool_)
    for values in group:
        compare_rows(values.offset_N1, values.bits_L, like_N, same_N)
    like_N[~same_N] = np.flatnonzero(~same_N)
    first_U, row_N = np.unique(like_N, return_inverse=True)
    return Inverse(row_N.astype(np.int64), first_U)


def find_partial_dedup(
    lists: Jagged,
    key: str,
    *,
    newest_first: bool = True,
    order_M: np.ndarray | None = None,
    apart_N: np.ndarray | None = None,
) -> PartialDedup:
    """Find the overlaps of the feature `key` with all of its columns.

    A row can overlap the row visited before it, so rows of one user should follow each other in time order:
    in the batch, or by `order_M` (int64, each row once). `newest_first`: lists grow at the front, like the
    schema's histories, else at the end. `apart_N`: int64; rows with different numbers, for example those of
    different batches, share nothing.
    """
    group, offset_N1 = list_values(lists, key), lists.offsets_of(key)
    if apart_N is not None:
        group.append(RowValues(offset_N1, np.repeat(apart_N, lists.lengths_KN[lists.index(key)])))
    inverse = find_inverse(group, lists.num_rows)
    rank_N = np.arange(lists.num_rows, dtype=np.int64)
    if order_M is not None:
        rank_N[order_M] = np.arange(len(order_M))
    visited_U = np.argsort(rank_N[inverse.first_U], kind="stable")
    if newest_first:
        visited_U = visited_U[::-1]
    entry_LC = np.stack([column.bits_L for column in group[1:]], axis=1)
    kept_L, start_M = np.empty(len(entry_LC), dtype=np.int64), np.empty(len(visited_U), dtype=np.int64)
    count = _overlap_rows(entry_LC, offset_N1, inverse.first_U[visited_U], kept_L, start_M)
    start_U = np.empty_like(start_M)
    start_U[visited_U] = start_M
    lengths_N = np.diff(offset_N1)
    return PartialDedup(kept_L[:count].copy(), np.stack([start_U[inverse.row_N], lengths_N], axis=1))


def list_values(lists: Jagged, key: str) -> list[RowValues]:
    """The group of a list feature: whether it is present, then its ids, columns and weights."""
    k, offset_N1 = lists.index(key), lists.offsets_of(key)
    weight_L = lists.weights_of(key)
    columns = [column_L for name, column_L in lists.columns.items() if name.split(".", 1)[0] == key]
    entries = [lists.values_of(key), *columns, *([] if weight_L is None else [weight_L.view(np.int32)])]
    return [
        _of_matrix(lists.present_KN[k][:, None]),
        *(RowValues(offset_N1, column_L.astype(np.int64)) for column_L in entries),
    ]


def request_values(batch: Batch, names: Collection[str] | None = None) -> list[RowValues]:
    """The group of the request-only features `names`, None = all, as bits, so that floats are compared
    exactly. Times in a list are absolute, so the age of an entry does not matter."""
    columns = [i for i, f in enumerate(batch.schema.floats("ro")) if names is None or f.name in names]
    group = []
    if columns:
        group += [
            _of_matrix(batch.ro_float_RF[:, columns].view(np.int32)),
            _of_matrix(batch.ro_present_RF[:, columns]),
        ]
    for key in batch.ro_lists.keys:
        if names is None or key in names:
            group += list_values(batch.ro_lists, key)
    return group


def order_by_user(batch: Batch) -> np.ndarray:
    """int64 [R]: an order with the requests of each user together, in time order; users in order of first
    occurrence. The first request-only id feature identifies the user; without one the order stays as it
    is."""
    if not any(f.kind == "ids" for f in batch.schema.lists("ro")):
        return np.arange(batch.num_requests, dtype=np.int64)
    return np.lexsort((batch.time_ms_R, user_numbers(batch)))


def user_numbers(batch: Batch) -> np.ndarray:
    """int64 [R]: a number for each request's user, as in `order_by_user`; without an id feature all
    differ."""
    ids = next((f.name for f in batch.schema.lists("ro") if f.kind == "ids"), "")
    if not ids:
        return np.arange(batch.num_requests, dtype=np.int64)
    return find_inverse(list_values(batch.ro_lists, ids), batch.num_requests).row_N


def sort_by_time(batch: Batch) -> Batch:
    """The same requests in time order."""
    return batch.take_requests(np.argsort(batch.time_ms_R, kind="stable"))


def group_impressions(expanded: Batch) -> Batch:
    """Group single-candidate requests back into requests: those with equal time and request-only features
    become one, with its candidates in their order."""
    assert expanded.num_requests == expanded.num_candidates, "expected impressions"
    group = [RowValues(np.arange(expanded.num_requests + 1), expanded.time_ms_R), *request_values(expanded)]
    inverse = find_inverse(group, expanded.num_requests)
    order_B = np.argsort(inverse.row_N, kind="stable")
    counts_U = np.bincount(inverse.row_N, minlength=inverse.num_unique)
    return expanded.take(inverse.first_U, order_B, inverse.row_N[order_B], counts_U)


def _of_matrix(x_NF: np.ndarray) -> RowValues:
    width = x_NF.shape[1]
    return RowValues(np.arange(len(x_NF) + 1, dtype=np.int64) * width, x_NF.astype(np.int64).ravel())


@njit(cache=True, nogil=True)
def _hash_rows(offset_N1: np.ndarray, bits_L: np.ndarray, hash_N: np.ndarray) -> None:
    """Extend each row's hash by its length and entries (the last steps of splitmix64)."""
    for n in range(len(hash_N)):
        x = hash_N[n] + np.uint64(offset_N1[n + 1] - offset_N1[n]) + np.uint64(0x9E3779B97F4A7C15)
        for i in range(offset_N1[n], offset_N1[n + 1]):
            x = (x ^ np.uint64(bits_L[i])) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(29))) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hash_N[n] = x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _find_first(hash_N: np.ndarray, slots: np.ndarray, like_N: np.ndarray) -> None:
    """The first row with the same hash. `slots`: open addressing, a power of two of at least twice the rows,
    -1 = free."""
    mask = np.uint64(len(slots) - 1)
    for n in range(len(hash_N)):
        at = hash_N[n] & mask
        while slots[at] >= 0 and hash_N[slots[at]] != hash_N[n]:
            at = (at + np.uint64(1)) & mask
        if slots[at] < 0:
            slots[at] = n
        like_N[n] = slots[at]


@njit(cache=True, nogil=True)
def compare_rows(offset_N1: np.ndarray, bits_L: np.ndarray, like_N: np.ndarray, same_N: np.ndarray) -> None:
    """Note whether each row equals the first row with its hash."""
    for n in range(len(same_N)):
        at, other = offset_N1[n], offset_N1[like_N[n]]
        length = offset_N1[n + 1] - at
        if offset_N1[like_N[n] + 1] - other != length:
            same_N[n] = False
        for i in range(length if same_N[n] else 0):
            if bits_L[at + i] != bits_L[other + i]:
                same_N[n] = False
                break


@njit(cache=True, nogil=True)
def _overlap_rows(
    entry_LC: np.ndarray, offset_N1: np.ndarray, row_M: np.ndarray, kept_L: np.ndarray, start_M: np.ndarray
) -> int:
    """Append rows in order, without the part of a row that the kept entries already end with. Returns the
    entries kept.

    The overlap is found by Knuth-Morris-Pratt matching: `back` is the failure table of the row, and the text
    is the last kept entries, at most as many as the row has."""
    longest = 0
    for n in row_M:
        longest = max(longest, offset_N1[n + 1] - offset_N1[n])
    back = np.zeros(longest + 1, dtype=np.int64)
    count = 0
    for m in range(len(row_M)):
        first, length = offset_N1[row_M[m]], offset_N1[row_M[m] + 1] - offset_N1[row_M[m]]
        _fill_back(entry_LC, first, length, back)
        matched = 0
        for at in range(max(count - length, 0), count):
            while matched > 0 and not _equal(entry_LC, kept_L[at], first + matched):
                matched = back[matched]
            if _equal(entry_LC, kept_L[at], first + matched):
                matched += 1
        start_M[m] = count - matched
        for i in range(matched, length):
            kept_L[count] = first + i
            count += 1
    return count


@njit(cache=True, nogil=True)
def _fill_back(entry_LC: np.ndarray, first: int, length: int, back: np.ndarray) -> None:
    """back[j]: length of the longest proper prefix of the first j entries that is also their suffix."""
    matched = 0
    back[0] = 0
    if length:
        back[1] = 0
    for j in range(1, length):
        while matched > 0 and not _equal(entry_LC, first + j, first + matched):
            matched = back[matched]
        if _equal(entry_LC, first + j, first + matched):
            matched += 1
        back[j + 1] = matched


@njit(cache=True, nogil=True)
def _equal(entry_LC: np.ndarray, one: int, other: int) -> bool:
    c = 0
    while c < entry_LC.shape[1] and entry_LC[one, c] == entry_LC[other, c]:
        c += 1
    return c == entry_LC.shape[1]


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    one = np.ones((1, 1), dtype=np.int32)
    lists = Jagged(keys=("x",), lengths_KN=one, values=np.ones(1, dtype=np.int64), present_KN=one > 0)
    find_partial_dedup(lists, "x")

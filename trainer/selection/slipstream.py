"""Slipstream's rules: which rows are hot, which hot rows have stopped moving, which inputs are skipped. Pure.

    hot row      c / A >= hot_ratio and c >= 2, c its accesses, A those of all tables
    s of a row   the largest Euclidean distance between consecutive snapshots; stale iff s <= T, else varying
    slot         a feature with entries, of a request or of a candidate; its s is the largest of its rows (∞
                 for a row that is not hot), so it is stale iff all its rows are
    hot input    the share of slots whose rows are all hot is at least `hot_share`
    skipped      a hot input with q <= T, q the ceil(alpha · slots)-th smallest s of its slots
    T            the largest q of a hot input with share(q <= T) <= drop: one pass, exact

Maboud et al., "Slipstream: Semantic-Based Training Acceleration for Recommendation Models", algorithm 1,
§3.1-3.3, Eq. 2-4; hot inputs are from FAE. The mean of δ in Eq. 2 is the share that varies; the share dropped
is 1 minus that.

The loops over entries are numba kernels.

Letters: N rows, D width, U rows of a batch, R requests, S slots, I inputs, L entries, K list features of a
side, H hot rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.lookup import slot_of, sources_of
from trainer.selection.row_index import RowIndex

T_QUANTILE = 3.340
"""Student's t, one-sided .0005, 200 degrees of freedom: 99.9 % (§3.2); conservative from MIN_SAMPLE inputs
on."""
_ROUNDS = 40


class AccessCounts:
    """Accesses by row of one stack; about 40 bytes per row."""

    def __init__(self) -> None:
        self.rows, self._count_N = RowIndex(), np.zeros(0, np.int64)  # by row number, with spare capacity

    @property
    def count_N(self) -> np.ndarray:
        """int64; valid until more are added."""
        return self._count_N[: len(self.rows)]

    def add(self, table_U: np.ndarray, id_U: np.ndarray, count_U: np.ndarray) -> None:
        """Add accesses of distinct rows."""
        number_U = self.rows.number(table_U, id_U)
        if len(self.rows) > len(self._count_N):
            more = max(len(self.rows), 2 * len(self._count_N)) - len(self._count_N)
            self._count_N = np.concatenate([self._count_N, np.zeros(more, np.int64)])
        self._count_N[number_U] += count_U

    @property
    def total(self) -> int:
        """Accesses of all rows."""
        return int(self.count_N.sum())


def is_hot(count_N: np.ndarray, total: int, ratio: float) -> np.ndarray:
    """bool [N], for accesses int64 [N] among `total`; a single access makes no row hot."""
    return (count_N >= 2) & (count_N / max(total, 1) >= ratio)


def moved(before_ND: np.ndarray, after_ND: np.ndarray) -> np.ndarray:
    """float32 [N]: distance of each row between two snapshots."""
    difference_ND = after_ND.astype(np.float64) - before_ND
    return np.sqrt((difference_ND * difference_ND).sum(axis=1)).astype(np.float32)


class ReadSlots(NamedTuple):
    """What requests read: entries of slots, slots of requests."""

    request_S: np.ndarray  # int64
    slot_L: np.ndarray  # int64, rising: slot of an entry; every slot has an entry
    row_L: np.ndarray  # int64: row number, as assigned by the caller


class _KeyFeatures(NamedTuple):
    """Which values of a batch are keys of a stack."""

    keys: tuple[str, ...]  # list features of a side, in order
    table_K: np.ndarray  # int64: table of each feature; below 0 if its rows are of another stack
    columns: tuple[tuple[str, int], ...]  # id columns with a table of this stack


def _key_features(schema: Schema) -> dict[tuple[str, Side], _KeyFeatures]:
    """By stack and side."""
    out = {}
    sides: tuple[Side, ...] = ("ro", "nro")
    for stack, sources in schema.derived(sources_of).items():
        for side in sides:
            keys = tuple(f.name for f in schema.lists(side))
            sources_of_side = [source for source in sources if source.side == side]
            table = {source.key: source.table.id for source in sources_of_side if not source.is_column}
            columns = tuple((source.key, source.table.id) for source in sources_of_side if source.is_column)
            out[stack, side] = _KeyFeatures(
                keys, np.array([table.get(key, -1) for key in keys], np.int64), columns
            )
    return out


def read_slots(batch: Batch, hot: Mapping[str, RowIndex]) -> ReadSlots:
    """Slots of a batch; `hot`: stack → its hot rows.

    Hot rows are numbered over all stacks in the order of `hot`; all other rows have the number after them.
    Slots are ordered by stack, then request features, their columns, candidate features and their columns.
    """
    sides = {
        "ro": (batch.ro_lists, np.arange(batch.num_requests)),
        "nro": (batch.nro_lists, batch.request_index_B),
    }
    num_values = sum(len(lists.values) + sum(map(len, lists.columns.values())) for lists, _ in sides.values())
    to, num, first = ReadSlots(*(np.empty(num_values, np.int64) for _ in range(3))), (0, 0), dict[str, int]()
    cold = 0
    for stack, rows in hot.items():
        first[stack], cold = cold, cold + len(rows)
    for (stack, side), features in batch.schema.derived(_key_features).items():
        (lists, request_N), rows = sides[side], hot[stack]
        assert lists.keys == features.keys, (lists.keys, features.keys)
        sources_of_side = (
            [(lists.values, lists.lengths_KN, features.table_K)] if (features.table_K >= 0).any() else []
        )
        for key, table in features.columns:
            k = lists.index(key.partition(".")[0])
            sources_of_side.append((lists.columns[key], lists.lengths_KN[k : k + 1], np.array([table])))
        for value_L, length_KN, table_K in sources_of_side:
            num = append_slots(
                value_L, length_KN, table_K, request_N, *rows.hashed, first[stack], cold, *to, *num
            )
    return ReadSlots(to.request_S[: num[0]], to.slot_L[: num[1]], to.row_L[: num[1]])


class Classified(NamedTuple):
    """Classification of each request."""

    hot_R: np.ndarray  # bool
    q_R: np.ndarray  # float32: the request is skipped if T >= q; ∞ = never


def judge(
    slots: ReadSlots,
    s_N: np.ndarray,
    hot_N: np.ndarray,
    num_requests: int,
    *,
    alpha: float,
    hot_share: float = 1.0,
) -> Classified:
    """Classify requests. `s_N`: float32, of the rows named by `slots`, ∞ for rows that count as varying;
    `hot_N`: bool."""
    hot_R = hot_requests(slots, hot_N, num_requests, hot_share)
    count_R = np.bincount(slots.request_S, minlength=num_requests)
    # Slots that must be stale to skip the request.
    needed_R = np.ceil(alpha * count_R - 1e-9).astype(np.int64)
    s_L = np.where(hot_N[slots.row_L], s_N[slots.row_L], np.float32(np.inf))
    first_L = np.r_[True, slots.slot_L[1:] != slots.slot_L[:-1]][: len(s_L)]
    s_S = np.maximum.reduceat(s_L, np.flatnonzero(first_L)) if len(s_L) else s_L
    q_R = nth_smallest(slots.request_S, s_S, np.maximum(needed_R, 1) - 1)
    q_R[needed_R == 0] = -np.inf
    return Classified(hot_R, np.where(hot_R, q_R, np.float32(np.inf)))


def is_stale(
    slots: ReadSlots,
    s_N: np.ndarray,
    hot_N: np.ndarray,
    num_requests: int,
    T: float,
    *,
    alpha: float,
    hot_share: float = 1.0,
) -> np.ndarray:
    """bool [R]: hot, and q <= T. The same as `judge`, which sorts to know it for every T."""
    return judge_slots(*slots, s_N, hot_N, np.float32(T), float(alpha), float(hot_share), num_requests)


def hot_requests(
    slots: ReadSlots, hot_N: np.ndarray, num_requests: int, hot_share: float = 1.0
) -> np.ndarray:
    """bool [R]: hot inputs; `hot_N` (bool): the hot rows among those named by `slots`. An input without slots
    is cold."""
    return judge_slots(
        *slots, np.zeros(len(hot_N), np.float32), hot_N, np.float32(0), 0.0, float(hot_share), num_requests
    )


def threshold(q_I: np.ndarray, drop: float) -> float:
    """T from the q of all hot inputs: share(q <= T) is at most `drop`, and no larger q satisfies that. -∞ if
    too many share the smallest q; then nothing is skipped."""
    sorted_I = np.sort(q_I)
    num_values = math.floor(drop * len(q_I) + 1e-9)
    if 0 < num_values < len(q_I) and sorted_I[num_values - 1] == sorted_I[num_values]:
        num_values = int(np.searchsorted(sorted_I, sorted_I[num_values]))
    num_values = min(num_values, int(np.isfinite(q_I).sum()))
    return float(sorted_I[num_values - 1]) if num_values else -math.inf


def sampled_threshold(
    q_I: np.ndarray, drop: float, sample: int, random: np.random.Generator
) -> tuple[float, float]:
    """The paper's search: halve the range of T until the share of a sample of inputs is `drop`. Returns T and
    the half width of the share's interval."""
    taken_M = random.choice(q_I, min(sample, len(q_I)), replace=False)
    finite_M = taken_M[np.isfinite(taken_M)]
    low, high = 0.0, float(finite_M.max(initial=0.0))
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if (taken_M <= middle).mean() <= drop else (low, middle)
    return low, half_width(float((taken_M <= low).mean()), len(taken_M), len(q_I))


def half_width(share: float, sample: int, population: int) -> float:
    """Half width of the 99.9 % interval of a share sampled from a finite population; `sample` is at least
    MIN_SAMPLE."""
    return T_QUANTILE * math.sqrt((population - sample) / population * share * (1 - share) / sample)


@njit(cache=True, nogil=True)
def append_slots(  # noqa: PLR0913 (a numba kernel takes flat arrays)
    value_L: np.ndarray,
    length_KN: np.ndarray,
    table_K: np.ndarray,
    request_N: np.ndarray,
    slots_C: np.ndarray,
    table_H: np.ndarray,
    id_H: np.ndarray,
    first: int,
    cold: int,
    request_S: np.ndarray,
    slot_L: np.ndarray,
    row_L: np.ndarray,
    num_slots: int,
    num_entries: int,
) -> tuple[int, int]:
    """Append the slots of some features; returns the number of slots and entries then.

    Read:
        value_L, length_KN  ids by feature, then by row; number of ids of each row
        table_K             int64: table of a feature; below 0 = its entries are ignored
        request_N           int64: request of a row
        slots_C, ..         hash table of a stack's hot rows (`roostream.wire.lookup.slot_of`); rows are
                            reported as their number plus `first`, or as `cold`
    Written, from `num_slots` and `num_entries` on:
        request_S, slot_L, row_L    int64, as in `ReadSlots`
    """
    at = 0
    for k in range(len(length_KN)):
        table = table_K[k]
        for n in range(length_KN.shape[1]):
            length = length_KN[k, n]
            if table >= 0 and length > 0:
                for i in range(at, at + length):
                    found = slots_C[slot_of(slots_C, table_H, id_H, table, value_L[i])]
                    slot_L[num_entries] = num_slots
                    row_L[num_entries] = found + first if found >= 0 else cold
                    num_entries += 1
                request_S[num_slots] = request_N[n]
                num_slots += 1
            at += length
    return num_slots, num_entries


@njit(cache=True, nogil=True)
def judge_slots(
    request_S: np.ndarray,
    slot_L: np.ndarray,
    row_L: np.ndarray,
    s_N: np.ndarray,
    hot_N: np.ndarray,
    T: np.float32,
    alpha: float,
    hot_share: float,
    num_requests: int,
) -> np.ndarray:
    """bool [R]: the share of slots whose rows are all hot is at least `hot_share`, and the share of slots
    whose rows have all moved by at most `T` is at least `alpha`. False without slots. A row that is not hot
    has moved by ∞.
    """
    count_R3, at = np.zeros((num_requests, 3), np.int64), 0
    for s in range(len(request_S)):
        num_cold = num_moved = 0
        while at < len(slot_L) and slot_L[at] == s:
            n = row_L[at]
            num_cold += not hot_N[n]
            num_moved += not (s_N[n] if hot_N[n] else np.float32(np.inf)) <= T
            at += 1
        counts_3 = count_R3[request_S[s]]
        counts_3[0] += 1
        counts_3[1] += num_cold == 0
        counts_3[2] += num_moved == 0
    out_R = np.empty(num_requests, np.bool_)
    for r in range(num_requests):
        num, num_hot, num_stale = count_R3[r]
        out_R[r] = (
            num > 0
            and num_hot >= np.ceil(hot_share * num - 1e-9)
            and num_stale >= np.ceil(alpha * num - 1e-9)
        )
    return out_R


@njit(cache=True, nogil=True)
def nth_smallest(request_S: np.ndarray, s_S: np.ndarray, nth_R: np.ndarray) -> np.ndarray:
    """float32 [R]: the nth smallest `s_S` of each request's slots, `nth_R` (int64) counted from 0; ∞ without
    slots."""
    ends_R = np.zeros(len(nth_R), np.int64)
    for r in request_S:
        ends_R[r] += 1
    ends_R = np.cumsum(ends_R)
    place_R, ordered_S = ends_R.copy(), np.empty_like(s_S)
    for s in range(len(s_S)):
        place_R[request_S[s]] -= 1
        ordered_S[place_R[request_S[s]]] = s_S[s]
    out_R = np.full(len(nth_R), np.float32(np.inf), np.float32)
    for r in range(len(nth_R)):
        if place_R[r] < ends_R[r]:
            out_R[r] = np.sort(ordered_S[place_R[r] : ends_R[r]])[nth_R[r]]
    return out_R


@njit(cache=True, nogil=True)
def take_requests(
    request_S: np.ndarray, slot_L: np.ndarray, row_L: np.ndarray, kept_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots of the requests `kept_R` (bool), request by request: int32, slots of each [I], entries of each
    slot [S], rows [L]."""
    num_R, entries_R = np.zeros(len(kept_R), np.int64), np.zeros(len(kept_R), np.int64)
    size_S = np.zeros(len(request_S), np.int32)
    for s in slot_L:
        size_S[s] += 1
    for s in range(len(request_S)):
        num_R[request_S[s]] += 1
        entries_R[request_S[s]] += size_S[s]
    num_I = np.empty(kept_R.sum(), np.int32)
    slot_at_R, entry_at_R = np.empty_like(num_R), np.empty_like(num_R)
    num_inputs = num_slots = num_entries = 0
    for r in range(len(kept_R)):
        if kept_R[r]:
            num_I[num_inputs], slot_at_R[r], entry_at_R[r] = num_R[r], num_slots, num_entries
            num_inputs += 1
            num_slots += num_R[r]
            num_entries += entries_R[r]
    kept_S, kept_L, at = np.empty(num_slots, np.int32), np.empty(num_entries, np.int32), 0
    for s in range(len(request_S)):
        r, size = request_S[s], size_S[s]
        if kept_R[r]:
            kept_S[slot_at_R[r]] = size
            for i in range(size):
                kept_L[entry_at_R[r] + i] = row_L[at + i]
            slot_at_R[r] += 1
            entry_at_R[r] += size
        at += size
    return num_I, kept_S, kept_L


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    request_S, slot_L, row_L = (np.zeros(1, np.int64) for _ in range(3))
    lists = (np.ones(1, np.int64), np.ones((1, 1), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    hot_rows = (np.full(2, -1, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.int64), 0, 0)
    append_slots(*lists, *hot_rows, request_S, slot_L, row_L, 0, 0)
    hot_N, s_N = np.ones(1, np.bool_), np.zeros(1, np.float32)
    judge_slots(request_S, slot_L, row_L, s_N, hot_N, np.float32(0), 0.5, 1.0, 1)
    nth_smallest(request_S, s_N, row_L)
    take_requests(request_S, slot_L, row_L, hot_N)

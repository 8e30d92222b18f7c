"""Slipstream's rules: which rows are hot, which of them have stopped moving, which inputs are skipped for it. Pure.

    hot row      c / A >= hot_ratio and c >= 2, c its accesses, A those of all tables
    s of a row   the largest Euclidean distance between two consecutive snapshots; varying iff s > T, stale iff s <= T
    slot         a request-only feature, or a feature of a candidate; its s is the largest of its rows' (a row that is not hot
                 has s = ∞), so it is stale iff all its rows are. A feature without an entry is no slot
    hot input    the share of slots whose rows are all hot is `hot_share` or more
    skipped      a hot input with stale slots >= ceil(alpha · slots): with q the ceil(alpha · slots)-th smallest s, q <= T
    T            the largest q of a hot input with share(q <= T) <= drop: one pass, exact

Maboud et al., *Slipstream: Semantic-Based Training Acceleration for Recommendation Models*, algorithm 1, §3.1–3.3, Eq. 2–4; what
a hot input is: FAE. Eq. 2's mean of δ is the share that varies; the share dropped is 1 - that.

Letters: N rows, D width, R requests, S slots, I inputs, L entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from roo.batch import Batch
from roo.lookup import Lookup, sources_of

T_QUANTILE = 3.340
"""Student's t, one side .0005, 200 degrees of freedom: 99.9 % (the paper's §3.2); from LEAST_SAMPLE inputs on it is safe."""
_ROUNDS = 40


class AccessCounts:
    """Accesses by row of one stack. 20 bytes a row that was seen."""

    def __init__(self) -> None:
        self.table_N, self.id_N, self.count_N = np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_waiting = 0

    def add(self, table_U: np.ndarray, id_U: np.ndarray, count_U: np.ndarray) -> None:
        """So many more accesses of these rows, each named once."""
        self._waiting.append((table_U, id_U, count_U))
        self._num_waiting += len(id_U)
        if self._num_waiting >= max(1 << 16, len(self.id_N)):
            self.merge()

    def merge(self) -> None:
        """Make the three arrays those of everything added: sorted by table and id."""
        parts = [(self.table_N, self.id_N, self.count_N), *self._waiting]
        self._waiting, self._num_waiting = [], 0
        table_M, id_M, count_M = (np.concatenate(column) for column in zip(*parts, strict=True))
        order_M = np.lexsort((id_M, table_M))
        table_M, id_M, count_M = table_M[order_M], id_M[order_M], count_M[order_M]
        first_M = np.r_[True, (table_M[1:] != table_M[:-1]) | (id_M[1:] != id_M[:-1])][: len(id_M)]
        start_N = np.flatnonzero(first_M)
        self.table_N, self.id_N = table_M[start_N], id_M[start_N]
        self.count_N = np.add.reduceat(count_M, start_N) if len(start_N) else np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        """Accesses of all rows; `merge` first."""
        return int(self.count_N.sum())


def is_hot(count_N: np.ndarray, total: int, ratio: float) -> np.ndarray:
    """bool [N], of accesses int64 [N] among `total`; a single sight makes no row hot."""
    return (count_N >= 2) & (count_N / max(total, 1) >= ratio)


def moved(before_ND: np.ndarray, after_ND: np.ndarray) -> np.ndarray:
    """float32 [N]: distance of each row from one snapshot to the next."""
    difference_ND = after_ND.astype(np.float64) - before_ND
    return np.sqrt((difference_ND * difference_ND).sum(axis=1)).astype(np.float32)


class ReadSlots(NamedTuple):
    """What requests read: entries of slots, slots of requests."""

    request_S: np.ndarray  # int64
    slot_L: np.ndarray  # int64, rising: which slot an entry is of; every slot has one
    row_L: np.ndarray  # int64: which row; numbers of whoever asked


def slots_of(batch: Batch, lookup: Lookup, number: Mapping[str, np.ndarray]) -> ReadSlots:
    """Of a batch; `number`: stack → int64 [U], what its rows are to be called."""
    requests, slots, rows, num_slots = [], [], [], 0
    at_R = np.arange(batch.num_requests, dtype=np.int64)
    for stack, sources in batch.schema.derived(sources_of).items():
        for source in sources:
            jagged, request_N = (batch.ro_lists, at_R) if source.side == "ro" else (batch.nro_lists, batch.request_index_B)
            length_N = jagged.lengths_KN[jagged.index(source.key.partition(".")[0])].astype(np.int64)
            full_N = np.flatnonzero(length_N)
            requests.append(request_N[full_N])
            slots.append(np.repeat(np.arange(num_slots, num_slots + len(full_N)), length_N[full_N]))
            rows.append(number[stack][lookup.stacks[stack].index[source.key]])
            num_slots += len(full_N)
    none = np.zeros(0, np.int64)
    return ReadSlots(*(np.concatenate([none, *parts]) for parts in (requests, slots, rows)))


class Classified(NamedTuple):
    """Of each request."""

    hot_R: np.ndarray  # bool
    q_R: np.ndarray  # float32: from which T on it is skipped; ∞ = never


class _Movement(NamedTuple):
    """Of each slot, and of how many a request has."""

    s_S: np.ndarray  # float32
    count_R: np.ndarray  # int64
    needed_R: np.ndarray  # int64: slots that must be stale for it to be skipped


def judge(
    slots: ReadSlots, s_N: np.ndarray, hot_N: np.ndarray, num_requests: int, *, alpha: float, hot_share: float = 1.0
) -> Classified:
    """`s_N`: float32, of the rows that `slots` names, ∞ of those that must count as varying; `hot_N`: bool. A request without any
    slot is cold."""
    hot_R, its = hot_requests(slots, hot_N, num_requests, hot_share), _of_slots(slots, s_N, hot_N, num_requests, alpha)
    order_S = np.lexsort((its.s_S, slots.request_S))
    at_R = np.cumsum(its.count_R) - its.count_R + np.maximum(its.needed_R, 1) - 1
    q_R = np.full(num_requests, np.inf, np.float32)
    full_R = np.flatnonzero(its.count_R)
    q_R[full_R] = its.s_S[order_S[at_R[full_R]]]
    q_R[its.needed_R == 0] = -np.inf
    return Classified(hot_R, np.where(hot_R, q_R, np.float32(np.inf)))


def is_stale(
    slots: ReadSlots, s_N: np.ndarray, hot_N: np.ndarray, num_requests: int, T: float, *, alpha: float, hot_share: float = 1.0
) -> np.ndarray:
    """bool [R]: hot, and q <= T: as `judge` says it, which sorts to know it for any T."""
    hot_R, its = hot_requests(slots, hot_N, num_requests, hot_share), _of_slots(slots, s_N, hot_N, num_requests, alpha)
    num_stale_R = np.bincount(slots.request_S[its.s_S <= T], minlength=num_requests)
    return np.asarray(hot_R & (num_stale_R >= its.needed_R))


def hot_requests(slots: ReadSlots, hot_N: np.ndarray, num_requests: int, hot_share: float = 1.0) -> np.ndarray:
    """bool [R]: hot inputs, `hot_N` (bool) being the hot ones of the rows that `slots` names."""
    cold_S = np.zeros(len(slots.request_S), np.bool_)
    cold_S[slots.slot_L[~hot_N[slots.row_L]]] = True
    count_R = np.bincount(slots.request_S, minlength=num_requests)
    num_hot_R = count_R - np.bincount(slots.request_S[cold_S], minlength=num_requests)
    return np.asarray((count_R > 0) & (num_hot_R >= np.ceil(hot_share * count_R - 1e-9)))


def _of_slots(slots: ReadSlots, s_N: np.ndarray, hot_N: np.ndarray, num_requests: int, alpha: float) -> _Movement:
    s_L = np.where(hot_N[slots.row_L], s_N[slots.row_L], np.float32(np.inf))
    first_L = np.r_[True, slots.slot_L[1:] != slots.slot_L[:-1]][: len(s_L)]
    s_S = np.maximum.reduceat(s_L, np.flatnonzero(first_L)) if len(s_L) else s_L
    count_R = np.bincount(slots.request_S, minlength=num_requests)
    return _Movement(s_S, count_R, np.ceil(alpha * count_R - 1e-9).astype(np.int64))


def threshold(q_I: np.ndarray, drop: float) -> float:
    """T from all hot inputs' q: the share of q <= T is `drop` at most, and no larger one of theirs keeps it so. -∞ where the
    smallest is shared by too many: nothing is skipped."""
    sorted_I = np.sort(q_I)
    most = math.floor(drop * len(q_I) + 1e-9)
    if 0 < most < len(q_I) and sorted_I[most - 1] == sorted_I[most]:
        most = int(np.searchsorted(sorted_I, sorted_I[most]))
    most = min(most, int(np.isfinite(q_I).sum()))
    return float(sorted_I[most - 1]) if most else -math.inf


def sampled_threshold(q_I: np.ndarray, drop: float, sample: int, random: np.random.Generator) -> tuple[float, float]:
    """The paper's: halve the range of T until the share of a sample of inputs is `drop`; (T, half width of its share)."""
    taken_M = random.choice(q_I, min(sample, len(q_I)), replace=False)
    finite_M = taken_M[np.isfinite(taken_M)]
    low, high = 0.0, float(finite_M.max(initial=0.0))
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if (taken_M <= middle).mean() <= drop else (low, middle)
    return low, half_width(float((taken_M <= low).mean()), len(taken_M), len(q_I))


def half_width(share: float, sample: int, population: int) -> float:
    """Of the 99.9 % interval of a share that a sample of a finite population says; `sample` LEAST_SAMPLE or more."""
    return T_QUANTILE * math.sqrt((population - sample) / population * share * (1 - share) / sample)

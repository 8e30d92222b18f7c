"""Compiled loops of deferral, one row after another: what a batch's visits change of the rows that are looked at.

Letters: U rows of a batch, N rows looked at, D width, K tables that expire, M visits of hot rows, P rows pushed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

KEPT = {"v": "i8", "c": "i8", "carried": "i8", "pushed_ms": "i8", "seen": "i8", "m": "f4"}
"""Of a row: visits, gradients that wait, visits that its last push carried until it was pulled again, when that was, in which
batch it was visited last, and movement a visit."""
_OF_ROW = {**KEPT, "calm": "u1", "late_ms": "i8"}
VISITED = np.dtype({"names": [*_OF_ROW], "formats": [*_OF_ROW.values()], "itemsize": 64}, align=True)
"""And what follows from its key: whether chance has chosen it, and for how long nothing may wait. A line of a cache each."""
_LINE, _NEVER_MS = 64, np.iinfo(np.int64).max
_FADE = np.float32(0.9)


def places(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin with a line of a cache; what nobody touches takes no memory."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(num_bytes + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


@njit(cache=True, nogil=True)
def begin(of_N: np.ndarray, w_ND: np.ndarray, first: int, ends: int) -> None:
    """Rows `first` to `ends` - 1, for which nothing waits, are as if nobody had visited them, and never expire."""
    for n in range(first, ends):
        of = of_N[n]
        of.v = of.c = of.carried = of.pushed_ms = of.seen = of.calm = 0
        of.m, of.late_ms = np.inf, _NEVER_MS
        for j in range(w_ND.shape[1]):
            w_ND[n, j] = 0


@njit(cache=True, nogil=True)
def move(
    of_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    gone_M: np.ndarray,
    from_K: np.ndarray,
    to_K: np.ndarray,
) -> None:
    """Nothing waits any more for the rows `gone_M`; those of `from_K` become those of `to_K`."""
    for n in gone_M:
        if of_N[n].c > 0:
            b_ND[n] = 0
    for k in range(len(from_K)):
        old, new = from_K[k], to_K[k]
        of_N[new] = of_N[old]
        w_ND[new] = w_ND[old]
        if of_N[old].c > 0:
            b_ND[new] = b_ND[old]
            b_ND[old] = 0


@njit(cache=True, nogil=True)
def free_rows(of_N: np.ndarray, num_rows: int, in_use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 [M], rising numbers; int64 [M], when each was visited last): of rows that nothing waits for, but for those `in_use`
    (int64, their numbers)."""
    taken_N = np.zeros(num_rows, np.bool_)
    taken_N[in_use] = True
    number_M, seen_M, num = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64), 0
    for n in range(num_rows):
        if of_N[n].c == 0 and not taken_N[n]:
            number_M[num], seen_M[num] = n, of_N[n].seen
            num += 1
    return number_M[:num], seen_M[:num]


@njit(cache=True, nogil=True)
def touch(number_U: np.ndarray, of_N: np.ndarray, w_ND: np.ndarray) -> float:
    """Reads what `visit` will, as `roostream.wire.lookup.touch_keys` does and for its reason; there is a row at least."""
    sum_ = 0.0
    for u in range(len(number_U)):
        n = max(number_U[u], 0)
        sum_ += of_N[n].m + w_ND[n, 0]
    return sum_


@njit(cache=True, nogil=True)
def visit(
    number_U: np.ndarray,
    row_UD: np.ndarray,
    of_N: np.ndarray,
    w_ND: np.ndarray,
    recent: np.ndarray,
    num_recent: int,
    take: int,
    min_visits: int,
    T: np.float32,
) -> tuple[int, int]:
    """Rows are pulled for batch `take`: count the visits and measure, of rows that were pushed since their last pull, how far
    that moved them. (`num_recent` with the visits of hot rows that have an m; how many rows have left T behind.)

    Read and changed:
        number_U, row_UD    int64, -1 = not looked at; float32, as pulled
        of_N, w_ND          VISITED; float32: the row before its last push
        recent, num_recent  float32, a ring: m at visits of hot rows, in their order; how many there were so far
    """
    num_unfrozen = 0
    for u in range(len(number_U)):
        n = number_U[u]
        if n < 0:
            continue
        of = of_N[n]
        if of.carried > 0:
            squares = 0.0
            for j in range(row_UD.shape[1]):
                moved = float(row_UD[u, j]) - float(w_ND[n, j])
                squares += moved * moved
            d, old = np.float32(np.sqrt(squares) / of.carried), of.m
            of.m = d if np.isinf(old) else _FADE * old + (np.float32(1) - _FADE) * d
            of.carried = 0
            num_unfrozen += old <= T and of.m > T
        of.v += 1
        of.seen = take
        if of.v >= min_visits and np.isfinite(of.m):
            recent[num_recent % len(recent)] = of.m
            num_recent += 1
    return num_recent, num_unfrozen


@njit(cache=True, nogil=True)
def split(
    number_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    row_UD: np.ndarray,
    gradient_UD: np.ndarray,
    of_N: np.ndarray,
    w_ND: np.ndarray,
    b_ND: np.ndarray,
    min_visits: int,
    visits: int,
    T: np.float32,
    by_chance: bool,
    now_ms: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of visited rows, those that are pushed now, in their order: (uint32 [P], int64 [P], keys; float32 [P, D], their gradients
    with what waited for them). The gradients of the others are added to what waits.

    Read and changed, beside what `visit` has:
        table_U, id_U   keys: uint32, int64
        b_ND            float32: what waits
        T               a row waits whose m is at most that; `by_chance`: one that is calm
    """
    table_P, id_P, out_UD, p = np.empty_like(table_U), np.empty_like(id_U), np.empty_like(gradient_UD), 0
    width = gradient_UD.shape[1]
    for u in range(len(number_U)):
        n, waited = number_U[u], False
        if n >= 0:
            of = of_N[n]
            is_calm = of.calm != 0 if by_chance else of.m <= T
            if of.v >= min_visits and is_calm and of.c < visits - 1 and now_ms - of.pushed_ms < of.late_ms:
                of.c += 1
                for j in range(width):
                    b_ND[n, j] += gradient_UD[u, j]
                continue
            waited = of.c > 0
            of.carried, of.c, of.pushed_ms = of.c + 1, 0, now_ms
            for j in range(width):
                w_ND[n, j] = row_UD[u, j]
        if waited:
            for j in range(width):
                out_UD[p, j] = b_ND[n, j] + gradient_UD[u, j]
                b_ND[n, j] = 0
        else:
            for j in range(width):
                out_UD[p, j] = gradient_UD[u, j]
        table_P[p], id_P[p] = table_U[u], id_U[u]
        p += 1
    return table_P[:p], id_P[:p], out_UD[:p]


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    number_U, row_UD, of_N, T = (
        np.zeros(1, np.int64),
        np.zeros((1, 2), np.float32),
        np.zeros(1, VISITED),
        np.float32(0),
    )
    w_ND, b_ND = row_UD.copy(), row_UD.copy()
    begin(of_N, w_ND, 0, 1)
    touch(number_U, of_N, w_ND)
    free_rows(of_N, 1, number_U)
    visit(number_U, row_UD, of_N, w_ND, np.zeros(1, np.float32), 0, 1, 1, T)
    split(
        number_U, np.zeros(1, np.uint32), number_U, row_UD, row_UD.copy(), of_N, w_ND, b_ND, 1, 2, T, False, 0
    )
    move(of_N, w_ND, b_ND, number_U[:0], number_U[:0], number_U[:0])

"""Compiled loops of deferral, one row after another: what a batch's visits change of the rows that are looked at.

Letters: U rows of a batch, N rows looked at, D width, K tables that expire, M visits of hot rows, P rows pushed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

KEPT = {"v": "i8", "c": "i8", "carried": "i8", "pushed_ms": "i8", "seen": "i8", "m": "f4"}
"""Of a row: visits, gradients that wait, visits that its last push carried until it was pulled again, when that was, in which
batch it was visited last, and movement a visit."""
VISITED = np.dtype([*KEPT.items(), ("calm", "u1"), ("late_ms", "i8")], align=True)
"""And what follows from its key: whether chance has chosen it, and for how long nothing may wait."""
_FADE = np.float32(0.9)


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
) -> tuple[np.ndarray, np.ndarray]:
    """Of visited rows, those that are pushed now: (int64 [P], positions in U, rising; float32 [P, D], with what waited for them).
    The gradients of the others are added to what waits.

    Read and changed, beside what `visit` has:
        b_ND    float32: what waits
        T       a row waits whose m is at most that; `by_chance`: one that is calm
    """
    pushed_U, out_UD, p = np.empty(len(number_U), np.int64), np.empty_like(gradient_UD), 0
    width = gradient_UD.shape[1]
    for u in range(len(number_U)):
        n = number_U[u]
        if n >= 0:
            of = of_N[n]
            is_calm = of.calm != 0 if by_chance else of.m <= T
            if of.v >= min_visits and is_calm and of.c < visits - 1 and now_ms - of.pushed_ms < of.late_ms:
                of.c += 1
                for j in range(width):
                    b_ND[n, j] += gradient_UD[u, j]
                continue
            for j in range(width):
                w_ND[n, j] = row_UD[u, j]
        waited = n >= 0 and of_N[n].c > 0
        for j in range(width):
            out_UD[p, j] = gradient_UD[u, j]
            if waited:
                out_UD[p, j] = b_ND[n, j] + gradient_UD[u, j]
                b_ND[n, j] = 0
        if n >= 0:
            of = of_N[n]
            of.carried, of.c, of.pushed_ms = of.c + 1, 0, now_ms
        pushed_U[p] = u
        p += 1
    return pushed_U[:p], out_UD[:p]


def warm() -> None:
    """Compile the kernels into numba's cache."""
    number_U, row_UD, of_N, T = np.zeros(1, np.int64), np.zeros((1, 2), np.float32), np.zeros(1, VISITED), np.float32(0)
    visit(number_U, row_UD, of_N, row_UD.copy(), np.zeros(1, np.float32), 0, 1, 1, T)
    split(number_U, row_UD, row_UD.copy(), of_N, row_UD.copy(), row_UD.copy(), 1, 2, T, False, 0)

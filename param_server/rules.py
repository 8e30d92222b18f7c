"""Update rules: one gradient a row applied to rows and their accumulators, in place, in float32.

Letters: U rows to update, N row places of a stack, D width.

Adagrad (Duchi, Hazan, Singer 2011, figure 1, diagonal; epsilon as in torch.optim.Adagrad and FBGEMM's exact optimizers):
    a += g * g                  w -= lr * g / (sqrt(a) + eps)           one accumulator an element
Row-wise Adagrad (Gupta et al. 2014; FBGEMM EXACT_ROWWISE_ADAGRAD, Mudigere et al. 2022):
    a += mean over D of g * g   w -= lr * g / (sqrt(a) + eps)           one accumulator a row

No fastmath: the same inputs give the same bits on every machine. `error_model="numpy"` takes out the test for a zero
divisor, which would keep the loops from using vector instructions; the divisors are positive. Keys of one push are unique;
were they not, they would be applied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

EPSILON = np.float32(1e-8)


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(
    rows_ND: np.ndarray, accumulator_ND: np.ndarray, place_U: np.ndarray, gradient_UD: np.ndarray, learning_rate: np.float32
) -> None:
    for u in range(place_U.shape[0]):
        w_D, a_D, g_D = rows_ND[place_U[u]], accumulator_ND[place_U[u]], gradient_UD[u]
        for j in range(g_D.shape[0]):
            a_D[j] += g_D[j] * g_D[j]
            w_D[j] -= learning_rate * g_D[j] / (np.sqrt(a_D[j]) + EPSILON)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_adagrad(
    rows_ND: np.ndarray, accumulator_N1: np.ndarray, place_U: np.ndarray, gradient_UD: np.ndarray, learning_rate: np.float32
) -> None:
    width = np.float32(gradient_UD.shape[1])
    for u in range(place_U.shape[0]):
        w_D, g_D = rows_ND[place_U[u]], gradient_UD[u]
        total = np.float32(0)
        for j in range(g_D.shape[0]):
            total += g_D[j] * g_D[j]
        a = accumulator_N1[place_U[u], 0] + total / width
        accumulator_N1[place_U[u], 0] = a
        step = learning_rate / (np.sqrt(a) + EPSILON)
        for j in range(g_D.shape[0]):
            w_D[j] -= step * g_D[j]


class UpdateRule(NamedTuple):
    """`apply(rows_ND, accumulator_NA, place_U, gradient_UD, learning_rate)`, all float32; A = accumulator_width(D)."""

    apply: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.float32], None]
    accumulator_width: Callable[[int], int]


RULES: dict[str, UpdateRule] = {
    "adagrad": UpdateRule(adagrad, lambda dim: dim),
    "rowwise_adagrad": UpdateRule(rowwise_adagrad, lambda dim: 1),
}
"""By `Table.rule`."""

"""Kernels of the update rules: one gradient a row, applied to the row and its state in place, in float32.
Names, parameters and first states of the rules are in `roostream/schema/update_rules.py`.

Letters: U rows to update, N rows of a stack, D width, A numbers of state a row, K tables of the stack, P
parameters.

Adagrad (Duchi, Hazan, Singer 2011, figure 1, diagonal; epsilon as in torch.optim.Adagrad and FBGEMM's exact
optimizers):
    a += g * g                  w -= lr * g / (sqrt(a) + eps)           A = D: one accumulator an element
Row-wise Adagrad (Gupta et al. 2014; FBGEMM EXACT_ROWWISE_ADAGRAD, Mudigere et al. 2022):
    a += mean over D of g * g   w -= lr * g / (sqrt(a) + eps)           A = 1: one accumulator a row
Adam (Kingma, Ba 2015, algorithm 1; epsilon as in torch.optim.Adam), where t counts the row's own updates, so
that each row moves exactly as Adam moves it on its gradients alone:
    t += 1                      m = b1 * m + (1 - b1) * g               v = b2 * v + (1 - b2) * g * g
    w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)         A = 2 D + 1: m, v, and t for a row

No fastmath, and powers by multiplication: equal inputs give equal bits on every machine.
`error_model="numpy"` removes the test for a zero divisor, which would prevent vector instructions; the
divisors are positive. Keys of one push are unique; repeated keys would be applied one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(
    rows_ND: np.ndarray,
    state_ND: np.ndarray,
    row_U: np.ndarray,
    gradient_UD: np.ndarray,
    which_U: np.ndarray,
    parameters_KP: np.ndarray,
) -> None:
    """P: learning rate, initial accumulator, epsilon."""
    for u in range(row_U.shape[0]):
        learning_rate = np.float32(parameters_KP[which_U[u], 0])
        epsilon = np.float32(parameters_KP[which_U[u], 2])
        w_D, a_D, g_D = rows_ND[row_U[u]], state_ND[row_U[u]], gradient_UD[u]
        for j in range(g_D.shape[0]):
            a_D[j] += g_D[j] * g_D[j]
            w_D[j] -= learning_rate * g_D[j] / (np.sqrt(a_D[j]) + epsilon)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_adagrad(
    rows_ND: np.ndarray,
    state_N1: np.ndarray,
    row_U: np.ndarray,
    gradient_UD: np.ndarray,
    which_U: np.ndarray,
    parameters_KP: np.ndarray,
) -> None:
    """P: learning rate, initial accumulator, epsilon."""
    width = np.float32(gradient_UD.shape[1])
    for u in range(row_U.shape[0]):
        learning_rate = np.float32(parameters_KP[which_U[u], 0])
        epsilon = np.float32(parameters_KP[which_U[u], 2])
        w_D, g_D = rows_ND[row_U[u]], gradient_UD[u]
        total = np.float32(0)
        for j in range(g_D.shape[0]):
            total += g_D[j] * g_D[j]
        a = state_N1[row_U[u], 0] + total / width
        state_N1[row_U[u], 0] = a
        step = learning_rate / (np.sqrt(a) + epsilon)
        for j in range(g_D.shape[0]):
            w_D[j] -= step * g_D[j]


@njit(cache=True, nogil=True, error_model="numpy")
def adam(
    rows_ND: np.ndarray,
    state_NA: np.ndarray,
    row_U: np.ndarray,
    gradient_UD: np.ndarray,
    which_U: np.ndarray,
    parameters_KP: np.ndarray,
) -> None:
    """P: learning rate, beta 1, beta 2, epsilon. A row's state: m [D], v [D], t."""
    width = gradient_UD.shape[1]
    for u in range(row_U.shape[0]):
        p_P = parameters_KP[which_U[u]]
        learning_rate, beta1, beta2, epsilon = p_P[0], p_P[1], p_P[2], p_P[3]
        w_D, g_D, state_A = rows_ND[row_U[u]], gradient_UD[u], state_NA[row_U[u]]
        m_D, v_D = state_A[:width], state_A[width : 2 * width]
        state_A[2 * width] += np.float32(1)  # stops at 2^24, where the correction has vanished
        t = np.int64(state_A[2 * width])
        step = np.float32(learning_rate / (1.0 - _power(beta1, t)))
        root = np.float32(np.sqrt(1.0 - _power(beta2, t)))
        b1, b2, eps = np.float32(beta1), np.float32(beta2), np.float32(epsilon)
        new1, new2 = np.float32(1.0 - beta1), np.float32(1.0 - beta2)
        for j in range(width):
            m_D[j] = b1 * m_D[j] + new1 * g_D[j]
            v_D[j] = b2 * v_D[j] + new2 * g_D[j] * g_D[j]
            w_D[j] -= step * m_D[j] / (np.sqrt(v_D[j]) / root + eps)


@njit(cache=True, nogil=True)
def _power(base: float, exponent: int) -> float:
    """base ** exponent for exponents from 0 on."""
    out = 1.0
    while exponent > 0:
        if exponent & 1:
            out *= base
        base *= base
        exponent >>= 1
    return out


MAX_GRADIENT = np.float32(2.0**20)
"""Limit of each number of a gradient that reaches a kernel.

An accumulator stops growing when a square is less than half a unit in its last place, at 2^24 squares: 2^64,
far below 2^128, where float32 ends. So no state becomes infinite after any number of updates; an infinite one
would make every later step of its row 0.
"""


def accumulators(rule: str, width: int) -> slice:
    """Which of the A numbers of a row's state accumulate squares of gradients."""
    return slice(width, 2 * width) if rule == "adam" else slice(None)


KERNELS: dict[str, Callable[..., None]] = {
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
}
"""By `Rule.name`. Arguments: rows and states (float32, changed in place), row numbers `row_U` (int64), finite
gradients, the number of each row's table `which_U` (int64), and the parameters of each table (float64, in the
order of the rule's fields)."""

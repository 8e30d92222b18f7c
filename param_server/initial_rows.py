"""Initial values of rows: a function of (seed, table, id) and nothing else, so that training, serving and
every restart agree.

Letters: N rows, D width.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S40 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(40)
_STEP = np.float32(2.0**-23)


def initial_rows(
    seed: int, table_N: np.ndarray, id_N: np.ndarray, dim: int, scale: float | np.ndarray
) -> np.ndarray:
    """float32 [N, dim], uniform in [-scale, scale), for keys (uint32 [N], int64 [N]). `scale`: one number or
    float32 [N].

    Element j of a row is splitmix64(s + j) with s = splitmix64(splitmix64(splitmix64(seed) ^ table) ^ id).
    Its top 24 bits k give (k - 2^23) * 2^-23, which float32 holds exactly, so the product with `scale` is the
    only rounding.
    """
    scale_N = np.broadcast_to(np.asarray(scale, dtype=np.float32), id_N.shape)
    out_ND = np.empty((len(id_N), dim), dtype=np.float32)
    fill_initial(
        np.uint64(seed & (1 << 64) - 1),
        np.ascontiguousarray(table_N, dtype=np.uint32),
        np.ascontiguousarray(id_N, dtype=np.int64),
        np.ascontiguousarray(scale_N),
        out_ND,
    )
    return out_ND


@njit(cache=True, nogil=True, inline="always")
def splitmix64(x: np.uint64) -> np.uint64:
    """As `roostream.schema.ids.splitmix64`, in uint64 arithmetic."""
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@njit(cache=True, nogil=True, inline="always")
def fill_one(seed: np.uint64, table: np.uint32, id_: np.int64, scale: np.float32, out_D: np.ndarray) -> None:
    """Fill one row; `seed` as in `initial_rows`."""
    s = splitmix64(splitmix64(splitmix64(seed) ^ np.uint64(table)) ^ np.uint64(id_))
    for j in range(out_D.shape[0]):
        k = np.int64(splitmix64(s + np.uint64(j)) >> _S40) - np.int64(1 << 23)
        out_D[j] = (np.float32(k) * _STEP) * scale


@njit(cache=True, nogil=True)
def fill_initial(
    seed: np.uint64, table_N: np.ndarray, id_N: np.ndarray, scale_N: np.ndarray, out_ND: np.ndarray
) -> None:
    """Write the initial value of each key into its row of `out_ND`."""
    for n in range(id_N.shape[0]):
        fill_one(seed, table_N[n], id_N[n], scale_N[n], out_ND[n])

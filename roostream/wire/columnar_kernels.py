"""Columns of a side laid beside each other. No Python objects, no GIL.

Letters: N rows, F floats, C columns of one call.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MAX_COLUMNS = 32
"""Columns of one call: a tuple of another length would be compiled anew."""
_ROWS = 256  # at once: what they take of all columns stays in the nearest cache
_INFINITE = 0x7F800000  # above it, without the sign, lie NaNs


@njit(cache=True, nogil=True)
def interleave_columns(
    columns_C: tuple[np.ndarray, ...],
    count: int,
    first: int,
    default_F: np.ndarray,
    out_NF: np.ndarray,
    present_NF: np.ndarray,
) -> None:
    """Fills `out_NF` (uint32: the floats' bits) and `present_NF` (bool) from column `first` on with `count` of the columns (each
    uint32 [N]); what is NaN is missing and gets its column's default."""
    for start in range(0, len(out_NF), _ROWS):
        end = min(start + _ROWS, len(out_NF))
        out_MF, present_MF, c = out_NF[start:end], present_NF[start:end], 0
        while c < count:
            f = first + c
            if c + 4 <= count:
                a, b, d, e = columns_C[c], columns_C[c + 1], columns_C[c + 2], columns_C[c + 3]
                four = a[start:end], b[start:end], d[start:end], e[start:end]
                four_beside(*four, default_F[f : f + 4], out_MF[:, f : f + 4], present_MF[:, f : f + 4])
                c += 4
            else:
                one_beside(columns_C[c][start:end], default_F[f], out_MF[:, f], present_MF[:, f])
                c += 1


@njit(cache=True, nogil=True)
def four_beside(
    a_M: np.ndarray,
    b_M: np.ndarray,
    c_M: np.ndarray,
    d_M: np.ndarray,
    default_4: np.ndarray,
    out_M4: np.ndarray,
    there_M4: np.ndarray,
) -> None:
    """Four at once, which lie beside each other in a line of the cache."""
    absent_a, absent_b, absent_c, absent_d = default_4[0], default_4[1], default_4[2], default_4[3]
    for m in range(len(a_M)):
        a, b, c, d = a_M[m], b_M[m], c_M[m], d_M[m]
        has_a, has_b, has_c, has_d = is_there(a), is_there(b), is_there(c), is_there(d)
        out_M4[m, 0], out_M4[m, 1] = a if has_a else absent_a, b if has_b else absent_b
        out_M4[m, 2], out_M4[m, 3] = c if has_c else absent_c, d if has_d else absent_d
        there_M4[m, 0], there_M4[m, 1], there_M4[m, 2], there_M4[m, 3] = has_a, has_b, has_c, has_d


@njit(cache=True, nogil=True)
def one_beside(values_M: np.ndarray, default: np.uint32, out_M: np.ndarray, there_M: np.ndarray) -> None:
    for m in range(len(values_M)):
        has = is_there(values_M[m])
        out_M[m] = values_M[m] if has else default
        there_M[m] = has


@njit(cache=True, nogil=True)
def is_there(bits: np.uint32) -> np.bool_:
    """Whether a float of these bits (uint32) is a number."""
    return (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(_INFINITE)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    bits_NF = np.zeros((1, 5), dtype=np.uint32)
    interleave_columns(
        (np.zeros(1, dtype=np.uint32),) * MAX_COLUMNS,
        5,
        0,
        np.zeros(5, dtype=np.uint32),
        bits_NF,
        np.zeros((1, 5), dtype=np.bool_),
    )

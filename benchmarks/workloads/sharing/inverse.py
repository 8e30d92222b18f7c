"""Impressions with deduplicated tensors and inverse indices, as a reader makes them of a clustered log (RecD §4.2).

Letters: B impressions, F floats, U rows that remain.

    history_B  [7 8] [7 8] [9]    →    history_U  [7 8] [9]    inverse_B  0 0 1

All request-only features are one group: they share the inverse index (a grouped IKJT), so that whatever is made of them runs on U
rows, and floats are deduplicated with them. RecD says that for lists alone; here the peer gets the most that its form allows.
Rows are equal if every value is; only neighbours are compared, since a clustered log has equal ones next to each other.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from roo.batch import Batch
from roo.jagged import Jagged


def deduplicated(expanded: Batch) -> Batch:
    """Of impressions, each a request of its own, the batch of U rows; nothing but time and features says which are equal."""
    again_B = _again(expanded)
    first_U = np.flatnonzero(~again_B)
    inverse_B = np.cumsum(~again_B) - 1
    each_B = np.arange(expanded.num_candidates, dtype=np.int64)
    return expanded.take(first_U, each_B, inverse_B, np.bincount(inverse_B, minlength=len(first_U)))


def _again(expanded: Batch) -> np.ndarray:
    """bool [B]: the row has the values of the one before."""
    assert expanded.num_requests == expanded.num_candidates, "expected impressions"
    same_B = np.ones(expanded.num_requests, dtype=np.bool_)
    for rows in (expanded.time_ms_R[:, None], expanded.ro_float_RF.view(np.int32), expanded.ro_present_RF):
        _compare_rows(rows, same_B)
    lists = expanded.ro_lists
    _compare_rows(lists.lengths_KN.T, same_B)
    _compare_rows(lists.present_KN.T, same_B)
    for key in lists.keys:
        for values_L in _columns(lists, key):
            _compare_lists(lists.offsets_of(key), values_L, same_B)
    same_B[:1] = False
    return same_B


def _columns(lists: Jagged, key: str) -> list[np.ndarray]:
    """Everything that a feature has an entry."""
    weight_L = lists.weights_of(key)
    columns = [column_L for name, column_L in lists.columns.items() if name.split(".", 1)[0] == key]
    return [lists.values_of(key), *columns, *([] if weight_L is None else [weight_L.view(np.int32)])]


def _compare_rows(x_BF: np.ndarray, same_B: np.ndarray) -> None:
    same_B[1:] &= (x_BF[1:] == x_BF[:-1]).all(axis=1)


@njit(cache=True, nogil=True)
def _compare_lists(offset_B1: np.ndarray, value_L: np.ndarray, same_B: np.ndarray) -> None:
    """Of rows whose lists are as long as those before."""
    for b in range(1, len(same_B)):
        if same_B[b]:
            for i in range(offset_B1[b], offset_B1[b + 1]):
                if value_L[i] != value_L[i - offset_B1[b] + offset_B1[b - 1]]:
                    same_B[b] = False
                    break

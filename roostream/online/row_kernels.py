"""Compiled arithmetic of event_rows.py and entity_state.py: adds events to the rows of counters, and reads
the rows' values.

A row is float64 [W]; column 0 is the time of its newest event. `op_W` and `param_W` say what each other
column is (roostream/schema/row_layout.py); `takes_W` says which columns count events of the action at hand.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from roostream.schema.row_layout import (
    FIRST,
    MAX_TABLE_ROWS,
    NEWEST,
    SHARE,
    STEP,
    SUM,
    VALUE,
    VALUE_MS,
    WINDOW_STEPS,
)


@njit(cache=True, nogil=True)
def _add_event(
    row: np.ndarray,
    time_ms: float,
    value: float,
    num_items: float,
    takes_W: np.ndarray,
    op_W: np.ndarray,
    param_W: np.ndarray,
) -> None:
    """Add one event to a row, in place. Sums decay to the time of the newest event; a late event is added
    decayed. `num_items`: length of its list, by which SHARE columns divide it."""
    late_ms = 0.0 if np.isnan(row[0]) else row[0] - time_ms
    life_ms, fade, kept = 0.0, 1.0, 1.0
    for c in range(1, len(op_W)):
        op = op_W[c]
        if op in (SUM, SHARE):
            if param_W[c] != life_ms:
                life_ms = param_W[c]
                fade = 2.0 ** (min(late_ms, 0.0) / life_ms)
                kept = 2.0 ** (-max(late_ms, 0.0) / life_ms)
            row[c] *= fade
            if takes_W[c]:
                row[c] += kept if op == SUM else kept / num_items
        elif not takes_W[c]:
            continue
        elif op == VALUE:
            if not row[c + 1] > time_ms:
                row[c] = value
        elif op in (NEWEST, VALUE_MS):
            if not row[c] >= time_ms:
                row[c] = time_ms
        elif op == FIRST:
            if not row[c] <= time_ms:
                row[c] = time_ms
        elif op == STEP:
            _add_step(row[c : c + 1 + WINDOW_STEPS], np.floor(time_ms / param_W[c]))
    if not late_ms > 0:
        row[0] = time_ms


@njit(cache=True, nogil=True)
def _add_step(ring: np.ndarray, step: float) -> None:
    """`ring`: the newest step, then the count of each step at the index `step % WINDOW_STEPS`."""
    if np.isnan(ring[0]):
        ring[0] = step
    if step > ring[0]:
        for expired in range(int(min(step - ring[0], float(WINDOW_STEPS)))):
            ring[1 + int(step - expired) % WINDOW_STEPS] = 0.0
        ring[0] = step
    if step > ring[0] - WINDOW_STEPS:
        ring[1 + int(step) % WINDOW_STEPS] += 1.0


@njit(cache=True, nogil=True)
def add_list(
    rows_I: np.ndarray,
    at_n: np.ndarray,
    time_ms: float,
    value: float,
    num_items: float,
    takes_W: np.ndarray,
    op_W: np.ndarray,
    param_W: np.ndarray,
) -> None:
    """Add one event to each of the rows `at_n`."""
    for i in at_n:
        _add_event(rows_I[i], time_ms, value, num_items, takes_W, op_W, param_W)


@njit(cache=True, nogil=True)
def add_each(
    rows_I: np.ndarray,
    at_N: np.ndarray,
    times_N: np.ndarray,
    value: float,
    takes_W: np.ndarray,
    op_W: np.ndarray,
    param_W: np.ndarray,
) -> None:
    """Add events at `times_N` to the rows `at_N`, in order."""
    for k in range(len(at_N)):
        _add_event(rows_I[at_N[k]], times_N[k], value, 1.0, takes_W, op_W, param_W)


@njit(cache=True, nogil=True)
def add_to_table(
    keys_P: np.ndarray,
    rows_PW: np.ndarray,
    keys_n: np.ndarray,
    time_ms: float,
    value: float,
    num_items: float,
    takes_W: np.ndarray,
    op_W: np.ndarray,
    param_W: np.ndarray,
    initial_W: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Add one event to the row of each key, with new rows for new keys. `keys_P` are sorted.

    Returns keys and rows, changed in place if no key is new. Of more than MAX_TABLE_ROWS, those with the
    newest events stay, smaller keys first among equals.
    """
    new = np.empty(len(keys_n), dtype=np.int64)
    num_new = 0
    for key in keys_n:
        p = np.searchsorted(keys_P, key)
        if p == len(keys_P) or keys_P[p] != key:
            new[num_new] = key
            num_new += 1
    if num_new:
        keys_P = np.unique(np.concatenate((keys_P, new[:num_new])))
        old_PW, rows_PW, old = rows_PW, np.empty((len(keys_P), len(op_W))), 0
        new = np.unique(new[:num_new])
        num_new = 0
        for p in range(len(keys_P)):
            if num_new < len(new) and new[num_new] == keys_P[p]:
                rows_PW[p] = initial_W
                num_new += 1
            else:
                rows_PW[p] = old_PW[old]
                old += 1
    for key in keys_n:
        _add_event(rows_PW[np.searchsorted(keys_P, key)], time_ms, value, num_items, takes_W, op_W, param_W)
    if len(keys_P) > MAX_TABLE_ROWS:
        kept = np.sort(np.argsort(-rows_PW[:, 0], kind="mergesort")[:MAX_TABLE_ROWS])
        keys_P, rows_PW = keys_P[kept], rows_PW[kept]
    return keys_P, rows_PW


@njit(cache=True, nogil=True)
def merge_rows(rows_n: np.ndarray, others_n: np.ndarray, op_W: np.ndarray, param_W: np.ndarray) -> None:
    """Add to each row the events of another row of the same entity."""
    for i in range(len(rows_n)):
        row, other = rows_n[i], others_n[i]
        if np.isnan(other[0]):
            continue
        if np.isnan(row[0]):
            row[:] = other
            continue
        newest_ms = max(row[0], other[0])
        row_ms, other_ms = row[0] - newest_ms, other[0] - newest_ms
        for c in range(1, len(op_W)):
            op, life_ms = op_W[c], param_W[c]
            if op in (SUM, SHARE):
                row[c] = row[c] * 2.0 ** (row_ms / life_ms) + other[c] * 2.0 ** (other_ms / life_ms)
            elif op == STEP:
                _merge_rings(row[c : c + 1 + WINDOW_STEPS], other[c : c + 1 + WINDOW_STEPS])
            elif op == VALUE:
                if not np.isnan(other[c + 1]) and not row[c + 1] >= other[c + 1]:
                    row[c] = other[c]
            elif op in (NEWEST, VALUE_MS):
                if not np.isnan(other[c]) and not row[c] >= other[c]:
                    row[c] = other[c]
            elif op == FIRST and not np.isnan(other[c]) and not row[c] <= other[c]:
                row[c] = other[c]
        row[0] = newest_ms


@njit(cache=True, nogil=True)
def _merge_rings(ring: np.ndarray, other: np.ndarray) -> None:
    """Add the counts of another ring, as `_add_step` keeps them."""
    if np.isnan(other[0]):
        return
    if np.isnan(ring[0]):
        ring[:] = other
        return
    merged = np.zeros(WINDOW_STEPS)
    newest = max(ring[0], other[0])
    for source in (ring, other):
        for back in range(WINDOW_STEPS - int(min(newest - source[0], float(WINDOW_STEPS)))):
            slot = int(source[0] - back) % WINDOW_STEPS
            merged[slot] += source[1 + slot]
    ring[0] = newest
    ring[1:] = merged


@njit(cache=True, nogil=True)
def insert_by_time(pairs_H2: np.ndarray, value: int, time_ms: int, max_pairs: int) -> tuple[bool, np.ndarray]:
    """Insert a (value, time) pair into pairs that are sorted by time, newest first, before those of its time.

    Returns whether it is new, and the newest `max_pairs`.
    """
    num_newer = 0
    for h in range(len(pairs_H2)):
        if pairs_H2[h, 1] > time_ms:
            num_newer += 1
        elif pairs_H2[h, 1] == time_ms and pairs_H2[h, 0] == value:
            return False, pairs_H2
    out = np.empty((min(len(pairs_H2) + 1, max_pairs), 2), dtype=np.int64)
    for h in range(len(out)):
        if h == num_newer:
            out[h, 0], out[h, 1] = value, time_ms
        else:
            out[h] = pairs_H2[h - (h > num_newer)]
    return True, out


@njit(cache=True)
def read_rows(
    rows_n: np.ndarray, time_ms: float, op_W: np.ndarray, param_W: np.ndarray, out_Wn: np.ndarray
) -> None:
    """Write the values of the rows at `time_ms` to `out_Wn`: sums decayed, ages in seconds, window counts. An
    infinite value becomes NaN. It takes microseconds, so it keeps the interpreter's lock."""
    for i in range(len(rows_n)):
        row = rows_n[i]
        fade_ms = 0.0 if np.isnan(row[0]) else min(row[0] - time_ms, 0.0)
        life_ms, fade = 0.0, 1.0
        for c in range(1, len(op_W)):
            op = op_W[c]
            if op in (SUM, SHARE):
                if param_W[c] != life_ms:
                    life_ms = param_W[c]
                    fade = 2.0 ** (fade_ms / life_ms)
                out_Wn[c, i] = row[c] * fade
            elif op == NEWEST:
                out_Wn[c, i] = max(time_ms - row[c], 0.0) / 1000.0 if not np.isnan(row[c]) else np.nan
            elif op == FIRST:
                out_Wn[c, i] = max(time_ms - row[c], 0.0) / 1000.0 if not np.isnan(row[c]) else 0.0
            elif op == VALUE:
                out_Wn[c, i] = row[c]
            elif op == STEP:
                out_Wn[c, i] = _window_count(row[c : c + 1 + WINDOW_STEPS], np.floor(time_ms / param_W[c]))
            if np.isinf(out_Wn[c, i]):
                out_Wn[c, i] = np.nan


@njit(cache=True, nogil=True)
def _window_count(ring: np.ndarray, step: float) -> float:
    """Number of events in the WINDOW_STEPS steps up to `step`; an earlier step is read as the newest one."""
    events = 0.0
    if not np.isnan(ring[0]):
        for back in range(WINDOW_STEPS - int(min(max(step - ring[0], 0.0), float(WINDOW_STEPS)))):
            events += ring[1 + int(ring[0] - back) % WINDOW_STEPS]
    return events

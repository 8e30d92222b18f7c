"""The row of counters that is kept for an entity, such as a user or an item: its arithmetic and its bytes.

    column 0      time of the entity's newest event, to which all decayed sums refer
    decayed sum   a stored sum s has the value s · 2^-((t - newest) / half-life) at time t. A newer event
                  decays it to the event's time and adds 1; an older event adds what has not decayed of it by
                  then. An infinite half-life makes a plain count.
    window        a ring of WINDOW_STEPS counts, each of window / WINDOW_STEPS ms. At time t it covers the
                  step of t and those before it. Events before the ring are ignored.

`RowLayout` says which column is what. The arithmetic itself is compiled (row_kernels.py).

Letters: W columns of a row, I rows in memory, N events, n rows or entities of a call.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from roostream.errors import CheckpointError
from roostream.schema.row_layout import RowLayout

_VERSION = 3
_HEAD = struct.Struct("<BH")  # version, number of columns
_OLD_WIDTHS = {1: 10, 2: 14}  # version → number of columns, which these versions did not store
_VERSION_1_EXPECTED = 0.1  # expected clicks a view, which version 1 did not store: a rate's prior


def new_rows(layout: RowLayout, count: int) -> np.ndarray:
    """float64 [count, W] of entities without events."""
    rows = np.empty((count, layout.width))
    rows[:] = layout.initial_W
    return rows


def add_event(
    layout: RowLayout,
    rows_I: np.ndarray,
    index_n: np.ndarray,
    time_ms: int,
    event: str,
    value: float = 0.0,
    num_items: int = 1,
) -> None:
    """Add one event, in place, to each of the rows at `index_n`.

    `value`: what VALUE columns store. `num_items`: length of the list that the event belongs to; SHARE
    columns add 1 / num_items.
    """
    takes_W = layout.takes_W[event]
    kernels().add_list(
        rows_I, index_n, float(time_ms), value, float(num_items), takes_W, layout.op_W, layout.param_W
    )


def add_events(
    layout: RowLayout, rows_I: np.ndarray, index_N: np.ndarray, times_N: np.ndarray, event: str, value: float
) -> None:
    """Add events in order, in place: event k at `times_N[k]` to the row at `index_N[k]`."""
    takes_W = layout.takes_W[event]
    kernels().add_each(
        rows_I, index_N, times_N.astype(np.float64), value, takes_W, layout.op_W, layout.param_W
    )


def merge_rows(layout: RowLayout, rows_n: np.ndarray, others_n: np.ndarray) -> None:
    """Add to each row, in place, the events of another row of its entity. The result is that of a row that
    got all events, except for rounding (1e-15 of the value)."""
    kernels().merge_rows(rows_n, others_n, layout.op_W, layout.param_W)


def read_rows(layout: RowLayout, rows_n: np.ndarray, time_ms: int) -> np.ndarray:
    """The value of each column at `time_ms`, float32 [W, n]; times are returned as ages in s.

    NaN: there was no event, or the state is damaged and gives an infinite value.
    """
    out_Wn = np.zeros(rows_n.shape[::-1], dtype=np.float32)
    kernels().read_rows(rows_n, float(time_ms), layout.op_W, layout.param_W, out_Wn)
    return out_Wn


def row_to_bytes(layout: RowLayout, row_W: np.ndarray) -> bytes:
    """Version, number of columns, the columns' ids (uint32 each), then their numbers (float64 each)."""
    return _head(layout) + row_W.tobytes()


def rows_from_bytes(layout: RowLayout, values: Sequence[bytes | None]) -> np.ndarray:
    """Rows, float64 [n, W]; None gives the row of an entity without events. Columns that the bytes lack begin
    without events; columns that the layout lacks are dropped.

    Raises:
        CheckpointError: bytes of another format.
    """
    given = [value for value in values if value is not None]
    head = _head(layout)
    size = len(head) + 8 * layout.width
    joined = np.frombuffer(b"".join(given), dtype=np.uint8)
    if len(joined) == size * len(given):
        joined = joined.reshape(-1, size)
        if (joined[:, : len(head)] == np.frombuffer(head, dtype=np.uint8)).all():
            numbers = joined[:, len(head) :].copy().view(np.float64)
            if len(given) == len(values):
                return numbers
            rows_nW = new_rows(layout, len(values))
            rows_nW[[value is not None for value in values]] = numbers
            return rows_nW
    rows_nW = new_rows(layout, len(values))
    for i, value in enumerate(values):
        if value is not None:
            ids, numbers_W = _parse(layout, value)
            copy_columns(layout, rows_nW[i : i + 1], ids, numbers_W[None])
    return rows_nW


def copy_columns(layout: RowLayout, rows_n: np.ndarray, ids: Sequence[int], numbers_n: np.ndarray) -> None:
    """Copy columns that another layout wrote into the rows, by the columns' ids."""
    index = {id_: c for c, id_ in enumerate(layout.id_W.tolist())}
    pairs = [(index[id_], k) for k, id_ in enumerate(ids) if id_ in index]
    rows_n[:, [c for c, _ in pairs]] = numbers_n[:, [k for _, k in pairs]]


@functools.lru_cache(maxsize=256)
def _head(layout: RowLayout) -> bytes:
    return _HEAD.pack(_VERSION, layout.width) + layout.id_W.tobytes()


def _parse(layout: RowLayout, data: bytes) -> tuple[list[int], np.ndarray]:
    """The ids of the columns and their numbers, of any version."""
    if data and len(data) == 1 + 8 * _OLD_WIDTHS.get(data[0], -1) and layout.version_2_ids:
        numbers = np.frombuffer(data, dtype="<f8", offset=1)
        numbers = np.concatenate([numbers, _VERSION_1_EXPECTED * numbers[2:6]])
        return layout.version_2_ids, numbers[: len(layout.version_2_ids)]
    if len(data) >= _HEAD.size:
        version, width = _HEAD.unpack_from(data)
        if version == _VERSION and len(data) == _HEAD.size + 12 * width:
            ids = np.frombuffer(data, dtype="<u4", offset=_HEAD.size, count=width).tolist()
            return ids, np.frombuffer(data, dtype="<f8", offset=_HEAD.size + 4 * width)
    raise CheckpointError(
        f"expected a counter's state of version {_VERSION}, got {len(data)} other bytes; delete them"
    )


@functools.cache
def kernels() -> ModuleType:
    """row_kernels.py. Imported at the first use, so that commands which only look at a log start without the
    compiler."""
    from roostream.online import row_kernels

    return row_kernels

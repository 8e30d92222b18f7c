"""What is kept of one entity as a row of float64, its arithmetic, and its bytes.

The first number is the time of the entity's newest event, to which all its sums refer: a sum s is worth
s · 2^-((t - newest) / half-life) at t; an event at t ≥ newest moves it to t, one before it is added with the weight that it has
kept by then. A half-life of infinity is a plain count. A window is a ring of WINDOW_STEPS counts, one a step of window /
WINDOW_STEPS: at t it holds the steps from that of t back, and an event older than the ring counts nowhere.
Letters: n events or entities of a request, I entities in hand, W numbers of an entity.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from roostream.errors import CheckpointError
from roostream.online.column_ops import NEWEST_OF_ALL, SHARE, SLOT, STEP, SUM, VALUE, VALUE_MS, WINDOW_STEPS
from roostream.schema.ids import table_id

_ZERO_AT_FIRST = (SUM, SHARE, SLOT)
_VERSION = 3
_HEAD = struct.Struct("<BH")
_OLD_WIDTHS = {1: 10, 2: 14}
_VERSION_1_EXPECTED = 0.1  # a view, which it didn't say: what a rate takes where it knows nothing


class Column(NamedTuple):
    """A number of a row: what it takes of which event."""

    op: int
    event: str = ""
    param: float = 0.0  # half-life of SUM and SHARE, step of STEP and SLOT, in ms
    slot: int = 0

    @property
    def id(self) -> int:
        """uint32: what bytes call it."""
        return table_id(f"{self.op}:{self.param!r}:{self.slot}:{self.event}")


REFERENCE = Column(NEWEST_OF_ALL)


def window(event: str, window_ms: int) -> tuple[Column, ...]:
    """The columns of a window: the newest step, and its ring."""
    step_ms = window_ms / WINDOW_STEPS
    return Column(STEP, event, step_ms), *(Column(SLOT, event, step_ms, k) for k in range(WINDOW_STEPS))


def value(event: str) -> tuple[Column, ...]:
    """The columns of the last value, which go together."""
    return Column(VALUE, event), Column(VALUE_MS, event)


class RowLayout:
    """The columns of an entity's row. Those of equal half-life stand beside each other, so that each fades once."""

    def __init__(self, blocks: Sequence[tuple[Column, ...]], old: Sequence[Column] = ()) -> None:
        """`blocks`: columns that have to stand in this order; `old`: those of a row of version 2, in its order."""
        ordered = sorted(
            dict.fromkeys(blocks), key=lambda block: (block[0].op not in (SUM, SHARE), block[0].param)
        )
        self.columns = (REFERENCE, *(column for block in ordered for column in block))
        self.at = {column: c for c, column in enumerate(self.columns)}
        self.op_W = np.array([column.op for column in self.columns], dtype=np.int64)
        self.param_W = np.array([column.param for column in self.columns])
        self.events = {column.event for column in self.columns[1:]}
        self._takes = {e: np.array([c.event == e for c in self.columns], dtype=np.bool_) for e in self.events}
        self._first_W = np.where(np.isin(self.op_W, _ZERO_AT_FIRST), 0.0, np.nan)
        self._old_ids = [column.id for column in old]
        self.ids_W = np.array([column.id for column in self.columns], dtype="<u4")
        self._head = _HEAD.pack(_VERSION, len(self.columns)) + self.ids_W.tobytes()

    def new(self, count: int) -> np.ndarray:
        """float64 [count, W] of entities that nothing is known of."""
        return np.tile(self._first_W, (count, 1))

    def add(
        self,
        rows_I: np.ndarray,
        at_n: np.ndarray,
        time_ms: int,
        event: str,
        value: float = 0.0,
        share: int = 1,
    ) -> None:
        """One event of each of the rows at `at_n`, which is one of `share` of a list."""
        _kernels().add_list(
            rows_I, at_n, float(time_ms), value, float(share), self._takes[event], self.op_W, self.param_W
        )

    def add_each(
        self, rows_I: np.ndarray, at_N: np.ndarray, times_N: np.ndarray, event: str, value: float
    ) -> None:
        """Events behind each other, the N-th at its own time: the same as `add` of one each."""
        _kernels().add_each(
            rows_I, at_N, times_N.astype(np.float64), value, self._takes[event], self.op_W, self.param_W
        )

    def read(self, rows_n: np.ndarray, time_ms: int) -> np.ndarray:
        """float32 [W, n]: what each column says at `time_ms`; ages in s, NaN = there was none."""
        out_nW = np.zeros(rows_n.shape, dtype=np.float32)
        _kernels().read(rows_n, float(time_ms), self.op_W, self.param_W, out_nW)
        return np.ascontiguousarray(out_nW.T)

    def to_bytes(self, row_W: np.ndarray) -> bytes:
        return self._head + row_W.tobytes()

    def from_bytes(self, values: Sequence[bytes | None]) -> np.ndarray:
        """float64 [n, W]; None is an entity that nothing is known of. Columns that a state lacks are new, those that it alone has
        are gone.

        Raises:
            CheckpointError: bytes of another form.
        """
        out = self.new(len(values))
        given = [i for i, value in enumerate(values) if value is not None]
        size = len(self._head) + 8 * len(self.columns)
        joined = np.frombuffer(b"".join(values[i] or b"" for i in given), dtype=np.uint8)
        if len(joined) == size * len(given):
            joined = joined.reshape(-1, size)
            if (joined[:, : len(self._head)] == np.frombuffer(self._head, dtype=np.uint8)).all():
                out[given] = np.ascontiguousarray(joined[:, len(self._head) :]).view(np.float64)
                return out
        for i in given:
            ids, numbers = self._opened(values[i] or b"")
            self.arrange(out[i : i + 1], ids, numbers[None])
        return out

    def arrange(self, rows_n: np.ndarray, ids: Sequence[int], numbers_n: np.ndarray) -> None:
        """Put numbers that another layout wrote into the rows."""
        at = {id_: c for c, id_ in enumerate(self.ids_W.tolist())}
        pairs = [(at[id_], k) for k, id_ in enumerate(ids) if id_ in at]
        rows_n[:, [c for c, _ in pairs]] = numbers_n[:, [k for _, k in pairs]]

    def _opened(self, data: bytes) -> tuple[list[int], np.ndarray]:
        """Columns' ids and the numbers, of any version."""
        if data and len(data) == 1 + 8 * _OLD_WIDTHS.get(data[0], -1) and self._old_ids:
            numbers = np.frombuffer(data, dtype="<f8", offset=1)
            return self._old_ids, np.concatenate([numbers, _VERSION_1_EXPECTED * numbers[2:6]])[
                : len(self._old_ids)
            ]
        if len(data) >= _HEAD.size:
            version, width = _HEAD.unpack_from(data)
            if version == _VERSION and len(data) == _HEAD.size + 12 * width:
                ids = np.frombuffer(data, dtype="<u4", offset=_HEAD.size, count=width).tolist()
                return ids, np.frombuffer(data, dtype="<f8", offset=_HEAD.size + 4 * width)
        raise CheckpointError(
            f"expected a counter's state of version {_VERSION}, got {len(data)} other bytes; delete them"
        )


def total(event: str, half_life_ms: int = 0) -> tuple[Column, ...]:
    """The column of a decayed sum, or of a plain count."""
    return (Column(SUM, event, float(half_life_ms) or math.inf),)


@functools.cache
def _kernels() -> ModuleType:
    """Loaded when a row is first worked on: a program that reads a schema alone does without a compiler."""
    from roostream.online import row_kernels

    return row_kernels

"""Layouts of the counters' state: the columns of an entity's row, and the parts of an entity's whole state.

`roostream/online/event_rows.py` has the arithmetic and the bytes of a row, `entity_state.py` those of a
state. Letters: W columns of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from roostream.schema.ids import table_id

WINDOW_STEPS = 12
NEWEST_OF_ALL, SUM, SHARE, NEWEST, FIRST, VALUE, VALUE_MS, STEP, SLOT = range(9)
"""What a column holds: the time of any newest event · a decayed sum · a decayed sum of 1/(length of the list)
· the time of an event's newest and of its first occurrence · its last value and the time of that · the newest
step of a window, and one of the window's WINDOW_STEPS counts."""
MAX_TABLE_ROWS = 512
"""Rows that a user's state keeps by what the user's lists contained; those with the newest events stay."""


class Column(NamedTuple):
    """One number of a row and the event that changes it."""

    op: int
    event: str = ""
    param: float = 0.0  # half-life of SUM and SHARE, step of STEP and SLOT, in ms
    slot: int = 0

    @property
    def id(self) -> int:
        """uint32 that names the column in stored bytes."""
        return table_id(f"{self.op}:{self.param!r}:{self.slot}:{self.event}")


REFERENCE = Column(NEWEST_OF_ALL)


def sum_column(event: str, half_life_ms: int = 0) -> Column:
    """A decayed sum, or a plain count without a half-life."""
    return Column(SUM, event, float(half_life_ms) or math.inf)


def window_columns(event: str, window_ms: int) -> tuple[Column, ...]:
    """The newest step of a window, then its ring of counts."""
    step_ms = window_ms / WINDOW_STEPS
    return Column(STEP, event, step_ms), *(Column(SLOT, event, step_ms, k) for k in range(WINDOW_STEPS))


class RowLayout:
    """The columns of an entity's row. Columns of equal half-life are neighbors, so that the decay is computed
    once."""

    def __init__(self, blocks: Sequence[tuple[Column, ...]], version_2: Sequence[Column] = ()) -> None:
        """`blocks`: columns that must stay in this order; `version_2`: the columns of a row of version 2, in
        its order."""
        ordered = sorted(
            dict.fromkeys(blocks), key=lambda block: (block[0].op not in (SUM, SHARE), block[0].param)
        )
        self.columns = (REFERENCE, *(column for block in ordered for column in block))
        self.index = {column: c for c, column in enumerate(self.columns)}
        self.op_W = np.array([column.op for column in self.columns], dtype=np.int64)
        self.param_W = np.array([column.param for column in self.columns])
        self.initial_W = np.where(np.isin(self.op_W, (SUM, SHARE, SLOT)), 0.0, np.nan)
        self.id_W = np.array([column.id for column in self.columns], dtype="<u4")
        self.version_2_ids = [column.id for column in version_2]
        events = {column.event for column in self.columns[1:]}
        self.takes_W = {e: np.array([c.event == e for c in self.columns], dtype=np.bool_) for e in events}
        """Event → bool [W]: the columns that it changes."""

    @property
    def width(self) -> int:
        return len(self.columns)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateLayout:
    """The parts of the state of one entity of the request."""

    row: RowLayout
    histories: Mapping[str, int]  # action → newest entries kept
    sets: Mapping[tuple[str, str], int]  # (event, field) → values kept
    tables: Mapping[str, RowLayout]  # name of the crossed entity → its rows
    click: str  # the action that version 1 of the state counted

    @property
    def max_bytes(self) -> int:
        """The longest that the bytes of a state can be: a header and one section per part, each with a header
        of 8 bytes."""
        row = 3 + 12 * self.row.width  # header; a column: id (4 bytes) and number (8)
        lists = 16 * (sum(self.histories.values()) + sum(self.sets.values()))  # an entry: value and time
        # A table: header, ids of the columns, then the key and the numbers of each row.
        tables = sum(8 + 4 * t.width + 8 * MAX_TABLE_ROWS * (1 + t.width) for t in self.tables.values())
        num_sections = 1 + len(self.histories) + len(self.sets) + len(self.tables)
        return 5 + 8 * num_sections + row + lists + tables

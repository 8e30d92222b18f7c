"""The state of an entity of the request, for example a user, or a surface crossed with an hour.

It has one row of counters (event_rows.py), the newest engagements as a history, sets of the values seen last,
and, of a user, a bounded table of rows by what the user's lists contained.

Letters: H entries of a history, D values of a set, P rows of a table, W columns of a row.
"""

from __future__ import annotations

import struct

import numpy as np

from roostream.errors import CheckpointError
from roostream.online.event_rows import (
    copy_columns,
    kernels,
    merge_rows,
    new_rows,
    row_to_bytes,
    rows_from_bytes,
)
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.ids import table_id
from roostream.schema.row_layout import (
    MAX_TABLE_ROWS,
    NEWEST,
    REFERENCE,
    Column,
    RowLayout,
    StateLayout,
    sum_column,
)

_ROW = 0
_HEAD, _SECTION, _TABLE_HEAD = struct.Struct("<BI"), struct.Struct("<II"), struct.Struct("<II")
_VERSION = 2
_OLD_HEAD = struct.Struct("<BqII")
_OLD_NEVER = -(1 << 63)


class EntityState:
    """Changed in place; times are event times in ms. Its size is bounded by `StateLayout.max_bytes`."""

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self.row_1W = new_rows(layout.row, 1)
        self.histories = {event: np.zeros((0, 2), dtype=np.int64) for event in layout.histories}
        """int64 [H, 2]: item, time; newest first, later arrivals first among equal times."""
        self.sets = {key: np.zeros((0, 2), dtype=np.int64) for key in layout.sets}
        """int64 [D, 2]: value, time of its newest event; newest first, smaller values first among equals."""
        self.tables = {name: CrossTable(table) for name, table in layout.tables.items()}

    def add_to_history(self, event: str, item: int, time_ms: int) -> bool:
        """Insert an engagement. Returns False and changes nothing if the history has it already: a client's
        retry."""
        is_new, self.histories[event] = kernels().insert_by_time(
            self.histories[event], item, time_ms, self.layout.histories[event]
        )
        return bool(is_new)

    def add_to_set(self, key: tuple[str, str], values: np.ndarray, time_ms: int) -> None:
        """Add an event's values of the set's field; the values seen last are kept."""
        added = np.stack([values, np.full(len(values), time_ms, dtype=np.int64)], axis=1)
        self._add_pairs(key, added)

    def merge(self, other: EntityState) -> None:
        """Add the events of another state of this entity, which is not a user."""
        merge_rows(self.layout.row, self.row_1W, other.row_1W)
        for event, history_H2 in other.histories.items():
            for item, time_ms in history_H2[::-1].tolist():
                self.add_to_history(event, item, time_ms)
        for key, values_D2 in other.sets.items():
            self._add_pairs(key, values_D2)

    def _add_pairs(self, key: tuple[str, str], added_K2: np.ndarray) -> None:
        """Add (value, time) pairs to a set."""
        both = np.concatenate([self.sets[key], added_K2])
        both = both[np.lexsort((-both[:, 1], both[:, 0]))]
        both = both[np.concatenate([[True], both[1:, 0] != both[:-1, 0]])] if len(both) else both
        self.sets[key] = both[np.lexsort((both[:, 0], -both[:, 1]))][: self.layout.sets[key]]

    def to_bytes(self) -> bytes:
        """The bytes that `state_from_bytes` reads."""
        sections = [(_ROW, row_to_bytes(self.layout.row, self.row_1W[0]))]
        sections += [(_history_id(event), history.tobytes()) for event, history in self.histories.items()]
        sections += [(_set_id(key), values.tobytes()) for key, values in self.sets.items()]
        sections += [(_table_id(name), table.to_bytes()) for name, table in self.tables.items()]
        parts = [_HEAD.pack(_VERSION, len(sections))]
        for id_, data in sections:
            parts += [_SECTION.pack(id_, len(data)), data]
        return b"".join(parts)


class CrossTable:
    """A user's rows by key; at most MAX_TABLE_ROWS, those with the newest events."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.keys_P = np.zeros(0, dtype=np.int64)  # sorted
        self.rows_PW = new_rows(layout, 0)

    def find(self, keys_n: np.ndarray) -> np.ndarray:
        """float64 [n, W]: the rows of these keys; a new row for a key that is absent."""
        index_n, found_n = self._search(keys_n)
        rows_nW = new_rows(self.layout, len(keys_n))
        rows_nW[found_n] = self.rows_PW[index_n[found_n]]
        return rows_nW

    def add(self, keys_n: np.ndarray, time_ms: int, event: str, value: float, share: int) -> None:
        """Add one event to the row of each key."""
        layout = self.layout
        self.keys_P, self.rows_PW = kernels().add_to_table(
            self.keys_P,
            self.rows_PW,
            keys_n,
            float(time_ms),
            value,
            float(share),
            layout.takes_W[event],
            layout.op_W,
            layout.param_W,
            layout.initial_W,
        )

    def evict(self) -> None:
        """Keep the MAX_TABLE_ROWS rows with the newest events, smaller keys first among equals."""
        if len(self.keys_P) > MAX_TABLE_ROWS:
            kept = np.sort(np.lexsort((self.keys_P, -self.rows_PW[:, 0]))[:MAX_TABLE_ROWS])
            self.keys_P, self.rows_PW = self.keys_P[kept], self.rows_PW[kept]

    def to_bytes(self) -> bytes:
        head = _TABLE_HEAD.pack(len(self.keys_P), self.layout.width)
        return head + self.layout.id_W.tobytes() + self.keys_P.tobytes() + self.rows_PW.tobytes()

    def read_bytes(self, data: bytes) -> None:
        """Replace the rows by those of `to_bytes`, perhaps of another layout. Raises CheckpointError."""
        if len(data) >= _TABLE_HEAD.size:
            p, w = _TABLE_HEAD.unpack_from(data)
            if len(data) == _TABLE_HEAD.size + 4 * w + 8 * p * (1 + w):
                ids = np.frombuffer(data, dtype="<u4", offset=_TABLE_HEAD.size, count=w)
                numbers = np.frombuffer(data, dtype="<i8", offset=_TABLE_HEAD.size + 4 * w)
                keys_P, numbers_PW = numbers[:p].copy(), numbers[p:].view("<f8").reshape(p, w)
                if np.array_equal(ids, self.layout.id_W):
                    self.keys_P, self.rows_PW = keys_P, numbers_PW.copy()
                else:
                    self.put(keys_P, ids.tolist(), numbers_PW)
                return
        raise _foreign_bytes(data)

    def put(self, keys_P: np.ndarray, ids: list[int], numbers_PV: np.ndarray) -> None:
        """Replace the rows by those of a layout with the columns `ids`."""
        self.keys_P, self.rows_PW = keys_P, new_rows(self.layout, len(keys_P))
        copy_columns(self.layout, self.rows_PW, ids, numbers_PV)

    def _search(self, keys_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n] index of each key, bool [n] whether it is there)."""
        index_n = np.searchsorted(self.keys_P, keys_n)
        found_n = index_n < len(self.keys_P)
        found_n[found_n] = self.keys_P[index_n[found_n]] == keys_n[found_n]
        return index_n, found_n


def state_from_bytes(layout: StateLayout, data: bytes) -> EntityState:
    """Read a state. Parts that the bytes lack are new; parts that the layout lacks are dropped.

    Raises:
        CheckpointError: bytes of another format.
    """
    state = EntityState(layout)
    if data[:1] == b"\x01":
        _read_version_1(state, data)
        return state
    sections = _sections(data)
    if row := sections.get(_ROW):
        state.row_1W = rows_from_bytes(layout.row, [row])
    for event, length in layout.histories.items():
        state.histories[event] = _pairs(sections.get(_history_id(event), b""), data)[:length]
    for key, length in layout.sets.items():
        state.sets[key] = _pairs(sections.get(_set_id(key), b""), data)[:length]
    for name, table in state.tables.items():
        if section := sections.get(_table_id(name)):
            table.read_bytes(section)
    return state


def _foreign_bytes(data: bytes) -> CheckpointError:
    return CheckpointError(
        f"expected an entity's state of version {_VERSION}, got {len(data)} other bytes; delete them"
    )


def _sections(data: bytes) -> dict[int, bytes]:
    if len(data) < _HEAD.size or data[0] != _VERSION:
        raise _foreign_bytes(data)
    _, count = _HEAD.unpack_from(data)
    offset, sections = _HEAD.size, dict[int, bytes]()
    for _ in range(count):
        if offset + _SECTION.size > len(data):
            break
        id_, size = _SECTION.unpack_from(data, offset)
        sections[id_] = data[offset + _SECTION.size : offset + _SECTION.size + size]
        offset += _SECTION.size + size
    if len(sections) != count or offset != len(data):
        raise _foreign_bytes(data)
    return sections


def _pairs(section: bytes, data: bytes) -> np.ndarray:
    if len(section) % 16:
        raise _foreign_bytes(data)
    return np.frombuffer(section, dtype="<i8").reshape(-1, 2).copy()


def _read_version_1(state: EntityState, data: bytes) -> None:
    """A user's state before counters could be declared: time of the last request, clicks, views and clicks by
    item."""
    layout, click = state.layout, state.layout.click
    if len(data) < _OLD_HEAD.size:
        raise _foreign_bytes(data)
    _, last_request_ms, h, p = _OLD_HEAD.unpack_from(data)
    if len(data) != _OLD_HEAD.size + 24 * h + 40 * p:
        raise _foreign_bytes(data)
    body = np.frombuffer(data, dtype="<i8", offset=_OLD_HEAD.size)
    if click in layout.histories:
        state.histories[click] = body[: 3 * h].reshape(h, 3)[: layout.histories[click], [0, 2]].copy()
    shown_ms = _float_ms(np.array([[last_request_ms, last_request_ms]]))
    copy_columns(layout.row, state.row_1W, [REFERENCE.id, Column(NEWEST, SHOWN).id], shown_ms)
    items_P5 = body[3 * h :].reshape(p, 5)
    times_P2 = _float_ms(items_P5[:, 3:])
    if "user,item" in state.tables:
        columns = [
            REFERENCE,
            *(sum_column(e) for e in (SHOWN, click)),
            *(Column(NEWEST, e) for e in (SHOWN, click)),
        ]
        newest_P1 = np.fmax.reduce(times_P2, axis=1, keepdims=True)
        numbers = np.concatenate([newest_P1, items_P5[:, 1:3].astype(np.float64), times_P2], axis=1)
        state.tables["user,item"].put(items_P5[:, 0].copy(), [c.id for c in columns], numbers)


def _float_ms(times: np.ndarray) -> np.ndarray:
    return np.where(times == _OLD_NEVER, np.nan, times.astype(np.float64))


def _history_id(event: str) -> int:
    return table_id(f"history:{event}")


def _set_id(key: tuple[str, str]) -> int:
    return table_id(f"distinct:{key[0]}:{key[1]}")


def _table_id(name: str) -> int:
    return table_id(f"table:{name}")

"""What is kept of an entity of the request (a user, a device at an hour): one row of numbers (event_rows.py), the newest
engagements as a history, sets of the values met last, and, of a user, a bounded table of rows by what was in the lists.

Letters: H entries of a history, D values of a set, P rows of a table, W numbers of a row.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping

import numpy as np

from roostream.errors import CheckpointError
from roostream.online.column_ops import NEWEST, SUM
from roostream.online.event_rows import REFERENCE, Column, RowLayout
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.ids import table_id

MAX_TABLE_ROWS = 512
_ROW = 0
_HEAD, _SECTION, _TABLE_HEAD = struct.Struct("<BI"), struct.Struct("<II"), struct.Struct("<II")
_VERSION = 2
_OLD_HEAD = struct.Struct("<BqII")
_OLD_NEVER = -(1 << 63)
_FOREIGN = "expected an entity's state of version {}, got {} other bytes; delete them"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StateForm:
    """What the state of one entity consists of."""

    layout: RowLayout
    histories: Mapping[str, int]  # action → newest entries kept
    sets: Mapping[tuple[str, str], int]  # (event, field) → values kept
    tables: Mapping[str, RowLayout]  # name of the crossed entity → its rows
    click: str  # the action that version 1 counted


class EntityState:
    """Changed in place; times are event times in ms. Bounded: see `max_bytes`."""

    def __init__(self, form: StateForm) -> None:
        self.form = form
        self.row_1W = form.layout.new(1)
        self.histories = {event: np.zeros((0, 2), dtype=np.int64) for event in form.histories}
        """int64 [H, 2]: item, time; newest first, later arrivals first among equal times."""
        self.sets = {key: np.zeros((0, 2), dtype=np.int64) for key in form.sets}
        """int64 [D, 2]: value, time of its newest event; newest first, smaller values first among equals."""
        self.tables = {name: CrossTable(layout) for name, layout in form.tables.items()}

    def engaged(self, event: str, item: int, time_ms: int) -> bool:
        """Put it into the event's history. False, and nothing changes, if that holds this very one: a client's retry."""
        history_H2 = self.histories[event]
        if ((history_H2[:, 0] == item) & (history_H2[:, 1] == time_ms)).any():
            return False
        at = int((history_H2[:, 1] > time_ms).sum())
        self.histories[event] = np.insert(history_H2, at, (item, time_ms), axis=0)[
            : self.form.histories[event]
        ]
        return True

    def met(self, key: tuple[str, str], values: np.ndarray, time_ms: int) -> None:
        """Values of a set's field in an event; of too many those met last are kept."""
        given = np.stack([values, np.full(len(values), time_ms, dtype=np.int64)], axis=1)
        both = np.concatenate([self.sets[key], given])
        both = both[np.lexsort((-both[:, 1], both[:, 0]))]
        both = both[np.concatenate([[True], both[1:, 0] != both[:-1, 0]])] if len(both) else both
        self.sets[key] = both[np.lexsort((both[:, 0], -both[:, 1]))][: self.form.sets[key]]

    def to_bytes(self) -> bytes:
        """What `state_from_bytes` reads."""
        sections = [(_ROW, self.form.layout.to_bytes(self.row_1W[0]))]
        sections += [(_history_id(event), history.tobytes()) for event, history in self.histories.items()]
        sections += [(_set_id(key), values.tobytes()) for key, values in self.sets.items()]
        sections += [(_table_id(name), table.to_bytes()) for name, table in self.tables.items()]
        parts = [_HEAD.pack(_VERSION, len(sections))]
        for id_, data in sections:
            parts += [_SECTION.pack(id_, len(data)), data]
        return b"".join(parts)


class CrossTable:
    """Rows of what an entity met in lists, by key; at most MAX_TABLE_ROWS, those with the newest events."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.keys_P = np.zeros(0, dtype=np.int64)  # sorted
        self.rows_PW = layout.new(0)

    def find(self, keys_n: np.ndarray) -> np.ndarray:
        """float64 [n, W]: the rows of these keys, new ones of those that aren't there."""
        at_n, found_n = self._places(keys_n)
        out = self.layout.new(len(keys_n))
        out[found_n] = self.rows_PW[at_n[found_n]]
        return out

    def add(self, keys_n: np.ndarray, time_ms: int, event: str, value: float, share: int) -> None:
        """One event of each key."""
        _, found_n = self._places(keys_n)
        if not found_n.all():
            more = np.unique(keys_n[~found_n])
            keys = np.concatenate([self.keys_P, more])
            order = np.argsort(keys)
            self.keys_P = keys[order]
            self.rows_PW = np.concatenate([self.rows_PW, self.layout.new(len(more))])[order]
        at_n = np.searchsorted(self.keys_P, keys_n)
        self.layout.add(self.rows_PW, at_n, time_ms, event, value, share)
        self.bound()

    def bound(self) -> None:
        """Of too many rows keep those with the newest events, smaller keys first among equals."""
        if len(self.keys_P) > MAX_TABLE_ROWS:
            kept = np.sort(np.lexsort((self.keys_P, -self.rows_PW[:, 0]))[:MAX_TABLE_ROWS])
            self.keys_P, self.rows_PW = self.keys_P[kept], self.rows_PW[kept]

    def to_bytes(self) -> bytes:
        head = _TABLE_HEAD.pack(len(self.keys_P), len(self.layout.columns))
        return head + self.layout.ids_W.tobytes() + self.keys_P.tobytes() + self.rows_PW.tobytes()

    def take(self, data: bytes) -> None:
        """Read what `to_bytes` gave, perhaps with another layout. Raises CheckpointError."""
        if len(data) >= _TABLE_HEAD.size:
            p, w = _TABLE_HEAD.unpack_from(data)
            if len(data) == _TABLE_HEAD.size + 4 * w + 8 * p * (1 + w):
                ids = np.frombuffer(data, dtype="<u4", offset=_TABLE_HEAD.size, count=w).tolist()
                numbers = np.frombuffer(data, dtype="<i8", offset=_TABLE_HEAD.size + 4 * w)
                self.put(numbers[:p].copy(), ids, numbers[p:].view("<f8").reshape(p, w))
                return
        raise CheckpointError(_FOREIGN.format(_VERSION, len(data)))

    def put(self, keys_P: np.ndarray, ids: list[int], numbers_PV: np.ndarray) -> None:
        """These rows in place of those in hand; keys sorted."""
        self.keys_P, self.rows_PW = keys_P, self.layout.new(len(keys_P))
        self.layout.arrange(self.rows_PW, ids, numbers_PV)

    def _places(self, keys_n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at_n = np.searchsorted(self.keys_P, keys_n)
        found_n = at_n < len(self.keys_P)
        found_n[found_n] = self.keys_P[at_n[found_n]] == keys_n[found_n]
        return at_n, found_n


def state_from_bytes(form: StateForm, data: bytes) -> EntityState:
    """What it lacks is new, what it alone has is gone.

    Raises:
        CheckpointError: bytes of another form.
    """
    state = EntityState(form)
    if data[:1] == b"\x01":
        _take_version_1(state, data)
        return state
    sections = _sections(data)
    if row := sections.get(_ROW):
        state.row_1W = form.layout.from_bytes([row])
    for event, most in form.histories.items():
        state.histories[event] = _pairs(sections.get(_history_id(event), b""), len(data))[:most]
    for key, most in form.sets.items():
        state.sets[key] = _pairs(sections.get(_set_id(key), b""), len(data))[:most]
    for name, table in state.tables.items():
        if held := sections.get(_table_id(name)):
            table.take(held)
    return state


def max_bytes(form: StateForm) -> int:
    """The longest that an entity's state can be."""
    row = 3 + 12 * len(form.layout.columns)
    lists = 16 * (sum(form.histories.values()) + sum(form.sets.values()))
    tables = sum(
        8 + 4 * len(t.columns) + 8 * MAX_TABLE_ROWS * (1 + len(t.columns)) for t in form.tables.values()
    )
    num_sections = 1 + len(form.histories) + len(form.sets) + len(form.tables)
    return _HEAD.size + _SECTION.size * num_sections + row + lists + tables


def _sections(data: bytes) -> dict[int, bytes]:
    if len(data) < _HEAD.size or data[0] != _VERSION:
        raise CheckpointError(_FOREIGN.format(_VERSION, len(data)))
    _, count = _HEAD.unpack_from(data)
    at, found = _HEAD.size, dict[int, bytes]()
    for _ in range(count):
        if at + _SECTION.size > len(data):
            break
        id_, size = _SECTION.unpack_from(data, at)
        found[id_] = data[at + _SECTION.size : at + _SECTION.size + size]
        at += _SECTION.size + size
    if len(found) != count or at != len(data):
        raise CheckpointError(_FOREIGN.format(_VERSION, len(data)))
    return found


def _pairs(data: bytes, of: int) -> np.ndarray:
    if len(data) % 16:
        raise CheckpointError(_FOREIGN.format(_VERSION, of))
    return np.frombuffer(data, dtype="<i8").reshape(-1, 2).copy()


def _take_version_1(state: EntityState, data: bytes) -> None:
    """A user of before counters could be declared: the time of the last request, clicks, and views and clicks by item."""
    click, form = state.form.click, state.form
    if len(data) < _OLD_HEAD.size:
        raise CheckpointError(_FOREIGN.format(_VERSION, len(data)))
    _, last_request_ms, h, p = _OLD_HEAD.unpack_from(data)
    if len(data) != _OLD_HEAD.size + 24 * h + 40 * p:
        raise CheckpointError(_FOREIGN.format(_VERSION, len(data)))
    body = np.frombuffer(data, dtype="<i8", offset=_OLD_HEAD.size)
    if click in form.histories:
        state.histories[click] = body[: 3 * h].reshape(h, 3)[: form.histories[click], [0, 2]].copy()
    seen_ms = _float_ms(np.array([[last_request_ms, last_request_ms]]))
    form.layout.arrange(state.row_1W, [REFERENCE.id, Column(NEWEST, SHOWN).id], seen_ms)
    items_P5 = body[3 * h :].reshape(p, 5)
    times_P2 = _float_ms(items_P5[:, 3:])
    if "user,item" in state.tables:
        columns = [
            REFERENCE,
            *(Column(SUM, e, math.inf) for e in (SHOWN, click)),
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

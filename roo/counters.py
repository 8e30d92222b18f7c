"""Online features: what is known of the user and of the items at the time of a request, from the events before it.

`Counters` is a store in memory. A replay keeps one for the whole log; the feature updater fills one with the states that a
batch of events touches, applies the events and writes the states back; serving fills one with a request's states and reads.
So all three compute with the same code, and equal events give equal bytes. Names: docs/protocols.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roo.block import main_key
from roo.columns import Side
from roo.counter_state import (
    CLICK,
    HALF_LIVES,
    NEVER,
    VIEW,
    User,
    add_event,
    item_bytes,
    items_from_bytes,
    new_items,
    read_items,
    user_from_bytes,
)
from roo.ids import hash64, signed
from roo.schema import Schema

OF_THE_REQUEST = ("hour_of_day", "num_candidates", "position", "item_id")
"""Online features that need no state: `of_request` computes them."""
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000


def sources_of(schema: Schema, side: Side) -> dict[str, str]:
    """Feature → the online feature that fills it where it is missing; an ids feature named `item` of a candidate is filled
    with the candidate's own id unless the schema says otherwise."""
    own = {f.name: "item_id" for f in schema.nro if side == "nro" and f.kind == "ids" and f.name == "item"}
    return own | {f.name: f.online for f in getattr(schema, side) if f.online}


def of_request(item_ids: np.ndarray, time_ms: int, first_position: int = 0) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """(RO, NRO) of OF_THE_REQUEST by name, for int64 [n] item ids whose first place is `first_position`."""
    n = len(item_ids)
    ro: dict[str, object] = {"hour_of_day": time_ms % _DAY_MS / _HOUR_MS, "num_candidates": float(n)}
    return ro, {"position": np.arange(first_position, first_position + n, dtype=np.float32), "item_id": item_ids}


class Counters:
    """Ids may be given as uint64 or int64. Not thread-safe. Users are bounded (history, items), their number is not."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._click_action = signed(hash64(schema.online.click))
        self._history_feature = next((f for f in schema.ro if f.online == "history"), None)
        self._row_of: dict[int, int] = {}
        self._item_I = new_items(64)
        self._users: dict[int, User] = {}

    def apply_impression(self, user_id: int, item_ids: Sequence[int] | np.ndarray, time_ms: int) -> None:
        """The items were shown to the user (0 = unknown: only the items count it); an item given twice counts once."""
        item_n = np.unique(as_int64(item_ids))
        self._add(item_n, VIEW, time_ms)
        if user_id:
            self._user(user_id).view(item_n, time_ms)

    def apply_engagement(self, user_id: int, item_id: int, action: str, value: float, time_ms: int) -> None:
        """Counts the schema's click action; others change nothing. The same click (user, item, time) again
        is a client's retry, as far as the user's history reaches; of user 0, who has none, each one counts."""
        if action != self.schema.online.click:
            return
        item = signed(item_id)
        if user_id and not self._user(user_id).click(item, self._click_action, time_ms, self.schema.online.history_len):
            return
        self._add(np.array([item], dtype=np.int64), CLICK, time_ms)

    def read(
        self, user_id: int, item_ids: Sequence[int] | np.ndarray, time_ms: int
    ) -> tuple[dict[str, object], dict[str, np.ndarray]]:
        """(RO, NRO) features that need state, by online name, as a request at `time_ms` has them: RO as `encode_ro` takes
        them, absent = missing; NRO f4[n], NaN = missing. Reading changes nothing."""
        item_n = as_int64(item_ids)
        user = self._users.get(signed(user_id)) if user_id else None
        ro = self._read_user(user or User(), time_ms) if user_id else {}
        return ro, self._read_items(item_n, time_ms) | _read_pairs(user or User(), item_n, time_ms)

    def load_items(self, item_ids: Sequence[int] | np.ndarray, values: Sequence[bytes | None]) -> None:
        """Take over stored states, replacing any in hand; None = not stored. CheckpointError for foreign bytes."""
        states_nS = items_from_bytes(values)
        rows = self._rows(as_int64(item_ids))
        self._item_I[rows] = states_nS

    def load_user(self, user_id: int, value: bytes | None) -> None:
        """As `load_items`, of one user."""
        if value is None:
            self._users.pop(signed(user_id), None)
        else:
            self._users[signed(user_id)] = user_from_bytes(value)

    def dump_items(self, item_ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """States to store."""
        rows = self._rows(as_int64(item_ids))
        return [item_bytes(self._item_I, row) for row in rows.tolist()]

    def dump_user(self, user_id: int) -> bytes | None:
        """State to store; None if nothing is known of the user."""
        user = self._users.get(signed(user_id))
        return None if user is None else user.to_bytes()

    def _user(self, user_id: int) -> User:
        return self._users.setdefault(signed(user_id), User())

    def _add(self, item_n: np.ndarray, kind: int, time_ms: int) -> None:
        rows = self._rows(item_n)
        add_event(self._item_I, rows, float(time_ms), kind)

    def _rows(self, item_n: np.ndarray) -> np.ndarray:
        """int64 [n]: each item's row of `_item_I`, which is replaced when it has to grow for new ones."""
        row_of = self._row_of
        rows = np.array([row_of.setdefault(i, len(row_of)) for i in item_n.tolist()], dtype=np.int64)
        if len(row_of) > len(self._item_I):
            more = max(len(row_of), 2 * len(self._item_I)) - len(self._item_I)
            self._item_I = np.concatenate([self._item_I, new_items(more)])
        return rows

    def _read_items(self, item_n: np.ndarray, time_ms: int) -> dict[str, np.ndarray]:
        """The items' own features, f4[n] each; one that was never seen has those of a new item."""
        rows = np.array([self._row_of.get(i, -1) for i in item_n.tolist()], dtype=np.int64)
        states_nS = self._item_I[rows]
        states_nS[rows < 0] = new_items(1)
        out_n13 = np.zeros((len(item_n), 13), dtype=np.float32)
        read_items(states_nS, float(time_ms), out_n13)
        views, clicks = out_n13[:, :4], out_n13[:, 4:8]
        ctr = (clicks + np.float32(0.1)) / (views + np.float32(1))
        names = (f"{what}_{life}" for what in ("views", "clicks", "expected", "ctr") for life in HALF_LIVES)
        columns = np.ascontiguousarray(np.concatenate([out_n13[:, :12], ctr], axis=1).T)
        return dict(zip(names, columns, strict=True)) | {"age_s": out_n13[:, 12].copy()}

    def _read_user(self, user: User, time_ms: int) -> dict[str, object]:
        out: dict[str, object] = {"history": self._history(user), "history_len": float(len(user.history_H3))}
        if user.last_request_ms != NEVER:
            out["gap_s"] = max(time_ms - user.last_request_ms, 0) / 1000
        return out

    def _history(self, user: User) -> object:
        """As the schema's feature with `online = "history"` holds it; all columns if there is none."""
        item, action, time = (column.tolist() for column in user.history_H3.T)
        if self._history_feature is None:
            return {"ids": item, "action": action, "time": time}
        if self._history_feature.kind == "ids":
            return item
        columns = {"action": action, "time": time}
        return {main_key(self._history_feature): item} | {c: columns[c] for c in self._history_feature.columns}


def _read_pairs(user: User, item_n: np.ndarray, time_ms: int) -> dict[str, np.ndarray]:
    _, views, clicks, view_ms, click_ms = user.pairs(item_n).T
    return {
        "user_views": views.astype(np.float32),
        "user_clicks": clicks.astype(np.float32),
        "user_view_age_s": _age_s(view_ms, time_ms),
        "user_click_age_s": _age_s(click_ms, time_ms),
        "in_last_list": ((view_ms == user.last_request_ms) & (view_ms != NEVER)).astype(np.float32),
    }


def _age_s(then_ms: np.ndarray, time_ms: int) -> np.ndarray:
    known = then_ms != NEVER
    age_ms = np.maximum(time_ms - np.where(known, then_ms, 0), 0)
    return np.where(known, age_ms / 1000, np.nan).astype(np.float32)


def as_int64(item_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """uint64 or int64 ids, any Python integers among them, as int64 [n]."""
    if isinstance(item_ids, np.ndarray):
        return item_ids.astype(np.int64, copy=False)
    return np.array([signed(i) for i in item_ids], dtype=np.int64)


def warm() -> None:
    """Compile the kernels into numba's cache."""
    counters = Counters(Schema())
    counters.apply_impression(1, [1], 0)
    counters.read(1, [1], 0)

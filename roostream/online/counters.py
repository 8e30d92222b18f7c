"""Online features: counters of users, items and other entities, updated by events and read by requests.

`Counters` is a store in memory. A replay keeps one for the whole log. The feature updater loads the states
that a batch of events changes, applies the events and stores the states. Serving reads the stored states of a
request with a `StateReader`. All three run the same code, and equal events give equal bytes. docs/schema.md,
"Counters", describes what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from roostream.online.entity_fields import (
    NO_FIELDS,
    REMEMBERED_MS,
    EntityFields,
    ShownFields,
    key_of,
    keys_of,
    remembered_by_side,
    shown_from_bytes,
    time_fields,
)
from roostream.online.entity_state import EntityState, state_from_bytes
from roostream.online.event_rows import add_event, merge_rows, new_rows, row_to_bytes, rows_from_bytes
from roostream.online.read_counters import EntityStates, OnlineValues, read_all
from roostream.online.seen_events import SEEN_MS, EventId, SeenEvents, seen_from_bytes
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.counter_plan import ITEM, USER, Entity, plan_of
from roostream.schema.ids import as_int64, signed
from roostream.schema.row_layout import RowLayout
from roostream.schema.schema import Schema
from roostream.wire.block import Side

STATELESS_FEATURES = ("hour_of_day", "num_candidates", "user_id", "position", "item_id")
"""Online features that need no state; `stateless_features` computes them."""
_OWN_IDS: dict[Side, dict[str, str]] = {"ro": {"user": "user_id"}, "nro": {"item": "item_id"}}
LISTS = "list"
"""The name in `Keys` of the fields that are remembered of a shown list."""
SEEN = "seen"
"""The name in `Keys` of the events that were counted (seen_events.py)."""
Keys: TypeAlias = dict[str, np.ndarray]
"""Name of an entity → int64 [k], the keys of its states."""
_MAX_REMEMBERED_LISTS = 200_000
_MIN_SEEN_KEYS = 4096
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000


def sources_of(schema: Schema, side: Side) -> dict[str, str]:
    """Feature → the online feature that fills it where it is missing.

    An ids feature named `item` of candidates is filled with the candidate's id, and one named `user` of
    requests with the user's, unless the schema names another source.
    """
    features, own = getattr(schema, side), _OWN_IDS[side]
    ids = {f.name: own[f.name] for f in features if f.kind == "ids" and f.name in own}
    return ids | {f.name: f.online for f in features if f.online}


def stateless_features(
    user_id: int, item_ids: np.ndarray, time_ms: int, first_position: int = 0
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """(RO, NRO) values of STATELESS_FEATURES, for int64 [n] item ids at positions from `first_position`
    on. User 0 is unknown: then there is no `user_id`."""
    n = len(item_ids)
    ro: dict[str, object] = {"hour_of_day": time_ms % _DAY_MS / _HOUR_MS, "num_candidates": float(n)}
    if user_id:
        ro["user_id"] = [user_id]
    return ro, {
        "position": np.arange(first_position, first_position + n, dtype=np.float32),
        "item_id": item_ids,
    }


def with_online(
    side: Side, sources: Mapping[str, str], given: Mapping[str, Any], online: Mapping[str, Any]
) -> dict[str, Any]:
    """The given values of a side, with missing ones filled from `online`, of a column of candidates only in
    the rows that lack a value. `sources`: from `sources_of`."""
    out = dict(given)
    for name, source in sources.items():
        fresh = online.get(source)
        if out.get(name) is None:
            out[name] = fresh
        elif side == "nro" and fresh is not None and some_missing(out[name]):
            out[name] = _filled(out[name], fresh)
    return out


def some_missing(column: Any) -> bool:
    """Whether a row of this column of candidates has no value: None or NaN."""
    if isinstance(column, np.ndarray):
        return bool(np.isnan(column).any())
    has_floats = len(column) > 0 and isinstance(column[0], float)  # lists of ids have no NaN
    return None in column or (has_floats and any(map(math.isnan, column)))


def _filled(column: Any, fresh: Any) -> Any:
    if isinstance(column, np.ndarray):
        return np.where(np.isnan(column), fresh, column)
    return [f if _is_missing(v) else v for v, f in zip(column, fresh, strict=True)]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


class Counters:
    """Ids may be uint64 or int64. Not thread-safe. The size of a state is bounded, the number of states is
    not. The fields of the newest 200,000 shown lists are remembered, and the events of the last hour (of
    event time) that were counted."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.plan = schema, schema.derived(plan_of)
        self._rows = {name: RowsByKey(layout) for name, layout in self.plan.row_layouts.items()}
        self._states: dict[str, dict[int, EntityState]] = {name: {} for name in self.plan.state_layouts}
        self._lists: dict[int, ShownFields] = {}
        self._seen: dict[int, SeenEvents] = {}
        self._max_seen = _MIN_SEEN_KEYS  # keys in memory before the old ones are removed

    def apply_impression(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
        event_id: EventId | None = None,
    ) -> None:
        """Count items that were shown to a user; user 0 is unknown and not counted. An item that occurs twice
        counts once. For an entity of the request the whole list is one event. A list whose `event_id` was
        counted before is ignored; None = it is counted."""
        self.remember(item_ids, time_ms, fields)
        if self._is_repeated(event_id, time_ms):
            return
        item_n, first_n = np.unique(as_int64(item_ids), return_index=True)
        ids = _ids(user_id, item_n, time_ms, self._complete(fields), first_n)
        for entity in self.plan.entities:
            if SHOWN in entity.events:
                self._count(entity, ids, len(item_n), time_ms, SHOWN, 0.0)

    def apply_engagement(
        self,
        user_id: int,
        item_id: int,
        action: str,
        value: float,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
        event_id: EventId | None = None,
    ) -> None:
        """Count an action that a counter names; others are ignored.

        An engagement whose `event_id` was counted before is ignored; None = it has none. A repeated (user,
        item, time) is ignored too, as far back as the user's history reaches.
        """
        if action not in self.plan.actions or self._is_repeated(event_id, time_ms):
            return
        item = signed(item_id)
        if user_id and not self._state(USER, signed(user_id)).add_to_history(action, item, time_ms):
            return
        ids = self._ids_of_engagement(user_id, item, time_ms, fields)
        for entity in self.plan.entities:
            if action in entity.events:
                self._count(entity, ids, 1, time_ms, action, value)

    def remember(self, item_ids: Sequence[int] | np.ndarray, time_ms: int, fields: EntityFields) -> None:
        """Store the fields of a shown list that its engagements will count by; known fields stay as they are.
        A request id that is used again after REMEMBERED_MS names another list."""
        if not fields.list_id:
            return
        ro, nro = remembered_by_side(self.plan, self.schema)
        item_n = as_int64(item_ids)
        candidate = {name: fields.candidate[name] for name in nro}
        known = self._lists.get(fields.list_id)
        if known is None or time_ms - known.time_ms > REMEMBERED_MS:
            self._lists.pop(fields.list_id, None)
            self._lists[fields.list_id] = ShownFields(
                time_ms, {name: fields.request.get(name, 0) for name in ro}, item_n, candidate
            )
            while len(self._lists) > _MAX_REMEMBERED_LISTS:
                del self._lists[next(iter(self._lists))]
        else:
            if fields.has_ro and not any(known.request.values()):
                known.request = {name: fields.request.get(name, 0) for name in ro}
            known.add(item_n, candidate, self.schema.limits.max_candidates)

    def read(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> OnlineValues:
        """(RO, NRO) online features that need state, by name, for a request at `time_ms`. RO values are those
        that `encode_ro` takes, absent = missing; NRO values are float32 [n], NaN = missing. Reading changes
        nothing."""
        item_n = as_int64(item_ids)
        ids = _ids(user_id, item_n, time_ms, self._complete(fields))
        rows: dict[str, np.ndarray] = {}
        unknown: dict[str, np.ndarray] = {}
        states: dict[str, EntityState | None] = {}
        for entity in self.plan.entities:
            if not entity.of_candidate:
                states[entity.name] = self._find_state(entity, ids)
                continue
            keys_n, known_n = _keys(entity, ids, len(item_n))
            if entity.is_crossed_with_user:
                user = self._states[USER].get(signed(user_id)) if user_id else None
                user = user or EntityState(self.plan.state_layouts[USER])
                rows[entity.name] = user.tables[entity.name].find(keys_n)
            else:
                rows[entity.name] = self._rows[entity.name].find(keys_n)
            if known_n is not None and not (entity.is_crossed_with_user and not user_id):
                unknown[entity.name] = ~known_n
        return read_all(self.schema, EntityStates(rows, unknown, states), time_ms)

    def impression_keys(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> Keys:
        """Keys of the states that an impression changes. Call `remember` first."""
        item_n = as_int64(item_ids)
        ids = _ids(user_id, item_n, time_ms, self._complete(fields))
        return self._keys_by_entity(ids, len(item_n), SHOWN) | self.list_keys(fields)

    def engagement_keys(
        self, user_id: int, item_id: int, action: str, time_ms: int, fields: EntityFields = NO_FIELDS
    ) -> Keys:
        """Keys of the states that an engagement changes. The fields of its list must be loaded first
        (`list_keys`)."""
        if action not in self.plan.actions:
            return {}
        return self._keys_by_entity(
            self._ids_of_engagement(user_id, signed(item_id), time_ms, fields), 1, action
        )

    def seen_keys(self, event_id: EventId | None) -> Keys:
        """The key of the events that were counted, which applying an event changes too."""
        return {SEEN: np.array([event_id.key], dtype=np.int64)} if event_id else {}

    def list_keys(self, fields: EntityFields) -> Keys:
        return {LISTS: np.array([fields.list_id], dtype=np.int64)} if fields.list_id else {}

    def load(self, keys: Keys, values: Sequence[bytes | None]) -> None:
        """Load stored states over the present ones: one value for each key, in order; None = not stored.

        Raises:
            CheckpointError: bytes of another format.
        """
        for name, values_k in _by_entity(keys, values):
            if name in self._rows:
                self._rows[name].put(keys[name], rows_from_bytes(self.plan.row_layouts[name], values_k))
                continue
            for key, value in zip(keys[name].tolist(), values_k, strict=True):
                self._load_one(name, key, value)

    def dump(self, keys: Mapping[str, np.ndarray]) -> list[bytes | None]:
        """The states to store, one for each key, in order; None if there is none."""
        out: list[bytes | None] = []
        for name, keys_k in keys.items():
            if name in self._rows:
                layout = self.plan.row_layouts[name]
                out += [row_to_bytes(layout, row_W) for row_W in self._rows[name].find(keys_k)]
                continue
            stored: Mapping[int, EntityState | ShownFields | SeenEvents]
            if name == LISTS:
                stored = self._lists
            else:
                stored = self._seen if name == SEEN else self._states[name]
            states = [stored.get(key) for key in keys_k.tolist()]
            out += [None if state is None else state.to_bytes() for state in states]
        return out

    def put_rows(self, name: str, keys_k: np.ndarray, rows_k: np.ndarray) -> None:
        """Replace the states of an entity of the candidate."""
        self._rows[name].put(keys_k, rows_k)

    def put_state(self, name: str, key: int, state: EntityState) -> None:
        """Replace the state of an entity of the request."""
        self._states[name][key] = state

    def _load_one(self, name: str, key: int, value: bytes | None) -> None:
        if name == LISTS:
            shown = None if value is None else shown_from_bytes(self.plan, self.schema, value)
            if shown is None:
                self._lists.pop(key, None)
            else:
                self._lists[key] = shown
        elif name == SEEN:
            if value is None:
                self._seen.pop(key, None)
            else:
                self._seen[key] = seen_from_bytes(value)
        elif value is None:
            self._states[name].pop(key, None)
        else:
            self._states[name][key] = state_from_bytes(self.plan.state_layouts[name], value)

    def _is_repeated(self, event_id: EventId | None, time_ms: int) -> bool:
        """Whether the event was counted before; if not, it is remembered."""
        if event_id is None:
            return False
        seen = self._seen.get(event_id.key)
        if seen is None:
            if len(self._seen) >= self._max_seen:
                self._forget_seen(time_ms)
            seen = self._seen[event_id.key] = SeenEvents()
        return not seen.add(event_id.id, time_ms)

    def _forget_seen(self, time_ms: int) -> None:
        """Remove the keys without events that a repetition at `time_ms` or later could match."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen.newest_ms > time_ms - SEEN_MS}
        self._max_seen = max(_MIN_SEEN_KEYS, 2 * len(self._seen))

    def _complete(self, fields: EntityFields) -> EntityFields:
        """Fields of a page; a later page without request features takes those of the first page."""
        known = None if fields.has_ro else self._lists.get(fields.list_id)
        return fields if known is None else fields._replace(request={**fields.request, **known.request})

    def _ids_of_engagement(
        self, user_id: int, item: int, time_ms: int, fields: EntityFields
    ) -> dict[str, Any]:
        ids = _ids(user_id, np.array([item], dtype=np.int64), time_ms, fields)
        if (shown := self._lists.get(fields.list_id)) is not None:
            request, candidate = shown.fields_at(item, time_ms)
            ids |= request | {name: np.array([id_], dtype=np.int64) for name, id_ in candidate.items()}
        return ids

    def _count(
        self, entity: Entity, ids: Mapping[str, Any], num_rows: int, time_ms: int, event: str, value: float
    ) -> None:
        """Count one event of an entity of the request, or one of each candidate."""
        if not entity.of_candidate:
            key = _key(entity, ids)
            if key is not None:
                self._count_request(entity, key, ids, time_ms, event, value)
            return
        keys_n, known_n = _keys(entity, ids, num_rows)
        keys_n = keys_n if known_n is None else keys_n[known_n]
        if not len(keys_n):
            return
        if entity.is_crossed_with_user:
            table = self._state(USER, ids[USER]).tables[entity.name]
            if event in table.layout.takes_W:
                table.add(keys_n, time_ms, event, value, num_rows)
        elif event in self._rows[entity.name].layout.takes_W:
            self._rows[entity.name].add(keys_n, time_ms, event, value, num_rows)

    def _count_request(
        self, entity: Entity, key: int, ids: Mapping[str, Any], time_ms: int, event: str, value: float
    ) -> None:
        state = self._state(entity.name, key)
        if event in state.layout.row.takes_W:
            first = np.zeros(1, dtype=np.int64)
            add_event(state.layout.row, state.row_1W, first, time_ms, event, value)
        if event in state.layout.histories and entity.name != USER:
            state.add_to_history(event, int(ids[ITEM][0]), time_ms)
        for set_key in state.layout.sets:
            if set_key[0] == event:
                values = np.atleast_1d(np.asarray(ids.get(set_key[1], 0), dtype=np.int64))
                state.add_to_set(set_key, values if set_key[1] == ITEM else values[values != 0], time_ms)

    def _state(self, name: str, key: int) -> EntityState:
        states = self._states[name]
        if key not in states:
            states[key] = EntityState(self.plan.state_layouts[name])
        return states[key]

    def _find_state(self, entity: Entity, ids: Mapping[str, Any]) -> EntityState | None:
        """The state, or a new one; None if a field is unknown."""
        key = _key(entity, ids)
        if key is None:
            return None
        return self._states[entity.name].get(key) or EntityState(self.plan.state_layouts[entity.name])

    def _keys_by_entity(self, ids: Mapping[str, Any], num_rows: int, event: str) -> Keys:
        """Keys of the states that an event changes. The user's state has its crosses and every action."""
        by_entity: Keys = {}
        for entity in self.plan.entities:
            if event not in entity.events and entity.name != USER:
                continue
            if not entity.of_candidate:
                key = _key(entity, ids)
                by_entity[entity.name] = np.array([] if key is None else [key], dtype=np.int64)
            elif not entity.is_crossed_with_user:
                keys_n, known_n = _keys(entity, ids, num_rows)
                by_entity[entity.name] = keys_n if known_n is None else keys_n[known_n]
        return by_entity


class StateKeys(NamedTuple):
    """The keys of the states that a request reads, and of the rows in the user's state."""

    stored: Keys
    in_user: Keys  # of the entities that are crossed with the user; one key for each candidate
    unknown: Mapping[str, np.ndarray]  # bool [n], candidates with an unknown field; absent = none
    time_ms: int


class StateReader:
    """Reads the online features of requests from stored states. The values are those of `Counters.read` after
    `load`. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.plan = schema, schema.derived(plan_of)

    def keys(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> StateKeys:
        """The keys of a request at `time_ms`."""
        item_n = as_int64(item_ids)
        ids = _ids(user_id, item_n, time_ms, fields)
        keys = StateKeys({}, {}, unknown := {}, time_ms)
        for entity in self.plan.entities:
            if not entity.of_candidate:
                key = _key(entity, ids)
                keys.stored[entity.name] = np.array([] if key is None else [key], dtype=np.int64)
                continue
            keys_n, known_n = _keys(entity, ids, len(item_n))
            if entity.is_crossed_with_user:
                keys.in_user[entity.name] = keys_n
            else:
                keys.stored[entity.name] = keys_n if known_n is None else keys_n[known_n]
            if known_n is not None and (user_id or not entity.is_crossed_with_user):
                unknown[entity.name] = ~known_n
        return keys

    def read(self, keys: StateKeys, states: Sequence[Sequence[bytes | None]]) -> OnlineValues:
        """(RO, NRO) online features, as `Counters.read` returns them.

        `states`: those of `keys.stored`, one for each key, in order; None = not stored. After them, for each
        further updater, those of `shared_keys`, which are merged: counts are then those of one updater with
        all events, decayed sums but for rounding.

        Raises:
            CheckpointError: bytes of another format.
        """
        rows: dict[str, np.ndarray] = {}
        state_of: dict[str, EntityState | None] = {}
        for name, values in _by_entity(keys.stored, states[0]):
            if name in self.plan.row_layouts:
                rows[name] = rows_from_bytes(self.plan.row_layouts[name], values)
            else:
                state_of[name] = self._state(name, values[0]) if values else None
        for of_updater in states[1:]:
            for name, values in _by_entity(shared_keys(keys.stored), of_updater):
                if name in rows:
                    layout = self.plan.row_layouts[name]
                    merge_rows(layout, rows[name], rows_from_bytes(layout, values))
                elif (state := state_of[name]) is not None and values[0] is not None:
                    state.merge(self._state(name, values[0]))
        for name, unknown_n in keys.unknown.items():
            if name in rows:
                known_rows, rows[name] = rows[name], new_rows(self.plan.row_layouts[name], len(unknown_n))
                rows[name][~unknown_n] = known_rows
        user = state_of[USER] or self._state(USER, None)
        rows |= {name: user.tables[name].find(keys_n) for name, keys_n in keys.in_user.items()}
        return read_all(self.schema, EntityStates(rows, keys.unknown, state_of), keys.time_ms)

    def _state(self, name: str, value: bytes | None) -> EntityState:
        layout = self.plan.state_layouts[name]
        return EntityState(layout) if value is None else state_from_bytes(layout, value)


class RowsByKey:
    """The rows of one entity of the candidate."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._row_of: dict[int, int] = {}
        self._rows_I = new_rows(layout, 64)

    def find(self, keys_n: np.ndarray) -> np.ndarray:
        """The counters of each key, float64 [n, W] with W numbers a key. A key without events has those of a
        new row."""
        index_n = np.array([self._row_of.get(key, -1) for key in keys_n.tolist()], dtype=np.int64)
        rows_n: np.ndarray = self._rows_I[index_n]
        rows_n[index_n < 0] = new_rows(self.layout, 1)
        return rows_n

    def add(self, keys_n: np.ndarray, time_ms: int, event: str, value: float, num_items: int) -> None:
        index_n = self._indices(keys_n)
        add_event(self.layout, self._rows_I, index_n, time_ms, event, value, num_items)

    def put(self, keys_n: np.ndarray, rows_n: np.ndarray) -> None:
        index_n = self._indices(keys_n)
        self._rows_I[index_n] = rows_n

    def _indices(self, keys_n: np.ndarray) -> np.ndarray:
        """int64 [n]: the row of each key in `_rows_I`, which grows for new keys."""
        row_of = self._row_of
        index_n = np.array([row_of.setdefault(key, len(row_of)) for key in keys_n.tolist()], dtype=np.int64)
        if len(row_of) > len(self._rows_I):
            more = max(len(row_of), 2 * len(self._rows_I)) - len(self._rows_I)
            self._rows_I = np.concatenate([self._rows_I, new_rows(self.layout, more)])
        return index_n


def _by_entity(keys: Keys, values: Sequence[bytes | None]) -> Iterator[tuple[str, Sequence[bytes | None]]]:
    """The values of each entity's keys."""
    start = 0
    for name, keys_k in keys.items():
        yield name, values[start : start + len(keys_k)]
        start += len(keys_k)


def _ids(
    user_id: int,
    item_n: np.ndarray,
    time_ms: int,
    fields: EntityFields,
    index_n: np.ndarray | None = None,
) -> dict[str, Any]:
    """Field → int of the request, or int64 [n] of the candidates (those at `index_n`)."""
    ids: dict[str, Any] = {**time_fields(time_ms), **fields.request, USER: signed(user_id), ITEM: item_n}
    return ids | {
        name: ids_n if index_n is None else ids_n[index_n] for name, ids_n in fields.candidate.items()
    }


def _key(entity: Entity, ids: Mapping[str, Any]) -> int | None:
    """The key of an entity of the request; None if a field is unknown."""
    values = [ids.get(field, 0) for field in entity.of_request]
    return key_of(values) if all(values) else None


def _keys(entity: Entity, ids: Mapping[str, Any], num_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(int64 [n] keys, bool [n] which are known or None = all). Keys of a user's table leave out the user."""
    fields = [*entity.of_request, *entity.of_candidate]
    is_crossed = entity.is_crossed_with_user
    values = [ids.get(field, 0) for field in fields if not (field == USER and is_crossed)]
    keys_n = keys_of(values, num_rows)
    if fields == [ITEM]:
        return keys_n, None
    if fields == [USER, ITEM]:
        return keys_n, None if ids[USER] else np.zeros(num_rows, dtype=np.bool_)
    known_n = np.ones(num_rows, dtype=np.bool_)
    for field in fields:
        if field != ITEM:
            known_n &= np.asarray(ids.get(field, 0)) != 0
    return keys_n, known_n


def shared_keys(keys: Keys) -> Keys:
    """The keys whose events are in several partitions. All events of a user, of a request or of the ids of
    counted events have one Kafka key, so they are in one partition."""
    return {
        name: keys_k
        for name, keys_k in keys.items()
        if name not in (LISTS, SEEN) and USER not in name.split(",")
    }


def merge_keys(parts: Iterable[Keys]) -> Keys:
    """Each key once, in order."""
    by_entity: dict[str, list[np.ndarray]] = {}
    for keys in parts:
        for name, keys_k in keys.items():
            by_entity.setdefault(name, []).append(keys_k)
    return {name: np.unique(np.concatenate(arrays)) for name, arrays in by_entity.items()}


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    counters = Counters(Schema())
    counters.apply_impression(1, [1], 0)
    counters.apply_engagement(1, 1, counters.schema.online.click, 1.0, 0)
    counters.read(1, [1], 0)

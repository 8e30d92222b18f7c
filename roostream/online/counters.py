"""Online features: what is known of the user, the items and other entities at the time of a request, from the events before it.

`Counters` is a store in memory. A replay keeps one for the whole log; the feature updater fills one with the states that a
batch of events touches, applies the events and writes the states back; serving fills one with a request's states and reads.
So all three compute with the same code, and equal events give equal bytes. What is counted: docs/schema.md, "Counters".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from roostream.online.counter_plan import ITEM, USER, Entity, plan_of
from roostream.online.entity_fields import (
    NO_FIELDS,
    EntityFields,
    ShownFields,
    key_of,
    keys_of,
    remembered_by_side,
    shown_from_bytes,
    time_fields,
)
from roostream.online.entity_state import EntityState, state_from_bytes
from roostream.online.event_rows import RowLayout
from roostream.online.read_counters import EntityStates, OnlineValues, read_all
from roostream.schema.counter_declaration import SHOWN
from roostream.schema.ids import signed
from roostream.schema.schema import Schema
from roostream.wire.columns import Side

OF_THE_REQUEST = ("hour_of_day", "num_candidates", "position", "item_id")
"""Online features that need no state: `of_request` computes them."""
LISTS = "list"
"""What `Keys` call the fields that are remembered of a request."""
Keys: TypeAlias = dict[str, np.ndarray]
"""Entity's name → int64 [k] keys of its states."""
_MAX_LISTS = 200_000
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000


def sources_of(schema: Schema, side: Side) -> dict[str, str]:
    """Feature → the online feature that fills it where it is missing; an ids feature named `item` of a candidate is filled
    with the candidate's own id unless the schema says otherwise."""
    own = {f.name: "item_id" for f in schema.nro if side == "nro" and f.kind == "ids" and f.name == "item"}
    return own | {f.name: f.online for f in getattr(schema, side) if f.online}


def of_request(
    item_ids: np.ndarray, time_ms: int, first_position: int = 0
) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """(RO, NRO) of OF_THE_REQUEST by name, for int64 [n] item ids whose first place is `first_position`."""
    n = len(item_ids)
    ro: dict[str, object] = {"hour_of_day": time_ms % _DAY_MS / _HOUR_MS, "num_candidates": float(n)}
    return ro, {
        "position": np.arange(first_position, first_position + n, dtype=np.float32),
        "item_id": item_ids,
    }


class Counters:
    """Ids may be given as uint64 or int64. Not thread-safe. Every state is bounded, how many there are is not; of lists the
    fields of the newest 200,000 are remembered."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.plan = schema, schema.derived(plan_of)
        self._rows = {name: RowsByKey(layout) for name, layout in self.plan.rows.items()}
        self._states: dict[str, dict[int, EntityState]] = {name: {} for name in self.plan.forms}
        self._lists: dict[int, ShownFields] = {}

    def apply_impression(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> None:
        """The items were shown to the user (0 = unknown: the user doesn't count it); an item given twice counts once. Of an
        entity of the request a list is one event."""
        self.remember(item_ids, time_ms, fields)
        item_n, first_n = np.unique(as_int64(item_ids), return_index=True)
        ids = self._ids(user_id, item_n, time_ms, self._of_page(fields), first_n)
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
    ) -> None:
        """Counts the actions that a counter names; others change nothing. The same action (user, item, time) again is a client's
        retry, as far as the user's history reaches; of user 0, who has none, each one counts."""
        if action not in self.plan.actions:
            return
        item = signed(item_id)
        if user_id and not self._state(USER, signed(user_id)).engaged(action, item, time_ms):
            return
        ids = self._ids_of_engagement(user_id, item, time_ms, fields)
        for entity in self.plan.entities:
            if action in entity.events:
                self._count(entity, ids, 1, time_ms, action, value)

    def remember(self, item_ids: Sequence[int] | np.ndarray, time_ms: int, fields: EntityFields) -> None:
        """The fields of a list that engagements will count by; a list that is known keeps what is known."""
        if not fields.list_id:
            return
        ro, nro = remembered_by_side(self.plan, self.schema)
        item_n = as_int64(item_ids)
        candidate = {name: fields.candidate[name] for name in nro}
        known = self._lists.get(fields.list_id)
        if known is None:
            self._lists[fields.list_id] = ShownFields(
                time_ms, {name: fields.request.get(name, 0) for name in ro}, item_n, candidate
            )
            while len(self._lists) > _MAX_LISTS:
                del self._lists[next(iter(self._lists))]
        else:
            if fields.has_ro and not any(known.request.values()):
                known.request = {name: fields.request.get(name, 0) for name in ro}
            known.add(item_n, candidate)

    def read(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> OnlineValues:
        """(RO, NRO) features that need state, by online name, as a request at `time_ms` has them: RO as `encode_ro` takes
        them, absent = missing; NRO f4[n], NaN = missing. Reading changes nothing."""
        item_n = as_int64(item_ids)
        ids = self._ids(user_id, item_n, time_ms, self._of_page(fields), None)
        blocks: dict[str, np.ndarray] = {}
        unknown: dict[str, np.ndarray] = {}
        states: dict[str, EntityState | None] = {}
        for entity in self.plan.entities:
            if not entity.of_candidate:
                states[entity.name] = self._found(entity, ids)
                continue
            keys_n, known_n = _keys(entity, ids, len(item_n))
            if entity.is_crossed_with_user:
                user = self._states[USER].get(signed(user_id)) if user_id else None
                own = user or EntityState(self.plan.forms[USER])
                blocks[entity.name] = own.tables[entity.name].find(keys_n)
            else:
                blocks[entity.name] = self._rows[entity.name].find(keys_n)
            if known_n is not None and not (entity.is_crossed_with_user and not user_id):
                unknown[entity.name] = ~known_n
        return read_all(self.schema, EntityStates(blocks, unknown, states), time_ms)

    def keys(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
        event: str = "",
    ) -> Keys:
        """What a request reads; with `event = SHOWN`, what its impression changes. `remember` the list before."""
        item_n = as_int64(item_ids)
        ids = self._ids(user_id, item_n, time_ms, self._of_page(fields), None)
        return self._keys_by_entity(ids, len(item_n), event) | (self.list_keys(fields) if event else {})

    def engagement_keys(
        self, user_id: int, item_id: int, action: str, time_ms: int, fields: EntityFields = NO_FIELDS
    ) -> Keys:
        """What an engagement changes; the fields of its list have to be there (`list_keys`)."""
        if action not in self.plan.actions:
            return {}
        return self._keys_by_entity(
            self._ids_of_engagement(user_id, signed(item_id), time_ms, fields), 1, action
        )

    def list_keys(self, fields: EntityFields) -> Keys:
        return {LISTS: np.array([fields.list_id], dtype=np.int64)} if fields.list_id else {}

    def load(self, keys: Mapping[str, np.ndarray], values: Sequence[bytes | None]) -> None:
        """Take over stored states, replacing those in hand; a value a key, in order; None = not stored.

        Raises:
            CheckpointError: foreign bytes.
        """
        at = 0
        for name, keys_k in keys.items():
            its, at = values[at : at + len(keys_k)], at + len(keys_k)
            if name in self._rows:
                self._rows[name].put(keys_k, self.plan.rows[name].from_bytes(its))
                continue
            for key, value in zip(keys_k.tolist(), its, strict=True):
                self._load_one(name, key, value)

    def dump(self, keys: Mapping[str, np.ndarray]) -> list[bytes | None]:
        """States to store, one a key, in order; None if nothing is known."""
        out: list[bytes | None] = []
        for name, keys_k in keys.items():
            if name in self._rows:
                out += [self.plan.rows[name].to_bytes(row_W) for row_W in self._rows[name].find(keys_k)]
                continue
            held: Mapping[int, EntityState | ShownFields] = (
                self._lists if name == LISTS else self._states[name]
            )
            out += [None if (state := held.get(key)) is None else state.to_bytes() for key in keys_k.tolist()]
        return out

    def put_rows(self, name: str, keys_k: np.ndarray, rows_k: np.ndarray) -> None:
        """States of an entity of the candidate, replacing those in hand."""
        self._rows[name].put(keys_k, rows_k)

    def put_state(self, name: str, key: int, state: EntityState) -> None:
        """The state of an entity of the request, replacing the one in hand."""
        self._states[name][key] = state

    def _load_one(self, name: str, key: int, value: bytes | None) -> None:
        if name == LISTS:
            shown = None if value is None else shown_from_bytes(self.plan, self.schema, value)
            if shown is None:
                self._lists.pop(key, None)
            else:
                self._lists[key] = shown
        elif value is None:
            self._states[name].pop(key, None)
        else:
            self._states[name][key] = state_from_bytes(self.plan.forms[name], value)

    def _of_page(self, fields: EntityFields) -> EntityFields:
        """Of a page without features of the request: those of its first page."""
        known = None if fields.has_ro else self._lists.get(fields.list_id)
        return fields if known is None else fields._replace(request={**fields.request, **known.request})

    def _ids(
        self, user_id: int, item_n: np.ndarray, time_ms: int, fields: EntityFields, at_n: np.ndarray | None
    ) -> dict[str, Any]:
        """Field → int, or int64 [n] of the candidates (those at `at_n`)."""
        ids: dict[str, Any] = {**time_fields(time_ms), **fields.request, USER: signed(user_id), ITEM: item_n}
        return ids | {
            name: ids_n if at_n is None else ids_n[at_n] for name, ids_n in fields.candidate.items()
        }

    def _ids_of_engagement(
        self, user_id: int, item: int, time_ms: int, fields: EntityFields
    ) -> dict[str, Any]:
        ids = self._ids(user_id, np.array([item], dtype=np.int64), time_ms, fields, None)
        if (shown := self._lists.get(fields.list_id)) is not None:
            request, candidate = shown.fields_at(item, time_ms)
            ids |= request | {name: np.array([id_], dtype=np.int64) for name, id_ in candidate.items()}
        return ids

    def _count(
        self, entity: Entity, ids: Mapping[str, Any], num_rows: int, time_ms: int, event: str, value: float
    ) -> None:
        """One event of an entity of the request, or one of each candidate."""
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
            if event in table.layout.events:
                table.add(keys_n, time_ms, event, value, num_rows)
        elif event in self._rows[entity.name].layout.events:
            self._rows[entity.name].add(keys_n, time_ms, event, value, num_rows)

    def _count_request(
        self, entity: Entity, key: int, ids: Mapping[str, Any], time_ms: int, event: str, value: float
    ) -> None:
        state = self._state(entity.name, key)
        if event in state.form.layout.events:
            state.form.layout.add(state.row_1W, np.zeros(1, dtype=np.int64), time_ms, event, value)
        if event in state.form.histories and entity.name != USER:
            state.engaged(event, int(ids[ITEM][0]), time_ms)
        for set_key in state.form.sets:
            if set_key[0] == event:
                values = np.atleast_1d(np.asarray(ids.get(set_key[1], 0), dtype=np.int64))
                state.met(set_key, values if set_key[1] == ITEM else values[values != 0], time_ms)

    def _state(self, name: str, key: int) -> EntityState:
        states = self._states[name]
        if key not in states:
            states[key] = EntityState(self.plan.forms[name])
        return states[key]

    def _found(self, entity: Entity, ids: Mapping[str, Any]) -> EntityState | None:
        """None: a field is unknown. Nothing known of it is a new one."""
        key = _key(entity, ids)
        if key is None:
            return None
        return self._states[entity.name].get(key) or EntityState(self.plan.forms[entity.name])

    def _keys_by_entity(self, ids: Mapping[str, Any], num_rows: int, event: str) -> Keys:
        """Of what the event changes ("" = of all); a user's state holds what is crossed with it, and every action."""
        found: Keys = {}
        for entity in self.plan.entities:
            if event and event not in entity.events and entity.name != USER:
                continue
            if not entity.of_candidate:
                key = _key(entity, ids)
                found[entity.name] = np.array([] if key is None else [key], dtype=np.int64)
            elif not entity.is_crossed_with_user:
                keys_n, known_n = _keys(entity, ids, num_rows)
                found[entity.name] = keys_n if known_n is None else keys_n[known_n]
        return found


class RowsByKey:
    """The rows of an entity of the candidate."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._row_of: dict[int, int] = {}
        self._rows_I = layout.new(64)

    def find(self, keys_n: np.ndarray) -> np.ndarray:
        """float64 [n, W]; one that was never seen is new."""
        at_n = np.array([self._row_of.get(key, -1) for key in keys_n.tolist()], dtype=np.int64)
        rows_n: np.ndarray = self._rows_I[at_n]
        rows_n[at_n < 0] = self.layout.new(1)
        return rows_n

    def add(self, keys_n: np.ndarray, time_ms: int, event: str, value: float, share: int) -> None:
        at_n = self._places(keys_n)
        self.layout.add(self._rows_I, at_n, time_ms, event, value, share)

    def put(self, keys_n: np.ndarray, rows_n: np.ndarray) -> None:
        at_n = self._places(keys_n)
        self._rows_I[at_n] = rows_n

    def _places(self, keys_n: np.ndarray) -> np.ndarray:
        """int64 [n]: each key's row of `_rows_I`, which is replaced when it has to grow for new ones."""
        row_of = self._row_of
        at_n = np.array([row_of.setdefault(key, len(row_of)) for key in keys_n.tolist()], dtype=np.int64)
        if len(row_of) > len(self._rows_I):
            more = max(len(row_of), 2 * len(self._rows_I)) - len(self._rows_I)
            self._rows_I = np.concatenate([self._rows_I, self.layout.new(more)])
        return at_n


def _key(entity: Entity, ids: Mapping[str, Any]) -> int | None:
    """Of an entity of the request; None where a field is unknown."""
    its = [ids.get(field, 0) for field in entity.of_request]
    return key_of(its) if all(its) else None


def _keys(entity: Entity, ids: Mapping[str, Any], num_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(int64 [n], which are known; None = all). In a user's table, of the fields beside the user."""
    fields = [*entity.of_request, *entity.of_candidate]
    its = [ids.get(field, 0) for field in fields if not (field == USER and entity.is_crossed_with_user)]
    keys_n = keys_of(its, num_rows)
    if fields == [ITEM]:
        return keys_n, None
    if fields == [USER, ITEM]:
        return keys_n, None if ids[USER] else np.zeros(num_rows, dtype=np.bool_)
    known_n = np.ones(num_rows, dtype=np.bool_)
    for field in fields:
        if field != ITEM:
            known_n &= np.asarray(ids.get(field, 0)) != 0
    return keys_n, known_n


def merged(parts: Iterable[Keys]) -> Keys:
    """Each key once, in order."""
    found: dict[str, list[np.ndarray]] = {}
    for keys in parts:
        for name, keys_k in keys.items():
            found.setdefault(name, []).append(keys_k)
    return {name: np.unique(np.concatenate(arrays)) for name, arrays in found.items()}


def as_int64(item_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """uint64 or int64 ids, any Python integers among them, as int64 [n]."""
    if isinstance(item_ids, np.ndarray):
        return item_ids.astype(np.int64, copy=False)
    return np.array([signed(i) for i in item_ids], dtype=np.int64)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    counters = Counters(Schema())
    counters.apply_impression(1, [1], 0)
    counters.read(1, [1], 0)

"""Clicks from before the log into counters that are empty, in bulk: the same states as one `apply_engagement` each.

One difference: of a user with more rows than are kept (MAX_TABLE_ROWS), those clicked last are kept with all their clicks,
while event by event a row that was dropped in between starts anew. Nothing is known of these clicks but user, item and time:
entities of other fields don't count them.

Letters: N clicks, K clicks of an entity, I entities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roostream.online.counter_plan import ITEM, USER, Entity
from roostream.online.counters import Counters
from roostream.online.entity_fields import keys_of
from roostream.online.entity_state import EntityState
from roostream.online.event_rows import RowLayout

_KNOWN = {USER, ITEM, "hour", "weekday"}
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_VALUE = 1.0


def seed(counters: Counters, users_N: np.ndarray, items_N: np.ndarray, times_N: np.ndarray) -> None:
    """int64 [N] each, times in ms and not falling. Replaces what the counters know of these entities. The same click
    of a user twice counts once."""
    order_N = np.lexsort((np.arange(len(users_N)), times_N, items_N, users_N))
    clicks_N3 = np.stack([users_N, items_N, times_N], axis=1)[order_N]
    again_N = np.zeros(len(order_N), dtype=np.bool_)
    again_N[1:] = (clicks_N3[1:] == clicks_N3[:-1]).all(axis=1)
    kept_N = np.sort(order_N[~again_N])
    ids = _ids(users_N[kept_N], items_N[kept_N], times_N[kept_N])
    click = counters.schema.online.click
    for entity in counters.plan.entities:
        fields = {*entity.of_request, *entity.of_candidate}
        if (
            fields <= _KNOWN
            and not entity.is_crossed_with_user
            and (click in entity.events or entity.name == USER)
        ):
            if entity.of_candidate:
                _seed_rows(counters, entity, ids)
            else:
                _seed_states(counters, entity, ids)


def _ids(users_N: np.ndarray, items_N: np.ndarray, times_N: np.ndarray) -> dict[str, np.ndarray]:
    hours_N, weekdays_N = times_N % _DAY_MS // _HOUR_MS + 1, (times_N // _DAY_MS + 3) % 7 + 1
    return {USER: users_N, ITEM: items_N, "hour": hours_N, "weekday": weekdays_N, "time_ms": times_N}


def _seed_rows(counters: Counters, entity: Entity, ids: dict[str, np.ndarray]) -> None:
    layout, times_N = counters.plan.rows[entity.name], ids["time_ms"]
    keys_N = keys_of([ids[f] for f in (*entity.of_request, *entity.of_candidate)], len(times_N))
    counters.put_rows(entity.name, *_rows(counters, layout, keys_N, times_N))


def _rows(
    counters: Counters, layout: RowLayout, keys_N: np.ndarray, times_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(keys, sorted, and their rows)."""
    keys_I, index_N = np.unique(keys_N, return_inverse=True)
    rows_I = layout.new(len(keys_I))
    if counters.schema.online.click in layout.events:
        layout.add_each(rows_I, index_N, times_N, counters.schema.online.click, _VALUE)
    return keys_I, rows_I


def _seed_states(counters: Counters, entity: Entity, ids: dict[str, np.ndarray]) -> None:
    known_N = np.logical_and.reduce([ids[f] != 0 for f in entity.of_request])
    its = {name: ids_N[known_N] for name, ids_N in ids.items()}
    keys_N = keys_of([its[f] for f in entity.of_request], int(known_N.sum()))
    by_key_N = np.argsort(keys_N, kind="stable")
    keys_I, starts = np.unique(keys_N[by_key_N], return_index=True)
    for key, at_K in zip(keys_I.tolist(), np.split(by_key_N, starts[1:]), strict=True):
        counters.put_state(
            entity.name, key, _state(counters, entity, {name: ids_N[at_K] for name, ids_N in its.items()})
        )


def _state(counters: Counters, entity: Entity, its: dict[str, Any]) -> EntityState:
    """The state of an entity with these clicks, in time order, and no other events."""
    state, click = EntityState(counters.plan.forms[entity.name]), counters.schema.online.click
    times_K = its["time_ms"]
    if click in state.form.layout.events:
        state.form.layout.add_each(
            state.row_1W, np.zeros(len(times_K), dtype=np.int64), times_K, click, _VALUE
        )
    if click in state.form.histories:
        history = np.stack([its[ITEM], times_K], axis=1)[::-1][: state.form.histories[click]]
        state.histories[click] = np.ascontiguousarray(history)
    for key in state.form.sets:
        if key[0] == click and key[1] in _KNOWN:
            for value, time_ms in zip(its[key[1]].tolist(), times_K.tolist(), strict=True):
                state.met(key, np.array([value] if value or key[1] == ITEM else [], dtype=np.int64), time_ms)
    for crossed in counters.plan.crossed if entity.name == USER else ():
        fields = [f for f in (*crossed.of_request, *crossed.of_candidate) if f != USER]
        table = state.tables[crossed.name]
        if {*fields} <= _KNOWN and click in table.layout.events:
            keys_K = keys_of([its[f] for f in fields], len(times_K))
            table.keys_P, table.rows_PW = _rows(counters, table.layout, keys_K, times_K)
            table.bound()
    return state

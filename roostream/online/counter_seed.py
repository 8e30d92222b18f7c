"""Loads clicks from before a log into empty counters, in bulk, with the states that single `apply_engagement`
calls give.

There is one difference. If a user has more rows than are kept (MAX_TABLE_ROWS), the rows clicked last are
kept with all their clicks; event by event, a row that was evicted in between starts again. A click has only
user, item and time, so entities with other fields do not count it.

Letters: N clicks, K clicks of an entity, I entities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from roostream.online.counters import Counters
from roostream.online.entity_fields import keys_of
from roostream.online.entity_state import EntityState
from roostream.online.event_rows import add_events, new_rows
from roostream.schema.counter_plan import ITEM, USER, Entity
from roostream.schema.row_layout import RowLayout

_KNOWN = {USER, ITEM, "hour", "weekday"}
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_VALUE = 1.0


def seed(counters: Counters, users_N: np.ndarray, items_N: np.ndarray, times_N: np.ndarray) -> None:
    """Replace the states of these clicks' entities: int64 [N] each, times in ms, not decreasing. A repeated
    click counts once."""
    order_N = np.lexsort((np.arange(len(users_N)), times_N, items_N, users_N))
    clicks_N3 = np.stack([users_N, items_N, times_N], axis=1)[order_N]
    repeated_N = np.zeros(len(order_N), dtype=np.bool_)
    repeated_N[1:] = (clicks_N3[1:] == clicks_N3[:-1]).all(axis=1)
    kept_N = np.sort(order_N[~repeated_N])
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
    layout, times_N = counters.plan.row_layouts[entity.name], ids["time_ms"]
    keys_N = keys_of([ids[f] for f in (*entity.of_request, *entity.of_candidate)], len(times_N))
    counters.put_rows(entity.name, *_rows(counters, layout, keys_N, times_N))


def _rows(
    counters: Counters, layout: RowLayout, keys_N: np.ndarray, times_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The keys, sorted, and their rows."""
    keys_I, index_N = np.unique(keys_N, return_inverse=True)
    rows_I = new_rows(layout, len(keys_I))
    if counters.schema.online.click in layout.takes_W:
        add_events(layout, rows_I, index_N, times_N, counters.schema.online.click, _VALUE)
    return keys_I, rows_I


def _seed_states(counters: Counters, entity: Entity, ids: dict[str, np.ndarray]) -> None:
    known_N = np.logical_and.reduce([ids[f] != 0 for f in entity.of_request])
    known = {name: ids_N[known_N] for name, ids_N in ids.items()}
    keys_N = keys_of([known[f] for f in entity.of_request], int(known_N.sum()))
    by_key_N = np.argsort(keys_N, kind="stable")
    keys_I, starts = np.unique(keys_N[by_key_N], return_index=True)
    for key, index_K in zip(keys_I.tolist(), np.split(by_key_N, starts[1:]), strict=True):
        counters.put_state(
            entity.name,
            key,
            _state(counters, entity, {name: ids_N[index_K] for name, ids_N in known.items()}),
        )


def _state(counters: Counters, entity: Entity, clicks: dict[str, Any]) -> EntityState:
    """The state of an entity whose only events are these clicks, in time order."""
    state, click = EntityState(counters.plan.state_layouts[entity.name]), counters.schema.online.click
    times_K = clicks["time_ms"]
    if click in state.layout.row.takes_W:
        first_K = np.zeros(len(times_K), dtype=np.int64)
        add_events(state.layout.row, state.row_1W, first_K, times_K, click, _VALUE)
    if click in state.layout.histories:
        history = np.stack([clicks[ITEM], times_K], axis=1)[::-1][: state.layout.histories[click]]
        state.histories[click] = np.ascontiguousarray(history)
    for key in state.layout.sets:
        if key[0] == click and key[1] in _KNOWN:
            for value, time_ms in zip(clicks[key[1]].tolist(), times_K.tolist(), strict=True):
                values = [value] if value or key[1] == ITEM else []
                state.add_to_set(key, np.array(values, dtype=np.int64), time_ms)
    for crossed in counters.plan.crossed_with_user if entity.name == USER else ():
        fields = [f for f in (*crossed.of_request, *crossed.of_candidate) if f != USER]
        table = state.tables[crossed.name]
        if {*fields} <= _KNOWN and click in table.layout.takes_W:
            keys_K = keys_of([clicks[f] for f in fields], len(times_K))
            table.keys_P, table.rows_PW = _rows(counters, table.layout, keys_K, times_K)
            table.evict()
    return state

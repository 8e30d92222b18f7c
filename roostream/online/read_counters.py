"""Computes the online features of a request from the states of its entities.

Letters: n candidates, W numbers of an entity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from roostream.online.entity_state import EntityState
from roostream.online.event_rows import read_rows
from roostream.schema.counter_plan import USER, CounterReading, plan_of
from roostream.schema.ids import hash64, signed
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import main_key

OnlineValues: TypeAlias = tuple[dict[str, object], dict[str, np.ndarray]]
"""(RO, NRO) by online name: RO as `encode_ro` takes them, absent = missing; NRO float32 [n], NaN =
missing."""
_PRIOR, _PRIOR_VIEWS, _DECLARED_PRIOR_VIEWS = 0.1, 1.0, 10.0


class EntityStates(NamedTuple):
    """The states that a request's online features are read from, by entity."""

    rows: Mapping[str, np.ndarray]  # float64 [n, W], entities of the candidate
    unknown: Mapping[str, np.ndarray]  # bool [n], candidates with an unknown field
    of_request: Mapping[str, EntityState | None]  # None = a field is unknown


def read_all(schema: Schema, entities: EntityStates, time_ms: int) -> OnlineValues:
    """All online features of the counters. If a field of an entity is unknown, its values are missing."""
    plan, states = schema.derived(plan_of), entities.of_request
    layouts = {**plan.row_layouts, **plan.state_layouts[USER].tables}
    columns = {name: read_rows(layouts[name], rows_n, time_ms) for name, rows_n in entities.rows.items()}
    numbers = {
        name: read_rows(state.layout.row, state.row_1W, time_ms)
        for name, state in states.items()
        if state is not None
    }
    ro: dict[str, object] = {}
    nro: dict[str, np.ndarray] = {}
    for reading in plan.readings:
        name, entity = reading.counter.name, reading.entity.name
        if reading.side == "nro":
            if reading.counter.aggregation == "in_last_list":
                newest_ms_n = entities.rows[entity][:, reading.columns[0]]
                nro[name] = _in_last_list(newest_ms_n, states[USER], reading.user_column)
            else:
                nro[name] = _number(reading, columns[entity])
            if entity in entities.unknown:
                nro[name] = np.where(entities.unknown[entity], np.float32(np.nan), nro[name])
        elif (state := states[entity]) is not None:
            value = _request_value(schema, reading, state, numbers[entity], time_ms)
            if value is not None:
                ro[name] = value
    return ro, nro


def _number(reading: CounterReading, columns_Wn: np.ndarray) -> np.ndarray:
    """float32 [n]: a counter's value, or its rate, smoothed towards a prior. `columns_Wn`: of `read_rows`."""
    value_n = columns_Wn[reading.columns[0]]
    if reading.counter.aggregation != "rate":
        return value_n
    prior, views = reading.counter.prior, _DECLARED_PRIOR_VIEWS
    if not prior:
        prior, views = _PRIOR, _PRIOR_VIEWS
    added = np.float32(prior * views)
    rate_n: np.ndarray = (value_n + added) / (columns_Wn[reading.columns[1]] + np.float32(views))
    return rate_n


def _in_last_list(newest_ms_n: np.ndarray, user: EntityState | None, user_column: int) -> np.ndarray:
    """float32 [n]: 1 for items of the last list that the user was shown; 0 for an unknown user."""
    last_ms = np.nan if user is None else user.row_1W[0, user_column]
    is_in_n: np.ndarray = (newest_ms_n == last_ms).astype(np.float32)
    return is_in_n


def _request_value(
    schema: Schema, reading: CounterReading, state: EntityState, columns_W1: np.ndarray, time_ms: int
) -> object:
    """The value of a request feature; None = missing."""
    counter, event = reading.counter, reading.event
    if counter.aggregation in ("history", "length"):
        history_H2 = state.histories[event][: counter.length or schema.online.history_len]
        if counter.aggregation == "length":
            return float(len(history_H2))
        feature = next((f for f in schema.ro if f.online == counter.name), None)
        return _history(feature, history_H2, event)
    if counter.aggregation == "distinct":
        newest_ms_D = state.sets[event, counter.of][: counter.num_distinct, 1]
        if not counter.window_ms:
            return float(len(newest_ms_D))
        return float((newest_ms_D > time_ms - counter.window_ms).sum())
    value = float(_number(reading, columns_W1)[0])
    return None if np.isnan(value) else value


def _history(feature: Feature | None, history_H2: np.ndarray, event: str) -> object:
    """A history in the form of the schema's feature with this `online`; all columns if there is none."""
    item, time = (column.tolist() for column in history_H2.T)
    action = [signed(hash64(event))] * len(item)
    if feature is None:
        return {"ids": item, "action": action, "time": time}
    if feature.kind == "ids":
        return item
    columns = {"action": action, "time": time}
    return {main_key(feature): item} | {c: columns[c] for c in feature.columns}

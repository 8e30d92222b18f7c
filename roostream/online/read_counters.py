"""Computes the online features of a request from the states of its entities.

Letters: n candidates, W numbers of an entity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from roostream.online.entity_state import EntityState
from roostream.online.event_rows import read_rows
from roostream.schema.counter_declaration import CounterDeclaration
from roostream.schema.counter_plan import USER, CounterReading, plan_of
from roostream.schema.ids import hash64, signed
from roostream.schema.row_layout import RowLayout
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import main_key

OnlineValues: TypeAlias = tuple[dict[str, object], dict[str, np.ndarray]]
"""(RO, NRO) by online name: RO as `encode_ro` takes them, absent = missing; NRO float32 [n], NaN =
missing."""
_LISTED = ("history", "length", "distinct")
"""Aggregations that are read from the lists of an entity's state, not from its row."""
_PRIOR, _PRIOR_VIEWS, _DECLARED_PRIOR_VIEWS = 0.1, 1.0, 10.0


class EntityStates(NamedTuple):
    """The states that a request's online features are read from, by entity."""

    rows: Mapping[str, np.ndarray]  # float64 [n, W], entities of the candidate
    unknown: Mapping[str, np.ndarray]  # bool [n], candidates with an unknown field
    of_request: Mapping[str, EntityState | None]  # None = a field is unknown


def read_all(schema: Schema, entities: EntityStates, time_ms: int) -> OnlineValues:
    """All online features of the counters. If a field of an entity is unknown, its values are missing."""
    plan, states = schema.derived(_reading_plan), entities.of_request
    ro: dict[str, object] = {}
    nro: dict[str, np.ndarray] = {}
    for name, rows_n in entities.rows.items():
        numbers = plan.numbers[name].read(rows_n, time_ms)
        for reading in plan.in_last_list[name]:
            newest_ms_n = rows_n[:, reading.columns[0]]
            numbers[reading.counter.name] = _in_last_list(newest_ms_n, states[USER], reading.user_column)
        if (unknown_n := entities.unknown.get(name)) is not None:
            numbers = {n: np.where(unknown_n, np.float32(np.nan), value) for n, value in numbers.items()}
        nro |= numbers
    for name, state in states.items():
        if state is not None:
            numbers = plan.numbers[name].read(state.row_1W, time_ms)
            ro |= {n: float(value) for n, (value,) in numbers.items() if value == value}
            for reading in plan.listed[name]:
                ro[reading.counter.name] = _listed_value(schema, reading, state, time_ms)
    return ro, nro


class _Numbers:
    """The readings of an entity that are one number each: a counter's value, or its rate, smoothed towards a
    prior. C rates."""

    def __init__(self, layout: RowLayout, readings: Sequence[CounterReading]) -> None:
        self.layout = layout
        rates = [r for r in readings if r.counter.aggregation == "rate"]
        self.column_of = {r.counter.name: r.columns[0] for r in readings if r not in rates}
        self.rates = [r.counter.name for r in rates]
        columns_C2 = np.array([r.columns for r in rates], dtype=np.int64).reshape(-1, 2)
        self.events_C, self.shown_C = columns_C2[:, 0], columns_C2[:, 1]
        priors = [_prior_and_views(r.counter) for r in rates]
        self.added_C1 = np.array([[prior * views] for prior, views in priors], dtype=np.float32)
        self.views_C1 = np.array([[views] for _, views in priors], dtype=np.float32)

    def read(self, rows_n: np.ndarray, time_ms: int) -> dict[str, np.ndarray]:
        """float32 [n] by online name; `rows_n` is float64 [n, W]."""
        columns_Wn = read_rows(self.layout, rows_n, time_ms)
        numbers = {name: columns_Wn[column] for name, column in self.column_of.items()}
        if self.rates:
            events_Cn, shown_Cn = columns_Wn[self.events_C], columns_Wn[self.shown_C]
            rates_Cn = (events_Cn + self.added_C1) / (shown_Cn + self.views_C1)
            numbers |= zip(self.rates, rates_Cn, strict=True)
        return numbers


class _ReadingPlan(NamedTuple):
    """The readings of a schema by the entity that they read."""

    numbers: dict[str, _Numbers]
    in_last_list: dict[str, list[CounterReading]]
    listed: dict[str, list[CounterReading]]  # those of _LISTED


def _reading_plan(schema: Schema) -> _ReadingPlan:
    plan = schema.derived(plan_of)
    layouts = {**plan.row_layouts, **plan.state_layouts[USER].tables}
    layouts |= {name: layout.row for name, layout in plan.state_layouts.items()}
    out = _ReadingPlan({}, {}, {})
    for name, layout in layouts.items():
        of_entity = [reading for reading in plan.readings if reading.entity.name == name]
        out.in_last_list[name] = [r for r in of_entity if r.counter.aggregation == "in_last_list"]
        out.listed[name] = [r for r in of_entity if r.counter.aggregation in _LISTED]
        numbers = [r for r in of_entity if r not in out.in_last_list[name] + out.listed[name]]
        out.numbers[name] = _Numbers(layout, numbers)
    return out


def _prior_and_views(counter: CounterDeclaration) -> tuple[float, float]:
    """What a rate is smoothed towards, and the number of views that this counts as."""
    return (counter.prior, _DECLARED_PRIOR_VIEWS) if counter.prior else (_PRIOR, _PRIOR_VIEWS)


def _in_last_list(newest_ms_n: np.ndarray, user: EntityState | None, user_column: int) -> np.ndarray:
    """float32 [n]: 1 for items of the last list that the user was shown; 0 for an unknown user."""
    last_ms = np.nan if user is None else user.row_1W[0, user_column]
    is_in_n: np.ndarray = (newest_ms_n == last_ms).astype(np.float32)
    return is_in_n


def _listed_value(schema: Schema, reading: CounterReading, state: EntityState, time_ms: int) -> object:
    """The value of a counter of _LISTED."""
    counter, event = reading.counter, reading.event
    if counter.aggregation == "distinct":
        newest_ms_D = state.sets[event, counter.of][: counter.num_distinct, 1]
        if not counter.window_ms:
            return float(len(newest_ms_D))
        return float((newest_ms_D > time_ms - counter.window_ms).sum())
    history_H2 = state.histories[event][: counter.length or schema.online.history_len]
    if counter.aggregation == "length":
        return float(len(history_H2))
    history_H2 = history_H2[: schema.limits.max_list]  # a longer list would be refused with its request
    feature = next((f for f in schema.ro if f.online == counter.name), None)
    return _history(feature, history_H2, event)


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

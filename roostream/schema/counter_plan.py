"""From the counters of a schema to the state that is kept: entities, the layouts of their states, and their
readings.

An entity with a field of the candidate has one row for each value. If it is crossed with the user, its rows
are stored in the user's state and their number is bounded. An entity of the request alone has a state with
histories and sets. A request of n candidates reads one state per entity of the request and n rows per
entity of the candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from roostream.schema.counter_declaration import SHOWN, CounterDeclaration, built_in
from roostream.schema.row_layout import (
    FIRST,
    NEWEST,
    SHARE,
    VALUE,
    VALUE_MS,
    Column,
    RowLayout,
    StateLayout,
    sum_column,
    window_columns,
)
from roostream.schema.schema import Schema

REQUEST_FIELDS = ("user", "session", "surface", "hour", "weekday")
ITEM, USER = "item", "user"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entity:
    """A field, or a cross of fields."""

    name: str  # its fields, those of the request first
    of_request: tuple[str, ...]
    of_candidate: tuple[str, ...]
    events: frozenset[str]

    @property
    def is_crossed_with_user(self) -> bool:
        return USER in self.of_request and bool(self.of_candidate)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CounterReading:
    """How one online feature is read from a state."""

    counter: CounterDeclaration
    entity: Entity
    event: str
    columns: tuple[int, ...] = ()  # the event's column, and of a rate that of views
    user_column: int = 0  # in_last_list: the column of the user's own row

    @property
    def side(self) -> str:
        return "nro" if self.entity.of_candidate else "ro"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CounterPlan:
    """All state that a schema keeps."""

    entities: tuple[Entity, ...]
    row_layouts: Mapping[str, RowLayout]  # entities of the candidate
    state_layouts: Mapping[str, StateLayout]  # entities of the request; the user's is always present
    readings: tuple[CounterReading, ...]
    actions: frozenset[str]  # engagements that count
    remembered: tuple[str, ...]  # fields of a shown list that its engagements count by

    @property
    def crossed_with_user(self) -> tuple[Entity, ...]:
        return tuple(e for e in self.entities if e.is_crossed_with_user)


def field_sides(schema: Schema) -> dict[str, str]:
    """Field that an entity may be made of → "ro" or "nro"."""
    ids = {side: {f.name: side for f in schema.lists(side) if f.kind == "ids"} for side in ("ro", "nro")}
    return {**ids["ro"], **ids["nro"], **dict.fromkeys(REQUEST_FIELDS, "ro"), ITEM: "nro"}


def declared(schema: Schema) -> dict[str, CounterDeclaration]:
    """Every counter by its name, those of every schema first."""
    return {c.name: c for c in (*built_in(), *schema.counters)}


def online_names(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Side → the counters that `online` of its features may name."""
    sides = field_sides(schema)
    names: dict[str, list[str]] = {"ro": [], "nro": []}
    for counter in declared(schema).values():
        is_nro = any(sides.get(field) == "nro" for field in counter.entity)
        names["nro" if is_nro else "ro"].append(counter.name)
    return {side: tuple(found) for side, found in names.items()}


def plan_of(schema: Schema) -> CounterPlan:
    """The plan of a checked schema; `schema.derived(plan_of)` makes it once."""
    sides, click = field_sides(schema), schema.online.click
    counters = [(c, _entity_name(c, sides)) for c in declared(schema).values()]
    actions = frozenset(c.event or click for c, _ in counters) - {SHOWN}
    entities: dict[str, Entity] = {}
    layouts: dict[str, RowLayout] = {}
    for name in sorted({name for _, name in counters}):
        entity_counters = [c for c, entity in counters if entity == name]
        fields = name.split(",")
        events = {c.event or click for c in entity_counters}
        events |= {SHOWN for c in entity_counters if c.aggregation == "rate"}
        entities[name] = Entity(
            name=name,
            of_request=tuple(f for f in fields if sides[f] == "ro"),
            of_candidate=tuple(f for f in fields if sides[f] == "nro"),
            events=frozenset(events),
        )
        blocks = [block for c in entity_counters for block in _columns(c, c.event or click)]
        layouts[name] = RowLayout(blocks, item_columns_of_version_2(click) if name == ITEM else ())
    crossed = {name: layouts[name] for name, e in entities.items() if e.is_crossed_with_user}
    known = {*REQUEST_FIELDS, ITEM}
    remembered = {f for c, _ in counters if c.event != SHOWN for f in (*c.entity, c.of)} - known
    readings = []
    for c, name in counters:
        event = c.event or click
        columns = tuple(layouts[name].index[block[0]] for block in _columns(c, event))
        user_column = layouts[USER].index[Column(NEWEST, SHOWN)] if c.aggregation == "in_last_list" else 0
        readings.append(
            CounterReading(
                counter=c, entity=entities[name], event=event, columns=columns, user_column=user_column
            )
        )
    return CounterPlan(
        entities=tuple(entities.values()),
        row_layouts={n: layouts[n] for n, e in entities.items() if e.of_candidate and n not in crossed},
        state_layouts={
            name: _state_layout(
                schema,
                layouts[name],
                [c for c, entity in counters if entity == name],
                dict.fromkeys(sorted(actions), schema.online.history_len) if name == USER else {},
                crossed if name == USER else {},
            )
            for name, entity in entities.items()
            if not entity.of_candidate
        },
        readings=tuple(readings),
        actions=actions,
        remembered=tuple(sorted(field for field in remembered if field in sides)),
    )


def _entity_name(counter: CounterDeclaration, sides: Mapping[str, str]) -> str:
    return ",".join(sorted(counter.entity, key=lambda field: (sides[field] == "nro", field != USER, field)))


def _columns(counter: CounterDeclaration, event: str) -> list[tuple[Column, ...]]:
    """The columns that a counter keeps in the row of its entity, in blocks that stay together."""
    aggregation = counter.aggregation
    if aggregation in ("count", "rate"):
        events = [event, SHOWN] if aggregation == "rate" else [event]
        if counter.window_ms:
            return [window_columns(e, counter.window_ms) for e in events]
        return [(sum_column(e, counter.half_life_ms),) for e in events]
    if aggregation == "expected":
        return [(sum_column(event, counter.half_life_ms)._replace(op=SHARE),)]
    if aggregation in ("since", "in_last_list"):
        return [(Column(NEWEST, event),)]
    if aggregation == "age":
        return [(Column(FIRST, event),)]
    return [(Column(VALUE, event), Column(VALUE_MS, event))] if aggregation == "last" else []


def item_columns_of_version_2(click: str) -> list[Column]:
    """The columns of an item's row in the format before counters could be declared."""
    half_lives = sorted({c.half_life_ms for c in built_in() if c.half_life_ms})
    sums = [sum_column(event, half_life) for event in (SHOWN, click) for half_life in half_lives]
    shares = [sum_column(SHOWN, half_life)._replace(op=SHARE) for half_life in half_lives]
    return [Column(0), Column(FIRST, SHOWN), *sums, *shares]


def _state_layout(
    schema: Schema,
    row: RowLayout,
    counters: Sequence[CounterDeclaration],
    histories: Mapping[str, int],
    tables: Mapping[str, RowLayout],
) -> StateLayout:
    """`histories`: the user's state has one of every action that counts, to recognize a client's retry."""
    online, histories = schema.online, dict(histories)
    sets: dict[tuple[str, str], int] = {}
    for c in counters:
        event = c.event or online.click
        if c.aggregation in ("history", "length"):
            histories[event] = max(histories.get(event, 0), c.length or online.history_len)
        elif c.aggregation == "distinct":
            sets[event, c.of] = max(sets.get((event, c.of), 0), c.num_distinct)
    return StateLayout(row=row, histories=histories, sets=sets, tables=tables, click=online.click)

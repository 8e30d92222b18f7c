"""From a schema's counters to what is kept: entities, the form of their states, and what a request reads of them.

An entity with a field of the candidate has a row a value (`rows`), unless it is crossed with the user: then its rows stand in
the user's own state, bounded. An entity of the request alone has a state with histories and sets. So what a request of n
candidates reads is one state an entity of the request, and n rows an entity of the candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from roostream.online.column_ops import FIRST, NEWEST, SHARE
from roostream.online.entity_state import StateForm
from roostream.online.event_rows import Column, RowLayout, total, value, window
from roostream.schema.counter_declaration import SHOWN, CounterDeclaration, built_in
from roostream.schema.schema import Schema

OWN_OF_REQUEST = ("user", "session", "surface", "hour", "weekday")
ITEM, USER = "item", "user"
NUMBERS_OF_ITEM = ("count", "rate", "expected", "age", "since", "last", "in_last_list")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entity:
    """A field or a cross of fields."""

    name: str  # its fields, those of the request first
    of_request: tuple[str, ...]
    of_candidate: tuple[str, ...]
    events: frozenset[str]

    @property
    def is_crossed_with_user(self) -> bool:
        return USER in self.of_request and bool(self.of_candidate)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CounterReading:
    """How one online feature is read."""

    counter: CounterDeclaration
    entity: Entity
    event: str
    at: tuple[int, ...] = ()  # columns: the event's, and of a rate those of views
    user_at: int = 0  # in_last_list: the column of the user's own row

    @property
    def side(self) -> str:
        return "nro" if self.entity.of_candidate else "ro"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CounterPlan:
    """All that a schema keeps."""

    entities: tuple[Entity, ...]
    rows: Mapping[str, RowLayout]  # entities of the candidate
    forms: Mapping[str, StateForm]  # entities of the request; the user's is always there
    readings: tuple[CounterReading, ...]
    actions: frozenset[str]  # engagements that count
    remembered: tuple[str, ...]  # fields that engagements count by, and that only the list shown can tell

    @property
    def crossed(self) -> tuple[Entity, ...]:
        return tuple(e for e in self.entities if e.is_crossed_with_user)


def field_sides(schema: Schema) -> dict[str, str]:
    """Field that an entity may be made of → its side."""
    ids = {side: {f.name: side for f in schema.lists(side) if f.kind == "ids"} for side in ("ro", "nro")}
    return {**ids["ro"], **ids["nro"], **dict.fromkeys(OWN_OF_REQUEST, "ro"), ITEM: "nro"}


def declared(schema: Schema) -> dict[str, CounterDeclaration]:
    """Every counter by its name, those that every schema has first."""
    return {c.name: c for c in (*built_in(), *schema.counters)}


def online_names(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Side → what its features' `online` may name, of counters."""
    sides = field_sides(schema)
    names: dict[str, list[str]] = {"ro": [], "nro": []}
    for counter in declared(schema).values():
        names[_side(counter, sides)].append(counter.name)
    return {side: tuple(found) for side, found in names.items()}


def plan_of(schema: Schema) -> CounterPlan:
    """Of a checked schema."""
    counters = list(declared(schema).values())
    sides = field_sides(schema)
    click = schema.online.click
    names = {_name(c, sides) for c in counters}
    entities = {
        name: _entity(name, [c for c in counters if _name(c, sides) == name], sides, click)
        for name in sorted(names)
    }
    layouts = {name: _layout(entity, counters, sides, click) for name, entity in entities.items()}
    actions = frozenset(c.event or click for c in counters) - {SHOWN}
    forms = {
        name: _form(schema, entity, counters, sides, layouts, actions)
        for name, entity in entities.items()
        if not entity.of_candidate
    }
    return CounterPlan(
        entities=tuple(entities.values()),
        rows={
            name: layouts[name]
            for name, e in entities.items()
            if e.of_candidate and not e.is_crossed_with_user
        },
        forms=forms,
        readings=tuple(_reading(c, entities[_name(c, sides)], layouts, click) for c in counters),
        actions=actions,
        remembered=_remembered(counters, sides),
    )


def _side(counter: CounterDeclaration, sides: Mapping[str, str]) -> str:
    return "nro" if any(sides.get(field) == "nro" for field in counter.entity) else "ro"


def _name(counter: CounterDeclaration, sides: Mapping[str, str]) -> str:
    return ",".join(sorted(counter.entity, key=lambda field: (sides[field] == "nro", field != USER, field)))


def _entity(
    name: str, counters: Sequence[CounterDeclaration], sides: Mapping[str, str], click: str
) -> Entity:
    fields = name.split(",")
    events = {c.event or click for c in counters} | {SHOWN for c in counters if c.aggregation == "rate"}
    return Entity(
        name=name,
        of_request=tuple(f for f in fields if sides[f] == "ro"),
        of_candidate=tuple(f for f in fields if sides[f] == "nro"),
        events=frozenset(events),
    )


def _columns(counter: CounterDeclaration, event: str) -> list[tuple[Column, ...]]:
    """What a counter keeps in its entity's row."""
    how = counter.aggregation
    if how in ("count", "rate"):
        spans = [event, SHOWN] if how == "rate" else [event]
        return [
            window(e, counter.window_ms) if counter.window_ms else total(e, counter.half_life_ms)
            for e in spans
        ]
    if how == "expected":
        return [(total(event, counter.half_life_ms)[0]._replace(op=SHARE),)]
    if how in ("since", "in_last_list"):
        return [(Column(NEWEST, event),)]
    if how == "age":
        return [(Column(FIRST, event),)]
    return [value(event)] if how == "last" else []


def _layout(
    entity: Entity, counters: Iterable[CounterDeclaration], sides: Mapping[str, str], click: str
) -> RowLayout:
    blocks = [
        block for c in counters if _name(c, sides) == entity.name for block in _columns(c, c.event or click)
    ]
    return RowLayout(blocks, old_of_item(click) if entity.name == ITEM else ())


def old_of_item(click: str) -> list[Column]:
    """The columns of an item's state before counters could be declared."""
    lives = sorted({c.half_life_ms for c in built_in() if c.half_life_ms})
    sums = [total(event, life)[0] for event in (SHOWN, click) for life in lives]
    return [
        Column(0),
        Column(FIRST, SHOWN),
        *sums,
        *(total(SHOWN, life)[0]._replace(op=SHARE) for life in lives),
    ]


def _form(
    schema: Schema,
    entity: Entity,
    counters: Sequence[CounterDeclaration],
    sides: Mapping[str, str],
    layouts: Mapping[str, RowLayout],
    actions: Iterable[str],
) -> StateForm:
    """The user's state has a history of every action that counts: it tells a client's retry."""
    online, own = schema.online, [c for c in counters if _name(c, sides) == entity.name]
    histories = (
        dict.fromkeys(sorted(actions), online.history_len) if entity.name == USER else dict[str, int]()
    )
    sets: dict[tuple[str, str], int] = {}
    for c in own:
        event = c.event or online.click
        if c.aggregation in ("history", "length"):
            histories[event] = max(histories.get(event, 0), c.length or online.history_len)
        elif c.aggregation == "distinct":
            sets[event, c.of] = max(sets.get((event, c.of), 0), c.num_distinct)
    crossed = [
        name
        for name in layouts
        if USER in (fields := name.split(",")) and any(sides[f] == "nro" for f in fields)
    ]
    tables = {name: layouts[name] for name in crossed} if entity.name == USER else {}
    return StateForm(
        layout=layouts[entity.name], histories=histories, sets=sets, tables=tables, click=online.click
    )


def _reading(
    counter: CounterDeclaration, entity: Entity, layouts: Mapping[str, RowLayout], click: str
) -> CounterReading:
    event = counter.event or click
    at = tuple(layouts[entity.name].at[block[0]] for block in _columns(counter, event))
    user_at = layouts[USER].at[Column(NEWEST, SHOWN)] if counter.aggregation == "in_last_list" else 0
    return CounterReading(counter=counter, entity=entity, event=event, at=at, user_at=user_at)


def _remembered(counters: Iterable[CounterDeclaration], sides: Mapping[str, str]) -> tuple[str, ...]:
    known = {*OWN_OF_REQUEST, ITEM}
    wanted = {f for c in counters if c.event != SHOWN for f in (*c.entity, c.of)} - known
    return tuple(sorted(field for field in wanted if field in sides))

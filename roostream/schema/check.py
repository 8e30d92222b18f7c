"""Checks that the parts of a schema fit together. Each error names key, value, nearest known name, file and line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from roostream.errors import SchemaError, nearest
from roostream.schema.counter_declaration import MAX_COUNTERS, CounterDeclaration, built_in
from roostream.schema.counter_plan import (
    ITEM,
    REQUEST_FIELDS,
    USER,
    declared,
    field_sides,
    online_names,
    plan_of,
)
from roostream.schema.expand import RowLocations
from roostream.schema.schema import Feature, Schema

MAX_STATE_BYTES = 256 * 1024
"""Largest state that the counters of one entity may have."""
_STATELESS = {"ro": ("num_candidates", "hour_of_day"), "nro": ("position", "item_id")}
_BUILT_IN = online_names(Schema())
ONLINE = {side: (*_BUILT_IN[side], *names) for side, names in _STATELESS.items()}
"""Online features that `online` may name in every schema, by side; roostream/online/counters.py computes them."""

_REQUEST_ONLY = ("history", "length", "distinct")

At: TypeAlias = Callable[..., str]
"""Keys of a row's block → `"file:line: "` of the first one that is set."""


def check(schema: Schema, locations: RowLocations) -> Schema:
    """Check a parsed schema and return it.

    Raises:
        SchemaError: the first error; names file and line.
    """
    _check_counters(schema, locations, tuple(name for names in _STATELESS.values() for name in names))
    names: set[str] = set()
    for side in ("ro", "nro"):
        for row, f in enumerate(getattr(schema, side)):
            at = partial(locations.describe, side, row)
            if f.name in names:
                raise SchemaError(
                    f"{at('name', 'online')}duplicate feature {f.name!r}; give each feature its own name"
                )
            names.add(f.name)
            _check_feature(schema, f, at)
            _check_online(schema, side, f, at)
    _check_tables_and_labels(schema, locations)
    _check_transforms(schema, locations)
    return schema


def _check_tables_and_labels(schema: Schema, locations: RowLocations) -> None:
    """There is a label, label names are unique, and no two tables have the same 32-bit id."""
    names = [label.name for label in schema.labels]
    for row, name in enumerate(names):
        if name in names[:row]:
            raise SchemaError(
                f"{locations.describe('label', row, 'name')}duplicate label {name!r}; give each its own name"
            )
    if not schema.labels:
        raise SchemaError(
            f"{locations.location.describe()}expected at least one [[label]], got none; without one nothing can be trained"
        )
    ids: dict[int, str] = {}
    for t in schema.tables:
        if t.id in ids:
            raise SchemaError(
                f"{locations.table(t.name).describe()}tables {ids[t.id]!r} and {t.name!r} have the same 32-bit id; rename one"
            )
        ids[t.id] = t.name


def _check_feature(schema: Schema, f: Feature, at: At) -> None:
    """The tables of a feature exist, and only sequences have columns."""
    tables = schema.table_by_name
    if f.kind == "float":
        if f.table or f.columns:
            raise SchemaError(
                f"{at('table', 'columns')}feature {f.name!r}: a float has no table and no columns; remove them or change its kind"
            )
    elif not f.table:
        raise SchemaError(
            f"{at('kind')}feature {f.name!r}: expected the table that its ids are rows of, got none; add table = …"
        )
    elif f.table not in tables:
        raise SchemaError(
            f"{at('table', 'name')}feature {f.name!r}: unknown table {f.table!r}{nearest(f.table, tables)}"
        )
    if f.columns and f.kind != "sequence":
        raise SchemaError(
            f"{at('columns')}feature {f.name!r}: only a sequence has columns, this is {f.kind!r}"
        )
    if "ids" in f.columns:
        raise SchemaError(
            f"{at('columns')}feature {f.name!r}: a column can't be named 'ids', which are the sequence's own; rename it"
        )
    for column, kind in f.columns.items():
        if kind not in ("ids", "time_ms"):
            near = nearest(str(kind), ["ids", "time_ms"])
            raise SchemaError(
                f"{at('columns')}feature {f.name!r}: column {column!r}: expected ids or time_ms, got {kind!r}{near}"
            )
    for column, table in f.column_tables.items():
        if column not in f.id_columns:
            raise SchemaError(
                f"{at('column_tables')}feature {f.name!r}: column_tables names {column!r}{nearest(column, f.id_columns)}"
            )
        if table not in tables:
            raise SchemaError(
                f"{at('column_tables')}feature {f.name!r}: unknown table {table!r}{nearest(str(table), tables)}"
            )
    if not 0 <= f.max_len <= schema.limits.max_list:
        most = f"{schema.limits.max_list} (limits.max_list)"
        raise SchemaError(
            f"{at('max_len')}feature {f.name!r}: expected max_len in 0..{most}, got {f.max_len}"
        )


def _check_online(schema: Schema, side: str, f: Feature, describe: At) -> None:
    """The online feature exists on this side, and the feature can hold its value."""
    if not f.online:
        return
    at = f"{describe('online')}feature {f.name!r}"
    other = "nro" if side == "ro" else "ro"
    known = {s: (*names, *_STATELESS[s]) for s, names in online_names(schema).items()}
    if f.online in known[other] and f.online not in known[side]:
        raise SchemaError(
            f"{at}: online feature {f.online!r} is for [[{other}]], got it in [[{side}]]; move the feature there"
        )
    if f.online not in known[side]:
        near = (
            nearest(f.online, known[side])
            or f"; there are {', '.join(known[side])}, and what [[counter]] declares"
        )
        raise SchemaError(f"{at}: unknown online feature {f.online!r} for [[{side}]]{near}")
    counter = declared(schema).get(f.online)
    is_history = counter is not None and counter.aggregation == "history"
    kinds = ("ids", "sequence") if is_history else ("ids",) if f.online == "item_id" else ("float",)
    if f.kind not in kinds:
        raise SchemaError(f"{at}: expected kind {' or '.join(kinds)} for online {f.online!r}, got {f.kind!r}")
    columns = {"action": "ids", "time": "time_ms"}
    if is_history and not f.columns.items() <= columns.items():
        raise SchemaError(f"{at}: expected columns among {columns} for online {f.online!r}, got {f.columns}")
    first = next(g for g in getattr(schema, side) if g.online == f.online)
    if (f.kind, f.table, f.columns) != (first.kind, first.table, first.columns):
        raise SchemaError(
            f"{at}: expected the kind, table and columns of {first.name!r}, which has the same online value"
        )


def _check_transforms(schema: Schema, locations: RowLocations) -> None:
    """The inputs of a transform exist before it, its output is new, and its operation fits the side."""
    known = {side: {f.name for f in schema.floats(side)} for side in ("ro", "nro")}
    declared = {f.name for f in (*schema.ro, *schema.nro)}
    for row, t in enumerate(schema.transforms):
        at = partial(locations.describe, "transform", row)
        side = next((s for s in ("ro", "nro") if t.input in known[s]), None)
        if side is None:
            near = nearest(t.input, known["ro"] | known["nro"])
            raise SchemaError(
                f"{at('inputs', 'input')}transform {t.output!r}: unknown input {t.input!r}{near}"
            )
        if t.op in ("rank", "share") and side == "ro":
            raise SchemaError(
                f"{at('op')}transform {t.output!r}: {t.op} is within a request's candidates; {t.input!r} is request-only"
            )
        if t.output != t.input and t.output in declared | known["ro"] | known["nro"]:
            raise SchemaError(
                f"{at('output')}transform {t.output!r}: that name is taken; choose another output"
            )
        if t.op == "standardize" and t.std <= 0:
            raise SchemaError(f"{at('std')}transform {t.output!r}: expected std > 0, got {t.std}")
        known[side].add(t.output)


def _check_counters(schema: Schema, locations: RowLocations, taken: tuple[str, ...]) -> None:
    """`taken`: names of the online features that need no state."""
    if len(schema.counters) > MAX_COUNTERS:
        raise SchemaError(
            f"{locations.location.describe('counter')}expected at most {MAX_COUNTERS} counters, got {len(schema.counters)}; remove some"
        )
    names = {*taken, *(c.name for c in built_in())}
    for row, counter in enumerate(schema.counters):
        at = partial(locations.describe, "counter", row)
        if counter.name in names:
            raise SchemaError(f"{at('name')}counter {counter.name!r}: that name is taken; choose another")
        names.add(counter.name)
        for field in counter.entity:
            _check_field(schema, counter, field, at("entity"))
        if counter.aggregation == "distinct":
            _check_field(schema, counter, counter.of, at("of"))
        _check_entity(schema, counter, at("entity"))
    for name, layout in schema.derived(plan_of).state_layouts.items():
        if layout.max_bytes > MAX_STATE_BYTES:
            raise SchemaError(
                f"{locations.location.describe('counter')}expected a state of {name!r} of at most {MAX_STATE_BYTES} bytes, "
                f"got {layout.max_bytes}; shorten its histories or remove some of its counters"
            )


def _check_field(schema: Schema, counter: CounterDeclaration, field: str, at: str) -> None:
    """A field is one of the request, or a list of ids that clients send."""
    sides = field_sides(schema)
    at += f"counter {counter.name!r}: "
    if field not in sides:
        feature = next((f for f in (*schema.ro, *schema.nro) if f.name == field), None)
        if feature is not None:
            raise SchemaError(f"{at}expected a feature of kind 'ids', got {field!r} of {feature.kind!r}")
        raise SchemaError(f"{at}unknown field {field!r}{nearest(field, sides)}")
    feature = next((f for f in schema.lists(sides[field]) if f.name == field), None)  # type: ignore[arg-type]
    if feature is not None and field in REQUEST_FIELDS:
        raise SchemaError(
            f"{at}{field!r} is a field of the request and also the name of a feature; rename the feature"
        )
    if feature is not None and feature.online and field != ITEM:
        raise SchemaError(
            f"{at}expected a feature that clients send, got {field!r}, which has an online value"
        )


def _check_entity(schema: Schema, counter: CounterDeclaration, at: str) -> None:
    sides, aggregation = field_sides(schema), counter.aggregation
    of_candidate = [field for field in counter.entity if sides[field] == "nro"]
    if aggregation in _REQUEST_ONLY and of_candidate:
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected fields of the request for aggregation {aggregation!r}, got {of_candidate[0]!r}, "
            "a field of the candidate; remove it"
        )
    if aggregation == "expected" and not of_candidate:
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected a field of the candidate for 'expected', got none; add 'item'"
        )
    if aggregation == "in_last_list" and not (USER in counter.entity and of_candidate):
        raise SchemaError(
            f"{at}counter {counter.name!r}: expected 'user' and a field of the candidate for 'in_last_list'"
        )

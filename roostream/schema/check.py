"""Checks that the parts of a schema fit together. Each error names key, value, nearest known name, file and
line."""

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
_STATELESS = {"ro": ("num_candidates", "hour_of_day", "user_id"), "nro": ("position", "item_id")}
_BUILT_IN = online_names(Schema())
ONLINE = {side: (*_BUILT_IN[side], *names) for side, names in _STATELESS.items()}
"""Online features that `online` may name in every schema, by side; roostream/online/counters.py computes
them."""

_REQUEST_ONLY = ("history", "length", "distinct")

Origin: TypeAlias = Callable[..., str]
"""Keys of a row's block → `"file:line: "` of the first one that is set."""


def check(schema: Schema, locations: RowLocations) -> Schema:
    """Check a parsed schema and return it.

    Raises:
        SchemaError: the first error; names file and line.
    """
    _check_counters(schema, locations)
    names: set[str] = set()
    for side in ("ro", "nro"):
        owner_of: dict[str, str] = {}  # column in tables of samples (roostream/wire/columnar.py) -> feature
        for row, f in enumerate(getattr(schema, side)):
            origin = partial(locations.describe, side, row)
            if f.name in names:
                text = f"duplicate feature {f.name!r}; give each feature its own name"
                raise SchemaError(f"{origin('name', 'online')}{text}")
            names.add(f.name)
            _check_feature(schema, f, origin)
            inner = ("weights",) if f.kind == "weighted_ids" else tuple(f.columns)
            for column in (f"{side}__{f.name}", *(f"{side}__{f.name}__{name}" for name in inner)):
                if column in owner_of:
                    text = f"its column {column!r} of a warehouse is also that of {owner_of[column]!r}"
                    raise SchemaError(f"{origin('name', 'online')}feature {f.name!r}: {text}; rename one")
                owner_of[column] = f.name
            if f.online:
                _check_online(schema, side, f, f"{origin('online')}feature {f.name!r}")
    _check_tables_and_labels(schema, locations)
    _check_transforms(schema, locations)
    return schema


def _check_tables_and_labels(schema: Schema, locations: RowLocations) -> None:
    """There is a label, label names are unique, and no two tables have the same 32-bit id."""
    names = [label.name for label in schema.labels]
    for row, name in enumerate(names):
        if name in names[:row]:
            text = f"duplicate label {name!r}; give each its own name"
            raise SchemaError(f"{locations.describe('label', row, 'name')}{text}")
    if not schema.labels:
        text = "expected at least one [[label]], got none; add what is to be predicted"
        raise SchemaError(f"{locations.location.describe()}{text}")
    ids: dict[int, str] = {}
    for t in schema.tables:
        if t.id in ids:
            text = f"tables {ids[t.id]!r} and {t.name!r} have the same 32-bit id; rename one"
            raise SchemaError(f"{locations.table(t.name).describe()}{text}")
        ids[t.id] = t.name


def _check_feature(schema: Schema, f: Feature, origin: Origin) -> None:
    """The tables of a feature exist, and only sequences have columns."""

    def error(text: str, *keys: str) -> SchemaError:
        return SchemaError(f"{origin(*keys)}feature {f.name!r}: {text}")

    tables = schema.table_by_name
    if f.kind == "float" and (f.table or f.columns):
        text = "a float has no table and no columns; remove them or change its kind"
        raise error(text, "table", "columns")
    if f.is_list and not f.table:
        raise error("expected the embedding table of its ids, got none; add table = …", "kind")
    if f.is_list and f.table not in tables:
        raise error(f"unknown table {f.table!r}{nearest(f.table, tables)}", "table", "name")
    if f.columns and f.kind != "sequence":
        raise error(f"only a sequence has columns, this is {f.kind!r}", "columns")
    if "ids" in f.columns:
        raise error("a column can't be named 'ids', the name of the sequence's values; rename it", "columns")
    for column, kind in f.columns.items():
        if kind not in ("ids", "time_ms"):
            near = nearest(str(kind), ["ids", "time_ms"])
            raise error(f"column {column!r}: expected ids or time_ms, got {kind!r}{near}", "columns")
    for column, table in f.column_tables.items():
        if column not in f.id_columns:
            near = nearest(column, f.id_columns)
            raise error(f"column_tables names {column!r}, which is not an ids column{near}", "column_tables")
        if table not in tables:
            raise error(f"unknown table {table!r}{nearest(str(table), tables)}", "column_tables")
    if not 0 <= f.max_len <= schema.limits.max_list:
        limit = f"{schema.limits.max_list} (limits.max_list)"
        raise error(f"expected max_len in 0..{limit}, got {f.max_len}", "max_len")


def _check_online(schema: Schema, side: str, f: Feature, at: str) -> None:
    """The online feature exists on this side, and the feature can hold its value."""
    other = "nro" if side == "ro" else "ro"
    known = {s: (*names, *_STATELESS[s]) for s, names in online_names(schema).items()}
    if f.online in known[other] and f.online not in known[side]:
        text = f"is for [[{other}]], got it in [[{side}]]; move the feature there"
        raise SchemaError(f"{at}: online feature {f.online!r} {text}")
    if f.online not in known[side]:
        all_names = f"; known are {', '.join(known[side])}, and the names of [[counter]]"
        near = nearest(f.online, known[side]) or all_names
        raise SchemaError(f"{at}: unknown online feature {f.online!r} for [[{side}]]{near}")
    counter = declared(schema).get(f.online)
    is_history = counter is not None and counter.aggregation == "history"
    is_id = f.online in ("user_id", "item_id")
    kinds = ("ids", "sequence") if is_history else ("ids",) if is_id else ("float",)
    if f.kind not in kinds:
        raise SchemaError(f"{at}: expected kind {' or '.join(kinds)} for online {f.online!r}, got {f.kind!r}")
    columns = {"action": "ids", "time": "time_ms"}
    if is_history and not f.columns.items() <= columns.items():
        raise SchemaError(f"{at}: expected columns among {columns} for online {f.online!r}, got {f.columns}")
    first = next(g for g in getattr(schema, side) if g.online == f.online)
    if (f.kind, f.table, f.columns) != (first.kind, first.table, first.columns):
        text = f"expected the kind, table and columns of {first.name!r}, which has the same online value"
        raise SchemaError(f"{at}: {text}")


def _check_transforms(schema: Schema, locations: RowLocations) -> None:
    """The inputs of a transform exist before it, its output is new, and its operation fits the side."""
    known = {side: {f.name for f in schema.floats(side)} for side in ("ro", "nro")}
    features = {f.name for f in (*schema.ro, *schema.nro)}
    for row, t in enumerate(schema.transforms):

        def error(text: str, *keys: str, row: int = row, output: str = t.output) -> SchemaError:
            return SchemaError(f"{locations.describe('transform', row, *keys)}transform {output!r}: {text}")

        side = next((s for s in ("ro", "nro") if t.input in known[s]), None)
        if side is None:
            near = nearest(t.input, known["ro"] | known["nro"])
            raise error(f"unknown input {t.input!r}{near}", "inputs", "input")
        if t.op in ("rank", "share") and side == "ro":
            raise error(f"{t.op} needs a feature of the candidates; {t.input!r} is request-only", "op")
        if t.output != t.input and t.output in features | known["ro"] | known["nro"]:
            raise error("that name is taken; choose another output", "output")
        if t.op == "standardize" and t.std <= 0:
            raise error(f"expected std > 0, got {t.std}", "std")
        known[side].add(t.output)


def _check_counters(schema: Schema, locations: RowLocations) -> None:
    """Counters have unique names and valid fields, and the state of an entity is bounded."""
    at = locations.location.describe("counter")
    if len(schema.counters) > MAX_COUNTERS:
        text = f"expected at most {MAX_COUNTERS} counters, got {len(schema.counters)}; remove some"
        raise SchemaError(f"{at}{text}")
    names = {name for names in _STATELESS.values() for name in names} | {c.name for c in built_in()}
    for row, counter in enumerate(schema.counters):
        origin = partial(locations.describe, "counter", row)
        if counter.name in names:
            text = f"counter {counter.name!r}: that name is taken; choose another"
            raise SchemaError(f"{origin('name')}{text}")
        names.add(counter.name)
        for field in counter.entity:
            _check_field(schema, field, f"{origin('entity')}counter {counter.name!r}")
        if counter.aggregation == "distinct":
            _check_field(schema, counter.of, f"{origin('of')}counter {counter.name!r}")
        _check_entity(schema, counter, f"{origin('entity')}counter {counter.name!r}")
    for name, layout in schema.derived(plan_of).state_layouts.items():
        if layout.max_bytes > MAX_STATE_BYTES:
            expected = (
                f"expected a state of {name!r} of at most {MAX_STATE_BYTES} bytes, got {layout.max_bytes}"
            )
            raise SchemaError(f"{at}{expected}; shorten its histories or remove some of its counters")


def _check_field(schema: Schema, field: str, at: str) -> None:
    """A field is one of the request, or a list of ids that clients send."""
    sides = field_sides(schema)
    if field not in sides:
        kinds = {f.name: f.kind for f in (*schema.ro, *schema.nro)}
        if field in kinds:
            raise SchemaError(f"{at}: expected a feature of kind 'ids', got {field!r} of {kinds[field]!r}")
        raise SchemaError(f"{at}: unknown field {field!r}{nearest(field, sides)}")
    lists = schema.lists("ro" if sides[field] == "ro" else "nro")
    feature = next((f for f in lists if f.name == field), None)
    if feature is None:
        return
    if field == USER:
        return  # the request's user, which fills a feature of that name
    if field in REQUEST_FIELDS:
        text = f"{field!r} is a field of the request and also the name of a feature; rename the feature"
        raise SchemaError(f"{at}: {text}")
    if feature.online and field != ITEM:
        text = f"expected a feature that clients send, got {field!r}, which has an online value"
        raise SchemaError(f"{at}: {text}")


def _check_entity(schema: Schema, counter: CounterDeclaration, at: str) -> None:
    """The entity has the fields of the request and of the candidate that its aggregation needs."""
    sides, aggregation = field_sides(schema), counter.aggregation
    of_candidate = [field for field in counter.entity if sides[field] == "nro"]
    if aggregation in _REQUEST_ONLY and of_candidate:
        expected = f"expected fields of the request for aggregation {aggregation!r}"
        raise SchemaError(f"{at}: {expected}, got {of_candidate[0]!r} of the candidate; remove it")
    if aggregation == "expected" and not of_candidate:
        raise SchemaError(f"{at}: expected a field of the candidate for 'expected', got none; add 'item'")
    if aggregation == "in_last_list" and not (USER in counter.entity and of_candidate):
        raise SchemaError(f"{at}: expected 'user' and a field of the candidate for 'in_last_list'")

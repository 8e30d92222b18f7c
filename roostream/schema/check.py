"""What a schema may not be: each refusal names the key, the value, the nearest known one, and the place in the file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from roostream.errors import SchemaError, nearest
from roostream.online.counter_plan import declared, online_names
from roostream.schema.check_counters import check_counters
from roostream.schema.expand import RowLocations
from roostream.schema.schema import Feature, Schema

_OF_THE_REQUEST = {"ro": ("num_candidates", "hour_of_day"), "nro": ("position", "item_id")}
_BUILT_IN = online_names(Schema())
ONLINE = {side: (*_BUILT_IN[side], *own) for side, own in _OF_THE_REQUEST.items()}
"""What `online` may name in every schema, by side; roostream/online/counters.py computes them."""


At: TypeAlias = Callable[..., str]
"""Keys of a row's block → `"file:line: "` of the first that it sets."""


def check(schema: Schema, locations: RowLocations) -> Schema:
    """The schema itself, if everything that it names is there and goes together.

    Raises:
        SchemaError: the first thing that doesn't; names file and, for features and transforms, the line.
    """
    check_counters(schema, locations, tuple(name for own in _OF_THE_REQUEST.values() for name in own))
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
    """Names of labels are given once, there is one, and no two tables share a short id."""
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
    """Tables exist, and columns are those of a sequence."""
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
    """The online name exists on this side, and the feature can hold its value."""
    if not f.online:
        return
    at = f"{describe('online')}feature {f.name!r}"
    other = "nro" if side == "ro" else "ro"
    known = {s: (*names, *_OF_THE_REQUEST[s]) for s, names in online_names(schema).items()}
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
    """Inputs are there when a transform comes, outputs are new, and the operation goes with the side."""
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

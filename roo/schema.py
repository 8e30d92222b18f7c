"""The schema: the only place where tables, features, labels and transforms are declared.

`load_schema(path)` reads the TOML of docs/schema.md. The fingerprint covers what bytes depend on (features, their kinds,
tables, columns, labels), not training settings: a sample carries the fingerprint of the schema that wrote it, and
`reading_plan(writer, reader)` says how to read it with another one.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Literal

from roo.config import build, from_dict, read_toml, setting
from roo.errors import ConfigError, SchemaError, nearest
from roo.ids import hash64, table_id

Kind = Literal["float", "ids", "weighted_ids", "sequence"]
ColumnKind = Literal["ids", "time_ms"]
Fold = Literal["any", "count", "sum", "max", "last"]
Rule = Literal["adagrad", "rowwise_adagrad"]
Op = Literal["log1p", "clip", "standardize", "rank", "share"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A logical embedding table; tables of equal dim and rule settings are stored together, as one stack."""

    name: str = setting("", "taken from the TOML table's own name")
    dim: int = setting(help="width of a row's embedding")
    rule: Rule = setting("adagrad", "update rule")
    learning_rate: float = setting(0.05, "step size of the update rule")
    initial_accumulator: float = setting(0.1, "initial value of Adagrad's accumulator")
    init_scale: float = setting(0.05, "a new row is uniform in [-init_scale, init_scale], a function of (seed, table, id)")
    expire_after_ms: int = setting(0, "rows not pushed for this long in event time are dropped at a commit; 0 = never")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("dim", 1, 4096),
            ("learning_rate", 0, 1e6),
            ("initial_accumulator", 0, 1e9),
            ("init_scale", 0, 1e3),
        ):
            if not low <= getattr(self, name) <= high:
                raise SchemaError(f"table {self.name!r}: expected {name} in {low}..{high}, got {getattr(self, name)}")

    @cached_property
    def id(self) -> int:
        """uint32: what rows and deltas name this table by."""
        return table_id(self.name)

    @property
    def stack(self) -> str:
        """Name of the stack that stores it, e.g. `d16-adagrad`: equal names mean equal width and update rule."""
        return f"d{self.dim}-{self.rule}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
    """One RO or NRO feature."""

    name: str = setting(help="unique over RO and NRO")
    kind: Kind = setting("float", "float | ids | weighted_ids | sequence")
    table: str = setting("", "table that its ids are rows of; required unless float")
    default: float = setting(0.0, "value of a missing float in the batch")
    max_len: int = setting(
        0, "longest list in use: of more, the first max_len are kept (producers put the newest first); 0 = cap"
    )
    columns: dict[str, str] = setting(factory=dict, help="a sequence's aligned columns: name -> ids | time_ms")
    column_tables: dict[str, str] = setting(factory=dict, help="table of an ids column; a column without one is a plain integer")
    online: str = setting("", "which online feature serving hydrates it with when a request lacks it (docs/schema.md)")

    @property
    def is_list(self) -> bool:
        return self.kind != "float"

    @property
    def id_columns(self) -> tuple[str, ...]:
        return tuple(c for c, kind in self.columns.items() if kind == "ids")

    @property
    def time_columns(self) -> tuple[str, ...]:
        return tuple(c for c, kind in self.columns.items() if kind == "time_ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label:
    """How a candidate's engagements fold into one number; 0 without any."""

    name: str = setting(help="unique name; the model's task")
    action: str = setting(help="the engagements that count")
    fold: Fold = setting("any", "any | count | sum | max | last")
    window_ms: int = setting(0, "only engagements within this time of the request; 0 = the join window")
    threshold: float = setting(0.0, "only engagements whose value is at least this count; 0 = all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform:
    """A float derived from an NRO or RO float, the same at training and at serving (roo/transform.py)."""

    output: str = setting(help="name of the derived float; equal to input to replace it")
    input: str = setting(help="declared float, or the output of an earlier transform")
    op: Op = setting(help="log1p | clip | standardize | rank | share")
    low: float = setting(0.0, "clip: lower bound")
    high: float = setting(1.0, "clip: upper bound")
    mean: float = setting(0.0, "standardize: (x - mean) / std")
    std: float = setting(1.0, "standardize: (x - mean) / std")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Hard caps: beyond them a record is a dead letter and a request is answered 413."""

    max_candidates: int = setting(1000, "candidates a request")
    max_list: int = setting(2000, "entries a list feature")
    max_record_bytes: int = setting(1 << 20, "bytes a record")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online:
    """What the feature updater counts; see roo/counters.py."""

    click: str = setting("click", "the action that counts as a click")
    history_len: int = setting(50, "newest clicks kept a user, newest first")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """See the module. Build with `load_schema` or `schema_from_dict`, which check it."""

    name: str = setting("default", "name shown in status")
    tables: tuple[Table, ...] = ()
    ro: tuple[Feature, ...] = ()
    nro: tuple[Feature, ...] = ()
    labels: tuple[Label, ...] = ()
    transforms: tuple[Transform, ...] = ()
    limits: Limits = dataclasses.field(default_factory=Limits)
    online: Online = dataclasses.field(default_factory=Online)

    @cached_property
    def fingerprint(self) -> int:
        """uint64 over everything that the bytes of a block or the meaning of a label depend on."""
        return hash64(json.dumps(self.wire_shape(), sort_keys=True, separators=(",", ":")))

    def wire_shape(self) -> dict[str, object]:
        """Plain form of what the fingerprint covers."""
        dims = {t.name: t.dim for t in self.tables}

        def shape(f: Feature) -> list[object]:
            return [f.name, f.kind, f.table, dims.get(f.table, 0), list(f.columns.items()), sorted(f.column_tables.items())]

        labels = [[label.name, label.action, label.fold, label.window_ms, label.threshold] for label in self.labels]
        return {"ro": [shape(f) for f in self.ro], "nro": [shape(f) for f in self.nro], "labels": labels}

    @cached_property
    def table_by_name(self) -> dict[str, Table]:
        return {t.name: t for t in self.tables}

    @cached_property
    def stacks(self) -> dict[str, tuple[Table, ...]]:
        """Stack name → its tables, in declared order; every program derives the same."""
        out: dict[str, list[Table]] = {}
        for t in self.tables:
            out.setdefault(t.stack, []).append(t)
        return {name: tuple(ts) for name, ts in out.items()}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def floats(self, side: Literal["ro", "nro"]) -> tuple[Feature, ...]:
        """Float features of a side in declared order: the F columns of its block and batch."""
        return tuple(f for f in getattr(self, side) if not f.is_list)

    def lists(self, side: Literal["ro", "nro"]) -> tuple[Feature, ...]:
        """List features of a side in declared order: the K features of its block and batch."""
        return tuple(f for f in getattr(self, side) if f.is_list)


def load_schema(path: str | Path) -> Schema:
    """Read and check a schema TOML.

    Raises:
        SchemaError: names key, value, nearest name, file and line.
    """
    return schema_from_dict(read_toml(path), path)


def schema_from_dict(raw: dict[str, object], path: str | Path | None = None) -> Schema:
    """The same from a parsed table; `path` only for messages."""
    try:
        return _check(_parse(dict(raw), path), path)
    except SchemaError:
        raise
    except ConfigError as error:
        raise SchemaError(str(error)) from None


def _parse(raw: dict[str, object], path: str | Path | None) -> Schema:
    tables = raw.pop("tables", {})
    if not isinstance(tables, dict):
        raise SchemaError(f"{path or 'schema'}: expected [tables.NAME] tables, got {tables!r}")
    parsed: dict[str, object] = {
        "tables": tuple(
            build(Table, {**from_dict(Table, t, path, f"tables.{name}."), "name": name}, path) for name, t in tables.items()
        )
    }
    lists = {"ro": Feature, "nro": Feature, "label": Label, "transform": Transform}
    for key, cls in lists.items():
        rows = raw.pop(key, [])
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise SchemaError(f"{path or 'schema'}: expected [[{key}]] tables, got {rows!r}")
        parsed[key + "s" if key in ("label", "transform") else key] = tuple(
            build(cls, from_dict(cls, r, path, f"{key}."), path) for r in rows
        )
    known = {*lists, "tables", "limits", "online", "name"}
    for key in raw:
        if key not in ("limits", "online", "name"):
            raise SchemaError(f"{path or 'schema'}: unknown key {key!r}{nearest(key, known)}")
    return build(Schema, {**parsed, **from_dict(Schema, raw, path)}, path)


def _check(schema: Schema, path: str | Path | None) -> Schema:
    at = f"{path}: " if path else ""
    names: set[str] = set()
    for f in (*schema.ro, *schema.nro):
        if f.name in names:
            raise SchemaError(f"{at}duplicate feature {f.name!r}; give each feature its own name")
        names.add(f.name)
        _check_feature(schema, f, at)
    for group in ("labels", "tables"):
        seen: set[str] = set()
        for x in getattr(schema, group):
            if x.name in seen:
                raise SchemaError(f"{at}duplicate {group[:-1]} {x.name!r}; give each its own name")
            seen.add(x.name)
    if not schema.labels:
        raise SchemaError(f"{at}expected at least one [[label]], got none; without one nothing can be trained")
    ids: dict[int, str] = {}
    for t in schema.tables:
        if t.id in ids:
            raise SchemaError(f"{at}tables {ids[t.id]!r} and {t.name!r} have the same 32-bit id; rename one")
        ids[t.id] = t.name
    _check_stacks(schema, at)
    _check_transforms(schema, at)
    return schema


def _check_feature(schema: Schema, f: Feature, at: str) -> None:
    tables = schema.table_by_name
    if f.kind == "float":
        if f.table or f.columns:
            raise SchemaError(f"{at}feature {f.name!r}: a float has no table and no columns; remove them or change its kind")
    elif f.table not in tables:
        raise SchemaError(f"{at}feature {f.name!r}: unknown table {f.table!r}{nearest(f.table, tables)}")
    if f.columns and f.kind != "sequence":
        raise SchemaError(f"{at}feature {f.name!r}: only a sequence has columns, this is {f.kind!r}")
    for column, kind in f.columns.items():
        if kind not in ("ids", "time_ms"):
            raise SchemaError(
                f"{at}feature {f.name!r}: column {column!r}: expected ids or time_ms, got {kind!r}{nearest(str(kind), ['ids', 'time_ms'])}"
            )
    for column, table in f.column_tables.items():
        if column not in f.id_columns:
            raise SchemaError(f"{at}feature {f.name!r}: column_tables names {column!r}{nearest(column, f.id_columns)}")
        if table not in tables:
            raise SchemaError(f"{at}feature {f.name!r}: unknown table {table!r}{nearest(str(table), tables)}")
    if not 0 <= f.max_len <= schema.limits.max_list:
        raise SchemaError(
            f"{at}feature {f.name!r}: expected max_len in 0..{schema.limits.max_list} (limits.max_list), got {f.max_len}"
        )


def _check_stacks(schema: Schema, at: str) -> None:
    for stack, tables in schema.stacks.items():
        for t in tables[1:]:
            for key in ("learning_rate", "initial_accumulator"):
                if getattr(t, key) != getattr(tables[0], key):
                    raise SchemaError(
                        f"{at}tables {tables[0].name!r} and {t.name!r} share stack {stack} and must share {key}: "
                        f"got {getattr(tables[0], key)} and {getattr(t, key)}"
                    )


def _check_transforms(schema: Schema, at: str) -> None:
    known = {side: {f.name for f in schema.floats(side)} for side in ("ro", "nro")}  # type: ignore[arg-type]
    for t in schema.transforms:
        side = next((s for s in ("ro", "nro") if t.input in known[s]), None)
        if side is None:
            raise SchemaError(
                f"{at}transform {t.output!r}: unknown input {t.input!r}{nearest(t.input, known['ro'] | known['nro'])}"
            )
        if t.op in ("rank", "share") and side == "ro":
            raise SchemaError(f"{at}transform {t.output!r}: {t.op} is within a request's candidates; {t.input!r} is request-only")
        if t.output != t.input and t.output in known["ro"] | known["nro"]:
            raise SchemaError(f"{at}transform {t.output!r}: that name is taken; choose another output")
        if t.op == "standardize" and t.std <= 0:
            raise SchemaError(f"{at}transform {t.output!r}: expected std > 0, got {t.std}")
        known[side].add(t.output)


def reading_plan(writer: Schema, reader: Schema) -> dict[str, list[int]]:
    """How to read `writer`'s blocks as `reader`'s: for `ro_float`, `ro_list`, `nro_float`, `nro_list`, `label`, one
    entry a writer's feature in its order: the reader's index, or -1 (removed since; skipped and counted).

    Raises:
        SchemaError: a feature's kind, table, width or columns changed; says expected and got.
    """
    plan: dict[str, list[int]] = {}
    dims = (writer.table_by_name, reader.table_by_name)
    for side in ("ro", "nro"):
        mine = {f.name: f for f in getattr(reader, side)}
        for f in getattr(writer, side):
            other = mine.get(f.name)
            if other is None:
                continue
            for what in ("kind", "table", "columns", "column_tables"):
                if getattr(f, what) != getattr(other, what):
                    raise SchemaError(
                        f"feature {f.name!r}: expected {what} {getattr(other, what)!r} (schema in use), "
                        f"got {getattr(f, what)!r} (schema of the data); give the changed feature a new name"
                    )
            if f.table and dims[0][f.table].dim != dims[1][f.table].dim:
                raise SchemaError(
                    f"table {f.table!r}: expected dim {dims[1][f.table].dim} (schema in use), got {dims[0][f.table].dim} "
                    "(schema of the data); give the changed table a new name"
                )
        for group in ("floats", "lists"):
            index = {f.name: i for i, f in enumerate(getattr(reader, group)(side))}
            plan[f"{side}_{group[:-1]}"] = [index.get(f.name, -1) for f in getattr(writer, group)(side)]
    index = {label.name: i for i, label in enumerate(reader.labels)}
    plan["label"] = [index.get(label.name, -1) for label in writer.labels]
    return plan

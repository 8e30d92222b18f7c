"""The schema: tables, features, labels, counters and transforms, declared in one TOML file (docs/schema.md).

`load_schema` reads it. The fingerprint covers what the bytes of samples depend on: features with their kinds,
tables and columns, and labels; not training settings. A sample has the fingerprint of its writer's schema,
and `reading_plan(writer, reader)` tells how to read it with another schema.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

from roostream.errors import SchemaError
from roostream.schema.counter_declaration import CounterDeclaration
from roostream.schema.ids import hash64, table_id
from roostream.schema.limits import MAX_MESSAGE_BYTES, RECORD_OVERHEAD_BYTES
from roostream.schema.settings import SettingError, Settings, check_name, check_text, setting, setting_error
from roostream.schema.update_rules import RULES, Adagrad, Rule

T = TypeVar("T")
Kind = Literal["float", "ids", "weighted_ids", "sequence"]
Fold = Literal["any", "count", "sum", "max", "last"]
_MAX_FLOAT = 3e38  # fits a float32
Objective = Literal["event", "weighted", "amount", "pairwise"]
Op = Literal["log1p", "log", "clip", "standardize", "rank", "share"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Settings):
    """A logical embedding table. Tables of equal width and update rule are stored together as one stack; each
    table has its own parameters of the rule."""

    name: str = setting("", "the name in [tables.NAME]")
    dim: int = setting(help="width of a row's embedding", ge=1, le=4096)
    rule: Rule = setting(help="update rule and its parameters", factory=Adagrad)
    init_scale: float = setting(
        0.05,
        "new rows are uniform in [-init_scale, init_scale], a function of (seed, table, id)",
        ge=0,
        le=1e3,
    )
    expire_after_ms: int = setting(
        0, "drop rows without an update for this long in event time, at a commit; 0 = never", ge=0, le=1 << 53
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("table", self.name)

    @cached_property
    def id(self) -> int:
        """uint32 that names the table in rows and deltas."""
        return table_id(self.name)

    @property
    def stack(self) -> str:
        """Name of the stack that holds the table's rows, from their width and update rule: `d16-adagrad`."""
        return f"d{self.dim}-{self.rule.name}"


def stack_shape(stack: str) -> tuple[int, int] | None:
    """(width, state numbers per row) of a stack by its name, also of a former schema; None for another
    name."""
    dim, _, rule = stack.partition("-")
    if not dim.startswith("d") or not dim[1:].isdecimal() or rule not in RULES:
        return None
    return int(dim[1:]), RULES[rule].state_width(int(dim[1:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature(Settings):
    """One request-only (RO) or candidate (NRO) feature."""

    name: str = setting(help="name, unique among RO and NRO features")
    kind: Kind = setting("float", "float | ids | weighted_ids | sequence")
    table: str = setting("", "embedding table of the ids; required unless float")
    default: float = setting(0.0, "value of a missing float")
    max_len: int = setting(
        0, "list entries in use: the first max_len, and producers put the newest first; 0 = limits.max_list"
    )
    columns: dict[str, str] = setting(
        factory=dict, help="aligned columns of a sequence: name -> ids | time_ms"
    )
    column_tables: dict[str, str] = setting(
        factory=dict, help="embedding table of an ids column; without one the column is plain integers"
    )
    online: str = setting(
        "", "online feature that serving fills in when a request lacks this one (docs/schema.md)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.name, *self.columns):
            check_name("feature", name, "name" if name == self.name else "columns")
        if not abs(self.default) <= _MAX_FLOAT:
            text = f"expected a finite default (at most {_MAX_FLOAT:g}), got {self.default}"
            raise SettingError("default", text, f"feature {self.name!r}")

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
class Label(Settings):
    """How a candidate's engagements become one number; 0 without engagements."""

    name: str = setting(help="unique name; also the model's task")
    action: str = setting(help="action of the engagements that count")
    fold: Fold = setting("any", "any | count | sum | max | last")
    window_ms: int = setting(
        0, "count only engagements within this time after the request; 0 = the join window", ge=0, le=1 << 53
    )
    threshold: float = setting(
        0.0, "count only engagements with at least this value; 0 = all", ge=-_MAX_FLOAT, le=_MAX_FLOAT
    )
    prior: float = setting(
        0.0, "probability that an untrained model predicts; 0 = the model's default", ge=0, lt=1
    )
    objective: Objective = setting(
        "event", "training objective (roostream/models/loss.py): event | weighted | amount | pairwise"
    )
    scale: float = setting(
        1.0,
        "weighted: the value that counts as one event; amount: the largest distinguished amount",
        gt=0,
        le=_MAX_FLOAT,
    )
    weight: float = setting(
        1.0, "weight of the label's loss; 0 = the label is only predicted and measured", ge=0, le=_MAX_FLOAT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("label", self.name)
        check_text("action", self.action)
        if self.learns_value and self.fold == "any":
            text = f"count, sum, max or last for objective {self.objective!r}"
            raise setting_error("fold", text, self.fold)

    @property
    def learns_value(self) -> bool:
        """Whether the amount counts, not only the occurrence."""
        return self.objective in ("weighted", "amount")

    @property
    def is_probability(self) -> bool:
        """Whether scores are probabilities of an event."""
        return self.objective == "event"

    @property
    def amount_scale(self) -> float | None:
        """Scale of an amount; None: the objective is another one."""
        return self.scale if self.objective == "amount" else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform(Settings):
    """A float derived from another float, equally in training and serving (roostream/wire/transform.py)."""

    output: str = setting(help="name of the derived float; the name of the input replaces it")
    input: str = setting(help="a declared float, or the output of an earlier transform")
    op: Op = setting(help="log1p | log | clip | standardize | rank | share")
    low: float = setting(0.0, "clip: lower bound", ge=-_MAX_FLOAT, le=_MAX_FLOAT)
    high: float = setting(1.0, "clip: upper bound", ge=-_MAX_FLOAT, le=_MAX_FLOAT)
    mean: float = setting(0.0, "standardize: (x - mean) / std", ge=-_MAX_FLOAT, le=_MAX_FLOAT)
    std: float = setting(1.0, "standardize: (x - mean) / std", ge=-_MAX_FLOAT, le=_MAX_FLOAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("transform", self.output, "output")
        if self.low > self.high:
            raise setting_error("low", f"at most high = {self.high:g}", self.low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Settings):
    """Limits: a larger record becomes a dead letter, a larger request is answered with 413."""

    max_candidates: int = setting(1000, "candidates per request", ge=1, le=1 << 20)
    max_list: int = setting(2000, "entries per list", ge=1, le=1 << 20)
    max_record_bytes: int = setting(
        1 << 20,
        "bytes per impression or engagement; at most half a message, since a sample is larger than its "
        "impression",
        ge=1024,
        le=MAX_MESSAGE_BYTES // 2,
    )
    max_sample_bytes: int = setting(
        MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES,
        "bytes per sample or correction; the events of one request may not join to more",
        ge=1024,
        le=MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online(Settings):
    """Settings of the built-in counters (roostream/schema/counter_declaration.py)."""

    click: str = setting("click", "action that counts as a click")
    history_len: int = setting(50, "newest clicks kept per user", ge=0, le=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("click", self.click)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """A checked schema. Build it with `load_schema` or `schema_from_dict`."""

    name: str = setting("default", "name shown in status")
    tables: tuple[Table, ...] = ()
    ro: tuple[Feature, ...] = ()
    nro: tuple[Feature, ...] = ()
    counters: tuple[CounterDeclaration, ...] = ()
    labels: tuple[Label, ...] = ()
    transforms: tuple[Transform, ...] = ()
    limits: Limits = dataclasses.field(default_factory=Limits)
    online: Online = dataclasses.field(default_factory=Online)

    def __post_init__(self) -> None:
        check_text("name", self.name, max_bytes=200)

    @cached_property
    def fingerprint(self) -> int:
        """uint64 hash of everything that the bytes of a block or the meaning of a label depend on."""
        return hash64(json.dumps(self.wire_shape(), sort_keys=True, separators=(",", ":")))

    def wire_shape(self) -> dict[str, object]:
        """The content of the fingerprint as plain values."""
        dims = {t.name: t.dim for t in self.tables}

        def shape(f: Feature) -> list[object]:
            columns = [[c, t, dims.get(t, 0)] for c, t in sorted(f.column_tables.items())]
            return [f.name, f.kind, f.table, dims.get(f.table, 0), list(f.columns.items()), columns]

        labels = [
            [label.name, label.action, label.fold, label.window_ms, label.threshold] for label in self.labels
        ]
        return {"ro": [shape(f) for f in self.ro], "nro": [shape(f) for f in self.nro], "labels": labels}

    @cached_property
    def table_by_name(self) -> dict[str, Table]:
        return {t.name: t for t in self.tables}

    @cached_property
    def stacks(self) -> dict[str, tuple[Table, ...]]:
        """Stack name → its tables in declared order; the same in every program."""
        out: dict[str, list[Table]] = {}
        for t in self.tables:
            out.setdefault(t.stack, []).append(t)
        return {name: tuple(ts) for name, ts in out.items()}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def floats(self, side: Literal["ro", "nro"]) -> tuple[Feature, ...]:
        """Float features of a side in declared order: the F floats of its block and batch."""
        return self._by_kind[side, False]

    def lists(self, side: Literal["ro", "nro"]) -> tuple[Feature, ...]:
        """List features of a side in declared order: the K lists of its block and batch."""
        return self._by_kind[side, True]

    def derived(self, make: Callable[[Schema], T]) -> T:
        """`make(self)`, computed once and cached as long as the schema lives.

        `make` must be a pure function of a module; two threads may call it at the same time.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        made: T = self._derived[make]
        return made

    @cached_property
    def _derived(self) -> dict[Callable[[Schema], Any], Any]:
        return {}

    @cached_property
    def _by_kind(self) -> dict[tuple[str, bool], tuple[Feature, ...]]:
        sides = {"ro": self.ro, "nro": self.nro}
        return {
            (side, k): tuple(f for f in fs if f.is_list == k)
            for side, fs in sides.items()
            for k in (False, True)
        }


Registry: TypeAlias = Callable[[int], Schema | None]
"""Fingerprint → schema, or None if it is unknown; roostream/schema/registry.py reads schemas from a store."""


def reading_plan(writer: Schema, reader: Schema) -> dict[str, list[int]]:
    """How to read blocks of `writer` with `reader`.

    Returns `ro_float`, `ro_list`, `nro_float`, `nro_list` and `label`: for each feature of the writer in its
    order, the reader's index, or -1 if the reader does not have it (skipped and counted).

    Raises:
        SchemaError: the kind, table or columns of a feature changed, it moved between ro and nro, or the
        engagements that a label counts changed. The width of a table may change.
    """
    plan: dict[str, list[int]] = {}
    reader_features = {f.name: (side, f) for side in ("ro", "nro") for f in getattr(reader, side)}

    def changed(name: str, expected: str, got: str) -> SchemaError:
        return SchemaError(
            f"feature {name!r}: expected {expected} (schema in use), got {got} (schema of the data); "
            "give the changed feature a new name, so that it is missing in older samples"
        )

    for side in ("ro", "nro"):
        for f in getattr(writer, side):
            reader_side, other = reader_features.get(f.name, (side, f))
            if reader_side != side:
                raise changed(f.name, f"[[{reader_side}]]", f"[[{side}]]")
            for what in ("kind", "table", "columns", "column_tables"):
                expected, got = getattr(other, what), getattr(f, what)
                if expected != got or (what == "columns" and list(expected) != list(got)):
                    raise changed(f.name, f"{what} {expected!r}", repr(got))
        for group in ("floats", "lists"):
            index = {f.name: i for i, f in enumerate(getattr(reader, group)(side))}
            plan[f"{side}_{group[:-1]}"] = [index.get(f.name, -1) for f in getattr(writer, group)(side)]
    known = {label.name: label for label in reader.labels}
    for label in writer.labels:
        for what in ("action", "fold", "window_ms", "threshold"):
            expected, got = getattr(known.get(label.name, label), what), getattr(label, what)
            if expected != got:
                raise SchemaError(
                    f"label {label.name!r}: expected {what} {expected!r} (schema in use), got {got!r} "
                    "(schema of the data); give the changed label a new name"
                )
    index = {label.name: i for i, label in enumerate(reader.labels)}
    plan["label"] = [index.get(label.name, -1) for label in writer.labels]
    return plan

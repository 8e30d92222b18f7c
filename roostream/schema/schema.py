"""The schema: the only place where tables, features, labels and transforms are declared.

`load_schema(path)` reads the TOML of docs/schema.md, with its families written out (schema_expand.py). The fingerprint
covers what bytes depend on (features, their kinds, tables, columns, labels), not training settings: a sample carries the
fingerprint of the schema that wrote it, and `reading_plan(writer, reader)` says how to read it with another one.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
_FLOAT = 3e38  # fits a float32
Objective = Literal["event", "weighted", "amount", "pairwise"]
Op = Literal["log1p", "clip", "standardize", "rank", "share"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Settings):
    """A logical embedding table; tables of equal dim and rule are stored together, as one stack, each with its own
    parameters of the rule."""

    name: str = setting("", "taken from the TOML table's own name")
    dim: int = setting(help="width of a row's embedding", ge=1, le=4096)
    rule: Rule = setting(help="update rule and its parameters", factory=Adagrad)
    init_scale: float = setting(
        0.05,
        "a new row is uniform in [-init_scale, init_scale], a function of (seed, table, id)",
        ge=0,
        le=1e3,
    )
    expire_after_ms: int = setting(
        0,
        "rows not pushed for this long in event time are dropped at a commit; 0 = never",
        ge=0,
        le=1 << 53,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("table", self.name)

    @cached_property
    def id(self) -> int:
        """uint32: what rows and deltas name this table by."""
        return table_id(self.name)

    @property
    def stack(self) -> str:
        """Name of the stack that stores it, e.g. `d16-adagrad`: equal names mean equal width and update rule."""
        return f"d{self.dim}-{self.rule.name}"


def stack_shape(stack: str) -> tuple[int, int] | None:
    """(width, numbers of state a row) of a stack by its name, also of one that a schema had once; None where it is no stack's."""
    dim, _, rule = stack.partition("-")
    if not dim.startswith("d") or not dim[1:].isdecimal() or rule not in RULES:
        return None
    return int(dim[1:]), RULES[rule].state_width(int(dim[1:]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature(Settings):
    """One RO or NRO feature."""

    name: str = setting(help="unique over RO and NRO")
    kind: Kind = setting("float", "float | ids | weighted_ids | sequence")
    table: str = setting("", "table that its ids are rows of; required unless float")
    default: float = setting(0.0, "value of a missing float in the batch")
    max_len: int = setting(
        0,
        "longest list in use: of more, the first max_len are kept (producers put the newest first); 0 = cap",
    )
    columns: dict[str, str] = setting(
        factory=dict, help="a sequence's aligned columns: name -> ids | time_ms"
    )
    column_tables: dict[str, str] = setting(
        factory=dict, help="table of an ids column; a column without one is a plain integer"
    )
    online: str = setting(
        "", "which online feature serving hydrates it with when a request lacks it (docs/schema.md)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.name, *self.columns):
            check_name("feature", name, "name" if name == self.name else "columns")
        if not math.isfinite(self.default):
            raise SettingError(
                "default", f"expected a finite default, got {self.default}", f"feature {self.name!r}"
            )

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
    """How a candidate's engagements fold into one number; 0 without any."""

    name: str = setting(help="unique name; the model's task")
    action: str = setting(help="the engagements that count")
    fold: Fold = setting("any", "any | count | sum | max | last")
    window_ms: int = setting(
        0, "only engagements within this time of the request; 0 = the join window", ge=0, le=1 << 53
    )
    threshold: float = setting(
        0.0, "only engagements whose value is at least this count; 0 = all", ge=-_FLOAT, le=_FLOAT
    )
    prior: float = setting(
        0.0, "probability that an untrained model predicts; 0 = the model's own prior", ge=0, lt=1
    )
    objective: Objective = setting(
        "event",
        "what is learned of it (roostream/models/loss.py): event | weighted | amount | pairwise",
    )
    scale: float = setting(
        1.0,
        "weighted: what counts as much as one event; amount: the largest told apart",
        gt=0,
        le=_FLOAT,
    )
    weight: float = setting(
        1.0, "its loss counts so much beside the other labels'; 0 = predicted and measured only", ge=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("label", self.name)
        check_text("action", self.action)
        if self.learns_value and self.fold == "any":
            raise setting_error(
                "fold", f"count, sum, max or last for objective {self.objective!r}", self.fold
            )

    @property
    def learns_value(self) -> bool:
        """How much there was counts, not only whether."""
        return self.objective in ("weighted", "amount")

    @property
    def amount_scale(self) -> float:
        """Of an amount; 0 = it is none."""
        return self.scale if self.objective == "amount" else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transform(Settings):
    """A float derived from an NRO or RO float, the same at training and at serving (roostream/wire/transform.py)."""

    output: str = setting(help="name of the derived float; equal to input to replace it")
    input: str = setting(help="declared float, or the output of an earlier transform")
    op: Op = setting(help="log1p | clip | standardize | rank | share")
    low: float = setting(0.0, "clip: lower bound", ge=-_FLOAT, le=_FLOAT)
    high: float = setting(1.0, "clip: upper bound", ge=-_FLOAT, le=_FLOAT)
    mean: float = setting(0.0, "standardize: (x - mean) / std", ge=-_FLOAT, le=_FLOAT)
    std: float = setting(1.0, "standardize: (x - mean) / std", ge=-_FLOAT, le=_FLOAT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("transform", self.output, "output")
        if self.low > self.high:
            raise setting_error("low", f"at most high = {self.high:g}", self.low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Settings):
    """Hard caps: beyond them a record is a dead letter and a request is answered 413."""

    max_candidates: int = setting(1000, "candidates a request", ge=1, le=1 << 20)
    max_list: int = setting(2000, "entries a list feature", ge=1, le=1 << 20)
    max_record_bytes: int = setting(
        1 << 20,
        "bytes an event: an impression or engagement; half a message at most, since a sample holds more than its impression",
        ge=1024,
        le=MAX_MESSAGE_BYTES // 2,
    )
    max_sample_bytes: int = setting(
        MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES,
        "bytes a sample or correction; what joins into one request may not make more",
        ge=1024,
        le=MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Online(Settings):
    """What the counters that every schema has count; see roostream/schema/counter_declaration.py."""

    click: str = setting("click", "the action that counts as a click")
    history_len: int = setting(50, "newest clicks kept a user, newest first", ge=0, le=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("click", self.click)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """See the module. Build with `load_schema` or `schema_from_dict`, which check it."""

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
        """uint64 over everything that the bytes of a block or the meaning of a label depend on."""
        return hash64(json.dumps(self.wire_shape(), sort_keys=True, separators=(",", ":")))

    def wire_shape(self) -> dict[str, object]:
        """Plain form of what the fingerprint covers."""
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
        return self._by_kind[side, False]

    def lists(self, side: Literal["ro", "nro"]) -> tuple[Feature, ...]:
        """List features of a side in declared order: the K features of its block and batch."""
        return self._by_kind[side, True]

    def derived(self, make: Callable[[Schema], T]) -> T:
        """`make(self)`, made once and kept: what other files work out of a schema lives and dies with it.

        `make` is a function of a module, and pure: two threads may make it at the same time.
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
"""Fingerprint → schema, None where no such schema is known; roostream/schema/registry.py keeps them in a store."""


def reading_plan(writer: Schema, reader: Schema) -> dict[str, list[int]]:
    """How to read `writer`'s blocks as `reader`'s: for `ro_float`, `ro_list`, `nro_float`, `nro_list`, `label`, one
    entry a writer's feature in its order: the reader's index, or -1 (removed since; skipped and counted).

    Raises:
        SchemaError: a feature's kind, table or columns changed, or what a label counts; says expected and got. How wide a table's
            rows are is no matter of what is read.
    """
    plan: dict[str, list[int]] = {}
    for side in ("ro", "nro"):
        mine = {f.name: f for f in getattr(reader, side)}
        for f in getattr(writer, side):
            other = mine.get(f.name)
            if other is None:
                continue
            for what in ("kind", "table", "columns", "column_tables"):
                expected, got = getattr(other, what), getattr(f, what)
                if expected != got or (what == "columns" and list(expected) != list(got)):
                    raise SchemaError(
                        f"feature {f.name!r}: expected {what} {expected!r} (schema in use), "
                        f"got {got!r} (schema of the data); give the changed feature a new name"
                    )
        for group in ("floats", "lists"):
            index = {f.name: i for i, f in enumerate(getattr(reader, group)(side))}
            plan[f"{side}_{group[:-1]}"] = [index.get(f.name, -1) for f in getattr(writer, group)(side)]
    known = {label.name: label for label in reader.labels}
    for label in writer.labels:
        for what in ("action", "fold", "window_ms", "threshold"):
            expected, got = getattr(known.get(label.name, label), what), getattr(label, what)
            if expected != got:
                raise SchemaError(
                    f"label {label.name!r}: expected {what} {expected!r} (schema in use), got {got!r} (schema of the data); "
                    "give the changed label a new name"
                )
    index = {label.name: i for i, label in enumerate(reader.labels)}
    plan["label"] = [index.get(label.name, -1) for label in writer.labels]
    return plan

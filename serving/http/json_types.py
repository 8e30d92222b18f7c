"""The JSON form of a schema's features as msgspec types: one pass of compiled code checks names and types.

Field names are `f0, f1, …` in declared order (a feature's own name need not be an identifier), renamed to the features'.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from roostream.schema.ids import MASK64
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import main_key
from roostream.wire.records import MAX_WEIGHT
from serving.request import MAX_TEXT_BYTES

MAX_FLOAT = float(np.finfo(np.float32).max)
FORBID: dict[str, Any] = {"forbid_unknown_fields": True}


def limits(description: str = "", **of_schema: Any) -> Meta:
    """Limits that are said in the document and checked by us: a refusal has our words and the right status."""
    return Meta(description=description or None, extra_json_schema=of_schema or None)


TEXT = limits("at most 64 bytes of UTF-8", maxLength=MAX_TEXT_BYTES)
NAME = limits("1 to 64 bytes of UTF-8", minLength=1, maxLength=MAX_TEXT_BYTES)
TIME = limits("ms since 1970", minimum=-(1 << 63), maximum=(1 << 63) - 1)
FLOAT = limits(minimum=-MAX_FLOAT, maximum=MAX_FLOAT)
PlainId = Annotated[int, limits(minimum=-(1 << 63), maximum=MASK64)] | Annotated[str, limits(minLength=1)]
Id = Annotated[PlainId, Meta(description="an integer passes through, a string is hashed; no empty one")]


@dataclasses.dataclass(frozen=True)
class JsonTypes:
    """`rank` is the type of a whole body; `known` says which names a place may have, for the nearest one in a message."""

    rank: type[msgspec.Struct]
    known: dict[str, tuple[str, ...]]  # path without indices → names
    flat: tuple[int, ...]  # NRO features, by index, that a candidate's row may have beside its item_id


def build_types(schema: Schema) -> JsonTypes:
    """Types of `POST /v1/rank` for this schema."""
    value = {f.name: _described(f, schema) for f in (*schema.ro, *schema.nro)}
    ro = _struct("RequestFeatures", [(f, value[f.name]) for f in schema.ro])
    nro = _struct("CandidateFeatures", [(f, value[f.name]) for f in schema.nro])
    flat = tuple(i for i, f in enumerate(schema.nro) if f.name not in ("item_id", "nro"))
    own = [
        ("item_id", Id),
        ("nro", Annotated[nro | None, Meta(description="features may also stand in here")], None),
    ]
    row = _struct("CandidateRow", [(schema.nro[i], value[schema.nro[i].name]) for i in flat], own)
    count: dict[str, Any] = {"minItems": 1, "maxItems": schema.limits.max_candidates}
    items = Annotated[list[Id], limits("one a candidate, each once", uniqueItems=True, **count)]
    columns = _struct(
        "CandidateColumns", [(f, _column(value[f.name], schema)) for f in schema.nro], [("item_id", items)]
    )
    both = Annotated[list[row], limits(**count)] | columns  # type: ignore[valid-type]
    fields = _fields(both, ro)
    return JsonTypes(msgspec.defstruct("RankRequest", fields, **FORBID), _known(schema, fields, flat), flat)


def _fields(candidates: Any, ro: type[msgspec.Struct]) -> list[Any]:
    return [
        ("candidates", Annotated[candidates, Meta(description="rows, or columns; each item once")]),
        (
            "request_id",
            Annotated[
                str, limits("at most 64 bytes of UTF-8; made here when missing", maxLength=MAX_TEXT_BYTES)
            ],
            "",
        ),
        ("user_id", Id, 0),
        ("session_id", Id, 0),
        ("surface", Annotated[str, TEXT], ""),
        ("ro", ro, msgspec.field(default_factory=ro)),
        (
            "append",
            Annotated[bool, Meta(description="a page that adds candidates to an open request")],
            False,
        ),
        (
            "first_position",
            Annotated[int, limits("place of this page's first slot", minimum=0, maximum=(1 << 31) - 1)],
            0,
        ),
        (
            "model_version",
            Annotated[
                str, limits("empty = the newest; 404 if it isn't held", pattern=r"^(\d{1,20}-\d{1,20})?$")
            ],
            "",
        ),
    ]


def _known(schema: Schema, fields: list[Any], flat: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    nro = tuple(f.name for f in schema.nro)
    known = {
        "$": tuple(f[0] for f in fields),
        "$.candidates[]": ("item_id", "nro", *(schema.nro[i].name for i in flat)),
    }
    known |= {
        "$.ro": tuple(f.name for f in schema.ro),
        "$.candidates[].nro": nro,
        "$.candidates": ("item_id", *nro),
    }
    for place, features in (
        ("$.ro", schema.ro),
        ("$.candidates[].nro", schema.nro),
        ("$.candidates[]", schema.nro),
        ("$.candidates", schema.nro),
    ):
        known |= {
            f"{place}.{f.name}{'[]' if place == '$.candidates' else ''}": _parts(f)
            for f in features
            if _parts(f)
        }
    return known


def _struct(
    name: str, features: list[tuple[Feature, Any]], first: list[Any] | None = None
) -> type[msgspec.Struct]:
    fields: list[Any] = [*(first or []), *((f"f{i}", kind, None) for i, (_, kind) in enumerate(features))]
    return msgspec.defstruct(
        name, fields, rename={f"f{i}": f.name for i, (f, _) in enumerate(features)}, **FORBID
    )


def _column(value: Any, schema: Schema) -> Any:
    return (
        Annotated[
            list[value], limits("one a candidate; null = missing", maxItems=schema.limits.max_candidates)
        ]
        | None
    )


def _described(f: Feature, schema: Schema) -> Any:
    value = _value(f, schema)
    return Annotated[value, Meta(description=f"hydrated when missing: {f.online}")] if f.online else value


def _value(f: Feature, schema: Schema) -> Any:
    """Type of one value; null = missing."""
    most, weight = schema.limits.max_list, limits(minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)

    def several(kind: Any) -> Any:
        return Annotated[list[kind], limits(maxItems=most)]

    if f.kind == "float":
        return Annotated[float, FLOAT] | None
    if f.kind == "ids":
        return Id | several(Id) | None
    if f.kind == "weighted_ids":
        return (
            msgspec.defstruct(
                f"Weighted_{f.name}",
                [("ids", several(Id)), ("weights", several(Annotated[float, weight]))],
                **FORBID,
            )
            | None
        )
    ids, times = several(Id), several(Annotated[int, TIME])
    columns = [ids if kind == "ids" else times for kind in f.columns.values()]
    main = msgspec.field(name=main_key(f), default=None)
    fields: list[Any] = [*((f"c{i}", kind) for i, kind in enumerate(columns)), ("main", ids | None, main)]
    if main_key(f) != "ids" and "ids" not in f.columns:
        meaning = Meta(description=f"another name of {main_key(f)!r}: give one of them")
        fields.append(("ids", Annotated[ids | None, meaning], None))
    names = {f"c{i}": column for i, column in enumerate(f.columns)}
    return msgspec.defstruct(f"Sequence_{f.name}", fields, rename=names, **FORBID) | None


def _parts(f: Feature) -> tuple[str, ...]:
    if f.kind == "weighted_ids":
        return ("ids", "weights")
    return (main_key(f), *f.columns) if f.kind == "sequence" else ()

"""The JSON form of a schema's features as msgspec types: one pass of compiled code checks names and types.

Field names are `f0, f1, …` in declared order (a feature's own name need not be an identifier), renamed to the features'.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roo.block import main_key
from roo.schema import Feature, Schema

Id = Annotated[int | str, Meta(description="a string is hashed")]
FORBID: dict[str, Any] = {"forbid_unknown_fields": True}


@dataclasses.dataclass(frozen=True)
class JsonTypes:
    """`rank` is the type of a whole body; `known` says which names a place may have, for the nearest one in a message."""

    rank: type[msgspec.Struct]
    known: dict[str, tuple[str, ...]]  # path without indices → names


def build_types(schema: Schema) -> JsonTypes:
    """Types of `POST /v1/rank` for this schema."""
    value = {f.name: _described(f) for f in (*schema.ro, *schema.nro)}
    ro = _struct("Ro", [(f, value[f.name]) for f in schema.ro])
    nro = _struct("Nro", [(f, value[f.name]) for f in schema.nro])
    candidate = msgspec.defstruct("Candidate", [("item_id", Id), ("nro", nro, msgspec.field(default_factory=nro))], **FORBID)
    columnar = _struct("Candidates", [(f, _column(value[f.name])) for f in schema.nro], [("item_id", list[Id])])
    fields: list[Any] = [
        ("candidates", list[candidate] | columnar),  # type: ignore[valid-type]
        ("request_id", Annotated[str, Meta(description="at most 64 bytes; made here when missing")], ""),
        ("user_id", Id, 0),
        ("session_id", Id, 0),
        ("surface", str, ""),
        ("ro", ro, msgspec.field(default_factory=ro)),
        ("append", Annotated[bool, Meta(description="a page that adds candidates to an open request")], False),
        ("first_position", Annotated[int, Meta(description="place of this page's first slot")], 0),
        ("model_version", Annotated[str, Meta(description="empty = the newest; 404 if it isn't held")], ""),
    ]
    known = {"$": tuple(f[0] for f in fields), "$.candidates[]": ("item_id", "nro")}
    known |= {"$.ro": tuple(f.name for f in schema.ro), "$.candidates[].nro": tuple(f.name for f in schema.nro)}
    known["$.candidates"] = ("item_id", *known["$.candidates[].nro"])
    for place, features in (("$.ro", schema.ro), ("$.candidates[].nro", schema.nro), ("$.candidates", schema.nro)):
        known |= {f"{place}.{f.name}{'[]' if place == '$.candidates' else ''}": _parts(f) for f in features if _parts(f)}
    return JsonTypes(msgspec.defstruct("Rank", fields, **FORBID), known)


def _struct(name: str, features: list[tuple[Feature, Any]], first: list[Any] | None = None) -> type[msgspec.Struct]:
    fields: list[Any] = [*(first or []), *((f"f{i}", kind, None) for i, (_, kind) in enumerate(features))]
    return msgspec.defstruct(name, fields, rename={f"f{i}": f.name for i, (f, _) in enumerate(features)}, **FORBID)


def _column(value: Any) -> Any:
    return list[value] | None


def _described(f: Feature) -> Any:
    return Annotated[_value(f), Meta(description=f"hydrated when missing: {f.online}")] if f.online else _value(f)


def _value(f: Feature) -> Any:
    """Type of one value; null = missing."""
    if f.kind == "float":
        return float | None
    if f.kind == "ids":
        return Id | list[Id] | None
    if f.kind == "weighted_ids":
        return msgspec.defstruct(f"Weighted_{f.name}", [("ids", list[Id]), ("weights", list[float])], **FORBID) | None
    columns = [list[Id] if kind == "ids" else list[int] for kind in f.columns.values()]
    main = msgspec.field(name=main_key(f), default=None)
    fields: list[Any] = [*((f"c{i}", kind) for i, kind in enumerate(columns)), ("main", list[Id] | None, main)]
    if main_key(f) != "ids" and "ids" not in f.columns:
        fields.append(("ids", list[Id] | None, None))
    names = {f"c{i}": column for i, column in enumerate(f.columns)}
    return msgspec.defstruct(f"Sequence_{f.name}", fields, rename=names, **FORBID) | None


def _parts(f: Feature) -> tuple[str, ...]:
    if f.kind == "weighted_ids":
        return ("ids", "weights")
    return (main_key(f), *f.columns) if f.kind == "sequence" else ()

"""Parses the JSON body of `POST /v1/rank` into a RankRequest.

The body's msgspec types are built from the schema. Struct fields are called `f0, f1, …` in declared order and
renamed to the features' names, which need not be identifiers. Candidates are rows, `[{"item_id": 8, "age_h":
2.5}, …]`, or columns, `{"item_id": […], "age_h": […]}`. The features of a row may also be nested:
`{"item_id": 8, "nro": {"age_h": 2.5}}`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from roostream.errors import nearest
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import main_key
from roostream.wire.records import MAX_WEIGHT
from serving.errors import RequestError, shown
from serving.json_keys import check_keys
from serving.request import RankRequest, check_ids, check_text, parse_id, parse_ids, parse_request_id
from serving.types import FORBID, Id, RankFields, RankOptions, described, limits

RANK_QUERY = RankOptions.__struct_fields__
MAX_FLOAT = math.nextafter((2 - 2**-24) * 2.0**127, 0)
"""The largest number that rounds to a finite 32-bit float. Most languages write the largest 32-bit float as
3.4028235e38, which is larger than it."""
TIME = limits("ms since 1970", minimum=-(1 << 63), maximum=(1 << 63) - 1)
FLOAT = limits(minimum=-MAX_FLOAT, maximum=MAX_FLOAT)


@dataclasses.dataclass(frozen=True)
class JsonTypes:
    """`rank` is the type of the whole body, `ro` that of the request's features. `known` lists the field
    names at each path, for suggestions in error messages."""

    rank: type[msgspec.Struct]
    ro: type[msgspec.Struct]
    known: dict[str, tuple[str, ...]]  # path without indices → names
    flat: tuple[int, ...]  # indices of the NRO features that a candidate row may have beside item_id


def build_types(schema: Schema) -> JsonTypes:
    """Build the types of `POST /v1/rank` for this schema."""
    value = {f.name: _described(f, schema) for f in (*schema.ro, *schema.nro)}
    ro = _struct("RequestFeatures", [(f, value[f.name]) for f in schema.ro])
    nro = _struct("CandidateFeatures", [(f, value[f.name]) for f in schema.nro])
    flat = tuple(i for i, f in enumerate(schema.nro) if f.name not in ("item_id", "nro"))
    own = [
        ("item_id", Id),
        ("nro", Annotated[nro | None, described("features may also stand in here")], None),
    ]
    row = _struct("CandidateRow", [(schema.nro[i], value[schema.nro[i].name]) for i in flat], own)
    count: dict[str, Any] = {"minItems": 1, "maxItems": schema.limits.max_candidates}
    items = Annotated[list[Id], limits("one a candidate, each once", **count)]
    columnar = [(f, _column(value[f.name], schema)) for f in _columnar(schema)]
    columns = _struct("CandidateColumns", columnar, [("item_id", items)])
    both = Annotated[list[row], limits(**count)] | columns  # type: ignore[valid-type]
    rank = msgspec.defstruct(
        "RankRequest",
        [
            (
                "candidates",
                Annotated[both, described("rows, or CandidateColumns instead of the list; each item once")],
            ),
            ("ro", ro, msgspec.field(default_factory=ro)),
        ],
        bases=(RankFields,),
        kw_only=True,
        **FORBID,
    )
    return JsonTypes(rank, ro, _known(schema, rank.__struct_encode_fields__, flat), flat)


def _known(schema: Schema, fields: tuple[str, ...], flat: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    nro = tuple(f.name for f in schema.nro)
    known = {
        "$": fields,
        "$.candidates[]": ("item_id", "nro", *(schema.nro[i].name for i in flat)),
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


def _columnar(schema: Schema) -> list[Feature]:
    """NRO features that columns may have: a feature `item_id` can only be given in the `nro` of a row."""
    return [f for f in schema.nro if f.name != "item_id"]


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
    return (
        Annotated[value, Meta(description=f"filled in by serving when missing: {f.online}")]
        if f.online
        else value
    )


def _value(f: Feature, schema: Schema) -> Any:
    """The JSON type of a value of feature `f`; null means that the value is missing."""
    max_list, weight = schema.limits.max_list, limits(minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)

    def several(kind: Any) -> Any:
        return Annotated[list[kind], limits(maxItems=max_list)]

    if f.kind == "float":
        return Annotated[float, FLOAT] | None
    if f.kind == "ids":
        return Annotated[Id | several(Id), described("a list, or one id without it")] | None
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


_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`", re.DOTALL)
_AT = " - at `"


class JsonParser:
    """For one schema: `schema.derived(JsonParser)` builds its types once. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.types = build_types(schema)
        self._decoder = msgspec.json.Decoder(self.types.rank)
        self._by_column = [(f"f{i}", f) for i, f in enumerate(_columnar(schema))]
        self._ro = [(f"f{i}", f, f"$.ro.{f.name}") for i, f in enumerate(schema.ro)]

    def parse(self, body: bytes) -> RankRequest:
        """Parse and validate a body.

        Raises:
            RequestError: 400 with the path of the field; 413 for more candidates or list entries than the
            schema allows.
        """
        rank: Any = decode_body(self._decoder, body, self.types.known)
        by_row = isinstance(rank.candidates, list)
        ids = [c.item_id for c in rank.candidates] if by_row else rank.candidates.item_id
        return RankRequest(
            request_id=parse_request_id(rank.request_id, "$.request_id"),
            user_id=parse_id(rank.user_id, "$.user_id"),
            session_id=parse_id(rank.session_id, "$.session_id"),
            surface=check_text(rank.surface, "$.surface"),
            item_ids=self._items(ids, "$.candidates[{}].item_id" if by_row else "$.candidates.item_id[{}]"),
            client_item_ids=ids,
            ro=self.request_values(rank.ro),
            nro=self._rows(rank.candidates) if by_row else self._columns(rank.candidates),
            append=rank.append,
            first_position=check_position(rank.first_position, len(ids)),
            model_version=rank.model_version,
        )

    def _items(self, ids: list[Any], path: str) -> np.ndarray:
        check_num_candidates(self.schema, len(ids))
        items = parse_ids(ids, path.format)
        check_unique(items, path)
        return items

    def request_values(self, ro: Any) -> dict[str, Any]:
        """The values of the request's features, checked. Raises RequestError."""
        out: dict[str, Any] = {}
        for name, f, path in self._ro:
            value = getattr(ro, name)
            if value is not None:
                plain = f.kind == "float" and -MAX_FLOAT <= value <= MAX_FLOAT
                out[f.name] = value if plain else self._checked(f, value, path)
        return out

    def _rows(self, candidates: list[Any]) -> dict[str, Any]:
        """Features beside `item_id`, nested in `nro`, or both."""
        _, nested, *flat = zip(*map(msgspec.structs.astuple, candidates), strict=True)
        given = {
            f.name: (f, column) for f, column in _given(flat, [self.schema.nro[i] for i in self.types.flat])
        }
        if nested.count(None) == len(nested):
            return self._checked_columns(list(given.values()), "$.candidates[{}].{}")
        absent = (None,) * len(self.schema.nro)
        columns = zip(*(absent if c is None else msgspec.structs.astuple(c) for c in nested), strict=True)
        path = "$.candidates[{}].{}" if given else "$.candidates[{}].nro.{}"
        for f, column in _given(columns, self.schema.nro):
            given[f.name] = (
                f,
                _merge_columns(f.name, given[f.name][1], column) if f.name in given else column,
            )
        return self._checked_columns(list(given.values()), path)

    def _columns(self, candidates: Any) -> dict[str, Any]:
        """Columns that the body has, by feature."""
        n = len(candidates.item_id)
        given: list[tuple[Feature, Sequence[Any]]] = []
        for name, f in self._by_column:
            column = getattr(candidates, name)
            if column is None:
                continue
            if len(column) != n:
                raise RequestError(
                    400, f"expected {n} values as in item_id, got {len(column)}", f"$.candidates.{f.name}"
                )
            given.append((f, column))
        return self._checked_columns(given, "$.candidates.{1}[{0}]")

    def _checked_columns(self, given: Sequence[tuple[Feature, Sequence[Any]]], path: str) -> dict[str, Any]:
        """`path` has placeholders for index and name. All floats are converted and checked at once."""
        floats = [(f, column) for f, column in given if f.kind == "float"]
        values_Fn = np.array([column for _, column in floats], dtype=np.float64)  # None → NaN
        large_Fn = np.abs(values_Fn) > MAX_FLOAT
        if large_Fn.any():
            at, row = np.argwhere(large_Fn)[0].tolist()
            self._checked(floats[at][0], float(values_Fn[at, row]), path.format(row, floats[at][0].name))
        out: dict[str, Any] = {f.name: values_Fn[i] for i, (f, _) in enumerate(floats)}
        return out | {f.name: self._list_column(f, column, path) for f, column in given if f.kind != "float"}

    def _list_column(self, f: Feature, column: Sequence[Any], path: str) -> Any:
        if f.kind == "ids":
            single = [v[0] if type(v) is list and len(v) == 1 else v for v in column]
            if {int, str}.issuperset(map(type, single)):  # one id per row: an array encodes without a loop
                return parse_ids(single, lambda row: path.format(row, f.name))
        return [
            None if v is None else self._checked(f, v, path.format(i, f.name)) for i, v in enumerate(column)
        ]

    def _checked(self, f: Feature, value: Any, path: str) -> Any:
        """Return one value in the form that `encode_*` takes."""
        if f.kind == "float":
            if abs(value) > MAX_FLOAT:
                raise RequestError(400, f"expected a finite 32-bit float, got {value}", path)
            return value
        if f.kind == "ids":
            ids = value if isinstance(value, list) else [value]
            self._check_list(ids, path, "ids")
            return ids
        if f.kind == "weighted_ids":
            self._check_list(value.ids, f"{path}.ids", "ids")
            for i, weight in enumerate(value.weights):
                if abs(weight) > MAX_WEIGHT:
                    message = f"expected a weight within ±{MAX_WEIGHT:.0f}, got {weight}"
                    raise RequestError(400, message, f"{path}.weights[{i}]")
            return _aligned({"ids": value.ids, "weights": value.weights}, path)
        return self._sequence(f, value, path)

    def _sequence(self, f: Feature, value: Any, path: str) -> dict[str, Any]:
        """The ids may be given under the table's name or as `ids`, not both."""
        given = [ids for ids in (value.main, getattr(value, "ids", None)) if ids is not None]
        if len(given) != 1:
            raise RequestError(
                400, f"expected its ids once, as {main_key(f)!r}, got them {len(given)} times", path
            )
        out: dict[str, Any] = {main_key(f): given[0]}
        out |= {column: getattr(value, f"c{i}") for i, column in enumerate(f.columns)}
        for column, values in out.items():
            self._check_list(values, f"{path}.{column}", f.columns.get(column, "ids"))
        return _aligned(out, path)

    def _check_list(self, values: list[Any], path: str, kind: str) -> None:
        if len(values) > self.schema.limits.max_list:
            raise RequestError(
                413, f"expected at most {self.schema.limits.max_list} entries, got {len(values)}", path
            )
        if kind == "ids":
            check_ids(values, lambda i: f"{path}[{i}]")
        elif values and not -(1 << 63) <= min(values) <= max(values) < 1 << 63:
            raise RequestError(400, "expected times in ms as 64-bit integers", path)


def _given(
    columns: Iterable[Sequence[Any]], features: Sequence[Feature]
) -> list[tuple[Feature, Sequence[Any]]]:
    """Columns that have a value in at least one row."""
    return [
        (f, column) for f, column in zip(features, columns, strict=False) if column.count(None) < len(column)
    ]


def _merge_columns(name: str, flat: Sequence[Any], nested: Sequence[Any]) -> list[Any]:
    """Merge flat and nested values. RequestError 400 if a row has a feature in both places."""
    for row, (here, there) in enumerate(zip(flat, nested, strict=True)):
        if here is not None and there is not None:
            message = f"expected {name!r} once, beside item_id or in nro, got both"
            raise RequestError(400, message, f"$.candidates[{row}].nro.{name}")
    return [there if here is None else here for here, there in zip(flat, nested, strict=True)]


def check_num_candidates(schema: Schema, count: int, path: str = "$.candidates") -> None:
    """Raises RequestError 400 for no candidates, 413 for more than the schema takes."""
    if not count:
        raise RequestError(400, "expected at least one candidate, got none", path)
    if count > schema.limits.max_candidates:
        raise RequestError(
            413, f"expected at most {schema.limits.max_candidates} candidates, got {count}", path
        )


def check_unique(item_ids_n: np.ndarray, path: str) -> None:
    """Raises RequestError 400 with both positions of an item that is given twice; `path` has a placeholder
    for the index."""
    items = item_ids_n.tolist()
    if len(set(items)) == len(items):
        return
    first: dict[int, int] = {}
    for i, item in enumerate(items):
        if first.setdefault(item, i) != i:
            message = f"expected each candidate once, got that of {path.format(first[item])} again"
            raise RequestError(400, message, path.format(i))


def decode_body(decoder: msgspec.json.Decoder[Any], body: bytes, known: dict[str, tuple[str, ...]]) -> Any:
    """Decode `body`. Raises RequestError 400 with the path of the field, and the nearest known name if a name
    is unknown; or if an object has a field twice."""
    try:
        decoded = decoder.decode(body)
        check_keys(body)
    except UnicodeDecodeError as error:
        raise RequestError(
            400, f"expected JSON in UTF-8, got byte 0x{error.object[error.start]:02x} in a string", "$"
        ) from None
    except RecursionError:
        raise RequestError(
            400, "expected JSON of this interface, got one that is nested too deeply", "$"
        ) from None
    except msgspec.DecodeError as error:
        if not isinstance(error, msgspec.ValidationError) and (got := _other_format(body, str(error))):
            raise RequestError(400, f"expected JSON in UTF-8, got {got}", "$") from None
        raise _decode_error(str(error), known) from None
    return decoded


_BEGINNINGS = {
    b"\xef\xbb\xbf": "a byte order mark before it; send it without",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip; add the header content-encoding: gzip",
}


_LONE_SURROGATE = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}"')


def _other_format(body: bytes, message: str) -> str:
    """What a body is that is no JSON, if its beginning or the message of the decoder tells, else ""."""
    if not body.strip():
        return "an empty body"
    if "surrogate" in message or ("truncated" in message and _LONE_SURROGATE.search(body)):
        return "half of a surrogate pair in a string"
    return next((got for beginning, got in _BEGINNINGS.items() if body.startswith(beginning)), "")


def _decode_error(message: str, known: dict[str, tuple[str, ...]]) -> RequestError:
    """Turn msgspec's message into a RequestError. The unknown name may be as long as the body, so it is
    cut."""
    what, at, path = message.rpartition(_AT)
    if not at or not message.endswith("`"):
        what, path = message, "$`"
    path, unknown = path[:-1], _UNKNOWN.search(what)
    if unknown is None:
        return RequestError(400, what + _advice(what, path), path)
    name = shown(unknown["name"])
    names = known.get(re.sub(r"\[\d+\]", "[]", path), ())
    instead = (
        f"; say it in the address, ?{name}="
        if "candidates" in names and name in RANK_QUERY
        else _other_place(name, path, known) + nearest(name, names)
    )
    return RequestError(400, f"unknown field {name!r}{instead}", f"{path}.{name}")


_PLACES = {"$": "at the top of the body", "$.ro": "in 'ro'", "$.candidates[]": "in each candidate"}


def _other_place(name: str, path: str, known: dict[str, tuple[str, ...]]) -> str:
    """Where a name belongs that stands in the wrong place; "" if it belongs nowhere."""
    for place, where in _PLACES.items():
        has_place = place == "$" or place[2:].removesuffix("[]") in known.get("$", ())
        if has_place and place != f"{path}[]" and name in known.get(place, ()):  # candidates may be columns
            return f"; it belongs {where}"
    return ""


_OPTIONAL = re.compile(
    r"[$.\[\]\d]+\.(user_id|session_id|surface|ro|value)"
    r"|\$\.(request_id|append|first_position|model_version|k|retrieved|task|exclude|exclude_seen|filter)"
)
_CANDIDATE = re.compile(r"\$\.candidates\[\d+\]")


def _advice(what: str, path: str) -> str:
    """What to write instead, for the commonest mistakes."""
    if what.endswith("got `null`") and _OPTIONAL.fullmatch(path):
        return "; leave it out if it is unknown"
    return ', such as {"item_id": 8}' if what.startswith("Expected") and _CANDIDATE.fullmatch(path) else ""


def check_position(first: int, num_candidates: int, path: str = "$.first_position") -> int:
    """Return `first`. Raises RequestError 400: the position of a candidate would be beyond 31 bits, which the
    trainer would refuse."""
    max_first = (1 << 31) - 1 - num_candidates
    if not 0 <= first <= max_first:
        raise RequestError(400, f"expected a position from 0 to {max_first}, got {shown(first)}", path)
    return first


def _aligned(columns: dict[str, Any], path: str) -> dict[str, Any]:
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise RequestError(
            400,
            f"expected columns of equal length, got {', '.join(f'{n} {s}' for n, s in sizes.items())}",
            path,
        )
    return columns

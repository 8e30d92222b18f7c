"""JSON body of `POST /v1/rank` → RankRequest. Names, types and numbers are checked here; every refusal has its path.

Candidates come as rows, `[{"item_id": 8, "nro": {"age_h": 2.5}}, …]`, or as columns, `{"item_id": […], "age_h": […]}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roo.block import main_key
from roo.errors import nearest
from roo.schema import Feature, Schema
from serving.errors import RequestError
from serving.json_types import build_types
from serving.request import RankRequest, check_ids, id_of, ids_of, request_id_of, text_of

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_AT = re.compile(r"(?s)^(?P<what>.*?)(?: - at `(?P<path>\$.*)`)?$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`")


class JsonParser:
    """For one schema. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._types = build_types(schema)
        self._decoder = msgspec.json.Decoder(self._types.rank)
        self._nro = [(f"f{i}", f) for i, f in enumerate(schema.nro)]
        self._ro = [(f"f{i}", f) for i, f in enumerate(schema.ro)]

    def parse(self, body: bytes) -> RankRequest:
        """Raises RequestError 400 with the path of the field, 413 for more candidates or list entries than the schema takes."""
        try:
            rank: Any = self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise decode_error(error, self._types.known) from None
        by_row = isinstance(rank.candidates, list)
        return RankRequest(
            request_id=request_id_of(rank.request_id, "$.request_id"),
            user_id=id_of(rank.user_id, "$.user_id"),
            session_id=id_of(rank.session_id, "$.session_id"),
            surface=text_of(rank.surface, "$.surface"),
            item_ids=self._items(rank.candidates, by_row),
            ro=self._request_values(rank.ro),
            nro=self._rows(rank.candidates) if by_row else self._columns(rank.candidates),
            append=rank.append,
            first_position=_position(rank.first_position),
            model_version=rank.model_version,
        )

    def _items(self, candidates: Any, by_row: bool) -> np.ndarray:
        ids = [c.item_id for c in candidates] if by_row else candidates.item_id
        check_candidates(self.schema, len(ids))
        return ids_of(ids, lambda i: f"$.candidates[{i}].item_id" if by_row else f"$.candidates.item_id[{i}]")

    def _request_values(self, ro: Any) -> dict[str, Any]:
        values = {f.name: getattr(ro, name) for name, f in self._ro}
        return {f.name: self._checked(f, values[f.name], f"$.ro.{f.name}") for _, f in self._ro if values[f.name] is not None}

    def _rows(self, candidates: list[Any]) -> dict[str, Any]:
        columns = zip(*[msgspec.structs.astuple(c.nro) for c in candidates], strict=True)
        given = [(f, column) for (_, f), column in zip(self._nro, columns, strict=False) if column.count(None) < len(column)]
        return self._checked_columns(given, "$.candidates[{}].nro.{}")

    def _columns(self, candidates: Any) -> dict[str, Any]:
        """Candidates in columns: what each of them has, by feature."""
        n = len(candidates.item_id)
        given: list[tuple[Feature, Sequence[Any]]] = []
        for name, f in self._nro:
            column = getattr(candidates, name)
            if column is None:
                continue
            if len(column) != n:
                raise RequestError(400, f"expected {n} values as in item_id, got {len(column)}", f"$.candidates.{f.name}")
            given.append((f, column))
        return self._checked_columns(given, "$.candidates.{1}[{0}]")

    def _checked_columns(self, given: Sequence[tuple[Feature, Sequence[Any]]], path: str) -> dict[str, Any]:
        """`path` has places for index and name. All floats are converted and checked at once."""
        floats = [(f, column) for f, column in given if f.kind == "float"]
        values_Fn = np.array([column for _, column in floats], dtype=np.float64)  # None → NaN
        large_Fn = np.abs(values_Fn) > _LARGEST_FLOAT
        if large_Fn.any():
            at, row = np.argwhere(large_Fn)[0].tolist()
            self._checked(floats[at][0], float(values_Fn[at, row]), path.format(row, floats[at][0].name))
        out: dict[str, Any] = {f.name: values_Fn[i] for i, (f, _) in enumerate(floats)}
        return out | {f.name: self._list_column(f, column, path) for f, column in given if f.kind != "float"}

    def _list_column(self, f: Feature, column: Sequence[Any], path: str) -> Any:
        if f.kind == "ids":
            single = [v[0] if type(v) is list and len(v) == 1 else v for v in column]
            if {int, str}.issuperset(map(type, single)):  # exactly one id a row: an array, which encodes without a loop
                return ids_of(single, lambda row: path.format(row, f.name))
        return [None if v is None else self._checked(f, v, path.format(i, f.name)) for i, v in enumerate(column)]

    def _checked(self, f: Feature, value: Any, path: str) -> Any:
        """One value in the form that `encode_*` takes."""
        if f.kind == "float":
            if abs(value) > _LARGEST_FLOAT:
                raise RequestError(400, f"expected a finite 32-bit float, got {value}", path)
            return value
        if f.kind == "ids":
            ids = value if isinstance(value, list) else [value]
            self._check_list(ids, path, "ids")
            return ids
        if f.kind == "weighted_ids":
            self._check_list(value.ids, f"{path}.ids", "ids")
            for i, weight in enumerate(value.weights):
                self._checked(_A_FLOAT, weight, f"{path}.weights[{i}]")
            return _aligned({"ids": value.ids, "weights": value.weights}, path)
        return self._sequence(f, value, path)

    def _sequence(self, f: Feature, value: Any, path: str) -> dict[str, Any]:
        """The ids may be given by the table's name or as `ids`, not both."""
        given = [ids for ids in (value.main, getattr(value, "ids", None)) if ids is not None]
        if len(given) != 1:
            raise RequestError(400, f"expected its ids once, as {main_key(f)!r}, got them {len(given)} times", path)
        out: dict[str, Any] = {main_key(f): given[0]}
        out |= {column: getattr(value, f"c{i}") for i, column in enumerate(f.columns)}
        for column, values in out.items():
            self._check_list(values, f"{path}.{column}", f.columns.get(column, "ids"))
        return _aligned(out, path)

    def _check_list(self, values: list[Any], path: str, kind: str) -> None:
        if len(values) > self.schema.limits.max_list:
            raise RequestError(413, f"expected at most {self.schema.limits.max_list} entries, got {len(values)}", path)
        if kind == "ids":
            check_ids(values, lambda i: f"{path}[{i}]")
        elif values and not -(1 << 63) <= min(values) <= max(values) < 1 << 63:
            raise RequestError(400, "expected times in ms as 64-bit integers", path)


_A_FLOAT = Feature(name="weight", kind="float")


def check_candidates(schema: Schema, count: int) -> None:
    """Raises RequestError 413."""
    if count > schema.limits.max_candidates:
        raise RequestError(413, f"expected at most {schema.limits.max_candidates} candidates, got {count}", "$.candidates")


def decode_error(error: msgspec.DecodeError, known: dict[str, tuple[str, ...]]) -> RequestError:
    """msgspec's error with the nearest name where a name is unknown."""
    match = _AT.match(str(error))
    assert match is not None
    path, unknown = match["path"] or "$", _UNKNOWN.search(match["what"])
    if unknown is None:
        return RequestError(400, match["what"], path)
    names = known.get(re.sub(r"\[\d+\]", "[]", path), ())
    return RequestError(400, f"unknown field {unknown['name']!r}{nearest(unknown['name'], names)}", f"{path}.{unknown['name']}")


def _position(value: int) -> int:
    if not 0 <= value < 1 << 31:
        raise RequestError(400, f"expected a place from 0 on, got {value}", "$.first_position")
    return value


def _aligned(columns: dict[str, Any], path: str) -> dict[str, Any]:
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise RequestError(400, f"expected columns of equal length, got {', '.join(f'{n} {s}' for n, s in sizes.items())}", path)
    return columns

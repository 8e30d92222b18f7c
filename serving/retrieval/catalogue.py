"""The catalogue: a file with one JSON object per line, in the format of HTTP candidates, with attributes for
filters.

    {"item_id": 8, "topics": [3, 7], "age_h": 2.5, "attributes": {"lang": "da", "genre": ["news", "sport"]}}

Features that the schema keeps `online` must not be in the file: they change by the minute and are read when a
list is ranked. The `[[nro]]` feature that is the item id itself can be left out.

Letters: I items, N some of them, F floats, K list features.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from roostream.errors import ConfigError, WireError, nearest
from roostream.online.counters import sources_of
from roostream.schema.schema import Feature, Schema
from roostream.wire.batch import Batch
from roostream.wire.block import encode_nro, main_key
from roostream.wire.decode import Decoder
from roostream.wire.jagged import Jagged
from serving.errors import RequestError, shown
from serving.rank_json import JsonParser
from serving.request import RankRequest

AttributeValue: TypeAlias = bool | int | str


class Attributes:
    """Attribute name → value → the items that have it. An item has none, one or several values of a name.
    Immutable."""

    def __init__(self, client_id_I: Sequence[Mapping[str, Any]]) -> None:
        """The attributes of each item, in the catalogue's order, checked by `check_attributes`."""
        self.num_items = len(client_id_I)
        found: dict[str, dict[str, list[int]]] = {}
        for slot, given in enumerate(client_id_I):
            for name, value in given.items():
                for each in dict.fromkeys(_texts(value)):
                    found.setdefault(name, {}).setdefault(each, []).append(slot)
        self._slots = {
            name: {v: np.array(s, np.int64) for v, s in values.items()} for name, values in found.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def allowed(self, wanted: Mapping[str, AttributeValue | Sequence[AttributeValue]]) -> np.ndarray:
        """bool [I]: items that have one of the wanted values of every name. Raises RequestError 400: no item
        has that name."""
        allowed_I = np.ones(self.num_items, np.bool_)
        for name, value in wanted.items():
            if name not in self._slots:
                message = f"no item has attribute {shown(name)!r}{nearest(shown(name), self._slots)}"
                raise RequestError(400, message, f"$.filter.{shown(name)}")
            have_I = np.zeros(self.num_items, np.bool_)
            for each in _texts(value):
                have_I[self._slots[name].get(each, _NONE)] = True
            allowed_I &= have_I
        return allowed_I


_NONE = np.zeros(0, np.int64)


def _texts(value: AttributeValue | Iterable[AttributeValue]) -> list[str]:
    """Values as JSON, where true differs from 1."""
    return [msgspec.json.encode(v).decode() for v in (value if isinstance(value, list | tuple) else (value,))]


def check_attributes(given: object) -> str:
    """What is wrong with an item's `attributes`; "" = nothing."""
    if not isinstance(given, dict):
        return f"expected attributes as an object, got {shown(given)!r}"
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, AttributeValue):
                return (
                    f"expected attribute {shown(name)!r} as a text, an integer, true, false or a list "
                    f"of them, got {shown(each)}"
                )
    return ""


_PLACE = re.compile(r"^\$\.candidates\[(\d+)\]\.?")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """Immutable. An item's slot is its index when sorted by id."""

    id_I: np.ndarray  # int64, ascending, each once
    client_id_I: list[int | str]  # ids as the file has them
    items: Batch  # one request whose candidates are all items
    attributes: Attributes

    def __len__(self) -> int:
        return len(self.id_I)

    def find_slots(self, id_N: np.ndarray) -> np.ndarray:
        """Slots of the known ids, each once, ascending."""
        slot_N = np.minimum(np.searchsorted(self.id_I, id_N), max(len(self) - 1, 0))
        return np.unique(slot_N[self.id_I[slot_N] == id_N]) if len(self) else np.zeros(0, np.int64)

    def take(self, slot_N: np.ndarray) -> Batch:
        """These items as the candidates of one request."""
        return _take_batch(self.items, slot_N)

    def features(self, slot_N: np.ndarray) -> dict[str, Any]:
        """The `nro` values of a rank request for these items, without features that none of them has."""
        taken, schema = self.take(slot_N), self.items.schema
        floats = {
            f.name: np.where(taken.nro_present_BF[:, i], taken.nro_float_BF[:, i], np.nan).astype(np.float64)
            for i, f in enumerate(schema.floats("nro"))
            if taken.nro_present_BF[:, i].any()
        }
        lists = taken.nro_lists
        given = [f for k, f in enumerate(schema.lists("nro")) if lists.present_KN[k].any()]
        return floats | {f.name: _column(f, lists) for f in given}


def load_catalogue(schema: Schema, path: str | Path) -> Catalogue:
    """Read the catalogue of items. Raises ConfigError: the file cannot be read, or a line is invalid; with
    file and line."""
    try:
        with Path(path).open("rb") as lines:
            return read_catalogue(schema, lines, str(path))
    except OSError as error:
        raise ConfigError(f"items: expected a file of items, got {shown(path)!r}: {error.strerror}") from None


def read_catalogue(schema: Schema, lines: Iterable[bytes], name: str = "items") -> Catalogue:
    """One item per line; empty lines are skipped. Raises ConfigError with name and line."""
    reader = _CatalogueReader(schema, name)
    parts = [reader.part(chunk) for chunk in _chunks(lines, schema.limits.max_candidates)]
    if not parts:
        raise ConfigError(f"{name}: expected at least one item, got none")
    items = _joined(parts)
    order_I = np.argsort(items.item_B, kind="stable")
    id_I = items.item_B[order_I]
    twice = np.flatnonzero(id_I[1:] == id_I[:-1])
    if len(twice):
        raise ConfigError(
            f"{name}: expected each item once, got {shown(reader.given[order_I[twice[0]]])} as a number "
            "and as a text"
        )
    return Catalogue(
        id_I=id_I,
        client_id_I=[reader.given[i] for i in order_I.tolist()],
        items=_take_batch(items, order_I),
        attributes=Attributes([reader.attributes[i] for i in order_I.tolist()]),
    )


Numbered = tuple[int, bytes]
"""A line number and its line."""


def _chunks(lines: Iterable[bytes], max_lines: int) -> Iterator[list[Numbered]]:
    numbered = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
    while chunk := list(itertools.islice(numbered, max_lines)):
        yield chunk


class _CatalogueReader:
    """Collects what batches do not hold, by line: ids as given, and attributes."""

    def __init__(self, schema: Schema, name: str) -> None:
        self.schema, self.name = schema, name
        self.given: list[int | str] = []
        self.attributes: list[dict[str, Any]] = []
        self._lines: dict[int | str, int] = {}
        self._parser = schema.derived(JsonParser)
        self._decoder = Decoder(schema, {schema.fingerprint: schema}.get)
        sources = sources_of(schema, "nro")
        self._own = [name for name, source in sources.items() if source == "item_id"]
        self._online = [name for name, source in sources.items() if source != "item_id"]

    def part(self, chunk: Sequence[Numbered]) -> Batch:
        rows = [self._row(number, line) for number, line in chunk]
        try:
            request = self._parser.parse(msgspec.json.encode({"candidates": rows}))
            self._complete(request)
            block = encode_nro(self.schema, request.nro, len(rows))
            batch = self._decoder.decode_request(b"", block, request.item_ids, 0)
        except RequestError as error:
            at = _PLACE.match(error.path)
            number = chunk[int(at[1])][0] if at else chunk[0][0]
            place = _PLACE.sub("", error.path)
            raise ConfigError(
                f"{self.name}:{number}: {error}" + (f" (at {place})" if place else "")
            ) from None
        except WireError as error:
            raise ConfigError(f"{self.name}, lines {chunk[0][0]} to {chunk[-1][0]}: {error}") from None
        self.given += request.client_item_ids
        return batch

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.name}:{number}: expected an item as a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.name}:{number}: expected an item as a JSON object, got {shown(row)!r}")
        attributes = row.pop("attributes", {})
        wrong = check_attributes(attributes)
        nested = row.get("nro")
        given = {*row, *(nested if isinstance(nested, dict) else ())}
        online = next((name for name in self._online if name in given), "")
        if online:
            wrong = f"expected no {online!r}, which the schema keeps online; it is read when a list is ranked"
        item = row.get("item_id")
        if isinstance(item, int | str) and (line_of := self._lines.setdefault(item, number)) != number:
            wrong = f"expected each item once, got {shown(item)} of line {line_of} again"
        if wrong:
            raise ConfigError(f"{self.name}:{number}: {wrong}")
        self.attributes.append(attributes)
        return row

    def _complete(self, request: RankRequest) -> None:
        for name in self._own:
            column = request.nro.get(name)
            if column is None:
                request.nro[name] = request.item_ids
            elif isinstance(column, list):
                request.nro[name] = [
                    [i] if v is None else v for v, i in zip(column, request.item_ids.tolist(), strict=True)
                ]


def _take_batch(items: Batch, slot_N: np.ndarray) -> Batch:
    return items.take(np.zeros(1, np.int64), slot_N, np.zeros(len(slot_N), np.int64), np.array([len(slot_N)]))


def _joined(parts: Sequence[Batch]) -> Batch:
    """All candidates as those of the first part's request."""
    first, changes = parts[0], dict[str, Any]()
    for field in dataclasses.fields(Batch):
        if isinstance(getattr(first, field.name), np.ndarray) and not field.name.endswith(("_R", "_RF")):
            changes[field.name] = np.concatenate([getattr(part, field.name) for part in parts])
    changes["nro_lists"] = _joined_lists([part.nro_lists for part in parts])
    changes["num_candidates_R"] = np.array([sum(part.num_candidates for part in parts)], np.int32)
    return dataclasses.replace(first, **changes)


def _joined_lists(parts: Sequence[Jagged]) -> Jagged:
    first = parts[0]
    weights = [part.weights_of(key) for key in first.keys for part in parts]
    given = [w for w in weights if w is not None]
    assert len(given) in (0, len(weights))
    values = [part.values_of(key) for key in first.keys for part in parts]
    return Jagged(
        keys=first.keys,
        lengths_KN=np.concatenate([part.lengths_KN for part in parts], axis=1),
        values=np.concatenate(values) if values else first.values,
        present_KN=np.concatenate([part.present_KN for part in parts], axis=1),
        weights=np.concatenate(given) if given else None,
        columns={name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns},
    )


def _column(f: Feature, lists: Jagged) -> Any:
    """One value per row in the form that `encode_nro` takes, None = missing; an array if each row has one id,
    which encodes faster."""
    if f.kind == "ids" and (lists.lengths_KN[lists.index(f.name)] == 1).all():
        return lists.values_of(f.name)
    k, offset_N1 = lists.index(f.name), lists.offsets_of(f.name).tolist()
    values, weights = lists.values_of(f.name).tolist(), lists.weights_of(f.name)
    columns = {c: lists.columns[f"{f.name}.{c}"].tolist() for c in f.columns}

    def value(begin: int, end: int) -> Any:
        if f.kind == "ids":
            return values[begin:end]
        if f.kind == "weighted_ids":
            return {
                "ids": values[begin:end],
                "weights": [] if weights is None else weights[begin:end].tolist(),
            }
        return {main_key(f): values[begin:end], **{c: column[begin:end] for c, column in columns.items()}}

    spans = zip(offset_N1, offset_N1[1:], lists.present_KN[k].tolist(), strict=False)
    return [value(begin, end) if present else None for begin, end, present in spans]

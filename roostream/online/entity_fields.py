"""The ids that an event's entities are made of, from the values of a request or from a logged block.

An id of 0 is unknown. The first id of a list counts. An engagement names its item and its request, but not
the request's features. Fields that engagements count by are therefore remembered from the shown list
(`ShownFields`) for a day of event time.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.errors import CheckpointError, WireError
from roostream.schema.counter_plan import ITEM, REQUEST_FIELDS, CounterPlan, field_sides, plan_of
from roostream.schema.ids import (
    MASK64,
    hash64,
    item_id,
    key_bytes,
    sample_id,
    signed,
    splitmix64,
    splitmix64_of,
    table_id,
)
from roostream.schema.schema import Schema
from roostream.wire.block import decode_block

REMEMBERED_MS = 86_400_000
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_HEAD = struct.Struct("<BIqI")
_VERSION = 1
_NOTHING: Mapping[str, Any] = {}


class EntityFields(NamedTuple):
    """The fields of an event besides user, items and time, which every event has."""

    request: Mapping[str, int] = _NOTHING  # int64; session, surface and features
    candidate: Mapping[str, np.ndarray] = _NOTHING  # int64 [n]
    list_id: int = 0  # int64 id of the request; 0 = its fields are not remembered
    has_ro: bool = True  # False = a page that only adds candidates


NO_FIELDS = EntityFields()


class FieldReader:
    """Reads the fields that a schema's counters need."""

    def __init__(self, schema: Schema) -> None:
        self.schema, plan = schema, schema.derived(plan_of)
        sides = field_sides(schema)
        wanted = {field for c in schema.counters for field in c.entity}
        wanted |= {c.of for c in schema.counters if c.aggregation == "distinct"}
        features = wanted - {*REQUEST_FIELDS, ITEM}
        self.ro = sorted(f for f in features if sides[f] == "ro")
        self.nro = sorted(f for f in features if sides[f] == "nro")
        self.wants_header = bool(wanted & {"session", "surface"}) or bool(features)
        self._remembers = bool(plan.remembered)

    def from_values(
        self,
        header: tuple[int, int, str, str],
        ro: Mapping[str, Any] | None,
        nro: Mapping[str, Any],
        num_rows: int,
    ) -> EntityFields:
        """Read values as `encode_ro` and `encode_nro` take them; `header` is user, session, surface, request
        id. A value of a wrong type counts as unknown: encoding rejects it."""
        if not self.wants_header:
            return NO_FIELDS
        given = ro or {}
        return EntityFields(
            self._header_fields(header) | {name: _first_id(given.get(name)) for name in self.ro},
            {name: _first_ids(nro.get(name), num_rows) for name in self.nro},
            self._list_id(header),
            ro is not None,
        )

    def from_blocks(
        self, header: tuple[int, int, str, str], ro: bytes | None, nro: bytes, num_rows: int, fingerprint: int
    ) -> EntityFields:
        """Read logged blocks. The fields of a block of another schema, or of a damaged one, are unknown."""
        if not self.wants_header:
            return NO_FIELDS
        values: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        if fingerprint == self.schema.fingerprint:
            try:
                values = decode_block(self.schema, "ro", ro, 1) if ro and self.ro else {}
                columns = decode_block(self.schema, "nro", nro, num_rows) if nro and self.nro else {}
            except WireError:
                pass  # the joiner makes it a dead letter
        return self.from_values(header, None if ro is None else values, columns, num_rows)

    def from_header(self, header: tuple[int, int, str, str]) -> EntityFields:
        """The fields of an engagement."""
        if not self.wants_header:
            return NO_FIELDS
        return EntityFields(self._header_fields(header), list_id=self._list_id(header))

    def _header_fields(self, header: tuple[int, int, str, str]) -> dict[str, int]:
        _, session_id, surface, _ = header
        return {"session": signed(session_id), "surface": signed(hash64(surface)) if surface else 0}

    def _list_id(self, header: tuple[int, int, str, str]) -> int:
        user_id, session_id, _, request_id = header
        if not self._remembers:
            return 0
        return signed(sample_id(key_bytes(user_id & MASK64, session_id, request_id), request_id))


def time_fields(time_ms: int) -> dict[str, int]:
    """Hour of the day and day of the week (UTC), counted from 1."""
    return {"hour": time_ms % _DAY_MS // _HOUR_MS + 1, "weekday": (time_ms // _DAY_MS + 3) % 7 + 1}


def key_of(ids: Sequence[int]) -> int:
    """int64 key of an entity: the id itself, or several ids hashed together."""
    if len(ids) == 1:
        return ids[0]
    x = 0
    for id_ in ids:
        x = splitmix64(x ^ (id_ & MASK64))
    return signed(x)


def keys_of(ids: Sequence[int | np.ndarray], num_rows: int) -> np.ndarray:
    """int64 [n]: `key_of` for each row; an int applies to all rows."""
    if len(ids) == 1:
        only = ids[0]
        return only if isinstance(only, np.ndarray) else np.full(num_rows, only, dtype=np.int64)
    x = np.zeros(num_rows, dtype=np.uint64)
    for id_ in ids:
        id_n = np.broadcast_to(np.asarray(id_, dtype=np.int64), (num_rows,)).view(np.uint64)
        x = splitmix64_of(x ^ id_n)
    return x.view(np.int64)


@dataclasses.dataclass(slots=True, eq=False)
class ShownFields:
    """The fields of a shown list that its engagements count by."""

    time_ms: int
    request: dict[str, int]
    item_n: np.ndarray  # int64
    candidate: dict[str, np.ndarray]  # int64 [n]

    def add(self, item_n: np.ndarray, candidate: Mapping[str, np.ndarray], max_items: int) -> None:
        """Add a page; the fields of a known item stay as they are. Items beyond `max_items` are left out: the
        joiner refuses their page."""
        new_n = np.flatnonzero(~np.isin(item_n, self.item_n))[: max(max_items - len(self.item_n), 0)]
        self.item_n = np.concatenate([self.item_n, item_n[new_n]])
        self.candidate = {
            name: np.concatenate([ids, candidate[name][new_n]]) for name, ids in self.candidate.items()
        }

    def fields_at(self, item: int, time_ms: int) -> tuple[dict[str, int], dict[str, int]]:
        """Request and candidate fields of an engagement with an item; unknown if it is too old or was not
        shown."""
        if not -REMEMBERED_MS <= time_ms - self.time_ms <= REMEMBERED_MS:
            return {}, {}
        (index,) = np.nonzero(self.item_n == item)
        if not len(index):
            return self.request, {}
        return self.request, {name: int(ids[index[0]]) for name, ids in self.candidate.items()}

    def to_bytes(self) -> bytes:
        request = np.array(list(self.request.values()), dtype=np.int64)
        names = _names_id([*self.request], [*self.candidate])
        head = _HEAD.pack(_VERSION, names, self.time_ms, len(self.item_n))
        return b"".join([head, *(a.tobytes() for a in (request, self.item_n, *self.candidate.values()))])


def shown_from_bytes(plan: CounterPlan, schema: Schema, data: bytes) -> ShownFields | None:
    """Read remembered fields; None if they were written for other fields.

    Raises:
        CheckpointError: bytes of another format.
    """
    ro, nro = remembered_by_side(plan, schema)
    if len(data) >= _HEAD.size:
        version, names, time_ms, n = _HEAD.unpack_from(data)
        if version == _VERSION and names != _names_id(ro, nro):
            return None
        if version == _VERSION and len(data) == _HEAD.size + 8 * (len(ro) + n * (1 + len(nro))):
            numbers = np.frombuffer(data, dtype="<i8", offset=_HEAD.size)
            rows = numbers[len(ro) :].reshape(1 + len(nro), n)
            request = dict(zip(ro, numbers[: len(ro)].tolist(), strict=True))
            return ShownFields(time_ms, request, rows[0].copy(), dict(zip(nro, rows[1:].copy(), strict=True)))
    text = f"expected a list's fields in version {_VERSION}, got {len(data)} other bytes; delete them"
    raise CheckpointError(text)


def remembered_by_side(plan: CounterPlan, schema: Schema) -> tuple[list[str], list[str]]:
    """The remembered fields of the request and of the candidate, each in the order of names."""
    sides = field_sides(schema)
    ro, nro = ([f for f in plan.remembered if sides[f] == side] for side in ("ro", "nro"))
    return ro, nro


def _names_id(ro: Sequence[str], nro: Sequence[str]) -> int:
    return table_id(f"{','.join(ro)}|{','.join(nro)}")


def _first_id(value: Any) -> int:
    """int64; 0 if there is none, or if the value is not an id."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[0] if len(value) else None
    elif isinstance(value, np.ndarray):
        value = value.flat[0] if value.size else None
    if isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, int | str):
        return 0
    try:
        return signed(item_id(value))
    except ValueError:
        return 0


def _first_ids(column: Any, num_rows: int) -> np.ndarray:
    if isinstance(column, np.ndarray) and column.dtype.kind in "iu":
        return column.astype(np.int64, copy=False)
    if not isinstance(column, Sequence | np.ndarray) or len(column) != num_rows:
        return np.zeros(num_rows, dtype=np.int64)
    return np.array([_first_id(value) for value in column], dtype=np.int64)

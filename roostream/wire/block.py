"""Feature blocks: one side's features of some rows as the bytes of `roo.proto`'s Block.

    rows n, floats F, list features K (declared order); a list of length l of row n puts, in this order,
      into `ids`      its l ids, then l entries for each of its `ids` columns
      into `weights`  l entries, if it is weighted_ids
      into `times`    l entries for each of its `time_ms` columns

A block of 0 bytes is one in which every feature of every row is missing, whatever the number of rows. `missing` may be cut
after its last set bit. Blocks are built by hand here, since packed fixed-width columns are arrays with a three-byte head; the
bytes are those that protobuf writes (tests compare). Plain numpy: the joiner runs this inside the JVM's Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from roostream.errors import WireError, nearest
from roostream.schema.ids import LOWEST_ID, MASK64, item_id
from roostream.schema.schema import Feature, Limits, Schema
from roostream.wire.columns import NO_COLUMNS, Columns, Side, check_columns, columns_of, missing_bits, pack
from roostream.wire.records import MAX_WEIGHT


def encode_ro(schema: Schema, values: Mapping[str, object]) -> bytes:
    """One request's RO block.

    Values: a float; a list of ids (integers, or strings, which are hashed); for `weighted_ids`
    `{"ids": […], "weights": […]}`; for `sequence` `{"<its table>" or "ids": […], "<column>": […]}`. Absent, None and a NaN
    float are missing.

    Raises:
        WireError: `bad_shape`: an unknown name, a value of another kind, or columns of unequal length; `oversized`,
            `non_finite` or `bad_number`: what `check_block` would refuse.
    """
    return pack(ro_columns(schema, values))


def ro_columns(schema: Schema, values: Mapping[str, object]) -> Columns:
    """The same as arrays, before they are bytes: `columns_of` gives equal ones. Raises as `encode_ro`."""
    _known(schema, "ro", values)
    floats = _float32(
        np.array([_float(f, values.get(f.name)) for f in schema.floats("ro")], dtype=np.float64)
    )
    return _build(schema, floats, [entry_of(f, values.get(f.name)) for f in schema.lists("ro")])


def encode_nro(schema: Schema, columns: Mapping[str, Any], num_rows: int) -> bytes:
    """The NRO block of `num_rows` candidates.

    A float column is f4[n] (NaN or None = missing). A list column has one value a row, each as in `encode_ro`; an integer
    (or string) in place of a list is a list of one, so a flat array of ids gives every row exactly one.

    Raises:
        WireError: `bad_shape`: an unknown name, a column of another length than `num_rows`, or as `encode_ro`.
    """
    return pack(nro_columns(schema, columns, num_rows))


def nro_columns(schema: Schema, columns: Mapping[str, Any], num_rows: int) -> Columns:
    """The same as arrays, before they are bytes: `columns_of` gives equal ones. Raises as `encode_nro`."""
    _known(schema, "nro", columns)
    if num_rows > schema.limits.max_candidates:
        raise WireError(
            "oversized", f"expected at most {schema.limits.max_candidates} candidates, got {num_rows}"
        )
    floats_BF = np.full((num_rows, len(schema.floats("nro"))), np.nan, dtype=np.float64)
    for i, f in enumerate(schema.floats("nro")):
        if columns.get(f.name) is not None:
            floats_BF[:, i] = _float_column(f, columns[f.name], num_rows)
    floats_BF = _float32(floats_BF)
    lists = schema.lists("nro")
    given: list[Any] = [columns.get(f.name) for f in lists]
    for f, column in zip(lists, given, strict=True):
        if column is not None and len(column) != num_rows:
            raise _bad(f, f"one value for each of {num_rows} candidates", f"{len(column)} values")
    flat = [_flat_ids(f, column) for f, column in zip(lists, given, strict=True)]
    if all((ids is None) == (column is None) for ids, column in zip(flat, given, strict=True)):
        return flat_columns(floats_BF, flat)
    pairs = list(zip(lists, given, strict=True))
    return _build(
        schema,
        floats_BF,
        [entry_of(f, None if c is None else c[n]) for n in range(num_rows) for f, c in pairs],
    )


def decode_block(schema: Schema, side: Side, data: bytes, num_rows: int) -> dict[str, Any]:
    """What `encode_ro` (missing features left out) or `encode_nro` (None in place of a missing list) was given; ids as int64.
    Slow: for tools and tests.

    Raises:
        WireError: as `check_block`, with the largest caps that a schema can set.
    """
    most = Limits(max_candidates=1 << 20, max_list=1 << 20)
    columns = columns_of(data)
    check_columns(schema, side, columns, num_rows, most)
    return values_of(schema, side, columns, num_rows)


def values_of(schema: Schema, side: Side, columns: Columns, num_rows: int) -> dict[str, Any]:
    """`decode_block` of columns that were checked."""
    floats, lists = schema.floats(side), schema.lists(side)
    whole = columns.floats if len(columns.floats) else np.full(num_rows * len(floats), np.nan, np.float32)
    out: dict[str, Any] = {f.name: whole.reshape(num_rows, len(floats))[:, i] for i, f in enumerate(floats)}
    out |= {f.name: [] for f in lists}
    take = _Taker(columns)
    missing = (
        missing_bits(columns, num_rows * len(lists))
        if len(columns.lengths)
        else np.ones(num_rows * len(lists), np.bool_)
    )
    for at in range(num_rows * len(lists)):
        f = lists[at % len(lists)]
        out[f.name].append(None if missing[at] else take.value(f, int(columns.lengths[at])))
    if side == "nro":
        return out
    present = {f.name: float(out[f.name][0]) for f in floats if not np.isnan(out[f.name][0])}
    return present | {f.name: out[f.name][0] for f in lists if out[f.name][0] is not None}


def flat_values(schema: Schema, columns: Columns, num_rows: int) -> dict[str, Any] | None:
    """As `decode_block` of a candidates' block that was checked, of features that are there in some row, with lists as int64 [n];
    None unless every list feature gives all rows one id each, or none of them a list."""
    floats, lists = schema.floats("nro"), schema.lists("nro")
    if not any(map(len, columns)):
        return {}
    lengths_NK = columns.lengths.reshape(num_rows, len(lists))
    missing_NK = missing_bits(columns, lengths_NK.size).reshape(lengths_NK.shape)
    is_given_K = lengths_NK[0] == 1
    if not ((lengths_NK == is_given_K).all() and (missing_NK != is_given_K).all()):
        return None
    given = [f for f, is_given in zip(lists, is_given_K.tolist(), strict=True) if is_given]
    if any(f.kind != "ids" for f in given):
        return None
    floats_FN = columns.floats.reshape(num_rows, len(floats)).T
    some_F = (~np.isnan(floats_FN)).any(axis=1).tolist()
    out: dict[str, Any] = {f.name: x for f, x, some in zip(floats, floats_FN, some_F, strict=True) if some}
    return out | dict(zip((f.name for f in given), columns.ids.reshape(num_rows, len(given)).T, strict=True))


def check_block(schema: Schema, side: Side, data: bytes, num_rows: int, limits: Limits) -> Columns:
    """The block's arrays; accepts what `roostream.wire.decode` accepts.

    Raises:
        WireError: `undecodable`, `bad_shape` (lengths that disagree, with each other or with `num_rows`), `oversized`
            (rows or a list beyond `limits`), `non_finite` (an infinity; NaN outside of `floats`),
            `bad_number` (a weight beyond `wire.MAX_WEIGHT`).
    """
    columns = columns_of(data)
    check_columns(schema, side, columns, num_rows, limits)
    return columns


class _Taker:
    """Walks `ids`, `weights` and `times` list by list."""

    def __init__(self, columns: Columns) -> None:
        self.left = {"ids": columns.ids, "weights": columns.weights, "times": columns.times}

    def value(self, f: Feature, length: int) -> object:
        """The next list, `length` long, in the form that `encode_*` takes."""
        ids = self._next("ids", length)
        if f.kind == "ids":
            return ids
        if f.kind == "weighted_ids":
            return {"ids": ids, "weights": self._next("weights", length)}
        out: dict[str, list[float]] = {main_key(f): ids}
        out |= {c: self._next("ids", length) for c in f.id_columns}
        return out | {c: self._next("times", length) for c in f.time_columns}

    def _next(self, what: str, length: int) -> list[float]:
        taken, self.left[what] = self.left[what][:length], self.left[what][length:]
        return taken.tolist()


def main_key(f: Feature) -> str:
    """The name of a sequence's own ids beside its columns: its table's, unless a column has that name."""
    return f.table if f.table not in f.columns else "ids"


class ListEntry(NamedTuple):
    """A row's list as a block has it."""

    length: int  # -1 = missing
    ids: tuple[Sequence[int], ...] = ()
    weights: Sequence[float] = ()
    times: tuple[Sequence[int], ...] = ()


_ABSENT = ListEntry(-1)


def entry_of(f: Feature, value: Any) -> ListEntry:
    """One row's value of a list feature. Raises WireError, as `encode_ro`."""
    if value is None:
        return _ABSENT
    if isinstance(value, (int, np.integer, str)) and f.kind == "ids" and not isinstance(value, bool):
        return ListEntry(1, (_ids(f, [value]),))
    if isinstance(value, Mapping):
        return _mapping_entry(f, value)
    if (
        f.columns
        or f.kind == "weighted_ids"
        or isinstance(value, (str, bytes))
        or not isinstance(value, (Sequence, np.ndarray))
    ):
        raise _bad(f, _expected(f), repr(value))
    ids = _ids(f, value)
    return ListEntry(len(ids), (ids,))


def _mapping_entry(f: Feature, value: Mapping[str, Any]) -> ListEntry:
    """A weighted list or a sequence: its columns by name, all of one length."""
    main = main_key(f) if main_key(f) in value and f.kind == "sequence" else "ids"
    wanted = {main, *f.columns} | ({"weights"} if f.kind == "weighted_ids" else set())
    if f.kind == "ids" or set(value) != wanted:
        raise _bad(f, _expected(f), f"a table with {', '.join(map(repr, value)) or 'nothing'}")
    ids = (_ids(f, value[main]), *(_ids(f, value[c]) for c in f.id_columns))
    times = tuple(_integers(f, value[c]) for c in f.time_columns)
    weights = _weights(f, value["weights"]) if f.kind == "weighted_ids" else []
    sizes = {len(x) for x in (*ids, *times)} | ({len(weights)} if f.kind == "weighted_ids" else set())
    if len(sizes) != 1:
        raise _bad(f, "columns of equal length", f"lengths {sorted(sizes)}")
    return ListEntry(len(ids[0]), ids, weights, times)


def _expected(f: Feature) -> str:
    if f.kind == "ids":
        return "a list of ids"
    columns = (main_key(f), *f.columns) if f.kind == "sequence" else ("ids", "weights")
    return f"a table with {', '.join(map(repr, columns))}"


def _ids(f: Feature, values: Any) -> list[int]:
    try:
        if {int}.issuperset(map(type, values)) and (
            not values or ((low := min(values)) >= LOWEST_ID and max(values) <= MASK64)
        ):
            return [v & MASK64 for v in values] if values and low < 0 else list(values)
        return [item_id(v if isinstance(v, str) else _index(v)) for v in values]
    except TypeError:
        raise _bad(f, "ids (integers or strings)", repr(values)) from None
    except ValueError as error:
        raise WireError("bad_shape", f"feature {f.name!r}: {error}") from None


def _integers(f: Feature, values: Any) -> list[int]:
    try:
        out = list(values) if {int}.issuperset(map(type, values)) else [_index(v) for v in values]
    except TypeError:
        raise _bad(f, "times in ms (integers)", repr(values)) from None
    if out and not (min(out) >= -(1 << 63) and max(out) < 1 << 63):
        raise _bad(f, "times in ms (64-bit integers)", repr(values))
    return out


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError
    return int(value)


def _weights(f: Feature, values: Any) -> list[float]:
    try:
        out = [float(v) for v in values]
    except (TypeError, ValueError):
        raise _bad(f, "weights (numbers)", repr(values)) from None
    if any(v != v for v in out):
        raise WireError("non_finite", f"feature {f.name!r}: expected finite weights, got NaN")
    if far := [v for v in out if abs(v) > MAX_WEIGHT]:
        raise WireError(
            "bad_number", f"feature {f.name!r}: expected weights within ±{MAX_WEIGHT:.0f}, got {far[0]:g}"
        )
    return out


def _float(f: Feature, value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _bad(f, "a number", repr(value))
    return float(value)


def _float_column(f: Feature, column: Any, num_rows: int) -> np.ndarray:
    values = (
        column
        if isinstance(column, np.ndarray)
        else np.array([_float(f, v) for v in column], dtype=np.float64)
    )
    if values.shape != (num_rows,) or values.dtype.kind not in "fiu":
        raise _bad(f, f"{num_rows} numbers", f"{values.dtype} {values.shape}")
    return values


def _float32(values: np.ndarray) -> np.ndarray:
    if not values.size:
        return values.astype(np.float32)
    with np.errstate(over="ignore"):
        out = values.astype(np.float32)
    if np.isinf(out).any():
        raise WireError("non_finite", f"expected finite 32-bit floats, got {values[np.isinf(out)][0]}")
    return out


def _flat_ids(f: Feature, column: Any) -> np.ndarray | None:
    """int64 [n] when every row has exactly one id, else None."""
    if f.kind != "ids" or column is None:
        return None
    if isinstance(column, np.ndarray):
        return column.astype(np.int64, copy=False) if column.ndim == 1 and column.dtype.kind in "iu" else None
    if not all(type(v) is int and LOWEST_ID <= v <= MASK64 for v in column):
        return None
    return np.array([v & MASK64 for v in column], dtype=np.uint64).view(np.int64)


def flat_columns(floats_BF: np.ndarray, flat: list[np.ndarray | None]) -> Columns:
    """Of candidates whose list features give each row exactly one id (int64 [n]), or are missing (None)."""
    given = [ids for ids in flat if ids is not None]
    if not given and np.isnan(floats_BF).all():
        return NO_COLUMNS
    columns = NO_COLUMNS._replace(
        floats=floats_BF.ravel(), lengths=np.ones(len(floats_BF) * len(flat), dtype="<u4")
    )
    if given:
        columns = columns._replace(ids=np.array(given).T.ravel())
    if len(given) == len(flat):
        return columns
    missing = np.tile(np.array([ids is None for ids in flat], dtype=np.bool_), len(floats_BF))
    columns.lengths[missing] = 0
    return columns._replace(missing=trimmed(np.packbits(missing, bitorder="little")))


def trimmed(bits: np.ndarray) -> np.ndarray:
    """`missing` without the zero bytes at its end."""
    given = np.flatnonzero(bits)
    return bits[: given[-1] + 1 if len(given) else 0]


def _build(schema: Schema, floats_NF: np.ndarray, entries: list[ListEntry]) -> Columns:
    """Entries row-major over (row, list feature)."""
    if all(e.length < 0 for e in entries) and np.isnan(floats_NF).all():
        return NO_COLUMNS
    longest = max((e.length for e in entries), default=0)
    if longest > schema.limits.max_list:
        raise WireError(
            "oversized", f"expected lists of at most {schema.limits.max_list} entries, got {longest}"
        )
    lengths = np.array([max(e.length, 0) for e in entries], dtype="<u4")
    ids = np.array([*chain.from_iterable(chain.from_iterable(e.ids for e in entries))], dtype=np.uint64)
    weights = _float32(np.array([v for e in entries for v in e.weights], dtype=np.float64))
    times = np.array([*chain.from_iterable(chain.from_iterable(e.times for e in entries))], dtype="<i8")
    bits = np.packbits(np.array([e.length < 0 for e in entries], dtype=np.bool_), bitorder="little")
    return Columns(floats_NF.ravel(), lengths, ids.view(np.int64), weights, times, trimmed(bits))


def _known(schema: Schema, side: Side, values: Mapping[str, object]) -> None:
    names = schema.derived(_names)[side]
    for name in values:
        if name not in names:
            raise WireError("bad_shape", f"unknown {side} feature {name!r}{nearest(name, names)}")


def _names(schema: Schema) -> dict[Side, dict[str, None]]:
    return {"ro": dict.fromkeys(f.name for f in schema.ro), "nro": dict.fromkeys(f.name for f in schema.nro)}


def _bad(f: Feature, expected: str, got: str) -> WireError:
    return WireError(
        "bad_shape",
        f"feature {f.name!r}: expected {expected}, got {got if len(got) < 200 else got[:200] + '…'}",
    )

"""Feature blocks: one side's features of some rows, as arrays and as the bytes of `roo.proto`'s Block.

    n rows, F floats, K list features (in declared order); a list of length l adds, row by row,
      to `ids`      its l ids, then l entries for each of its `ids` columns
      to `weights`  l entries, if it is weighted_ids
      to `times`    l entries for each of its `time_ms` columns

In a block of 0 bytes every feature of every row is missing, whatever the number of rows. `missing` may be cut
after its last set bit. Packed fixed-width fields have the bytes of a little-endian array, so a block that
`pack` wrote is six arrays, each behind a tag and a length; they are read without a copy. The bytes are those
of protobuf (tests compare). This module uses plain numpy, because the joiner runs it inside of Flink's Python
without a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import WireError, nearest
from roostream.schema.ids import LOWEST_ID, MASK64, item_id
from roostream.schema.schema import Feature, Limits, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import BLOCK, encode_fields
from roostream.wire.records import MAX_WEIGHT

Side = Literal["ro", "nro"]
# Of the fields 1 to 6 of the message Block.
_DTYPES = tuple(map(np.dtype, ("<f4", "<u4", "<i8", "<f4", "<i8", "u1")))
_SIZES = tuple(dtype.itemsize for dtype in _DTYPES)


class Columns(NamedTuple):
    """The arrays of a block. They are views of its bytes if the block has the form that `pack` writes."""

    floats: np.ndarray  # float32 [n x F]
    lengths: np.ndarray  # uint32 [n x K]
    ids: np.ndarray  # int64
    weights: np.ndarray  # float32
    times: np.ndarray  # int64
    missing: np.ndarray  # uint8


def columns_of(data: bytes) -> Columns:
    """The arrays of a block. A block in another form than `pack` writes (a column in pieces or not packed,
    groups) is read by protobuf.

    Raises:
        WireError: `undecodable`.
    """
    spans = _spans(data)
    if spans is None:
        return _columns_by_protobuf(data)
    fields = zip(_DTYPES, _SIZES, spans, NO_COLUMNS, strict=True)
    return Columns._make(
        [
            np.frombuffer(data, dtype, n // size, start) if n else none
            for dtype, size, (start, n), none in fields
        ]
    )


def _spans(data: bytes) -> list[tuple[int, int]] | None:
    """(start, bytes) of each column, or None if the block is not in the form that `pack` writes."""
    spans, at, last = [(0, 0)] * 6, 0, 0
    while at < len(data):
        tag = data[at]
        if tag & 0x87 != 2 or not last < tag >> 3 <= 6:
            return None
        last = tag >> 3
        size, at = _varint(data, at + 1)
        if not 0 <= size <= len(data) - at or size % _SIZES[last - 1]:
            return None
        spans[last - 1] = (at, size)
        at += size
    return spans


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, offset after it); the value is -1 if it is cut off or longer than 5 bytes."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            return -1, at
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return -1, at


def canonical(data: bytes) -> bytes:
    """The same block as `pack` writes it: each column packed in one piece and in order, without unknown
    fields.

    Raises:
        WireError: `undecodable`.
    """
    return data if _spans(data) is not None else pack(_columns_by_protobuf(data))


def _columns_by_protobuf(data: bytes) -> Columns:
    """Copies of the arrays of a block in any form."""
    try:
        block = pb.Block.FromString(data)
    except DecodeError as error:
        raise WireError("undecodable", f"expected a Block: {error}") from None
    return Columns(
        np.array(block.floats, np.float32),
        np.array(block.lengths, np.uint32),
        np.array(block.ids, np.uint64).view(np.int64),
        np.array(block.weights, np.float32),
        np.array(block.times, np.int64),
        np.frombuffer(block.missing, np.uint8),
    )


def check_columns(schema: Schema, side: Side, columns: Columns, num_rows: int, limits: Limits) -> None:
    """Check a block's arrays. `roostream.wire.decode_scan.check_block` is the compiled form of the same rule
    for many blocks at once; it does not say what is wrong. tests/wire/test_decode.py compares the two on
    damaged blocks.

    Raises:
        WireError: `bad_shape` (lengths that disagree, with each other or with `num_rows`), `oversized` (rows
        or a list beyond `limits`), `non_finite` (an infinity; NaN outside of `floats`), `bad_number` (a
        weight beyond MAX_WEIGHT).
    """
    if num_rows > limits.max_candidates:
        raise WireError("oversized", f"expected at most {limits.max_candidates} candidates, got {num_rows}")
    if any(len(c) for c in columns):
        _check_shape(schema, side, columns, num_rows, limits)
    if len(columns.floats) and np.isinf(columns.floats).any():
        raise WireError("non_finite", f"expected finite {side} floats (or NaN for missing), got an infinity")
    if not len(columns.weights):
        return
    if not np.isfinite(columns.weights).all():
        raise WireError("non_finite", f"expected finite {side} weights, got an infinity or NaN")
    if (largest := float(np.abs(columns.weights).max())) > MAX_WEIGHT:
        text = f"expected {side} weights within ±{MAX_WEIGHT:.0f}, got one of magnitude {largest:g}"
        raise WireError("bad_number", text)


def _check_shape(schema: Schema, side: Side, columns: Columns, num_rows: int, limits: Limits) -> None:
    """Every column has the length that follows from rows and lists."""
    lists = schema.lists(side)
    _check_length(side, "floats", columns.floats, num_rows * len(schema.floats(side)))
    _check_length(side, "lengths", columns.lengths, num_rows * len(lists))
    longest = int(columns.lengths.max(initial=0))
    if longest > limits.max_list:
        raise WireError("oversized", f"expected lists of at most {limits.max_list} entries, got {longest}")
    totals: list[int] = []
    if lists:
        totals = columns.lengths.reshape(num_rows, len(lists)).sum(axis=0, dtype=np.int64).tolist()
    pairs = list(zip(lists, totals, strict=True))
    _check_length(side, "ids", columns.ids, sum(n * (1 + len(f.id_columns)) for f, n in pairs))
    _check_length(side, "times", columns.times, sum(n * len(f.time_columns) for f, n in pairs))
    _check_length(side, "weights", columns.weights, sum(n for f, n in pairs if f.kind == "weighted_ids"))
    bits = num_rows * len(lists)
    if len(columns.missing) > (bits + 7) // 8:
        got = f"{len(columns.missing)} bytes"
        raise WireError("bad_shape", f"{side} block: expected at most {bits} missing bits, got {got}")
    if len(columns.missing) and (columns.lengths[missing_bits(columns, bits)] > 0).any():
        raise WireError("bad_shape", f"{side} block: expected length 0 for a missing list, got more")


def _check_length(side: Side, name: str, column: np.ndarray, expected: int) -> None:
    if len(column) != expected:
        raise WireError("bad_shape", f"{side} block: expected {expected} {name}, got {len(column)}")


def missing_bits(columns: Columns, count: int) -> np.ndarray:
    """bool [count]: the bits of `missing`."""
    bits = np.zeros(count, dtype=np.bool_)
    given = np.unpackbits(columns.missing, bitorder="little")[:count]
    bits[: len(given)] = given
    return bits


NO_COLUMNS = Columns._make(np.zeros(0, dtype) for dtype in _DTYPES)
"""The columns of a block in which every feature is missing."""


def pack(columns: Columns) -> bytes:
    """The bytes of a block: packed fields in order, without empty ones."""
    return encode_fields(
        (number, c.tobytes() if c.size else None) for number, c in zip(BLOCK, columns, strict=True)
    )


# ---- values into blocks and back ----


def encode_ro(schema: Schema, values: Mapping[str, object]) -> bytes:
    """Encode the RO block of one request.

    A value is a float; a list of ids (integers, or strings, which are hashed); for `weighted_ids` `{"ids":
    […], "weights": […]}`; for `sequence` `{"<its table>" or "ids": […], "<column>": […]}`. An absent value,
    None and a NaN float are missing.

    Raises:
        WireError: `bad_shape` for an unknown name, a value of another kind, or columns of unequal length;
        `oversized`, `non_finite` or `bad_number` for what `check_block` rejects.
    """
    return pack(ro_columns(schema, values))


def ro_columns(schema: Schema, values: Mapping[str, object]) -> Columns:
    """The arrays of `encode_ro`. Raises the same."""
    _check_names(schema, "ro", values)
    declared = schema.floats("ro")
    floats = _float32(declared, np.array([_float(f, values.get(f.name)) for f in declared], dtype=np.float64))
    return _build(schema, floats, [entry_of(f, values.get(f.name)) for f in schema.lists("ro")])


def encode_nro(schema: Schema, columns: Mapping[str, Any], num_rows: int) -> bytes:
    """Encode the NRO block of `num_rows` candidates.

    A float column is float32 [n], NaN or None = missing. A list column has one value for each row, as in
    `encode_ro`. An integer or string means a list of one, so a flat array of ids gives every row exactly
    one.

    Raises:
        WireError: `bad_shape` for an unknown name or a column of another length than `num_rows`, or as
        `encode_ro`.
    """
    return pack(nro_columns(schema, columns, num_rows))


def nro_columns(schema: Schema, columns: Mapping[str, Any], num_rows: int) -> Columns:
    """The arrays of `encode_nro`. Raises the same."""
    _check_names(schema, "nro", columns)
    if num_rows > schema.limits.max_candidates:
        most = schema.limits.max_candidates
        text = f"expected at most {most} candidates, got {num_rows}; [limits] max_candidates allows more"
        raise WireError("oversized", text)
    for f in schema.nro:
        if (column := columns.get(f.name)) is not None:
            _check_rows(f, column, num_rows)
    floats_BF = np.full((num_rows, len(schema.floats("nro"))), np.nan, dtype=np.float64)
    for i, f in enumerate(schema.floats("nro")):
        if columns.get(f.name) is not None:
            floats_BF[:, i] = _float_column(f, columns[f.name], num_rows)
    floats_BF = _float32(schema.floats("nro"), floats_BF)
    lists = schema.lists("nro")
    given: list[Any] = [columns.get(f.name) for f in lists]
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
    """The values of a block in the form of `encode_ro` (without missing features) or `encode_nro` (None for a
    missing list), ids as int64. Slow: for tools and tests.

    Raises:
        WireError: as `check_block`, with the largest limits that a schema can set.
    """
    columns = check_block(schema, side, data, num_rows, Limits(max_candidates=1 << 20, max_list=1 << 20))
    return values_of(schema, side, columns, num_rows)


def values_of(schema: Schema, side: Side, columns: Columns, num_rows: int) -> dict[str, Any]:
    """`decode_block` of checked columns."""
    floats, lists = schema.floats(side), schema.lists(side)
    all_floats = (
        columns.floats if len(columns.floats) else np.full(num_rows * len(floats), np.nan, np.float32)
    )
    out: dict[str, Any] = {
        f.name: all_floats.reshape(num_rows, len(floats))[:, i] for i, f in enumerate(floats)
    }
    out |= {f.name: [] for f in lists}
    reader = _ListReader(columns)
    missing = (
        missing_bits(columns, num_rows * len(lists))
        if len(columns.lengths)
        else np.ones(num_rows * len(lists), np.bool_)
    )
    for i in range(num_rows * len(lists)):
        f = lists[i % len(lists)]
        out[f.name].append(None if missing[i] else reader.read(f, int(columns.lengths[i])))
    if side == "nro":
        return out
    present = {f.name: float(out[f.name][0]) for f in floats if not np.isnan(out[f.name][0])}
    return present | {f.name: out[f.name][0] for f in lists if out[f.name][0] is not None}


def flat_values(schema: Schema, columns: Columns, num_rows: int) -> dict[str, Any] | None:
    """As `decode_block` of a checked NRO block, with the features that some row has and lists as int64 [n].
    None unless every list feature has exactly one id in all rows, or is missing in all rows."""
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
    is_some_F = (~np.isnan(floats_FN)).any(axis=1).tolist()
    out: dict[str, Any] = {
        f.name: x for f, x, is_some in zip(floats, floats_FN, is_some_F, strict=True) if is_some
    }
    return out | dict(zip((f.name for f in given), columns.ids.reshape(num_rows, len(given)).T, strict=True))


def check_block(schema: Schema, side: Side, data: bytes, num_rows: int, limits: Limits) -> Columns:
    """The arrays of a block; accepts the same blocks as `roostream.wire.decode`.

    Raises:
        WireError: `undecodable`, or as `check_columns`.
    """
    columns = columns_of(data)
    check_columns(schema, side, columns, num_rows, limits)
    return columns


class _ListReader:
    """Reads `ids`, `weights` and `times` list by list."""

    def __init__(self, columns: Columns) -> None:
        self._remaining = {"ids": columns.ids, "weights": columns.weights, "times": columns.times}

    def read(self, f: Feature, length: int) -> object:
        """The next list, `length` long, in the form of `encode_ro`."""
        ids = self._next("ids", length)
        if f.kind == "ids":
            return ids
        if f.kind == "weighted_ids":
            return {"ids": ids, "weights": self._next("weights", length)}
        out: dict[str, list[float]] = {main_key(f): ids}
        out |= {c: self._next("ids", length) for c in f.id_columns}
        return out | {c: self._next("times", length) for c in f.time_columns}

    def _next(self, what: str, length: int) -> list[float]:
        values, self._remaining[what] = self._remaining[what][:length], self._remaining[what][length:]
        return values.tolist()


def main_key(f: Feature) -> str:
    """The name of a sequence's ids beside its columns: that of its table, unless a column has it."""
    return f.table if f.table not in f.columns else "ids"


class ListEntry(NamedTuple):
    """One row's list in the form of a block."""

    length: int  # -1 = missing
    ids: tuple[Sequence[int], ...] = ()
    weights: Sequence[float] = ()
    times: tuple[Sequence[int], ...] = ()


_MISSING = ListEntry(-1)


def entry_of(f: Feature, value: Any) -> ListEntry:
    """One row's value of a list feature. Raises WireError like `encode_ro`."""
    if value is None:
        return _MISSING
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
        raise _shape_error(f, _list_form(f), repr(value))
    ids = _ids(f, value)
    return ListEntry(len(ids), (ids,))


def _mapping_entry(f: Feature, value: Mapping[str, Any]) -> ListEntry:
    """A weighted list or a sequence: its columns by name, all of one length."""
    main = main_key(f) if main_key(f) in value and f.kind == "sequence" else "ids"
    wanted = {main, *f.columns} | ({"weights"} if f.kind == "weighted_ids" else set())
    if f.kind == "ids" or set(value) != wanted:
        raise _shape_error(f, _list_form(f), f"a table with {', '.join(map(repr, value)) or 'nothing'}")
    ids = (_ids(f, value[main]), *(_ids(f, value[c]) for c in f.id_columns))
    times = tuple(_integers(f, value[c]) for c in f.time_columns)
    weights = _weights(f, value["weights"]) if f.kind == "weighted_ids" else []
    sizes = {len(x) for x in (*ids, *times)} | ({len(weights)} if f.kind == "weighted_ids" else set())
    if len(sizes) != 1:
        raise _shape_error(f, "columns of equal length", f"lengths {sorted(sizes)}")
    return ListEntry(len(ids[0]), ids, weights, times)


def _list_form(f: Feature) -> str:
    if f.kind == "ids":
        return "a list of ids"
    columns = (main_key(f), *f.columns) if f.kind == "sequence" else ("ids", "weights")
    return f"a table with {', '.join(map(repr, columns))}"


def _ids(f: Feature, values: Any) -> list[int]:
    try:
        if {int}.issuperset(map(type, values)) and (
            not len(values) or ((low := min(values)) >= LOWEST_ID and max(values) <= MASK64)
        ):
            return [v & MASK64 for v in values] if len(values) and low < 0 else list(values)
        return [item_id(v if isinstance(v, str) else _index(v)) for v in values]
    except TypeError:
        raise _shape_error(f, "ids (integers or strings)", repr(values)) from None
    except ValueError as error:
        raise WireError("bad_shape", f"feature {f.name!r}: {error}") from None


def _integers(f: Feature, values: Any) -> list[int]:
    try:
        out = list(values) if {int}.issuperset(map(type, values)) else [_index(v) for v in values]
    except TypeError:
        raise _shape_error(f, "times in ms (integers)", repr(values)) from None
    if out and not (min(out) >= -(1 << 63) and max(out) < 1 << 63):
        raise _shape_error(f, "times in ms (64-bit integers)", repr(values))
    return out


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError
    return int(value)


def _weights(f: Feature, values: Any) -> list[float]:
    try:
        out = [float(v) for v in values]
    except (TypeError, ValueError):
        raise _shape_error(f, "weights (numbers)", repr(values)) from None
    except OverflowError:
        raise _beyond_floats(f) from None
    if any(v != v for v in out):
        raise WireError("non_finite", f"feature {f.name!r}: expected finite weights, got NaN")
    if too_large := [v for v in out if abs(v) > MAX_WEIGHT]:
        text = f"feature {f.name!r}: expected weights within ±{MAX_WEIGHT:.0f}, got {too_large[0]:g}"
        raise WireError("bad_number", text)
    return out


def _float(f: Feature, value: Any) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _shape_error(f, "a number", repr(value))
    try:
        return float(value)
    except OverflowError:
        raise _beyond_floats(f) from None


def _beyond_floats(f: Feature) -> WireError:
    text = f"feature {f.name!r}: expected finite 32-bit floats, got an integer of more than 300 digits"
    return WireError("non_finite", text)


def _check_rows(f: Feature, column: Any, num_rows: int) -> None:
    """Raises WireError: a column is not one value for each row. A text has a length too, but no values."""
    try:
        count = -1 if isinstance(column, (str, bytes, Mapping)) else len(column)
    except TypeError:
        count = -1
    if count != num_rows:
        got = repr(column) if count < 0 else f"{count} values"
        raise _shape_error(f, f"one value for each of {num_rows} candidates", got)


def _float_column(f: Feature, column: Any, num_rows: int) -> np.ndarray:
    values = (
        column
        if isinstance(column, np.ndarray)
        else np.array([_float(f, v) for v in column], dtype=np.float64)
    )
    if values.shape != (num_rows,) or values.dtype.kind not in "fiu":
        raise _shape_error(f, f"{num_rows} numbers", f"{values.dtype} {values.shape}")
    return values


def _float32(features: Sequence[Feature], values: np.ndarray) -> np.ndarray:
    """Values of these features, [F] or [n, F], as float32."""
    if not values.size:
        return values.astype(np.float32)
    with np.errstate(over="ignore"):
        out = values.astype(np.float32)
    if np.isinf(out).any():
        first = np.argwhere(np.isinf(out))[0]
        name, value = features[first[-1]].name, values[tuple(first)]
        raise WireError("non_finite", f"feature {name!r}: expected finite 32-bit floats, got {value}")
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
    """The NRO columns of list features that have exactly one id in each row (int64 [n]), or are missing
    (None)."""
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
    return columns._replace(missing=trim_missing(np.packbits(missing, bitorder="little")))


def trim_missing(bits: np.ndarray) -> np.ndarray:
    """`missing` without trailing zero bytes."""
    nonzero = np.flatnonzero(bits)
    return bits[: nonzero[-1] + 1 if len(nonzero) else 0]


def _build(schema: Schema, floats_NF: np.ndarray, entries: list[ListEntry]) -> Columns:
    """Columns of floats and list entries, the latter row-major over (row, list feature)."""
    if all(e.length < 0 for e in entries) and np.isnan(floats_NF).all():
        return NO_COLUMNS
    longest = max((e.length for e in entries), default=0)
    if longest > schema.limits.max_list:
        most = schema.limits.max_list
        text = f"expected lists of at most {most} entries, got {longest}; [limits] max_list allows more"
        raise WireError("oversized", text)
    lengths = np.array([max(e.length, 0) for e in entries], dtype="<u4")
    ids = np.array([*chain.from_iterable(chain.from_iterable(e.ids for e in entries))], dtype=np.uint64)
    weights = np.array([v for e in entries for v in e.weights], dtype=np.float32)
    times = np.array([*chain.from_iterable(chain.from_iterable(e.times for e in entries))], dtype="<i8")
    bits = np.packbits(np.array([e.length < 0 for e in entries], dtype=np.bool_), bitorder="little")
    return Columns(floats_NF.ravel(), lengths, ids.view(np.int64), weights, times, trim_missing(bits))


def _check_names(schema: Schema, side: Side, values: Mapping[str, object]) -> None:
    names = schema.derived(_names)[side]
    for name in values:
        if name not in names:
            raise WireError("bad_shape", f"unknown {side} feature {name!r}{nearest(name, names)}")


def _names(schema: Schema) -> dict[Side, dict[str, None]]:
    return {"ro": dict.fromkeys(f.name for f in schema.ro), "nro": dict.fromkeys(f.name for f in schema.nro)}


def _shape_error(f: Feature, expected: str, got: str) -> WireError:
    return WireError(
        "bad_shape",
        f"feature {f.name!r}: expected {expected}, got {got if len(got) < 200 else got[:200] + '…'}",
    )

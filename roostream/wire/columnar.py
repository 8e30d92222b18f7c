"""Converts a batch to named flat columns and back: the content of a file of samples, whatever the file's
format.

    column                    of           content
    offset, close_ms, …       request      fields of Batch for requests (REQUEST)
    item, position, …         candidate    fields of Batch for candidates (CANDIDATE)
    label__<label>            candidate    also score__<label>, as served
    ro__<feature>             request      a float, NaN = missing; or a list, present or missing in each row
    ro__<feature>__<column>   request      a sequence's column; `weights` of a weighted list
    nro__<feature>…           candidate    the same of candidates

A file has all features of its writer's schema, with lists of their full length. A reader skips features that
its schema lacks and cuts lists to its own max_len. File formats are in roostream/warehouse. Letters: R
requests, B candidates, F floats of a side, N rows of a side (R or B), T labels, C columns of one kernel call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import njit

from roostream.errors import SchemaError
from roostream.schema.schema import Feature, Label, Schema, reading_plan
from roostream.wire.batch import TEXT, Batch
from roostream.wire.block import Side
from roostream.wire.jagged import Jagged

MAX_COLUMNS = 32
"""Columns of one kernel call, fixed because a tuple of another length is compiled again."""
_ROWS_AT_ONCE = 256  # of all columns; they stay in the L1 cache
_INFINITY_BITS = 0x7F800000  # larger magnitudes are NaNs

Of = Literal["request", "candidate"]
Role = Literal["id", "float", "time", "number", "text"]


class ColumnType(NamedTuple):
    """The type and meaning of a column; file formats choose the encoding from it."""

    of: Of
    role: Role
    dtype: str  # numpy's
    is_list: bool = False  # each row has a list of values


class FlatColumn(NamedTuple):
    """The values of all rows, row by row."""

    values: np.ndarray
    lengths: np.ndarray | None = None  # int32 [N], if a list
    present: np.ndarray | None = None  # bool [N], if a list: False = missing, with length 0


REQUEST: Mapping[str, ColumnType] = {
    "offset": ColumnType("request", "time", "i8"),
    "close_ms": ColumnType("request", "time", "i8"),
    "time_ms": ColumnType("request", "time", "i8"),
    "sample_id": ColumnType("request", "number", "i8"),
    "oldest_engagement_ms": ColumnType("request", "time", "i8"),
    "surface": ColumnType("request", "text", TEXT),
    "weight": ColumnType("request", "float", "f4"),
}
CANDIDATE: Mapping[str, ColumnType] = {
    "item": ColumnType("candidate", "id", "i8"),
    "position": ColumnType("candidate", "number", "i4"),
    "propensity": ColumnType("candidate", "float", "f4"),
}
_SIDES: tuple[tuple[Side, Of], ...] = (("ro", "request"), ("nro", "candidate"))
_BY_LABEL = {"label": "label_BT", "score": "served_score_BT"}
_FLOAT = ColumnType("request", "float", "f4")


def column_of(side: Side, feature: str, column: str = "") -> str:
    """The name of a feature's column."""
    return f"{side}__{feature}__{column}" if column else f"{side}__{feature}"


def label_column(label: str, what: str = "label") -> str:
    """The name of a label's column; `what`: label, score, or a column of corrections."""
    return f"{what}__{label}"


def column_types(schema: Schema) -> dict[str, ColumnType]:
    """Column → type, of all columns of a sample of `schema`, in declared order."""
    out = {**REQUEST, **CANDIDATE}
    for label in schema.labels:
        for what in _BY_LABEL:
            out[label_column(label.name, what)] = ColumnType("candidate", "float", "f4")
    for side, of in _SIDES:
        for feature in getattr(schema, side):
            out |= _feature_types(side, of, feature)
    return out


def feature_columns(side: Side, feature: Feature) -> tuple[str, ...]:
    """The names of a feature's columns, first the one of its values."""
    return tuple(_feature_types(side, "request", feature))


def _feature_types(side: Side, of: Of, feature: Feature) -> dict[str, ColumnType]:
    name = column_of(side, feature.name)
    if not feature.is_list:
        return {name: _FLOAT._replace(of=of)}
    out = {name: ColumnType(of, "id", "i8", is_list=True)}
    if feature.kind == "weighted_ids":
        out[column_of(side, feature.name, "weights")] = ColumnType(of, "float", "f4", is_list=True)
    for column in feature.id_columns:
        out[column_of(side, feature.name, column)] = ColumnType(of, "id", "i8", is_list=True)
    for column in feature.time_columns:
        out[column_of(side, feature.name, column)] = ColumnType(of, "time", "i8", is_list=True)
    return out


def uncut_schema(schema: Schema) -> Schema:
    """`schema` without max_len, for writing files: readers cut lists by their own schemas."""
    uncut = {
        side: tuple(dataclasses.replace(f, max_len=0) for f in getattr(schema, side)) for side, _ in _SIDES
    }
    return dataclasses.replace(schema, ro=uncut["ro"], nro=uncut["nro"])


def project_schema(schema: Schema, features: frozenset[str]) -> Schema:
    """`schema` with only these features and the transforms that need no others. Reading with it reads only
    their columns.

    Raises:
        SchemaError: the schema does not have a feature.
    """
    known = {f.name for f in (*schema.ro, *schema.nro)}
    if not features <= known:
        raise SchemaError(f"expected features of schema {schema.name!r}, got {sorted(features - known)}")
    kept = {side: tuple(f for f in getattr(schema, side) if f.name in features) for side, _ in _SIDES}
    available, transforms = set(features), []
    for transform in schema.transforms:
        if transform.input in available:
            transforms.append(transform)
            available.add(transform.output)
    return dataclasses.replace(schema, ro=kept["ro"], nro=kept["nro"], transforms=tuple(transforms))


def columns_of(batch: Batch) -> dict[str, FlatColumn]:
    """Every column of a batch, in the order of `column_types`; arrays are shared where possible."""
    weight_R = np.ones(batch.num_requests, dtype=np.float32)
    weight_R[batch.request_index_B] = batch.weight_BT.max(axis=1, initial=0)
    out = {name: FlatColumn(getattr(batch, f"{name}_R")) for name in REQUEST if name != "weight"}
    out["weight"] = FlatColumn(weight_R)
    out |= {name: FlatColumn(getattr(batch, f"{name}_B")) for name in CANDIDATE}
    for t, label in enumerate(batch.schema.labels):
        for what, array in _BY_LABEL.items():
            out[label_column(label.name, what)] = FlatColumn(
                np.ascontiguousarray(getattr(batch, array)[:, t])
            )
    for side, _ in _SIDES:
        letter = "R" if side == "ro" else "B"
        float_NF, present_NF = (getattr(batch, f"{side}_{what}_{letter}F") for what in ("float", "present"))
        for i, feature in enumerate(batch.schema.floats(side)):
            out[column_of(side, feature.name)] = FlatColumn(
                np.where(present_NF[:, i], float_NF[:, i], np.float32(np.nan))
            )
        lists: Jagged = getattr(batch, f"{side}_lists")
        for k, feature in enumerate(batch.schema.lists(side)):
            lengths, present = lists.lengths_KN[k], lists.present_KN[k]
            for name, values in _list_values(side, lists, feature).items():
                out[name] = FlatColumn(values, lengths, present)
    return out


def _list_values(side: Side, lists: Jagged, feature: Feature) -> dict[str, np.ndarray]:
    out = {column_of(side, feature.name): lists.values_of(feature.name)}
    weights = lists.weights_of(feature.name)
    if feature.kind == "weighted_ids" and weights is not None:
        out[column_of(side, feature.name, "weights")] = weights
    for column in (*feature.id_columns, *feature.time_columns):
        out[column_of(side, feature.name, column)] = lists.columns[f"{feature.name}.{column}"]
    return out


def needed_columns(writer: Schema, reader: Schema) -> dict[str, ColumnType]:
    """The columns of a file by `writer` that a batch of `reader` needs.

    Raises:
        SchemaError: `reader` cannot read samples of `writer` (`roostream.schema.schema.reading_plan`).
    """
    reading_plan(writer, reader)
    written = column_types(writer)
    return {name: type_ for name, type_ in column_types(reader).items() if name in written}


def batch_from_columns(
    reader: Schema, columns: Mapping[str, FlatColumn], counts_R: np.ndarray, partition: int
) -> Batch:
    """Build the batch that a decoder of `reader` makes of the same samples, bit for bit.

    Args:
        columns: those of `needed_columns`; an absent one is missing in every row.
        counts_R: int32 [R], the number of candidates of each request.
        partition: the samples' partition of the topic.
    """
    r, b = len(counts_R), int(counts_R.sum(dtype=np.int64))
    index_B = np.repeat(np.arange(r), counts_R)
    arrays: dict[str, Any] = {f"{name}_R": columns[name].values for name in REQUEST if name != "weight"}
    arrays |= {f"{name}_B": columns[name].values for name in CANDIDATE}
    return Batch(
        schema=reader,
        num_candidates_R=counts_R,
        request_index_B=index_B,
        correction_R=np.zeros(r, dtype=np.bool_),
        partition_R=np.full(r, partition, dtype=np.int32),
        **arrays,
        **_label_arrays(reader.labels, columns, index_B),
        **_side_arrays(reader, "ro", columns, r),
        **_side_arrays(reader, "nro", columns, b),
    )


def _label_arrays(
    labels: tuple[Label, ...], columns: Mapping[str, FlatColumn], index_B: np.ndarray
) -> dict[str, Any]:
    shape = (len(index_B), len(labels))
    absent = {"label": 0.0, "score": np.nan}
    out = {array: np.empty(shape, dtype=np.float32) for array in ("weight_BT", *_BY_LABEL.values())}
    weight_B = columns["weight"].values[index_B]
    for t, label in enumerate(labels):
        out["weight_BT"][:, t] = weight_B if label_column(label.name) in columns else 0.0
        for what, array in _BY_LABEL.items():
            found = columns.get(label_column(label.name, what))
            out[array][:, t] = absent[what] if found is None else found.values
    return {**out, "label_before_BT": np.full(shape, np.nan, dtype=np.float32)}


def _side_arrays(schema: Schema, side: Side, columns: Mapping[str, FlatColumn], rows: int) -> dict[str, Any]:
    letter = "R" if side == "ro" else "B"
    floats = [columns.get(column_of(side, feature.name)) for feature in schema.floats(side)]
    missing_N = np.full(rows, np.nan, dtype=np.float32) if None in floats else None
    # The kernel is compiled for writable contiguous arrays only.
    values_F = [
        np.require(missing_N if found is None else found.values, np.float32, ["C", "W"]) for found in floats
    ]
    assert all(len(values) == rows for values in values_F)
    default_F = np.array([feature.default for feature in schema.floats(side)], dtype=np.float32)
    float_NF = np.empty((rows, len(floats)), dtype=np.float32)
    present_NF = np.empty((rows, len(floats)), dtype=np.bool_)
    for first in range(0, len(floats), MAX_COLUMNS):
        group = tuple(values.view(np.uint32) for values in values_F[first : first + MAX_COLUMNS])
        padded = group + group[:1] * (MAX_COLUMNS - len(group))
        interleave_columns(
            padded, len(group), first, default_F.view(np.uint32), float_NF.view(np.uint32), present_NF
        )
    lists = _build_lists(schema, side, columns, rows)
    return {
        f"{side}_float_{letter}F": float_NF,
        f"{side}_present_{letter}F": present_NF,
        f"{side}_lists": lists,
    }


def _build_lists(schema: Schema, side: Side, columns: Mapping[str, FlatColumn], rows: int) -> Jagged:
    features, max_list = schema.lists(side), schema.limits.max_list
    is_weighted = any(f.kind == "weighted_ids" for f in features)
    lengths_KN = np.zeros((len(features), rows), dtype=np.int32)
    present_KN = np.zeros((len(features), rows), dtype=np.bool_)
    values, weights, aligned = [], [], dict[str, np.ndarray]()
    for k, feature in enumerate(features):
        names = feature_columns(side, feature)
        read = {name: _cut(columns[name], feature.max_len or max_list) for name in names if name in columns}
        values_column = read.get(names[0], FlatColumn(np.zeros(0, np.int64), lengths_KN[k], present_KN[k]))
        lengths_KN[k], present_KN[k] = values_column.lengths, values_column.present
        values.append(values_column.values)
        if is_weighted:
            weight_column = read.get(column_of(side, feature.name, "weights"))
            weights.append(
                np.ones(len(values_column.values), np.float32)
                if weight_column is None
                else weight_column.values
            )
        for column in (*feature.id_columns, *feature.time_columns):
            name = column_of(side, feature.name, column)
            aligned[f"{feature.name}.{column}"] = read[name].values if name in read else np.zeros(0, np.int64)
    return Jagged(
        keys=tuple(f.name for f in features),
        lengths_KN=lengths_KN,
        values=np.concatenate(values) if values else np.zeros(0, dtype=np.int64),
        present_KN=present_KN,
        weights=np.concatenate(weights) if is_weighted else None,
        columns=aligned,
    )


def _cut(column: FlatColumn, max_len: int) -> FlatColumn:
    """The first `max_len` values of each list."""
    lengths = column.lengths
    assert lengths is not None
    if not len(lengths) or int(lengths.max()) <= max_len:
        return column
    position = np.arange(len(column.values)) - np.repeat(
        np.cumsum(lengths, dtype=np.int64) - lengths, lengths
    )
    return FlatColumn(
        column.values[position < max_len], np.minimum(lengths, np.int32(max_len)), column.present
    )


@njit(cache=True, nogil=True)
def interleave_columns(
    columns_C: tuple[np.ndarray, ...],
    count: int,
    first: int,
    default_F: np.ndarray,
    out_NF: np.ndarray,
    present_NF: np.ndarray,
) -> None:
    """Copy `count` columns (uint32 [N], bits of floats) into `out_NF` and `present_NF` (bool) from column
    `first` on. NaN is missing and replaced by the column's default."""
    for start in range(0, len(out_NF), _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, len(out_NF))
        out_MF, present_MF, c = out_NF[start:end], present_NF[start:end], 0
        while c < count:
            f = first + c
            if c + 4 <= count:
                a, b, d, e = columns_C[c], columns_C[c + 1], columns_C[c + 2], columns_C[c + 3]
                four = a[start:end], b[start:end], d[start:end], e[start:end]
                interleave_four(*four, default_F[f : f + 4], out_MF[:, f : f + 4], present_MF[:, f : f + 4])
                c += 4
            else:
                interleave_one(columns_C[c][start:end], default_F[f], out_MF[:, f], present_MF[:, f])
                c += 1


@njit(cache=True, nogil=True)
def interleave_four(
    a_M: np.ndarray,
    b_M: np.ndarray,
    c_M: np.ndarray,
    d_M: np.ndarray,
    default_4: np.ndarray,
    out_M4: np.ndarray,
    present_M4: np.ndarray,
) -> None:
    """As `interleave_one`, of four adjacent columns, which share cache lines of the output."""
    absent_a, absent_b, absent_c, absent_d = default_4[0], default_4[1], default_4[2], default_4[3]
    for m in range(len(a_M)):
        a, b, c, d = a_M[m], b_M[m], c_M[m], d_M[m]
        has_a, has_b, has_c, has_d = is_number(a), is_number(b), is_number(c), is_number(d)
        out_M4[m, 0], out_M4[m, 1] = a if has_a else absent_a, b if has_b else absent_b
        out_M4[m, 2], out_M4[m, 3] = c if has_c else absent_c, d if has_d else absent_d
        present_M4[m, 0], present_M4[m, 1], present_M4[m, 2], present_M4[m, 3] = has_a, has_b, has_c, has_d


@njit(cache=True, nogil=True)
def interleave_one(
    values_M: np.ndarray, default: np.uint32, out_M: np.ndarray, present_M: np.ndarray
) -> None:
    """Copy one column (uint32 [M], bits of floats) and its presence; NaN gives the default."""
    for m in range(len(values_M)):
        has = is_number(values_M[m])
        out_M[m] = values_M[m] if has else default
        present_M[m] = has


@njit(cache=True, nogil=True)
def is_number(bits: np.uint32) -> np.bool_:
    """Whether the float with these bits (uint32) is not NaN."""
    return (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(_INFINITY_BITS)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    bits_NF = np.zeros((1, 5), dtype=np.uint32)
    interleave_columns(
        (np.zeros(1, dtype=np.uint32),) * MAX_COLUMNS,
        5,
        0,
        np.zeros(5, dtype=np.uint32),
        bits_NF,
        np.zeros((1, 5), dtype=np.bool_),
    )

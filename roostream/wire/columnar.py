"""A batch as named flat columns, and back: what a file of samples holds, whatever its format.

Letters: R requests, B candidates, F floats of a side, N rows of a side (R or B), T labels.

    column                    of           what
    offset, close_ms, …       request      fields of Batch that a request has (REQUEST)
    item, position, …         candidate    those that a candidate has (CANDIDATE)
    label__<label>            candidate    also score__<label>, as served
    ro__<feature>             request      a float, NaN = missing; or a list, each row of it present or missing
    ro__<feature>__<column>   request      a sequence's column, as long as its ids; `weights` of a weighted list
    nro__<feature>…           candidate    the same of candidates

A file holds what its writer's schema declares, whole; what a reader's schema lacks is left out, what it cuts is cut when it is
read. Pure numpy: formats are elsewhere (roostream/warehouse/parquet_file.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from roostream.errors import SchemaError
from roostream.schema.schema import Feature, Label, Schema, reading_plan
from roostream.wire.batch import TEXT, Batch
from roostream.wire.block import Side
from roostream.wire.columnar_kernels import MAX_COLUMNS, interleave_columns
from roostream.wire.jagged import Jagged

Of = Literal["request", "candidate"]
Role = Literal["id", "float", "time", "number", "text"]


class ColumnType(NamedTuple):
    """What a column is: how it is best written follows from it."""

    of: Of
    role: Role
    dtype: str  # numpy's
    is_list: bool = False  # each row has a list of values


class FlatColumn(NamedTuple):
    """Values of all rows behind each other."""

    values: np.ndarray
    lengths: np.ndarray | None = None  # int32 [N], of a list
    present: np.ndarray | None = None  # bool [N], of a list: False = missing, and then of length 0


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
    """`what`: label, score, or what corrections have."""
    return f"{what}__{label}"


def column_types(schema: Schema) -> dict[str, ColumnType]:
    """Every column of a sample of `schema`, in declared order.

    Raises:
        SchemaError: two features would make one column.
    """
    out = {**REQUEST, **CANDIDATE}
    for label in schema.labels:
        for what in _BY_LABEL:
            out[label_column(label.name, what)] = ColumnType("candidate", "float", "f4")
    for side, of in _SIDES:
        for feature in getattr(schema, side):
            for name, form in _feature_forms(side, of, feature).items():
                if name in out:
                    raise SchemaError(
                        f"expected one feature for a column, got two for {name!r}; give {feature.name!r} another name"
                    )
                out[name] = form
    return out


def feature_columns(side: Side, feature: Feature) -> tuple[str, ...]:
    """The names of a feature's columns, the first its own."""
    return tuple(_feature_forms(side, "request", feature))


def _feature_forms(side: Side, of: Of, feature: Feature) -> dict[str, ColumnType]:
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
    """`schema` with nothing that cuts: what a file is written with, so that every reader can cut for itself."""
    uncut = {
        side: tuple(dataclasses.replace(f, max_len=0) for f in getattr(schema, side)) for side, _ in _SIDES
    }
    return dataclasses.replace(schema, ro=uncut["ro"], nro=uncut["nro"])


def project_schema(schema: Schema, features: frozenset[str]) -> Schema:
    """`schema` with these features alone, and the transforms that need no others: reading with it reads their columns only.

    Raises:
        SchemaError: a feature that the schema doesn't have.
    """
    known = {f.name for f in (*schema.ro, *schema.nro)}
    if not features <= known:
        raise SchemaError(f"expected features of schema {schema.name!r}, got {sorted(features - known)}")
    kept = {side: tuple(f for f in getattr(schema, side) if f.name in features) for side, _ in _SIDES}
    there, transforms = set(features), []
    for transform in schema.transforms:
        if transform.input in there:
            transforms.append(transform)
            there.add(transform.output)
    return dataclasses.replace(schema, ro=kept["ro"], nro=kept["nro"], transforms=tuple(transforms))


def columns_of(batch: Batch) -> dict[str, FlatColumn]:
    """Every column of a batch, as `forms` of its schema lists them; arrays are shared where they can be."""
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
    """The columns of a file that `writer` wrote which a batch of `reader` is made of.

    Raises:
        SchemaError: what changed between them can't be read (`roostream.schema.schema.reading_plan`).
    """
    reading_plan(writer, reader)
    there, wanted = column_types(writer), column_types(reader)
    return {name: form for name, form in wanted.items() if name in there}


def batch_from_columns(
    reader: Schema, columns: Mapping[str, FlatColumn], counts_R: np.ndarray, partition: int
) -> Batch:
    """The batch that a decoder of `reader` makes of the same samples, every array and float bit.

    Args:
        columns: those of `needed`; what isn't there is missing in every row.
        counts_R: int32 [R], the candidates of each request.
        partition: of the topic that they came from.
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
    # the kernel knows arrays of one kind only: those that can be written, whose values lie side by side
    values_F = [
        np.require(missing_N if found is None else found.values, np.float32, ["C", "W"]) for found in floats
    ]
    assert all(len(values) == rows for values in values_F)
    default_F = np.array([feature.default for feature in schema.floats(side)], dtype=np.float32)
    float_NF = np.empty((rows, len(floats)), dtype=np.float32)
    present_NF = np.empty((rows, len(floats)), dtype=np.bool_)
    for first in range(0, len(floats), MAX_COLUMNS):
        its = tuple(values.view(np.uint32) for values in values_F[first : first + MAX_COLUMNS])
        padded = its + its[:1] * (MAX_COLUMNS - len(its))
        interleave_columns(
            padded, len(its), first, default_F.view(np.uint32), float_NF.view(np.uint32), present_NF
        )
    lists = _lists_of(schema, side, columns, rows)
    return {
        f"{side}_float_{letter}F": float_NF,
        f"{side}_present_{letter}F": present_NF,
        f"{side}_lists": lists,
    }


def _lists_of(schema: Schema, side: Side, columns: Mapping[str, FlatColumn], rows: int) -> Jagged:
    features, cap = schema.lists(side), schema.limits.max_list
    is_weighted = any(f.kind == "weighted_ids" for f in features)
    lengths_KN = np.zeros((len(features), rows), dtype=np.int32)
    present_KN = np.zeros((len(features), rows), dtype=np.bool_)
    values, weights, aligned = [], [], dict[str, np.ndarray]()
    for k, feature in enumerate(features):
        names = feature_columns(side, feature)
        found = {name: _cut(columns[name], feature.max_len or cap) for name in names if name in columns}
        own = found.get(names[0], FlatColumn(np.zeros(0, np.int64), lengths_KN[k], present_KN[k]))
        lengths_KN[k], present_KN[k] = own.lengths, own.present
        values.append(own.values)
        if is_weighted:
            given = found.get(column_of(side, feature.name, "weights"))
            weights.append(np.ones(len(own.values), np.float32) if given is None else given.values)
        for column in (*feature.id_columns, *feature.time_columns):
            name = column_of(side, feature.name, column)
            aligned[f"{feature.name}.{column}"] = (
                found[name].values if name in found else np.zeros(0, np.int64)
            )
    return Jagged(
        keys=tuple(f.name for f in features),
        lengths_KN=lengths_KN,
        values=np.concatenate(values) if values else np.zeros(0, dtype=np.int64),
        present_KN=present_KN,
        weights=np.concatenate(weights) if is_weighted else None,
        columns=aligned,
    )


def _cut(column: FlatColumn, most: int) -> FlatColumn:
    """Each list's first `most` values."""
    lengths = column.lengths
    assert lengths is not None
    if not len(lengths) or int(lengths.max()) <= most:
        return column
    place = np.arange(len(column.values)) - np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    return FlatColumn(column.values[place < most], np.minimum(lengths, np.int32(most)), column.present)

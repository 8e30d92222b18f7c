"""Feature blocks: encoding and decoding are inverse, protobuf writes the same bytes, and an error names the
invalid feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import WireError
from roostream.schema.schema import Limits, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import canonical, check_block, columns_of, decode_block, encode_nro, encode_ro
from roostream.wire.records import MAX_WEIGHT
from tests.wire.sample_builders import parse_schema

ID = st.integers(-(1 << 63), (1 << 63) - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False, width=32)
WEIGHT = st.floats(-MAX_WEIGHT, MAX_WEIGHT, width=32)


def sequence(*columns: str) -> st.SearchStrategy[dict[str, list[int]]]:
    return st.integers(0, 5).flatmap(
        lambda n: st.fixed_dictionaries({c: st.lists(ID, min_size=n, max_size=n) for c in columns})
    )


WEIGHTED = st.integers(0, 4).flatmap(
    lambda n: st.fixed_dictionaries(
        {"ids": st.lists(ID, min_size=n, max_size=n), "weights": st.lists(WEIGHT, min_size=n, max_size=n)}
    )
)
RO = st.fixed_dictionaries(
    {},
    optional={
        "hour": FLOAT,
        "gap": FLOAT,
        "history": sequence("item", "action", "kind", "time"),
        "tags": WEIGHTED,
    },
)
ROW = st.fixed_dictionaries(
    {
        "item": st.none() | st.lists(ID, max_size=3),
        "age": FLOAT | st.just(float("nan")),
        "topics": st.none() | WEIGHTED,
        "seen": st.none() | sequence("item", "time"),
    }
)


@given(values=RO)
def test_ro_values_round_trip_with_the_bytes_of_protobuf(schema: Schema, values: dict[str, Any]) -> None:
    data = encode_ro(schema, values)
    assert decode_block(schema, "ro", data, 1) == values
    assert pb.Block.FromString(data).SerializeToString(deterministic=True) == data == canonical(data)
    check_block(schema, "ro", data, 1, schema.limits)


@given(rows=st.lists(ROW, max_size=6))
def test_nro_columns_round_trip_with_the_bytes_of_protobuf(
    schema: Schema, rows: list[dict[str, Any]]
) -> None:
    columns = {f.name: [row[f.name] for row in rows] for f in schema.nro}
    data = encode_nro(schema, columns, len(rows))
    assert pb.Block.FromString(data).SerializeToString(deterministic=True) == data
    check_block(schema, "nro", data, len(rows), schema.limits)
    decoded = decode_block(schema, "nro", data, len(rows))
    np.testing.assert_array_equal(decoded.pop("age"), np.array(columns.pop("age"), np.float32))
    assert decoded == columns
    assert encode_nro(schema, decode_block(schema, "nro", data, len(rows)), len(rows)) == data


def test_flat_columns_encode_like_lists_of_one() -> None:
    schema = parse_schema(
        '[tables.t]\ndim = 1\n[[nro]]\nname = "x"\n[[nro]]\nname = "a"\nkind = "ids"\ntable = "t"\n'
        '[[nro]]\nname = "b"\nkind = "ids"\ntable = "t"\n[[label]]\nname = "c"\naction = "c"'
    )
    lists = encode_nro(schema, {"a": [[1], [2]], "b": [[3], [-1]], "x": [1, None]}, 2)
    assert encode_nro(schema, {"a": [1, 2], "b": [3, (1 << 64) - 1], "x": np.array([1, np.nan])}, 2) == lists
    assert encode_nro(schema, {"a": np.array([1, 2]), "b": np.array([3, -1]), "x": [1, None]}, 2) == lists
    with_gap = encode_nro(schema, {"b": [[3], [4]], "x": [1, None]}, 2)
    assert encode_nro(schema, {"b": np.array([3, 4]), "x": [1, None]}, 2) == with_gap
    assert decode_block(schema, "nro", with_gap, 2)["a"] == [None, None]
    assert pb.Block.FromString(with_gap).SerializeToString(deterministic=True) == with_gap
    assert encode_nro(schema, {"a": ["s", 2], "b": [3, 4]}, 2) != lists


def test_empty_arrays_encode_like_empty_lists(schema: Schema) -> None:
    none = np.zeros(0, np.int64)
    empties: list[Any] = [none, []]
    for name, columns in (("tags", ("ids", "weights")), ("history", ("item", "action", "kind", "time"))):
        arrays, lists = ({name: dict.fromkeys(columns, empty)} for empty in empties)
        assert encode_ro(schema, arrays) == encode_ro(schema, lists)
    assert encode_nro(schema, {"item": [none]}, 1) == encode_nro(schema, {"item": [[]]}, 1)


def test_a_block_without_features_has_no_bytes(schema: Schema) -> None:
    assert encode_ro(schema, {}) == encode_ro(schema, {"hour": None, "gap": float("nan")}) == b""
    assert encode_nro(schema, {}, 3) == b"" and decode_block(schema, "nro", b"", 3)["item"] == [
        None,
        None,
        None,
    ]
    check_block(schema, "nro", b"", 3, schema.limits)


TWO = {"item": [1, 2], "action": [1, 2], "kind": [1, 2], "time": [1, 2]}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hours": 1.0}, "unknown ro feature 'hours'; did you mean 'hour'?"),
        ({"hour": "late"}, "feature 'hour': expected a number, got 'late'"),
        ({"hour": True}, "expected a number, got True"),
        ({"hour": 1e39}, "feature 'hour': expected finite 32-bit floats, got 1e+39"),
        ({"hour": float("inf")}, "feature 'hour': expected finite 32-bit floats, got inf"),
        ({"hour": 10**400}, "feature 'hour': expected finite 32-bit floats, got an integer"),
        ({"tags": {"ids": [1], "weights": [10**400]}}, "feature 'tags': expected finite 32-bit floats"),
        ({"tags": [1]}, "expected a table with 'ids', 'weights', got [1]"),
        ({"tags": {"ids": [1]}}, "expected a table with 'ids', 'weights', got a table with 'ids'"),
        ({"tags": {}}, "got a table with nothing"),
        ({"tags": {"ids": [1], "weights": ["x"]}}, "expected weights (numbers)"),
        ({"tags": {"ids": [1], "weights": [float("nan")]}}, "expected finite weights, got NaN"),
        (
            {"tags": {"ids": [1], "weights": [1.0, 1e39]}},
            "feature 'tags': expected weights within ±1000000, got 1e+39",
        ),
        ({"tags": {"ids": [1, 2], "weights": [1.0]}}, "expected columns of equal length, got lengths [1, 2]"),
        ({"tags": {"ids": [1.5], "weights": [1.0]}}, "expected ids (integers or strings), got [1.5]"),
        ({"tags": {"ids": [True], "weights": [1.0]}}, "expected ids"),
        ({"tags": {"ids": 5, "weights": [1.0]}}, "expected ids"),
        ({"history": [1]}, "expected a table with 'item', 'action', 'kind', 'time'"),
        ({"history": TWO | {"time": [1, "x"]}}, "expected times in ms (integers)"),
        ({"history": TWO | {"time": [1, 1 << 63]}}, "expected times in ms (64-bit integers)"),
        (
            {"history": {c: list(range(31)) for c in TWO}},
            "expected lists of at most 30 entries, got 31; [limits] max_list allows more",
        ),
        ({"history": {"item": ["x" * 500, 1.5], "action": [], "kind": [], "time": []}}, "…"),
    ],
)
def test_invalid_ro_values_are_rejected(schema: Schema, values: dict[str, Any], text: str) -> None:
    with pytest.raises(WireError) as error:
        encode_ro(schema, values)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("columns", "rows", "text"),
    [
        ({"itm": [1]}, 1, "unknown nro feature 'itm'; did you mean 'item'?"),
        ({"age": [1.0]}, 2, "expected one value for each of 2 candidates, got 1 values"),
        ({"age": [10**400]}, 1, "feature 'age': expected finite 32-bit floats, got an integer"),
        ({"age": np.array(["a"])}, 1, "expected 1 numbers"),
        ({"item": [[1]]}, 2, "expected one value for each of 2 candidates, got 1 values"),
        ({"item": [5.5]}, 1, "expected a list of ids, got 5.5"),
        ({"item": [b"x"]}, 1, "expected a list of ids"),
        ({"item": [{"ids": [1]}]}, 1, "expected a list of ids, got a table with 'ids'"),
        ({"item": "ab"}, 2, "feature 'item': expected one value for each of 2 candidates, got 'ab'"),
        ({"item": {"a": 1, "b": 2}}, 2, "feature 'item': expected one value for each of 2 candidates"),
        ({"item": 5}, 2, "feature 'item': expected one value for each of 2 candidates, got 5"),
        ({"age": 5}, 2, "feature 'age': expected one value for each of 2 candidates, got 5"),
        ({"age": np.array(5.0)}, 1, "feature 'age': expected one value for each of 1 candidates"),
        ({}, 41, "at most 40 candidates, got 41; [limits] max_candidates"),
    ],
)
def test_invalid_nro_columns_are_rejected(
    schema: Schema, columns: dict[str, Any], rows: int, text: str
) -> None:
    with pytest.raises(WireError) as error:
        encode_nro(schema, columns, rows)
    assert text in str(error.value)


def test_the_ids_of_a_sequence_may_be_named_ids(schema: Schema) -> None:
    as_table = encode_ro(schema, {"history": TWO})
    assert (
        encode_ro(schema, {"history": {"ids" if k == "item" else k: v for k, v in TWO.items()}}) == as_table
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0a", "undecodable"),
        (b"\x0a\x05ab", "undecodable"),
        (b"\x0a\x03abc", "undecodable"),
        (b"\x0a\xff\xff\xff\xff\xff\xff", "undecodable"),
        (b"\x0a\xff", "undecodable"),
        (pb.Block(floats=[1]).SerializeToString(), "bad_shape"),
        (pb.Block(floats=[1, 2], lengths=[0]).SerializeToString(), "bad_shape"),
        (pb.Block(floats=[1, 2], lengths=[1, 0]).SerializeToString(), "bad_shape"),
        (pb.Block(floats=[1, 2], lengths=[0, 0], times=[1]).SerializeToString(), "bad_shape"),
        (pb.Block(floats=[1, 2], lengths=[0, 1], ids=[1]).SerializeToString(), "bad_shape"),
        (pb.Block(floats=[1, 2], lengths=[0, 0], missing=b"\0\0").SerializeToString(), "bad_shape"),
        (
            pb.Block(floats=[1, 2], lengths=[0, 1], ids=[1], weights=[1], missing=b"\2").SerializeToString(),
            "bad_shape",
        ),
        (
            pb.Block(floats=[1, 2], lengths=[0, 31], ids=range(31), weights=[1] * 31).SerializeToString(),
            "oversized",
        ),
        (pb.Block(floats=[1, float("inf")], lengths=[0, 0]).SerializeToString(), "non_finite"),
        (
            pb.Block(floats=[1, 2], lengths=[0, 1], ids=[1], weights=[float("nan")]).SerializeToString(),
            "non_finite",
        ),
        (
            pb.Block(floats=[1, 2], lengths=[0, 1], ids=[1], weights=[-1.1e6]).SerializeToString(),
            "bad_number",
        ),
    ],
)
def test_bytes_that_do_not_fit_the_schema_are_rejected(schema: Schema, data: bytes, reason: str) -> None:
    with pytest.raises(WireError) as error:
        check_block(schema, "ro", data, 1, schema.limits)
    assert error.value.reason == reason


def test_more_rows_than_the_limit_are_rejected(schema: Schema) -> None:
    with pytest.raises(WireError, match="expected at most 2 candidates, got 3"):
        check_block(schema, "nro", b"", 3, Limits(max_candidates=2))


def test_split_and_unpacked_columns_are_read_alike() -> None:
    whole = pb.Block(floats=[1, 2, 3], ids=[4]).SerializeToString()
    pieces = (
        pb.Block(floats=[1]).SerializeToString() + pb.Block(ids=[4]).SerializeToString() + b"\x0d\0\0\0\x40"
    )
    pieces += pb.Block(floats=[3]).SerializeToString()
    assert columns_of(pieces).floats.tolist() == [1, 2, 3] == columns_of(whole).floats.tolist()
    assert canonical(pieces) == whole

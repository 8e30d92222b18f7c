"""Filling missing features into an encoded block gives the same bytes as encoding all values at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import WireError
from roostream.schema.schema import Feature, Label, Limits, Schema, Table
from roostream.wire import missing_features as module
from roostream.wire.block import NO_COLUMNS, Columns, Side, nro_columns, pack, ro_columns
from roostream.wire.missing_features import MissingFeatures, precompile
from tests.serving.test_request_batch import FLOAT, ID, schemas, values


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def expected_column(given: list[Any], fresh: list[Any] | None) -> list[Any]:
    """Fill missing values of a column row by row."""
    return given if fresh is None else [f if is_missing(v) else v for v, f in zip(given, fresh, strict=True)]


def as_column(f: Feature, column: list[Any]) -> Any:
    return np.array([np.nan if v is None else v for v in column], np.float64) if f.kind == "float" else column


def arrays(schema: Schema, side: Side, columns: dict[str, list[Any]], n: int) -> Columns:
    if side == "ro":
        return ro_columns(schema, {name: column[0] for name, column in columns.items()})
    by_name = {f.name: f for f in schema.nro}
    return nro_columns(
        schema, {name: as_column(by_name[name], column) for name, column in columns.items()}, n
    )


@st.composite
def fresh_values(draw: st.DrawFn, f: Feature, side: Side, n: int) -> Any:
    """Draw values in the form of online features: arrays for candidates; None if unknown."""
    if draw(st.booleans()):
        return None
    if side == "ro":
        return draw(values(f.kind))
    if f.kind == "float":
        return np.array(
            draw(st.lists(FLOAT.filter(lambda v: v is not None), min_size=n, max_size=n)), np.float32
        )
    return np.array(draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=n, max_size=n)), np.int64)


def is_plain(f: Feature, column: list[Any]) -> bool:
    """Return whether each row has exactly one id, or no row has any."""
    return all(v is None for v in column) or (
        f.kind == "ids" and all(v is not None and len(v) == 1 for v in column)
    )


@settings(max_examples=150)
@given(data=st.data())
def test_filled_arrays_equal_those_of_all_values_together(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    side: Side = data.draw(st.sampled_from(["ro", "nro"]))
    features = getattr(schema, side)
    n = 1 if side == "ro" else data.draw(st.integers(1, 4))
    one = st.lists(ID, min_size=1, max_size=1)
    columns: dict[str, list[Any]] = {}
    for f in features:
        rows = st.just([None] * n)
        if side == "nro" and f.kind == "ids":
            rows |= st.lists(one, min_size=n, max_size=n)
        columns[f.name] = data.draw(rows | st.lists(values(f.kind), min_size=n, max_size=n))
    sources = {f.name: f"of {f.name}" for f in features if data.draw(st.booleans())}
    feature_by_name = {f.name: f for f in features}
    fresh = {
        source: data.draw(fresh_values(feature_by_name[name], side, n)) for name, source in sources.items()
    }
    missing, block = MissingFeatures(schema, side, sources), arrays(schema, side, columns, n)
    missing_sources = {name for name in sources if any(map(is_missing, columns[name]))}
    assert missing.any_missing(block, n) == bool(missing_sources)

    filled = missing.fill(block, n, fresh)

    plain = all(is_plain(f, columns[f.name]) for f in features if f.kind != "float")
    fits = all(
        feature_by_name[name].kind in ("float", "ids") or fresh[source] is None
        for name, source in sources.items()
    )
    if side == "nro" and not (plain and fits):
        assert filled is None or plain
        return
    assert filled is not None
    expected_columns = {
        name: expected_column(column, _rows(fresh.get(sources.get(name, "")), side))
        for name, column in columns.items()
    }
    assert pack(filled) == pack(arrays(schema, side, expected_columns, n))
    assert pack(block) == pack(arrays(schema, side, columns, n)), "the block must not change"


SEEN = Feature(name="seen", kind="sequence", table="t")
SCHEMA = Schema(
    ro=(Feature(name="x"), SEEN),
    nro=(
        Feature(name="y"),
        Feature(name="item", kind="ids", table="t"),
        Feature(name="tags", kind="weighted_ids", table="t"),
    ),
    tables=(Table(name="t", dim=2),),
    labels=(Label(name="click", action="click"),),
    limits=Limits(max_list=3),
)
OF_REQUEST = MissingFeatures(SCHEMA, "ro", {"x": "x", "seen": "seen"})
OF_ROWS = MissingFeatures(SCHEMA, "nro", {"y": "y", "item": "item", "tags": "tags"})


@pytest.mark.parametrize(
    ("missing", "fresh"),
    [
        (OF_REQUEST, {"x": 1e39}),
        (OF_REQUEST, {"x": "1"}),
        (OF_REQUEST, {"x": True}),
        (OF_REQUEST, {"seen": {"t": [1, 2, 3, 4]}}),
        (OF_ROWS, {"y": [1.0, 2.0]}),
        (OF_ROWS, {"y": np.array([1.0])}),
        (OF_ROWS, {"y": np.array([1.0, np.inf])}),
        (OF_ROWS, {"item": [[1], [2, 3]]}),
        (OF_ROWS, {"item": np.array([1.0, 2.0])}),
        (OF_ROWS, {"tags": np.array([1, 2])}),
    ],
)
def test_values_that_need_decoding_are_not_filled(missing: MissingFeatures, fresh: dict[str, Any]) -> None:
    assert missing.fill(NO_COLUMNS, 1 if missing is OF_REQUEST else 2, fresh) is None


def test_a_value_of_another_kind_is_rejected() -> None:
    with pytest.raises(WireError, match="expected a table with 't'"):
        OF_REQUEST.fill(NO_COLUMNS, 1, {"seen": {"of": [1]}})


def test_without_values_nothing_is_filled() -> None:
    assert OF_REQUEST.fill(NO_COLUMNS, 1, {}) is NO_COLUMNS
    assert OF_ROWS.fill(NO_COLUMNS, 2, {}) is NO_COLUMNS
    assert not MissingFeatures(SCHEMA, "ro", {}).any_missing(NO_COLUMNS, 1)
    assert OF_ROWS.any_missing(NO_COLUMNS, 2)
    assert not OF_ROWS.any_missing(NO_COLUMNS, 0)


def test_precompile_covers_every_kernel() -> None:
    precompile()
    kernels = (module.some_missing, module.fill_floats, module.fill_rows)
    before = [len(kernel.nopython_signatures) for kernel in kernels]
    given = {"y": np.array([1.0, 2.0], np.float32), "item": np.array([5, 6], np.uint64)}
    plain = SCHEMA.nro[:2]
    of_plain_ids = MissingFeatures(dataclasses.replace(SCHEMA, nro=plain), "nro", {"y": "y", "item": "item"})
    filled = of_plain_ids.fill(NO_COLUMNS, 2, given)
    for block in (NO_COLUMNS, filled):
        assert block is not None
        assert of_plain_ids.fill(block, 2, given) is not None
        assert of_plain_ids.fill(block, 2, {}) is not None
        of_plain_ids.any_missing(block, 2)
    OF_REQUEST.fill(ro_columns(SCHEMA, {"seen": {"t": [1]}}), 1, {"x": 1.0})
    assert [len(kernel.nopython_signatures) for kernel in kernels] == before


def _rows(fresh: Any, side: Side) -> list[Any] | None:
    if fresh is None:
        return None
    if side == "ro":
        return [fresh]
    return [[int(v)] if fresh.dtype.kind == "i" else float(v) for v in fresh]

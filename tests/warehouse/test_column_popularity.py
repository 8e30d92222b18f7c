"""The order of columns in files follows how often sessions read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.runtime.checkpoint_store import FileStore
from roostream.warehouse import column_popularity as popularity
from roostream.warehouse.column_popularity import (
    column_order,
    hit_rates,
    interleave_by_hit_rate,
    recent_session_features,
    record_session_features,
)
from roostream.warehouse.parquet_file import ordered
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import column_types
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.sample_cases import rich_schema

SCHEMA = rich_schema()


def test_columns_are_ordered_by_width_and_popular_ones_are_neighbors() -> None:
    assert interleave_by_hit_rate([9, 1, 9, 1, 1, 5], [0.5, 0.9, 0.1, 0.2, 0.9, 0.3]) == [2, 0, 5, 3, 1, 4]
    assert interleave_by_hit_rate([9, 1, 9, 1], [0.5, 0.9, 0.1, 1.0]) == [2, 0, 3, 1]
    assert interleave_by_hit_rate([], []) == []


def test_popular_features_follow_the_columns_that_every_reader_needs() -> None:
    rates = hit_rates([{"age", "gap"}, {"age", "history"}, {"age"}])
    assert rates == {"age": 1.0, "gap": pytest.approx(1 / 3), "history": pytest.approx(1 / 3)}
    order = column_order(SCHEMA, rates)
    features = [name for name in order if name.startswith(("ro__", "nro__"))]
    lists, single = features[: features.index("ro__history")], features[features.index("nro__age") :]
    assert all(name.startswith("nro__") for name in lists)
    assert features[features.index("nro__age") + 1] == "ro__gap"
    assert {name.split("__")[0] for name in single[1:]} == {"ro"}, (
        "columns of candidates are wider than columns of requests"
    )
    assert sorted(order) == sorted(column_types(SCHEMA)) and order.index("item") < order.index(features[0])
    assert ordered(column_types(SCHEMA), order)[:2] == ["offset", "close_ms"]


def test_sessions_record_their_features_and_determine_the_column_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popularity, "MAX_SESSIONS", 2)
    warehouse = Warehouse(tmp_path)
    assert warehouse.column_order() == []
    for version, features in enumerate((["history"], ["gap"], ["age", "gap"])):
        record_session_features(warehouse.store, SCHEMA, version, "abc", features)
        # Ignored, because this session is recorded already.
        record_session_features(warehouse.store, SCHEMA, version, "abc", ["topics"])
    assert recent_session_features(warehouse.store) == [frozenset({"gap"}), frozenset({"age", "gap"})]
    features = [name for name in warehouse.column_order() if name.startswith(("ro__", "nro__"))]
    assert features[features.index("nro__age") + 1] == "ro__gap"
    assert len(warehouse.store.list("popularity/asked")) == 2


def test_unreadable_records_count_as_no_features() -> None:
    store = MemoryStore()
    for name, data in (("1-a", b"{"), ("2-b", b'{"age": 1}'), ("3-c", b'["age", 3]')):
        store.put(f"popularity/asked/{name}", data)
    assert recent_session_features(store) == [frozenset(), frozenset({"age"})]


def test_an_unwritable_store_records_nothing_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "popularity").write_text("in the way")
    record_session_features(FileStore(tmp_path), SCHEMA, 1, "abc", ["age"])
    assert (tmp_path / "popularity").read_text() == "in the way"

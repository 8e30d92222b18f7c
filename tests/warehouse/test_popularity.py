"""Columns lie in the order in which sessions ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roo.columnar import forms
from runtime.checkpoint_store import FileStore
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.sample_cases import rich_schema
from warehouse import popularity
from warehouse.layout import ordered
from warehouse.place import Warehouse
from warehouse.popularity import asked, column_order, hit_rates, note_asked

SCHEMA = rich_schema()


def test_what_most_sessions_ask_for_comes_first_behind_what_every_reader_needs() -> None:
    rates = hit_rates([{"age", "gap"}, {"age", "history"}, {"age"}])
    assert rates == {"age": 1.0, "gap": pytest.approx(1 / 3), "history": pytest.approx(1 / 3)}
    order = column_order(SCHEMA, rates)
    features = [name for name in order if name.startswith(("ro__", "nro__"))]
    asked_for = ["nro__age", "ro__history", "ro__history__action", "ro__history__kind", "ro__history__time", "ro__gap"]
    assert features[:6] == asked_for, "as declared where rates are equal"
    assert sorted(order) == sorted(forms(SCHEMA)) and order.index("item") < order.index("nro__age")
    assert ordered(forms(SCHEMA), order)[:2] == ["offset", "close_ms"]


def test_without_sessions_columns_are_as_declared() -> None:
    assert column_order(SCHEMA, hit_rates([])) == list(forms(SCHEMA))


def test_sessions_leave_what_they_asked_for_and_files_are_written_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popularity, "MOST_SESSIONS", 2)
    place = Warehouse(tmp_path)
    assert place.column_order() == []
    for version, features in enumerate((["history"], ["gap"], ["age", "gap"])):
        note_asked(place.store, SCHEMA, version, "abc", features)
        note_asked(place.store, SCHEMA, version, "abc", ["topics"])  # it has said so already
    assert asked(place.store) == [frozenset({"gap"}), frozenset({"age", "gap"})]
    features = [name for name in place.column_order() if name.startswith(("ro__", "nro__"))]
    assert features[:2] == ["ro__gap", "nro__age"] and len(place.store.list("popularity/asked")) == 2


def test_what_cant_be_understood_asked_for_nothing() -> None:
    store = MemoryStore()
    for name, data in (("1-a", b"{"), ("2-b", b'{"age": 1}'), ("3-c", b'["age", 3]')):
        store.put(f"popularity/asked/{name}", data)
    assert asked(store) == [frozenset(), frozenset({"age"})]


def test_where_it_cant_be_written_nothing_is_noted_and_nobody_fails(tmp_path: Path) -> None:
    (tmp_path / "popularity").write_text("in the way")
    note_asked(FileStore(tmp_path), SCHEMA, 1, "abc", ["age"])
    assert (tmp_path / "popularity").read_text() == "in the way"

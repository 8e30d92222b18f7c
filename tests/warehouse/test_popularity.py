"""Columns lie in the order in which sessions ask for them."""

from __future__ import annotations

import pytest

from roo.columnar import forms
from roo.errors import ConfigError
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.sample_cases import rich_schema
from warehouse import popularity
from warehouse.layout import ordered
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


def test_sessions_leave_what_they_asked_for_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(popularity, "MOST_SESSIONS", 2)
    store = MemoryStore()
    for n, features in enumerate((["old"], ["gap"], ["age", "gap"])):
        note_asked(store, f"s{n}", features, 1000 + n)
        note_asked(store, f"s{n}", features, 1000 + n)
    assert asked(store) == [frozenset({"gap"}), frozenset({"age", "gap"})]
    assert len(store.list("asked")) == 2


def test_what_cant_be_understood_asked_for_nothing() -> None:
    store = MemoryStore()
    store.put("asked/00000000000001-a.json", b"{")
    store.put("asked/00000000000002-b.json", b'{"age": 1}')
    store.put("asked/00000000000003-c.json", b'["age", 3]')
    assert asked(store) == [frozenset(), frozenset({"age"})]


def test_a_session_whose_name_cant_be_one_of_an_object_is_told() -> None:
    with pytest.raises(ConfigError, match="expected a session's name of lower-case letters"):
        note_asked(MemoryStore(), "../x", ["age"], 1)

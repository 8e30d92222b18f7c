"""Built-in online features equal their definitions. Storing and loading their state does not change a bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import CheckpointError
from roostream.online.counters import (
    STATELESS_FEATURES,
    Counters,
    Keys,
    precompile,
    sources_of,
    stateless_features,
)
from roostream.online.entity_state import CrossTable, EntityState, state_from_bytes
from roostream.online.event_rows import rows_from_bytes
from roostream.schema.check import ONLINE
from roostream.schema.counter_plan import plan_of
from roostream.schema.ids import hash64, signed
from roostream.schema.row_layout import MAX_TABLE_ROWS
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import encode_ro
from tests.wire.sample_builders import parse_schema

T0 = 1_700_000_000_000
HOUR = 3_600_000
LIVES = {"10m": 600_000, "1h": HOUR, "6h": 6 * HOUR, "24h": 24 * HOUR}


def test_decayed_sums_equal_their_definition_in_any_order_of_events() -> None:
    precompile()
    views, clicks = [0, 5 * HOUR, 2 * HOUR, 2 * HOUR], [HOUR, 30 * HOUR, 3 * HOUR]
    counters = Counters(Schema())
    for at in views:
        counters.apply_impression(0, [7], T0 + at)
    for at in clicks:
        counters.apply_engagement(0, 7, "click", 1.0, T0 + at)
    now = 31 * HOUR
    nro = counters.read(0, [7, 8], T0 + now)[1]
    for name, life in LIVES.items():
        v, c = (sum(2 ** (-(now - at) / life) for at in events) for events in (views, clicks))
        assert math.isclose(nro[f"views_{name}"][0], v, rel_tol=1e-6, abs_tol=1e-40)
        assert math.isclose(nro[f"clicks_{name}"][0], c, rel_tol=1e-6, abs_tol=1e-40)
        assert math.isclose(nro[f"ctr_{name}"][0], (c + 0.1) / (v + 1), rel_tol=1e-5)
        assert (nro[f"views_{name}"][1], nro[f"clicks_{name}"][1]) == (0, 0)
        assert nro[f"ctr_{name}"][1] == np.float32(0.1)
    assert nro["age_s"].tolist() == [now / 1000, 0.0]


def test_reading_before_the_newest_event_does_not_increase_the_sums() -> None:
    counters = Counters(Schema())
    counters.apply_impression(1, [7], T0)
    ro, nro = counters.read(1, [7], T0 - HOUR)
    assert nro["views_10m"].tolist() == [1.0] and nro["age_s"].tolist() == [0.0] and ro["gap_s"] == 0.0
    assert nro["user_view_age_s"].tolist() == [0.0]


def test_user_item_counters_follow_views_and_clicks() -> None:
    counters = Counters(Schema())
    counters.apply_impression(5, [8, 9, 8], T0)
    counters.apply_impression(5, [9], T0 + 1000)
    counters.apply_engagement(5, 9, "click", 1.0, T0 + 2000)
    counters.apply_engagement(5, 9, "like", 1.0, T0 + 2500)
    counters.apply_impression(6, [9], T0 + 2600)
    ro, nro = counters.read(5, [9, 8, 10], T0 + 3000)
    assert nro["user_views"].tolist() == [2, 1, 0] and nro["user_clicks"].tolist() == [1, 0, 0]
    np.testing.assert_array_equal(nro["user_view_age_s"], np.array([2, 3, np.nan], np.float32))
    np.testing.assert_array_equal(nro["user_click_age_s"], np.array([1, np.nan, np.nan], np.float32))
    assert (ro["gap_s"], ro["history_len"]) == (2.0, 1.0)
    assert nro["in_last_list"].tolist() == [1, 0, 0]
    assert counters.read(0, [9], T0)[1]["in_last_list"].tolist() == [0], (
        "without a user there is no last list"
    )
    assert ro["history"] == {"ids": [9], "action": [signed(hash64("click"))], "time": [T0 + 2000]}


def test_stateless_features_come_from_the_request_alone() -> None:
    ids = np.array([5, -1, 3])
    ro, nro = stateless_features(7, ids, 25 * HOUR + HOUR // 2, first_position=4)
    assert ro == {"num_candidates": 3.0, "hour_of_day": 1.5, "user_id": [7]}
    assert nro["position"].tolist() == [4, 5, 6] and nro["item_id"] is ids
    assert {*ro, *nro} == set(STATELESS_FEATURES)
    assert "user_id" not in stateless_features(0, ids, HOUR)[0], "an unknown user has no id"


def test_ids_features_named_item_and_user_default_to_the_ids_of_candidate_and_user() -> None:
    item, user = (Feature(name=name, kind="ids", table=name) for name in ("item", "user"))
    schema = Schema(
        ro=(item, user, Feature(name="hour", online="hour_of_day")),
        nro=(item, user, Feature(name="place", online="position")),
    )
    assert sources_of(schema, "ro") == {"user": "user_id", "hour": "hour_of_day"}
    assert sources_of(schema, "nro") == {"item": "item_id", "place": "position"}


def test_a_new_user_has_an_empty_history_and_no_gap() -> None:
    ro, _ = Counters(Schema()).read(5, [], T0)
    assert ro["history"] == {"ids": [], "action": [], "time": []}
    assert ro["history_len"] == 0.0
    assert "gap_s" not in ro


def test_every_online_name_of_the_schema_is_computed() -> None:
    counters = Counters(Schema())
    counters.apply_impression(1, [1], T0)
    (ro, nro), (own_ro, own_nro) = counters.read(1, [1], T0), stateless_features(1, np.array([1]), T0)
    assert {*ro, *own_ro} == set(ONLINE["ro"]) and {*nro, *own_nro} == set(ONLINE["nro"])
    assert not {*ro} & {*own_ro} and not {*nro} & {*own_nro}, "no name is computed in two places"
    assert all(column.dtype == np.float32 and column.shape == (1,) for column in nro.values())


def test_the_history_is_newest_first_bounded_and_ignores_retries() -> None:
    schema = parse_schema('[online]\nclick = "tap"\nhistory_len = 3\n[[label]]\nname = "c"\naction = "tap"')
    counters = Counters(schema)
    for item, at in ((1, 10), (2, 30), (3, 20), (3, 20), (4, 20), (5, 5)):
        counters.apply_engagement(9, item, "tap", 1.0, T0 + at)
    ro, nro = counters.read(9, [3], T0 + 40)
    assert ro["history"] == {
        "ids": [2, 4, 3],
        "action": [signed(hash64("tap"))] * 3,
        "time": [T0 + 30, T0 + 20, T0 + 20],
    }
    assert nro["user_clicks"].tolist() == [1.0]


def test_a_history_is_never_longer_than_a_list_of_a_request_may_be() -> None:
    """Otherwise serving would refuse every request of a user with many clicks."""
    text = '[tables.item]\ndim = 1\n[[ro]]\nname = "h"\nkind = "ids"\ntable = "item"\nonline = "history"\n'
    text += '[[label]]\nname = "c"\naction = "click"\n[online]\nhistory_len = 9\n[limits]\nmax_list = 3'
    schema = parse_schema(text)
    counters = Counters(schema)
    for item in range(1, 8):
        counters.apply_engagement(9, item, "click", 1.0, T0 + item)
    ro, _ = counters.read(9, [], T0 + 10)
    assert ro["history"] == [7, 6, 5] and ro["history_len"] == 7.0
    assert encode_ro(schema, {"h": ro["history"]})


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        ('kind = "ids"', [4]),
        ('kind = "sequence"', {"item": [4]}),
        ('kind = "sequence"\ncolumns = { time = "time_ms" }', {"item": [4], "time": [T0]}),
    ],
)
def test_a_history_has_the_form_of_its_feature(feature: str, value: object) -> None:
    text = f'[tables.item]\ndim = 1\n[[ro]]\nname = "h"\ntable = "item"\nonline = "history"\n{feature}\n'
    schema = parse_schema(text + '[[label]]\nname = "c"\naction = "click"')
    counters = Counters(schema)
    counters.apply_engagement(9, 4, "click", 1.0, T0)
    assert counters.read(9, [], T0)[0]["history"] == value
    assert encode_ro(schema, {"h": value})


def test_the_table_of_a_user_keeps_the_rows_with_the_newest_events() -> None:
    counters = Counters(Schema())
    counters.apply_impression(7, np.arange(1000, 1010), T0 + 50)
    counters.apply_engagement(7, 3, "click", 1.0, T0 + 60)
    counters.apply_impression(7, np.arange(0, MAX_TABLE_ROWS), T0)
    views_n = counters.read(7, np.arange(0, 1010), T0 + 70)[1]["user_views"]
    kept = set(np.flatnonzero(views_n).tolist())
    assert len(kept) == MAX_TABLE_ROWS
    assert {3, *range(1000, 1010)} <= kept
    assert MAX_TABLE_ROWS - 1 not in kept and 0 in kept


def entity_keys(entity: str, *keys: int) -> Keys:
    return {entity: np.array([signed(key) for key in keys], dtype=np.int64)}


EVENT = st.tuples(
    st.sampled_from(["view", "click"]),
    st.integers(0, 3),
    st.lists(st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(0, 5), min_size=1, max_size=6),
    st.integers(0, 100 * HOUR),
)


def replay(counters: Counters, events: list[Any]) -> None:
    for kind, user, items, at in events:
        if kind == "view":
            counters.apply_impression(user, items, T0 + at)
        else:
            counters.apply_engagement(user, items[0], "click", 1.0, T0 + at)


@settings(max_examples=60)
@given(events=st.lists(EVENT, max_size=25), cut=st.integers(0, 25))
def test_storing_and_loading_states_changes_no_bit(events: list[Any], cut: int) -> None:
    items = sorted({signed(i) for e in events for i in e[2]})
    uninterrupted, first, second = Counters(Schema()), Counters(Schema()), Counters(Schema())
    replay(uninterrupted, events)
    replay(first, events[:cut])
    everything = entity_keys("item", *items) | entity_keys("user", 1, 2, 3)
    second.load(everything, first.dump(everything))
    replay(second, events[cut:])
    assert second.dump(everything) == uninterrupted.dump(everything)
    for user in range(4):
        (ro, nro), (ro2, nro2) = (c.read(user, items, T0 + 101 * HOUR) for c in (uninterrupted, second))
        assert ro == ro2
        assert {k: v.tobytes() for k, v in nro.items()} == {k: v.tobytes() for k, v in nro2.items()}


def test_more_items_than_the_initial_capacity_are_kept() -> None:
    counters = Counters(Schema())
    counters.apply_impression(1, list(range(500)), T0)
    counters.load(entity_keys("item", *(10_000 + i for i in range(1000))), [None] * 1000)
    assert counters.read(1, [0, 499, 10_999], T0)[1]["views_1h"].tolist() == [1, 1, 0]


ITEM_LAYOUT, USER_LAYOUT = plan_of(Schema()).row_layouts["item"], plan_of(Schema()).state_layouts["user"]
STATE = EntityState(USER_LAYOUT).to_bytes()


@pytest.mark.parametrize(
    "data", [b"", b"\x03" + bytes(112), b"\x02" + bytes(80), bytes(81), b"\x01" + bytes(79), bytes(113)]
)
def test_item_bytes_of_another_format_are_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="expected a counter's state of version 3"):
        rows_from_bytes(ITEM_LAYOUT, [data])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01" + bytes(20) + b"x",
        b"\x01",
        b"\x02" + bytes(3),
        b"\x03" + STATE[1:],
        STATE + b"x",
        STATE[:-1],
        STATE[:9],
    ],
)
def test_user_bytes_of_another_format_are_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="expected an entity's state of version 2"):
        state_from_bytes(USER_LAYOUT, data)


@pytest.mark.parametrize("data", [b"", CrossTable(ITEM_LAYOUT).to_bytes() + b"x"])
def test_table_bytes_of_another_format_are_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="expected an entity's state of version 2"):
        CrossTable(ITEM_LAYOUT).read_bytes(data)


def test_a_user_without_a_stored_state_is_forgotten() -> None:
    counters = Counters(Schema())
    counters.apply_impression(1, [5], T0)
    counters.load(entity_keys("user", 1), [None])
    assert counters.dump(entity_keys("user", 1)) == [None]

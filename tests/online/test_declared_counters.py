"""Counters that a schema declares: their values, stored state, limits, and errors in declarations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import CheckpointError, SchemaError
from roostream.online.counters import LISTS, Counters, StateReader, merge_keys, shared_keys
from roostream.online.entity_fields import FieldReader, key_of, keys_of, shown_from_bytes, time_fields
from roostream.schema.counter_plan import plan_of
from roostream.schema.registry import to_toml
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema, schema_from_dict
from tests.online.counter_oracle import (
    COUNTERS,
    HOUR,
    T0,
    Oracle,
    ShownList,
    apply_events,
    assert_counters_equal_oracle,
    random_events,
    request_lists,
    schema_with_counters,
)

SCHEMA = schema_with_counters(COUNTERS)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 30), number=st.integers(1, 40), later=st.sampled_from([0, 1, 90_000, 3 * HOUR])
)
def test_declared_counters_equal_their_definitions(seed: int, number: int, later: int) -> None:
    events = random_events(seed, number)
    now_ms = events[-1].time_ms + later
    counters, oracle = Counters(SCHEMA), Oracle(events)
    apply_events(counters, FieldReader(SCHEMA), events)
    for request in request_lists(seed, now_ms):
        assert_counters_equal_oracle(SCHEMA, oracle, counters, request, now_ms)


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30), cut=st.integers(0, 30))
def test_storing_states_between_events_changes_no_bit(seed: int, cut: int) -> None:
    events, reader = random_events(seed, 30), FieldReader(SCHEMA)
    uninterrupted, store = Counters(SCHEMA), dict[tuple[str, int], bytes | None]()
    states = StateReader(SCHEMA)
    apply_events(uninterrupted, reader, events)
    for event in events:
        fresh = Counters(SCHEMA)
        keys = touched_keys(fresh, reader, event, store)
        load(fresh, keys, store)
        apply_events(fresh, reader, [event])
        store |= dict(zip(names(keys), fresh.dump(keys), strict=True))
    now_ms = events[-1].time_ms + cut * 60_000
    for request in request_lists(seed, now_ms):
        fields = reader.from_values(request.header, request.ro, request.nro, len(request.items))
        keys = states.keys(request.user, request.items, now_ms, fields)
        ro, nro = uninterrupted.read(request.user, request.items, now_ms, fields)
        ro2, nro2 = states.read(keys, [[store.get(name) for name in names(keys.stored)]])
        assert ro == ro2
        assert {k: v.tobytes() for k, v in nro.items()} == {k: v.tobytes() for k, v in nro2.items()}


@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 30), number=st.integers(1, 60), later=st.sampled_from([0, 1, 3 * HOUR]))
def test_states_of_several_updaters_are_merged_to_those_of_one(seed: int, number: int, later: int) -> None:
    """Each updater counts the events of some users. Sums may be rounded differently; all other values are
    equal."""
    events, reader = random_events(seed, number), FieldReader(SCHEMA)
    # A user's events have one Kafka key, and events of equal time have no order across partitions.
    events = [event for event in events if user_of(event)]
    events = list({event.time_ms: event for event in events}.values())
    single_updater, parts = Counters(SCHEMA), [Counters(SCHEMA) for _ in range(3)]
    states = StateReader(SCHEMA)
    apply_events(single_updater, reader, events)
    for n, part in enumerate(parts):
        apply_events(part, reader, [event for event in events if user_of(event) % len(parts) == n])
    now_ms = T0 + 48 * HOUR + later
    for request in request_lists(seed, now_ms):
        fields = reader.from_values(request.header, request.ro, request.nro, len(request.items))
        keys = states.keys(request.user, request.items, now_ms, fields)
        own = parts[request.user % len(parts)]
        others = [part.dump(shared_keys(keys.stored)) for part in parts if part is not own]
        ro, nro = single_updater.read(request.user, request.items, now_ms, fields)
        ro2, nro2 = states.read(keys, [own.dump(keys.stored), *others])
        assert ro2 == {n: pytest.approx(v) if isinstance(v, float) else v for n, v in ro.items()}
        for name, value_n in nro.items():
            np.testing.assert_allclose(nro2[name], value_n, rtol=1e-6, err_msg=name)


def user_of(event: Any) -> int:
    return int((event if isinstance(event, ShownList) else event.shown_list).user)


def names(keys: dict[str, np.ndarray]) -> list[tuple[str, int]]:
    return [(name, key) for name, entity_keys in keys.items() for key in entity_keys.tolist()]


def load(counters: Counters, keys: dict[str, np.ndarray], store: dict[tuple[str, int], bytes | None]) -> None:
    counters.load(keys, [store.get(name) for name in names(keys)])


def touched_keys(
    counters: Counters, reader: FieldReader, event: Any, store: dict[tuple[str, int], bytes | None]
) -> dict[str, np.ndarray]:
    if isinstance(event, ShownList):
        fields = reader.from_values(event.header, event.ro, event.nro, len(event.items))
        return merge_keys([counters.impression_keys(event.user, event.items, event.time_ms, fields)])
    fields = reader.from_header(event.shown_list.header)
    load(counters, counters.list_keys(fields), store)
    return counters.engagement_keys(
        event.shown_list.user, event.item, event.action, event.time_ms, fields
    ) | counters.list_keys(fields)


def test_a_window_expires_by_steps_and_counts_late_events_in_their_step() -> None:
    schema = schema_with_counters([{"name": "lately", "entity": "item", "event": "shown", "window": "12m"}])
    counters, minute = Counters(schema), 60_000
    begin = T0 // (12 * minute) * 12 * minute
    for minute_offset in (5, 0, 11, 11, 3):
        counters.apply_impression(0, [1], begin + minute_offset * minute)
    for minutes, expected in (
        (11, 5),
        (12, 4),
        (14, 4),
        (15, 3),
        (17, 2),
        (22, 2),
        (23, 0),
        (1000, 0),
        (4, 5),
    ):
        assert counters.read(0, [1], begin + minutes * minute)[1]["lately"].tolist() == [expected], minutes
    counters.apply_impression(0, [1], begin + 40 * minute)
    counters.apply_impression(0, [1], begin + 28 * minute)
    counters.apply_impression(0, [1], begin + 29 * minute)
    assert counters.read(0, [1], begin + 40 * minute)[1]["lately"].tolist() == [2], (
        "an event older than the window is not counted"
    )


def test_a_later_page_counts_by_the_fields_of_its_request() -> None:
    schema = schema_with_counters(
        [
            {"name": "here", "entity": ["page", "item"], "event": "click"},
            {"name": "seen", "entity": ["page", "item"], "event": "shown"},
        ]
    )
    counters, reader = Counters(schema), FieldReader(schema)
    header = (5, 1, "", "r1")
    counters.apply_impression(5, [1], T0, reader.from_values(header, {"page": ["home"]}, {}, 1))
    counters.apply_impression(5, [2], T0 + 1, reader.from_values(header, None, {}, 1))
    counters.apply_engagement(5, 2, "click", 1.0, T0 + 2, reader.from_header(header))
    counters.apply_engagement(5, 2, "click", 1.0, T0 + 3, reader.from_header((5, 1, "", "another")))
    counters.apply_engagement(5, 3, "click", 1.0, T0 + 3, reader.from_header(header))
    fields = reader.from_values(header, {"page": ["home"]}, {}, 3)
    nro = counters.read(5, [1, 2, 3], T0 + 4, fields)[1]
    assert nro["seen"].tolist() == [1, 1, 0]
    assert nro["here"].tolist() == [0, 1, 1], (
        "the page is known from the list, even for an item that was not shown"
    )
    assert np.isnan(counters.read(5, [1], T0 + 4, reader.from_values(header, {}, {}, 1))[1]["here"]).all(), (
        "without a page the counter is missing"
    )


def test_engagements_of_a_forgotten_list_count_for_user_and_item_only() -> None:
    schema = schema_with_counters([{"name": "here", "entity": ["page", "item"], "event": "click"}])
    counters, reader = Counters(schema), FieldReader(schema)
    header = (5, 1, "", "r1")
    counters.apply_impression(5, [1], T0, reader.from_values(header, {"page": ["home"]}, {}, 1))
    counters.apply_engagement(5, 1, "click", 1.0, T0 + 24 * HOUR + 1, reader.from_header(header))
    nro = counters.read(5, [1], T0 + 25 * HOUR, reader.from_values(header, {"page": ["home"]}, {}, 1))[1]
    assert nro["here"].tolist() == [0] and nro["user_clicks"].tolist() == [1]


def test_a_request_id_that_is_used_for_many_lists_keeps_a_bounded_state() -> None:
    """After a day it names another list; within a day, the list has as many items as a request may have."""
    counters, reader, header = Counters(SCHEMA), FieldReader(SCHEMA), (0, 0, "", "always the same")
    for day, page in enumerate(("home", 7)):
        for n in range(15):
            fields = reader.from_values(header, {"page": [page]}, {"category": [[11]] * 100}, 100)
            items_n, time_ms = np.arange(100) + 100 * n, T0 + 25 * HOUR * day + n
            counters.apply_impression(0, items_n, time_ms, fields)
        (state,) = counters.dump(counters.list_keys(fields))
        shown = shown_from_bytes(SCHEMA.derived(plan_of), SCHEMA, state or b"")
        assert shown is not None and len(shown.item_n) == SCHEMA.limits.max_candidates == 1000
        assert shown.fields_at(999, time_ms) == ({"page": fields.request["page"]}, {"category": 11})


def test_a_retried_engagement_counts_once_for_every_counter() -> None:
    counters, reader = Counters(SCHEMA), FieldReader(SCHEMA)
    for _ in range(2):
        counters.apply_engagement(5, 6, "order", 3.0, T0, reader.from_header((5, 1, "", "r")))
    nro = counters.read(5, [6], T0, reader.from_values((5, 1, "", "r"), {}, {}, 1))[1]
    assert nro["order_rate_1h"].tolist() == [np.float32(1.1)] and nro["last_order"].tolist() == [3.0]


def test_a_rate_with_a_prior_counts_ten_views_in_advance() -> None:
    rate = {"name": "often", "entity": ["item"], "event": "click", "aggregation": "rate"}
    counters = Counters(schema_with_counters([{**rate, "prior": 0.2}]))
    counters.apply_impression(5, [1, 2], T0)
    counters.apply_engagement(5, 1, "click", 1.0, T0 + 1)
    often_n = counters.read(5, [1, 2, 3], T0 + 2)[1]["often"]
    np.testing.assert_allclose(often_n, [3 / 11, 2 / 11, 0.2], rtol=1e-6)


def test_blocks_and_values_have_the_same_fields() -> None:
    from roostream.wire.block import encode_nro, encode_ro

    reader, header = FieldReader(SCHEMA), (5, 2, "app", "r1")
    ro, nro = {"page": ["home", 9]}, {"category": [["shoes"], None, [4]], "item": [[1], [2], [3]]}
    value_fields = reader.from_values(header, ro, nro, 3)
    block_fields = reader.from_blocks(
        header, encode_ro(SCHEMA, ro), encode_nro(SCHEMA, nro, 3), 3, SCHEMA.fingerprint
    )
    assert block_fields.request == value_fields.request and block_fields.list_id == value_fields.list_id != 0
    assert block_fields.candidate["category"].tolist() == value_fields.candidate["category"].tolist()
    assert value_fields.candidate["category"].tolist()[1:] == [0, 4]
    for ro_bytes, nro_bytes, fingerprint in ((b"\x09", b"\x09", SCHEMA.fingerprint), (b"", b"", 1)):
        unknown = reader.from_blocks(header, ro_bytes, nro_bytes, 3, fingerprint)
        assert unknown.request["page"] == 0 and unknown.candidate["category"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", ["", 2**70, 1.5, None, [], [None]])
def test_a_value_that_is_not_an_id_is_unknown(value: object) -> None:
    assert (
        FieldReader(SCHEMA)
        .from_values((1, 1, "", "r"), {"page": value}, {"category": value}, 1)
        .request["page"]
        == 0
    )


def test_keys_of_arrays_equal_keys_of_single_crosses() -> None:
    several = keys_of([7, np.array([-3, 5]), 1], 2).tolist()
    assert several == [key_of([7, -3, 1]), key_of([7, 5, 1])] and key_of([9]) == 9
    assert len({key_of([1, 2]), key_of([2, 1]), key_of([0, 3])}) == 3


def test_time_fields_are_hour_and_day_in_utc() -> None:
    assert time_fields(1_700_000_000_000) == {"hour": 23, "weekday": 2}  # a Tuesday, 22:13


def test_an_added_counter_starts_at_zero_and_keeps_the_others() -> None:
    before = [
        {"name": "a", "entity": "user", "event": "shown"},
        {"name": "c", "entity": ["user", "item"], "event": "order"},
    ]
    after = [before[1], {"name": "b", "entity": "user", "event": "order", "aggregation": "history"}]
    after.append({"name": "d", "entity": "item", "event": "order", "window": "1h"})
    old, new = Counters(schema_with_counters(before)), Counters(schema_with_counters(after))
    keys = {"item": np.array([6]), "user": np.array([5])}
    old.apply_impression(5, [6], T0)
    old.apply_engagement(5, 6, "order", 1.0, T0 + 1)
    new.load(keys, old.dump(keys))
    ro, nro = new.read(5, [6], T0 + 1)
    assert nro["c"].tolist() == [1] and nro["views_1h"][0] > 0.99 and nro["d"].tolist() == [0]
    assert ro["b"] == [6], "the history of every counted action is stored, because it identifies retries"


@pytest.mark.parametrize("data", [b"", b"\x02" + bytes(20), b"\x01" + bytes(3)])
def test_list_field_bytes_of_another_format_are_rejected(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="expected a list's fields"):
        shown_from_bytes(SCHEMA.derived(plan_of), SCHEMA, data)


def test_list_fields_written_for_other_counters_are_ignored() -> None:
    counters, reader = Counters(SCHEMA), FieldReader(SCHEMA)
    fields = reader.from_values((5, 1, "", "r"), {"page": [3]}, {"category": [[4]]}, 1)
    counters.apply_impression(5, [1], T0, fields)
    keys = counters.list_keys(fields)
    other = Counters(schema_with_counters([{"name": "x", "entity": ["page", "item"], "event": "click"}]))
    other.load(keys, counters.dump(keys))
    assert other.dump(keys) == [None] and list(keys) == [LISTS]


def test_no_state_is_larger_than_its_layout_allows() -> None:
    counters, reader = Counters(SCHEMA), FieldReader(SCHEMA)
    rng = np.random.default_rng(0)
    for n in range(300):
        items = rng.integers(1, 1 << 60, 8).tolist()
        fields = reader.from_values(
            (5, 1, "app", f"r{n}"), {"page": [n]}, {"category": [[int(i)] for i in items]}, 8
        )
        counters.apply_impression(5, items, T0 + n, fields)
        counters.apply_engagement(
            5, items[0], "click", 1.0, T0 + n, reader.from_header((5, 1, "app", f"r{n}"))
        )
        counters.apply_engagement(
            5, items[0], "order", 1.0, T0 + n, reader.from_header((5, 1, "app", f"r{n}"))
        )
    for name in ("user", "session"):
        key = 5 if name == "user" else 1
        (state,) = counters.dump({name: np.array([key])})
        max_bytes = counters.plan.state_layouts[name].max_bytes
        assert state is not None and 0.4 * max_bytes < len(state) <= max_bytes


def test_a_declaration_survives_writing_and_changes_no_fingerprint(tmp_path: Any) -> None:
    (tmp_path / "s.toml").write_text(to_toml(SCHEMA), encoding="utf-8")
    assert load_schema(tmp_path / "s.toml") == SCHEMA
    faster = schema_with_counters([{**COUNTERS[0], "half_life": "10m"}, *COUNTERS[1:]])
    assert faster.fingerprint == SCHEMA.fingerprint


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"entity": "itm"}, "counter 'x': unknown field 'itm'; did you mean 'item'"),
    ({"entity": "price"}, "counter 'x': expected a feature of kind 'ids', got 'price' of 'float'"),
    ({"entity": []}, "expected one field or several different ones, got"),
    ({"entity": "past"}, "expected a feature that clients send, got 'past'"),
    ({"entity": "hour"}, "'hour' is a field of the request"),
    ({"name": "ctr_1h"}, "counter 'ctr_1h': that name is taken"),
    ({"half_life": "1h", "window": "1h"}, "expected a half_life or a window, got both"),
    ({"window": "2s"}, "expected at least 12 s, got 2000 ms"),
    ({"aggregation": "since", "window": "1h"}, "aggregation 'since'"),
    ({"aggregation": "mean"}, "expected one of .*count, rate"),
    (
        {"aggregation": "expected", "event": "click"},
        "expected 'shown' for aggregation 'expected', got 'click'",
    ),
    (
        {"aggregation": "expected", "event": "shown", "entity": "user"},
        "expected a field of the candidate for 'expected'",
    ),
    ({"aggregation": "rate", "event": "shown"}, "expected an action for aggregation 'rate', got 'shown'"),
    ({"aggregation": "history"}, "expected fields of the request for aggregation 'history', got 'item'"),
    ({"aggregation": "distinct", "entity": "user", "length": 513}, "expected at most 512"),
    ({"aggregation": "in_last_list", "event": "shown"}, "expected 'user' and a field of the candidate"),
    ({"of": "user"}, "expected none for aggregation 'count', got 'user'"),
    ({"length": 3}, "expected none for aggregation 'count', got 3"),
    ({"prior": 0.1}, "expected none for aggregation 'count', got 0.1"),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[str(wrong) for wrong, _ in MISTAKES])
def test_an_error_in_a_declaration_names_the_counter(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        with_counter({"name": "x", "entity": "item", "event": "click", **wrong})


def with_counter(*counters: dict[str, Any]) -> Schema:
    ids = {"kind": "ids", "table": "item"}
    ro = [{"name": "past", **ids, "online": "history"}, {"name": "hour", **ids}]
    raw = {"tables": {"item": {"dim": 1}}, "ro": ro, "nro": [{"name": "price"}], "counter": list(counters)}
    return schema_from_dict({**raw, "label": [{"name": "c", "action": "c"}]})


def test_too_much_state_of_an_entity_is_rejected() -> None:
    history = {"entity": "user", "aggregation": "history", "length": 10_000}
    with pytest.raises(SchemaError, match="state of 'user' of at most 262144"):
        with_counter(*({"name": f"h{n}", "event": f"e{n}", **history} for n in range(2)))


def test_too_many_counters_are_rejected() -> None:
    with pytest.raises(SchemaError, match="expected at most 256 counters, got 257"):
        with_counter(*({"name": f"n{n}", "entity": "item", "event": f"e{n}"} for n in range(257)))


@pytest.mark.parametrize(
    ("side", "feature", "message"),
    [
        ("ro", {"online": "x"}, "online feature 'x' is for \\[\\[nro\\]\\], got it in \\[\\[ro\\]\\]"),
        ("nro", {"online": "h"}, "online feature 'h' is for \\[\\[ro\\]\\]"),
        ("nro", {"online": "y"}, "unknown online feature 'y'"),
        ("ro", {"online": "h"}, "expected kind ids or sequence for online 'h', got 'float'"),
    ],
)
def test_a_feature_needs_a_counter_of_its_side_and_kind(
    side: str, feature: dict[str, Any], message: str
) -> None:
    counters = [{"name": "x", "entity": "item"}, {"name": "h", "entity": "user", "aggregation": "history"}]
    with pytest.raises(SchemaError, match=message):
        schema_from_dict({side: [feature], "counter": counters, "label": [{"name": "c", "action": "c"}]})

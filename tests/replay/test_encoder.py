"""`ReplayEncoder` turns events of a log into Kafka records and computes online features from earlier
events."""

from __future__ import annotations

import dataclasses
import json
import weakref

import numpy as np
import pytest

from roostream.errors import WireError
from roostream.replay.datasets import Clicks
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Request
from roostream.replay.log_profile import LogProfile
from roostream.runtime.kafka.topics import ENGAGEMENTS, IMPRESSIONS
from roostream.schema.limits import MAX_MESSAGE_BYTES
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block
from roostream.wire.records import Record
from serving.feature_completion import FeatureCompletion
from serving.rank_json import JsonParser

T0 = 1_700_000_000_000
SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "ro": [
            {"name": "basket"},
            {"name": "gap", "online": "gap_s"},
            {
                "name": "past",
                "kind": "sequence",
                "table": "item",
                "columns": {"time": "time_ms"},
                "online": "history",
            },
        ],
        "nro": [
            {"name": "item", "kind": "ids", "table": "item"},
            {"name": "price"},
            {"name": "views", "online": "views_24h"},
            {"name": "clicks", "online": "clicks_24h"},
        ],
        "label": [{"name": "click", "action": "click"}],
    }
)


def request(number: int, seconds: float, items: tuple[int, ...] = (1, 2), **fields: object) -> Request:
    return Request(f"r{number}", 5, 0, T0 + round(seconds * 1000), np.array(items, dtype=np.int64), **fields)  # type: ignore[arg-type]


def click(number: int, seconds: float, item: int = 1) -> Action:
    return Action(f"r{number}", 5, 0, T0 + round(seconds * 1000), 77 + number, item, "click", 1.0)


def impression(record: Record) -> pb.Impression:
    message = wire.decode(record.value)[1]
    assert isinstance(message, pb.Impression)
    return message


def features(record: Record) -> tuple[dict, dict]:
    message = impression(record)
    return decode_block(SCHEMA, "ro", message.ro, 1), decode_block(
        SCHEMA, "nro", message.nro, len(message.item_ids)
    )


def test_features_include_events_before_the_request_but_not_the_request() -> None:
    encoder = ReplayEncoder(SCHEMA)
    ro, nro = features(encoder.record(request(1, 0)))
    assert ro == {"past": {"item": [], "time": []}} and nro["views"].tolist() == [0, 0]
    encoder.record(click(1, 1))
    ro, nro = features(encoder.record(request(2, 1, (1, 3))))
    assert ro["gap"] == 1.0 and ro["past"] == {"item": [1], "time": [T0 + 1000]}
    assert nro["views"] == pytest.approx([1, 0], rel=1e-3)
    assert nro["clicks"] == pytest.approx([1, 0], rel=1e-3)


def test_requests_of_the_same_moment_see_each_other_in_order() -> None:
    encoder = ReplayEncoder(SCHEMA)
    encoder.record(request(1, 0))
    assert features(encoder.record(request(2, 0)))[1]["views"].tolist() == [1, 1]


def test_a_label_delay_hides_newer_engagements_but_no_requests() -> None:
    encoder = ReplayEncoder(SCHEMA, label_delay_ms=60_000)
    encoder.record(request(1, 0))
    encoder.record(click(1, 1))
    _, nro = features(encoder.record(request(2, 60.999)))
    assert nro["views"] == pytest.approx([1, 1], rel=1e-2) and nro["clicks"].tolist() == [0, 0]
    assert features(encoder.record(request(3, 61)))[1]["clicks"] == pytest.approx([1, 0], rel=1e-2)


@pytest.mark.parametrize(("seconds", "is_kept"), [(5, True), (15, False)])
def test_events_after_the_freeze_are_not_kept(seconds: float, is_kept: bool) -> None:
    encoder, shown = ReplayEncoder(SCHEMA, freeze_at_ms=T0 + 10_000), request(1, seconds)
    items = weakref.ref(shown.items_n)
    encoder.record(shown)
    del shown
    assert (items() is not None) == is_kept


def test_frozen_counters_do_not_change_after_the_freeze() -> None:
    encoder = ReplayEncoder(SCHEMA, freeze_at_ms=T0 + 10_000)
    for event in (request(1, 0), click(1, 9.999), request(2, 10), click(2, 11)):
        encoder.record(event)
    _, nro = features(encoder.record(request(3, 20)))
    assert nro["clicks"] == pytest.approx([1, 0], rel=1e-3)
    assert nro["views"] == pytest.approx([1, 1], rel=1e-3)


def test_values_of_the_log_replace_counted_ones() -> None:
    logged = request(1, 0, ro={"basket": 2.0, "gap": 9.0}, nro={"views": [7.0, 8.0], "price": [1.5, None]})
    ro, nro = features(ReplayEncoder(SCHEMA).record(logged))
    assert ro["basket"] == 2.0 and ro["gap"] == 9.0
    assert nro["views"].tolist() == [7, 8] and nro["price"][0] == 1.5 and np.isnan(nro["price"][1])
    assert nro["item"] == [[1], [2]]


@pytest.mark.parametrize("views", [[7.0, None], [7.0, np.nan], np.array([7.0, np.nan])])
def test_candidates_without_a_value_get_the_counted_one_as_in_serving(views: object) -> None:
    encoder, completion = ReplayEncoder(SCHEMA), FeatureCompletion(SCHEMA)
    encoder.record(request(1, 0, (2, 3)))
    _, nro = features(
        encoder.record(request(2, 0, (1, 2), nro={"views": views, "item": [[9], None], "clicks": [None] * 2}))
    )
    assert nro["views"].tolist() == [7, 1] and nro["item"] == [[9], [2]] and nro["clicks"].tolist() == [0, 0]
    body = {"candidates": [{"item_id": 1, "views": 7.0, "item": [9]}, {"item_id": 2, "clicks": None}]}
    ranked = JsonParser(SCHEMA).parse(json.dumps({**body, "request_id": "r2", "user_id": 5}).encode())
    served = completion.encode(ranked, T0, *encoder.counters.read(5, ranked.item_ids, T0))
    assert decode_block(SCHEMA, "nro", served.nro, 2)["views"].tolist() == nro["views"].tolist()
    assert decode_block(SCHEMA, "nro", served.nro, 2)["item"] == nro["item"]


def test_a_page_that_only_adds_candidates_has_no_request_features() -> None:
    assert not impression(ReplayEncoder(SCHEMA).record(request(1, 0, ro=None))).HasField("ro")


def test_records_carry_topic_key_and_event_time() -> None:
    encoder = ReplayEncoder(SCHEMA)
    shown, clicked = encoder.record(request(1, 0)), encoder.record(click(1, 2))
    assert (shown.topic, clicked.topic) == (IMPRESSIONS, ENGAGEMENTS)
    assert shown.key == clicked.key == (5).to_bytes(8, "little") and shown.partition == clicked.partition
    assert (shown.timestamp_ms, clicked.timestamp_ms) == (T0, T0 + 2000)
    message = wire.decode(clicked.value)[1]
    assert isinstance(message, pb.Engagement)
    assert (message.header.request_id, message.event_id, message.item_id) == ("r1", 78, 1)
    assert message.header.schema == SCHEMA.fingerprint


@pytest.mark.parametrize("event", [request(1, 0), click(1, 0)])
def test_an_event_that_no_kafka_message_holds_is_refused_and_changes_nothing(event: Request | Action) -> None:
    """With --skip-bad it is then skipped, by both engines."""
    profile = LogProfile(SCHEMA)
    encoder = ReplayEncoder(SCHEMA, profile=profile)
    with pytest.raises(WireError, match="4190208 bytes"):
        encoder.record(dataclasses.replace(event, surface="s" * MAX_MESSAGE_BYTES))
    _, nro = features(encoder.record(request(2, 1)))
    assert nro["views"][0] == 0 == nro["clicks"][0] and profile.num_impressions == 1


def make_clicks(*clicks: tuple[int, int, float]) -> Clicks:
    """Build clicks from tuples of (user, item, seconds after T0)."""
    rows_N3 = np.array([(user, item, T0 + round(at_s * 1000)) for user, item, at_s in clicks], dtype=np.int64)
    return Clicks(*rows_N3.T)


def test_an_unlogged_click_counts_from_its_own_time_on() -> None:
    encoder = ReplayEncoder(SCHEMA)
    encoder.add_unlogged_clicks(make_clicks((5, 8, 1), (6, 1, 2), (5, 9, 3)))
    assert [
        features(encoder.record(request(n, at)))[0]["past"]["item"] for n, at in enumerate((0.9, 1, 2.9, 3))
    ] == [[], [8], [8], [9, 8]]
    _, nro = features(encoder.record(request(4, 4)))
    assert nro["clicks"][0] == pytest.approx(1, abs=1e-3)
    assert nro["clicks"][1] == 0, "clicks of other users count for the item, but item 2 has none"


def test_unlogged_clicks_are_delayed_and_precede_logged_clicks_of_the_same_time() -> None:
    encoder = ReplayEncoder(SCHEMA, label_delay_ms=5000)
    encoder.add_unlogged_clicks(make_clicks((5, 8, 1), (5, 9, 100)))
    encoder.record(request(1, 0))
    encoder.record(click(1, 1, item=2))
    assert features(encoder.record(request(2, 5.9)))[0]["past"]["item"] == []
    assert features(encoder.record(request(3, 6)))[0]["past"]["item"] == [2, 8]
    frozen = ReplayEncoder(SCHEMA, freeze_at_ms=T0 + 2000)
    frozen.add_unlogged_clicks(make_clicks((5, 8, 1.9), (5, 9, 2)))
    assert features(frozen.record(request(1, 50)))[0]["past"]["item"] == [8]

"""Counters that a schema declares: the same events give the same values in a replay, in Redis and in a
request."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from roostream.online.counters import LISTS
from roostream.online.entity_fields import FieldReader
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Event, Request
from roostream.runtime import redis_client
from roostream.runtime.kafka.topics import IMPRESSIONS
from roostream.schema.ids import signed
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block
from roostream.wire.records import Record
from serving.online_features.store import FeatureStore
from serving.online_features.updater import FeatureMetrics, FeatureUpdater
from tests.online.counter_oracle import COUNTERS, Engagement, ShownList, random_events, schema_with_counters
from tests.serving.online_features.feature_cases import MemoryEvents, RedisServer, patient_hydrator

SCHEMA = schema_with_counters(COUNTERS)


def event_of(number: int, event: ShownList | Engagement) -> Event:
    if isinstance(event, Engagement):
        request = event.shown_list
        item = signed(event.item)
        return Action(
            request.request,
            request.user,
            request.session,
            event.time_ms,
            number,
            item,
            event.action,
            event.value,
            surface=request.surface,
        )
    items_n = np.array([signed(i) for i in event.items])
    return Request(
        event.request,
        event.user,
        event.session,
        event.time_ms,
        items_n,
        ro=event.ro,
        nro=event.nro,
        surface=event.surface,
    )


def early_clicks(events: list[ShownList | Engagement]) -> list[ShownList | Engagement]:
    """Add a click before each list, as of a serving process whose clock is behind."""
    lists = [event for event in events if isinstance(event, ShownList) and event.items]
    clicks = [Engagement(shown, shown.items[0], "click", 1.0, shown.time_ms - 1) for shown in lists]
    return sorted([*events, *clicks], key=lambda event: event.time_ms)


def make_updater(redis: RedisServer, records: list[Record], batch: int) -> FeatureUpdater:
    store = FeatureStore(redis_client.client(redis.url, timeout_s=2.0), redis.url, "x.")
    updater = FeatureUpdater(SCHEMA, store, MemoryEvents(records), "c", FeatureMetrics(CollectorRegistry()))
    updater.batch_records = batch
    updater.open()
    return updater


def to_records(events: list[ShownList | Engagement]) -> list[Record]:
    """Return these events as the records that a replay writes."""
    return encode_events([event_of(1 + number, event) for number, event in enumerate(events)])


def encode_events(events: list[Event]) -> list[Record]:
    encoder, ends, records = ReplayEncoder(SCHEMA), dict[tuple[str, int], int](), []
    for event in events:
        record = encoder.record(event)
        partition = (record.topic, record.partition)
        records.append(record._replace(offset=ends.get(partition, 0)))
        ends[partition] = ends.get(partition, 0) + 1
    return records


def test_replay_and_serving_hydrate_equal_declared_features(redis: RedisServer) -> None:
    events = random_events(3, 60)
    records = to_records(events)
    hydrator, reader = patient_hydrator(redis, SCHEMA), FieldReader(SCHEMA)
    updater = make_updater(redis, records, 1)
    for event, record in zip(events, records, strict=True):
        if isinstance(event, ShownList):
            items_n = np.array([signed(i) for i in event.items])
            fields = reader.from_values(event.header, event.ro, event.nro, len(items_n))
            ro, nro = hydrator.read(event.user, items_n, event.time_ms, fields)
            assert_logged_equals_read(record, ro, nro, len(items_n))
        updater.step(0)


@pytest.mark.parametrize("batch", [1, 4, 512])
def test_redis_and_replay_give_equal_values_for_any_batching(redis: RedisServer, batch: int) -> None:
    events, encoder, reader = early_clicks(random_events(5, 60)), ReplayEncoder(SCHEMA), FieldReader(SCHEMA)
    updater = make_updater(redis, to_records(events), batch)
    while updater.step(0):
        pass
    for number, event in enumerate(events):
        encoder.record(event_of(1 + number, event))
    now_ms = events[-1].time_ms + 5000
    encoder.record(Request("last", 0, 0, now_ms, np.array([5])))  # counts all events before it
    hydrator = patient_hydrator(redis, SCHEMA)
    for request_event in [e for e in events if isinstance(e, ShownList)]:
        items_n = np.array([signed(i) for i in request_event.items])
        fields = reader.from_values(request_event.header, request_event.ro, request_event.nro, len(items_n))
        read, known = (
            c.read(request_event.user, items_n, now_ms, fields) for c in (hydrator, encoder.counters)
        )
        assert read[0] == known[0]
        assert {k: v.tobytes() for k, v in read[1].items()} == {k: v.tobytes() for k, v in known[1].items()}


@pytest.mark.parametrize("batch", [1, 7, 512])
def test_retried_events_count_once_in_redis_and_in_replay(redis: RedisServer, batch: int) -> None:
    once = [event_of(1 + number, event) for number, event in enumerate(random_events(8, 60))]
    retried: list[Event] = []
    for event in once:
        again = [dataclasses.replace(event, time_ms=event.time_ms + late_ms) for late_ms in (0, 300)]
        retried += [event, *again]
    retried.sort(key=lambda event: event.time_ms)
    updater = make_updater(redis, encode_events(retried), batch)
    while updater.step(0):
        pass
    expected, repeated = ReplayEncoder(SCHEMA), ReplayEncoder(SCHEMA)
    now_ms = retried[-1].time_ms + 5000
    last = Request("last", 0, 0, now_ms, np.array([5]))
    for encoder, events in ((expected, once), (repeated, retried)):
        for event in [*events, last]:
            encoder.record(event)
    hydrator, reader = patient_hydrator(redis, SCHEMA), FieldReader(SCHEMA)
    for request_event in [e for e in once if isinstance(e, Request)]:
        header = (
            request_event.user_id,
            request_event.session_id,
            request_event.surface,
            request_event.request_id,
        )
        fields = reader.from_values(header, request_event.ro, request_event.nro, len(request_event.items_n))
        known, *others = (
            source.read(request_event.user_id, request_event.items_n, now_ms, fields)
            for source in (expected.counters, repeated.counters, hydrator)
        )
        for other in others:
            assert other[0] == known[0]
            assert {k: v.tobytes() for k, v in other[1].items()} == {
                k: v.tobytes() for k, v in known[1].items()
            }


def assert_logged_equals_read(record: Record, ro: Any, nro: Any, num_rows: int) -> None:
    """Assert that each online feature in the logged record has the value that was read from Redis."""
    assert record.topic == IMPRESSIONS
    _, message = wire.decode(record.value)
    assert isinstance(message, pb.Impression)
    logged_ro = decode_block(SCHEMA, "ro", message.ro, 1)
    logged_nro = decode_block(SCHEMA, "nro", message.nro, num_rows)
    for feature in SCHEMA.ro:
        if feature.online:
            assert logged_ro.get(feature.name) == ro.get(feature.online), feature.name
    for feature in SCHEMA.nro:
        if feature.online:
            np.testing.assert_array_equal(logged_nro[feature.name], nro[feature.online], err_msg=feature.name)


def test_a_crossed_counter_is_read_in_the_same_round_trip(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = make_updater(redis, to_records(random_events(3, 30)), 512)
    updater.step(0)
    hydrator, reader = patient_hydrator(redis, SCHEMA), FieldReader(SCHEMA)
    before = command_counts(redis)
    fields = reader.from_values((1, 1, "app", "new"), {"page": ["home"]}, {"category": [[11], None]}, 2)
    _, nro = hydrator.read(1, np.array([5, 6]), 1_700_000_999_000, fields)
    assert {"here_ctr_1h", "user_category_views", "at_this_hour"} <= set(nro)
    after = command_counts(redis)
    assert {
        name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)
    } == {"cmdstat_mget": 1, "cmdstat_info": 1}


def command_counts(redis: RedisServer) -> dict[str, int]:
    stats = redis_client.client(redis.url, timeout_s=2.0).info("commandstats")
    return {
        name: command["calls"]
        for name, command in stats.items()
        if name in ("cmdstat_mget", "cmdstat_get", "cmdstat_info")
    }


def test_fields_expire_as_declared(redis: RedisServer) -> None:
    updater = make_updater(redis, to_records(random_events(3, 12)), 512)
    updater.step(0)
    connection = updater.store.connection
    lists = connection.keys(b"x.features:l:*")
    item = updater.store.key("item", 5)
    assert lists and all(0 < connection.ttl(key) <= 2 * 86_400 for key in lists)
    assert 2 * 86_400 < connection.ttl(item) <= 30 * 86_400
    assert updater.store.key(LISTS, 1).startswith(b"x.features:l:")
    assert updater.store.key("page,item", 1) != updater.store.key("hour,weekday,item", 1)

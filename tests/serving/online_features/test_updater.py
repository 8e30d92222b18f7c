"""The feature updater with a real Redis gives the same features as counters in memory, also after restarts,
crashes and losses."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from redis import ConnectionError, Redis

from joiner.event_decoder import EventDecoder
from joiner.outputs import Output
from roostream.errors import CheckpointError, ConfigError, UnavailableError, WireError
from roostream.online.counters import Counters, StateReader
from roostream.online.entity_fields import FieldReader
from roostream.runtime import redis_client
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import FakeClock
from roostream.runtime.health import Health
from roostream.runtime.kafka.topics import ENGAGEMENTS, IMPRESSIONS, Partition, Progress
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire.records import Record
from serving.online_features.config import FeaturesConfig
from serving.online_features.hydration import Hydrator
from serving.online_features.store import MAX_KEYS, FeatureStore
from serving.online_features.updater import (
    FeatureMetrics,
    FeatureUpdater,
    apply,
    event_of,
    follow,
    run_until_stopped,
)
from tests.serving.online_features.feature_cases import (
    EVENT_PARTITIONS,
    T0,
    MemoryEvents,
    RedisServer,
    engagement,
    events,
    impression,
    records_of,
)

ITEMS = list(range(12))
NOW = T0 + 10_000_000


class EndingEvents(MemoryEvents):
    """Sets `stop` when there are no more events."""

    def __init__(self, records: Iterable[Record], stop: threading.Event) -> None:
        super().__init__(records)
        self.stop = stop

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        found = super().poll(max_records, timeout_s, partition)
        if not found:
            self.stop.set()
        return found


def open_updater(
    redis: RedisServer,
    source: MemoryEvents,
    cluster: str = "c1",
    prefix: str = "a*[",
    batch: int = 512,
    connection: Redis | None = None,
    max_keys: int = MAX_KEYS,
    replace_other_cluster: bool = False,
) -> FeatureUpdater:
    connection = connection or redis_client.client(redis.url, timeout_s=5.0)
    store = FeatureStore(
        connection, redis.url, prefix, max_keys=max_keys, replace_other_cluster=replace_other_cluster
    )
    updater = FeatureUpdater(Schema(), store, source, cluster, FeatureMetrics(CollectorRegistry()))
    updater.batch_records = batch
    updater.open()
    return updater


def count_in_memory(records: list[Record]) -> Counters:
    """Apply the same events in the same order to counters in memory, as the expected result."""
    source, counters = MemoryEvents(records), Counters(Schema())
    source.seek({})
    for record in source.poll(1 << 30, 0):
        try:
            event = event_of(record, FieldReader(Schema()))
        except WireError:
            continue
        if event is not None:
            apply(counters, event)
    return counters


def features(counters: Counters, user_id: int) -> tuple[Any, Any]:
    ro, nro = counters.read(user_id, ITEMS, NOW)
    return ro, {name: column.tobytes() for name, column in nro.items()}


def assert_equal(store: FeatureStore, records: list[Record]) -> None:
    expected = count_in_memory(records)
    for user in range(4):
        reader = StateReader(Schema())
        keys = reader.keys(user, ITEMS, NOW)
        ro, nro = reader.read(keys, *store.read([keys.stored]))
        assert (ro, {name: column.tobytes() for name, column in nro.items()}) == features(expected, user)


def drain(updater: FeatureUpdater) -> int:
    total = 0
    while count := updater.step(0):
        total += count
    return total


@pytest.mark.parametrize("batch", [1, 3, 512])
def test_redis_and_memory_give_equal_features_for_any_batching(redis: RedisServer, batch: int) -> None:
    records = records_of(events(120))
    updater = open_updater(redis, MemoryEvents(records), batch=batch)
    assert drain(updater) == len(records)
    assert_equal(updater.store, records)
    assert updater.metrics.bad.collect()[0].samples[0].value == sum(
        r.value == b"\x02\x01\xff" for r in records
    )


def changed(record: Record, offset: int, **fields: Any) -> Record:
    """The record with another header or other fields, at another offset."""
    kind, message = wire.decode(record.value)
    for name, value in fields.items():
        part = message if name in message.DESCRIPTOR.fields_by_name else message.header  # type: ignore[attr-defined]
        setattr(part, name, value)
    return record._replace(offset=offset, value=wire.encode(kind, message))


def test_events_that_the_joiner_refuses_change_no_counter(redis: RedisServer) -> None:
    shown, done = records_of([impression(1, [5, 6], T0), engagement(1, 5, T0 + 1000)])
    refused = [
        changed(shown, 1, time_ms=T0 * 1000),  # µs in the header, ms as the record's timestamp
        changed(shown, 2, user_id=2),  # another user's key, whose state another updater may write
        changed(shown, 3, request_id=""),
        changed(done, 1, event_id=0),  # a retry would count again
        changed(done, 2, value=float("inf")),
        changed(done, 3, action="x" * 65),
    ]
    decoder = EventDecoder({Schema().fingerprint: Schema()}.get, Schema().limits)
    assert all(isinstance(decoder.decode(record), Output) for record in refused)
    later = records_of([impression(1, [5, 6], T0 + 60_000)])[0]._replace(offset=4)
    updater = open_updater(redis, MemoryEvents([shown, done, *refused, later]))
    assert drain(updater) == 9
    assert_equal(updater.store, [shown, done, later._replace(offset=1)])
    assert updater.metrics.bad.collect()[0].samples[0].value == len(refused)


def test_a_commit_that_is_repeated_counts_its_events_once_in_the_metrics(redis: RedisServer) -> None:
    records = records_of(events(60))
    first, second = (open_updater(redis, MemoryEvents(records), batch=1000) for _ in range(2))
    drain(first), drain(second)
    counted = [
        sample.value
        for updater in (first, second)
        for metric in (updater.metrics.events, updater.metrics.bad)
        for sample in metric.collect()[0].samples
        if sample.name.endswith("_total")
    ]
    assert sum(counted) == sum(wire.kind_of(record.value) != wire.HEARTBEAT for record in records)


def test_a_restart_neither_loses_nor_repeats_events(redis: RedisServer) -> None:
    records = records_of(events(60))
    for steps in (2, 3, 1):
        updater = open_updater(redis, MemoryEvents(records), batch=10)
        for _ in range(steps):
            updater.step(0)
    drain(open_updater(redis, MemoryEvents(records)))
    assert_equal(updater.store, records)


def test_two_updaters_of_the_same_partitions_count_every_event_once(redis: RedisServer) -> None:
    records = records_of(events(40))
    first, second = open_updater(redis, MemoryEvents(records)), open_updater(redis, MemoryEvents(records))
    assert first.step(0) and second.step(0)
    assert second.source.seeks == 2, "the second updater found newer offsets in Redis and continued from them"  # type: ignore[attr-defined]
    drain(first), drain(second)
    assert_equal(first.store, records)


class FaultyRedis(Redis):
    """A Redis client that calls `before` and `after` around each command, with the command's number."""

    before: Callable[[int], None] = staticmethod(lambda number: None)
    after: Callable[[int], None] = staticmethod(lambda number: None)
    num_commands = 0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self.num_commands += 1
        number = self.num_commands
        self.before(number)
        answer = super().execute_command(*args, **options)
        self.after(number)
        return answer


def connect_faulty(redis: RedisServer) -> FaultyRedis:
    connection: FaultyRedis = FaultyRedis.from_url(redis.url, socket_timeout=5.0)
    return connection


def test_a_large_batch_is_committed_in_pieces_of_bounded_commands(redis: RedisServer) -> None:
    lists = [impression(1, [*range(n * 1000, (n + 1) * 1000)], T0 + n) for n in range(3)]
    records = records_of([*lists, engagement(1, 7, T0 + 1000)])
    connection = connect_faulty(redis)
    updater = open_updater(redis, MemoryEvents(records), connection=connection, max_keys=1000)
    assert drain(updater) == 4 and connection.num_commands > 10
    assert_equal(updater.store, records)
    assert list(connection.scan_iter(match=b"*redo*")) == [], "staged pieces are deleted"


def test_a_redis_without_memory_keeps_no_pieces_and_the_updater_continues_when_it_has(
    redis: RedisServer,
) -> None:
    records = records_of([impression(n, [*range(200 * n, 200 * (n + 1))], T0 + n) for n in range(100)])
    observer = Redis.from_url(redis.url)
    updater = open_updater(redis, MemoryEvents(records))
    observer.config_set("maxmemory", int(observer.info("memory")["used_memory"]) + 1_500_000)
    try:
        for _ in range(3):
            updater.open()
            with pytest.raises(UnavailableError, match="raise its maxmemory"):
                updater.step(0)
            assert list(observer.scan_iter(match=b"*redo*")) == []
    finally:
        observer.config_set("maxmemory", 0)
    updater.open()
    assert drain(updater) == len(records)
    assert_equal(updater.store, records)


def test_a_small_commit_without_memory_says_what_to_do(redis: RedisServer) -> None:
    observer, updater = Redis.from_url(redis.url), open_updater(redis, MemoryEvents(records_of(events(9))))
    observer.config_set("maxmemory", 1)
    try:
        with pytest.raises(UnavailableError, match="raise its maxmemory"):
            updater.step(0)
    finally:
        observer.config_set("maxmemory", 0)
    updater.open()
    assert drain(updater) > 0


def test_features_of_topics_that_were_created_again_are_replaced_only_if_that_is_wanted(
    redis: RedisServer,
) -> None:
    before, after = (
        [impression(user, [7], T0 + n) for n in range(count)] for user, count in ((5, 40), (6, 60))
    )

    def updater_of(events: list[tuple[str, int, bytes]], ids: str, replace: bool = False) -> FeatureUpdater:
        connection = redis_client.client(redis.url, timeout_s=5.0)
        store = FeatureStore(connection, redis.url, "again.", replace_other_cluster=replace)
        metrics, source = FeatureMetrics(CollectorRegistry()), MemoryEvents(records_of(events))
        return FeatureUpdater(Schema(), store, source, "c1", metrics, ids)

    for ids in ("", "a b", "a b"):  # an updater of an older version stored no ids
        updater = updater_of(before, ids)
        updater.open()
        drain(updater)
    with pytest.raises(ConfigError, match="created again"):
        updater_of(after, "c d").open()
    updater = updater_of(after, "c d", replace=True)
    updater.open()
    assert drain(updater) == len(after)
    updater_of(after, "c d").open()


def test_a_redis_that_deletes_states_when_it_is_full_is_reported(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    observer, updater = Redis.from_url(redis.url), open_updater(redis, MemoryEvents([]))
    try:
        for max_bytes, policy in ((0, "volatile-lru"), (10**9, "noeviction")):
            observer.config_set("maxmemory-policy", policy)
            observer.config_set("maxmemory", max_bytes)
            updater.open()
        assert "noeviction" not in caplog.text
        observer.config_set("maxmemory-policy", "volatile-lru")
        updater.open()
        assert "maxmemory-policy noeviction" in caplog.text
    finally:
        observer.config_set("maxmemory-policy", "noeviction")
        observer.config_set("maxmemory", 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_command_of_a_commit_neither_loses_nor_doubles_events(
    redis: RedisServer, when: str
) -> None:
    records = records_of(events(14))
    for prefix in ("first.", "second."):  # the first run also loads the scripts
        connection = connect_faulty(redis)
        drain(open_updater(redis, MemoryEvents(records), prefix=prefix, connection=connection, max_keys=6))
    total = connection.num_commands
    assert total > 12
    for crash_at in range(1, total + 1):
        connection, prefix = connect_faulty(redis), f"crash{crash_at}."

        def crash(number: int, crash_at: int = crash_at) -> None:
            if number == crash_at:
                raise ConnectionError("the updater was killed")

        setattr(connection, when, crash)
        with pytest.raises(UnavailableError):
            drain(
                open_updater(redis, MemoryEvents(records), prefix=prefix, connection=connection, max_keys=6)
            )
        again = open_updater(redis, MemoryEvents(records), prefix=prefix, max_keys=6)
        drain(again)
        assert_equal(again.store, records)


def test_an_updater_that_was_replaced_during_a_commit_overwrites_nothing(redis: RedisServer) -> None:
    records = records_of(events(40))
    for moment in range(3, 14):
        connection, prefix = connect_faulty(redis), f"moment{moment}."

        def replace(number: int, moment: int = moment, prefix: str = prefix) -> None:
            if number == moment:
                drain(open_updater(redis, MemoryEvents(records), prefix=prefix, max_keys=6))

        connection.before = replace
        slow = open_updater(
            redis, MemoryEvents(records), prefix=prefix, batch=20, connection=connection, max_keys=6
        )
        drain(slow)
        assert connection.num_commands >= moment
        assert_equal(slow.store, records)


def test_features_are_rebuilt_from_the_first_event_if_staged_pieces_are_lost(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    records = records_of(events(14))
    connection = connect_faulty(redis)
    observer = redis_client.client(redis.url, timeout_s=5.0)

    def crash(number: int) -> None:
        if observer.hget(b"x.features:at", b"pending:0"):
            raise ConnectionError("the updater was killed")

    connection.after = crash
    with pytest.raises(UnavailableError):
        drain(open_updater(redis, MemoryEvents(records), prefix="x.", connection=connection, max_keys=6))
    staged = sorted(observer.scan_iter(match=b"x.features:redo*"))
    assert len(staged) > 1
    observer.delete(staged[0])
    again = open_updater(redis, MemoryEvents(records), prefix="x.", max_keys=6)
    drain(again)
    assert "filled again" in caplog.text
    assert_equal(again.store, records)


def test_an_emptied_redis_is_rebuilt_from_the_first_event(redis: RedisServer) -> None:
    records = records_of(events(60))
    updater = open_updater(redis, MemoryEvents(records), batch=20)
    updater.step(0)
    redis.stop()
    redis.start()
    updater.store.connection.ping()
    drain(updater)
    assert_equal(updater.store, records)


def test_features_of_another_kafka_cluster_are_replaced_only_if_that_is_wanted(redis: RedisServer) -> None:
    old, other, new = (
        records_of(events(30, seed=1)),
        records_of(events(30, seed=2)),
        records_of(events(30, seed=3)),
    )
    drain(open_updater(redis, MemoryEvents(old)))
    other_prefix = open_updater(redis, MemoryEvents(other), prefix="ab[")
    drain(other_prefix)
    with pytest.raises(ConfigError, match=r"expected Kafka cluster c1, .*got cluster c2; .*another `prefix`"):
        open_updater(redis, MemoryEvents(new), cluster="c2")
    assert_equal(open_updater(redis, MemoryEvents([])).store, old)
    updater = open_updater(redis, MemoryEvents(new), cluster="c2", replace_other_cluster=True)
    drain(updater)
    assert_equal(updater.store, new)
    assert_equal(other_prefix.store, other)


class OutageClock(FakeClock):
    """A fake clock that calls `during` with the number of the wait, each time that the program waits."""

    def __init__(self, during: Callable[[int], None]) -> None:
        super().__init__()
        self.waits, self.during = 0, during

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.waits += 1
        self.during(self.waits)
        return super().sleep(seconds, stop)


def test_an_unavailable_redis_is_awaited_and_nothing_is_lost(redis: RedisServer) -> None:
    records, stop = records_of(events(50)), threading.Event()
    updater = open_updater(redis, EndingEvents(records, stop))
    redis.stop()

    def during(waits: int) -> None:
        if waits == 2:
            redis.start()

    clock = OutageClock(during)
    follow(updater, stop, Backoff(what="Redis", clock=clock), Health(60))
    assert clock.waits == 2
    assert_equal(updater.store, records)


def test_an_outage_of_kafka_is_logged_once_and_the_program_is_not_ready(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis answers all the time, but that does not end the outage of Kafka."""
    caplog.set_level(logging.INFO, logger="roostream")
    records, stop = records_of(events(5)), threading.Event()
    source = EndingEvents(records, stop)
    updater = open_updater(redis, source)
    source.away = True
    unready: list[str] = []

    def during(waits: int) -> None:
        unready.append(health.unready())
        source.away = waits < 12

    clock = OutageClock(during)
    health = Health(60, clock)
    follow(updater, stop, Backoff(what="Redis and Kafka", clock=clock), health)
    assert clock.waits == 12 and source.seeks == 14, (
        "one seek at the start, twelve that failed, one that succeeded"
    )
    assert_equal(updater.store, records)
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO"]
    assert "is back after" in caplog.records[-1].message
    assert clock.monotonic_s() > 5 and unready[-1] == "it waits for Redis and Kafka"


def test_a_stop_while_redis_is_unavailable_is_clean(redis: RedisServer) -> None:
    updater, stop = open_updater(redis, MemoryEvents([])), threading.Event()
    redis.stop()
    follow(updater, stop, Backoff(what="Redis", clock=OutageClock(lambda waits: stop.set())), Health(60))
    redis.start()
    assert updater.store.offsets("c") == {}, "nothing was applied"


def test_states_of_another_version_stop_the_updater_with_one_sentence(redis: RedisServer) -> None:
    updater = open_updater(redis, MemoryEvents(records_of([impression(1, [5], T0)])))
    updater.store.connection.set(updater.store.key("item", 5), b"\x09")
    with pytest.raises(CheckpointError, match="expected a counter's state of version 3"):
        updater.step(0)


def test_an_unavailable_redis_raises_one_error_type() -> None:
    connection = redis_client.client("redis://127.0.0.1:1/0", timeout_s=0.2)
    with pytest.raises(UnavailableError, match="Redis at x failed"):
        FeatureStore(connection, "x", "").offsets("c")


def test_a_click_at_the_time_of_its_impression_is_applied_after_it() -> None:
    records = records_of([engagement(1, 5, T0), impression(1, [5], T0)])
    source = MemoryEvents(records)
    source.seek({})
    assert [r.topic for r in source.poll(10, 0)] == [IMPRESSIONS, ENGAGEMENTS]


SCHEMA = '[[label]]\nname = "click"\naction = "click"\n'


def test_the_program_waits_for_kafka_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    config = FeaturesConfig(
        bootstrap="127.0.0.1:1", redis="redis://127.0.0.1:1/0", schema=tmp_path / "schema.toml"
    )
    stop = threading.Event()
    program = threading.Thread(target=run_until_stopped, args=(config, stop))
    program.start()
    program.join(0.5)
    assert program.is_alive(), "the program still waits"
    stop.set()
    program.join(30)
    assert not program.is_alive()


def test_wrong_settings_are_refused_before_the_program_waits(tmp_path: Path) -> None:
    config = FeaturesConfig(
        bootstrap="127.0.0.1:1", redis="redis://127.0.0.1:1/x", schema=tmp_path / "schema.toml"
    )
    with pytest.raises(ConfigError, match="no such file"):
        run_until_stopped(config, threading.Event())
    with pytest.raises(ConfigError, match="expected redis://host:port/0"):
        FeaturesConfig(bootstrap="127.0.0.1:1", redis="127.0.0.1", schema=tmp_path / "schema.toml")


def records_by_user(event_list: list[tuple[str, int, bytes]]) -> list[Record]:
    """Return records of these events, each in the partition of its user."""
    ends, out = dict.fromkeys(EVENT_PARTITIONS, 0), []
    for topic, time_ms, value in event_list:
        try:
            message = wire.decode(value)[1]
        except WireError:
            continue
        partition = (topic, message.header.user_id % 4 if hasattr(message, "header") else 0)
        out.append(Record(*partition, ends[partition], time_ms, b"", value))
        ends[partition] += 1
    return out


def open_updaters(
    redis: RedisServer, records: list[Record], count: int, *, batch: int = 512, max_keys: int = MAX_KEYS
) -> list[FeatureUpdater]:
    """Open `count` updaters, each for its share of the partitions."""
    updaters = []
    for index in range(count):
        connection = redis_client.client(redis.url, timeout_s=5.0)
        store = FeatureStore(connection, redis.url, "s.", index=index, num_updaters=count, max_keys=max_keys)
        source = MemoryEvents([r for r in records if r.partition % count == index], store.partitions)
        updater = FeatureUpdater(Schema(), store, source, "c1", FeatureMetrics(CollectorRegistry()))
        updater.batch_records = batch
        updater.open()
        updaters.append(updater)
    return updaters


def assert_read_like_one(redis: RedisServer, records: list[Record]) -> None:
    """Assert that a hydrator reads the features of all events. Decayed sums may differ by rounding."""
    expected = count_in_memory(records)
    reader = Hydrator(redis.url, "s.", Schema(), clock=FakeClock(), timeout_s=5.0)
    for user in range(4):
        ro, nro = reader.read(user, ITEMS, NOW)
        expected_ro, expected_nro = expected.read(user, ITEMS, NOW)
        assert ro == expected_ro
        for name, column in expected_nro.items():
            np.testing.assert_allclose(nro[name], column, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_updaters_count_every_event_once(redis: RedisServer, count: int) -> None:
    records = records_by_user(events(160))
    updaters = open_updaters(redis, records, count, batch=7)
    while sum(updater.step(0) for updater in updaters):
        pass
    assert_read_like_one(redis, records)


def test_another_number_of_updaters_continues_where_the_others_stopped(redis: RedisServer) -> None:
    records = records_by_user(events(240))
    old: list[FeatureUpdater] = []
    for count in (1, 4, 2, 3):
        new = open_updaters(redis, records, count, batch=9, max_keys=6)
        for updater in [*new, *old]:  # the old updaters keep running for a while
            updater.step(0)
            updater.step(0)
        old = new
    for updater in old:
        drain(updater)
    assert_read_like_one(redis, records)


def test_only_updater_0_begins_with_the_events_of_another_cluster(redis: RedisServer) -> None:
    store = FeatureStore(
        redis_client.client(redis.url, timeout_s=5.0), redis.url, "s.", index=1, num_updaters=2
    )
    with pytest.raises(UnavailableError, match="updater 0"):
        store.offsets("c1")
    open_updaters(redis, [], 1)
    assert store.offsets("c1") == {}


def test_an_updater_index_out_of_range_is_refused() -> None:
    common: dict[str, Any] = {"bootstrap": "k:1", "schema": "s", "redis": "redis://r:1/0"}
    with pytest.raises(ConfigError, match="index"):
        FeaturesConfig(**common, index=2, num_updaters=2)
    with pytest.raises(ConfigError, match="index"):
        FeaturesConfig(**common, partitions=4, index=4, num_updaters=8)


class EventsWithLeaderEpochs(MemoryEvents):
    """Events whose records all have the leader epoch `epoch`; `sought` has the epochs of the last `seek`."""

    epoch = 5
    sought: Mapping[Partition, int] = MappingProxyType({})

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        return dict.fromkeys(at, self.epoch)

    def seek(self, progress: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self.sought = leader_epochs
        super().seek(progress, leader_epochs)


def test_the_next_updater_knows_the_leader_epochs_of_the_stored_offsets(redis: RedisServer) -> None:
    """With the epochs, the consumer notices if a broker lost these offsets and reused them for other
    records."""
    records = records_of(events(60))
    source = EventsWithLeaderEpochs(records)
    updater = open_updater(redis, source, batch=20)
    assert source.sought == {}
    updater.step()
    read = {p for p, at in source.positions().items() if at}
    source = EventsWithLeaderEpochs(records)
    updater = open_updater(redis, source, batch=20)
    assert source.sought == dict.fromkeys(read, 5)
    source.epoch = 6
    updater.step()
    source = EventsWithLeaderEpochs(records)
    open_updater(redis, source)
    assert set(source.sought.values()) == {6}


def test_a_leader_epoch_of_other_offsets_is_not_used(redis: RedisServer) -> None:
    """Updaters of older versions store offsets without epochs."""
    records = records_of(events(60))
    open_updater(redis, EventsWithLeaderEpochs(records), batch=20).step()
    older = open_updater(redis, MemoryEvents(records), batch=20)
    older.step()
    source = EventsWithLeaderEpochs(records)
    updater = open_updater(redis, source)
    moved = {p for p, at in older.source.positions().items() if at}
    assert not moved & source.sought.keys()
    updater.step()
    assert_equal(updater.store, records)


def test_a_damaged_state_is_named_with_its_key(redis: RedisServer) -> None:
    updater = open_updater(redis, MemoryEvents([]), prefix="p.")
    key = updater.store.key("user", 2)
    with Redis.from_url(redis.url) as client:
        client.set(key, b"text")
        updater.source = MemoryEvents(records_of(events(120)))
        updater.open()
        with pytest.raises(CheckpointError, match=re.escape(str(key))):
            drain(updater)
        client.delete(key)
    updater.open()
    assert drain(updater)


@pytest.mark.parametrize("text", ["two", "0", "65", "-1"])
def test_a_wrong_number_of_updaters_is_named_with_its_key(text: str, redis: RedisServer) -> None:
    updater = open_updater(redis, MemoryEvents([]), prefix="p.")
    with Redis.from_url(redis.url) as client:
        client.set("p.features:updaters", text)
        with pytest.raises(CheckpointError, match="features:updaters"):
            updater.open()
        with pytest.raises(CheckpointError, match="features:updaters"):
            Hydrator(redis.url, "p.", Schema(), timeout_s=5.0).read(1, ITEMS, NOW)
        client.set("p.features:updaters", "1")
    updater.open()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("impressions:0", b"text"),
        ("epoch:impressions:0", b"text"),
        ("commits:0", b"text"),
        ("pending:0", b"text"),
        ("topics", b"\xff"),
    ],
)
def test_damaged_offsets_are_named_with_their_key_which_can_be_deleted(
    field: str, value: bytes, redis: RedisServer
) -> None:
    records = records_of(events(120))
    updater = open_updater(redis, MemoryEvents(records), prefix="p.")
    drain(updater)
    with Redis.from_url(redis.url) as client:
        client.hset("p.features:at", field, value)
        with pytest.raises(CheckpointError, match="features:at"):
            updater.open()
        client.delete("p.features:at")
    updater.open()
    drain(updater)
    assert_equal(updater.store, records)

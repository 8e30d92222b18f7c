"""`roostream features`: keeps user histories and item counters in Redis from the two event topics.

1 read the next records, merged by time
2 load the states that they change, in one round trip (two if engagements use the fields of their lists)
3 apply the events with roostream.online, as a replay does
4 write states and offsets as one commit (store.py); if the stored offsets have changed, start over

Several updaters share the topics' partitions; store.py says what each of them writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from roostream.errors import UnavailableError, WireError
from roostream.online.counters import LISTS, Counters, Keys, merge_keys
from roostream.online.entity_fields import NO_FIELDS, EntityFields, FieldReader
from roostream.online.seen_events import EventId, engagement_id, list_id
from roostream.runtime import metrics_server, redis_client
from roostream.runtime.backoff import Backoff
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import EVENTS, Progress
from roostream.schema.ids import signed
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.event_checks import check_engagement, check_header, check_num_candidates
from roostream.wire.records import Record
from serving.online_features.config import FeaturesConfig
from serving.online_features.store import FeatureStore

log = logging.getLogger("roostream.features")

_POLL_S = 0.2
_REDIS_TIMEOUT_S = 5.0


class Shown(NamedTuple):
    """An impression: items that were shown to a user."""

    user_id: int
    item_ids: np.ndarray  # int64 [n]
    time_ms: int
    fields: EntityFields = NO_FIELDS
    event_id: EventId | None = None


class Engaged(NamedTuple):
    """An engagement of a user with an item."""

    user_id: int
    item_id: int
    action: str
    value: float
    time_ms: int
    fields: EntityFields = NO_FIELDS
    event_id: EventId | None = None


Event: TypeAlias = Shown | Engaged


def event_of(record: Record, reader: FieldReader) -> Event | None:
    """The event of a record; None for heartbeats and end markers.

    Raises:
        WireError: the record can't be decoded, or its header is refused, for example for its time or its key.
        Such records are only counted here; the joiner writes their dead letters.
    """
    _, message = wire.decode(record.value)
    if not isinstance(message, pb.Impression | pb.Engagement):
        return None
    header = message.header
    check_header(record, header)
    user_id = signed(header.user_id)
    request = header.user_id, header.session_id, header.surface, header.request_id
    if isinstance(message, pb.Impression):
        check_num_candidates(message, reader.schema.limits.max_candidates)
        item_ids = np.array(message.item_ids, dtype=np.uint64).view(np.int64)
        ro = message.ro if message.HasField("ro") else None
        fields = reader.from_blocks(request, ro, message.nro, len(item_ids), header.schema)
        return Shown(user_id, item_ids, header.time_ms, fields, list_id(request, item_ids, ro is not None))
    check_engagement(message)
    fields, once = reader.from_header(request), engagement_id(request, message.event_id)
    return Engaged(
        user_id, signed(message.item_id), message.action, message.value, header.time_ms, fields, once
    )


def apply(counters: Counters, event: Event) -> None:
    """Apply an event to the counters."""
    if isinstance(event, Shown):
        counters.apply_impression(*event)
    else:
        counters.apply_engagement(*event)


def touched(counters: Counters, event: Event) -> Keys:
    """The states that the event changes. The fields of its list must be loaded; those of a shown list are
    remembered in `counters`."""
    seen = counters.seen_keys(event.event_id)
    if isinstance(event, Shown):
        counters.remember(event.item_ids, event.time_ms, event.fields)
        return seen | counters.impression_keys(event.user_id, event.item_ids, event.time_ms, event.fields)
    keys = counters.engagement_keys(event.user_id, event.item_id, event.action, event.time_ms, event.fields)
    return seen | keys if keys else keys


class FeatureMetrics:
    """Metrics of a feature updater."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, num_updaters: int = 1) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.events = counter("roostream_features_events_total", "events applied", ["topic"])
        self.bad = counter(
            "roostream_features_bad_records_total", "events left out because the joiner refuses them"
        )
        self.restarts = counter(
            "roostream_features_reloads_total", "times that offsets were reloaded from Redis"
        )
        self.lost = gauge(
            "roostream_features_lost_records", "events that Kafka deleted before they were read"
        )
        self.time = gauge(
            "roostream_features_event_timestamp_seconds", "event time of the newest record applied"
        )
        gauge("roostream_features_updaters", "number of updaters, of which this is one").set(num_updaters)


class FeatureUpdater:
    """Single-threaded. Its only state are the offsets that it expects in Redis; `open` reads them."""

    batch_records = 512

    def __init__(
        self,
        schema: Schema,
        store: FeatureStore,
        source: RecordConsumer,
        cluster: str,
        metrics: FeatureMetrics,
        topic_ids: str = "",
    ) -> None:
        """`cluster`, `topic_ids`: see `FeatureStore.offsets`."""
        self.schema, self.store, self.source = schema, store, source
        self.cluster, self.metrics, self.topic_ids = cluster, metrics, topic_ids
        self._reader = FieldReader(schema)
        self._offsets: Progress = {}

    def open(self) -> None:
        """Continue from the offsets in Redis. Raises UnavailableError while Redis or Kafka is away; call
        again. CheckpointError: the offsets are damaged."""
        self._offsets = self.store.offsets(self.cluster, self.topic_ids)
        self.source.seek(self._offsets, self.store.leader_epochs(self._offsets))
        self.metrics.restarts.inc()

    def step(self, timeout_s: float = _POLL_S) -> int:
        """Apply the next records. Returns their number.

        **If it fails** (UnavailableError, CheckpointError): it is unknown whether they were applied; `open`
        finds out.
        """
        records = self.source.poll(self.batch_records, timeout_s)
        self.metrics.lost.set(self.source.num_lost)
        if records and not self._apply(records):
            log.warning(
                "the offsets in Redis changed (it was emptied, or another updater runs); continuing from "
                "the stored offsets"
            )
            self.open()
        return len(records)

    def _apply(self, records: Sequence[Record]) -> bool:
        found = [(record.topic, self._event(record)) for record in records]
        events = [event for _, event in found if isinstance(event, Shown | Engaged)]
        counters, known = Counters(self.schema), Counters(self.schema)
        lists = merge_keys(counters.list_keys(event.fields) for event in events)
        self.store.load(known, lists)
        counters.load(lists, known.dump(lists))
        # In `known`, so that applying an event does not see the lists of later events.
        keys = merge_keys(touched(known, event) for event in events)
        self.store.load(counters, {name: entity_keys for name, entity_keys in keys.items() if name != LISTS})
        for event in events:
            apply(counters, event)
        after = self._offsets | {(r.topic, r.partition): r.offset + 1 for r in records}
        epochs = self.source.leader_epochs(after)
        if not self.store.commit(self._offsets, after, counters, keys, self.cluster, epochs):
            return False
        self._offsets = after
        for topic, each in found:
            self.metrics.events.labels(topic).inc(isinstance(each, Shown | Engaged))
            self.metrics.bad.inc(isinstance(each, WireError))
        self.metrics.time.set(max(r.timestamp_ms for r in records) / 1000)
        return True

    def _event(self, record: Record) -> Event | WireError | None:
        try:
            return event_of(record, self._reader)
        except WireError as error:
            log.debug("%s-%d@%d: %s", record.topic, record.partition, record.offset, error)
            return error


def follow(updater: FeatureUpdater, stop: threading.Event, backoff: Backoff, health: Health) -> None:
    """Run `updater` until `stop` is set. While Redis or Kafka is away, wait, then continue from the stored
    offsets. An outage ends when records can be read and applied again.

    Raises:
        UnavailableError: `stop` was set while it waited.
    """

    def resume() -> None:
        updater.open()
        updater.step()

    while not stop.is_set():
        try:
            with health.waiting("Redis and Kafka"):
                backoff.until(resume, (UnavailableError,), stop)
            while not stop.is_set():
                health.turned()
                updater.step()
        except UnavailableError as error:
            if not stop.is_set():
                backoff.wait(error, stop)


def run_until_stopped(config: FeaturesConfig, stop: threading.Event) -> None:
    """Run until `stop` is set.

    Raises:
        RoostreamError: the schema or an address is wrong, or Redis has states that are damaged or of
        another version.
    """
    health = Health(config.stalled_after_ms / 1000)
    schema = load_schema(config.schema)
    connection = redis_client.client(config.redis_url, timeout_s=_REDIS_TIMEOUT_S)
    metrics_server.serve(config, health)
    store = FeatureStore(
        connection,
        config.redis,
        config.prefix,
        config.partitions,
        index=config.index,
        num_updaters=config.num_updaters,
        replace_other_cluster=config.replace_other_cluster,
    )
    options = ConsumerOptions(
        partitions=store.partitions,
        prefix=config.prefix,
        merge_by_time=True,
        skip_lost_records=config.skip_lost,
    )
    source = KafkaConsumer.open(config.broker, f"{config.prefix}features", options)
    try:
        cluster = clients.wait_for_broker(config.broker, stop)
        ids = clients.wait_for_topics(config.broker, config.prefix, EVENTS, config.partitions, stop)
        metrics = FeatureMetrics(num_updaters=config.num_updaters)
        updater = FeatureUpdater(schema, store, source, cluster, metrics, " ".join(sorted(ids.values())))
        backoff = Backoff(what=f"Redis at {config.redis} and Kafka at {config.broker}")
        follow(updater, stop, backoff, health)
    except UnavailableError:
        if not stop.is_set():
            raise
    finally:
        source.close()

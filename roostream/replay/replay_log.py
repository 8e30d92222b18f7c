"""Open a log as one stream of records: the events of a dataset, encoded, with heartbeats and end markers.

The stream has the order in which one producer writes it. Its consumer is either Kafka or the local engine
(roostream.cli.replay).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from roostream.errors import ConfigError, WireError
from roostream.online.counter_seed import seed
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import Clicks, Skipped, load_dataset
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Event, delay_actions
from roostream.replay.log_profile import LogProfile
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, all_partitions
from roostream.schema.schema import Registry, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

_AS_SERVED_HEARTBEAT_MS = 30_000  # short, because with `as_served` the time of each close matters


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayLog:
    """The records of a log, which can be read once. `skipped` and `profile` are complete after the last
    record."""

    records: Iterator[Record]
    num_requests: int  # 0 = unknown
    skipped: Callable[[], Skipped]
    profile: LogProfile
    registry: Registry | None = None  # of the schemas that wrote samples in `records`; None = no other schema


def open_log(config: ReplayConfig, schema: Schema) -> ReplayLog:
    """Check the format of the files, apply earlier clicks to the counters, and return the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema cannot be used; the message names file and column.
        While the stream is read: LogError for a bad line, WireError for features that do not fit the schema,
        and at the end ConfigError if the log was empty.
    """
    source = load_dataset(config.dataset).open(config.options, schema, config.window_ms)
    profile, freeze_at_ms = LogProfile(schema), config.freeze_counters_at_ms
    encoder = ReplayEncoder(
        schema, label_delay_ms=config.label_delay_ms, freeze_at_ms=freeze_at_ms, profile=profile
    )
    events = source.events
    if config.engagement_delay_ms:
        events = delay_actions(events, config.engagement_delay_ms, config.window_ms)
    if source.unlogged_clicks is not None:
        events = _apply_unlogged_clicks(events, encoder, source.unlogged_clicks)
    beat_ms = _AS_SERVED_HEARTBEAT_MS if config.as_served else HEARTBEAT_MS
    stream = records(events, encoder, settle_ms=settle_ms(config), heartbeat_ms=beat_ms, refuse=source.refuse)
    return ReplayLog(
        records=_not_empty(stream, profile),
        num_requests=source.num_requests,
        skipped=source.skipped,
        profile=profile,
    )


def _apply_unlogged_clicks(
    events: Iterator[Event], encoder: ReplayEncoder, clicks: Clicks
) -> Iterator[Event]:
    """Apply the clicks that precede the first event at once; the encoder applies the others in time."""
    first = next(events, None)
    if first is None:
        return
    counts_ms_N = clicks.time_ms_N + encoder.label_delay_ms
    known = int(np.searchsorted(counts_ms_N, first.time_ms, side="right"))
    if encoder.freeze_at_ms:
        known = min(known, int(np.searchsorted(counts_ms_N, encoder.freeze_at_ms)))
    seed(encoder.counters, *(column[:known] for column in clicks))
    encoder.add_unlogged_clicks(Clicks(*(column[known:] for column in clicks)))
    if encoder.profile is not None:
        encoder.profile.num_unlogged_clicks = (known, len(clicks.time_ms_N) - known)
    yield from itertools.chain((first,), events)


def _not_empty(stream: Iterator[Record], profile: LogProfile) -> Iterator[Record]:
    yield from stream
    if not profile.num_impressions:
        raise ConfigError("expected at least one usable impression in the log, got none; check its files")


def with_first_record(stream: Iterator[Record]) -> Iterator[Record]:
    """Read the first record now, so that an empty or unreadable log fails before a stack is started. Raises
    as the stream."""
    return itertools.chain((next(stream),), stream)


def settle_ms(config: ReplayConfig) -> int:
    """Time from the last event to the end marker: the late horizon of the joiner plus its lateness. Then all
    state is closed."""
    return 10 * config.window_ms + config.lateness_ms + 1000


# Event time between heartbeats; bounds the open requests of a partition without events
HEARTBEAT_MS = 300_000
_PRODUCER = "replay"


def records(
    events: Iterable[Event],
    encoder: ReplayEncoder,
    *,
    settle_ms: int,
    heartbeat_ms: int = HEARTBEAT_MS,
    refuse: Callable[[Event, WireError], None] | None = None,
) -> Iterator[Record]:
    """Encode events, which must be in time order, and add heartbeats and end markers.

    Each partition gets a heartbeat every `heartbeat_ms` of event time, and at the end one EndMarker at the
    last time + `settle_ms`. An event that does not fit the schema is skipped if `refuse` returns.

    Raises:
        WireError: an event does not fit the schema and there is no `refuse`; names the request.
        AssertionError: events are not in time order.
    """
    beat_ms = last_ms = 0
    for event in events:
        assert event.time_ms >= last_ms, "events go back in time"
        last_ms = event.time_ms
        if last_ms >= beat_ms:
            if beat_ms:
                beat = pb.Heartbeat(time_ms=last_ms, producer=_PRODUCER)
                yield from _on_every_partition(wire.HEARTBEAT, beat)
            beat_ms = last_ms + heartbeat_ms
        try:
            yield encoder.record(event)
        except WireError as error:
            if refuse is None:
                raise WireError(error.reason, f"request {event.request_id!r}: {error}") from None
            refuse(event, error)
    if last_ms:
        end = pb.EndMarker(time_ms=last_ms + settle_ms)
        yield from _on_every_partition(wire.END_MARKER, end)


def _on_every_partition(kind: int, message: pb.Heartbeat | pb.EndMarker) -> Iterator[Record]:
    """The message on every partition of both topics, with the partition's number as key."""
    value = wire.encode(kind, message)
    for topic, partition in all_partitions(EVENTS, DEFAULT_PARTITIONS):
        yield Record(topic, partition, -1, message.time_ms, partition.to_bytes(8, "little"), value)


def paced(
    stream: Iterable[Record], factor: float, clock: Clock, stop: threading.Event | None = None
) -> Iterator[Record]:
    """Delay records so that event time advances `factor` times as fast as wall time; 0 = no delay.

    End markers are not delayed. The stream ends early when `stop` is set.
    """
    start_s, first_ms = clock.monotonic_s(), 0
    for record in stream:
        first_ms = first_ms or record.timestamp_ms
        if factor and wire.kind_of(record.value) != wire.END_MARKER:
            ahead_s = (record.timestamp_ms - first_ms) / 1000 / factor - (clock.monotonic_s() - start_s)
            if ahead_s > 0:
                clock.sleep(ahead_s, stop)
        if stop is not None and stop.is_set():
            return
        yield record

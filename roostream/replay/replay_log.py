"""A log and its settings as one stream of records: which reader, which features, which end."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from google.protobuf.message import Message

from roostream.errors import ConfigError, WireError
from roostream.online.counter_seed import seed
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import Clicks, Skipped, load_dataset
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Event, delay_actions
from roostream.replay.log_profile import LogProfile
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import EVENTS, all_partitions
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

_OFTEN_MS = 30_000  # between heartbeats where it matters when a request closes; servers beat more often still


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayLog:
    """`records` once, in the order of one producer; `skipped` is whole when it has ended."""

    records: Iterator[Record]
    num_requests: int  # 0 = not known beforehand
    skipped: Callable[[], Skipped]  # events left out so far
    profile: LogProfile  # of what has been read


def open_log(config: ReplayConfig, schema: Schema) -> ReplayLog:
    """Checks the files' form, counts what lies before the log, and gives the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema can't be used; names file and column. While the stream is read, LogError
            for a bad line, WireError for features that don't fit the schema, and at its end ConfigError if nothing was in it.
    """
    source = load_dataset(config.dataset).open(config.options, schema, config.window_ms)
    profile = LogProfile(schema)
    edge = ReplayEncoder(
        schema,
        label_delay_ms=config.label_delay_ms,
        freeze_at_ms=config.freeze_counters_at_ms,
        profile=profile,
    )
    events = (
        delay_actions(source.events, config.engagement_delay_ms, config.window_ms)
        if config.engagement_delay_ms
        else source.events
    )
    if source.unlogged_clicks is not None:
        events = _counted(events, edge, source.unlogged_clicks)
    beat_ms = _OFTEN_MS if config.as_served else HEARTBEAT_MS
    stream = records(events, edge, settle_ms=settle_ms(config), heartbeat_ms=beat_ms, refuse=source.refuse)
    return ReplayLog(
        records=_not_empty(stream, profile),
        num_requests=source.num_requests,
        skipped=source.skipped,
        profile=profile,
    )


def _counted(events: Iterator[Event], edge: ReplayEncoder, clicks: Clicks) -> Iterator[Event]:
    """The events, before whose first the clicks that are known by then are counted at once; the others wait at the edge."""
    first = next(events, None)
    if first is None:
        return
    known = int(np.searchsorted(clicks.time_ms_N + edge.label_delay_ms, first.time_ms, side="right"))
    if edge.freeze_at_ms:
        known = min(known, int(np.searchsorted(clicks.time_ms_N + edge.label_delay_ms, edge.freeze_at_ms)))
    seed(edge.counters, *(column[:known] for column in clicks))
    edge.add_unlogged_clicks(Clicks(*(column[known:] for column in clicks)))
    if edge.profile is not None:
        edge.profile.num_unlogged_clicks = (known, len(clicks.time_ms_N) - known)
    yield from itertools.chain((first,), events)


def _not_empty(stream: Iterator[Record], profile: LogProfile) -> Iterator[Record]:
    yield from stream
    if not profile.num_impressions:
        raise ConfigError(
            "the log has no impression that can be used, so nothing can be learned from it; check its files"
        )


def with_first_record(stream: Iterator[Record]) -> Iterator[Record]:
    """The stream, once its first record is there: a log of nothing, and one that is wrong from the start, is told before
    anything is started for it. Raises as the stream."""
    return itertools.chain((next(stream),), stream)


def settle_ms(config: ReplayConfig) -> int:
    """From the last event to the end marker: beyond it nothing is open, waiting or remembered (delay_actions horizon + bound)."""
    return 10 * config.window_ms + config.lateness_ms + 1000


HEARTBEAT_MS = (
    300_000  # event time between heartbeats: bounds what the joiner holds open for a quiet partition
)
_PRODUCER = "replay"


def records(
    events: Iterable[Event],
    edge: ReplayEncoder,
    *,
    settle_ms: int,
    heartbeat_ms: int = HEARTBEAT_MS,
    refuse: Callable[[Event, WireError], None] | None = None,
) -> Iterator[Record]:
    """Every event's record; every `heartbeat_ms` of event time a heartbeat a partition; at the end one EndMarker a
    partition at last time + `settle_ms` (the joiner's delay_actions horizon and bound: everything is closed and forgotten by then).

    Events come in time order (AssertionError otherwise), so a heartbeat promises only what has been written.

    An event that doesn't fit the schema is left out once `refuse` has returned.

    Raises:
        WireError: the same without `refuse`; says which request.
    """
    beat_ms = last_ms = 0
    for event in events:
        assert event.time_ms >= last_ms, "events go back in time"
        last_ms = event.time_ms
        if last_ms >= beat_ms:
            if beat_ms:
                yield from _everywhere(
                    wire.HEARTBEAT,
                    pb.Heartbeat(time_ms=last_ms, producer=_PRODUCER),
                    last_ms,
                    edge.num_partitions,
                )
            beat_ms = last_ms + heartbeat_ms
        try:
            yield edge.record(event)
        except WireError as error:
            if refuse is None:
                raise WireError(error.reason, f"request {event.request_id!r}: {error}") from None
            refuse(event, error)
    if last_ms:
        yield from _everywhere(
            wire.END_MARKER,
            pb.EndMarker(time_ms=last_ms + settle_ms),
            last_ms + settle_ms,
            edge.num_partitions,
        )


def _everywhere(kind: int, message: Message, time_ms: int, num_partitions: int) -> Iterator[Record]:
    """The message on every partition of both topics; its key is the partition's number."""
    value = wire.encode(kind, message)
    for topic, partition in all_partitions(EVENTS, num_partitions):
        yield Record(topic, partition, -1, time_ms, partition.to_bytes(8, "little"), value)


def paced(
    stream: Iterable[Record], factor: float, clock: Clock, stop: threading.Event | None = None
) -> Iterator[Record]:
    """Hold each record until `factor` x the wall time since the first has reached its event time; 0 = don't. End markers
    aren't held: nothing is left to wait for. Ends early when `stop` is set."""
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

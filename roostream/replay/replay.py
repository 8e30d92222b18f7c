"""The replay driver: a log's events as the records of the two event topics, with heartbeats and end markers.

Pure: a stream in, a stream out, in the order in which one producer writes them. Who consumes it decides where they go
(`roostream.cli.replay`: Kafka, or the local engine).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from google.protobuf.message import Message

from roostream.errors import WireError
from roostream.replay.edge import Edge
from roostream.replay.events import Event
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import EVENTS, all_partitions
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

HEARTBEAT_MS = (
    300_000  # event time between heartbeats: bounds what the joiner holds open for a quiet partition
)
_PRODUCER = "replay"


def records(
    events: Iterable[Event],
    edge: Edge,
    *,
    settle_ms: int,
    heartbeat_ms: int = HEARTBEAT_MS,
    refuse: Callable[[Event, WireError], None] | None = None,
) -> Iterator[Record]:
    """Every event's record; every `heartbeat_ms` of event time a heartbeat a partition; at the end one EndMarker a
    partition at last time + `settle_ms` (the joiner's late horizon and bound: everything is closed and forgotten by then).

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

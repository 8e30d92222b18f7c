"""Encode the events of a log as the records that serving would have produced, including online features.

The counters are those of `roostream.online`, as in the feature updater. A request at time T sees exactly the
requests with time ≤ T and the engagements with time + label delay ≤ T, including clicks given to
`add_unlogged_clicks`. Requests have no delay, because serving knows what it has shown. Memory: the counters,
and the engagements whose delay is not over.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from roostream.errors import WireError
from roostream.online.counters import Counters, sources_of, stateless_features, with_online
from roostream.online.entity_fields import EntityFields, FieldReader
from roostream.online.seen_events import engagement_id, list_id
from roostream.replay.datasets import Clicks
from roostream.replay.events import Action, Event, Request
from roostream.replay.log_profile import LogProfile
from roostream.runtime.kafka.partitioner import partition_of
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, ENGAGEMENTS, IMPRESSIONS
from roostream.schema.ids import key_bytes, unsigned
from roostream.schema.limits import MAX_MESSAGE_BYTES, RECORD_OVERHEAD_BYTES
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import Side, encode_nro, encode_ro
from roostream.wire.records import Record

_MAX_EVENT_BYTES = MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES


class ReplayEncoder:
    """Encodes events, which must come in time order. Not thread-safe."""

    def __init__(
        self,
        schema: Schema,
        *,
        label_delay_ms: int = 0,
        freeze_at_ms: int = 0,
        profile: LogProfile | None = None,
    ) -> None:
        """`label_delay_ms`: an engagement enters the counters this long after its time. `freeze_at_ms`:
        events from this time on change no counters; 0 = never. `profile` is updated with every event."""
        self.schema = schema
        self.label_delay_ms, self.freeze_at_ms = label_delay_ms, freeze_at_ms
        self.counters, self._reader = Counters(schema), FieldReader(schema)
        self.profile = profile
        sides: tuple[Side, ...] = ("ro", "nro")
        self._sources = {side: sources_of(schema, side) for side in sides}
        self._delayed: list[tuple[int, int, Event]] = []  # heap of (due_ms, order of arrival, event)
        self._arrival = 0
        self._unlogged: Iterator[Action] = iter(())
        self._next_unlogged: Action | None = None

    def add_unlogged_clicks(self, clicks: Clicks) -> None:
        """Apply these clicks to the counters, each at its time plus the delay. They replace clicks given
        earlier."""
        columns = (column.tolist() for column in clicks)
        name = self.schema.online.click
        self._unlogged = (
            Action("", user, 0, at_ms, 0, item, name, 1.0) for user, item, at_ms in zip(*columns, strict=True)
        )
        self._next_unlogged = next(self._unlogged, None)

    def record(self, event: Event) -> Record:
        """Encode one event; the offset of its record is -1. Raises WireError: features do not fit the
        schema, or no Kafka message can hold the record."""
        value = self._impression(event) if isinstance(event, Request) else self._engagement(event)
        self._arrival += 1
        due_ms = event.time_ms + (0 if isinstance(event, Request) else self.label_delay_ms)
        if not self.freeze_at_ms or due_ms < self.freeze_at_ms:
            heapq.heappush(self._delayed, (due_ms, self._arrival, event))
        topic = IMPRESSIONS if isinstance(event, Request) else ENGAGEMENTS
        key = key_bytes(event.user_id, event.session_id, event.request_id)
        return Record(topic, partition_of(key, DEFAULT_PARTITIONS), -1, event.time_ms, key, value)

    def _impression(self, request: Request) -> bytes:
        """The impression that serving would have logged at the time of the request."""
        self._apply_until(request.time_ms)
        num_rows = len(request.items_n)
        ro, nro = self.counters.read(request.user_id, request.items_n, request.time_ms, self._fields(request))
        fixed_ro, fixed_nro = stateless_features(request.user_id, request.items_n, request.time_ms)
        message = pb.Impression(
            header=self._header(request),
            item_ids=request.items_n.view(np.uint64).tolist(),
            nro=encode_nro(self.schema, self._with_online("nro", request.nro, nro | fixed_nro), num_rows),
            positions=request.positions or range(num_rows),
            propensities=request.propensities,
            weight=request.weight,
        )
        if request.ro is not None:
            message.ro = encode_ro(self.schema, self._with_online("ro", request.ro, ro | fixed_ro))
        record = _encode(wire.IMPRESSION, message)
        if self.profile is not None:
            self.profile.add(request, message.ro if request.ro is not None else None, message.nro)
        return record

    def _engagement(self, action: Action) -> bytes:
        """The engagement that a client would have sent."""
        message = pb.Engagement(
            header=self._header(action),
            event_id=unsigned(action.event_id),
            item_id=unsigned(action.item_id),
            action=action.action,
            value=action.value,
        )
        record = _encode(wire.ENGAGEMENT, message)
        if self.profile is not None:
            self.profile.add(action)
        return record

    def _fields(self, event: Event) -> EntityFields:
        """The fields by which counters aggregate, beside user, items and time."""
        if isinstance(event, Request):
            return self._reader.from_values(_header_values(event), event.ro, event.nro, len(event.items_n))
        return self._reader.from_header(_header_values(event))

    def _header(self, event: Event) -> pb.Header:
        return pb.Header(
            request_id=event.request_id,
            user_id=unsigned(event.user_id),
            session_id=unsigned(event.session_id),
            surface=event.surface,
            time_ms=event.time_ms,
            schema=self.schema.fingerprint,
        )

    def _with_online(self, side: Side, given: Mapping[str, Any], online: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the log, with missing ones filled in as serving does it."""
        return with_online(side, self._sources[side], given, online)

    def _apply_until(self, time_ms: int) -> None:
        """Apply the events whose delay is over at `time_ms`, in time order, but none after the freeze."""
        if self.freeze_at_ms:
            time_ms = min(time_ms, self.freeze_at_ms - 1)
        while (event := self._next_until(time_ms)) is not None:
            if isinstance(event, Request):
                event_id = list_id(_header_values(event), event.items_n, event.ro is not None)
                self.counters.apply_impression(
                    event.user_id, event.items_n, event.time_ms, self._fields(event), event_id
                )
            else:
                event_id = engagement_id(_header_values(event), event.event_id)
                self.counters.apply_engagement(
                    event.user_id,
                    event.item_id,
                    event.action,
                    event.value,
                    event.time_ms,
                    self._fields(event),
                    event_id,
                )

    def _next_until(self, time_ms: int) -> Event | None:
        """Remove and return the next event that is due by `time_ms`. At equal times, unlogged clicks come
        before events of the log."""
        due_ms = self._delayed[0][0] if self._delayed else math.inf
        click = self._next_unlogged
        if click is not None and click.time_ms + self.label_delay_ms <= min(due_ms, time_ms):
            self._next_unlogged = next(self._unlogged, None)
            return click
        return heapq.heappop(self._delayed)[2] if due_ms <= time_ms else None


def _encode(kind: int, message: pb.Impression | pb.Engagement) -> bytes:
    """The record of an event. Raises WireError: no Kafka message can hold it."""
    record = wire.encode(kind, message)
    if len(record) > _MAX_EVENT_BYTES:
        text = (
            f"expected an event that fits into a Kafka message, {_MAX_EVENT_BYTES} bytes, got {len(record)}"
        )
        raise WireError("oversized", text)
    return record


def _header_values(event: Event) -> tuple[int, int, str, str]:
    """User, session, surface and request id, as the counters take them."""
    return event.user_id, event.session_id, event.surface, event.request_id

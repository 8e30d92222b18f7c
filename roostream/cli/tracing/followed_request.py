"""A request on its way through the loop, as those see it who read its topics. Pure: records in, steps out.

    asked ─► logged (impressions) ─► joined (samples) ─► trained (predictions) ─► published (rows)

A step is reached when its record can be read. Published is the first delta behind the join that has a row of this request and
whose rows have seen closes as old as its own: what was learned from it, or with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from roostream.errors import WireError
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

STEPS = ("logged", "joined", "trained", "published")

RowKeys = frozenset[tuple[int, int]]
"""(table's id, key) of rows."""


class Waypoint(NamedTuple):
    name: str  # of STEPS
    reached_ms: int  # when its record was read
    topic: str
    partition: int
    offset: int
    details: dict[str, Any]


class FollowedRequest:
    """`add` what is read of the four topics, in any order of partitions; `steps` are those that it has come through."""

    def __init__(self, request_id: str, keys_of: Callable[[Record], RowKeys]) -> None:
        """`keys_of`: a sample's record → the rows that training on it changes."""
        self.request_id, self._keys_of = request_id, keys_of
        self.steps: dict[str, Waypoint] = {}
        self.traceparent = ""  # of the span that it was scored in, as its impression has it
        self._sample: pb.Sample | None = None
        self._keys: RowKeys = frozenset()
        self._published: Waypoint | None = None  # waits for the word of the worker

    @property
    def is_done(self) -> bool:
        return len(self.steps) == len(STEPS)

    def add(self, record: Record, now_ms: int) -> None:
        """What can't be read is not this request's."""
        try:
            kind, message = wire.decode(record.value)
        except WireError:
            return
        if isinstance(message, pb.Impression) and message.header.request_id == self.request_id:
            self.traceparent = self.traceparent or message.header.traceparent
            about = _traced(message.header)
            self._reached(
                "logged",
                record,
                now_ms,
                version=message.header.model_version,
                candidates=len(message.item_ids),
                **about,
            )
        elif (
            kind == wire.SAMPLE
            and isinstance(message, pb.Sample)
            and message.header.request_id == self.request_id
        ):
            self._joined(record, message, now_ms)
        elif (
            isinstance(message, pb.Prediction)
            and self._sample
            and message.sample_id == self._sample.sample_id
        ):
            self._reached(
                "trained", record, now_ms, step=message.step, became=pb.Disposition.Name(message.disposition)
            )
        elif isinstance(message, pb.RowDelta) and self._sample:
            self._changed(record, message, self._sample, now_ms)
        if self._published and "trained" in self.steps:
            self.steps.setdefault("published", self._published)

    def _joined(self, record: Record, sample: pb.Sample, now_ms: int) -> None:
        if self._sample is None:
            self._sample, self._keys = sample, self._keys_of(record)
            reason = pb.CloseReason.Name(sample.close_reason)
            self._reached(
                "joined",
                record,
                now_ms,
                closed_by=reason,
                engagements=len(sample.event_ids),
                **_traced(sample.header),
            )

    def _changed(self, record: Record, delta: pb.RowDelta, sample: pb.Sample, now_ms: int) -> None:
        has_seen = 0 < delta.oldest_close_ms <= sample.close_ms
        live = list(delta.ids)[: len(delta.ids) - delta.num_tombstones]
        if (
            self._published is None
            and has_seen
            and not self._keys.isdisjoint((delta.table_id, key) for key in live)
        ):
            about = {"bucket": delta.bucket, "incarnation": delta.incarnation, "sequence": delta.sequence}
            self._published = Waypoint(
                "published", now_ms, record.topic, record.partition, record.offset, about
            )

    def _reached(self, name: str, record: Record, now_ms: int, **details: Any) -> None:
        self.steps.setdefault(
            name, Waypoint(name, now_ms, record.topic, record.partition, record.offset, details)
        )


def _traced(header: pb.Header) -> dict[str, str]:
    return {"traceparent": header.traceparent} if header.traceparent else {}

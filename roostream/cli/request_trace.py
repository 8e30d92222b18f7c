"""The steps of one request through the topics, for `roostream trace`. Pure: records in, steps out.

    logged (impressions) ─► joined (samples) ─► trained (predictions) ─► published (rows)

A step is reached when its record can be read. "Published" is the first row delta after the join that holds a
row of this request and whose `oldest_close_ms` is not later than the request's close.
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
"""(table id, row id) of embedding rows."""


class Step(NamedTuple):
    """One step that the request has reached."""

    name: str  # one of STEPS
    reached_ms: int  # when its record was read
    topic: str
    partition: int
    offset: int
    details: dict[str, Any]


class RequestTrace:
    """Call `add` with the records of the four topics, in the order of each partition; `steps` has those that
    were reached."""

    def __init__(self, request_id: str, row_keys: Callable[[Record], RowKeys]) -> None:
        """`row_keys`: the record of a sample → the rows that training on it changes."""
        self.request_id, self._row_keys = request_id, row_keys
        self.steps: dict[str, Step] = {}
        self.traceparent = ""  # of the span in which serving scored the request, from its impression
        self._sample: pb.Sample | None = None
        self._keys: RowKeys = frozenset()
        self._published: Step | None = None  # becomes a step after "trained"

    @property
    def is_complete(self) -> bool:
        return len(self.steps) == len(STEPS)

    def add(self, record: Record, now_ms: int) -> None:
        """Use one record; records that cannot be decoded are ignored."""
        try:
            kind, message = wire.decode(record.value)
        except WireError:
            return
        sample = self._sample
        if isinstance(message, pb.Impression) and message.header.request_id == self.request_id:
            header = message.header
            self.traceparent = self.traceparent or header.traceparent
            details = {
                "version": header.model_version,
                "candidates": len(message.item_ids),
                **_trace_of(header),
            }
            self._reach("logged", record, now_ms, details)
        elif isinstance(message, pb.Sample):
            is_sample = kind == wire.SAMPLE and message.header.request_id == self.request_id
            if is_sample and sample is None:
                self._sample, self._keys = message, self._row_keys(record)
                details = {
                    "closed_by": pb.CloseReason.Name(message.close_reason),
                    "engagements": len(message.event_ids),
                    **_trace_of(message.header),
                }
                self._reach("joined", record, now_ms, details)
        elif isinstance(message, pb.Prediction) and sample and message.sample_id == sample.sample_id:
            details = {"step": message.step, "became": pb.Disposition.Name(message.disposition)}
            self._reach("trained", record, now_ms, details)
        elif isinstance(message, pb.RowDelta) and sample and self._published is None:
            ids = list(message.ids)[: len(message.ids) - message.num_tombstones]
            includes_request = 0 < message.oldest_close_ms <= sample.close_ms
            if includes_request and not self._keys.isdisjoint((message.table_id, id_) for id_ in ids):
                details = {
                    "bucket": message.bucket,
                    "incarnation": message.incarnation,
                    "sequence": message.sequence,
                }
                self._published = _step("published", record, now_ms, details)
        if self._published and "trained" in self.steps:
            self.steps.setdefault("published", self._published)

    def _reach(self, name: str, record: Record, now_ms: int, details: dict[str, Any]) -> None:
        self.steps.setdefault(name, _step(name, record, now_ms, details))


def _step(name: str, record: Record, now_ms: int, details: dict[str, Any]) -> Step:
    return Step(name, now_ms, record.topic, record.partition, record.offset, details)


def _trace_of(header: pb.Header) -> dict[str, str]:
    return {"traceparent": header.traceparent} if header.traceparent else {}

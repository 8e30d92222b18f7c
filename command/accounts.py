"""G1 and G2 as sums over the topics themselves. Pure: records in, numbers out; `command.auditor` reads them from Kafka.

    distinct engagements = folded + corrected + dead-lettered + pending       the other engagement records are duplicates
    distinct requests    = sampled + only dead-lettered + pending

An id counts once: the first sample of a sample id; an event id as folded before corrected before dead-lettered. Topics may
be read in any order relative to each other, so an outcome can be seen before its event: it waits as `unknown`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import xxhash

from roo import roo_pb2 as pb
from roo import wire
from roo.errors import WireError
from roo.ids import MASK64, key_bytes, sample_id
from roo.wire import Record
from runtime.kafka.topics import ENGAGEMENTS, IMPRESSIONS, SAMPLES

Place: TypeAlias = tuple[str, int, int]
"""Topic without prefix, partition, offset."""

SEEN, PREDICTED = 1, 2  # marks that settle nothing
FOLDED, CORRECTED, DEAD, SAMPLED = 4, 8, 16, 32  # outcomes
_MOST_DEAD = 100_000  # dead letters that are told apart from their re-emissions


class Ledger:
    """What has been seen of each id, and which outcome counts. Settled ids are forgotten between one and two `horizon_ms` of
    event time after their last mark (0 = never); the counts stay."""

    def __init__(self, outcomes: tuple[int, ...], horizon_ms: int = 0) -> None:
        self.outcomes, self.horizon_ms = outcomes, horizon_ms
        self.counts: Counter[int] = Counter()  # outcome → ids seen that it counts for
        self.pending: dict[int, int] = {}  # seen, without an outcome: id → event time
        self.unknown: dict[int, int] = {}  # an outcome, not seen: id → event time
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._turned_ms = 0

    def mark(self, id_: int, bit: int, time_ms: int) -> bool:
        """Whether the mark is new."""
        before = self.bits(id_)
        after = before | bit
        self._young[id_] = after
        if after == before:
            return False
        self._recount(id_, before, after, time_ms)
        self._turn(time_ms)
        return True

    def bits(self, id_: int) -> int:
        return self._young.get(id_) or self._old.get(id_, 0)

    def _recount(self, id_: int, before: int, after: int, time_ms: int) -> None:
        old, new = self._outcome(before), self._outcome(after)
        if before & SEEN:
            self.counts[old] -= old > 0
        if after & SEEN:
            self.counts[new] += new > 0
        for waiting, belongs in ((self.pending, after & SEEN and not new), (self.unknown, new and not after & SEEN)):
            if belongs:
                waiting.setdefault(id_, time_ms)
            else:
                waiting.pop(id_, None)

    def _outcome(self, bits: int) -> int:
        return next((o for o in self.outcomes if bits & o), 0)

    def _turn(self, time_ms: int) -> None:
        self._turned_ms = self._turned_ms or time_ms
        if self.horizon_ms and time_ms - self._turned_ms >= self.horizon_ms:
            kept = {i: bits for i, bits in self._old.items() if i in self.pending or i in self.unknown}
            self._old, self._young, self._turned_ms = self._young, kept, time_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Both sums of G1, and G2's count. `accounted`: both hold, and nothing waits longer than it may."""

    requests: int
    candidates: int
    engagements: int
    actions: dict[str, int]
    samples: int
    closed_by: dict[str, int]
    folded: int
    corrected: int
    corrections: int
    dead_engagements: int
    dead_requests: int
    dead_letters: dict[str, int]
    duplicates: int
    pending: int
    pending_requests: int
    unread: int
    unknown: int
    overdue: int
    predicted: int
    accounted: bool

    def counts(self) -> dict[str, object]:
        """`counts` of a report (docs/protocols.md, Reports)."""
        values = dataclasses.asdict(self)
        del values["accounted"]
        return values


class Accounts:
    """Feed every record of impressions, engagements, samples, corrections, dead_letters and predictions, each partition in
    its order. Records are told apart by their type byte. Not thread-safe."""

    def __init__(self, *, prefix: str = "", settle_ms: int = 600_000, horizon_ms: int = 0) -> None:
        """`settle_ms`: how far the joiner's closes may be past an event that still waits (window + orphan timeout + slack).
        `prefix`: the stack's, in front of the topics that dead letters name."""
        self.prefix, self.settle_ms = prefix, settle_ms
        self.events = Ledger((FOLDED, CORRECTED, DEAD), horizon_ms)
        self.requests = Ledger((SAMPLED, DEAD), horizon_ms)
        self.untrained: dict[int, tuple[int, int]] = {}  # sample id → (partition, offset) of its first sample
        self.closed_until_ms = 0
        self.num_records: Counter[str] = Counter()  # topic → records read, whatever they were
        self.sample_ends: dict[int, int] = {}  # partition of the samples → offset after the newest one read
        self.features_digest = 0  # the same for the same samples in any order
        self._count: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._closed_by: Counter[str] = Counter()
        self._dead_letters: Counter[str] = Counter()
        self._dead_at: dict[Place, None] = {}
        self._bad_at: dict[Place, int] = {}  # inputs that can't be read, without a dead letter so far: event time
        self._request_at: dict[Place, int] = {}  # impressions of pending requests
        self._places_of: dict[int, list[Place]] = {}

    def add(self, record: Record) -> None:
        """Heartbeats and end markers pass through; an input that can't be read waits for its dead letter."""
        place = (record.topic, record.partition, record.offset)
        self.num_records[record.topic] += 1
        try:
            kind, message = wire.decode(record.value)
        except WireError:
            if record.topic in (IMPRESSIONS, ENGAGEMENTS) and place not in self._dead_at:
                self._bad_at[place] = record.timestamp_ms
            return
        match message:
            case pb.Impression():
                self._impression(message, record, place)
            case pb.Engagement():
                self._engagement(message, place)
            case pb.Sample() if kind == wire.CORRECTION:
                self._correction(message)
            case pb.Sample():
                self._sample(message, record)
            case pb.DeadLetter():
                self._dead_letter(message, record.timestamp_ms)
            case pb.Prediction():
                self._count["predicted"] += self.requests.mark(message.sample_id, PREDICTED, message.time_ms)
                self.untrained.pop(message.sample_id, None)

    @property
    def unread(self) -> int:
        """Inputs that can't be read and have no dead letter so far."""
        return len(self._bad_at)

    def untrained_below(self, offsets: Mapping[int, int]) -> int:
        """G2: samples before the given offsets of their partitions (a manifest's) that nothing has predicted; should be 0."""
        return sum(offset < offsets.get(partition, 0) for partition, offset in self.untrained.values())

    def _impression(self, message: pb.Impression, record: Record, place: Place) -> None:
        key = record.key or key_bytes(message.header.user_id, message.header.session_id, message.header.request_id)
        id_ = sample_id(key, message.header.request_id)
        self._count["requests"] += self.requests.mark(id_, SEEN, message.header.time_ms)
        if place in self._dead_at:
            self.requests.mark(id_, DEAD, message.header.time_ms)
        elif id_ in self.requests.pending:
            self._request_at[place] = id_
            self._places_of.setdefault(id_, []).append(place)

    def _engagement(self, message: pb.Engagement, place: Place) -> None:
        new = self.events.mark(message.event_id, SEEN, message.header.time_ms)
        self._count["engagements" if new else "duplicates"] += 1
        self._actions[message.action] += new
        if place in self._dead_at:
            self.events.mark(message.event_id, DEAD, message.header.time_ms)

    def _sample(self, message: pb.Sample, record: Record) -> None:
        id_ = message.sample_id
        self.sample_ends[record.partition] = record.offset + 1
        self.closed_until_ms = max(self.closed_until_ms, message.close_ms)
        if not self.requests.mark(id_, SAMPLED, message.header.time_ms):
            return
        for place in self._places_of.pop(id_, ()):
            del self._request_at[place]
        if not self.requests.bits(id_) & PREDICTED:
            self.untrained[id_] = (record.partition, record.offset)
        for event_id, time_ms in zip(message.event_ids, message.event_times, strict=True):
            self.events.mark(event_id, FOLDED, time_ms)
        self._count["samples"] += 1
        self._count["candidates"] += len(message.item_ids)
        self._closed_by[pb.CloseReason.Name(message.close_reason).removeprefix("CLOSE_").lower()] += 1
        self.features_digest = (self.features_digest + features_hash(message)) & MASK64

    def _correction(self, message: pb.Sample) -> None:
        new = [self.events.mark(e, CORRECTED, t) for e, t in zip(message.event_ids, message.event_times, strict=True)]
        self._count["corrections"] += any(new)

    def _dead_letter(self, message: pb.DeadLetter, time_ms: int) -> None:
        place = (message.topic.removeprefix(self.prefix), message.partition, message.offset)
        if place in self._dead_at:
            return
        self._dead_at[place] = None
        if len(self._dead_at) > _MOST_DEAD:
            del self._dead_at[next(iter(self._dead_at))]
        self._dead_letters[message.reason] += 1
        self._bad_at.pop(place, None)
        if place in self._request_at:
            self.requests.mark(self._request_at[place], DEAD, time_ms)
        if place[0] == SAMPLES:
            self.untrained = {id_: at for id_, at in self.untrained.items() if at != place[1:]}
        elif event_id := message.event_id or _event_id(message.raw):
            self.events.mark(event_id, DEAD, time_ms)

    def sums(self, *, ended: bool = False) -> Sums:
        """`ended`: the input is over and closed, so nothing may be pending."""
        limit_ms = (1 << 62) if ended else self.closed_until_ms - self.settle_ms
        waiting = (self.events.pending, self.requests.pending, self.events.unknown, self.requests.unknown, self._bad_at)
        overdue = sum(time_ms < limit_ms for times in waiting for time_ms in times.values())
        return Sums(
            requests=self._count["requests"],
            candidates=self._count["candidates"],
            engagements=self._count["engagements"],
            actions=dict(self._actions),
            samples=self._count["samples"],
            closed_by=dict(self._closed_by),
            folded=self.events.counts[FOLDED],
            corrected=self.events.counts[CORRECTED],
            corrections=self._count["corrections"],
            dead_engagements=self.events.counts[DEAD],
            dead_requests=self.requests.counts[DEAD],
            dead_letters=dict(self._dead_letters),
            duplicates=self._count["duplicates"],
            pending=len(self.events.pending),
            pending_requests=len(self.requests.pending),
            unread=self.unread,
            unknown=len(self.events.unknown) + len(self.requests.unknown),
            overdue=overdue,
            predicted=self._count["predicted"],
            accounted=overdue == 0,
        )


def features_hash(sample: pb.Sample) -> int:
    """xxh3-64 over sample id, items, RO bytes and parts: equal for equal features, byte for byte."""
    digest = xxhash.xxh3_64(sample.sample_id.to_bytes(8, "little"))
    digest.update(np.array(sample.item_ids, "<u8").tobytes())
    for block in (
        (b"\1" + sample.ro) if sample.HasField("ro") else b"\0",
        *(p.SerializeToString(deterministic=True) for p in sample.parts),
    ):
        digest.update(len(block).to_bytes(8, "little") + block)
    return digest.intdigest()


def _event_id(raw: bytes) -> int:
    """Of a dead-lettered engagement that the joiner did not name; 0 if it can't be read."""
    try:
        message = wire.decode(raw)[1]
    except WireError:
        return 0
    return message.event_id if isinstance(message, pb.Engagement) else 0

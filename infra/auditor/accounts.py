"""Checks guarantees G1 and G2 as sums over the records of the topics. No I/O; `infra.auditor.auditor` reads
the records from Kafka.

    distinct engagements = folded + corrected + only in a repeated sample + dead-lettered + pending
    distinct requests    = sampled + only dead-lettered + pending
    other engagement records are duplicates

An id counts once, for the first of these outcomes that it has. A dead letter settles the record at the Kafka
position that it names, even if the id of that record is unknown. The topics may be read in any relative
order: an outcome that is read before its event waits as `unknown`, and a dead letter read before its record
waits as a position. No record content raises an error.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from infra.auditor.ledger import CORRECTED, DEAD, FOLDED, NOWHERE, PREDICTED, REPEATED, SAMPLED, SEEN, Ledger
from infra.auditor.sums import Sums
from roostream.errors import WireError
from roostream.runtime.event_time import MedianEventTime
from roostream.runtime.kafka.partitioner import partition_of
from roostream.runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    ENGAGEMENTS,
    EVENTS,
    IMPRESSIONS,
    PREDICTIONS,
    SAMPLES,
    Partition,
)
from roostream.schema.ids import MASK64, key_bytes, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

At: TypeAlias = tuple[int, int]
"""Partition and offset of a sample."""

_EVENT_KINDS = (wire.IMPRESSION, wire.ENGAGEMENT, wire.HEARTBEAT, wire.END_MARKER)
_KINDS = {
    IMPRESSIONS: _EVENT_KINDS,
    ENGAGEMENTS: _EVENT_KINDS,
    SAMPLES: (wire.SAMPLE,),
    CORRECTIONS: (wire.CORRECTION,),
    DEAD_LETTERS: (wire.DEAD_LETTER,),
    PREDICTIONS: (wire.PREDICTION,),
}
_SETTLED = (IMPRESSIONS, ENGAGEMENTS, SAMPLES)  # topics whose bad records get dead letters
_PLACED = (*_SETTLED, CORRECTIONS)  # topics whose records dead letters may name
_MARKERS = (wire.HEARTBEAT, wire.END_MARKER)
_LEDGERS = ("events", "requests", "bad", "bad_samples", "dead")
_COUNTERS = (
    *("_count", "_actions", "_closed_by", "_dead_letters", "_untrained_by"),
    *("_unreadable", "num_records", "_dispositions", "_misplaced"),
)
_MAX_NAMES = 1000
_MAX_UNPREDICTED = 1_000_000
_OTHER = "other"
_MAX_BEFORE_ROTATION = 1024  # records after which the ledgers' sizes are checked


class Share(NamedTuple):
    """What one of `num_auditors` counts: partitions p with p mod `num_auditors` = `auditor`, and dead letters
    that name one of these. `num_auditors` divides the number of partitions, so that a key's partition is in
    the share that its hash names, also after partitions are added."""

    auditor: int = 0
    num_auditors: int = 1

    def has(self, partition: int) -> bool:
        return partition % self.num_auditors == self.auditor

    def has_key(self, key: bytes) -> bool:
        """Whether Kafka's partitioner puts this key in the share's partitions."""
        return self.num_auditors == 1 or partition_of(key, self.num_auditors) == self.auditor


ALL = Share()


class Accounts:
    """Call `add` with every record of the audited topics, each partition in order. Not thread-safe."""

    def __init__(
        self, *, settle_ms: int = 600_000, horizon_ms: int = 0, since_ms: int = 0, share: Share = ALL
    ) -> None:
        """`settle_ms`: how long an event may wait after the joiner's closes have passed it (window + orphan
        timeout + slack). `horizon_ms`: see Ledger; at least twice `settle_ms`, 0 = remember everything.
        `since_ms`: older records are not audited, because their counterparts may have been deleted. `share`:
        the records of `add` are those of its partitions, and all dead letters."""
        self.settle_ms, self.since_ms, self.share = settle_ms, since_ms, share
        self.events = Ledger((FOLDED, CORRECTED, REPEATED, DEAD), horizon_ms)
        self.requests = Ledger((SAMPLED, DEAD), horizon_ms)
        self.bad = Ledger((DEAD,), horizon_ms)  # undecodable inputs, by position
        self.bad_samples = Ledger((DEAD,), horizon_ms)
        self.dead = Ledger((), horizon_ms)  # positions that have a dead letter
        self._ledgers = tuple(self.ledgers.values())
        self.untrained: dict[int, At] = {}  # sample id → position of its first sample
        self.closed_until_ms = 0
        self.num_records: Counter[str] = Counter()  # topic → records read
        self.sample_ends: dict[int, int] = {}  # partition of `samples` → next offset
        self.features_digest = 0  # independent of the order of samples
        self._untrained_at: dict[At, int] = {}
        self._newest_ms: dict[Partition, int] = {}
        self._recent, self._reached_ms = MedianEventTime(), 0  # of all records, and their greatest median
        self._rotate_at_ms, self._num_since_rotation = 0, 0
        self._count: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._closed_by: Counter[str] = Counter()
        self._dead_letters: Counter[str] = Counter()
        self._untrained_by: Counter[str] = Counter()
        self._dispositions: Counter[str] = Counter()
        self._unreadable: Counter[str] = Counter()
        self._misplaced: Counter[str] = Counter()

    @property
    def ledgers(self) -> dict[str, Ledger]:
        return {n: getattr(self, n) for n in _LEDGERS}

    @property
    def counters(self) -> dict[str, Counter[str]]:
        return {n: getattr(self, n) for n in _COUNTERS}

    def add(self, record: Record) -> None:
        """Count a record. Heartbeats and end markers are ignored; an undecodable record waits for its dead
        letter."""
        self.num_records[record.topic] += 1
        now_ms = self._now_ms(record)
        self._rotate_ledgers()
        try:
            kind, message = wire.decode(record.value)
            if kind not in _KINDS[record.topic]:
                raise WireError("unknown_type", f"expected another type in {record.topic}, got type {kind}")
        except WireError:
            return self._bad(record, now_ms)
        match message:
            case pb.Impression():
                self._impression(message, record, now_ms)
            case pb.Engagement():
                self._engagement(message, record, now_ms)
            case pb.Sample() if kind == wire.CORRECTION:
                self._correction(message, now_ms)
            case pb.Sample():
                self._sample(message, record, now_ms)
            case pb.DeadLetter():
                self._dead_letter(message, now_ms)
            case pb.Prediction():
                self._prediction(message, now_ms)

    @property
    def unread(self) -> int:
        """Undecodable records without a dead letter so far."""
        return len(self.bad.pending) + len(self.bad_samples.pending)

    @property
    def num_waiting(self) -> int:
        """Inputs without an outcome so far."""
        return len(self.events.pending) + len(self.requests.pending) + len(self.bad.pending)

    def untrained_below(self, offsets: Mapping[int, int]) -> int:
        """G2: samples below these offsets (partition → offset of a manifest) that have no prediction; should
        be 0."""
        return sum(offset < offsets.get(partition, 0) for partition, offset in self.untrained.values())

    def _now_ms(self, record: Record) -> int:
        """The newest time of the record's partition so far. A record from far in the future has its own time
        and does not move the partition's."""
        time_ms, at = record.timestamp_ms, (record.topic, record.partition)
        self._recent.add((time_ms,))
        if time_ms > self._reached_ms and self._recent.is_full:  # else the median cannot grow
            self._reached_ms = max(self._reached_ms, self._recent.middle_ms)
        self._newest_ms[at] = newest_ms = min(max(self._newest_ms.get(at, 0), time_ms), self._latest_ms)
        return max(newest_ms, time_ms)

    @property
    def _latest_ms(self) -> int:
        """Later times are wrong: more than `settle_ms` ahead of the median of recent records."""
        return self._reached_ms + self.settle_ms if self._reached_ms else 1 << 62

    def _rotate_ledgers(self) -> None:
        """Let the ledgers forget ids that settled long ago: when one of them is due by event time, or after
        `_MAX_BEFORE_ROTATION` records."""
        self._num_since_rotation += 1
        if self._reached_ms >= self._rotate_at_ms or self._num_since_rotation >= _MAX_BEFORE_ROTATION:
            self._num_since_rotation = 0
            if self._reached_ms:
                self._rotate_at_ms = min(ledger.rotate(self._reached_ms) for ledger in self._ledgers)

    def _bad(self, record: Record, now_ms: int) -> None:
        """Malformed heartbeats and end markers contain no event: Flink drops them, the local engine writes
        dead letters."""
        if record.topic not in _SETTLED or (
            record.topic != SAMPLES and wire.kind_of(record.value) in _MARKERS
        ):
            self._unreadable[record.topic] += record.topic != DEAD_LETTERS or self.share.auditor == 0
        elif record.timestamp_ms >= self.since_ms:
            place = _place(record.topic, record.partition, record.offset)
            ledger = self.bad_samples if record.topic == SAMPLES else self.bad
            self._see(ledger, place, now_ms, place)

    def _see(self, ledger: Ledger, id_: int, now_ms: int, place: int) -> bool:
        new = ledger.mark(id_, SEEN, now_ms, place)
        if self.dead.bits(place):
            ledger.mark(id_, DEAD, now_ms)
        return new

    def _impression(self, message: pb.Impression, record: Record, now_ms: int) -> None:
        header = message.header
        if record.timestamp_ms < self.since_ms or self._is_misplaced(header, record):
            return
        key = record.key or key_bytes(header.user_id, header.session_id, header.request_id)
        place = _place(record.topic, record.partition, record.offset)
        self._count["requests"] += self._see(self.requests, sample_id(key, header.request_id), now_ms, place)

    def _is_misplaced(self, header: pb.Header, record: Record) -> bool:
        """Whether another auditor reads what becomes of this event: its producer used another partitioner
        than Kafka's. With another key than its header's, it becomes a dead letter here."""
        key = record.key
        if key is None or self.share.has_key(key):
            return False
        is_misplaced = key == key_bytes(header.user_id, header.session_id, header.request_id)
        self._misplaced[record.topic] += is_misplaced
        return is_misplaced

    def _engagement(self, message: pb.Engagement, record: Record, now_ms: int) -> None:
        if record.timestamp_ms < self.since_ms or self._is_misplaced(message.header, record):
            return
        if not message.event_id:
            return self._bad(record, now_ms)
        place = _place(record.topic, record.partition, record.offset)
        new = self._see(self.events, message.event_id, now_ms, place)
        self._count["engagements" if new else "duplicates"] += 1
        self._actions[_named(message.action, self._actions)] += new

    def _sample(self, message: pb.Sample, record: Record, now_ms: int) -> None:
        id_, at = message.sample_id, (record.partition, record.offset)
        self.sample_ends[record.partition] = record.offset + 1
        self._closed_until(min(message.close_ms, record.timestamp_ms))
        is_old = message.header.time_ms < self.since_ms
        if (
            is_old
            or self._is_out(self.requests, id_, message.header.time_ms)
            or not self.requests.mark(id_, SAMPLED, now_ms)
        ):
            self._fold(message, FOLDED if is_old else REPEATED, now_ms)
            return
        self._fold(message, FOLDED, now_ms)
        if not self.requests.bits(id_) & PREDICTED and not self.dead.bits(_place(SAMPLES, *at)):
            self._wait_for_training(id_, at)
        self._count["samples"] += 1
        self._count["candidates"] += len(message.item_ids)
        self._closed_by[_enum_name(pb.CloseReason, message.close_reason, "CLOSE_")] += 1
        self.features_digest = (self.features_digest + features_hash(message)) & MASK64

    def _fold(self, message: pb.Sample, outcome: int, now_ms: int) -> bool:
        """Mark the engagements of a sample or correction. Returns whether the outcome is new for one of
        them."""
        new = False
        for event_id, time_ms in _events(message):
            if not self._is_out(self.events, event_id, time_ms):
                new |= self.events.mark(event_id, outcome, now_ms)
        return new

    def _is_out(self, ledger: Ledger, id_: int, time_ms: int) -> bool:
        """Whether an outcome belongs to an event that is not audited or was forgotten."""
        stale = ledger.is_stale(id_, time_ms)
        self._count["stale"] += stale
        return stale or time_ms < self.since_ms

    def _correction(self, message: pb.Sample, now_ms: int) -> None:
        self._count["corrections"] += self._fold(message, CORRECTED, now_ms)

    def _prediction(self, message: pb.Prediction, now_ms: int) -> None:
        if not self.share.has(message.partition):  # of a worker that chose the partition by the sample id
            self._misplaced[PREDICTIONS] += 1
            return
        id_ = message.sample_id
        if self._forget_untrained(id_) and self.requests.is_stale(id_, message.time_ms):
            new = True
        else:
            new = not self._is_out(self.requests, id_, message.time_ms) and self.requests.mark(
                id_, PREDICTED, now_ms
            )
        if new:
            self._count["predicted"] += 1
            self._dispositions[_enum_name(pb.Disposition, message.disposition, "DISPOSITION_")] += 1

    def _dead_letter(self, message: pb.DeadLetter, now_ms: int) -> None:
        place = _place(message.topic, message.partition, message.offset)
        if place == NOWHERE:
            self._unreadable[DEAD_LETTERS] += self.share.auditor == 0
            return
        if not self.share.has(message.partition):
            return
        if not self.dead.mark(place, DEAD, now_ms):
            return
        reason = message.reason if message.reason in wire.REASONS else _OTHER
        self._dead_letters[reason] += 1
        if message.topic == CORRECTIONS:  # its engagements were settled when the joiner wrote it
            return
        if message.topic == SAMPLES:
            self._untrained_by[reason] += 1
            self.bad_samples.mark_dead(place, now_ms)
            self._forget_untrained(self._untrained_at.get((message.partition, message.offset)))
            return
        for ledger in (self.bad, self.requests, self.events):
            ledger.mark_dead(place, now_ms)

    def _wait_for_training(self, id_: int, at: At) -> None:
        self.untrained[id_] = at
        self._untrained_at[at] = id_
        if len(self.untrained) > _MAX_UNPREDICTED:
            for oldest in list(islice(self.untrained, _MAX_UNPREDICTED // 2)):
                self._count["never_predicted"] += self._forget_untrained(oldest)

    def _forget_untrained(self, id_: int | None) -> bool:
        at = self.untrained.pop(id_, None) if id_ is not None else None
        if at is not None:
            self._untrained_at.pop(at, None)
        return at is not None

    def _closed_until(self, time_ms: int) -> None:
        if time_ms > self.closed_until_ms:
            self.closed_until_ms = time_ms
            for ledger in (self.events, self.requests, self.bad):
                ledger.overdue_before_ms = time_ms - self.settle_ms

    def sums(self, *, ended: bool = False) -> Sums:
        """The sums so far. `ended`: the input has ended, so nothing may be pending."""
        limit_ms = (1 << 62) if ended else self.closed_until_ms - self.settle_ms
        ledgers = [self.events, self.requests, self.bad, *([self.bad_samples] if ended else [])]
        overdue = sum(ledger.num_overdue(limit_ms) for ledger in ledgers)
        newest_ms = max((time_ms for at, time_ms in self._newest_ms.items() if at[0] in EVENTS), default=0)
        newest_ms = min(newest_ms, self._latest_ms)
        late = sum(
            ledger.num_pending(newest_ms - self.settle_ms)
            for ledger in (self.events, self.requests, self.bad)
        )
        count, events = self._count, self.events
        return Sums(
            requests=count["requests"],
            candidates=count["candidates"],
            engagements=count["engagements"],
            actions=dict(self._actions),
            samples=count["samples"],
            closed_by=dict(self._closed_by),
            folded=events.counts[FOLDED],
            corrected=events.counts[CORRECTED],
            only_repeated=events.counts[REPEATED],
            corrections=count["corrections"],
            dead_engagements=events.counts[DEAD],
            dead_requests=self.requests.counts[DEAD],
            dead_letters=dict(self._dead_letters),
            duplicates=count["duplicates"],
            pending=len(events.pending),
            pending_requests=len(self.requests.pending),
            unread=self.unread,
            unreadable=dict(+self._unreadable),
            misplaced=dict(+self._misplaced),
            unknown=len(events.unknown) + len(self.requests.unknown),
            overdue=overdue,
            late=late,
            predicted=count["predicted"],
            predicted_by=dict(self._dispositions),
            unpredicted=len(self.untrained) + count["never_predicted"],
            untrained_by=dict(self._untrained_by),
            stale=count["stale"],
            lost_records=count["lost_records"],
            since_ms=self.since_ms,
            accounted=overdue == 0,
        )

    def lose(self, records: int) -> None:
        """Count records that retention deleted before they were read."""
        self._count["lost_records"] += records

    def dump(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The complete state as (JSON numbers, arrays), for `load`."""
        numbers: dict[str, Any] = {n: dict(c) for n, c in self.counters.items()}
        arrays: dict[str, np.ndarray] = {}
        for name, ledger in self.ledgers.items():
            numbers[name], of_ledger = ledger.dump()
            arrays |= {f"{name}.{key}": array for key, array in of_ledger.items()}
        numbers |= {
            "since_ms": self.since_ms,
            "closed_until_ms": self.closed_until_ms,
            "digest": self.features_digest,
        }
        numbers["sample_ends"] = list(self.sample_ends.items())
        numbers["newest_ms"] = [(*at, time_ms) for at, time_ms in self._newest_ms.items()]
        numbers |= {"recent_ms": self._recent.times_ms, "reached_ms": self._reached_ms}
        arrays["untrained_ids"] = np.fromiter(self.untrained, np.uint64, len(self.untrained))
        arrays["untrained_at"] = np.array(list(self.untrained.values()), np.int64).reshape(-1, 2)
        return numbers, arrays

    def load(self, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the state of `dump`. Arguments of `__init__` stay, except `since_ms`."""
        self._rotate_at_ms = 0
        for name, counter in self.counters.items():
            counter.clear()
            counter.update({str(k): int(v) for k, v in numbers.get(name, {}).items()})
        if "_dispositions" not in numbers:  # missing in older files
            self._dispositions[_OTHER] = self._count["predicted"]
        for name, ledger in self.ledgers.items():
            ledger.load(
                numbers[name],
                {k.removeprefix(f"{name}."): a for k, a in arrays.items() if k.startswith(f"{name}.")},
            )
        self.since_ms, self.closed_until_ms = int(numbers["since_ms"]), int(numbers["closed_until_ms"])
        self.features_digest = int(numbers["digest"])
        self.sample_ends = {int(p): int(end) for p, end in numbers["sample_ends"]}
        self._newest_ms = {(str(topic), int(p)): int(time_ms) for topic, p, time_ms in numbers["newest_ms"]}
        self._recent.times_ms = list(numbers.get("recent_ms", ()))
        self._reached_ms = int(numbers.get("reached_ms", 0))
        self.untrained = dict(
            zip(arrays["untrained_ids"].tolist(), map(tuple, arrays["untrained_at"].tolist()), strict=True)
        )
        self._untrained_at = {at: id_ for id_, at in self.untrained.items()}


def features_hash(sample: pb.Sample) -> int:
    """xxh3-64 of sample id, items, RO bytes and parts."""
    digest = xxhash.xxh3_64(sample.sample_id.to_bytes(8, "little"))
    digest.update(array("Q", sample.item_ids).tobytes())
    for block in (
        (b"\1" + sample.ro) if sample.HasField("ro") else b"\0",
        *(p.SerializeToString(deterministic=True) for p in sample.parts),
    ):
        digest.update(len(block).to_bytes(8, "little") + block)
    return digest.intdigest()


def _place(topic: str, partition: int, offset: int) -> int:
    """A Kafka position as one number below 2^63; NOWHERE if it cannot be one of an audited record."""
    if topic not in _PLACED or not 0 <= partition < 1 << 12 or not 0 <= offset < 1 << 48:
        return NOWHERE
    return _PLACED.index(topic) << 60 | partition << 48 | offset


def _events(message: pb.Sample) -> Iterator[tuple[int, int]]:
    """(event id, time) of the engagements of a sample; a missing time is the request's."""
    times, default_ms = message.event_times, message.header.time_ms
    for n, event_id in enumerate(message.event_ids):
        yield event_id, times[n] if n < len(times) else default_ms


def _enum_name(values: Any, number: int, prefix: str) -> str:
    """Name of a close reason or disposition, also if a newer program wrote it."""
    known = values.DESCRIPTOR.values_by_number.get(number)
    return _OTHER if known is None else known.name.removeprefix(prefix).lower()


def _named(name: str, known: Counter[str]) -> str:
    """`name`, or "other" beyond the first thousand names, because producers choose them freely."""
    return name if name in known or len(known) < _MAX_NAMES else _OTHER

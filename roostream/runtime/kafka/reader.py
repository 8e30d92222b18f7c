"""The one reader of Kafka's records: partitions assigned by hand, offsets kept by whoever reads, never by a group."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.merge import Merge
from roostream.runtime.kafka.reading import Ends, Reading
from roostream.runtime.kafka.record_reader import PartitionLag, ReadLimits, RecordsGoneError
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.wire.records import Record

log = logging.getLogger("roostream.reader")

_AWAY_AFTER_S = 5.0
_ASK_S = 5.0
_FETCH_S = 0.1  # a poll looks at its time limit so often
_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_UNREADABLE = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
)


class KafkaReader:
    """See `roostream.runtime.kafka.record_reader.RecordReader`. A broker that is away is waited for by the client, without an error."""

    def __init__(
        self, consumer: Consumer, reading: Reading, ends: Ends | None = None, *, what: str = "Kafka"
    ) -> None:
        """`consumer`: as `open` makes it: told of ends, and of offsets that are gone. `what` names the broker in messages."""
        self.reading, self.partitions, self.what = reading, reading.partitions, what
        self._lost = dict.fromkeys(reading.partitions, 0)
        self._ends = ends
        self._merge = Merge(reading.partitions, reading.buffered)
        self._given = dict.fromkeys(reading.partitions, 0)
        self._given_ms = dict.fromkeys(reading.partitions, 0)
        self._fetched = dict.fromkeys(reading.partitions, 0)  # next offset to come from the broker
        self._gone: set[Partition] = set()  # the broker has no such offset any more
        self._held: set[Partition] = set()
        self.bound({})
        self._paused: set[Partition] = set()
        self._consumer: Consumer | None = consumer
        self._silent_since_s = 0.0

    @classmethod
    def open(cls, broker: Broker, group: str, reading: Reading) -> KafkaReader:
        """Start the clients, without waiting for the broker; `seek` must follow. `group` is a name for the broker's access
        rules: nothing is committed to it."""
        consumer = clients.consumer(broker, group, enable_partition_eof=True, auto_offset_reset="error")
        ends = Ends(clients.admin(broker), reading) if reading.follows_ends else None
        if ends is not None:
            ends.start()
        return cls(consumer, reading, ends, what=f"Kafka at {broker}")

    @property
    def num_lost(self) -> int:
        return sum(self._lost.values())

    def seek(self, progress: Mapping[Partition, int]) -> None:
        """See RecordReader. The broker is asked for all bounds first, so that nothing is changed where it is away."""
        bounds = self.bounds(*self.partitions)
        self._given = {p: self._place(p, progress.get(p, bounds[p][0]), *bounds[p]) for p in self.partitions}
        self._given_ms = dict.fromkeys(self.partitions, 0)
        self._fetched = dict(self._given)
        self._merge.clear()
        self._assign()

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        """See RecordReader. Looks at the broker at least once where nothing is buffered, also with `timeout_s` 0."""
        deadline_s = time.monotonic() + timeout_s
        out = self._take(max_records, partition)
        left_s = timeout_s
        while not out:
            self._fetch(max_records, min(max(left_s, 0.0), _FETCH_S))
            out = self._take(max_records, partition)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
        for record in out:
            at = record.topic, record.partition
            self._given[at], self._given_ms[at] = record.offset + 1, record.timestamp_ms
        self._balance()
        return out

    def hold(self, partitions: Collection[Partition]) -> None:
        self._held = set(partitions)
        self._balance()

    def bound(self, ends: Progress) -> None:
        self._limits = ReadLimits(ends, self._next_of)

    def left(self, partition: Partition) -> bool | None:
        if self._limits.closes(partition):
            return False
        return None if self._merge.head(partition) is None else True

    def positions(self) -> Progress:
        return dict(self._given)

    def end_offsets(self) -> Progress:
        return {p: end for p, (_, end) in self.bounds(*self.partitions).items()}

    def passed(self, partition: Partition) -> int:
        """Everything below this offset has been given, or is a transaction's marker, which no reader sees."""
        return self._fetched[partition] if self._merge.is_drained(partition) else self._given[partition]

    def at_end(self) -> bool:
        return all(self._merge.is_drained(p) for p in self.partitions)

    def lag(self) -> dict[Partition, PartitionLag]:
        """See RecordReader; {} unless `Reading.follows_ends`."""
        return {
            p: PartitionLag(
                position=self.passed(p),
                stable_end=end.stable,
                high_watermark=end.high,
                position_ms=self._given_ms[p],
                newest_ms=end.newest_ms,
                oldest=end.oldest,
                lost=self._lost[p],
            )
            for p, end in (self._ends.known if self._ends else {}).items()
        }

    def close(self) -> None:
        if self._ends is not None:
            self._ends.stop()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _take(self, max_records: int, partition: Partition | None) -> list[Record]:
        closed = self._limits.closes if self._limits.ends else None
        if partition is not None:
            return self._merge.take_of(partition, max_records, closed)
        return (
            self._merge.take(max_records, closed)
            if self.reading.merged
            else self._merge.take_any(max_records)
        )

    def _next_of(self, partition: Partition) -> int:
        head = self._merge.head(partition)
        return self._fetched[partition] if head is None else head

    def _fetch(self, max_records: int, timeout_s: float) -> None:
        self._skip_gone()
        client = self._client()
        first = client.poll(timeout_s)  # `consume` would wait for all that it is asked for
        messages = [] if first is None else [first, *client.consume(max(max_records, 64), 0)]
        self._note_silence(bool(messages))
        for message in messages:
            error = message.error()
            if error is None:
                self._offer(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                p = self._partition(message)
                self._fetched[p] = max(self._fetched[p], message.offset())
                self._merge.reached_end(p)
            elif error.code() in _GONE:
                self._gone.add(self._partition(message))
            else:
                log.debug("%s: %s", self.reading.named(), error)
        if self._gone and not self.reading.skips_lost:
            raise RecordsGoneError(
                f"{self._named(min(self._gone))} no longer has offset {self._fetched[min(self._gone)]}"
            )

    def _offer(self, message: Any) -> None:
        p, offset = self._partition(message), message.offset()
        if offset < self._fetched[p]:
            return  # fetched before a seek or a pause
        self._fetched[p] = offset + 1
        self._merge.offer(Record(*p, offset, message.timestamp()[1], message.key(), message.value() or b""))

    def _skip_gone(self) -> None:
        """Go on behind what retention has deleted while it was to be read; tried again while the broker is away."""
        if not self._gone:
            return
        try:
            bounds = self.bounds(*self._gone)
        except UnavailableError as error:
            log.debug("%s", error)
            return
        for p, found in bounds.items():
            self._fetched[p] = self._place(p, self._fetched[p], *found)
        self._assign()

    def _place(self, partition: Partition, wanted: int, oldest: int, end: int) -> int:
        """Where to go on for `wanted`: there, or where records are that can still be read; what lies between is lost."""
        if oldest <= wanted <= end:
            return wanted
        name, at = self._named(partition), oldest if wanted < oldest else end
        if not self.reading.skips_lost:
            raise RecordsGoneError(f"{name} no longer has offset {wanted}: it has {oldest} to {end}")
        self._lost[partition] += abs(wanted - at)
        if wanted < oldest:
            why = f"retention deleted {oldest - wanted} records before they were read; raise it"
        else:
            why = f"Kafka lost {wanted - end} offsets that were read, and what was behind them; new records have the same offsets"
        log.error(
            "%s: offset %d is gone, it has %d to %d: %s; going on from %d", name, wanted, oldest, end, why, at
        )
        return at

    def _assign(self) -> None:
        """All partitions, at what was fetched. The client keeps what was paused of a partition that is assigned again, and a
        resume right behind it could undo where it begins (librdkafka issue 2190): pauses that are over end before it."""
        if self._paused:
            self._balance()
        self._client().assign([self.reading.place(p, self._fetched[p]) for p in self.partitions])
        self._gone.clear()
        self._silent_since_s = time.monotonic()
        self._balance()

    def _balance(self) -> None:
        """Stop fetching partitions that are held or whose buffers are full, so that memory stays bounded while others lag."""
        full = {p for p in self.partitions if not self._merge.room(p)}
        half = {p for p in self._paused if self._merge.room(p) < self._merge.buffered // 2}
        wanted = full | half | self._held
        if more := wanted - self._paused:
            self._client().pause([self.reading.place(p) for p in more])
        if ready := self._paused - wanted:
            self._client().resume([self.reading.place(p) for p in ready])
        self._paused = wanted

    def _note_silence(self, heard: bool) -> None:
        """One line when nothing, not even an end of a partition that is behind, has come for a while."""
        now_s = time.monotonic()
        behind = any(not self._merge.at_end(p) for p in self.partitions if p not in self._paused)
        if heard or not behind:
            if self._silent_since_s < 0:
                log.info("records of %s come again", self.reading.named())
            self._silent_since_s = now_s
        elif 0 <= self._silent_since_s < now_s - _AWAY_AFTER_S:
            log.warning(
                "waiting for %s: no records of %s for %g s", self.what, self.reading.named(), _AWAY_AFTER_S
            )
            self._silent_since_s = -1.0

    def bounds(self, *partitions: Partition) -> dict[Partition, tuple[int, int]]:
        """(oldest offset still there, last stable offset) of each, asked now; UnavailableError as `end_offsets`."""
        try:
            found = clients.bounds(self._client(), [self.reading.place(p) for p in partitions], _ASK_S)
        except KafkaException as error:
            code = error.args[0].code()
            todo = (
                "create the topics first, or check the prefix"
                if code in _UNREADABLE
                else "start it or check the address"
            )
            raise UnavailableError(
                f"{self.what}: {self.reading.named()}: {error.args[0].str()}; {todo}"
            ) from None
        return dict(zip(partitions, found, strict=True))

    def _partition(self, message: Any) -> Partition:
        return self.reading.partition_of(message.topic(), message.partition())

    def _named(self, partition: Partition) -> str:
        return f"{self.reading.place(partition).topic}-{partition[1]}"

    def _client(self) -> Consumer:
        assert self._consumer is not None, "it is closed"
        return self._consumer

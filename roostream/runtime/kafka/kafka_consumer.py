"""The consumer of Kafka topics: partitions are assigned by hand, and the caller keeps the offsets, never a
consumer group."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from roostream.errors import RoostreamError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import PartitionLag, ReadLimits, RecordsGoneError
from roostream.runtime.kafka.timestamp_merge import TimestampMerge
from roostream.runtime.kafka.topics import Partition, Progress, name_of
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.wire.records import Record

log = logging.getLogger("roostream.kafka")

_WARN_SILENT_S = 5.0
_STALLED_S, _MAX_STALLED_S = 15.0, 600.0
"""A client that has not delivered a record for so long is replaced; twice as long after each replacement."""
_REQUEST_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 1.0  # of a request that delays the caller of `poll`
_POLL_SLICE_S = 0.1  # `poll` checks its time limit this often
_END_OFFSETS_EVERY_S = 1.0
_END_OFFSETS_VALID_S = 5.0
_JOIN_S = 0.5  # the polling thread may be waiting for a broker that is away; it can be abandoned without loss
_ANSWER_TIMEOUT_S = 2 * _REQUEST_TIMEOUT_S  # a client that keeps a request for longer is replaced
_GONE = (clients.AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
# An AUTO_OFFSET_RESET after a failed check of leader epochs; only its text says where the log was cut off.
_TRUNCATED_AT = re.compile(r"log truncation detected .* broker end offset is (\d+)")
_MAX_EPOCHS = 16  # of a partition; a leader epoch begins when a broker starts or a leader changes
_NO_EPOCHS: Mapping[Partition, int] = MappingProxyType({})
_UNREADABLE = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    clients.UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """The partitions that a consumer reads, in which order, and how far ahead."""

    partitions: tuple[Partition, ...]
    prefix: str = ""
    merge_by_time: bool = False  # oldest record first over all partitions; otherwise in order of arrival
    max_buffered: int = 4096  # records a partition; fetching pauses for a partition with this many
    skip_lost_records: bool = True  # log and count records that the broker deleted; False: RecordsGoneError
    track_end_offsets: bool = False  # needed for `lag`

    def topic_partition(self, partition: Partition, *offset: int) -> TopicPartition:
        return TopicPartition(name_of(self.prefix, partition[0]), partition[1], *offset)

    def partition_of(self, topic: str, number: int) -> Partition:
        """The partition of the deployment, without its prefix. `topic`: the name on the broker, with the
        prefix."""
        return topic.removeprefix(self.prefix), number

    def topic_names(self) -> str:
        """Names of the topics on the broker, for messages."""
        return ", ".join(dict.fromkeys(name_of(self.prefix, topic) for topic, _ in self.partitions))


class PartitionEnd(NamedTuple):
    """End offsets and newest time of a partition, as Kafka reports them."""

    last_stable: int
    high_watermark: int
    newest_ms: int  # newest event time in the partition
    oldest: int = 0  # first offset that still exists


class EndOffsetPoller:
    """Asks the broker for the partitions' end offsets once a second, in a background thread, so that no batch
    waits for it.

    A client that fails is replaced. It has cached the leaders of the partitions, and after a restart of the
    broker it would ask with outdated leader epochs, and fail, until its next metadata refresh (librdkafka:
    5 minutes later).
    """

    def __init__(self, open_admin: Callable[[], AdminClient], options: ConsumerOptions) -> None:
        self.open_admin, self.options = open_admin, options
        self._admin: AdminClient | None = None
        self._ends: dict[Partition, PartitionEnd] = {}
        self._updated_s = 0.0
        self._stop, self._log_rate_limit = threading.Event(), LogRateLimit()
        self._thread = threading.Thread(target=self._run, name="kafka-end-offsets", daemon=True)

    @property
    def ends(self) -> dict[Partition, PartitionEnd]:
        """The last known ends; {} before the first answer, and once the broker has been silent for 5 s."""
        return self._ends if time.monotonic() - self._updated_s < _END_OFFSETS_VALID_S else {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def update(self, ends: dict[Partition, PartitionEnd]) -> None:
        self._ends, self._updated_s = ends, time.monotonic()

    def fetch(self) -> dict[Partition, PartitionEnd]:
        """Ask now. Raises KafkaException: the broker is away or refuses; the next call uses a new client.
        RoostreamError: no client can be made, which is so for a moment while its files are replaced."""
        try:
            return self._fetch()
        except Exception:
            self._admin = None
            raise

    def _fetch(self) -> dict[Partition, PartitionEnd]:
        stable = self._offsets(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
        high = self._offsets(OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        newest = self._offsets(OffsetSpec.max_timestamp(), IsolationLevel.READ_UNCOMMITTED)
        oldest = self._offsets(OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
        return {
            p: PartitionEnd(
                stable[p].offset, high[p].offset, max(int(newest[p].timestamp), 0), oldest[p].offset
            )
            for p in self.options.partitions
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.update(self.fetch())
            except (KafkaException, RoostreamError) as error:
                log.debug("end offsets of %s are unknown: %s", self.options.topic_names(), error)
            except Exception as error:  # they are unknown until it works again, not until the process ends
                text = "end offsets of %s are unknown (this is a defect of Roostream): %r"
                self._log_rate_limit.warning(log, "defect", text, self.options.topic_names(), error)
            self._stop.wait(_END_OFFSETS_EVERY_S)

    def _offsets(self, spec: OffsetSpec, level: IsolationLevel) -> dict[Partition, Any]:
        if self._admin is None:  # its truth value says whether events wait
            self._admin = self.open_admin()
        request = {self.options.topic_partition(p): spec for p in self.options.partitions}
        futures = self._admin.list_offsets(request, isolation_level=level, request_timeout=_REQUEST_TIMEOUT_S)
        answers = clients.results_of(futures, _ANSWER_TIMEOUT_S)
        return {self.options.partition_of(tp.topic, tp.partition): answer for tp, answer in answers.items()}


class KafkaConsumer:
    """A `RecordConsumer` (roostream/runtime/kafka/consumer.py) of Kafka. While a broker is away the client
    waits, without an error.

    A client can stop fetching a partition for good, without an error, when a broker restarts (librdkafka
    issue 4492). A partition from which nothing arrives is therefore compared with its end at the broker, and
    the client is replaced if records are there, or if it cannot reach the broker."""

    def __init__(
        self,
        consumer: Consumer,
        options: ConsumerOptions,
        end_offsets: EndOffsetPoller | None = None,
        *,
        what: str = "Kafka",
        reopen: Callable[[], Consumer] | None = None,
    ) -> None:
        """`consumer` must be configured as `open` does it: it reports when it reaches the end of a partition,
        and when the broker no longer has an offset. `what` names the broker in messages. `reopen` returns a
        new client, which takes the place of `consumer`."""
        self.options, self.partitions, self.what = options, options.partitions, what
        self._reopen, self._is_assigned = reopen, False
        self._lost = dict.fromkeys(options.partitions, 0)
        self._end_offsets = end_offsets
        self._merge = TimestampMerge(options.partitions, options.max_buffered)
        self._positions = dict.fromkeys(options.partitions, 0)
        self._position_ms = dict.fromkeys(options.partitions, 0)
        self._fetched = dict.fromkeys(options.partitions, 0)  # next offset to arrive from the broker
        self._gone: set[Partition] = set()  # partitions whose next offset the broker no longer has
        self._truncated: dict[Partition, int] = {}  # of these, where the log was cut off
        # Leader epochs of the records that arrived, as (first offset, epoch); the newest last.
        self._epochs: dict[Partition, list[tuple[int, int]]] = {p: [] for p in options.partitions}
        # Offset after the newest record that arrived or that `seek` knows the epoch of.
        self._epoch_end: dict[Partition, int] = {}
        self._paused_by_caller: set[Partition] = set()
        self._paused: set[Partition] = set()
        self._consumer: Consumer | None = consumer
        self._silent_since_s = 0.0  # negative: the silence has been logged
        self._arrived_s = dict.fromkeys(options.partitions, 0.0)  # its last record or end, or its last start
        self._ends_before: Progress = {}  # of silent partitions, as of the last check
        self._stalled_s, self._next_check_s = _STALLED_S, 0.0
        self._log_rate_limit = LogRateLimit()
        self.set_limits({})

    @classmethod
    def open(cls, broker: Broker, group: str, options: ConsumerOptions) -> KafkaConsumer:
        """Start the clients without waiting for the broker; `seek` must follow. `group` only matters for the
        broker's access rules: nothing is committed to it."""

        def open_client() -> Consumer:
            return clients.consumer(broker, group, enable_partition_eof=True, auto_offset_reset="error")

        client = open_client()  # before the thread: nothing would end it if this fails
        ends = EndOffsetPoller(lambda: clients.admin(broker), options) if options.track_end_offsets else None
        if ends is not None:
            ends.start()
        return cls(client, options, ends, what=f"Kafka at {broker}", reopen=open_client)

    @property
    def num_lost(self) -> int:
        return sum(self._lost.values())

    def seek(
        self, progress: Mapping[Partition, int], leader_epochs: Mapping[Partition, int] = _NO_EPOCHS
    ) -> None:
        """See RecordConsumer. All bounds are requested from the broker first, so that nothing changes if it
        is unavailable."""
        bounds = self.bounds(*self.partitions)
        self._truncated.clear()
        self._positions = {
            p: self._readable_offset(p, progress.get(p, bounds[p][0]), *bounds[p]) for p in self.partitions
        }
        self._epochs = {
            p: [(at - 1, leader_epochs[p])] if p in leader_epochs and at == progress.get(p) else []
            for p, at in self._positions.items()
        }
        self._epoch_end = {p: at for p, at in self._positions.items() if self._epochs[p]}
        self._position_ms = dict.fromkeys(self.partitions, 0)
        self._fetched = dict(self._positions)
        self._merge.clear()
        if self._epoch_end and self._reopen:
            # A client compares leader epochs when it learns of a new one. One that already knows the leaders
            # would start without that.
            self._replace_client(self._reopen())
        self._assign()

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        """See RecordConsumer. Asks the client at least once if nothing is buffered, also with `timeout_s`
        0."""
        deadline_s = time.monotonic() + timeout_s
        records = self._take(max_records, partition)
        left_s = timeout_s
        while not records:
            self._fetch(max_records, min(max(left_s, 0.0), _POLL_SLICE_S))
            records = self._take(max_records, partition)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
        for record in records:
            p = record.topic, record.partition
            self._positions[p], self._position_ms[p] = record.offset + 1, record.timestamp_ms
        self._pause_and_resume()
        return records

    def pause(self, partitions: Collection[Partition]) -> None:
        self._paused_by_caller = set(partitions)
        self._pause_and_resume()

    def set_limits(self, ends: Progress) -> None:
        self._limits = ReadLimits(ends, self._next_offset)

    def has_more(self, partition: Partition) -> bool | None:
        if self._limits.is_reached(partition):
            return False
        return None if self._merge.head(partition) is None else True

    def positions(self) -> Progress:
        return dict(self._positions)

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        found = {p: self._epoch_before(p, offset) for p, offset in at.items()}
        return {p: epoch for p, epoch in found.items() if epoch is not None}

    def end_offsets(self) -> Progress:
        return {p: end for p, (_, end) in self.bounds(*self.partitions).items()}

    def passed(self, partition: Partition) -> int:
        """All offsets below this one were returned, or are transaction markers, which no consumer sees."""
        return self._fetched[partition] if self._merge.is_drained(partition) else self._positions[partition]

    def at_end(self) -> bool:
        return all(self._merge.is_drained(p) for p in self.partitions)

    def lag(self) -> dict[Partition, PartitionLag]:
        """See RecordConsumer; {} unless `ConsumerOptions.track_end_offsets` is set."""
        return {
            p: PartitionLag(
                position=self.passed(p),
                stable_end=end.last_stable,
                high_watermark=end.high_watermark,
                position_ms=self._position_ms[p],
                newest_ms=end.newest_ms,
                oldest=end.oldest,
                lost=self._lost[p],
            )
            for p, end in (self._end_offsets.ends if self._end_offsets else {}).items()
        }

    def bounds(self, *partitions: Partition) -> dict[Partition, tuple[int, int]]:
        """Ask the broker for the oldest offset and the last stable offset of each partition. Raises
        UnavailableError in the cases of `end_offsets`."""
        try:
            found = clients.bounds(
                self._client(), [self.options.topic_partition(p) for p in partitions], _REQUEST_TIMEOUT_S
            )
        except KafkaException as error:
            code = error.args[0].code()
            if code not in _UNREADABLE:
                self._renew_client()
            remedy = (
                "create the topics first, check the prefix, or give this program's user permission to read "
                "them"
                if code in _UNREADABLE
                else "start it or check the address"
            )
            raise UnavailableError(
                f"{self.what}: {self.options.topic_names()}: {error.args[0].str()}; {remedy}"
            ) from None
        return dict(zip(partitions, found, strict=True))

    def close(self) -> None:
        if self._end_offsets is not None:
            self._end_offsets.stop()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _take(self, max_records: int, partition: Partition | None) -> list[Record]:
        is_closed = self._limits.is_reached if self._limits.ends else None
        if partition is not None:
            return self._merge.take_from(partition, max_records, is_closed)
        if self.options.merge_by_time:
            return self._merge.take(max_records, is_closed)
        return self._merge.take_any(max_records)

    def _next_offset(self, partition: Partition) -> int:
        head = self._merge.head(partition)
        return self._fetched[partition] if head is None else head

    def _fetch(self, max_records: int, timeout_s: float) -> None:
        self._skip_gone()
        client = self._client()
        # `consume` alone would wait until it has all requested records
        first = client.poll(timeout_s)
        messages = [] if first is None else [first, *client.consume(max(max_records, 64), 0)]
        self._log_silence(bool(messages))
        now_s = time.monotonic()
        for message in messages:
            error = message.error()
            if error is None:
                self._buffer(message)
                self._arrived_s[self._partition(message)], self._stalled_s = now_s, _STALLED_S
            elif error.code() == clients.PARTITION_EOF:
                p = self._partition(message)
                self._fetched[p] = max(self._fetched[p], message.offset())
                self._merge.reached_end(p)
                self._arrived_s[p] = now_s
            elif error.code() in _GONE:
                self._gone.add(p := self._partition(message))
                if found := _TRUNCATED_AT.search(error.str()):
                    self._truncated[p] = int(found[1])
            elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                text = "%s: %s: %s; give this program's user permission to read the topic"
                name = self._name(self._partition(message))
                self._log_rate_limit.warning(log, name, text, self.what, name, error.str())
            else:
                log.debug("%s: %s", self.options.topic_names(), error)
        if self._gone and not self.options.skip_lost_records:
            p = min(self._gone)
            raise RecordsGoneError(f"{self._name(p)} no longer has offset {self._fetched[p]}")
        self._replace_stalled_client(now_s)

    def _replace_stalled_client(self, now_s: float) -> None:
        """Replace the client if a partition had records at the last check of which none has arrived since, or
        if the client cannot reach the broker."""
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + self._stalled_s
        silent = [
            p
            for p in self.partitions
            if p not in self._paused | self._gone and now_s - self._arrived_s[p] >= self._stalled_s
        ]
        stalled = [p for p in silent if self._fetched[p] < self._ends_before.get(p, 0)]
        self._ends_before = {}
        try:
            if stalled and self._reopen:
                names = ", ".join(map(self._name, stalled))
                log.warning("%s: records of %s do not arrive; the client is replaced", self.what, names)
                self._stalled_s = min(2 * self._stalled_s, _MAX_STALLED_S)
                self._renew_client()
            elif self._end_offsets is not None:  # of another client, so nothing has to wait
                ends = self._end_offsets.ends
                self._ends_before = {p: ends[p].last_stable for p in silent if p in ends}
            elif silent:
                places = [self.options.topic_partition(p) for p in silent]
                bounds = clients.bounds(self._client(), places, _CHECK_TIMEOUT_S)
                self._ends_before = {p: end for p, (_, end) in zip(silent, bounds, strict=True)}
        except KafkaException as error:
            log.debug("%s", error)
            self._renew_client()

    def _renew_client(self) -> None:
        """Continue with a new client. One whose connections were all lost may connect to no broker again,
        also when the broker is back (seen with librdkafka 2.16)."""
        if self._reopen is None:
            return
        try:
            self._replace_client(self._reopen())
            if self._is_assigned:
                self._assign()
        except (KafkaException, RoostreamError) as error:  # its files are being replaced
            log.debug("%s", error)

    def _replace_client(self, client: Consumer) -> None:
        """Use a new client, to which nothing is assigned yet."""
        self._client().close()
        self._consumer, self._paused = client, set()

    def _buffer(self, message: Any) -> None:
        p, offset = self._partition(message), message.offset()
        if offset < self._fetched[p]:
            return  # fetched before a seek or a pause
        epoch = message.leader_epoch()
        if epoch is not None and epoch >= 0 and epoch != self._epoch_before(p, offset):
            self._epochs[p] = [*self._epochs[p], (offset, epoch)][-_MAX_EPOCHS:]
        self._fetched[p] = self._epoch_end[p] = offset + 1
        self._merge.offer(Record(*p, offset, message.timestamp()[1], message.key(), message.value() or b""))

    def _skip_gone(self) -> None:
        """Continue after records that retention deleted before they were read; tried again while the broker
        is away."""
        if not self._gone:
            return
        try:
            bounds = self.bounds(*self._gone)
        except UnavailableError as error:
            log.debug("%s", error)
            return
        for p, found in bounds.items():
            before, at = self._fetched[p], self._readable_offset(p, self._fetched[p], *found)
            self._fetched[p] = at
            if at < before:
                # Buffered records beyond the cut are gone too: other consumers will never see them.
                self._merge.truncate(p, at)
                self._positions[p] = min(self._positions[p], at)
                self._epochs[p] = [(first, epoch) for first, epoch in self._epochs[p] if first < at]
        self._assign()

    def _readable_offset(self, partition: Partition, wanted: int, oldest: int, end: int) -> int:
        """`wanted`, or the nearest offset that can be read; the records in between are counted as lost."""
        cut = min(self._truncated.get(partition, end), end)
        if oldest <= wanted <= cut:
            return wanted
        name, resumed = self._name(partition), oldest if wanted < oldest else max(cut, oldest)
        if not self.options.skip_lost_records:
            raise RecordsGoneError(f"{name} no longer has offset {wanted}: it has {oldest} to {cut}")
        self._lost[partition] += abs(wanted - resumed)
        if wanted < oldest:
            reason = f"retention deleted {oldest - wanted} records before they were read; raise the retention"
        else:
            reason = (
                f"Kafka lost {wanted - resumed} offsets that had been read (a broker stopped uncleanly, "
                "or the topic was created again); new records reuse them"
            )
        log.error(
            "%s: offset %d is gone, the partition has %d to %d: %s; continuing at %d",
            name,
            wanted,
            oldest,
            cut,
            reason,
            resumed,
        )
        return resumed

    def _epoch_before(self, partition: Partition, offset: int) -> int | None:
        """Leader epoch of the last record below `offset`; None = not known."""
        return next((epoch for first, epoch in reversed(self._epochs[partition]) if first < offset), None)

    def _assign(self) -> None:
        """Assign all partitions at the next offset to fetch.

        The client keeps the paused state of a partition that is assigned again, and a resume right after
        `assign` could undo the start offset (librdkafka issue 2190). Pauses that are over therefore end
        before it.
        """
        if self._paused:
            self._pause_and_resume()
        self._client().assign([self._place(p, self._fetched[p]) for p in self.partitions])
        self._is_assigned = True
        self._gone.clear()
        self._truncated.clear()
        self._silent_since_s = time.monotonic()
        self._arrived_s = dict.fromkeys(self.partitions, self._silent_since_s)
        self._pause_and_resume()

    def _place(self, partition: Partition, offset: int) -> TopicPartition:
        """Where to fetch. With the leader epoch of the record before it, the client notices if a broker lost
        that record and gave its offset to another one. A marker of a transaction may have another epoch."""
        place, epoch = self.options.topic_partition(partition), None
        if self._epoch_end.get(partition) == offset:
            epoch = self._epoch_before(partition, offset)
        return TopicPartition(
            place.topic, place.partition, offset, leader_epoch=-1 if epoch is None else epoch
        )

    def _pause_and_resume(self) -> None:
        """Pause partitions whose buffers are full or that the caller paused, so that memory stays bounded
        while others lag."""
        full = {p for p in self.partitions if not self._merge.num_free(p)}
        half_full = {p for p in self._paused if self._merge.num_free(p) < self._merge.max_buffered // 2}
        wanted = full | half_full | self._paused_by_caller
        if more := wanted - self._paused:
            self._client().pause([self.options.topic_partition(p) for p in more])
        if ready := self._paused - wanted:
            self._client().resume([self.options.topic_partition(p) for p in ready])
            self._arrived_s |= dict.fromkeys(ready, time.monotonic())
        self._paused = wanted

    def _log_silence(self, received: bool) -> None:
        """Log once when nothing has arrived for a while, not even the end of a partition that is behind."""
        now_s = time.monotonic()
        behind = any(not self._merge.at_end(p) for p in self.partitions if p not in self._paused)
        if received or not behind:
            if self._silent_since_s < 0:
                log.info("records of %s arrive again", self.options.topic_names())
            self._silent_since_s = now_s
        elif 0 <= self._silent_since_s < now_s - _WARN_SILENT_S:
            log.warning(
                "waiting for %s: no records of %s for %g s",
                self.what,
                self.options.topic_names(),
                _WARN_SILENT_S,
            )
            self._silent_since_s = -1.0

    def _partition(self, message: Any) -> Partition:
        return self.options.partition_of(message.topic(), message.partition())

    def _name(self, partition: Partition) -> str:
        return f"{self.options.topic_partition(partition).topic}-{partition[1]}"

    def _client(self) -> Consumer:
        assert self._consumer is not None, "the consumer is closed"
        return self._consumer

"""Records of one topic from Kafka: every partition assigned by hand, offsets kept by the manifest, not by a group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from roo.errors import UnavailableError
from roo.wire import Record
from runtime import kafka
from runtime.broker import Broker
from runtime.topics import PARTITIONS, name_of
from trainer.source import Merge, PartitionLag

log = logging.getLogger("roostream.source")

_ENDS_EVERY_S = 1.0
_AWAY_AFTER_S = 5.0


class Ends:
    """Where the partitions end, asked once a second by a thread of its own, so that no batch waits for it."""

    def __init__(self, broker: Broker, topic: str, partitions: Sequence[int]) -> None:
        self.broker, self.topic, self.partitions = broker, topic, tuple(partitions)
        self.known: dict[int, tuple[int, int, int]] = {}  # partition → (stable end, high watermark, newest event time)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="source-ends", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        admin = kafka.admin(self.broker)
        while not self._stop.is_set():
            try:
                self.known = self._ask(admin)
            except KafkaException as error:
                log.debug("ends of %s are not known now: %s", self.topic, error)
            self._stop.wait(_ENDS_EVERY_S)

    def _ask(self, admin: AdminClient) -> dict[int, tuple[int, int, int]]:
        stable = self._offsets(admin, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
        high = self._offsets(admin, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        newest = self._offsets(admin, OffsetSpec.max_timestamp(), IsolationLevel.READ_UNCOMMITTED)
        return {p: (stable[p].offset, high[p].offset, max(int(newest[p].timestamp), 0)) for p in self.partitions}

    def _offsets(self, admin: AdminClient, spec: OffsetSpec, level: IsolationLevel) -> dict[int, Any]:
        asked = {TopicPartition(self.topic, p): spec for p in self.partitions}
        futures = admin.list_offsets(asked, isolation_level=level, request_timeout=5)
        return {at.partition: future.result() for at, future in futures.items()}


class KafkaSource:
    """See `Source`. Reads committed records only; a broker that is away is waited for by the client, without an error."""

    def __init__(self, broker: Broker, prefix: str, topic: str, *, group: str, buffered: int = 4096) -> None:
        self.broker, self.name, self.topic, self.group = broker, topic, name_of(prefix, topic), group
        self.partitions = tuple(range(PARTITIONS[topic]))
        self.ends = Ends(broker, self.topic, self.partitions)
        self._merge = Merge(self.partitions, buffered)
        self._given = dict.fromkeys(self.partitions, 0)
        self._given_ms = dict.fromkeys(self.partitions, 0)
        self._fetched = dict.fromkeys(self.partitions, 0)  # next offset to come from the broker
        self._paused: set[int] = set()
        self._consumer: Consumer | None = None
        self._silent_since_s = 0.0

    def open(self) -> KafkaSource:
        """Start the clients; `seek` must follow."""
        self._consumer = kafka.consumer(self.broker, self.group, enable_partition_eof=True)
        self.ends.start()
        return self

    def seek(self, offsets: Mapping[int, int]) -> None:
        """**If offsets are gone** (retention passed them): goes on from the oldest that is there, and says how many were lost.

        Raises:
            UnavailableError: Kafka is away; nothing was changed.
        """
        client = self._client()
        try:
            oldest = kafka.start_offsets(client, self.topic, self.partitions)
        except KafkaException as error:
            raise UnavailableError(f"Kafka at {self.broker} does not say where {self.topic} begins: {error}") from None
        for p in self.partitions:
            wanted = offsets.get(p, oldest[p])
            if wanted < oldest[p]:
                log.error(
                    "%s-%d: offset %d is gone, the oldest is %d: retention deleted %d records before they were trained; raise it",
                    self.topic,
                    p,
                    wanted,
                    oldest[p],
                    oldest[p] - wanted,
                )
            self._given[p] = self._fetched[p] = max(wanted, oldest[p])
            self._given_ms[p] = 0
        self._merge.clear()
        self._paused.clear()
        self._silent_since_s = time.monotonic()
        client.assign([TopicPartition(self.topic, p, self._given[p]) for p in self.partitions])

    def poll(self, max_records: int, timeout_s: float, partition: int | None = None) -> list[Record]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            out = self._merge.take(max_records) if partition is None else self._merge.take_of(partition, max_records)
            left_s = deadline_s - time.monotonic()
            if out or left_s <= 0:
                break
            self._fetch(max_records, min(left_s, 0.1))
        for record in out:
            self._given[record.partition], self._given_ms[record.partition] = record.offset + 1, record.timestamp_ms
        self._balance()
        return out

    def positions(self) -> dict[int, int]:
        return dict(self._given)

    def end_offsets(self) -> dict[int, int]:
        return {p: end for p, (end, _, _) in self.ends.known.items()}

    def lag(self) -> dict[int, PartitionLag]:
        return {
            p: PartitionLag(
                # Markers of transactions take offsets that no reader sees: a drained partition is at its end.
                position=self._fetched[p] if self._merge.is_drained(p) else self._given[p],
                stable_end=stable_end,
                high_watermark=high_watermark,
                position_ms=self._given_ms[p],
                newest_ms=newest_ms,
            )
            for p, (stable_end, high_watermark, newest_ms) in self.ends.known.items()
        }

    def close(self) -> None:
        self.ends.stop()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _fetch(self, max_records: int, timeout_s: float) -> None:
        client = self._client()
        first = client.poll(timeout_s)  # `consume` would wait for all that it is asked for
        messages = [] if first is None else [first, *client.consume(max(max_records, 64), 0)]
        self._note_silence(bool(messages))
        for message in messages:
            error = message.error()
            if error is None:
                self._take(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                p = message.partition()
                self._fetched[p] = max(self._fetched[p], message.offset())
                self._merge.reached_end(p)
            else:
                log.debug("%s: %s", self.topic, error)

    def _take(self, message: Any) -> None:
        p, offset = message.partition(), message.offset()
        if offset < self._fetched[p]:
            return  # fetched before a seek or a pause
        self._fetched[p] = offset + 1
        time_ms = message.timestamp()[1]
        self._merge.offer(Record(self.name, p, offset, time_ms, message.key(), message.value()))

    def _balance(self) -> None:
        """Stop fetching partitions whose buffers are full, so that memory stays bounded while others are behind."""
        full = {p for p in self.partitions if not self._merge.room(p)}
        ready = {p for p in self._paused if self._merge.room(p) >= self._merge.buffered // 2}
        if full - self._paused:
            self._client().pause([TopicPartition(self.topic, p) for p in full - self._paused])
        if ready:
            self._client().resume([TopicPartition(self.topic, p) for p in ready])
        self._paused = (self._paused | full) - ready

    def _note_silence(self, heard: bool) -> None:
        """One line when nothing, not even an end of a partition that is behind, has come for a while."""
        now_s = time.monotonic()
        behind = any(self._fetched[p] < end for p, end in self.end_offsets().items() if p not in self._paused)
        if heard or not behind:
            if self._silent_since_s < 0:
                log.info("records of %s come again", self.topic)
            self._silent_since_s = now_s
        elif 0 <= self._silent_since_s < now_s - _AWAY_AFTER_S:
            log.warning("waiting for Kafka at %s: no records of %s for %g s", self.broker, self.topic, _AWAY_AFTER_S)
            self._silent_since_s = -1.0

    def _client(self) -> Consumer:
        assert self._consumer is not None, "open() comes first"
        return self._consumer

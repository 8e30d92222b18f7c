"""Both event topics as one stream, merged by record timestamp, from offsets that the reader keeps itself."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from features.store import PLACES, Place
from roo.wire import Record
from runtime import kafka
from runtime.broker import Broker
from runtime.topics import ENGAGEMENTS, IMPRESSIONS, name_of

log = logging.getLogger("roostream.features")

_BUFFERED = 4096


class EventSource(Protocol):
    """One thread."""

    def seek(self, offsets: Mapping[Place, int]) -> None:
        """Go on from these next offsets; a place that isn't named, from its oldest record."""

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """The next records, oldest first; [] after `timeout_s`, also while the source is away."""

    def close(self) -> None:
        """Idempotent."""


class Merge:
    """Gives the oldest head, impressions first among equal times. A place that has nothing buffered and hasn't reached its
    end may hold an older record, so nothing is given until it speaks."""

    def __init__(self) -> None:
        self._buffers: dict[Place, deque[Record]] = {place: deque() for place in PLACES}
        self._at_end = dict.fromkeys(PLACES, False)

    def offer(self, record: Record) -> None:
        self._buffers[record.topic, record.partition].append(record)
        self._at_end[record.topic, record.partition] = False

    def reached_end(self, place: Place) -> None:
        self._at_end[place] = True

    def buffered(self, place: Place) -> int:
        return len(self._buffers[place])

    def take(self, max_records: int) -> list[Record]:
        out: list[Record] = []
        while len(out) < max_records:
            heads = [(b[0].timestamp_ms, n, b) for n, b in enumerate(self._buffers.values()) if b]
            if not heads or any(not b and not self._at_end[place] for place, b in self._buffers.items()):
                break
            out.append(min(heads)[2].popleft())
        return out


class KafkaEvents:
    """See EventSource. Places whose buffer is full are paused, so that memory stays bounded while another is behind."""

    def __init__(self, broker: Broker, prefix: str, *, open_consumer: Callable[..., Consumer] = kafka.consumer) -> None:
        self.broker, self._open_consumer = broker, open_consumer
        self._names = {t: name_of(prefix, t) for t in (IMPRESSIONS, ENGAGEMENTS)}
        self._topics = {name: t for t, name in self._names.items()}
        self._group = f"{prefix}features"
        self._merge = Merge()
        self._paused: set[Place] = set()
        self._consumer: Consumer | None = None

    def seek(self, offsets: Mapping[Place, int]) -> None:
        if self._consumer is None:
            self._consumer = self._open_consumer(self.broker, self._group, enable_partition_eof=True)
        self._merge, self._paused = Merge(), set()
        self._consumer.assign([self._at(place, offsets.get(place, OFFSET_BEGINNING)) for place in PLACES])

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        assert self._consumer is not None, "seek comes first"
        out = self._merge.take(max_records)
        for message in self._consumer.consume(max_records, timeout_s if not out else 0):
            self._note(message)
        self._balance(self._consumer)
        return out or self._merge.take(max_records)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _note(self, message: Any) -> None:
        error = message.error()
        if error is None:
            place = (self._topics[message.topic()], message.partition())
            self._merge.offer(Record(*place, message.offset(), message.timestamp()[1], message.key(), message.value()))
        elif error.code() == KafkaError._PARTITION_EOF:
            self._merge.reached_end((self._topics[message.topic()], message.partition()))
        else:
            log.debug("events: %s", error)

    def _balance(self, consumer: Consumer) -> None:
        full = {place for place in PLACES if self._merge.buffered(place) >= _BUFFERED}
        ready = {place for place in self._paused if self._merge.buffered(place) < _BUFFERED // 2}
        if full - self._paused:
            consumer.pause([self._at(place) for place in full - self._paused])
        if ready:
            consumer.resume([self._at(place) for place in ready])
        self._paused = (self._paused | full) - ready

    def _at(self, place: Place, offset: int = OFFSET_BEGINNING) -> TopicPartition:
        return TopicPartition(self._names[place[0]], place[1], offset)

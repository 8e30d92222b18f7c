"""A Kafka consumer that is told what comes, and keeps what it was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record


class FakeMessage:
    """`topic` as the broker calls it."""

    def __init__(
        self,
        place: Partition,
        offset: int,
        time_ms: int = 0,
        *,
        key: bytes = b"k",
        value: bytes | None = b"v",
        error: int | KafkaError | None = None,
        epoch: int | None = None,
    ) -> None:
        self._place, self._offset, self._time_ms, self._key, self._value = place, offset, time_ms, key, value
        self._error = KafkaError(error) if isinstance(error, int) else error
        self._epoch = epoch

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._offset

    def leader_epoch(self) -> int | None:
        return self._epoch

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time_ms

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def error(self) -> KafkaError | None:
        return self._error


def end(place: Partition, offset: int = 0) -> FakeMessage:
    return FakeMessage(place, offset, error=clients.PARTITION_EOF)


class FakeConsumer:
    """`coming`: what each look at the broker brings; offsets `oldest`..`newest` exist; `fails` is what asking
    for them meets."""

    def __init__(self, *coming: Iterable[FakeMessage], oldest: int = 0, newest: int = 100) -> None:
        self.coming = deque(deque(messages) for messages in coming)
        self.oldest, self.newest = oldest, newest
        self.fails: int | None = None
        self.num_refreshed = 0
        self.assigned: dict[Partition, int] = {}
        self.leader_epochs: dict[Partition, int] = {}  # of the newest `assign`
        self.paused: set[Partition] = set()
        self.closed = False

    def bring(self, *messages: FakeMessage) -> None:
        """One more look's."""
        self.coming.append(deque(messages))

    def offsets_for_times(self, asked: list[Any], timeout: float) -> list[TopicPartition]:
        if self.fails is not None:
            raise KafkaException(KafkaError(self.fails))
        bounds = {OFFSET_BEGINNING: self.oldest, OFFSET_END: self.newest}
        return [TopicPartition(at.topic, at.partition, bounds[at.offset]) for at in asked]

    def list_topics(self, timeout: float) -> None:
        """Who leads is asked anew."""
        self.num_refreshed += 1

    def assign(self, places: list[Any]) -> None:
        """What the application has paused stays paused, as librdkafka keeps it."""
        self.assigned = {(at.topic, at.partition): at.offset for at in places}
        self.leader_epochs = {
            (at.topic, at.partition): at.leader_epoch for at in places if at.leader_epoch is not None
        }

    def poll(self, timeout: float) -> FakeMessage | None:
        if self.coming and not self.coming[0]:
            self.coming.popleft()
            return None
        return self.coming[0].popleft() if self.coming else None

    def consume(self, num_messages: int, timeout: float) -> list[FakeMessage]:
        return list(self.coming.popleft()) if self.coming else []

    def pause(self, places: list[Any]) -> None:
        self.paused |= {(at.topic, at.partition) for at in places}

    def resume(self, places: list[Any]) -> None:
        self.paused -= {(at.topic, at.partition) for at in places}

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("Consumer already closed")
        self.closed = True


class LogConsumer:
    """A Kafka consumer over records in memory: from where its partitions were assigned, in turns, `at_once` a
    look; an end where there is no more."""

    def __init__(self, partitions: Iterable[Partition], records: Iterable[Record], at_once: int = 8) -> None:
        self.at_once = at_once
        self._logs: dict[Partition, list[FakeMessage]] = {p: [] for p in partitions}
        for r in records:
            if (log := self._logs.get((r.topic, r.partition))) is not None:
                assert r.offset == len(log)
                log.append(
                    FakeMessage(
                        (r.topic, r.partition), r.offset, r.timestamp_ms, key=r.key or b"", value=r.value
                    )
                )
        self._at: dict[Partition, int] = {}
        self._ended: set[Partition] = set()
        self._paused: set[Partition] = set()

    def offsets_for_times(self, asked: list[Any], timeout: float) -> list[TopicPartition]:
        ends = {p: len(log) for p, log in self._logs.items()}
        return [
            TopicPartition(
                at.topic, at.partition, ends[at.topic, at.partition] if at.offset == OFFSET_END else 0
            )
            for at in asked
        ]

    def assign(self, places: list[Any]) -> None:
        self._at = {(at.topic, at.partition): at.offset for at in places}
        self._ended = set()  # and what was paused stays paused

    def poll(self, timeout: float) -> FakeMessage | None:
        for place in [p for p in self._at if p not in self._paused]:
            at = self._at.pop(place)
            self._at[place] = at + (more := at < len(self._logs[place]))  # behind the others
            if more:
                return self._logs[place][at]
            if place not in self._ended:
                self._ended.add(place)
                return end(place, at)
        return None

    def consume(self, num_messages: int, timeout: float) -> list[FakeMessage]:
        found = [self.poll(0) for _ in range(min(num_messages, self.at_once))]
        return [message for message in found if message is not None]

    def pause(self, places: list[Any]) -> None:
        self._paused |= {(at.topic, at.partition) for at in places}

    def resume(self, places: list[Any]) -> None:
        self._paused -= {(at.topic, at.partition) for at in places}

    def close(self) -> None:
        """Nothing is held."""

"""Fakes of confluent_kafka's consumer and message: one with scripted polls, one over a log in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record


class FakeMessage:
    """A message as confluent_kafka returns it. `topic()` is the full name at the broker, with the prefix."""

    def __init__(
        self,
        topic_partition: Partition,
        offset: int,
        time_ms: int = 0,
        *,
        key: bytes = b"k",
        value: bytes | None = b"v",
        error: int | KafkaError | None = None,
        epoch: int | None = None,
    ) -> None:
        self._topic_partition, self._offset, self._time_ms = topic_partition, offset, time_ms
        self._key, self._value = key, value
        self._error = KafkaError(error) if isinstance(error, int) else error
        self._epoch = epoch

    def topic(self) -> str:
        return self._topic_partition[0]

    def partition(self) -> int:
        return self._topic_partition[1]

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


def end(topic_partition: Partition, offset: int = 0) -> FakeMessage:
    return FakeMessage(topic_partition, offset, error=clients.PARTITION_EOF)


class FakeConsumer:
    """A consumer with scripted polls. Each element of `batches` holds the messages of one poll, then the poll
    returns nothing. The partitions have the offsets `oldest`..`newest`. With `error_code` set, requests for
    offsets raise that error."""

    def __init__(self, *batches: Iterable[FakeMessage], oldest: int = 0, newest: int = 100) -> None:
        self.batches = deque(deque(messages) for messages in batches)
        self.oldest, self.newest = oldest, newest
        self.error_code: int | None = None
        self.num_metadata_refreshes = 0
        self.assigned: dict[Partition, int] = {}
        self.leader_epochs: dict[Partition, int] = {}  # as given to the latest `assign`
        self.paused: set[Partition] = set()
        self.closed = False

    def add_batch(self, *messages: FakeMessage) -> None:
        """Append the messages of one more poll."""
        self.batches.append(deque(messages))

    def offsets_for_times(self, requested: list[Any], timeout: float) -> list[TopicPartition]:
        if self.error_code is not None:
            raise KafkaException(KafkaError(self.error_code))
        bounds = {OFFSET_BEGINNING: self.oldest, OFFSET_END: self.newest}
        return [TopicPartition(at.topic, at.partition, bounds[at.offset]) for at in requested]

    def list_topics(self, timeout: float) -> None:
        """Count a refresh of the metadata; the real client learns the partitions' leaders from it."""
        self.num_metadata_refreshes += 1

    def assign(self, partitions: list[Any]) -> None:
        """Paused partitions stay paused, as in librdkafka."""
        self.assigned = {(at.topic, at.partition): at.offset for at in partitions}
        self.leader_epochs = {
            (at.topic, at.partition): at.leader_epoch for at in partitions if at.leader_epoch is not None
        }

    def poll(self, timeout: float) -> FakeMessage | None:
        if self.batches and not self.batches[0]:
            self.batches.popleft()
            return None
        return self.batches[0].popleft() if self.batches else None

    def consume(self, num_messages: int, timeout: float) -> list[FakeMessage]:
        return list(self.batches.popleft()) if self.batches else []

    def pause(self, partitions: list[Any]) -> None:
        self.paused |= {(at.topic, at.partition) for at in partitions}

    def resume(self, partitions: list[Any]) -> None:
        self.paused -= {(at.topic, at.partition) for at in partitions}

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("Consumer already closed")
        self.closed = True


class LogConsumer:
    """A consumer over records in memory. It reads from the assigned offsets, takes partitions in turn,
    returns at most `max_per_poll` records per call, and reports the end of each partition once."""

    def __init__(
        self, partitions: Iterable[Partition], records: Iterable[Record], max_per_poll: int = 8
    ) -> None:
        self.max_per_poll = max_per_poll
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

    def offsets_for_times(self, requested: list[Any], timeout: float) -> list[TopicPartition]:
        ends = {p: len(log) for p, log in self._logs.items()}
        return [
            TopicPartition(
                at.topic, at.partition, ends[at.topic, at.partition] if at.offset == OFFSET_END else 0
            )
            for at in requested
        ]

    def assign(self, partitions: list[Any]) -> None:
        self._at = {(at.topic, at.partition): at.offset for at in partitions}
        self._ended = set()  # paused partitions stay paused

    def poll(self, timeout: float) -> FakeMessage | None:
        for partition in [p for p in self._at if p not in self._paused]:
            at = self._at.pop(partition)
            # Move this partition to the end, so that partitions take turns.
            self._at[partition] = at + (more := at < len(self._logs[partition]))
            if more:
                return self._logs[partition][at]
            if partition not in self._ended:
                self._ended.add(partition)
                return end(partition, at)
        return None

    def consume(self, num_messages: int, timeout: float) -> list[FakeMessage]:
        found = [self.poll(0) for _ in range(min(num_messages, self.max_per_poll))]
        return [message for message in found if message is not None]

    def pause(self, partitions: list[Any]) -> None:
        self._paused |= {(at.topic, at.partition) for at in partitions}

    def resume(self, partitions: list[Any]) -> None:
        self._paused -= {(at.topic, at.partition) for at in partitions}

    def close(self) -> None:
        """There is nothing to release."""

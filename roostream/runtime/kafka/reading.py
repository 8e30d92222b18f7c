"""What is read of Kafka, and where it ends."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any, NamedTuple

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from roostream.runtime.kafka.topics import Partition, name_of

log = logging.getLogger("roostream.reader")

_ENDS_EVERY_S = 1.0
_JOIN_S = 0.5  # it may wait for a broker that is away; nothing is lost by leaving it
_ASK_S = 5.0
_KNOWN_FOR_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read, and how."""

    partitions: tuple[Partition, ...]
    prefix: str = ""
    merged: bool = False  # oldest record first over all partitions; otherwise as they come
    buffered: int = 4096  # records a partition; a partition with so many is not fetched
    skips_lost: bool = (
        True  # past what the broker no longer has, with a word and a count; otherwise RecordsGoneError
    )
    follows_ends: bool = False  # `lag` is wanted

    def place(self, partition: Partition, *offset: int) -> TopicPartition:
        return TopicPartition(name_of(self.prefix, partition[0]), partition[1], *offset)

    def partition_of(self, topic: str, number: int) -> Partition:
        """`topic` as the broker calls it."""
        return topic.removeprefix(self.prefix), number

    def named(self) -> str:
        """The topics as the broker calls them."""
        return ", ".join(dict.fromkeys(name_of(self.prefix, topic) for topic, _ in self.partitions))


class End(NamedTuple):
    stable: int  # last stable offset
    high: int  # high watermark
    newest_ms: int  # the newest event time there
    oldest: int = 0  # the first offset still there


class Ends:
    """Where the partitions end, asked once a second by a thread of its own, so that no batch waits for it."""

    def __init__(self, admin: AdminClient, reading: Reading) -> None:
        self.admin, self.reading = admin, reading
        self._known: dict[Partition, End] = {}
        self._known_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader-ends", daemon=True)

    @property
    def known(self) -> dict[Partition, End]:
        """As they last were; {} before the first answer, and when the broker has not answered for a while."""
        return self._known if time.monotonic() - self._known_s < _KNOWN_FOR_S else {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def learn(self, ends: dict[Partition, End]) -> None:
        """These are the ends now."""
        self._known, self._known_s = ends, time.monotonic()

    def ask(self) -> dict[Partition, End]:
        """KafkaException: the broker is away, or refuses."""
        stable = self._offsets(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
        high = self._offsets(OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
        newest = self._offsets(OffsetSpec.max_timestamp(), IsolationLevel.READ_UNCOMMITTED)
        oldest = self._offsets(OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
        return {
            p: End(stable[p].offset, high[p].offset, max(int(newest[p].timestamp), 0), oldest[p].offset)
            for p in self.reading.partitions
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.learn(self.ask())
            except KafkaException as error:
                log.debug("ends of %s are not known now: %s", self.reading.named(), error)
            self._stop.wait(_ENDS_EVERY_S)

    def _offsets(self, spec: OffsetSpec, level: IsolationLevel) -> dict[Partition, Any]:
        asked = {self.reading.place(p): spec for p in self.reading.partitions}
        futures = self.admin.list_offsets(asked, isolation_level=level, request_timeout=_ASK_S)
        return {
            self.reading.partition_of(at.topic, at.partition): future.result()
            for at, future in futures.items()
        }

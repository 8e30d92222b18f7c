"""The publisher: sends changed rows to the topic `rows`, in versions, and tells replicas about rollbacks.

Each interval: 1 take what is unpublished, 2 send it, 3 wait for every acknowledgment, 4 settle. A large
round is copied, encoded and sent in portions, so it is never in memory as a whole. There is one round at a
time, so nothing piles up while Kafka is away: rows stay marked and are sent once, as they are then.

After a restore, before the next round:
  1. write Barrier(incarnation) for each bucket, to learn where the older incarnation ends;
  2. read from the offset that the manifest recorded to the barrier;
  3. mark every key seen there: the next round sends the restored row or a tombstone.
If the recorded offset is gone (retention, a recreated topic), the barriers say `rebootstrap`, and 2 and 3 are
skipped. The offset that the next manifest records moves on only after 3, so a kill in between repeats it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from param_server.deltas import encode_barrier, encode_delta, keys_of
from param_server.embedding_table import Keys, join_keys
from param_server.outbox import Rollback
from param_server.server import Shard
from roostream.errors import UnavailableError, WireError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

log = logging.getLogger("roostream.publish")

_REPUBLISH_KEYS = 65_536
_PORTION_BYTES = 8 << 20
"""Deltas of a round that are encoded and sent together."""


class Message(NamedTuple):
    """One record of the topic."""

    bucket: int
    partition: int
    value: bytes


class RowsTopic(Protocol):
    """The topic `rows`, in Kafka or in memory. Used by one thread."""

    def deliver(self, messages: Sequence[Message], stop: threading.Event) -> list[int]:
        """Append in order; return each message's offset when all are acknowledged. Waits while the broker is
        away.

        **If it fails** (UnavailableError: rejected, or `stop` was set): any of them may have been appended.
        """

    def bounds(self, partition: int, stop: threading.Event) -> tuple[int, int]:
        """Return (oldest offset that is still there, next offset). Raises UnavailableError as `deliver`."""

    def read(self, partition: int, start: int, end: int, stop: threading.Event) -> Iterator[bytes]:
        """Return the values of the records at start..end - 1, in order. Raises RecordsGoneError,
        UnavailableError."""

    def close(self) -> None:
        """Close the connections to Kafka. May be called several times."""


class Publisher:
    """Sends the changed rows of one shard to the topic `rows`. `run` is called in a thread of its own."""

    def __init__(self, shard: Shard, topic: RowsTopic, clock: Clock, *, interval_ms: int = 1000) -> None:
        self.shard, self.topic, self.clock, self.interval_ms = shard, topic, clock, interval_ms
        self.num_keys = self.num_republished = 0
        self.published_at_ms = clock.now_ms()  # when replicas last had everything

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set."""
        backoff = Backoff(what="topic rows", clock=self.clock)
        with contextlib.suppress(UnavailableError):  # stopped while waiting
            while not stop.is_set():
                backoff.until(lambda: self.turn(stop), (UnavailableError,), stop)
                self.clock.sleep(self.interval_ms / 1000, stop)

    def turn(self, stop: threading.Event) -> None:
        """Do a rollback if one is due, then a round.

        **If it fails** (UnavailableError): the next turn starts with the same; nothing that must be published
        is forgotten.
        """
        rollback = self.shard.rollback()
        if rollback:
            self.roll_back(rollback, stop)
        self.publish(stop)

    def publish(self, stop: threading.Event) -> None:
        """Publish everything that is unpublished, as it is now; nothing if a rollback is due.

        **If it fails** (UnavailableError: Kafka is away or rejects it, or `stop` was set): some of it may
        have been appended. All of it counts as unpublished again and is sent in later versions.
        """
        taken = self.shard.take_round()  # 1
        if taken is None:
            return
        schema = self.shard.identity.schema.fingerprint
        ends: dict[int, int] = {}
        num_keys, done = 0, False
        try:
            portion, portion_bytes = list[Message](), 0
            for planned in taken.deltas:
                if (delta := self.shard.copy_delta(taken, planned)) is not None:
                    data = encode_delta(delta, schema, taken.incarnation)
                    portion.append(self._message(delta.bucket, data))
                    num_keys += len(delta.id_M)
                    portion_bytes += len(data)
                if portion_bytes >= _PORTION_BYTES:
                    ends |= self._send(portion, stop)  # 2, 3
                    portion, portion_bytes = [], 0
            ends |= self._send(portion, stop)
            done = True
        finally:
            self.shard.settle_round(taken, done, ends)  # 4
        self.published_at_ms = self.clock.now_ms()
        self.num_keys += num_keys

    def roll_back(self, rollback: Rollback, stop: threading.Event) -> None:
        """Write barriers and mark every key behind the manifest's offsets, so that the next round sends its
        current state.

        **If it fails** (UnavailableError): barriers may be written and keys marked, which can be repeated.
        The shard keeps the rollback, and no round is taken before it is done.
        """
        bounds = {p: self.topic.bounds(p, stop) for p in rollback.rows_end}
        gone = {p for p, start in rollback.rows_end.items() if not bounds[p][0] <= start <= bounds[p][1]}
        ends = self._send(self._barriers(rollback, gone, rollback.rows_end), stop)  # 1
        for partition, start in rollback.rows_end.items():
            if partition in gone:
                continue
            try:
                values = self.topic.read(partition, start, ends[partition], stop)  # 2
                self._republish(rollback, values)  # 3
            except RecordsGoneError as error:
                log.warning("%s; replicas will load the rows of this partition from the shard again", error)
                ends |= self._send(self._barriers(rollback, {partition}, {partition}), stop)
        self.shard.rolled_back(rollback.incarnation, ends)

    def _send(self, messages: Sequence[Message], stop: threading.Event) -> dict[int, int]:
        """Partition → offset after the last of these messages."""
        ends: dict[int, int] = {}
        for message, offset in zip(messages, self.topic.deliver(messages, stop), strict=True):
            ends[message.partition] = max(offset + 1, ends.get(message.partition, 0))
        return ends

    def _barriers(
        self, rollback: Rollback, rebootstrap: set[int], partitions: Iterable[int]
    ) -> list[Message]:
        chosen = set(partitions)
        return [
            self._message(
                bucket, encode_barrier(stack, bucket, rollback.incarnation, partition in rebootstrap)
            )
            for bucket in sorted(rollback.buckets)
            if (partition := self.shard.identity.partition_of(bucket)) in chosen
            for stack in self.shard.tables
        ]

    def _message(self, bucket: int, value: bytes) -> Message:
        return Message(bucket, self.shard.identity.partition_of(bucket), value)

    def _republish(self, rollback: Rollback, values: Iterable[bytes]) -> None:
        """Mark the keys of this shard's buckets, in portions."""
        seen: dict[str, list[Keys]] = defaultdict(list)
        for value in values:
            delta = _delta_of(value)
            if delta is None or delta.bucket not in rollback.buckets:
                continue
            seen[delta.stack].append(keys_of(delta))
            if sum(map(len, seen[delta.stack])) >= _REPUBLISH_KEYS:
                self._mark(rollback, delta.stack, seen.pop(delta.stack))
        for stack, keys in seen.items():
            self._mark(rollback, stack, keys)

    def _mark(self, rollback: Rollback, stack: str, keys: list[Keys]) -> None:
        self.shard.republish(rollback.incarnation, stack, join_keys(*keys))
        self.num_republished += sum(map(len, keys))


def _delta_of(value: bytes) -> pb.RowDelta | None:
    try:
        _, message = wire.decode(value)
    except WireError as error:
        log.warning("a record of rows is skipped: %s", error)
        return None
    return message if isinstance(message, pb.RowDelta) else None

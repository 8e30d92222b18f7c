"""The topics of a replay in this process: records get the places that Kafka would give them, and are counted."""

from __future__ import annotations

from collections import Counter

from infra.auditor.accounts import Accounts
from roostream.cli.replay.findings import Findings
from roostream.replay.kafka_partitioner import partition_of
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, partitions_of
from roostream.schema.schema import Schema
from roostream.wire.records import Record


class LocalTopics:
    """Nothing is kept: `accounts` and `findings` have seen what went through."""

    def __init__(self, schema: Schema, measure_from_ms: int = 0) -> None:
        self.accounts, self.findings = Accounts(), Findings(schema, measure_from_ms)
        self._offsets: Counter[tuple[str, int]] = Counter()

    def place(self, record: Record) -> Record:
        """A record of the log, with its offset."""
        placed = record._replace(offset=self._next_offset(record.topic, record.partition))
        self.accounts.add(placed)
        return placed

    def write(self, topic: str, key: bytes, value: bytes, time_ms: int) -> Record:
        """A record of an output topic."""
        partition = partition_of(key, partitions_of(topic, DEFAULT_PARTITIONS))
        record = Record(topic, partition, self._next_offset(topic, partition), time_ms, key, value)
        self.accounts.add(record)
        self.findings.add(record)
        return record

    def _next_offset(self, topic: str, partition: int) -> int:
        self._offsets[topic, partition] += 1
        return self._offsets[topic, partition] - 1

"""Records that retention deletes before a consumer group has read them are logged and counted once."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import TopicPartition

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.retention_loss import CommittedOffset, RetentionLossCounter, committed_offsets
from roostream.runtime.kafka.topics import Partition
from tests.runtime.fake_consumer import FakeConsumer

A, B = ("impressions", 0), ("impressions", 1)


class FakeKafka:
    """A fake that reports offsets and counts losses. With `is_unavailable`, requests fail."""

    def __init__(self) -> None:
        self.offsets: dict[Partition, CommittedOffset] = {
            A: CommittedOffset(0, -1),
            B: CommittedOffset(0, -1),
        }
        self.is_unavailable = False
        self.losses = RetentionLossCounter(self._offsets, "the join")

    def _offsets(self) -> dict[Partition, CommittedOffset]:
        if self.is_unavailable:
            raise UnavailableError("away")
        return self.offsets

    def lost_at(self, partition: Partition, oldest: int, committed: int) -> int:
        """Set the partition's offsets and return the number of records lost so far."""
        self.offsets[partition] = CommittedOffset(oldest, committed)
        self.losses.update()
        return self.losses.num_lost


def test_a_reader_that_keeps_up_loses_nothing() -> None:
    kafka = FakeKafka()
    for oldest, committed in ((0, 0), (0, 50), (50, 50), (50, 90), (60, 90)):
        assert kafka.lost_at(A, oldest, committed) == 0


def test_records_deleted_before_their_commit_are_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = FakeKafka()
    assert kafka.lost_at(A, 30, 10) == 20
    assert "impressions-0: retention deleted 20 records" in caplog.text
    assert kafka.lost_at(A, 30, 10) == 20
    assert kafka.lost_at(A, 35, 10) == 25, "the group stands still while retention deletes more"
    assert kafka.lost_at(A, 35, 35) == 25, "the group continued at the oldest record"
    assert kafka.lost_at(A, 36, 40) == 25
    assert kafka.lost_at(A, 50, 40) == 35
    assert caplog.text.count("retention deleted") == 3


def test_partitions_are_counted_separately() -> None:
    kafka = FakeKafka()
    assert kafka.lost_at(A, 30, 10) == 20 and kafka.lost_at(B, 7, 2) == 25


def test_a_group_without_committed_offsets_loses_nothing() -> None:
    assert FakeKafka().lost_at(A, 30, -1) == 0


def test_an_outage_hides_losses_only_until_the_next_check() -> None:
    kafka = FakeKafka()
    kafka.is_unavailable = True
    assert kafka.lost_at(A, 30, 10) == 0
    kafka.is_unavailable = False
    assert kafka.lost_at(A, 30, 10) == 20


class FakeGroup(FakeConsumer):
    """A group that has committed offset 5 of the first partition and nothing of the others (-1001 in
    librdkafka)."""

    def committed(self, partitions: list[Any], timeout: float) -> list[TopicPartition]:
        return [
            TopicPartition(at.topic, at.partition, 5 if at.partition == 0 else -1001)
            for at in reversed(partitions)
        ]


def offsets_of(group: FakeGroup) -> dict[Partition, CommittedOffset]:
    return committed_offsets(group, ConsumerOptions(partitions=(A, B), prefix="x."))  # type: ignore[arg-type]


def test_committed_offsets_are_returned_with_the_oldest_ones_without_the_prefix() -> None:
    assert offsets_of(FakeGroup(oldest=3)) == {A: CommittedOffset(3, 5), B: CommittedOffset(3, -1)}


def test_an_unavailable_broker_is_reported() -> None:
    group = FakeGroup()
    group.error_code = clients.TRANSPORT
    with pytest.raises(UnavailableError, match="unknown"):
        offsets_of(group)

"""What retention takes from a group that commits its offsets is said and counted once."""

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


class Kafka:
    """Answers what it is told; `away` is an outage."""

    def __init__(self) -> None:
        self.found: dict[Partition, CommittedOffset] = {A: CommittedOffset(0, -1), B: CommittedOffset(0, -1)}
        self.away = False
        self.losses = RetentionLossCounter(self._ask, "the join")

    def _ask(self) -> dict[Partition, CommittedOffset]:
        if self.away:
            raise UnavailableError("away")
        return self.found

    def lost_at(self, partition: Partition, oldest: int, committed: int) -> int:
        """So far."""
        self.found[partition] = CommittedOffset(oldest, committed)
        self.losses.update()
        return self.losses.num_lost


def test_a_reader_that_keeps_up_loses_nothing() -> None:
    kafka = Kafka()
    for oldest, committed in ((0, 0), (0, 50), (50, 50), (50, 90), (60, 90)):
        assert kafka.lost_at(A, oldest, committed) == 0


def test_records_deleted_before_their_commit_are_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = Kafka()
    assert kafka.lost_at(A, 30, 10) == 20
    assert "impressions-0: retention deleted 20 records" in caplog.text
    assert kafka.lost_at(A, 30, 10) == 20
    assert kafka.lost_at(A, 35, 10) == 25, "it stands still, and retention goes on"
    assert kafka.lost_at(A, 35, 35) == 25, "it went on from the oldest"
    assert kafka.lost_at(A, 36, 40) == 25
    assert kafka.lost_at(A, 50, 40) == 35
    assert caplog.text.count("retention deleted") == 3


def test_partitions_are_counted_by_themselves() -> None:
    kafka = Kafka()
    assert kafka.lost_at(A, 30, 10) == 20 and kafka.lost_at(B, 7, 2) == 25


def test_a_reader_that_has_committed_nothing_was_promised_nothing() -> None:
    assert Kafka().lost_at(A, 30, -1) == 0


def test_an_outage_hides_losses_only_until_the_next_check() -> None:
    kafka = Kafka()
    kafka.away = True
    assert kafka.lost_at(A, 30, 10) == 0
    kafka.away = False
    assert kafka.lost_at(A, 30, 10) == 20


class Group(FakeConsumer):
    """Has committed 5 of the first partition, and nothing of the others (librdkafka says -1001)."""

    def committed(self, places: list[Any], timeout: float) -> list[TopicPartition]:
        return [
            TopicPartition(at.topic, at.partition, 5 if at.partition == 0 else -1001)
            for at in reversed(places)
        ]


def asked(group: Group) -> dict[Partition, CommittedOffset]:
    return committed_offsets(group, ConsumerOptions(partitions=(A, B), prefix="x."))  # type: ignore[arg-type]


def test_a_groups_offsets_stand_beside_the_oldest_ones_under_our_names() -> None:
    assert asked(Group(oldest=3)) == {A: CommittedOffset(3, 5), B: CommittedOffset(3, -1)}


def test_an_unavailable_broker_is_reported() -> None:
    group = Group()
    group.fails = clients.TRANSPORT
    with pytest.raises(UnavailableError, match="unknown"):
        asked(group)

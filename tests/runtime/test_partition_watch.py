"""Partitions that were added while the programs run are reported."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.partition_watch import LOOK_S, PartitionWatch
from roostream.runtime.kafka.topics import DEAD_LETTERS, SAMPLES, TOPICS, partitions_of


class FakeAdmin:
    """Topics with numbers of partitions; `away`: no broker answers."""

    def __init__(self) -> None:
        self.numbers = {f"p.{topic}": partitions_of(topic, 4) for topic in TOPICS}
        self.away = False

    def list_topics(self, timeout: float) -> Any:
        if self.away:
            raise KafkaException(KafkaError(clients.TRANSPORT, "away"))
        topics = {n: SimpleNamespace(partitions=dict.fromkeys(range(k))) for n, k in self.numbers.items()}
        return SimpleNamespace(topics=topics)


def watch_of(brokers: FakeAdmin) -> PartitionWatch:
    return PartitionWatch(lambda: brokers, "p.", 4)  # type: ignore[arg-type,return-value]


def test_an_added_partition_is_reported_with_what_to_do_until_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    brokers = FakeAdmin()
    watch = watch_of(brokers)
    watch.look()
    assert watch.problems() == {} and caplog.text == ""
    brokers.numbers[f"p.{SAMPLES}"] = 5
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            watch.look()
    text = watch.problems()[f"p.{SAMPLES}"]
    assert "5 partitions" in text and "topics grow --partitions 5" in text
    assert caplog.text.count(text) == 1, "logged once"
    brokers.away = True
    watch.look()
    assert watch.problems().keys() == {f"p.{SAMPLES}"}, "an outage solves nothing"
    brokers.away = False
    brokers.numbers[f"p.{SAMPLES}"] = 4
    watch.look()
    assert watch.problems() == {}
    assert LOOK_S < 60


def test_dead_letters_have_one_partition_whatever_the_setting() -> None:
    brokers = FakeAdmin()
    brokers.numbers[f"p.{DEAD_LETTERS}"] = 2
    watch = watch_of(brokers)
    watch.look()
    assert "create this topic again" in watch.problems()[f"p.{DEAD_LETTERS}"]


def test_the_watch_ends_when_it_is_stopped() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=watch_of(FakeAdmin()).run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()

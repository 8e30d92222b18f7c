"""Partitions that were added while the programs run are reported."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_watch import CHECK_INTERVAL_S, TopicWatch
from roostream.runtime.kafka.topics import DEAD_LETTERS, SAMPLES, TOPICS, partitions_of


class FakeAdmin:
    """Topics with ids and numbers of partitions; `away`: no broker answers."""

    def __init__(self) -> None:
        self.numbers = {f"p.{topic}": partitions_of(topic, 4) for topic in TOPICS}
        self.ids = {name: f"id of {name}" for name in self.numbers}
        self.away = False

    def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
        futures: dict[str, Future[Any]] = {name: Future() for name in topics.topic_names}
        for name, future in futures.items():
            if self.away or name not in self.numbers:
                code = clients.TRANSPORT if self.away else KafkaError.UNKNOWN_TOPIC_OR_PART
                future.set_exception(KafkaException(KafkaError(code, "no")))
            else:
                partitions = [None] * self.numbers[name]
                future.set_result(SimpleNamespace(partitions=partitions, topic_id=self.ids[name]))
        return futures


def watch_of(brokers: FakeAdmin) -> TopicWatch:
    return TopicWatch(lambda: brokers, "p.", 4)  # type: ignore[arg-type,return-value]


def test_an_added_partition_is_reported_with_what_to_do_until_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    brokers = FakeAdmin()
    watch = watch_of(brokers)
    watch.check()
    assert watch.problems() == {} and caplog.text == ""
    brokers.numbers[f"p.{SAMPLES}"] = 5
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            watch.check()
    text = watch.problems()[f"p.{SAMPLES}"]
    assert "5 partitions" in text and "topics grow --partitions 5" in text
    assert caplog.text.count(text) == 1, "logged once"
    brokers.away = True
    watch.check()
    assert watch.problems().keys() == {f"p.{SAMPLES}"}, "an outage solves nothing"
    brokers.away = False
    brokers.numbers[f"p.{SAMPLES}"] = 4
    watch.check()
    assert watch.problems() == {}
    assert CHECK_INTERVAL_S < 60


def test_a_topic_that_was_deleted_or_created_again_is_reported() -> None:
    """Readers cannot tell: its new records have the offsets of the old ones."""
    brokers = FakeAdmin()
    watch = watch_of(brokers)
    watch.check()
    number = brokers.numbers.pop(f"p.{SAMPLES}")
    watch.check()
    assert "does not exist" in watch.problems()[f"p.{SAMPLES}"]
    brokers.numbers[f"p.{SAMPLES}"], brokers.ids[f"p.{SAMPLES}"] = number, "another"
    for _ in range(2):
        watch.check()
        assert "created again" in watch.problems()[f"p.{SAMPLES}"]


def test_dead_letters_have_one_partition_whatever_the_setting() -> None:
    brokers = FakeAdmin()
    brokers.numbers[f"p.{DEAD_LETTERS}"] = 2
    watch = watch_of(brokers)
    watch.check()
    assert "create this topic again" in watch.problems()[f"p.{DEAD_LETTERS}"]


def test_a_program_goes_on_while_its_certificate_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment the key belongs to another certificate; a wrong setting would end the program for good."""

    def refuse(*_: Any) -> AdminClient:
        raise ConfigError("kafka_security: key values mismatch")

    brokers = FakeAdmin()
    admins = iter([lambda: brokers, refuse, lambda: brokers])
    watch = TopicWatch(lambda: next(admins)(), "p.", 4)  # type: ignore[arg-type,return-value]
    for _ in range(3):
        watch.check()
    assert watch.problems() == {}
    monkeypatch.setattr(clients, "admin", refuse)
    with pytest.raises(UnavailableError, match="mismatch"):
        clients.topic_ids(Broker("k:1"), "p.", (SAMPLES,))


def test_the_watch_ends_when_it_is_stopped() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=watch_of(FakeAdmin()).run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()

"""Reports topics that change while programs run: partitions added, topics deleted or created again."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigEntry

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_watch import CHECK_INTERVAL_S, TopicWatch
from roostream.runtime.kafka.topics import DEAD_LETTERS, SAMPLES, TOPICS, partitions_of


class FakeAdmin:
    """An admin client over topics with ids and numbers of partitions. With `is_unavailable`, no broker
    answers."""

    def __init__(self) -> None:
        self.numbers = {f"p.{topic}": partitions_of(topic, 4) for topic in TOPICS}
        self.ids = {name: f"id of {name}" for name in self.numbers}
        self.is_unavailable = False
        self.refused: set[str] = set()  # the user has no rights to these
        self.policies = dict.fromkeys(self.numbers, "delete")

    def describe_configs(self, resources: Any, **_: Any) -> dict[Any, Future[Any]]:
        futures: dict[Any, Future[Any]] = {resource: Future() for resource in resources}
        for resource, future in futures.items():
            future.set_result({"cleanup.policy": ConfigEntry("cleanup.policy", self.policies[resource.name])})
        return futures

    def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
        futures: dict[str, Future[Any]] = {name: Future() for name in topics.topic_names}
        for name, future in futures.items():
            if name in self.refused:
                future.set_exception(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "no")))
            elif self.is_unavailable or name not in self.numbers:
                code = clients.TRANSPORT if self.is_unavailable else KafkaError.UNKNOWN_TOPIC_OR_PART
                future.set_exception(KafkaException(KafkaError(code, "no")))
            else:
                partitions = [None] * self.numbers[name]
                future.set_result(SimpleNamespace(partitions=partitions, topic_id=self.ids[name]))
        return futures


def watch_of(fake_admin: FakeAdmin) -> TopicWatch:
    return TopicWatch(lambda: fake_admin, "p.", 4)  # type: ignore[arg-type,return-value]


def test_an_added_partition_is_reported_with_what_to_do_until_it_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_admin = FakeAdmin()
    watch = watch_of(fake_admin)
    watch.check()
    assert watch.problems() == {} and caplog.text == ""
    fake_admin.numbers[f"p.{SAMPLES}"] = 5
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            watch.check()
    text = watch.problems()[f"p.{SAMPLES}"]
    assert "5 partitions" in text and "topics grow --partitions 5" in text
    assert caplog.text.count(text) == 1, "the problem must be logged once"
    fake_admin.is_unavailable = True
    watch.check()
    assert watch.problems().keys() == {f"p.{SAMPLES}"}, "an outage must not clear the problem"
    fake_admin.is_unavailable = False
    fake_admin.numbers[f"p.{SAMPLES}"] = 4
    watch.check()
    assert watch.problems() == {}
    assert CHECK_INTERVAL_S < 60


def test_a_topic_that_was_deleted_or_created_again_is_reported() -> None:
    """A reader can't tell: the new topic's records have the same offsets as the old ones."""
    fake_admin = FakeAdmin()
    watch = watch_of(fake_admin)
    watch.check()
    number = fake_admin.numbers.pop(f"p.{SAMPLES}")
    watch.check()
    assert "does not exist" in watch.problems()[f"p.{SAMPLES}"]
    fake_admin.numbers[f"p.{SAMPLES}"], fake_admin.ids[f"p.{SAMPLES}"] = number, "another"
    for _ in range(2):
        watch.check()
        assert "created again" in watch.problems()[f"p.{SAMPLES}"]


def test_a_topic_that_is_compacted_while_programs_run_is_reported() -> None:
    fake_admin = FakeAdmin()
    watch = watch_of(fake_admin)
    fake_admin.policies[f"p.{SAMPLES}"] = "compact,delete"
    watch.check()
    assert "cleanup.policy = compact,delete" in watch.problems()[f"p.{SAMPLES}"]
    fake_admin.policies[f"p.{SAMPLES}"] = "delete"
    watch.check()
    assert watch.problems() == {}


def test_a_topic_that_the_user_may_not_describe_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    fake_admin = FakeAdmin()
    fake_admin.refused = {f"p.{TOPICS[0]}"}
    fake_admin.numbers[f"p.{SAMPLES}"] = 5
    watch = watch_of(fake_admin)
    for _ in range(2):
        watch.check()
    assert watch.problems().keys() == {f"p.{SAMPLES}"}
    assert caplog.text.count(f"topic p.{TOPICS[0]} is not watched") == 1


def test_dead_letters_have_one_partition_whatever_the_setting() -> None:
    fake_admin = FakeAdmin()
    fake_admin.numbers[f"p.{DEAD_LETTERS}"] = 2
    watch = watch_of(fake_admin)
    watch.check()
    assert "create this topic again" in watch.problems()[f"p.{DEAD_LETTERS}"]


def test_a_program_continues_while_its_certificate_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment the key does not fit the certificate. Treating that as a wrong setting would end the
    program."""

    def refuse(*_: Any) -> AdminClient:
        raise UnavailableError("kafka_security: key values mismatch")

    fake_admin = FakeAdmin()
    admins = iter([lambda: fake_admin, refuse, lambda: fake_admin])
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

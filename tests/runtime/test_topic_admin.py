"""Creating topics, and reporting how existing topics differ from the settings, over a fake admin client."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import DEAD_LETTERS, ROWS, SAMPLES, TOPICS, TopicSettings, partitions_of


@dataclasses.dataclass
class Topic:
    """Metadata and settings of a topic."""

    partitions: dict[int, object]
    config: dict[str, str]


@dataclasses.dataclass
class ConfigEntry:
    value: str


class FakeAdmin:
    """The calls of confluent_kafka's AdminClient that the product uses, over a dictionary. `num_stale_reads`
    calls of `list_topics` do not see new topics yet; with `down`, they fail."""

    def __init__(self) -> None:
        self.topics: dict[str, Topic] = {}
        self.refused: dict[str, int] = {}
        self.down = False
        self.num_stale_reads = 0
        self._hidden: set[str] = set()

    def create_topics(self, new: list[Any], **_: Any) -> dict[str, Future[None]]:
        return {topic.topic: self._create(topic) for topic in new}

    def _create(self, topic: Any) -> Future[None]:
        done: Future[None] = Future()
        code = (
            KafkaError.TOPIC_ALREADY_EXISTS if topic.topic in self.topics else self.refused.get(topic.topic)
        )
        if code is not None:
            done.set_exception(KafkaException(KafkaError(code, "no")))
            return done
        self.topics[topic.topic] = Topic(dict.fromkeys(range(topic.num_partitions)), dict(topic.config))
        self._hidden.add(topic.topic)
        done.set_result(None)
        return done

    def create_partitions(self, new: list[Any], **_: Any) -> dict[str, Future[None]]:
        futures: dict[str, Future[None]] = {}
        for more in new:
            self.topics[more.topic].partitions = dict.fromkeys(range(more.new_total_count))
            futures[more.topic] = Future()
            futures[more.topic].set_result(None)
        return futures

    def list_topics(self, timeout: float) -> Any:
        if self.down:
            raise KafkaException(KafkaError(clients.TRANSPORT, "away"))
        hidden = self._hidden if self.num_stale_reads > 0 else set()
        self.num_stale_reads -= 1
        return type("Metadata", (), {"topics": {n: t for n, t in self.topics.items() if n not in hidden}})()

    def describe_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[dict[str, ConfigEntry]]]:
        out = {}
        for resource in resources:
            done: Future[dict[str, ConfigEntry]] = Future()
            done.set_result({k: ConfigEntry(v) for k, v in self.topics[resource.name].config.items()})
            out[resource] = done
        return out

    def incremental_alter_configs(self, resources: list[Any], **_: Any) -> dict[Any, Future[None]]:
        out = {}
        for resource in resources:
            done: Future[None] = Future()
            if (code := self.refused.get(resource.name)) is not None:
                done.set_exception(KafkaException(KafkaError(code, "no")))
            else:
                self.topics[resource.name].config |= {
                    entry.name: entry.value for entry in resource.incremental_configs
                }
                done.set_result(None)
            out[resource] = done
        return out


def admin(fake_admin: FakeAdmin, partitions: int = 8, **settings: Any) -> TopicAdmin:
    return TopicAdmin(fake_admin, "p.", partitions, TopicSettings(**settings))


def test_all_topics_are_made_once_and_then_are_as_expected() -> None:
    fake_admin = FakeAdmin()
    assert admin(fake_admin).create() == [f"p.{topic}" for topic in TOPICS]
    assert admin(fake_admin).create() == [], "the second call must create nothing"
    admin(fake_admin).check()
    assert {name: len(t.partitions) for name, t in fake_admin.topics.items()} == {
        f"p.{topic}": partitions_of(topic, 8) for topic in TOPICS
    }
    assert partitions_of(DEAD_LETTERS, 8) == 1 and partitions_of(ROWS, 8) == 8


def test_topics_grow_to_the_number_of_the_settings() -> None:
    fake_admin = FakeAdmin()
    admin(fake_admin, 4).create()
    fake_admin.topics["p.samples"].partitions = dict.fromkeys(range(5))  # somebody added a partition
    grown = admin(fake_admin, 5).grow()
    assert set(grown) == {f"p.{topic}" for topic in TOPICS if topic not in (SAMPLES, DEAD_LETTERS)}
    admin(fake_admin, 5).check()
    assert admin(fake_admin, 5).grow() == []
    with pytest.raises(ConfigError, match=r"at most 4 partitions, got 5"):
        admin(fake_admin, 4).grow()
    del fake_admin.topics["p.rows"]
    with pytest.raises(ConfigError, match=r"p.rows to exist"):
        admin(fake_admin, 6).grow()


def test_a_broker_that_learns_of_a_new_topic_late_is_awaited() -> None:
    fake_admin = FakeAdmin()
    fake_admin.num_stale_reads = 2
    admin(fake_admin).create()
    admin(fake_admin).check()


def test_an_existing_topic_that_differs_is_reported_in_one_sentence() -> None:
    fake_admin = FakeAdmin()
    admin(fake_admin).create()
    del fake_admin.topics["p.rows"]
    fake_admin.topics["p.corrections"].config["cleanup.policy"] = "compact"
    with pytest.raises(ConfigError) as caught:
        admin(fake_admin, partitions=16, retention_ms=10**12).check()
    message = str(caught.value)
    assert f"topic p.{SAMPLES}: expected 16 partitions, got 8" in message and "\n" not in message
    assert f"topic p.{SAMPLES}: expected retention.ms = 1000000000000, got 86400000" in message
    assert "topic p.rows: expected to exist, got none" in message
    assert "topic p.corrections: expected cleanup.policy = delete, got compact" in message
    assert "p.dead_letters: expected 1" not in message and "use the settings" in message


def test_a_topic_that_is_refused_is_named() -> None:
    fake_admin = FakeAdmin()
    fake_admin.refused["p.samples"] = KafkaError.INVALID_REPLICATION_FACTOR
    with pytest.raises(UnavailableError, match=r"topic p.samples could not be created: no"):
        admin(fake_admin, replication=3).create()


def test_unavailable_brokers_are_reported() -> None:
    fake_admin = FakeAdmin()
    fake_admin.down = True
    with pytest.raises(UnavailableError, match="away"):
        admin(fake_admin).differences()


def test_a_replay_keeps_old_records_but_for_rows() -> None:
    fake_admin = FakeAdmin()
    admin(fake_admin, replay=True).create()
    assert fake_admin.topics["p.samples"].config["retention.ms"] == "-1"
    assert fake_admin.topics["p.rows"].config["retention.ms"] == "3600000"


def test_records_are_kept_longer_and_never_for_a_shorter_time() -> None:
    fake_admin = FakeAdmin()
    admin(fake_admin, retention_ms=1_000).create()
    fake_admin.topics["p.corrections"].config["retention.ms"] = "9000"
    fake_admin.topics["p.predictions"].config["retention.ms"] = "-1"
    new_retention = admin(fake_admin).keep_longer(5_000)
    retention = {name: int(topic.config["retention.ms"]) for name, topic in fake_admin.topics.items()}
    assert retention.pop(f"p.{ROWS}") == 3_600_000, (
        "replicas need rows for minutes only, and their topic is the largest"
    )
    assert (
        new_retention
        == retention
        == dict.fromkeys(retention, 5_000) | {"p.corrections": 9_000, "p.predictions": -1}
    )
    fake_admin.topics["p.predictions"].config["retention.ms"] = "5000"
    admin(fake_admin, retention_ms=1_000).check()


def test_a_refused_retention_change_is_reported() -> None:
    fake_admin = FakeAdmin()
    admin(fake_admin, retention_ms=1_000).create()
    fake_admin.refused["p.samples"] = KafkaError.TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(UnavailableError, match="retention could not be changed: no"):
        admin(fake_admin).keep_longer(5_000)

"""Creates a deployment's topics, and compares existing ones with its settings.

Used by `roostream topics` and the local stack; no other program creates or changes topics.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import ROWS, TOPICS, TopicSettings, configs, name_of, partitions_of

_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 2 * _TIMEOUT_S
_MAX_POLLS, _POLL_EVERY_S = 50, 0.1


class TopicAdmin:
    """The topics of one prefix on one cluster."""

    def __init__(
        self,
        client: AdminClient,
        prefix: str,
        partitions: int,
        settings: TopicSettings,
        topics: Iterable[str] = TOPICS,
    ) -> None:
        self.client, self.prefix, self.partitions, self.settings = client, prefix, partitions, settings
        self.topics = tuple(topics)

    def create(self) -> list[str]:
        """Create missing topics; existing ones stay unchanged. Returns the names of the created ones.

        Raises:
            UnavailableError: the brokers are away or refuse, with topic and reason. Others may have been
            created.
        """
        new = [
            NewTopic(
                name_of(self.prefix, topic),
                partitions_of(topic, self.partitions),
                self.settings.replication,
                config=configs(topic, self.settings),
            )
            for topic in self.topics
        ]
        made = []
        for name, future in self.client.create_topics(new, operation_timeout=_TIMEOUT_S).items():
            try:
                clients.results_of({name: future}, _ANSWER_TIMEOUT_S)
                made.append(name)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise UnavailableError(
                        f"topic {name} could not be created: {error.args[0].str()}"
                    ) from None
        self._wait_for(made)
        return made

    def check(self) -> None:
        """Check that every topic exists as the settings say.

        Raises:
            ConfigError: lists every difference: expected, got.
            UnavailableError: the brokers are away.
        """
        wrong = self.differences()
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}: use the settings with which the topics were created, alter the "
                "topics with Kafka's tools, or choose another prefix"
            )

    def differences(self) -> list[str]:
        """Differences such as "topic samples: expected 8 partitions, got 4".

        Raises:
            UnavailableError: the brokers are away.
        """
        try:
            known = self.client.list_topics(timeout=_TIMEOUT_S).topics
            existing = [topic for topic in self.topics if name_of(self.prefix, topic) in known]
            found = self._configs(existing)
        except KafkaException as error:
            raise UnavailableError(f"Kafka can't list its topics: {error.args[0].str()}") from None
        out = []
        for topic in self.topics:
            name = name_of(self.prefix, topic)
            if topic not in found:
                out.append(f"topic {name}: expected to exist, got none (run `roostream topics create`)")
                continue
            expected, got = partitions_of(topic, self.partitions), len(known[name].partitions)
            if expected != got:
                out.append(f"topic {name}: expected {expected} partitions, got {got}")
            for key, value in configs(topic, self.settings).items():
                if not _matches(key, value, found[topic].get(key)):
                    out.append(f"topic {name}: expected {key} = {value}, got {found[topic].get(key)}")
        return out

    def grow(self) -> list[str]:
        """Give every topic as many partitions as the settings say. Returns the names of the topics that got
        more. Kafka cannot remove partitions, so a topic that has more is an error before anything is changed.

        Raises:
            ConfigError: a topic is missing, or has more partitions.
            UnavailableError: the brokers are away or refuse; some topics may have grown. Call again.
        """
        try:
            known = self.client.list_topics(timeout=_TIMEOUT_S).topics
            wanted = {
                name_of(self.prefix, topic): partitions_of(topic, self.partitions) for topic in self.topics
            }
            if missing := [name for name in wanted if name not in known]:
                raise ConfigError(
                    f"expected topic {missing[0]} to exist, got none: run `roostream topics create`"
                )
            numbers = {name: len(known[name].partitions) for name in wanted}
            if larger := [name for name in wanted if numbers[name] > wanted[name]]:
                raise ConfigError(
                    f"topic {larger[0]}: expected at most {wanted[larger[0]]} partitions, "
                    f"got {numbers[larger[0]]}; use at least this number for `partitions`"
                )
            new = [NewPartitions(name, wanted[name]) for name in wanted if numbers[name] < wanted[name]]
            if new:
                grown = self.client.create_partitions(new, request_timeout=_TIMEOUT_S)
                clients.results_of(grown, _ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise UnavailableError(
                f"partitions could not be added to the topics: {error.args[0].str()}"
            ) from None
        return [str(partitions.topic) for partitions in new]

    def keep_longer(self, retention_ms: int) -> dict[str, int]:
        """Raise the retention of every topic except `rows` to at least `retention_ms`. Returns name →
        retention in ms.

        Longer and unlimited retentions stay: this never causes a deletion. `rows` is only needed for minutes.

        Raises:
            UnavailableError: the brokers are away or refuse; some topics may have been changed.
        """
        topics = [topic for topic in self.topics if topic != ROWS]
        try:
            found = {topic: int(config["retention.ms"]) for topic, config in self._configs(topics).items()}
            short = [topic for topic, has_ms in found.items() if 0 <= has_ms < retention_ms]
            self._alter(short, "retention.ms", str(retention_ms))
        except KafkaException as error:
            raise UnavailableError(
                f"the topics' retention could not be changed: {error.args[0].str()}"
            ) from None
        return {
            name_of(self.prefix, topic): retention_ms if topic in short else has_ms
            for topic, has_ms in found.items()
        }

    def _alter(self, topics: list[str], key: str, value: str) -> None:
        entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        resources = [
            ConfigResource(ResourceType.TOPIC, name_of(self.prefix, topic), incremental_configs=[entry])
            for topic in topics
        ]
        if resources:
            altered = self.client.incremental_alter_configs(resources, request_timeout=_TIMEOUT_S)
            clients.results_of(altered, _ANSWER_TIMEOUT_S)

    def _wait_for(self, names: list[str]) -> None:
        """A broker may learn of a new topic a moment after the controller created it."""
        for _ in range(_MAX_POLLS):
            if set(names) <= set(self.client.list_topics(timeout=_TIMEOUT_S).topics):
                return
            time.sleep(_POLL_EVERY_S)

    def _configs(self, topics: list[str]) -> dict[str, dict[str, Any]]:
        """Topic → configuration on the brokers."""
        resources = {
            ConfigResource(ResourceType.TOPIC, name_of(self.prefix, topic)): topic for topic in topics
        }
        if not resources:
            return {}
        futures = self.client.describe_configs(list(resources), request_timeout=_TIMEOUT_S)
        return {
            resources[resource]: {key: entry.value for key, entry in entries.items()}
            for resource, entries in clients.results_of(futures, _ANSWER_TIMEOUT_S).items()
        }


def _matches(key: str, expected: str, got: str | None) -> bool:
    """A longer retention is no difference, because `keep_longer` may have set it."""
    longer = key == "retention.ms" and got is not None and 0 <= int(expected) < int(got)
    return got == expected or longer

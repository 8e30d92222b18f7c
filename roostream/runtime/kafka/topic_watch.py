"""Notices topics that change under running programs: added partitions, topics that were created again, and
compaction.

Kafka adds partitions at any time, and producers then write to them. The programs read the partitions of
their setting, so the others would fill up without anybody reading them. In a topic that was deleted and
created again, the offsets that the programs have belong to other records. Compaction deletes all but the
newest record of a key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from roostream.errors import RoostreamError
from roostream.runtime.kafka.clients import results_of
from roostream.runtime.kafka.topics import DEAD_LETTERS, TOPICS, name_of, partitions_of

log = logging.getLogger("roostream.kafka")

CHECK_INTERVAL_S = 20.0
_TIMEOUT_S = 5.0


class TopicWatch:
    """One thread calls `run`; any thread may call `problems`."""

    def __init__(
        self,
        open_admin: Callable[[], AdminClient],
        prefix: str,
        partitions: int,
        topics: Iterable[str] = TOPICS,
    ) -> None:
        """`partitions`: the deployment's setting."""
        self.open_admin, self.prefix, self.partitions = open_admin, prefix, partitions
        self.topics = tuple(topics)
        self._ids: dict[str, str] = {}  # the broker's, as of the first answer
        self._problems: dict[str, str] = {}
        self._refused: set[str] = set()  # that were logged

    def problems(self) -> Mapping[str, str]:
        """Full name of a topic → what is wrong with it and what to do, as of Kafka's last answer."""
        return self._problems

    def run(self, stop: threading.Event) -> None:
        """Check every CHECK_INTERVAL_S until `stop`."""
        while not stop.is_set():
            self.check()
            stop.wait(CHECK_INTERVAL_S)

    def check(self) -> None:
        """Compare once, and log new problems. The known problems stay while Kafka is away, and while no
        client can be made because its files are being replaced. A topic that this user may not describe is
        logged once and left out."""
        names = {name_of(self.prefix, topic): topic for topic in self.topics}
        found = {}
        try:
            client = self.open_admin()  # must outlive its request: an answer is lost with its client
            topics = client.describe_topics(TopicCollection(list(names)), request_timeout=_TIMEOUT_S)
            resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
            configs = client.describe_configs(resources, request_timeout=_TIMEOUT_S)
            configs_by_name = {resource.name: future for resource, future in configs.items()}
            for name, topic in names.items():
                try:
                    problem = self._problem(name, topic, topics[name], configs_by_name[name])
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                        raise
                    self._log_refused(name)
                    continue
                if problem:
                    found[name] = problem
        except (KafkaException, RoostreamError) as error:
            log.debug("the topics are unknown: %s", error)
            return
        for name in found.keys() - self._problems.keys():
            log.error("%s", found[name])
        self._problems = found

    def _log_refused(self, name: str) -> None:
        if name not in self._refused:
            self._refused.add(name)
            log.warning(
                "topic %s is not watched: Kafka refuses to describe it; give this program's user the rights "
                "Describe and DescribeConfigs",
                name,
            )

    def _problem(self, name: str, topic: str, future: Any, config: Any) -> str:
        """What is wrong with a topic; "" = nothing. Raises KafkaException: not known now."""
        try:
            described = results_of({name: future}, 2 * _TIMEOUT_S)[name]
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            return f"topic {name} does not exist: restore it, or start over with `roostream reset`"
        number, expected = len(described.partitions), partitions_of(topic, self.partitions)
        if str(described.topic_id) != self._ids.setdefault(name, str(described.topic_id)):
            return (
                f"topic {name} was deleted and created again, so offsets that the programs have belong to "
                "other records: stop all programs, and start over with `roostream reset`"
            )
        if number <= expected:
            policy = results_of({name: config}, 2 * _TIMEOUT_S)[name]["cleanup.policy"].value
            if policy == "delete":
                return ""
            return (
                f"topic {name} has cleanup.policy = {policy}, which deletes all but the newest record of a "
                "key: set it to delete with Kafka's tools"
            )
        remedy = (
            "create this topic again with one partition"
            if topic == DEAD_LETTERS
            else f"run `roostream topics grow --partitions {number}`, then restart all programs with "
            f"`partitions = {number}`"
        )
        return f"topic {name} has {number} partitions, but only {expected} of them are read: {remedy}"

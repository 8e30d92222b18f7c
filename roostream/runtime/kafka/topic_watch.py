"""Notices topics that change under running programs: added partitions, and topics that were created again.

Kafka adds partitions at any time, and producers then write to them. The programs read the partitions of
their setting, so the others would fill up without anybody reading them. In a topic that was deleted and
created again, the offsets that the programs have belong to other records.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

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
        client can be made because its files are being replaced."""
        names = {name_of(self.prefix, topic): topic for topic in self.topics}
        found = {}
        try:
            client = self.open_admin()  # must outlive its request: an answer is lost with its client
            futures = client.describe_topics(TopicCollection(list(names)), request_timeout=_TIMEOUT_S)
            for name, future in futures.items():
                if problem := self._problem(name, names[name], future):
                    found[name] = problem
        except (KafkaException, RoostreamError) as error:
            log.debug("the topics are unknown: %s", error)
            return
        for name in found.keys() - self._problems.keys():
            log.error("%s", found[name])
        self._problems = found

    def _problem(self, name: str, topic: str, future: Any) -> str:
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
            return ""
        remedy = (
            "create this topic again with one partition"
            if topic == DEAD_LETTERS
            else f"run `roostream topics grow --partitions {number}`, then restart all programs with "
            f"`partitions = {number}`"
        )
        return f"topic {name} has {number} partitions, but only {expected} of them are read: {remedy}"

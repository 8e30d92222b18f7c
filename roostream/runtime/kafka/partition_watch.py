"""Notices topics that got more partitions than the deployment reads, while its programs run.

Kafka adds partitions at any time, and producers then write to them. The programs read the partitions of
their setting, so the others would fill up without anybody reading them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from roostream.runtime.kafka.topics import DEAD_LETTERS, TOPICS, name_of, partitions_of

log = logging.getLogger("roostream.kafka")

LOOK_S = 20.0
_TIMEOUT_S = 5.0


class PartitionWatch:
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
        self._problems: dict[str, str] = {}

    def problems(self) -> Mapping[str, str]:
        """Full name of a topic → what is wrong with it and what to do, as of Kafka's last answer."""
        return self._problems

    def run(self, stop: threading.Event) -> None:
        """Look every LOOK_S until `stop`."""
        while not stop.is_set():
            self.look()
            stop.wait(LOOK_S)

    def look(self) -> None:
        """Compare once, and log new problems. While Kafka is away, the known problems stay."""
        try:
            known = self.open_admin().list_topics(timeout=_TIMEOUT_S).topics
        except KafkaException as error:
            log.debug("the numbers of partitions are unknown: %s", error)
            return
        found = {}
        for topic in self.topics:
            name, expected = name_of(self.prefix, topic), partitions_of(topic, self.partitions)
            number = len(known[name].partitions) if name in known else 0
            if number > expected:
                found[name] = _describe(topic, name, number, expected)
        for name in found.keys() - self._problems.keys():
            log.error("%s", found[name])
        self._problems = found


def _describe(topic: str, name: str, number: int, expected: int) -> str:
    remedy = (
        "create this topic again with one partition"
        if topic == DEAD_LETTERS
        else f"run `roostream topics grow --partitions {number}`, then restart all programs with "
        f"`partitions = {number}`"
    )
    return f"topic {name} has {number} partitions, but only {expected} of them are read: {remedy}"

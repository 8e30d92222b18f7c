"""The Kafka topics of a deployment: their names, numbers of partitions and settings. `topic_admin.py` creates
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from roostream.schema.limits import MAX_MESSAGE_BYTES
from roostream.schema.settings import Settings, setting

Partition: TypeAlias = tuple[str, int]
"""(topic without prefix, number)."""

Progress: TypeAlias = dict[Partition, int]
"""Partition → next offset to read."""

IMPRESSIONS, ENGAGEMENTS, SAMPLES = "impressions", "engagements", "samples"
CORRECTIONS, ROWS, PREDICTIONS, DEAD_LETTERS = "corrections", "rows", "predictions", "dead_letters"
EVENTS = (IMPRESSIONS, ENGAGEMENTS)  # read by the joiner; its envelopes contain the index of the topic

TOPICS = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, ROWS, PREDICTIONS, DEAD_LETTERS)

# Defaults. The rows of a bucket are in partition `bucket mod partitions` of topic `rows`.
DEFAULT_PARTITIONS, DEFAULT_BUCKETS = 4, 64

MAX_SKEW_MS = 60_000
"""Default of how far in the future a record's time may be."""

_HOUR_MS = 3_600_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicSettings(Settings):
    """Settings of a deployment's topics, used when they are created."""

    replication: int = setting(1, "copies of each partition", ge=1, le=16)
    replay: bool = setting(False, "event times are in the past: accept any time, never delete by time")
    retention_ms: int = setting(24 * _HOUR_MS, "retention of records", ge=1)
    retention_bytes: int = setting(512 << 20, "retention of a partition in bytes", ge=1)
    max_skew_ms: int = setting(MAX_SKEW_MS, "refuse records from further in the future", ge=0)
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        "largest record; programs write none larger than the default",
        ge=MAX_MESSAGE_BYTES,
    )


def partitions_of(topic: str, partitions: int) -> int:
    """Number of partitions of `topic`; `partitions`: the deployment's setting."""
    return 1 if topic == DEAD_LETTERS else partitions


def all_partitions(topics: Iterable[str], partitions: int) -> tuple[Partition, ...]:
    """All partitions of these topics, topic by topic; `partitions`: the deployment's setting."""
    return tuple((topic, number) for topic in topics for number in range(partitions_of(topic, partitions)))


def name_of(prefix: str, topic: str) -> str:
    """The full name of a topic of the deployment with this prefix."""
    return prefix + topic


def nested(at: Progress) -> dict[str, dict[int, int]]:
    """Topic → partition → offset, as in calls and manifests."""
    out: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in sorted(at.items()):
        out.setdefault(topic, {})[partition] = offset
    return out


def flat(by_topic: Mapping[str, Mapping[int | str, int]]) -> Progress:
    """Inverse of `nested`; keys may be text, as in JSON."""
    return {(topic, int(p)): int(offset) for topic, at in by_topic.items() for p, offset in at.items()}


def configs(topic: str, settings: TopicSettings) -> dict[str, str]:
    """Kafka's configuration of a topic."""
    old = settings.replay and topic != ROWS
    retention_ms = -1 if old else _HOUR_MS if topic == ROWS else settings.retention_ms
    forever = str(2**63 - 1)
    return {
        "cleanup.policy": "delete",  # compaction would delete all but the newest record of a key
        "retention.ms": str(retention_ms),
        "retention.bytes": "-1" if old else str(settings.retention_bytes),
        "max.message.bytes": str(settings.max_message_bytes),
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": forever,
        "message.timestamp.after.max.ms": forever if settings.replay else str(settings.max_skew_ms),
        "segment.bytes": str(64 << 20),
        "segment.ms": forever if old else str(_HOUR_MS),
    }

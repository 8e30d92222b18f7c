"""The topics: names, partitions, settings. `roostream/runtime/kafka/topic_admin.py` makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from roostream.schema.limits import MAX_MESSAGE_BYTES
from roostream.schema.settings import Settings, setting

Partition: TypeAlias = tuple[str, int]
"""(topic without prefix, number): the one name of a partition."""

Progress: TypeAlias = dict[Partition, int]
"""Partition → next offset to read."""

IMPRESSIONS, ENGAGEMENTS, SAMPLES = "impressions", "engagements", "samples"
CORRECTIONS, ROWS, PREDICTIONS, DEAD_LETTERS = "corrections", "rows", "predictions", "dead_letters"
EVENTS = (IMPRESSIONS, ENGAGEMENTS)  # what the joiner reads; in its envelopes a topic's place is its byte

TOPICS = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, ROWS, PREDICTIONS, DEAD_LETTERS)

# Of a deployment that chooses none. A bucket's rows are in partition `bucket mod partitions` of `rows`.
DEFAULT_PARTITIONS, DEFAULT_BUCKETS = 4, 64

MAX_SKEW_MS = 60_000
"""Of a deployment that chooses none: how far in the future a record's time may lie."""

_HOUR_MS = 3_600_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicSettings(Settings):
    """What a deployment chooses of its topics when they are made."""

    replication: int = setting(1, "copies of each partition", ge=1, le=16)
    replay: bool = setting(False, "event times lie in the past: never delete by them, accept any of them")
    retention_ms: int = setting(24 * _HOUR_MS, "how long records are kept", ge=1)
    retention_bytes: int = setting(512 << 20, "how much of a partition is kept", ge=1)
    max_skew_ms: int = setting(MAX_SKEW_MS, "records from further in the future are refused", ge=0)
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        "largest record; programs make none that is larger than the default",
        ge=MAX_MESSAGE_BYTES,
    )


def partitions_of(topic: str, partitions: int) -> int:
    """How many partitions `topic` has in a deployment of `partitions`."""
    return 1 if topic == DEAD_LETTERS else partitions


def all_partitions(topics: Iterable[str], partitions: int) -> tuple[Partition, ...]:
    """Every partition of these topics in a deployment of `partitions`, topic by topic."""
    return tuple((topic, number) for topic in topics for number in range(partitions_of(topic, partitions)))


def name_of(prefix: str, topic: str) -> str:
    return prefix + topic


def nested(at: Progress) -> dict[str, dict[int, int]]:
    """Topic → partition → offset: a progress as calls and manifests carry it."""
    out: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in sorted(at.items()):
        out.setdefault(topic, {})[partition] = offset
    return out


def flat(by_topic: Mapping[str, Mapping[int | str, int]]) -> Progress:
    """Inverse of `nested`; JSON's keys are text."""
    return {(topic, int(p)): int(offset) for topic, at in by_topic.items() for p, offset in at.items()}


def configs(topic: str, settings: TopicSettings) -> dict[str, str]:
    """Kafka's settings of a topic."""
    old = settings.replay and topic != ROWS
    retention_ms = -1 if old else _HOUR_MS if topic == ROWS else settings.retention_ms
    forever = str(2**63 - 1)
    return {
        "retention.ms": str(retention_ms),
        "retention.bytes": "-1" if old else str(settings.retention_bytes),
        "max.message.bytes": str(settings.max_message_bytes),
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": forever,
        "message.timestamp.after.max.ms": forever if settings.replay else str(settings.max_skew_ms),
        "segment.bytes": str(64 << 20),
        "segment.ms": forever if old else str(_HOUR_MS),
    }

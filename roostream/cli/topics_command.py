"""`roostream topics create | check | keep`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import click

from roostream.runtime.deployment import Deployment
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TopicSettings, name_of

_WAIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicsConfig(TopicSettings, Deployment):
    """`roostream topics create --config FILE`: a deployment's own keys, and what its topics are like."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap",)


def create(config: TopicsConfig) -> int:
    """Make the topics that are absent; the exit code.

    Raises:
        ConfigError: one that existed is otherwise than asked for.
        UnavailableError: Kafka does not answer or refuses.
    """
    topics = _topics(config)
    made = set(topics.create())
    for topic in topics.topics:
        name = name_of(config.prefix, topic)
        click.echo(f"{name}: {'made' if name in made else 'exists'}")
    topics.check()
    return 0


def check(config: TopicsConfig) -> int:
    """Say that the topics are as asked for; the exit code. Raises as `create`."""
    topics = _topics(config)
    topics.check()
    click.echo(f"{len(topics.topics)} topics are as expected")
    return 0


def keep(config: TopicsConfig, retention_ms: int) -> int:
    """Have the topics' records stay for at least so long; the exit code. Raises as `check`."""
    for name, kept_ms in _topics(config).keep_longer(retention_ms).items():
        click.echo(f"{name}: kept {'for ever' if kept_ms < 0 else f'for {kept_ms / 3_600_000:g} hours'}")
    return 0


def _topics(config: TopicsConfig) -> TopicAdmin:
    clients.wait_for_broker(config.broker, timeout_s=_WAIT_S)
    return TopicAdmin(clients.admin(config.broker), config.prefix, config.partitions, config)

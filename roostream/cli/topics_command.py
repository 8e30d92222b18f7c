"""`roostream topics create | check | grow | keep`: topics on a Kafka that is not part of a local stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import click

from roostream.cli.options import CommandGroup, NonEmptyPath, with_options
from roostream.errors import ConfigError
from roostream.runtime.deployment import Deployment
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TopicSettings, name_of
from roostream.schema.settings import load, parse_duration_ms

_WAIT_S = 10.0

topics_options = with_options(
    click.option(
        "--kafka", "bootstrap", metavar="HOST:PORT", help="address of Kafka; several are separated by commas"
    ),
    click.option(
        "--config",
        "file",
        type=NonEmptyPath(path_type=Path),
        help="TOML with these settings; an unknown key is an error",
    ),
    click.option("--prefix", help="prefix of the topic names"),
    click.option("--partitions", type=int, help="partitions of each topic; dead_letters always has one"),
    click.option("--replication", type=int, help="copies of each partition"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicsConfig(TopicSettings, Deployment):
    """Settings of `roostream topics`: the keys that all programs share, and those of the topics."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap",)


def _load(file: Path | None, flags: Mapping[str, Any]) -> TopicsConfig:
    """Raises ConfigError, with the name of the flag."""
    try:
        return load(TopicsConfig, file, program="topics", flags=flags)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--bootstrap: key 'bootstrap'", "--kafka")) from None


@click.group(cls=CommandGroup)
def topics() -> None:
    """Create and check the topics of a deployment. A local stack creates its own.

    \b
    Example:
      roostream topics create --kafka kafka:9092 --config topics.toml
    """


@topics.command("create")
@topics_options
def topics_create(file: Path | None, **flags: Any) -> None:
    """Create the topics that do not exist. Exit code 2 if one exists with other settings.

    \b
    Example:
      roostream topics create --kafka kafka:9092 --partitions 16 --replication 3
    """
    admin = open_topic_admin(_load(file, flags))
    _print_changes(admin, admin.create(), "created", "exists")
    admin.check()


@topics.command("check")
@topics_options
def topics_check(file: Path | None, **flags: Any) -> None:
    """Check that every topic exists with these settings; exit code 2 if not.

    \b
    Example:
      roostream topics check --kafka kafka:9092 --config topics.toml
    """
    admin = open_topic_admin(_load(file, flags))
    admin.check()
    click.echo(f"{len(admin.topics)} topics are as expected")


@topics.command("grow")
@topics_options
def topics_grow(file: Path | None, **flags: Any) -> None:
    """Add partitions to the topics, up to the number in the settings.

    Then restart all programs with the same number: they continue where they were, and read the new partitions
    from their first record. Kafka cannot remove partitions again.

    \b
    Example:
      roostream topics grow --kafka kafka:9092 --partitions 32
    """
    admin = open_topic_admin(_load(file, flags))
    _print_changes(admin, admin.grow(), "has more partitions now", "unchanged")


@topics.command("keep")
@click.argument("duration", metavar="DURATION")
@topics_options
def topics_keep(duration: str, file: Path | None, **flags: Any) -> None:
    """Raise the retention time of the topics to at least DURATION, so that untrained records are not deleted.

    It never lowers a retention time. The size limit (retention.bytes) and the topic of rows stay as they are.

    \b
    Example:
      roostream topics keep 7d --kafka kafka:9092
    """
    try:
        retention_ms = parse_duration_ms(duration)
    except ConfigError as error:
        raise ConfigError(f"topics keep: {error}") from None
    admin = open_topic_admin(_load(file, flags))
    for name, kept_ms in admin.keep_longer(retention_ms).items():
        click.echo(f"{name}: retention {'unlimited' if kept_ms < 0 else f'{kept_ms / 3_600_000:g} hours'}")


def _print_changes(admin: TopicAdmin, changed: Collection[str], yes: str, no: str) -> None:
    for topic in admin.topics:
        name = name_of(admin.prefix, topic)
        click.echo(f"{name}: {yes if name in changed else no}")


def open_topic_admin(config: TopicsConfig) -> TopicAdmin:
    """Connect to Kafka. Raises UnavailableError: it does not answer within _WAIT_S."""
    clients.wait_for_broker(config.broker, timeout_s=_WAIT_S)
    return TopicAdmin(clients.admin(config.broker), config.prefix, config.partitions, config)

"""`roostream topics`: what it says and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from roostream.cli import topics_command as topics
from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TOPICS
from roostream.schema.settings import load
from tests.runtime.test_topic_admin import FakeAdmin


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """What the command reaches instead of Kafka."""
    fake = FakeAdmin()
    monkeypatch.setattr(
        topics, "_topics", lambda config: TopicAdmin(fake, config.prefix, config.partitions, config)
    )
    return fake


def test_creating_twice_says_what_was_made_and_what_exists(brokers: FakeAdmin) -> None:
    first = CliRunner().invoke(cli, ["topics", "create", "--bootstrap", "k:1", "--partitions", "2"])
    again = CliRunner().invoke(cli, ["topics", "create", "--bootstrap", "k:1", "--partitions", "2"])
    assert first.exit_code == again.exit_code == 0
    assert "samples: made" in first.output and "samples: exists" in again.output
    done = CliRunner().invoke(cli, ["topics", "check", "--bootstrap", "k:1", "--partitions", "2"])
    assert done.output == f"{len(TOPICS)} topics are as expected\n" and done.exit_code == 0


def test_other_settings_are_refused_by_both(brokers: FakeAdmin) -> None:
    CliRunner().invoke(cli, ["topics", "create", "--bootstrap", "k:1"])
    for what in ("create", "check"):
        done = CliRunner().invoke(cli, ["topics", what, "--bootstrap", "k:1", "--partitions", "8"])
        assert isinstance(done.exception, ConfigError) and "expected 8 partitions, got 4" in str(
            done.exception
        )


def test_without_an_address_the_command_says_so() -> None:
    done = CliRunner().invoke(cli, ["topics", "check"])
    assert isinstance(done.exception, ConfigError) and "key 'bootstrap': expected a value" in str(
        done.exception
    )


def test_a_file_and_the_environment_set_what_flags_leave_open(tmp_path: Path) -> None:
    path = tmp_path / "topics.toml"
    path.write_text(
        'bootstrap = "k:1"\nretention_ms = "7d"\npartitions = 16\n[kafka_security]\nprotocol = "SSL"\n'
    )
    config = load(topics.TopicsConfig, path, program="topics", environ={"ROOSTREAM_TOPICS_REPLICATION": "3"})
    assert (config.retention_ms, config.partitions, config.replication) == (7 * 86_400_000, 16, 3)
    assert config.broker.security.protocol == "SSL"


def test_keeping_says_for_how_long_each_topic_has_its_records(brokers: FakeAdmin) -> None:
    CliRunner().invoke(cli, ["topics", "create", "--bootstrap", "k:1"])
    brokers.topics["predictions"].config["retention.ms"] = "-1"
    done = CliRunner().invoke(cli, ["topics", "keep", "7d", "--bootstrap", "k:1"])
    assert done.exit_code == 0, done.exception
    assert "samples: kept for 168 hours\n" in done.output and "predictions: kept for ever\n" in done.output
    done = CliRunner().invoke(cli, ["topics", "keep", "long", "--bootstrap", "k:1"])
    assert isinstance(done.exception, ConfigError) and "expected a duration such as" in str(done.exception)

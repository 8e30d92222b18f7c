"""`roostream topics`: its output and exit codes, with a fake Kafka."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from roostream.cli import topics_command as topics
from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TOPICS
from tests.runtime.test_topic_admin import FakeAdmin


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """Replace Kafka's admin client with a fake."""
    fake = FakeAdmin()
    monkeypatch.setattr(
        topics, "open_topic_admin", lambda config: TopicAdmin(fake, config.prefix, config.partitions, config)
    )
    return fake


def test_create_shows_which_topics_were_created_and_which_exist(brokers: FakeAdmin) -> None:
    first = CliRunner().invoke(cli, ["topics", "create", "--kafka", "k:1", "--partitions", "2"])
    again = CliRunner().invoke(cli, ["topics", "create", "--kafka", "k:1", "--partitions", "2"])
    assert first.exit_code == again.exit_code == 0
    assert "samples: created" in first.output and "samples: exists" in again.output
    result = CliRunner().invoke(cli, ["topics", "check", "--kafka", "k:1", "--partitions", "2"])
    assert result.output == f"{len(TOPICS)} topics are as expected\n" and result.exit_code == 0


def test_create_and_check_reject_topics_with_other_settings(brokers: FakeAdmin) -> None:
    CliRunner().invoke(cli, ["topics", "create", "--kafka", "k:1"])
    for command in ("create", "check"):
        result = CliRunner().invoke(cli, ["topics", command, "--kafka", "k:1", "--partitions", "8"])
        assert isinstance(result.exception, ConfigError) and "expected 8 partitions, got 4" in str(
            result.exception
        )


def test_an_address_is_required() -> None:
    result = CliRunner().invoke(cli, ["topics", "check"])
    assert isinstance(result.exception, ConfigError) and "key 'bootstrap': expected a value" in str(
        result.exception
    )


def test_keep_raises_retention_and_shows_it(brokers: FakeAdmin) -> None:
    CliRunner().invoke(cli, ["topics", "create", "--kafka", "k:1"])
    brokers.topics["predictions"].config["retention.ms"] = "-1"
    result = CliRunner().invoke(cli, ["topics", "keep", "7d", "--kafka", "k:1"])
    assert result.exit_code == 0, result.exception
    assert (
        "samples: retention 168 hours\n" in result.output
        and "predictions: retention unlimited\n" in result.output
    )
    result = CliRunner().invoke(cli, ["topics", "keep", "long", "--kafka", "k:1"])
    assert isinstance(result.exception, ConfigError) and "expected a duration such as" in str(
        result.exception
    )

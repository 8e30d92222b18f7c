"""`roostream audit`: what it says without a Kafka; with one, see tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import audit_command
from command.audit_command import Topics
from infra.broker_alone import broker_alone
from infra.home import Home
from roo.errors import SetupError, UnavailableError


def test_a_folder_without_a_stack_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--kafka HOST:PORT, or another --home"):
        audit_command.run(tmp_path, None, False)


def test_a_kafka_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        audit_command.run(tmp_path, Topics(kafka="127.0.0.1:1"), False)


def test_a_home_without_a_broker_of_its_own_has_none_to_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no Kafka of its own"), broker_alone(Home(tmp_path)):
        raise AssertionError("unreachable")


def test_the_broker_of_a_stack_that_runs_is_not_started_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    (home.root / "kafka").mkdir()
    (home.root / "kafka" / "meta.properties").write_text("")
    home.lock()
    with pytest.raises(SetupError, match="a stack runs already"), broker_alone(Home(tmp_path)):
        raise AssertionError("unreachable")
    home.unlock()

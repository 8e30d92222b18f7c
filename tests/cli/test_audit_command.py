"""`roostream audit`: what it says without a Kafka; with one, see tests/e2e."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from infra.home import Home
from infra.kafka_broker import read_only_broker
from infra.options import StackOptions
from infra.stack import Stack
from roostream.cli import audit_command
from roostream.cli.audit_command import Topics
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from tests.infra.auditor.test_auditor import traffic


def test_a_folder_without_a_stack_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--kafka HOST:PORT, or another --home"):
        audit_command.run(tmp_path, None, False)


def test_a_kafka_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        audit_command.run(tmp_path, Topics(kafka="127.0.0.1:1", start_timeout_s=0.0), False)


def test_an_external_broker_is_not_started(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no Kafka data"), read_only_broker(Home(tmp_path)):
        raise AssertionError("unreachable")


def test_the_broker_of_a_stack_that_runs_is_not_started_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    (home.root / "kafka").mkdir()
    (home.root / "kafka" / "meta.properties").write_text("")
    home.lock()
    with pytest.raises(SetupError, match="already runs"), read_only_broker(Home(tmp_path)):
        raise AssertionError("unreachable")
    home.unlock()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_running_or_stopped_stack_can_be_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = 3
    with Stack(
        tmp_path, StackOptions(prefix="im", replay=True)
    ) as stack:  # also the beginning of a topic's name
        stack.start(["kafka"])
        stack.wait_ready("kafka", 120)
        client = clients.producer(Broker(stack.endpoints.kafka))
        for record in traffic(0, 50)[: -2 * lost + 1]:
            clients.send(
                client,
                f"im{record.topic}",
                key=record.key,
                value=record.value,
                timestamp_ms=record.timestamp_ms,
                partition=record.partition,
            )
        assert client.flush(60) == 0
        assert audit_command.run(tmp_path, None, True) == 0
        running = json.loads(capsys.readouterr().out)
    before = sorted((p, p.stat().st_size) for p in (tmp_path / "kafka").rglob("im*/*.log"))
    started_s = time.monotonic()
    assert audit_command.run(tmp_path, None, True) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert running == stopped and stopped["state"] == "yes"
    assert (stopped["requests"], stopped["samples"], stopped["pending_requests"]) == (48, 47, 1)
    assert sorted((p, p.stat().st_size) for p in (tmp_path / "kafka").rglob("im*/*.log")) == before
    assert not Home(tmp_path).is_locked() and time.monotonic() - started_s < 250

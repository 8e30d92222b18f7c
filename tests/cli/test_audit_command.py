"""`roostream audit`, mostly without a Kafka broker; tests/e2e has tests of audits over a running stack."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from infra.auditor.auditor import AUDITED
from infra.home import Home
from infra.kafka_broker import read_only_broker
from infra.options import StackOptions
from infra.stack import Stack
from roostream.cli import audit_command
from roostream.cli.audit_command import Topics, build_auditor, topics_of
from roostream.errors import ConfigError, SetupError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import all_partitions, partitions_of
from roostream.schema.ids import sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.infra.auditor.test_auditor import KEY, T0, traffic
from tests.runtime.test_kafka_topics import fake_broker


def test_a_folder_without_a_stack_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--kafka HOST:PORT, or another --home"):
        audit_command.run(tmp_path, None, False)


def test_a_kafka_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        audit_command.run(tmp_path, Topics(kafka="127.0.0.1:1", start_timeout_s=0.0), False)


def test_the_audit_of_a_secured_kafka_reads_its_login_from_a_program_s_file(tmp_path: Path) -> None:
    file = tmp_path / "auditor.toml"
    file.write_text(
        'home = "unused"\n[kafka_security]\nprotocol = "SASL_SSL"\nusername = "u"\npassword = "${file:pw}"\n'
        f'ca = "{tmp_path}/none.pem"\n'.replace("file:pw", f"file:{tmp_path}/pw")
    )
    (tmp_path / "pw").write_text("secret\n")
    security = audit_command.read_kafka_security(str(file))
    assert (security.username, security.password) == ("u", "secret")
    with pytest.raises(ConfigError, match=r"kafka_security\.ca"):
        audit_command.run(tmp_path, Topics(kafka="127.0.0.1:1", security=security), False)


@pytest.mark.parametrize("partitions", [2, 8])
def test_topics_with_other_partitions_are_not_audited(
    partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of two of four partitions may add up while events of the others are lost."""
    names = {topic: partitions_of(topic, 4) for topic in AUDITED}
    fake_broker(monkeypatch, names)
    monkeypatch.setattr(clients, "wait_for_broker", lambda *_, **__: "cluster")
    with pytest.raises(ConfigError, match=f"expected {partitions} partitions, got 4"):
        audit_command.read_all(Topics(kafka="k:1", partitions=partitions))


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


def test_the_address_of_an_earlier_stack_is_not_audited(tmp_path: Path) -> None:
    """Another audit or a starting stack has the lock; other programs may have the ports in stack.json now."""
    home = Home(tmp_path)
    home.make()
    described = {"kafka": "127.0.0.1:1", "prefix": "", "settle_ms": 1000, "programs": {"kafka": {}}}
    home.write_stack({**described, "supervisor_pid": os.getpid() + 1})
    with home.locked(), pytest.raises(SetupError, match="no stack runs there"):
        audit_command.run(tmp_path, None, as_json=True)


def test_a_correction_with_the_time_of_the_broker_settles_an_event_of_a_replayed_log(tmp_path: Path) -> None:
    """The events of a replayed log are years old, but the correction has the broker's current time."""
    with Stack(tmp_path, StackOptions(replay=True)) as stack:
        described = stack.home.read_stack()
    assert described is not None
    log = [record for n in range(1000) for record in traffic(n * 10, 1, start=n)]
    late = pb.Engagement(header=pb.Header(request_id="r0", user_id=5, time_ms=T0 + 60_000), event_id=7)
    clicked = Record("engagements", 1, 0, T0 + 60_000, KEY, wire.encode(wire.ENGAGEMENT, late))
    corrected = pb.Sample(
        header=pb.Header(request_id="r0", user_id=5, time_ms=T0),
        sample_id=sample_id(KEY, "r0", 7),
        event_ids=[7],
        event_times=[T0 + 60_000],
    )
    years_later_ms = T0 + 3 * 365 * 86_400_000
    correction = Record("corrections", 1, 0, years_later_ms, KEY, wire.encode(wire.CORRECTION, corrected))
    auditor = build_auditor(topics_of(described))
    auditor.open_with(
        MemoryConsumer(all_partitions(AUDITED, 2), [*sorted([*log, clicked], key=by_time), correction])
    )
    while auditor.poll(0.0):
        pass
    sums = auditor.sums()
    assert (sums.engagements, sums.corrected, sums.overdue, sums.accounted) == (1, 1, 0, True), sums


def by_time(record: Record) -> int:
    return record.timestamp_ms


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_running_or_stopped_stack_can_be_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = 3
    with Stack(
        tmp_path, StackOptions(prefix="im", replay=True)
    ) as stack:  # the prefix is also the beginning of the topic name "impressions"
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

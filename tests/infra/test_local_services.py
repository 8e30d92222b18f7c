"""Kafka, Redis and Flink as the stack runs them: started, killed, stopped, and started again on other
ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.stack import Stack
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, SAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
WAIT_S = 120.0


def produce(stack: Stack, value: bytes) -> None:
    client = clients.producer(Broker(stack.endpoints.kafka))
    clients.send(client, SAMPLES, key=b"k", value=value, timestamp_ms=1_700_000_000_000)
    assert client.flush(WAIT_S) == 0


def consume(stack: Stack) -> list[bytes]:
    from confluent_kafka import TopicPartition

    client = clients.consumer(Broker(stack.endpoints.kafka), "test")
    client.assign([TopicPartition(SAMPLES, p, 0) for p in range(DEFAULT_PARTITIONS)])
    expected = sum(clients.end_offsets(client, SAMPLES, range(DEFAULT_PARTITIONS)).values())
    found: list[bytes] = []
    for _ in range(int(WAIT_S)):
        found += [m.value() for m in client.consume(100, timeout=1.0) if m.error() is None]
        if len(found) >= expected:
            break
    client.close()
    return found


@pytest.mark.slow
def test_services_survive_kills_and_data_survives_a_restart_on_other_ports(tmp_path: Path) -> None:
    with Stack(tmp_path / "home") as stack:
        stack.start(["kafka", "redis", "flink"])
        stack.wait_ready("all", WAIT_S)
        first_ports = stack.endpoints
        produce(stack, b"before")
        for name in ("redis", "kafka", "flink-tm-0", "flink-jm"):
            pid = stack.kill(name)
            stack.wait_ready(name, WAIT_S)
            assert stack.pid(name) not in (None, pid)
            assert stack.restarts(name) == 1
        produce(stack, b"after a kill")
        assert sorted(consume(stack)) == [b"after a kill", b"before"]
        with pytest.raises(SetupError, match="already runs"):
            Stack(stack.home.root).open()
        pids = [stack.pid(n) for n in ("kafka", "redis", "flink-jm", "flink-tm-0")]
        assert stack.stop().num_cut_off == 0
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)

    with Stack(tmp_path / "home") as stack:
        stack.start(["kafka", "flink"])
        stack.wait_ready("all", WAIT_S)
        assert stack.endpoints.kafka != first_ports.kafka
        assert sorted(consume(stack)) == [b"after a kill", b"before"]
        assert FlinkRest(stack.endpoints.flink).task_managers() == {"flink-tm-0"}


@pytest.mark.slow
def test_a_stack_works_without_write_access_to_the_shared_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second user of a machine meets this when the first user's Flink client left a folder in /tmp.
    Roostream's own flags override these variables."""
    monkeypatch.setenv("TMPDIR", "/dev/null/tmp")
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Djava.io.tmpdir=/dev/null/tmp")
    with Stack(tmp_path / "home") as stack:
        stack.start(["joiner"])
        stack.wait_ready("joiner", WAIT_S)
        assert stack.restarts("joiner") == 0
        assert list(stack.home.tmp.iterdir()), "temporary files must be in the home"
        with pytest.raises(UnavailableError, match="does not know /jars/upload"):
            FlinkRest(stack.endpoints.flink).post("/jars/upload", {})
        assert stack.stop().num_cut_off == 0, (
            "the job must stop with a savepoint although canceling by the web page is off"
        )
        assert list(stack.home.tmp.iterdir()) == []

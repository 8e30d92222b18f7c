"""Kafka, Redis and Flink as child processes: where they listen, write and log. Nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import kafka_broker, redis_server
from infra.child import Program
from infra.flink_cluster import JOB_MANAGER, Cluster, task_manager
from infra.home import Home
from infra.options import StackOptions
from roostream.errors import UnavailableError

JAVA = Path("/java")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.make()
    return made


def services(home: Home) -> dict[str, Program]:
    cluster = Cluster(home, StackOptions(flink={"rest.flamegraph.enabled": "true"}), JAVA, 1004, 1005)
    found = [
        kafka_broker.program(home, StackOptions(), {}, JAVA, 1001, 1002),
        redis_server.program(home, {}, 1003),
        *cluster.programs({}, [1006, 1007]),
    ]
    return {program.name: program for program in found}


def test_every_service_logs_below_the_home_and_is_not_ready_before_it_answers(home: Home) -> None:
    found = services(home)
    assert set(found) == {"kafka", "redis", JOB_MANAGER, task_manager(0), task_manager(1)}
    for program in found.values():
        assert program.log == home.log(program.name) and program.place == home.root
        assert not program.ready()


def test_redis_keeps_nothing_and_listens_on_loopback(home: Home) -> None:
    redis = services(home)["redis"]
    redis.prepare()
    text = (home.conf / "redis.conf").read_text()
    assert (
        "bind 127.0.0.1\n" in text and "port 1003\n" in text and 'save ""' in text and "appendonly no" in text
    )


def test_flink_is_configured_below_the_home_and_by_the_options(home: Home) -> None:
    cluster = Cluster(home, StackOptions(flink={"rest.flamegraph.enabled": "true"}), JAVA, 1004, 1005)
    cluster.make()
    cluster.make()  # once more: what is there is replaced
    text = (cluster.conf / "config.yaml").read_text()
    assert "rest.flamegraph.enabled: true\n" in text and "jobmanager.rpc.port: 1004\n" in text
    assert f"execution.checkpointing.dir: {(cluster.folder / 'checkpoints').as_uri()}\n" in text
    assert cluster.environment()["FLINK_CONF_DIR"] == str(cluster.conf)
    assert list(cluster.lib.glob("*.jar"))


def test_task_managers_keep_their_ids_over_restarts(home: Home) -> None:
    found = services(home)
    assert "-Dtaskmanager.resource-id=flink-tm-1" in found[task_manager(1)].command
    assert "-Dtaskmanager.rpc.port=1007" in found[task_manager(1)].command


def test_a_broker_of_the_users_own_that_is_away_is_told() -> None:
    with pytest.raises(UnavailableError, match=r"Kafka at 127\.0\.0\.1:1 does not answer; start it"):
        kafka_broker.use_outside(StackOptions(kafka="127.0.0.1:1"))


def test_kafkas_log_goes_to_standard_output() -> None:
    assert "appender.stdout.type=Console" in kafka_broker.log4j_properties("WARN")

"""What the cluster's JVMs are told, without starting one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra import kafka_broker
from infra.flink_cluster import Cluster, configuration
from infra.home import Home
from infra.kafka_broker import log4j_properties
from infra.options import StackOptions


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    home = Home(tmp_path / "home")
    home.make()
    cluster = Cluster(home, StackOptions(), Path("/bin/echo"), 1001, 1002)
    cluster.make()
    return cluster


def test_every_jvm_keeps_its_temporary_files_in_the_home(cluster: Cluster) -> None:
    client = subprocess.run(
        (cluster.bin / "flink", "run", "job 1.py"),
        env={**os.environ, "JVM_ARGS": "-Xss1m"},
        capture_output=True,
        text=True,
    )
    commands = [" ".join(p.command) for p in cluster.programs({}, [1003])]
    for command in [*commands, client.stdout]:
        assert f"-Djava.io.tmpdir={cluster.home.tmp}/flink" in command
        assert "-XX:-UsePerfData" in command, "a file in the shared folder, whatever java.io.tmpdir says"
    assert "-Xss1m -cp" in client.stdout and client.stdout.endswith(
        "org.apache.flink.client.cli.CliFrontend run job 1.py\n"
    )


def test_the_web_page_can_neither_upload_nor_cancel(tmp_path: Path) -> None:
    settings = configuration(tmp_path, tmp_path, StackOptions(), 1, 2)
    assert (settings["web.submit.enable"], settings["web.cancel.enable"]) == ("false", "false")


def test_lines_that_come_with_every_turn_are_not_logged(cluster: Cluster) -> None:
    text = (cluster.conf / "log4j-console.properties").read_text()
    assert (
        "logger.own0.name=org.apache.flink.runtime.source.coordinator.SourceCoordinator\nlogger.own0.level=warn"
        in text
    )
    assert "logger.own1.name=org.apache.flink.metrics.MetricGroup\nlogger.own1.level=error" in text
    assert "logger" not in log4j_properties("INFO").split("rootLogger")[0]


def test_a_live_stack_starts_quickly_and_a_replay_works_quickly(tmp_path: Path) -> None:
    def compilers(options: StackOptions) -> list[bool]:
        home = Home(tmp_path)
        programs = Cluster(home, options, Path("/bin/java"), 1, 2).programs({}, [3])
        programs.append(kafka_broker.program(home, options, {}, Path("/bin/java"), 4, 5))
        return ["-XX:TieredStopAtLevel=1" in p.command for p in programs]

    assert compilers(StackOptions()) == [True, True, True]
    assert compilers(StackOptions(replay=True)) == [True, False, False], (
        "the job manager does little once it has started"
    )

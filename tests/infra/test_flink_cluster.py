"""Kafka, Redis and Flink as child processes: configuration, logs and restore points. The tests start none of
them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import kafka_broker
from infra.flink_cluster import (
    JOB_MANAGER,
    Cluster,
    configuration,
    task_manager,
)
from infra.home import Home
from infra.jars import java_locale
from infra.kafka_broker import broker_program, server_properties, use_external_broker
from infra.options import StackOptions
from infra.redis_server import redis_program
from roostream.errors import ConfigError, SetupError, UnavailableError
from roostream.runtime.checkpoint_store import FileStore
from tests.runtime.manifest_cases import a_manifest

ECHO = Path("/bin/echo")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def cluster(home: Home) -> Cluster:
    cluster = Cluster(home, StackOptions(flink={"rest.flamegraph.enabled": "true"}), ECHO, 1001, 1002)
    cluster.make()
    return cluster


def test_services_log_in_the_home_and_are_not_ready_before_they_answer(cluster: Cluster) -> None:
    home = cluster.home
    programs = [
        broker_program(home, StackOptions(), {}, ECHO, 1003, 1004),
        redis_program(home, {}, 1005),
        *cluster.programs({}, [1006, 1007]),
    ]
    assert [p.name for p in programs] == ["kafka", "redis", JOB_MANAGER, task_manager(0), task_manager(1)]
    assert all(p.log == home.log(p.name) and not p.ready() for p in programs)
    assert "-Dtaskmanager.resource-id=flink-tm-1" in programs[-1].command, (
        "a task manager must keep its id after a restart"
    )


def test_a_format_of_kafkas_folder_that_hangs_is_an_error_and_no_defect(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = home.root / "java"
    java.write_text("#!/bin/sh\nexec sleep 60\n")
    java.chmod(0o755)
    monkeypatch.setattr(kafka_broker, "_FORMAT_S", 0.2)
    with pytest.raises(SetupError, match="too busy"):
        broker_program(home, StackOptions(), dict(os.environ), java, 1003, 1004).prepare()


@pytest.mark.parametrize("kafka", [{"cluster_id": "c", "topics": {}}, {}], ids=["its data is away", "import"])
def test_a_new_kafka_does_not_take_the_place_of_one_that_is_away(kafka: dict[str, Any], home: Home) -> None:
    """Serving would send the rest of its log there, and the feature updater would forget all users. After an
    import there was no Kafka yet."""
    manifest = a_manifest(kafka=kafka)
    FileStore(home.store).create(manifest.name, manifest.encode())
    broker = broker_program(home, StackOptions(), dict(os.environ), ECHO, 1003, 1004)
    if not kafka:
        return broker.prepare()
    with pytest.raises(SetupError, match="volume"):
        broker.prepare()
    (home.root / "kafka").mkdir()
    (home.root / "kafka" / "meta.properties").touch()
    broker.prepare()


def test_a_task_manager_has_the_heap_that_its_configuration_says(home: Home) -> None:
    def command(**flink: str) -> tuple[str, ...]:
        flink_cluster = Cluster(home, StackOptions(flink=flink), ECHO, 1001, 1002)
        return flink_cluster.programs({}, [1006])[-1].command

    assert {"-Xmx768m", "-XX:MaxDirectMemorySize=192m"} <= set(command())
    assert "-Xmx192m" in command(**{"taskmanager.memory.task.heap.size": "64m"})
    with pytest.raises(ConfigError, match=r"task\.heap\.size.*expected a size in MiB"):
        command(**{"taskmanager.memory.task.heap.size": "1g"})


def test_redis_has_no_persistence_and_listens_on_loopback(home: Home) -> None:
    redis_program(home, {}, 1005).prepare()
    text = (home.conf / "redis.conf").read_text()
    assert {"bind 127.0.0.1", "port 1005", 'save ""', "appendonly no"} <= set(text.splitlines())


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
        assert "-XX:-UsePerfData" in command, (
            "performance data would be written to a shared folder despite java.io.tmpdir"
        )
    assert "-Xss1m -cp" in client.stdout and client.stdout.endswith("CliFrontend run job 1.py\n")


ODD_NAME = "a b 'ü 日本 𝒳 #1 100% &$(x);*[a]?"
"""A valid folder name with characters that shells, URLs, YAML and Java properties treat specially."""


def test_a_path_with_special_characters_reaches_flink_unchanged(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    cluster = Cluster(Home(tmp_path / ODD_NAME), StackOptions(), java, 1001, 1002)
    cluster.home.make()
    cluster.make()
    flag = f"-Djava.io.tmpdir={tmp_path / ODD_NAME}"
    client = subprocess.run(
        (cluster.bin / "flink", "run", ODD_NAME),
        env={**os.environ, "JVM_ARGS": f"-Xss1m {shlex.quote(flag)}"},
        capture_output=True,
        text=True,
    )
    arguments = client.stdout.splitlines()
    assert arguments[arguments.index("-Xss1m") :][1] == flag and arguments[-2:] == ["run", ODD_NAME]
    written = yaml.safe_load((cluster.conf / "config.yaml").read_text(encoding="utf-8"))
    assert written == configuration(cluster.folder, cluster.tmp, StackOptions(), 1001, 1002)
    # Flink takes %20 in a URL literally, so an encoded URL would name another folder for savepoints.
    assert written["execution.checkpointing.savepoint-dir"] == f"file://{cluster.folder}/savepoints"


def test_a_path_with_special_characters_reaches_kafka_unchanged(tmp_path: Path) -> None:
    text = server_properties(tmp_path / ODD_NAME, 1, 2)
    assert text.isascii(), "Java reads the file as Latin-1"
    line = next(line for line in text.splitlines() if line.startswith("log.dirs="))
    value = json.loads(f'"{line.partition("=")[2]}"')  # JSON has the same \\u escapes
    assert value == str(tmp_path / ODD_NAME)


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        ({"LANG": "de_DE.UTF-8"}, {}),
        ({"LC_CTYPE": "C.utf8"}, {}),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "C"}, {"LC_ALL": "C.UTF-8"}),
        ({"LANG": "en_US.ISO-8859-1"}, {"LC_ALL": "C.UTF-8"}),
        ({}, {"LC_ALL": "C.UTF-8"}),
    ],
)
def test_a_jvm_gets_a_locale_that_can_encode_every_path(
    environ: dict[str, str], added: dict[str, str]
) -> None:
    assert java_locale(environ) == added


def test_the_web_page_can_neither_upload_nor_cancel(tmp_path: Path) -> None:
    settings = configuration(tmp_path, tmp_path, StackOptions(), 1, 2)
    assert (settings["web.submit.enable"], settings["web.cancel.enable"]) == ("false", "false")


def test_an_external_broker_that_does_not_answer_is_named() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        use_external_broker(StackOptions(kafka="127.0.0.1:1"))

"""Definitions that exist twice are equal: topics, rights, alerts, schemas and Flink's settings."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import yaml

from roostream.runtime.flink_rest import pyflink_home
from roostream.runtime.kafka.topics import TOPICS, TopicSettings, configs
from tests.contract.source_tree import ROOT
from tests.k8s.generate import K8S, RIGHTS, contents
from tests.k8s.manifests import build_overlay, definitions, find_object, of_kind


@pytest.mark.parametrize("path", contents(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == contents()[path], "run python -m tests.k8s.generate"


def test_topics_have_the_settings_of_the_protocol() -> None:
    """Values of an overlay change what a deployment may choose, and nothing else."""
    topics = {t["spec"]["topicName"]: t["spec"] for t in of_kind(build_overlay("prod"), "KafkaTopic")}
    values = yaml.safe_load((K8S / "overlays/prod/values.yaml").read_text(encoding="utf-8"))["data"]
    settings = TopicSettings(
        retention_ms=int(values["RETENTION_MS"]), retention_bytes=int(values["RETENTION_BYTES"])
    )
    assert set(topics) == set(TOPICS)
    for topic, spec in topics.items():
        assert {key: str(value) for key, value in spec["config"].items()} == configs(topic, settings)
        assert spec["replicas"] == int(values["KAFKA_COPIES"])


def test_kafka_users_have_only_the_listed_rights() -> None:
    users = {
        u["metadata"]["name"].removeprefix("roostream-"): u["spec"]["authorization"]["acls"]
        for u in of_kind(build_overlay("prod"), "KafkaUser")
    }
    assert set(users) == set(RIGHTS)
    for program, acls in users.items():
        writes = {
            a["resource"]["name"]
            for a in acls
            if a["resource"]["type"] == "topic" and "Write" in a["operations"]
        }
        assert writes == set(RIGHTS[program].writes)
        assert not {"All", "Alter", "Delete", "Create", "ClusterAction"} & {
            o for a in acls for o in a["operations"]
        }


def test_the_controller_may_describe_every_topic_that_it_watches() -> None:
    rights = RIGHTS["controller"]
    assert {*rights.reads, *rights.writes, *rights.sees} == set(TOPICS)


def test_overlays_contain_the_demo_schema() -> None:
    demo = (ROOT / "roostream/replay/schemas/demo.toml").read_text(encoding="utf-8")
    assert [(K8S / f"overlays/{o}/schema.toml").read_text(encoding="utf-8") for o in ("dev", "prod")] == [
        demo,
        demo,
    ]


def test_flinks_version_is_the_newest_that_the_operator_knows() -> None:
    """The field `flinkVersion` names features of the operator, while the image decides which Flink runs. This
    test fails when a newer operator's definition is added, until the field follows."""
    spec = find_object(build_overlay("prod"), "FlinkDeployment", "roostream-joiner")["spec"]
    (jar,) = pyflink_home().glob("lib/flink-dist-*.jar")
    running_version = tuple(map(int, jar.stem.removeprefix("flink-dist-").split(".")[:2]))
    schema = definitions()[("flink.apache.org/v1beta1", "FlinkDeployment")]["properties"]["spec"]
    known = {
        tuple(map(int, name.removeprefix("v").split("_"))): name
        for name in schema["properties"]["flinkVersion"]["enum"]
    }
    assert spec["flinkVersion"] == known[max(version for version in known if version <= running_version)]


def test_flink_or_its_operator_knows_every_key() -> None:
    """Flink ignores unknown keys silently. The texts of its keys are in its class files."""
    configurations = [
        find_object(build_overlay(o), "FlinkDeployment", "roostream-joiner")["spec"]["flinkConfiguration"]
        for o in ("dev", "prod")
    ]
    settings = {key for configuration in configurations for key in configuration}
    flink_keys = {
        re.sub(r"^metrics\.reporter\.prom\.", "", k)
        for k in settings
        if not k.startswith(("kubernetes.operator.", "s3."))
    }
    known = b""
    for jar in (*pyflink_home().glob("lib/flink-dist-*.jar"), *pyflink_home().glob("opt/flink-python-*.jar")):
        with zipfile.ZipFile(jar) as opened:
            names = [n for n in opened.namelist() if re.search(r"/\w*Options(\$\w+)?\.class$", n)]
            known += b"".join(opened.read(n) for n in names)
    assert {key for key in flink_keys if key.encode() not in known} - {"port"} == set()
    operator = {key for key in settings if key.startswith("kubernetes.operator.")}
    assert operator <= set(
        (Path(__file__).with_name("flink_operator_keys.txt")).read_text(encoding="utf-8").split()
    )

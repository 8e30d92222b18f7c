"""Kafka as Strimzi runs it: disks large enough for the topics, brokers on separate nodes and zones, a pinned
metadata version, and metrics that exist."""

from __future__ import annotations

import re
import zipfile
from typing import Any

import pytest
import yaml

from infra.jars import KAFKA_JARS
from tests.contract.source_tree import ROOT
from tests.k8s.manifests import (
    OVERLAYS,
    build_custom_overlay,
    build_overlay,
    find_object,
    kafka_pods,
    of_kind,
)
from tests.k8s.network import selects

Objects = tuple[dict[str, Any], ...]
MAX_FULL = 0.8
"""The share of the disks that retention may fill. The rest is for open segments, Kafka's own topics and an
uneven spread."""


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return (
        build_custom_overlay(tmp_path_factory.mktemp("own"))
        if request.param == "all"
        else build_overlay(request.param)
    )


def gib(text: str) -> float:
    found = re.fullmatch(r"(\d+)Gi", text)
    assert found, f"expected a size in Gi, got {text}"
    return float(found[1])


def test_what_topics_may_keep_fits_on_the_disks(objects: Objects) -> None:
    kept_gib = 0.0
    for topic in of_kind(objects, "KafkaTopic"):
        spec = topic["spec"]
        topic_bytes = int(spec["config"]["retention.bytes"]) + int(spec["config"]["segment.bytes"])
        kept_gib += topic_bytes / 2**30 * spec["partitions"] * spec["replicas"]
    pool = find_object(objects, "KafkaNodePool", "broker")["spec"]
    disks_gib = sum(gib(volume["size"]) for volume in pool["storage"]["volumes"]) * pool["replicas"]
    assert 0 < kept_gib <= MAX_FULL * disks_gib, (kept_gib, disks_gib)


def test_no_two_pods_of_a_pool_share_a_node(objects: Objects) -> None:
    pools = [w for w in kafka_pods(objects) if w.name != "entity-operator"]
    for pool in pools:
        (anti_affinity,) = pool.pod["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert anti_affinity["topologyKey"] == "kubernetes.io/hostname"
        assert [w.name for w in pools if selects(anti_affinity["labelSelector"], w.labels)] == [pool.name]


@pytest.mark.parametrize(
    ("overlay", "rack"), [("prod", {"topologyKey": "topology.kubernetes.io/zone"}), ("dev", None)]
)
def test_copies_are_spread_over_zones_where_nodes_have_some(overlay: str, rack: object) -> None:
    assert find_object(build_overlay(overlay), "Kafka", "roostream")["spec"]["kafka"].get("rack") == rack


def test_certificates_are_renewed_long_before_they_expire(objects: Objects) -> None:
    """Kafka's clients read certificates once, when a program starts. With Strimzi's default of 30 days,
    programs that were not restarted within these days would lose access all at once."""
    spec = find_object(objects, "Kafka", "roostream")["spec"]
    for authority in (spec.get("clusterCa", {}), spec.get("clientsCa", {})):  # of brokers and of users
        renewal_days, validity_days = authority.get("renewalDays", 30), authority.get("validityDays", 365)
        assert 365 <= renewal_days <= validity_days / 2


def test_the_metadata_version_is_pinned_to_one_that_the_broker_knows(objects: Objects) -> None:
    kafka = find_object(objects, "Kafka", "roostream")["spec"]["kafka"]
    pinned = kafka["metadataVersion"]
    assert pinned.startswith(f"{kafka['version'].rpartition('.')[0]}-")
    with zipfile.ZipFile(KAFKA_JARS / f"kafka-server-common-{kafka['version']}.jar") as jar:
        known = jar.read("org/apache/kafka/server/common/MetadataVersion.class")
    assert f"IBP_{re.sub(r'[.-]', '_', pinned)}".encode() in known


def test_every_exported_bean_is_one_of_the_broker(objects: Objects) -> None:
    """A pattern that matches nothing gives no error, and the alert on its metric would never fire."""
    config_map_key = find_object(objects, "Kafka", "roostream")["spec"]["kafka"]["metricsConfig"][
        "valueFrom"
    ]["configMapKeyRef"]
    rules = yaml.safe_load(
        find_object(objects, "ConfigMap", config_map_key["name"])["data"][config_map_key["key"]]
    )["rules"]
    known = b""
    for jar in KAFKA_JARS.glob("kafka*.jar"):
        with zipfile.ZipFile(jar) as opened:
            known += b"".join(opened.read(n) for n in opened.namelist() if n.endswith(".class"))
    beans = set()
    for rule in rules:
        found = re.search(r"name=\(?([\w|]+)\)?(PerSec)?", rule["pattern"])
        assert found
        beans |= {name + (found[2] or "") for name in found[1].split("|")}
    assert len(beans) > 8 and {bean for bean in beans if bean.encode() not in known} == set()


def test_every_kafka_metric_of_alerts_and_dashboards_is_exported() -> None:
    rules = yaml.safe_load(
        find_object(build_overlay("prod"), "ConfigMap", "roostream-kafka-metrics")["data"]["rules.yaml"]
    )["rules"]
    exported = set()
    for rule in rules:
        (values,) = re.findall(r"name=\((.+?)\)", rule["pattern"]) or [""]
        exported |= {rule["name"].replace("$1", value).lower() for value in values.split("|")}
    folders = ROOT / "infra/alerts", ROOT / "infra/dashboards"
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in folder.iterdir()]
    names = {name for text in texts for name in re.findall(r"\bkafka_(?:server|controller|log)_\w+", text)}
    assert names - exported == set()

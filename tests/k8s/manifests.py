"""The manifests as `kubectl apply -k` sends them, and helpers to find objects in them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.source_tree import ROOT

K8S = ROOT / "infra" / "k8s"
CRDS = Path(__file__).with_name("crds")
OVERLAYS = ("dev", "prod", "all")  # "all": a user's overlay with every component

_CUSTOM_KUSTOMIZATION = """apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: shop
resources:
  - values.yaml
  - {k8s}/base
  - {k8s}/kafka
  - {k8s}/monitoring
components:
  - {k8s}/components/serving-tls
  - {k8s}/components/link-tls
  - {k8s}/components/gpu
  - {k8s}/components/values
  - {k8s}/components/autoscaling
configMapGenerator:
  - name: roostream-schema
    files: [schema.toml]
"""
VALUES = {
    "SHARDS": "3",
    "PARTITIONS": "6",
    "BUCKETS": "32",
    "IMAGE": "shop.example.org/roostream@sha256:" + "0" * 64,
    "DATA_IMAGE": "shop.example.org/roostream-data@sha256:" + "1" * 64,
}
"""The values that this user changes."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """An object that creates pods: its kind and name, and the pod template."""

    kind: str
    name: str
    spec: dict[str, Any]
    pod: dict[str, Any]
    labels: dict[str, str]

    @property
    def containers(self) -> list[dict[str, Any]]:
        """The pod's containers and init containers."""
        return [*self.pod["containers"], *self.pod.get("initContainers", [])]


@cache
def build_overlay(overlay: str) -> tuple[dict[str, Any], ...]:
    """Every object of an overlay. Skips the test if kubectl is not installed."""
    if overlay == "all":
        raise AssertionError('use `build_custom_overlay` for the overlay "all"')
    return build(K8S / "overlays" / overlay)


def build(folder: Path) -> tuple[dict[str, Any], ...]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not on PATH, and only kubectl builds a kustomization")
    completed = subprocess.run(
        (kubectl, "kustomize", str(folder)), capture_output=True, text=True, check=False, timeout=600
    )
    assert completed.returncode == 0, completed.stderr
    return tuple(
        d for d in yaml.load_all(completed.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if d
    )


def build_custom_overlay(folder: Path) -> tuple[dict[str, Any], ...]:
    """Build an overlay as a user writes it next to a checkout: three files, and every component."""
    k8s = os.path.relpath(K8S, folder.resolve())
    (folder / "kustomization.yaml").write_text(_CUSTOM_KUSTOMIZATION.format(k8s=k8s), encoding="utf-8")
    values = yaml.safe_load((K8S / "overlays/prod/values.yaml").read_text(encoding="utf-8"))
    values["data"] |= VALUES
    (folder / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    shutil.copy(K8S / "overlays/prod/schema.toml", folder)
    return build(folder)


def copy_prod(folder: Path) -> None:
    """Copy the overlay prod as the cluster page describes. The copy's kustomization refers to this
    checkout."""
    for file in (K8S / "overlays/prod").iterdir():
        shutil.copy(file, folder)
    kustomization = folder / "kustomization.yaml"
    relative_k8s = os.path.relpath(K8S, folder.resolve())
    kustomization.write_text(
        kustomization.read_text(encoding="utf-8").replace("../..", relative_k8s), encoding="utf-8"
    )


def of_kind(objects: tuple[dict[str, Any], ...], *kinds: str) -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] in kinds]


def find_object(objects: tuple[dict[str, Any], ...], kind: str, name: str) -> dict[str, Any]:
    """The one object of this kind and name. The name of a ConfigMap may have a hash suffix."""
    found = [o for o in of_kind(objects, kind) if o["metadata"]["name"] == name or _unhashed(o) == name]
    assert len(found) == 1, f"expected one {kind} {name}, got {len(found)}"
    return found[0]


def _unhashed(resource: dict[str, Any]) -> str:
    return str(resource["metadata"]["name"]).rpartition("-")[0] if resource["kind"] == "ConfigMap" else ""


def workloads(objects: tuple[dict[str, Any], ...]) -> Iterator[Workload]:
    """Every object that creates pods. Flink's operator creates two kinds of pods from one template."""
    for o in objects:
        name, spec = o["metadata"]["name"], o.get("spec", {})
        if o["kind"] == "FlinkDeployment":
            labels = spec["jobManager"]["podTemplate"]["metadata"]["labels"]
            assert labels == spec["taskManager"]["podTemplate"]["metadata"]["labels"]
            yield Workload(o["kind"], name, spec, spec["podTemplate"]["spec"], labels)
        elif "template" in spec and "spec" in spec["template"]:
            template = spec["template"]
            yield Workload(o["kind"], name, spec, template["spec"], template["metadata"]["labels"])


def kafka_pods(objects: tuple[dict[str, Any], ...]) -> Iterator[Workload]:
    """The pods that Strimzi creates from `Kafka` and its pools, with the names of their containers. What a
    template leaves out is the default of Strimzi's provider `baseline`: the group of the volumes, and no
    security context of a container. test_strimzi.py compares these pods with those of Strimzi's operator."""
    for kafka in of_kind(objects, "Kafka"):
        cluster, spec = {"strimzi.io/cluster": kafka["metadata"]["name"]}, kafka["spec"]
        for pool in of_kind(objects, "KafkaNodePool"):
            name = pool["metadata"]["name"]
            template = spec["kafka"].get("template", {}) | pool["spec"].get("template", {})
            resources = {"resources": pool["spec"].get("resources", {})}
            containers = [{"name": "kafka", **template.get("kafkaContainer", {}), **resources}]
            first = [{"name": "kafka-init", **template.get("initContainer", {}), **resources}]
            reads_zone = "rack" in spec["kafka"] and "broker" in pool["spec"]["roles"]
            pod = {"containers": containers, "initContainers": first if reads_zone else []}
            if any(v["type"] == "persistent-claim" for v in pool["spec"]["storage"]["volumes"]):
                pod["securityContext"] = {"fsGroup": 0}
            labels = cluster | {"strimzi.io/kind": "Kafka", "strimzi.io/pool-name": name}
            yield Workload("Kafka", name, pool["spec"], pod | template.get("pod", {}), labels)
        if (operator := spec.get("entityOperator")) is not None:
            template = operator.get("template", {})
            containers = [
                {"name": name, **template.get(f"{key}Container", {}), **operator[key]}
                for name, key in (("topic-operator", "topicOperator"), ("user-operator", "userOperator"))
                if key in operator
            ]
            pod = {"containers": containers, **template.get("pod", {})}
            yield Workload("Kafka", "entity-operator", operator, pod, cluster | {"strimzi.io/kind": "Kafka"})


@cache
def definitions() -> dict[tuple[str, str], dict[str, Any]]:
    """(apiVersion, kind) → schema, for the operators' custom resources in crds/."""
    found = {}
    for path in sorted(CRDS.glob("*.json")):
        spec = json.loads(path.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            if version["served"]:
                group_and_kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[group_and_kind] = version["schema"]["openAPIV3Schema"]
    return found

"""Strimzi's operator, built from its sources, creates the pods that `kafka_pods` describes, and the API
server admits them. No container runs, so no broker answers, and the operator does not get as far as the
entity operator: its own class makes that Deployment.

STRIMZI_OPERATOR names the folder of the sources in which `mvn package` has run, JAVA_HOME a JDK of 21 or
later. The operator needs port 8080 of this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.api_server import ApiServer
from tests.k8s.manifests import build_overlay, find_object, kafka_pods, of_kind
from tests.k8s.policy import with_limits
from tests.k8s.test_api_server import Objects, in_namespace

SOURCES = os.environ.get("STRIMZI_OPERATOR", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not SOURCES, reason="STRIMZI_OPERATOR names no folder of Strimzi's built sources"),
]
SECONDS = 300
OWN_KINDS = ("Namespace", "ConfigMap", "Kafka", "KafkaNodePool", "KafkaTopic", "KafkaUser")


@dataclasses.dataclass(frozen=True)
class Operator:
    """The running operator, its API server, and the command that starts a Java program in its place."""

    server: ApiServer
    command: tuple[str, ...]


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    install = Path(SOURCES) / "install" / "cluster-operator"
    (file,) = install.glob("*-Deployment-strimzi-cluster-operator.yaml")
    (container,) = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["template"]["spec"]["containers"]
    variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
    variables |= {"STRIMZI_NAMESPACE": "*", "STRIMZI_OPERATOR_NAMESPACE": "default"}
    variables |= {"STRIMZI_LEADER_ELECTION_ENABLED": "false", "STRIMZI_OPERATION_TIMEOUT_MS": "10000"}
    java = os.path.join(os.environ.get("JAVA_HOME", "/usr"), "bin", "java")
    target = Path(SOURCES) / "cluster-operator" / "target"
    with ApiServer(tmp_path_factory.mktemp("server")) as server:
        server.kubectl(
            "apply", "--server-side", *(a for path in install.glob("*-Crd-*.yaml") for a in ("-f", str(path)))
        )
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=300s")
        variables["KUBECONFIG"] = str(server.config)
        environment = (f"{name}={value}" for name, value in variables.items())
        command = ("env", *environment, java, "-Xmx512m", "-cp", f"{target}/*:{target}/lib/*")
        server.start("operator", *command, "io.strimzi.operator.cluster.Main")
        yield Operator(server, command)


def apply(server: ApiServer, overlay: str) -> Objects:
    """Apply Kafka's objects of an overlay in a namespace of its own."""
    namespaced = in_namespace(build_overlay(overlay), f"{overlay}-stack")
    objects = tuple(of_kind(namespaced, *OWN_KINDS))
    for applied in (of_kind(objects, "Namespace"), objects):
        completed = server.apply(tuple(applied))
        assert completed.returncode == 0 and completed.stderr == "", completed.stderr
    return objects


def compared(pod: dict[str, Any]) -> dict[str, Any]:
    """What the rules of policy.py read, of the containers by name."""
    parts = {
        part: {c["name"]: (c.get("securityContext", {}), c.get("resources", {})) for c in pod.get(part) or ()}
        for part in ("containers", "initContainers")
    }
    anti_affinity = pod.get("affinity", {}).get("podAntiAffinity", {})
    return parts | {"securityContext": pod.get("securityContext") or {}, "podAntiAffinity": anti_affinity}


@pytest.mark.parametrize("overlay", ["prod", "dev"])
def test_strimzi_creates_the_described_pods_without_warnings(
    overlay: str, operator: Operator, tmp_path: Path
) -> None:
    server, namespace = operator.server, f"{overlay}-stack"
    objects = apply(server, overlay)
    pools = {p["metadata"]["name"]: p["spec"]["replicas"] for p in of_kind(objects, "KafkaNodePool")}

    def conditions() -> list[dict[str, Any]]:
        (kafka,) = server.get("kafkas", "-n", namespace)
        return list(kafka.get("status", {}).get("conditions", ()))

    server.until(
        lambda: len(server.get("pods", "-n", namespace)) == sum(pools.values()),
        "all pods are admitted",
        SECONDS,
    )
    # The operator gives up, because no pod becomes ready here; then the status has its warnings.
    server.until(
        lambda: any(c.get("reason") != "Creating" for c in conditions()), "Kafka has a status", SECONDS
    )
    assert [c for c in conditions() if c["type"] == "Warning"] == []

    described = {w.name: w for w in kafka_pods(objects)}
    for pod in server.get("pods", "-n", namespace):
        workload = described[pod["metadata"]["labels"]["strimzi.io/pool-name"]]
        assert compared(pod["spec"]) == compared(workload.pod)
        assert list(with_limits(dataclasses.replace(workload, pod=pod["spec"]))) == []
        assert workload.labels.items() <= pod["metadata"]["labels"].items()

    kafka, made = tmp_path / "kafka.json", tmp_path / "deployment.json"
    kafka.write_text(json.dumps(find_object(objects, "Kafka", "roostream")), encoding="utf-8")
    program = Path(__file__).with_name("EntityOperatorDeployment.java")
    subprocess.run((*operator.command, str(program), str(kafka), str(made)), check=True, timeout=SECONDS)
    deployment = json.loads(made.read_text(encoding="utf-8"))
    deployment["metadata"].pop("ownerReferences")
    completed = server.apply((deployment,))
    assert completed.returncode == 0 and completed.stderr == "", completed.stderr
    entity_operator, template = described["entity-operator"], deployment["spec"]["template"]
    assert compared(template["spec"]) == compared(entity_operator.pod)
    assert entity_operator.labels.items() <= template["metadata"]["labels"].items()

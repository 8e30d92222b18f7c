"""The dev overlay on a node whose pods really run: all pods get ready, requests are ranked and trained, and
pods are deleted one after the other.

Two things differ from a cluster: Kafka is no pod, and Flink's own client, not its operator, creates the
joiner's cluster from the pod template and configuration of the FlinkDeployment.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.flink_cluster import pyflink_home
from infra.jars import find_java, java_home
from serving.client.client import ServingClient
from tests.containers.docker import TARGETS
from tests.containers.kubernetes_node import ADDRESS, KAFKA_HOST, KAFKA_PORT, LOCAL_KAFKA_PORT, KubernetesNode
from tests.k8s.manifests import build_overlay, find_object, of_kind, workloads
from tests.k8s.simulated_nodes import is_ready

pytestmark = [pytest.mark.containers, pytest.mark.timeout(5400)]
NAMESPACE = "roostream"
TOOLS = ("containerd", "ctr", "iptables", "ip", "kubectl")
Objects = tuple[dict[str, Any], ...]


@pytest.fixture(scope="module")
def node(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesNode]:
    if os.geteuid() or any(shutil.which(tool) is None for tool in TOOLS):
        pytest.skip(f"a node needs root, and {', '.join(TOOLS)} on PATH")
    if not Path("/usr/lib/cni/ptp").exists():
        pytest.skip("a node needs /usr/lib/cni, of Debian's package containernetworking-plugins")
    with KubernetesNode(tmp_path_factory.mktemp("node")) as node:
        for variable, target in TARGETS.items():
            node.import_image(images[variable], f"registry.example.org/{target}:0.1.0")
        node.import_image("docker.io/library/redis:7.4", "docker.io/library/redis:7.2.5")
        node.install_definitions()
        node.start_kafka()
        yield node


@pytest.fixture(scope="module")
def objects() -> Objects:
    """The overlay for a machine of any size: without requests of CPU, and requests close after 20 s."""
    changed = copy.deepcopy(build_overlay("dev"))
    for workload in workloads(changed):
        for container in workload.containers:
            container.get("resources", {}).get("requests", {}).pop("cpu", None)
    (container,) = _joiner(changed)["podTemplate"]["spec"]["containers"]
    container["env"].append({"name": "ROOSTREAM_JOINER_WINDOW_MS", "value": "20000"})
    return changed


def _joiner(objects: Objects) -> dict[str, Any]:
    return dict(find_object(objects, "FlinkDeployment", "roostream-joiner")["spec"])


def test_the_dev_overlay_trains_and_serves_on_a_node(
    node: KubernetesNode, objects: Objects, tmp_path: Path
) -> None:
    assert node.apply(tuple(of_kind(objects, "Namespace"))).returncode == 0
    _make_what_operators_make(node, objects, tmp_path)
    applied = node.apply(objects)
    assert applied.returncode == 0, applied.stderr
    _deploy_flink(node, _joiner(objects), tmp_path)
    node.until(lambda: _not_ready(node) == [], "all pods are ready")
    node.until(lambda: _commits(node) >= 2, "training commits")
    _rank(node)

    for component in ("worker", "shard", "controller", "features", "joiner"):
        before = _commits(node)
        node.kubectl("delete", "pod", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")
        _rank(node)  # a shard's rows are in serving
        node.until(lambda: _not_ready(node) == [], f"all pods are ready after {component} was deleted")
        node.until(lambda before=before: _commits(node) > before, f"training commits after {component}")
    node.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/roostream-serving")
    node.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/roostream-serving", "--timeout=900s")
    _rank(node)
    restarts = {
        pod["metadata"]["name"]: status["restartCount"]
        for pod in node.get("pods", "-n", NAMESPACE)
        for status in pod["status"]["containerStatuses"]
    }
    assert not any(restarts.values()), restarts


def _make_what_operators_make(node: KubernetesNode, objects: Objects, folder: Path) -> None:
    """Kafka's address and topics, the Secrets of its users, volumes and Redis's passwords."""
    create = ("create", "-n", NAMESPACE, "secret", "generic")
    node.kubectl(*create, "roostream-cluster-ca-cert", f"--from-file=ca.crt={node.authority.pem}")
    for user in of_kind(objects, "KafkaUser"):
        name = user["metadata"]["name"]
        certificate, key = node.authority.issue(name)
        files = (f"--from-file=user.crt={certificate}", f"--from-file=user.key={key}")
        node.kubectl(*create, name, *files)
    node.kubectl(*create, "roostream-redis", "--from-literal=serving=one", "--from-literal=features=two")
    port = {"name": "tls", "port": KAFKA_PORT}
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{KAFKA_HOST}-1",
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": KAFKA_HOST},
        },
        "addressType": "IPv4",
        "ports": [port],
        "endpoints": [{"addresses": [ADDRESS]}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": KAFKA_HOST, "namespace": NAMESPACE},
        "spec": {"ports": [port]},
    }
    volumes = []
    for number in range(16):
        path = folder / f"volume-{number}"
        path.mkdir()
        path.chmod(0o777)  # a kubelet does not change the group of such a volume
        spec = {
            "capacity": {"storage": "1Ti"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(path)},
        }
        metadata = {"name": f"volume-{number}"}
        volumes.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
    assert node.apply((service, slice_, *volumes)).returncode == 0
    kafka = ("--kafka", f"127.0.0.1:{LOCAL_KAFKA_PORT}")
    command = (sys.executable, "-m", "roostream.cli.main", "topics", "create", *kafka)
    node.until(
        lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "topics exist"
    )


def _deploy_flink(node: KubernetesNode, spec: dict[str, Any], folder: Path) -> None:
    """Deploy the joiner in Flink's native application mode."""
    settings = {
        k: v for k, v in spec["flinkConfiguration"].items() if not k.startswith("kubernetes.operator")
    }
    settings |= {
        "kubernetes.cluster-id": "roostream-joiner",
        "kubernetes.namespace": NAMESPACE,
        "kubernetes.container.image.ref": spec["image"],
        "kubernetes.service-account": spec["serviceAccount"],
        "kubernetes.jobmanager.cpu.amount": "0.1",
        "kubernetes.taskmanager.cpu.amount": "0.1",
        "parallelism.default": str(spec["job"]["parallelism"]),
    }
    for side in ("jobManager", "taskManager"):
        pod = {**spec["podTemplate"], **spec[side]["podTemplate"], "apiVersion": "v1", "kind": "Pod"}
        file = folder / f"{side}.yaml"
        file.write_text(yaml.safe_dump(pod), encoding="utf-8")
        settings[f"kubernetes.pod-template-file.{side.lower()}"] = str(file)
        settings[f"{side.lower()}.memory.process.size"] = spec[side]["resource"]["memory"]
    home, job = pyflink_home(), spec["job"]
    options = [f"-D{key}={value}" for key, value in settings.items()]
    command = ("bash", str(home / "bin" / "flink"), "run", "-t", "kubernetes-application", *options)
    completed = subprocess.run(
        (*command, "-c", job["entryClass"], job["jarURI"], *job["args"]),
        env={
            **os.environ,
            "KUBECONFIG": str(node.config),
            "FLINK_HOME": str(home),
            "FLINK_LOG_DIR": str(folder),
            "JAVA_HOME": str(java_home(find_java())),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-4000:]


def _not_ready(node: KubernetesNode) -> list[str]:
    """The pods of the namespace that are not ready, or that end."""
    pods = node.get("pods", "-n", NAMESPACE)
    names = {pod["metadata"]["name"] for pod in pods}
    missing = [] if any("joiner-taskmanager" in name for name in names) else ["a task manager"]
    return missing + [
        pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"] or not is_ready(pod)
    ]


def _address(node: KubernetesNode, service: str, port: int) -> str:
    found = node.kubectl("get", "service", "-n", NAMESPACE, service, "-o", "json").stdout
    return f"http://{json.loads(found)['spec']['clusterIP']}:{port}"


def _commits(node: KubernetesNode) -> int:
    """The newest commit's number in the shared store; 0 = none."""
    command = ("roostream", "checkpoint", "list", "--store", "/var/lib/roostream/store", "--json")
    listed = node.kubectl(
        "exec", "-n", NAMESPACE, "roostream-shard-1", "-c", "shard", "--", *command, check=False
    )
    return max((one["seq"] for one in json.loads(listed.stdout or "[]")), default=0)


def _rank(node: KubernetesNode) -> None:
    """Rank 50 lists. Raises ServingError: one failed, also when it was sent again."""
    with ServingClient(_address(node, "roostream-serving", 8080)) as client:
        for user in range(1, 51):
            candidates = [{"item_id": item} for item in range(1, 21)]
            assert len(client.rank({"user_id": user, "candidates": candidates}).scores) == 20

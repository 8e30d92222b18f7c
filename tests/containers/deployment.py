"""A deployment in a namespace of a node, and what operators would make for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from infra.jars import find_java, java_home
from roostream.runtime.flink_rest import pyflink_home
from serving.client.client import ServingClient
from tests.containers.kubernetes_node import ADDRESS, KAFKA_HOST, KAFKA_PORT, LOCAL_KAFKA_PORT, KubernetesNode
from tests.k8s.manifests import find_object, of_kind, workloads
from tests.k8s.simulated_nodes import is_ready

NAMESPACE = "roostream"
FLINK_OPERATOR = os.environ.get("FLINK_OPERATOR", "")
"""The folder with the sources of Flink's operator, in which `mvn package` has run; "" = Flink's client
deploys the joiner."""
Objects = tuple[dict[str, Any], ...]


def fit(objects: Objects) -> None:
    """Change the objects for a machine of two cores: pods request a tenth of their CPU time, which is still
    what they get in proportion to each other. Flink's pods keep their limits."""
    for workload in workloads(objects):
        for container in workload.containers:
            requests = container.get("resources", {}).get("requests", {})
            if cpu := str(requests.get("cpu", "")):
                millis = float(cpu[:-1]) if cpu.endswith("m") else 1000 * float(cpu)
                requests["cpu"] = f"{millis / 10:.0f}m"
    spec = joiner_of(objects)
    for side in ("jobManager", "taskManager"):
        factor = f"kubernetes.{side.lower()}.cpu.limit-factor"
        spec[side]["resource"]["cpu"] /= 10
        spec["flinkConfiguration"][factor] = str(10 * float(spec["flinkConfiguration"][factor]))


def joiner_of(objects: Objects) -> dict[str, Any]:
    """The specification of the joiner's FlinkDeployment."""
    return dict(find_object(objects, "FlinkDeployment", "roostream-joiner")["spec"])


def set_variable(objects: Objects, component: str, name: str, value: str) -> None:
    """Set a variable of a program's container, as a patch of an overlay does."""
    if component == "joiner":
        (container,) = joiner_of(objects)["podTemplate"]["spec"]["containers"]
    else:
        (container,) = (
            w.pod["containers"][0] for w in workloads(objects) if w.name == f"roostream-{component}"
        )
    container.setdefault("env", []).append({"name": name, "value": value})


def read_metrics(host: str) -> str:
    """The metrics of a program; "" = it does not answer now."""
    try:
        with urllib.request.urlopen(f"http://{host}:9090/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException):
        return ""


class Deployment:
    """`folder` is for files of the test."""

    def __init__(self, node: KubernetesNode, folder: Path) -> None:
        self.node, self.folder = node, folder

    def make_namespace(self, objects: Objects) -> None:
        assert self.node.apply(tuple(of_kind(objects, "Namespace"))).returncode == 0

    def make_secret(self, name: str, **values: str | Path) -> None:
        """Make a Secret of literals and files. In the names of keys, `__` stands for a dot."""
        options = (
            f"--from-file={key.replace('__', '.')}={value}"
            if isinstance(value, Path)
            else f"--from-literal={key}={value}"
            for key, value in values.items()
        )
        self.node.kubectl("create", "-n", NAMESPACE, "secret", "generic", name, *options)

    def make_kafka(self, objects: Objects, partitions: int) -> None:
        """Kafka's address, the Secrets of its users, and the topics, as Strimzi makes them."""
        self.name_host(KAFKA_HOST, KAFKA_PORT)
        self.make_secret("roostream-cluster-ca-cert", ca__crt=self.node.authority.pem)
        for user in of_kind(objects, "KafkaUser"):
            name = user["metadata"]["name"]
            certificate, key = map(Path, self.node.authority.issue(name))
            self.make_secret(name, user__crt=certificate, user__key=key)
        kafka = ("--kafka", f"127.0.0.1:{LOCAL_KAFKA_PORT}", "--partitions", str(partitions))
        command = (sys.executable, "-m", "roostream.cli.main", "topics", "create", *kafka)
        self.node.until(
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "topics exist"
        )

    def name_host(self, name: str, port: int) -> None:
        """Make a Service, under whose name pods reach a port of the node."""
        named = {"name": "port", "port": port}
        slice_ = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-1",
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "ports": [named],
            "endpoints": [{"addresses": [ADDRESS]}],
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"ports": [named]},
        }
        assert self.node.apply((service, slice_)).returncode == 0

    def make_volumes(self, count: int = 16) -> None:
        volumes = []
        for number in range(count):
            path = self.folder / f"volume-{number}"
            path.mkdir()
            path.chmod(0o777)  # a kubelet does not change the group of such a volume
            spec = {
                "capacity": {"storage": "1Ti"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": str(path)},
            }
            metadata = {"name": f"volume-{number}"}
            volumes.append(
                {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec}
            )
        assert self.node.apply(tuple(volumes)).returncode == 0

    def _start_flink_operator(self, sources: Path) -> None:
        """Start Flink's operator, unless it runs. It may do everything in the cluster, in the place of the
        roles of its chart."""
        chart = sources / "helm" / "flink-kubernetes-operator"
        operator = sources / "flink-kubernetes-operator" / "target"
        standalone = sources / "flink-kubernetes-standalone" / "target"
        jars = [*standalone.glob("*[0-9].jar"), *operator.glob("*-shaded.jar"), operator / "log4j" / "*"]
        container = {
            "name": "operator",
            "image": "registry.example.org/roostream-flink:0.1.0",
            "command": [
                "java",
                "-cp",
                ":".join(map(str, jars)),
                f"-Dlog4j.configurationFile={chart}/conf/log4j-operator.properties",
                "org.apache.flink.kubernetes.operator.FlinkOperator",
            ],
            "env": [
                {"name": "FLINK_CONF_DIR", "value": f"{chart}/conf"},
                {"name": "OPERATOR_NAMESPACE", "value": "default"},
                {"name": "OPERATOR_NAME", "value": "flink-operator"},
            ],
            "volumeMounts": [{"name": "sources", "mountPath": str(sources), "readOnly": True}],
        }
        volume = {"name": "sources", "hostPath": {"path": str(sources)}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "flink-operator", "namespace": "default"},
            "spec": {"containers": [container], "volumes": [volume]},
        }
        rights = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "flink-operator"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}],
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "cluster-admin",
            },
        }
        definitions = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in chart.glob("crds/*.yml"))
        applied = self.node.apply((*definitions, rights, pod))
        assert applied.returncode == 0, applied.stderr

    def deploy_flink(self, spec: dict[str, Any]) -> None:
        """Have Flink's operator deploy the joiner. Without its sources, deploy it in Flink's native
        application mode, as the operator does, from the pod templates and the configuration of the
        FlinkDeployment. A job of the same deployment continues."""
        if FLINK_OPERATOR:
            return self._start_flink_operator(Path(FLINK_OPERATOR))
        settings = {
            k: v for k, v in spec["flinkConfiguration"].items() if not k.startswith("kubernetes.operator")
        }
        settings |= {
            "kubernetes.cluster-id": "roostream-joiner",
            "kubernetes.namespace": NAMESPACE,
            "kubernetes.container.image.ref": spec["image"],
            "kubernetes.service-account": spec["serviceAccount"],
            "parallelism.default": str(spec["job"]["parallelism"]),
        }
        for side in ("jobManager", "taskManager"):
            pod = {**spec["podTemplate"], **spec[side]["podTemplate"], "apiVersion": "v1", "kind": "Pod"}
            file = self.folder / f"{side}.yaml"
            file.write_text(yaml.safe_dump(pod), encoding="utf-8")
            settings[f"kubernetes.pod-template-file.{side.lower()}"] = str(file)
            settings[f"{side.lower()}.memory.process.size"] = spec[side]["resource"]["memory"]
            settings[f"kubernetes.{side.lower()}.cpu.amount"] = str(spec[side]["resource"]["cpu"])
        home, job = pyflink_home(), spec["job"]
        options = [f"-D{key}={value}" for key, value in settings.items()]
        command = ("bash", str(home / "bin" / "flink"), "run", "-t", "kubernetes-application", *options)
        completed = subprocess.run(
            (*command, "-c", job["entryClass"], job["jarURI"], *job["args"]),
            env={
                **os.environ,
                "KUBECONFIG": str(self.node.config),
                "FLINK_HOME": str(home),
                "FLINK_LOG_DIR": str(self.folder),
                "JAVA_HOME": str(java_home(find_java())),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout[-4000:]

    def not_ready(self, task_managers: int = 1) -> list[str]:
        """The pods of the namespace that are not ready, or that end."""
        pods = self.node.get("pods", "-n", NAMESPACE)
        found = sum("joiner-taskmanager" in pod["metadata"]["name"] for pod in pods)
        missing = [] if found >= task_managers else [f"{task_managers - found} task managers"]
        return missing + [
            pod["metadata"]["name"]
            for pod in pods
            if "deletionTimestamp" in pod["metadata"] or not is_ready(pod)
        ]

    def restarts(self) -> dict[str, int]:
        """Containers that ended and were started again, by pod."""
        counts = {
            pod["metadata"]["name"]: sum(s["restartCount"] for s in pod["status"]["containerStatuses"])
            for pod in self.node.get("pods", "-n", NAMESPACE)
        }
        return {name: count for name, count in counts.items() if count}

    def commits(self) -> int:
        """The number of the newest commit; 0 = none, or the controller does not answer now."""
        pods = self.node.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=controller")
        for pod in pods:
            text = read_metrics(str(pod["status"].get("podIP", "")))
            for number in re.findall(r"^roostream_controller_seq (\S+)", text, re.MULTILINE):
                return int(float(number))
        return 0

    def address(self, service: str) -> str:
        """The IP address of a service."""
        found = self.node.kubectl("get", "service", "-n", NAMESPACE, service, "-o", "json").stdout
        return str(json.loads(found)["spec"]["clusterIP"])

    def rank(self, scheme: str = "http", key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """Rank 50 lists. Raises ServingError: one failed, also when it was sent again."""
        url = f"{scheme}://{self.address('roostream-serving')}:8080"
        with ServingClient(url, key=key, tls=tls) as client:
            for user in range(1, 51):
                candidates = [{"item_id": item} for item in range(1, 21)]
                assert len(client.rank({"user_id": user, "candidates": candidates}).scores) == 20

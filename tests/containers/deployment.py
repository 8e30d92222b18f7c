"""A deployment in a namespace of a cluster, and what operators and an administrator would make for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from infra.jars import find_java, java_home
from roostream.runtime.flink_rest import pyflink_home
from tests.containers.kubernetes_cluster import KubernetesCluster
from tests.k8s.manifests import find_object, of_kind, workloads
from tests.k8s.network import Endpoint, allows
from tests.k8s.simulated_nodes import is_ready

NAMESPACE = "roostream"
KAFKA, KAFKA_PORT, PLAIN_KAFKA_PORT = "roostream-kafka-bootstrap", 9093, 19092
KAFKA_IMAGE = "docker.io/apache/kafka:4.2.0"
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


_KAFKA = f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:19094
controller.listener.names=CONTROLLER
listeners=TLS://:{KAFKA_PORT},PLAIN://:{PLAIN_KAFKA_PORT},CONTROLLER://127.0.0.1:19094
advertised.listeners=TLS://{KAFKA}:{KAFKA_PORT},PLAIN://POD_IP:{PLAIN_KAFKA_PORT}
listener.security.protocol.map=TLS:SSL,PLAIN:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAIN
ssl.keystore.type=PEM
ssl.keystore.location=/etc/kafka-settings/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location=/etc/kafka-settings/authority.pem
ssl.client.auth=required
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.max.timeout.ms=3600000
message.max.bytes=8388608
log.dirs=/data/kafka
"""
_START_KAFKA = """
sed "s/POD_IP/$POD_IP/" /etc/kafka-settings/server.properties > /data/server.properties
export CLASSPATH='/opt/kafka/libs/*'
java kafka.tools.StorageTool format -t 5L6g3nShT-eMCtK--X86sw -c /data/server.properties
exec java -Xmx512m kafka.Kafka /data/server.properties
"""
_RANK = """
import ssl, sys
from serving.client.client import ServingClient
url, key, authority = sys.argv[1:]
tls = ssl.create_default_context(cadata=authority) if authority else None
with ServingClient(url, key=key, tls=tls) as client:
    for user in range(1, 51):
        candidates = [{"item_id": item} for item in range(1, 21)]
        assert len(client.rank({"user_id": user, "candidates": candidates}).scores) == 20
"""
_CONNECT = """
import json, socket, sys
def connects(address):
    try:
        socket.create_connection(address, 3).close()
        return True
    except OSError:
        return False
print(json.dumps([connects(tuple(address)) for address in json.loads(sys.argv[1])]))
"""
_READ = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


class Deployment:
    """`folder` is for files of the test."""

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def make_namespace(self, objects: Objects) -> None:
        """The namespace, and one of a gateway that may ask serving."""
        name = {"name": "gateway", "labels": {"roostream.dev/clients": "true"}}
        clients = {"apiVersion": "v1", "kind": "Namespace", "metadata": name}
        self.apply((*of_kind(objects, "Namespace"), clients))

    def make_secret(self, name: str, **values: str | Path) -> None:
        """Make a Secret of literals and files. In the names of keys, `__` stands for a dot."""
        options = (
            f"--from-{'file' if isinstance(value, Path) else 'literal'}={key.replace('__', '.')}={value}"
            for key, value in values.items()
        )
        self.cluster.kubectl("create", "-n", NAMESPACE, "secret", "generic", name, *options)

    def make_kafka(self, objects: Objects, partitions: int) -> None:
        """One broker behind TLS, its policy, Secrets of its users, as Strimzi makes them, and the topics.
        The broker also listens without TLS, for the node on which it runs."""
        kafka = find_object(objects, "Kafka", "roostream")
        (listener,) = kafka["spec"]["kafka"]["listeners"]
        labels = {"strimzi.io/cluster": "roostream", "strimzi.io/kind": "Kafka"}
        policy = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "roostream-network-policy-kafka", "namespace": NAMESPACE},
            "spec": {
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": listener["networkPolicyPeers"], "ports": [{"port": listener["port"]}]}],
            },
        }
        certificate, key = (Path(file).read_text(encoding="utf-8") for file in self._issue("broker", KAFKA))
        authority = self.cluster.authority.pem
        settings = {"server__properties": _KAFKA, "broker__pem": key + certificate}
        self.make_secret("kafka-settings", **settings, authority__pem=authority)
        self.make_secret("roostream-cluster-ca-cert", ca__crt=authority)
        for user in of_kind(objects, "KafkaUser"):
            name = user["metadata"]["name"]
            certificate_file, key_file = self._issue(name)
            self.make_secret(name, user__crt=certificate_file, user__key=key_file)
        container = {
            "name": "kafka",
            "image": KAFKA_IMAGE,
            "command": ["/bin/bash", "-ec", _START_KAFKA],
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "readinessProbe": {"tcpSocket": {"port": KAFKA_PORT}},
            "volumeMounts": [
                {"name": "settings", "mountPath": "/etc/kafka-settings"},
                {"name": "data", "mountPath": "/data"},
            ],
        }
        volumes = [
            {"name": "settings", "secret": {"secretName": "kafka-settings", "defaultMode": 0o440}},
            {"name": "data", "emptyDir": {}},
        ]
        self.start_pod(KAFKA, container, volumes, KAFKA_PORT, labels)
        self.apply((policy,))
        create = ("topics", "create", "--partitions", str(partitions))
        self.cluster.until(lambda: self.runs_with_kafka(*create), "topics exist")

    def _issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        certificate, key = self.cluster.authority.issue(name, *hosts)
        return Path(certificate), Path(key)

    def runs_with_kafka(self, *words: str) -> bool:
        """Whether a command of `roostream` ends with success, on the node of the broker."""
        pod = self.pod(KAFKA)
        if not (address := pod.get("status", {}).get("podIP")):
            return False
        command = (sys.executable, "-m", "roostream.cli.main", *words)
        command = (*command, "--kafka", f"{address}:{PLAIN_KAFKA_PORT}")
        command = self.cluster.node_of(pod).inside(*command)
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def start_pod(
        self,
        name: str,
        container: dict[str, Any],
        volumes: list[dict[str, Any]],
        port: int,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A pod on the first node, as the namespace's Pod Security requires it, and its Service. It stands
        for a service outside the deployment."""
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        container["ports"] = [{"containerPort": port}]
        security = {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name, **labels}},
            "spec": {
                "securityContext": security,
                "containers": [container],
                "volumes": volumes,
                "nodeSelector": {"kubernetes.io/hostname": self.cluster.nodes[0].name},
            },
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
        }
        self.apply((pod, service))

    def apply(self, objects: Objects) -> None:
        applied = self.cluster.apply(objects)
        assert applied.returncode == 0, applied.stderr

    def pod(self, name: str) -> dict[str, Any]:
        found = self.cluster.kubectl("get", "pod", "-n", NAMESPACE, name, "-o", "json").stdout
        return dict(json.loads(found))

    def read_metrics(self, pod: dict[str, Any]) -> str:
        """The metrics of a program, read on the node of its pod; "" = it does not answer now."""
        if not (address := pod.get("status", {}).get("podIP")):
            return ""
        command = (sys.executable, "-c", _READ, f"http://{address}:9090/metrics")
        command = self.cluster.node_of(pod).inside(*command)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

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
        self.apply(tuple(volumes))

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
            "metadata": {
                "name": "flink-operator",
                "namespace": "default",
                "labels": {"app.kubernetes.io/name": "flink-kubernetes-operator"},
            },
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
        self.apply((*definitions, rights, pod))

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
                "KUBECONFIG": str(self.cluster.config),
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
        pods = self.cluster.get("pods", "-n", NAMESPACE)
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
            for pod in self.cluster.get("pods", "-n", NAMESPACE)
        }
        return {name: count for name, count in counts.items() if count}

    def commits(self) -> int:
        """The number of the newest commit; 0 = none, or the controller does not answer now."""
        pods = self.cluster.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=controller")
        for pod in pods:
            text = self.read_metrics(pod)
            for number in re.findall(r"^roostream_controller_seq (\S+)", text, re.MULTILINE):
                return int(float(number))
        return 0

    def check_policies(self) -> None:
        """Connect from one pod of every kind, and from a gateway, to every port that listens. A connection
        must be made exactly where the policies allow it. Images that are not ours may lack Python, so their
        pods connect to nothing."""
        policies = self.cluster.get("networkpolicies", "-n", NAMESPACE)
        pods = [self._start_client(), *self.cluster.get("pods", "-n", NAMESPACE)]
        by_kind = {_kind(pod): pod for pod in pods}
        ports = [
            (pod, port["containerPort"])
            for pod in by_kind.values()
            for container in pod["spec"]["containers"]
            for port in container.get("ports", ())
        ]
        listening = [(pod, port) for pod, port in ports if self._connect(None, [(pod, port)]) == [True]]
        assert len(listening) > len(by_kind), ports
        wrong, counts = [], Counter[bool]()
        for source in by_kind.values():
            if source["spec"]["containers"][0]["image"].startswith("docker.io/"):
                continue
            connected = self._connect(source, listening)
            for (target, port), connects in zip(listening, connected, strict=True):
                if target is not source:
                    allowed = allows(policies, _endpoint(source), _endpoint(target), port)
                    counts[allowed] += 1
                    if allowed != connects:
                        wrong.append(
                            (_kind(source), _kind(target), port, "allowed" if allowed else "not allowed")
                        )
        assert not wrong
        print(f"connections: {counts[True]} were allowed and made, {counts[False]} were neither")

    def _connect(
        self, source: dict[str, Any] | None, targets: list[tuple[dict[str, Any], int]]
    ) -> list[bool]:
        """Which connections a pod can make. None = the node of the first target, whatever policies say."""
        addresses = json.dumps([(pod["status"]["podIP"], port) for pod, port in targets])
        if source is None:
            command = self.cluster.node_of(targets[0][0]).inside(sys.executable, "-c", _CONNECT, addresses)
            return list(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
        name, namespace = source["metadata"]["name"], source["metadata"]["namespace"]
        command = ("exec", "-n", namespace, name, "--", "python3", "-c", _CONNECT, addresses)
        return list(json.loads(self.cluster.kubectl(*command).stdout))

    def rank(self, scheme: str = "http", key: str = "", authority: str = "") -> None:
        """Rank 50 lists from a pod of a gateway. Fails the test if one failed, also when sent again."""
        completed = self.try_to_rank(scheme, key, authority)
        assert completed.returncode == 0, completed.stderr

    def try_to_rank(self, scheme: str, key: str, authority: str) -> subprocess.CompletedProcess[str]:
        self._start_client()
        url = f"{scheme}://roostream-serving.{NAMESPACE}:8080"
        command = ("exec", "-i", "-n", "gateway", "client", "--", "python", "-", url, key, authority)
        return self.cluster.kubectl(*command, stdin=_RANK, check=False)

    def _start_client(self) -> dict[str, Any]:
        """Start the gateway's pod, unless it runs, and return it."""
        container = {
            "name": "client",
            "image": "registry.example.org/roostream:0.1.0",
            "command": ["sleep", "infinity"],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "client", "namespace": "gateway"},
            "spec": {
                "containers": [container],
                "nodeSelector": {"kubernetes.io/hostname": self.cluster.nodes[0].name},
            },
        }
        self.apply((pod,))
        self.cluster.kubectl("wait", "-n", "gateway", "pod/client", "--for=condition=Ready", "--timeout=900s")
        return self.cluster.get("pods", "-n", "gateway")[0]


def _kind(pod: dict[str, Any]) -> str:
    """The program of a pod, by which one pod of each is chosen."""
    labels = pod["metadata"].get("labels", {})
    component, part = labels.get("app.kubernetes.io/component"), labels.get("component", "")
    return f"{component} {part}".strip() if component else pod["metadata"]["name"]


def _endpoint(pod: dict[str, Any]) -> Endpoint:
    namespace = pod["metadata"]["namespace"]
    labels = {"roostream.dev/clients": "true"} if namespace == "gateway" else {}
    return Endpoint(pod["metadata"]["name"], pod["metadata"].get("labels", {}), namespace, labels)

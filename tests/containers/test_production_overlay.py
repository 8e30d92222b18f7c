"""The prod overlay on two nodes whose pods really run: enforced policies, certificates of cert-manager
between programs and in serving, API keys, an object store, and Redis with TLS. Certificates are renewed, the
job manager is lost, a node is drained, the schema gets another feature, and a node is lost, while simulated
users send requests.

It differs from a cluster as tests/containers/deployment.py says, and in sizes.
"""

from __future__ import annotations

import base64
import copy
import datetime
import json
import re
import secrets
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.deployment import (
    FLINK_OPERATOR,
    NAMESPACE,
    Deployment,
    Objects,
    fit,
    joiner_of,
    set_variable,
)
from tests.containers.kubernetes_cluster import ADDRESS, KubernetesCluster, Node
from tests.k8s.binaries import build as build_programs
from tests.k8s.binaries import definitions_of_cert_manager
from tests.k8s.manifests import build, copy_prod

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]
NODES = 2
STORE_PORT, REDIS_PORT, PARTITIONS, TASK_MANAGERS = 9000, 6380, 4, 2
VALUES = {
    "SHARDS": "3",
    "PARTITIONS": str(PARTITIONS),
    "BUCKETS": "64",
    "SHARD_MEMORY": "1Gi",
    "WORKER_MEMORY": "2Gi",
    "SERVING_MEMORY": "2Gi",
    "COMPACTOR_MEMORY": "2Gi",
    "STORE_PORT": str(STORE_PORT),
    "REDIS": f"rediss://redis:{REDIS_PORT}/0",
    "REDIS_PORT": str(REDIS_PORT),
    "REDIS_CA": "/etc/roostream/redis-ca/ca.crt",
}
STORE_OF_OURS = f"""
  - name: roostream-objects
    behavior: merge
    literals: ["AWS_ENDPOINT_URL=http://{ADDRESS}:{STORE_PORT}", AWS_ALLOW_HTTP=true]
patches:
  - target: {{kind: FlinkDeployment}}
    patch: |-
      - {{op: add, path: /spec/flinkConfiguration/s3.endpoint, value: "http://{ADDRESS}:{STORE_PORT}"}}
"""
"""The patch of docs/operations/deploy.md for an object store other than Amazon's."""
ANOTHER_FEATURE = """
[[counter]]
name = "category_ctr_1h"
entity = "category"
event = "click"
aggregation = "rate"
half_life = "1h"

[[nro]]
online = "category_ctr_1h"
"""
_CONTROLLERS_OF_CERT_MANAGER = ",".join(
    (
        "issuers",
        "certificates-issuing",
        "certificates-key-manager",
        "certificates-readiness",
        "certificates-request-manager",
        "certificates-revision-manager",
        "certificates-trigger",
        "certificaterequests-approver",
        "certificaterequests-issuer-ca",
        "certificaterequests-issuer-selfsigned",
    )
)
_REDIS = """
exec redis-server - <<END
port 0
tls-port 6380
tls-cert-file /etc/redis/tls.crt
tls-key-file /etc/redis/tls.key
tls-auth-clients no
save ""
user default off
user updater on >two resetkeys ~features:* -@all +ping +hello +mget +hgetall +hget +hset +set +scan \
  +unlink +evalsha +eval +script|load
user serving on >one resetkeys ~features:* -@all +ping +hello +mget
END
"""


_SHOW = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], sys.argv[2]), timeout=10))"
_END = "\n-----END"
_MAX_LATE = 0.02


class Production(Deployment):
    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        super().__init__(cluster, folder)
        self.key = ""
        self.overlay = folder / "overlay"
        self.overlay.mkdir()
        copy_prod(self.overlay)
        values = yaml.safe_load((self.overlay / "values.yaml").read_text(encoding="utf-8"))
        values["data"] |= VALUES
        (self.overlay / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        with (self.overlay / "kustomization.yaml").open("a", encoding="utf-8") as file:
            file.write(STORE_OF_OURS.lstrip("\n"))

    def objects(self) -> Objects:
        """The overlay as it is now, with requests that close after 20 s."""
        objects = copy.deepcopy(build(self.overlay))
        fit(objects)
        set_variable(objects, "joiner", "ROOSTREAM_JOINER_WINDOW", "20s")
        set_variable(objects, "serving", "ROOSTREAM_SERVING_JOIN_WINDOW", "20s")
        return objects

    def start_cert_manager(self) -> None:
        definitions = []
        for path in definitions_of_cert_manager():
            definition = yaml.safe_load(path.read_text(encoding="utf-8"))
            definition["metadata"].pop("labels")
            if definition["spec"]["names"]["kind"] not in ("Certificate", "Issuer"):
                definitions.append(definition)
        self.apply(tuple(definitions))
        self.cluster.kubectl("create", "namespace", "cert-manager")
        program = build_programs(("cert-manager",))["cert-manager"]
        self.cluster.start(
            "cert-manager",
            str(program),
            f"--kubeconfig={self.cluster.config}",
            "--leader-elect=false",
            f"--controllers={_CONTROLLERS_OF_CERT_MANAGER}",
            "--cluster-resource-namespace=cert-manager",
            "--metrics-listen-address=127.0.0.1:0",
        )

    def start_store(self) -> None:
        server = ("-m", "moto.server", "-H", ADDRESS, "-p", str(STORE_PORT))
        self.cluster.start("store", sys.executable, *server)

        def has_bucket() -> bool:
            request = urllib.request.Request(f"http://{ADDRESS}:{STORE_PORT}/roostream", method="PUT")
            try:
                with urllib.request.urlopen(request, timeout=10):
                    return True
            except OSError:
                return False

        self.cluster.until(has_bucket, "the object store answers")

    def start_redis(self) -> None:
        certificate, key = map(Path, self.cluster.authority.issue("redis", "redis"))
        self.make_secret("redis-tls", tls__crt=certificate, tls__key=key)
        self.make_secret("roostream-redis-ca", ca__crt=self.cluster.authority.pem)
        container = {
            "name": "redis",
            "image": "docker.io/library/redis:7.2.5",
            "command": ["/bin/sh", "-c", _REDIS],
            "readinessProbe": {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 2},
            "volumeMounts": [{"name": "tls", "mountPath": "/etc/redis"}],
        }
        volumes = [{"name": "tls", "secret": {"secretName": "redis-tls", "defaultMode": 0o440}}]
        self.start_pod("redis", container, volumes, REDIS_PORT)

    def make_secrets(self) -> None:
        """The secrets of docs/operations/deploy.md."""
        self.make_secret("roostream-redis", serving="one", features="two")
        self.make_secret("roostream-objects", AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
        self.make_secret("roostream-link", token=secrets.token_hex(32))
        keys = self.folder / "keys.json"
        command = ("keys", "new", "web", "--scope", "rank", "--scope", "engage", "--file", str(keys))
        printed = subprocess.run(
            (sys.executable, "-m", "roostream.cli.main", *command), capture_output=True, text=True, check=True
        )
        (self.key,) = re.findall(r"^(roo_\S+)", printed.stdout, re.MULTILINE)
        self.make_secret("roostream-keys", keys__json=keys)
        self.make_secret("web", key=self.key)

    def start_users(self, image: str) -> None:
        """Simulated users, as a client in the cluster."""
        container = {
            "name": "users",
            "image": image,
            "args": ["simulate", "--serving", "https://roostream-serving:8080", "--rate", "10"],
            "env": [
                {"name": "SSL_CERT_FILE", "value": "/etc/tls/ca.crt"},
                {"name": "ROOSTREAM_SIMULATE_KEY_FILE", "value": "/etc/web/key"},
                {"name": "ROOSTREAM_SIMULATE_METRICS_HOST", "value": "0.0.0.0"},
                {"name": "ROOSTREAM_SIMULATE_METRICS_PORT", "value": "9090"},
                {"name": "ROOSTREAM_SIMULATE_INSECURE", "value": "true"},
            ],
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": 9090}},
            "volumeMounts": [
                {"name": "tls", "mountPath": "/etc/tls"},
                {"name": "web", "mountPath": "/etc/web"},
            ],
        }
        volumes: list[dict[str, Any]] = [
            {
                "name": "tls",
                "secret": {
                    "secretName": "roostream-serving-tls",
                    "items": [{"key": "ca.crt", "path": "ca.crt"}],
                },
            },
            {"name": "web", "secret": {"secretName": "web"}},
        ]
        self.start_pod("users", container, volumes, 9090, {"roostream.dev/client": "true"})

    def outcomes(self) -> dict[str, float]:
        """The calls of the simulated users, by outcome."""
        text = self.read_metrics(self.pod("users"))
        found = re.findall(r'^roostream_simulator_http_total\{outcome="(\w+)"\} (\S+)', text, re.MULTILINE)
        return {outcome: float(count) for outcome, count in found}

    def authority(self) -> str:
        """The authority of serving's certificate."""
        return self._secret("roostream-serving-tls", "ca.crt")

    def goes_on(self, after: str) -> None:
        """Check that all pods get ready, that training commits, and that serving refuses no request. On a
        machine that cannot run all pods at once, a few requests may get no answer in time."""
        self.cluster.until(
            lambda: self.not_ready(TASK_MANAGERS) == [], f"all pods are ready after {after}", 1500
        )
        before = self.commits()
        self.cluster.until(lambda: self.commits() > before + 1, f"training commits after {after}")
        outcomes = self.outcomes()
        answered, refused, late = (outcomes.get(name, 0.0) for name in ("ok", "refused", "gave_up"))
        assert answered and not refused and late < _MAX_LATE * answered, (after, outcomes)
        print(f"after {after}: {outcomes}")

    def pods_of(self, node: Node) -> dict[str, str]:
        """Name → component, of the deployment's pods that are on the node."""
        labels = {
            pod["metadata"]["name"]: pod["metadata"]["labels"].get("app.kubernetes.io/component", "")
            for pod in self.cluster.get("pods", "-n", NAMESPACE)
            if pod["spec"].get("nodeName") == node.name
        }
        return {name: component for name, component in labels.items() if component}

    def certificate_of(self, secret: str) -> str:
        """The first certificate of a Secret; "" = there is none."""
        return self._secret(secret, "tls.crt").partition(_END)[0]

    def renew(self, certificate: str) -> None:
        """Have cert-manager issue a certificate again, as `cmctl renew` does."""
        condition = {
            "type": "Issuing",
            "status": "True",
            "reason": "ManuallyTriggered",
            "message": "renewed by hand",
            "lastTransitionTime": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        patch = json.dumps({"status": {"conditions": [condition]}})
        name = ("certificate", certificate, "-n", NAMESPACE)
        self.cluster.kubectl("patch", *name, "--subresource=status", "--type=merge", "-p", patch)

    def shown_by(self, component: str, port: int) -> str:
        """The certificate that a server of the first pod shows on its node; "" = it shows none now."""
        pod = self.cluster.get("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")[0]
        command = (sys.executable, "-c", _SHOW, pod["status"]["podIP"], str(port))
        command = self.cluster.node_of(pod).inside(*command)
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return shown.partition(_END)[0]

    def _secret(self, name: str, key: str) -> str:
        path = "jsonpath={.data." + key.replace(".", "\\.") + "}"
        text = self.cluster.kubectl("get", "secret", "-n", NAMESPACE, name, "-o", path, check=False).stdout
        return base64.b64decode(text).decode()


def test_the_prod_overlay_trains_and_serves_on_two_nodes(cluster: KubernetesCluster, tmp_path: Path) -> None:
    production = Production(cluster, tmp_path)
    objects = production.objects()
    production.make_namespace(objects)
    production.make_kafka(objects, PARTITIONS)
    production.make_volumes()
    production.make_secrets()
    production.start_store()
    production.start_redis()
    production.start_cert_manager()
    production.apply(objects)
    production.deploy_flink(joiner_of(objects))
    cluster.until(
        lambda: production.certificate_of("roostream-serving-tls") != "", "serving has a certificate"
    )
    production.start_users("registry.example.org/roostream:0.1.0")
    cluster.until(lambda: production.not_ready(TASK_MANAGERS) == [], "all pods are ready", 1500)
    cluster.until(lambda: production.commits() >= 2, "training commits")
    production.rank("https", production.key, production.authority())
    assert " 401" in production.try_to_rank("https", "", production.authority()).stderr
    production.check_policies()

    _renew_certificates(production)
    _lose_a_job_manager(production)
    _lose_a_volume(production)
    assert not production.restarts()
    _drain_a_node(production)
    _add_a_feature(production)
    assert not production.restarts()
    _lose_a_node(production)

    cluster.kubectl("delete", "pod", "-n", NAMESPACE, "users")
    audit = ("audit", "--partitions", str(PARTITIONS), "--window", "20s")
    cluster.until(lambda: production.runs_with_kafka(*audit), "every event is accounted for", 300)


def _renew_certificates(production: Production) -> None:
    """Programs use the new ones without a restart."""
    servers = {"roostream-serving-tls": ("serving", 8080), "roostream-link-shard": ("shard", 7000)}
    before = {secret: production.certificate_of(secret) for secret in servers}
    for secret, server in servers.items():
        assert production.shown_by(*server) == before[secret]
    for certificate in (
        "serving",
        *(f"link-{name}" for name in ("shard", "controller", "worker", "serving", "reader")),
    ):
        production.renew(f"roostream-{certificate}")
    for secret, server in servers.items():
        production.cluster.until(
            lambda s=secret: production.certificate_of(s) != before[s], f"{secret} is new"
        )
        production.cluster.until(
            lambda s=secret, server=server: production.shown_by(*server) == production.certificate_of(s),
            f"a server of {secret} shows the new one",
        )
    production.goes_on("the renewal of certificates")


def _lose_a_job_manager(production: Production) -> None:
    component = ("-l", "app.kubernetes.io/component=joiner,component=jobmanager")
    production.cluster.kubectl("delete", "pod", "-n", NAMESPACE, *component, "--grace-period=0", "--force")
    production.goes_on("the loss of a job manager")


def _lose_a_volume(production: Production) -> None:
    """The shard reads its rows from the object store."""
    claim = ("persistentvolumeclaim", "home-roostream-shard-2", "-n", NAMESPACE)
    production.cluster.kubectl("delete", *claim, "--wait=false")
    production.cluster.kubectl(
        "delete", "pod", "-n", NAMESPACE, "roostream-shard-2", "--grace-period=0", "--force"
    )
    production.goes_on("the loss of a shard's volume")


def _drain_a_node(production: Production) -> None:
    """The command of docs/operations/day-two.md. What ran there runs on the other node."""
    node = production.cluster.nodes[1].name
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=900s")
    production.cluster.kubectl("drain", node, *options)
    production.goes_on("a node was drained")
    production.cluster.kubectl("uncordon", node)


def _lose_a_node(production: Production) -> None:
    """A node loses its power; then the command of docs/operations/day-two.md says that it is gone."""
    node = production.cluster.nodes[1]
    lost = production.pods_of(node)
    assert {"shard", "worker", "serving"} & set(lost.values()), lost
    node.lose()
    production.cluster.until(lambda: node.name not in production.cluster.ready_nodes(), "the loss is noticed")
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    production.cluster.kubectl("taint", "nodes", node.name, taint)
    production.cluster.until(lambda: not production.pods_of(node), "no pod is on the lost node")
    production.goes_on(f"the loss of a node with {sorted(lost)}")


def _add_a_feature(production: Production) -> None:
    """Flink's operator continues from the newest checkpoint after a change, and so does its client."""
    with (production.overlay / "schema.toml").open("a", encoding="utf-8") as file:
        file.write(ANOTHER_FEATURE)
    objects = production.objects()
    production.apply(objects)
    if not FLINK_OPERATOR:
        production.cluster.kubectl("delete", "deployment", "-n", NAMESPACE, "roostream-joiner")
        production.deploy_flink(joiner_of(objects))
    for kind, name in (("statefulset", "shard"), ("statefulset", "worker"), ("deployment", "serving")):
        status = ("rollout", "status", "-n", NAMESPACE, f"{kind}/roostream-{name}", "--timeout=900s")
        production.cluster.kubectl(*status)
    production.goes_on("the roll-out of a schema")

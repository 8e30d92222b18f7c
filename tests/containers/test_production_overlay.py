"""The prod overlay on a node whose pods really run: certificates of cert-manager between programs and in
serving, API keys, an object store, and Redis with TLS. Certificates are renewed, the job manager is lost, and
the schema gets another feature, while simulated users send requests.

It differs from a cluster as tests/containers/deployment.py says, and in sizes.
"""

from __future__ import annotations

import base64
import copy
import re
import secrets
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.client.client import ServingClient, ServingError
from tests.containers.deployment import NAMESPACE, Deployment, Objects, fit, joiner_of, set_variable
from tests.containers.kubernetes_node import ADDRESS, KubernetesNode
from tests.k8s.binaries import build as build_programs
from tests.k8s.binaries import definitions_of_cert_manager
from tests.k8s.manifests import build, copy_prod, workloads

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]
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


class Production(Deployment):
    def __init__(self, node: KubernetesNode, folder: Path) -> None:
        super().__init__(node, folder)
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
        """The overlay as it is now; requests close after 20 s, and Redis has an authority of its own."""
        objects = copy.deepcopy(build(self.overlay))
        fit(objects)
        set_variable(objects, "joiner", "ROOSTREAM_JOINER_WINDOW", "20s")
        set_variable(objects, "serving", "ROOSTREAM_SERVING_JOIN_WINDOW", "20s")
        for component, program in (("serving", "SERVING"), ("features", "FEATURES")):
            set_variable(
                objects, component, f"ROOSTREAM_{program}_REDIS_CA", "/etc/roostream/redis-ca/ca.crt"
            )
            self._mount(objects, component, "redis-ca", "redis-tls")
        return objects

    @staticmethod
    def _mount(objects: Objects, component: str, name: str, secret: str) -> None:
        (pod,) = (w.pod for w in workloads(objects) if w.name == f"roostream-{component}")
        pod["volumes"].append({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}})
        mounts = pod["containers"][0]["volumeMounts"]
        mounts.append({"name": name, "mountPath": f"/etc/roostream/{name}", "readOnly": True})

    def apply(self, objects: Objects) -> None:
        applied = self.node.apply(objects)
        assert applied.returncode == 0, applied.stderr

    def start_cert_manager(self) -> None:
        definitions = []
        for path in definitions_of_cert_manager():
            definition = yaml.safe_load(path.read_text(encoding="utf-8"))
            definition["metadata"].pop("labels")
            if definition["spec"]["names"]["kind"] not in ("Certificate", "Issuer"):
                definitions.append(definition)
        self.apply(tuple(definitions))
        self.node.kubectl("create", "namespace", "cert-manager")
        program = build_programs(("cert-manager",))["cert-manager"]
        self.node.start(
            "cert-manager",
            str(program),
            f"--kubeconfig={self.node.config}",
            "--leader-elect=false",
            f"--controllers={_CONTROLLERS_OF_CERT_MANAGER}",
            "--cluster-resource-namespace=cert-manager",
            "--metrics-listen-address=127.0.0.1:0",
        )

    def start_store(self) -> None:
        server = ("-m", "moto.server", "-H", ADDRESS, "-p", str(STORE_PORT))
        self.node.start("store", sys.executable, *server)

        def has_bucket() -> bool:
            request = urllib.request.Request(f"http://{ADDRESS}:{STORE_PORT}/roostream", method="PUT")
            try:
                with urllib.request.urlopen(request, timeout=10):
                    return True
            except OSError:
                return False

        self.node.until(has_bucket, "the object store answers")

    def start_redis(self) -> None:
        certificate, key = map(Path, self.node.authority.issue("redis", "redis"))
        self.make_secret("redis-tls", tls__crt=certificate, tls__key=key, ca__crt=self.node.authority.pem)
        container = {
            "name": "redis",
            "image": "docker.io/library/redis:7.2.5",
            "command": ["/bin/sh", "-c", _REDIS],
            "readinessProbe": {"tcpSocket": {"port": REDIS_PORT}, "periodSeconds": 2},
            "volumeMounts": [{"name": "tls", "mountPath": "/etc/redis"}],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "redis", "namespace": NAMESPACE, "labels": {"app": "redis"}},
            "spec": {
                "containers": [container],
                "volumes": [{"name": "tls", "secret": {"secretName": "redis-tls"}}],
            },
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "redis", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "redis"}, "ports": [{"port": REDIS_PORT}]},
        }
        self.apply((pod, service))

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
        labels = {"app": "users", "roostream.dev/client": "true"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "users", "namespace": NAMESPACE, "labels": labels},
            "spec": {"containers": [container], "volumes": volumes},
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "users", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "users"}, "ports": [{"port": 9090}]},
        }
        self.apply((pod, service))

    def outcomes(self) -> dict[str, float]:
        """The calls of the simulated users, by outcome."""
        with urllib.request.urlopen(f"http://{self.address('users')}:9090/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(r'^roostream_simulator_http_total\{outcome="(\w+)"\} (\S+)', text, re.MULTILINE)
        return {outcome: float(count) for outcome, count in found}

    def tls(self) -> ssl.SSLContext:
        """Trusts serving's authority. The address here is none of the names in its certificate."""
        context = ssl.create_default_context(cadata=self._secret("roostream-serving-tls", "ca.crt"))
        context.check_hostname = False
        return context

    def certificate_of(self, secret: str) -> str:
        return self._secret(secret, "tls.crt").strip()

    def _secret(self, name: str, key: str) -> str:
        path = "jsonpath={.data." + key.replace(".", "\\.") + "}"
        text = self.node.kubectl("get", "secret", "-n", NAMESPACE, name, "-o", path, check=False).stdout
        return base64.b64decode(text).decode()


def test_the_prod_overlay_trains_and_serves_on_a_node(node: KubernetesNode, tmp_path: Path) -> None:
    production = Production(node, tmp_path)
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
    node.until(lambda: production.certificate_of("roostream-serving-tls") != "", "serving has a certificate")
    production.start_users("registry.example.org/roostream:0.1.0")
    node.until(lambda: production.not_ready(TASK_MANAGERS) == [], "all pods are ready", 1500)
    node.until(lambda: production.commits() >= 2, "training commits")
    production.rank("https", production.key, production.tls())
    url = f"https://{production.address('roostream-serving')}:8080"
    with ServingClient(url, tls=production.tls()) as client, pytest.raises(ServingError, match="401"):
        client.rank({"user_id": 1, "candidates": [{"item_id": 1}]})
    assert not production.restarts()

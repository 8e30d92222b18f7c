"""A Kubernetes node on this machine whose pods really run: containerd, kubelet, kube-proxy and CoreDNS beside
the control plane of tests/k8s.

    images of Docker ─► containerd ◄─ kubelet ◄─ API server ◄─ kubectl
                                          Kafka behind TLS (in the place of Strimzi's) ◄─ pods

It needs root, and of Debian the packages containerd, containernetworking-plugins, iptables and iproute2. The
node has an address and a pod network of its own, which other machines cannot reach. NetworkPolicies are not
enforced.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from infra.jars import KAFKA_JARS, find_java
from tests.certificates import Authority
from tests.containers.docker import docker
from tests.k8s.api_server import ApiServer
from tests.k8s.binaries import CONTROLLERS, PROGRAMS_OF_A_NODE, SCHEDULER, build

ADDRESS, POD_NETWORK, SERVICE_NETWORK, BRIDGE = "10.99.0.1", "10.244.0.0/16", "10.96.0.0/16", "roostream-node"
KAFKA_HOST, KAFKA_PORT, LOCAL_KAFKA_PORT = "roostream-kafka-bootstrap", 9093, 19092
_SOCKET = "/run/roostream-node/containerd.sock"
_PAUSE = "docker.io/library/pause:local"
_FORWARD = (("-s", POD_NETWORK, "-j", "ACCEPT"), ("-d", POD_NETWORK, "-j", "ACCEPT"))

_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/roostream-node"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/roostream-node/addresses",
                "ranges": [[{"subnet": POD_NETWORK}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "clusterDNS": [ADDRESS],
    "clusterDomain": "cluster.local",
    "containerRuntimeEndpoint": f"unix://{_SOCKET}",
    "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
}
_COREFILE = """.:53 {{
  bind {address}
  errors
  kubernetes cluster.local {{
    kubeconfig {config} test
  }}
  cache 5
}}
"""
_KAFKA = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:19094
controller.listener.names=CONTROLLER
listeners=TLS://{address}:{port},PLAIN://127.0.0.1:{local_port},CONTROLLER://127.0.0.1:19094
advertised.listeners=TLS://{host}:{port},PLAIN://127.0.0.1:{local_port}
listener.security.protocol.map=TLS:SSL,PLAIN:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAIN
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/authority.pem
ssl.client.auth=required
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.max.timeout.ms=3600000
message.max.bytes=8388608
log.dirs={folder}/kafka
"""


class KubernetesNode(ApiServer):
    """A context manager; `folder` needs a file system on which containerd can use overlays."""

    poll_s = 2.0  # each look starts kubectl, beside the pods

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ADDRESS)
        self.authority = Authority(folder, "authority")

    def __enter__(self) -> Self:
        self._make_network()
        super().__enter__()
        self.programs |= build((CONTROLLERS, SCHEDULER, *PROGRAMS_OF_A_NODE))
        as_admin = f"--kubeconfig={self.config}"
        authority = f"--root-ca-file={self.folder / 'certificates' / 'apiserver.crt'}"
        account_key = f"--service-account-private-key-file={self.folder / 'accounts.key'}"
        self._start(CONTROLLERS, as_admin, "--leader-elect=false", "--secure-port=0", authority, account_key)
        self._start(SCHEDULER, as_admin, "--leader-elect=false", "--secure-port=0")
        self._start_containerd()
        (self.folder / "kubelet.json").write_text(json.dumps(_KUBELET), encoding="utf-8")
        self._start(
            "kubelet",
            f"--config={self.folder / 'kubelet.json'}",
            as_admin,
            f"--node-ip={ADDRESS}",
            "--hostname-override=node-0",
            f"--root-dir={self.folder / 'kubelet'}",
        )
        no_limits = (f"--conntrack-{name}=0" for name in ("max-per-core", "tcp-timeout-established"))
        self._start("kube-proxy", "--proxy-mode=iptables", as_admin, "--hostname-override=node-0", *no_limits)
        corefile = self.folder / "Corefile"
        corefile.write_text(_COREFILE.format(address=ADDRESS, config=self.config), encoding="utf-8")
        self._start("coredns", "-conf", str(corefile))
        self.until(lambda: "True" in self._node_is_ready(), "the node is ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        delete = ("delete", "--all", "--all-namespaces")
        self.kubectl(*delete, "deployments,statefulsets", check=False)
        self.kubectl(*delete, "pods", "--grace-period=5", check=False)  # the kubelet ends them
        super().__exit__(kind, error, trace)
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()[::-1]:
            if (mount := line.split()[1]).startswith((f"{self.folder}/", "/run/roostream-node/")):
                subprocess.run(("umount", "--lazy", mount), check=False)
        for rule in _FORWARD:
            subprocess.run(("iptables", "-D", "FORWARD", *rule), check=False)
        subprocess.run((str(self.programs["kube-proxy"]), "--cleanup"), capture_output=True, check=False)
        subprocess.run(("ip", "link", "delete", BRIDGE), check=False)

    def import_image(self, image: str, name: str) -> None:
        """Copy an image of Docker to the node, where it gets this name."""
        with subprocess.Popen(("docker", "save", image), stdout=subprocess.PIPE) as saved:
            self._ctr("import", "-", stdin=saved)
        full = image if "/" in image else f"docker.io/library/{image}"
        self._ctr("tag", "--force", full, name)

    def start_kafka(self) -> None:
        """A broker behind TLS that needs client certificates of `authority`; without it on this machine's
        loopback, at LOCAL_KAFKA_PORT."""
        certificate, key = self.authority.issue("broker", KAFKA_HOST)
        (self.folder / "broker.pem").write_bytes(Path(key).read_bytes() + Path(certificate).read_bytes())
        settings = self.folder / "kafka.properties"
        settings.write_text(
            _KAFKA.format(
                address=ADDRESS,
                host=KAFKA_HOST,
                port=KAFKA_PORT,
                local_port=LOCAL_KAFKA_PORT,
                folder=self.folder,
            ),
            encoding="utf-8",
        )
        java = (str(find_java()), "-Xmx512m", "-cp", f"{KAFKA_JARS}/*")
        tool = ("kafka.tools.StorageTool", "format", "-t", "5L6g3nShT-eMCtK--X86sw", "-c", str(settings))
        subprocess.run((*java, *tool), check=True, capture_output=True)
        self.start("kafka", *java, "kafka.Kafka", str(settings))

    def _node_is_ready(self) -> str:
        path = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "nodes", "-o", path, check=False).stdout

    def _make_network(self) -> None:
        subprocess.run(("ip", "link", "add", BRIDGE, "type", "bridge"), check=True)
        subprocess.run(("ip", "address", "add", f"{ADDRESS}/24", "dev", BRIDGE), check=True)
        subprocess.run(("ip", "link", "set", BRIDGE, "up"), check=True)
        # Without it, a service that has no rules yet would be looked for in other networks.
        subprocess.run(("ip", "route", "add", SERVICE_NETWORK, "dev", BRIDGE), check=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="utf-8")
        for rule in _FORWARD:  # Docker drops what it does not know
            subprocess.run(("iptables", "-I", "FORWARD", *rule), check=True)

    def _start_containerd(self) -> None:
        cni, settings = self.folder / "cni", self.folder / "containerd.toml"
        cni.mkdir()
        (cni / "pods.conflist").write_text(json.dumps(_NETWORK), encoding="utf-8")
        text = _CONTAINERD.format(folder=self.folder, socket=_SOCKET, pause=_PAUSE)
        settings.write_text(text, encoding="utf-8")
        self.start("containerd", shutil.which("containerd") or "containerd", "--config", str(settings))
        self.until(lambda: Path(_SOCKET).exists(), "containerd answers")
        with contextlib.suppress(AssertionError):
            docker("image", "rm", _PAUSE)
        pause = 'FROM docker.io/library/python:3.11.13-slim-bookworm\nENTRYPOINT ["sleep", "infinity"]\n'
        context = self.folder / "pause"
        context.mkdir()
        (context / "Dockerfile").write_text(pause, encoding="utf-8")
        docker("build", "--tag", _PAUSE, str(context))
        self.import_image(_PAUSE, _PAUSE)

    def _ctr(self, *arguments: str, stdin: subprocess.Popen[bytes] | None = None) -> None:
        command = ("ctr", "--address", _SOCKET, "--namespace", "k8s.io", "images", *arguments)
        subprocess.run(command, stdin=stdin.stdout if stdin else None, check=True, capture_output=True)

"""A Kubernetes cluster on this machine whose pods really run: nodes of containerd, kubelet, kube-proxy and
kube-router beside the control plane of tests/k8s.

    images of Docker ─► containerd ◄─ kubelet ◄─ API server ◄─ kubectl
    pods of a node ◄─ kube-router (NetworkPolicies) ◄─ kube-proxy (services) ◄─ pods of all nodes

Each node has a network namespace and a network of pods. A bridge connects the nodes with this machine, on
which the control plane runs. CoreDNS, in a pod, resolves names. The cluster needs root, and of Debian the
packages containerd, containernetworking-plugins, ipset, iptables and iproute2. No other machine reaches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.certificates import Authority
from tests.containers.docker import docker
from tests.k8s.api_server import ApiServer
from tests.k8s.binaries import CONTROLLERS, PROGRAMS_OF_A_NODE, SCHEDULER, build

ADDRESS, API_PORT = "10.99.0.1", 6443
"""Of this machine, in the network of the nodes."""
NODES_NETWORK, POD_NETWORK, SERVICE_NETWORK = "10.99.0.0/24", "10.244.0.0/16", "10.96.0.0/16"
DNS_ADDRESS = "10.96.0.10"
_BRIDGE = "roostream-nodes"
_RUN, _CGROUPS = Path("/run/roostream-nodes"), Path("/sys/fs/cgroup")
_FROM = "FROM docker.io/library/python:3.11.13-slim-bookworm\n"
_PAUSE, _COREDNS = "docker.io/library/pause:local", "docker.io/library/coredns:local"
_FORWARD = tuple((side, net, "-j", "ACCEPT") for side in ("-s", "-d") for net in (NODES_NETWORK, POD_NETWORK))

_CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{socket.parent}"
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
_COREFILE = """.:53 {
  errors
  kubernetes cluster.local {
    kubeconfig /etc/coredns/kubeconfig test
  }
  cache 5
}
"""


class Node:
    """One node, in a network namespace and control groups of its own. Its folder has the settings and data of
    its programs."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.folder = f"node-{number}", folder
        self.address, self.pod_network = f"10.99.0.{number + 2}", f"10.244.{number}.0/24"
        self.network_namespace = self.cgroup = f"roostream-node-{number}"
        self.link = f"roostream-{number}"
        self.socket = _RUN / str(number) / "containerd.sock"

    def inside(self, *command: str) -> tuple[str, ...]:
        """The command, for a process in the network of the node. Policies let it reach the node's pods."""
        return ("nsenter", f"--net=/run/netns/{self.network_namespace}", *command)

    def make(self) -> None:
        """Make its folders, network and control groups."""
        (self.folder / "cni").mkdir(parents=True)
        (self.folder / "logs").mkdir()
        (self.folder / "cni" / "pods.conflist").write_text(json.dumps(self._pod_network()), encoding="utf-8")
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet()), encoding="utf-8")
        text = _CONTAINERD.format(folder=self.folder, socket=self.socket, pause=_PAUSE)
        (self.folder / "containerd.toml").write_text(text, encoding="utf-8")
        _ip("netns", "add", self.network_namespace)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.network_namespace)
        _ip("link", "set", self.link, "master", _BRIDGE, "up")
        inside = ("-n", self.network_namespace)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        # Without it, a service that has no rules yet would be looked for in other networks.
        _ip(*inside, "route", "add", SERVICE_NETWORK, "dev", "eth0")
        forward = self.inside("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        subprocess.run(forward, check=True)
        self._make_cgroups()

    def make_routes(self, others: list[Node]) -> None:
        for other in others:
            if other is not self:
                _ip("-n", self.network_namespace, "route", "add", other.pod_network, "via", other.address)

    def lose(self) -> None:
        """Cut the network, then kill every process. As with a machine that loses its power, nobody is told
        that a connection ends."""
        subprocess.run(("ip", "link", "set", self.link, "down"), check=False)
        of_node = (str(self.socket), str(self.folder))
        for process in psutil.process_iter(["cmdline"]):
            if any(word in part for part in process.info["cmdline"] or () for word in of_node):
                _kill(process.pid)
        for folder in self._cgroup_folders():
            for file in folder.rglob("cgroup.procs"):
                for pid in file.read_text(encoding="utf-8").split():
                    _kill(int(pid))

    def remove(self) -> None:
        subprocess.run(("ip", "link", "delete", self.link), check=False)
        subprocess.run(("ip", "netns", "delete", self.network_namespace), check=False)
        for folder in self._cgroup_folders():
            for inner in sorted(folder.rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    inner.rmdir()
            with contextlib.suppress(OSError):
                folder.rmdir()

    def import_image(self, image: str, name: str) -> None:
        with subprocess.Popen(("docker", "save", image), stdout=subprocess.PIPE) as saved:
            self._ctr("import", "-", stdin=saved)
        full = image if "/" in image else f"docker.io/library/{image}"
        self._ctr("tag", "--force", full, name)

    def _ctr(self, *arguments: str, stdin: subprocess.Popen[bytes] | None = None) -> None:
        command = ("ctr", "--address", str(self.socket), "--namespace", "k8s.io", "images", *arguments)
        subprocess.run(command, stdin=stdin.stdout if stdin else None, check=True, capture_output=True)

    def _pod_network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local",
            "dataDir": str(self.socket.parent / "addresses"),
            "ranges": [[{"subnet": self.pod_network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugin = {"type": "ptp", "ipMasq": False, "ipam": addresses}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}

    def _kubelet(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "podLogsDir": str(self.folder / "logs"),
            "failSwapOn": False,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
        }

    def _cgroup_folders(self) -> list[Path]:
        if (_CGROUPS / "cgroup.controllers").exists():
            return [_CGROUPS / self.cgroup]
        roots = (path.parent for path in _CGROUPS.glob("*/cgroup.procs"))
        return [root / self.cgroup for root in roots if root.name != "unified"]

    def _make_cgroups(self) -> None:
        if (_CGROUPS / "cgroup.controllers").exists():
            controllers = "+cpu +cpuset +memory +pids"
            (_CGROUPS / "cgroup.subtree_control").write_text(controllers, encoding="utf-8")
        for folder in self._cgroup_folders():
            folder.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # not inherited in version 1 of control groups
                if (folder.parent / name).exists():
                    (folder / name).write_bytes((folder.parent / name).read_bytes())


class KubernetesCluster(ApiServer):
    """A context manager; `folder` needs a file system on which containerd can use overlays."""

    poll_s = 2.0  # each look starts kubectl, beside the pods

    def __init__(self, folder: Path, nodes: int) -> None:
        super().__init__(folder, ADDRESS)
        self.port = API_PORT  # policies name it
        self.authority = Authority(folder, "authority")
        self.nodes = [Node(number, folder / f"node-{number}") for number in range(nodes)]
        self._namespaces_before = _pod_namespaces()

    def __enter__(self) -> Self:
        self._make_network()
        super().__enter__()
        self.programs |= build((CONTROLLERS, SCHEDULER, *PROGRAMS_OF_A_NODE))
        as_admin = f"--kubeconfig={self.config}"
        authority = f"--root-ca-file={self.folder / 'certificates' / 'apiserver.crt'}"
        account_key = f"--service-account-private-key-file={self.folder / 'accounts.key'}"
        self._start(CONTROLLERS, as_admin, "--leader-elect=false", "--secure-port=0", authority, account_key)
        self._start(SCHEDULER, as_admin, "--leader-elect=false", "--secure-port=0")
        self._build_images()
        for node in self.nodes:
            self._start_node(node)
        self.until(lambda: self.ready_nodes() == {node.name for node in self.nodes}, "all nodes are ready")
        only_policies = ("--run-router=false", "--run-service-proxy=false", "--run-firewall=true")
        services = f"--service-cluster-ip-range={SERVICE_NETWORK}"
        for node in self.nodes:  # it ends if the API server does not know the node
            name = f"--hostname-override={node.name}"
            self._start_on(node, "kube-router", as_admin, name, *only_policies, services)
        self._start_dns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.lose()
        super().__exit__(kind, error, trace)
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()[::-1]:
            if (mount := line.split()[1]).startswith((f"{self.folder}/", f"{_RUN}/")):
                subprocess.run(("umount", "--lazy", mount), check=False)
        for node in self.nodes:
            node.remove()
        for name in _pod_namespaces() - self._namespaces_before:  # of the pods
            subprocess.run(("ip", "netns", "delete", name), check=False)
        for rule in _FORWARD:
            subprocess.run(("iptables", "-D", "FORWARD", *rule), check=False)
        subprocess.run(("ip", "link", "delete", _BRIDGE), check=False)

    def ready_nodes(self) -> set[str]:
        path = "{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
        lines = self.kubectl("get", "nodes", "-o", f"jsonpath={path}", check=False).stdout.splitlines()
        return {name for name, _, ready in (line.partition(" ") for line in lines) if ready == "True"}

    def node_of(self, pod: dict[str, Any]) -> Node:
        return next(node for node in self.nodes if node.name == pod["spec"]["nodeName"])

    def import_image(self, image: str, name: str) -> None:
        """Copy an image of Docker to all nodes, where it gets this name."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.import_image(image, name), self.nodes))

    def _make_network(self) -> None:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{ADDRESS}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for rule in _FORWARD:  # Docker drops what it does not know
            subprocess.run(("iptables", "-I", "FORWARD", *rule), check=True)
        for node in self.nodes:
            node.make()
            _ip("route", "add", node.pod_network, "via", node.address)
        for node in self.nodes:
            node.make_routes(self.nodes)

    def _build_images(self) -> None:
        with contextlib.suppress(AssertionError):
            docker("image", "rm", _PAUSE)
        context = self.folder / "images"
        context.mkdir()
        pause, dns = f'{_FROM}ENTRYPOINT ["sleep", "infinity"]\n', f"{_FROM}COPY coredns /coredns\n"
        (context / "pause").write_text(pause, encoding="utf-8")
        (context / "dns").write_text(dns, encoding="utf-8")
        shutil.copy(self.programs["coredns"], context / "coredns")
        docker("build", "--tag", _PAUSE, "--file", str(context / "pause"), str(context))
        docker("build", "--tag", _COREDNS, "--file", str(context / "dns"), str(context))

    def _start_node(self, node: Node) -> None:
        as_admin, name = f"--kubeconfig={self.config}", f"--hostname-override={node.name}"
        self._start_on(node, "containerd", "--config", str(node.folder / "containerd.toml"))
        self.until(node.socket.exists, "containerd answers")
        for image in (_PAUSE, _COREDNS):
            node.import_image(image, image)
        folders = f"--config={node.folder / 'kubelet.json'}", f"--root-dir={node.folder / 'kubelet'}"
        self._start_on(node, "kubelet", as_admin, name, f"--node-ip={node.address}", *folders)
        no_limits = (f"--conntrack-{limit}=0" for limit in ("max-per-core", "tcp-timeout-established"))
        self._start_on(node, "kube-proxy", "--proxy-mode=iptables", as_admin, name, *no_limits)

    def _start_on(self, node: Node, program: str, *arguments: str) -> None:
        command = str(self.programs.get(program) or shutil.which(program) or program)
        self.start(f"{node.name}-{program}", *node.inside(command, *arguments))

    def _start_dns(self) -> None:
        system = ("-n", "kube-system")
        files = (f"--from-literal=Corefile={_COREFILE}", f"--from-file=kubeconfig={self.config}")
        self.kubectl("create", *system, "secret", "generic", "coredns", *files)
        container = {
            "name": "coredns",
            "image": _COREDNS,
            "command": ["/coredns", "-conf", "/etc/coredns/Corefile"],
            "volumeMounts": [{"name": "settings", "mountPath": "/etc/coredns"}],
        }
        volume = {"name": "settings", "secret": {"secretName": "coredns"}}
        metadata = {"name": "coredns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}}
        spec = {
            "containers": [container],
            "volumes": [volume],
            "dnsPolicy": "Default",
            "nodeName": self.nodes[0].name,
        }
        ports = [{"name": p, "port": 53, "protocol": p.upper()} for p in ("udp", "tcp")]
        selector = {"selector": metadata["labels"], "clusterIP": DNS_ADDRESS, "ports": ports}
        service = {"name": "kube-dns", "namespace": "kube-system"}
        applied = self.apply(
            (
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
                {"apiVersion": "v1", "kind": "Service", "metadata": service, "spec": selector},
            )
        )
        assert applied.returncode == 0, applied.stderr


def _pod_namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("cni-*")}


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

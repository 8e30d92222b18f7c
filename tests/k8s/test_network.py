"""The network policies allow the connections in docs/architecture.md and no others."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from infra.flink_cluster import Cluster, task_manager
from infra.home import Home
from infra.jars import find_java
from infra.options import StackOptions
from infra.ports import Ports
from tests.k8s.manifests import build, build_overlay, copy_prod, find_object, of_kind, workloads
from tests.k8s.network import Endpoint, allows, selects

ROWS, RENDEZVOUS, RANK, FLINK, METRICS, FLINK_METRICS, KAFKA, STORE, DNS = (
    7000,
    7100,
    8080,
    8081,
    9090,
    9249,
    9093,
    443,
    53,
)
WORK_UNITS = 7200
PORTS = (
    ROWS,
    RENDEZVOUS,
    WORK_UNITS,
    RANK,
    FLINK,
    METRICS,
    FLINK_METRICS,
    KAFKA,
    STORE,
    DNS,
    6121,
    6122,
    6123,
    6124,
    6125,
    6379,
    6380,
    6443,
    22,
)
PROGRAMS = (
    "shard",
    "controller",
    "worker",
    "serving",
    "features",
    "auditor",
    "archiver",
    "compactor",
    "reader",
    "joiner-watch",
    "joiner",
)
WITHOUT_KAFKA = {"compactor", "reader"}
SHOWN_ON_STATUS_PAGE = (
    "worker",
    "serving",
    "features",
    "auditor",
    "archiver",
    "compactor",
    "joiner-watch",
)  # the controller's status page reads their metrics
DNS_SERVERS = (
    "names",
    "coredns",
    "dns-cache",
)  # DNS servers of several distributions, and a node's DNS cache
OTHER_ENDPOINTS = (
    Endpoint("kafka", {"strimzi.io/cluster": "roostream", "strimzi.io/kind": "Kafka"}),
    Endpoint("stranger", {"app": "x"}),
    Endpoint("gateway", {"app": "gateway"}, "gateways", {"roostream.dev/clients": "true"}),
    Endpoint("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring"),
    Endpoint("flink-operator", {"app.kubernetes.io/name": "flink-kubernetes-operator"}, "operators"),
    Endpoint("foreigner", {"app.kubernetes.io/part-of": "roostream"}, "elsewhere"),
    Endpoint("names", {"k8s-app": "kube-dns"}, "kube-system", {"kubernetes.io/metadata.name": "kube-system"}),
    Endpoint("coredns", {"app": "coredns"}, "kube-system", {"kubernetes.io/metadata.name": "kube-system"}),
    Endpoint("dns-cache", None, address="169.254.20.10"),
    Endpoint("outside", None),
)
DOCUMENTED = {
    *(("gateway", "serving", RANK), ("worker", "shard", ROWS), ("serving", "shard", ROWS)),
    *(("shard", "controller", ROWS), ("worker", "controller", ROWS)),
    *(("reader", "controller", ROWS), ("worker", "reader", WORK_UNITS)),
    *(("controller", program_, METRICS) for program_ in SHOWN_ON_STATUS_PAGE),
    *(("worker", "worker", port) for port in PORTS),
    *(("joiner", "joiner", port) for port in (FLINK, 6121, 6122, 6123, 6124, 6125)),
    *(("joiner-watch", "joiner", FLINK), ("flink-operator", "joiner", FLINK), ("joiner", "outside", 6443)),
    *((program, "kafka", KAFKA) for program in PROGRAMS if program not in WITHOUT_KAFKA),
    *((program, names, DNS) for program in PROGRAMS for names in DNS_SERVERS),
    *((program, "outside", STORE) for program in PROGRAMS),
    *((program, "outside", 6380) for program in ("serving", "features")),
    *(("prometheus", program, port) for program in PROGRAMS for port in (METRICS, FLINK_METRICS)),
}


def endpoints(overlay: str) -> list[Endpoint]:
    pods = [
        Endpoint(w.labels["app.kubernetes.io/component"], w.labels)
        for w in workloads(build_overlay(overlay))
        if w.name != "roostream-redis"
    ]
    assert {p.name for p in pods} >= set(PROGRAMS)
    return [*pods, *OTHER_ENDPOINTS]


def test_only_documented_connections_are_allowed() -> None:
    policies = of_kind(build_overlay("prod"), "NetworkPolicy")
    found = {
        (a.name, b.name, port)
        for a, b in itertools.product(endpoints("prod"), repeat=2)
        for port in PORTS
        if (a.name in PROGRAMS or b.name in PROGRAMS) and allows(policies, a, b, port)
    }
    # A rule that gives only a port, for addresses outside, also allows that port of other pods.
    by_port_only = {
        (a, other.name, port) for a, b, port in DOCUMENTED if b == "outside" for other in OTHER_ENDPOINTS
    }
    assert DOCUMENTED - found == set()
    assert found - DOCUMENTED - by_port_only == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_task_manager_listens_only_on_ports_that_are_named_and_allowed(tmp_path: Path) -> None:
    """Flink picks free ports where its configuration names none, and a policy blocks those. The job would
    run, but the job manager would have no metrics of its tasks."""
    pods = {p.name: p for p in endpoints("prod")}
    flink = find_object(build_overlay("prod"), "FlinkDeployment", "roostream-joiner")["spec"][
        "flinkConfiguration"
    ]
    named_ports = {
        k: int(v) for k, v in flink.items() if re.match(r"(taskmanager|metrics\.internal)\..*port$", k)
    }
    policies = of_kind(build_overlay("prod"), "NetworkPolicy")
    assert all(allows(policies, pods["joiner"], pods["joiner"], port) for port in named_ports.values())
    ports, home = Ports(), Home(tmp_path / "home")
    home.make()
    local_ports = {key: ports.draw() for key in named_ports}
    options = StackOptions(flink={key: str(port) for key, port in local_ports.items()})
    cluster = Cluster(home, options, find_java(), ports.draw(), ports.draw())
    cluster.make()
    environment = {**os.environ, **cluster.environment()}
    (program,) = (
        p
        for p in cluster.programs(environment, [local_ports["taskmanager.rpc.port"]])
        if p.name == task_manager(0)
    )
    with program.log.open("wb") as log:
        process = subprocess.Popen(program.command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    try:
        end_s = time.monotonic() + 600
        # The task manager opens this port last.
        while local_ports["taskmanager.data.port"] not in (found := _listening(process.pid)):
            assert process.poll() is None and time.monotonic() < end_s, program.log.read_text()[-2000:]
            time.sleep(0.2)
        assert found == set(local_ports.values())
    finally:
        process.kill()
        process.wait()
        ports.release()


def _listening(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_all_programs_may_use_dns() -> None:
    policies = of_kind(build_overlay("prod"), "NetworkPolicy")
    for names in (p for p in OTHER_ENDPOINTS if p.name in DNS_SERVERS):
        assert all(allows(policies, p, names, DNS, "UDP") for p in endpoints("prod") if p.name in PROGRAMS)


@pytest.mark.parametrize(
    ("component", "address", "port"),
    [("eks", "169.254.170.23", 80), ("gke", "169.254.169.254", 80), ("gke", "169.254.169.252", 988)],
)
def test_a_component_opens_the_issuer_of_a_cloud_s_credentials(
    component: str, address: str, port: int, tmp_path: Path
) -> None:
    copy_prod(tmp_path)
    kustomization = tmp_path / "kustomization.yaml"
    text = kustomization.read_text(encoding="utf-8")
    added = re.sub(
        r"(  - (\S+)/components/values\n)", rf"  - \2/components/pod-identity-{component}\n\1", text
    )
    kustomization.write_text(added, encoding="utf-8")
    issuer = Endpoint("issuer", None, address=address)
    shard = next(p for p in endpoints("prod") if p.name == "shard")
    assert not allows(of_kind(build_overlay("prod"), "NetworkPolicy"), shard, issuer, port)
    assert allows(of_kind(build(tmp_path), "NetworkPolicy"), shard, issuer, port)


@pytest.mark.parametrize("overlay", ["dev", "prod"])
def test_kafka_admits_exactly_its_clients(overlay: str) -> None:
    """Strimzi creates the policy on the brokers' side from its listener."""
    listener = find_object(build_overlay(overlay), "Kafka", "roostream")["spec"]["kafka"]["listeners"][0]
    assert listener["tls"] and listener["authentication"] == {"type": "tls"} and listener["port"] == KAFKA
    peer = listener["networkPolicyPeers"][0]["podSelector"]
    assert {w.name for w in workloads(build_overlay(overlay)) if selects(peer, w.labels)} == {
        w.name
        for w in workloads(build_overlay(overlay))
        if w.labels.get("app.kubernetes.io/component") in set(PROGRAMS) - WITHOUT_KAFKA
    }


def test_the_dev_overlay_has_no_egress() -> None:
    policies = of_kind(build_overlay("dev"), "NetworkPolicy")
    by_name = {p.name: p for p in [*endpoints("dev"), Endpoint("redis", {"app.kubernetes.io/name": "redis"})]}
    assert [
        n for n in PROGRAMS if n != "joiner" and allows(policies, by_name[n], by_name["outside"], STORE)
    ] == []
    assert [
        n for n in by_name if allows(policies, by_name["simulate"], by_name[n], RANK) and n in PROGRAMS
    ] == ["serving"]
    assert [n for n in PROGRAMS if allows(policies, by_name[n], by_name["redis"], 6379)] == [
        "serving",
        "features",
    ]

"""A real API server accepts every overlay. Real controllers and a real scheduler create its pods and evict
one shard at a time. Nodes are simulated, and no container runs."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.source_tree import ROOT
from tests.k8s.api_server import ApiServer
from tests.k8s.binaries import PROGRAMS, find, go_command
from tests.k8s.generate import K8S
from tests.k8s.manifests import (
    OVERLAYS,
    build,
    build_custom_overlay,
    build_overlay,
    find_object,
    of_kind,
    workloads,
)
from tests.k8s.network import selects
from tests.k8s.simulated_nodes import SimulatedNodes
from tests.k8s.test_cluster_pages import commands, runs_on_a_server, words

pytestmark = pytest.mark.timeout(3600)
Objects = tuple[dict[str, Any], ...]
# The server also warns about the default, so this warning is ignored.
_IGNORED_WARNING = "spec.SessionAffinity is ignored for headless services"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH")
    missing = [program for program in PROGRAMS if find(program) is None]
    if missing and go_command() is None:
        pytest.skip("Go is absent and no API server was built before: only test_schemas.py checks schemas")
    if missing and not os.environ.get("BUILD_KUBERNETES"):
        pytest.skip(f"{', '.join(missing)} is not built yet: make k8s builds it once, in minutes")
    with ApiServer(tmp_path_factory.mktemp("server")) as running:
        running.install_definitions()
        yield running


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[SimulatedNodes]:
    """Simulated nodes for the last tests: from here on, applied objects get pods."""
    server.start_controllers()
    with SimulatedNodes(server, 3) as running:
        yield running
        assert running.failures == []


def objects_of(overlay: str, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """The objects of an overlay in a namespace of their own, so that overlays do not collide."""
    found = (
        build_custom_overlay(tmp_path_factory.mktemp("own")) if overlay == "all" else build_overlay(overlay)
    )
    return in_namespace(found, f"{overlay}-stack")


def in_namespace(objects: Objects, namespace: str) -> Objects:
    objects_ = copy.deepcopy(objects)
    for o in objects_:
        if o["kind"] == "Namespace":
            o["metadata"]["name"] = namespace
        else:
            o["metadata"]["namespace"] = namespace
        for subject in o.get("subjects", ()):
            subject["namespace"] = namespace
    return objects_


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_server_accepts_overlays_without_warnings(
    overlay: str, server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unknown fields are errors, and a pod that violates the namespace's security level is a warning. A dry
    run keeps no object, so no controller creates pods."""
    objects = objects_of(overlay, tmp_path_factory)
    assert server.apply(tuple(of_kind(objects, "Namespace"))).returncode == 0
    completed = server.apply(objects, "--dry-run=server")
    assert completed.returncode == 0, completed.stderr
    warnings = [
        line
        for line in completed.stderr.splitlines()
        if line.startswith("Warning") and _IGNORED_WARNING not in line
    ]
    assert warnings == []
    assert len(completed.stdout.splitlines()) == len(objects)


@pytest.mark.parametrize("overlay", ["dev", "prod"])
def test_a_running_deployment_accepts_changes_of_values_that_may_change(
    overlay: str, server: ApiServer, tmp_path: Path
) -> None:
    """Changes the images and every size that values.yaml lists as changeable."""
    namespace = f"{overlay}-changed"
    before = in_namespace(build_overlay(overlay), namespace)
    assert server.apply(tuple(of_kind(before, "Namespace"))).returncode == 0
    completed = server.apply(before)
    assert completed.returncode == 0, completed.stderr
    completed = server.apply(in_namespace(_changed(overlay, tmp_path), namespace), "--dry-run=server")
    server.kubectl("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(before), check=False)
    assert completed.returncode == 0, completed.stderr


def _changed(overlay: str, folder: Path) -> Objects:
    shutil.copytree(K8S, folder / "infra/k8s")
    shutil.copytree(ROOT / "infra/dashboards", folder / "infra/dashboards")
    file = folder / "infra/k8s/overlays" / overlay / "values.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    prod = (K8S / "overlays/prod/values.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"# Can change at any time.*?\n\n", prod, re.DOTALL)
    names = re.findall(r"^  (\w+):", listed, re.MULTILINE)
    assert len(names) >= 10
    for name in names:
        if name in values["data"]:
            values["data"][name] = re.sub(r"\d+", lambda m: str(2 * int(m[0])), values["data"][name])
    for name in ("IMAGE", "DATA_IMAGE", "FLINK_IMAGE"):
        values["data"][name] = values["data"][name].replace(":0.1.0", ":0.2.0")
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return build(file.parent)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("StatefulSet", "roostream-shard", {"replica": 2}, "field not declared in schema"),
        ("FlinkDeployment", "roostream-joiner", {"jobb": {}}, "field not declared in schema"),
        ("FlinkDeployment", "roostream-joiner", {"flinkVersion": "v2_3"}, "Unsupported value"),
        ("KafkaTopic", "samples", {"partitions": "many"}, "expected numeric"),
    ],
)
def test_the_api_server_rejects_wrong_fields(
    kind: str, name: str, change: dict[str, Any], message: str, server: ApiServer
) -> None:
    server.kubectl("create", "namespace", "refused", check=False)
    broken = copy.deepcopy(find_object(in_namespace(build_overlay("prod"), "refused"), kind, name))
    broken["spec"] |= change
    completed = server.apply((broken,), "--dry-run=server")
    assert (
        completed.returncode != 0 and message in completed.stderr and next(iter(change)) in completed.stderr
    ), completed.stderr


@pytest.mark.slow
def test_policies_and_budgets_select_the_created_pods(server: ApiServer, nodes: SimulatedNodes) -> None:
    namespace = "live"
    objects = in_namespace(build_overlay("prod"), namespace)
    assert server.apply(objects).returncode == 0
    expected_replicas = {
        o["metadata"]["name"]: o["spec"].get("replicas", 1)
        for o in of_kind(objects, "StatefulSet", "Deployment")
    }

    def are_assigned() -> bool:
        pods = server.get("pods", "-n", namespace)
        return len(pods) == sum(expected_replicas.values()) and all(p["spec"].get("nodeName") for p in pods)

    server.until(are_assigned, f"{sum(expected_replicas.values())} pods are made and placed")
    pods = {p["metadata"]["name"]: p for p in server.get("pods", "-n", namespace)}
    shards = [f"roostream-shard-{i}" for i in range(expected_replicas["roostream-shard"])]
    assert [pods[s]["metadata"]["labels"]["apps.kubernetes.io/pod-index"] for s in shards] == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert len({pods[s]["spec"]["nodeName"] for s in shards}) == 3, "shards must be spread over the nodes"
    claims = {
        c["metadata"]["name"]: c["status"]["phase"]
        for c in server.get("persistentvolumeclaims", "-n", namespace)
    }
    assert {f"home-{s}": "Bound" for s in shards}.items() <= claims.items()
    _check_selectors(server, namespace, objects)
    _check_evictions(server, namespace, shards)
    server.kubectl("delete", "namespace", namespace, "--timeout=900s")


def _check_selectors(server: ApiServer, namespace: str, objects: Objects) -> None:
    """The server's selection of pods for each policy and budget equals that of test_network.py."""
    set_workloads = [w for w in workloads(objects) if w.kind in ("StatefulSet", "Deployment")]
    for o in of_kind(objects, "NetworkPolicy", "PodDisruptionBudget"):
        selector = o["spec"].get("podSelector") or o["spec"]["selector"]
        found = server.get("pods", "-n", namespace, "-l", _as_text(selector))
        components = {p["metadata"]["labels"]["app.kubernetes.io/component"] for p in found}
        expected = {
            w.labels["app.kubernetes.io/component"] for w in set_workloads if selects(selector, w.labels)
        }
        assert components == expected, o["metadata"]["name"]
        assert expected or o["metadata"]["name"] == "roostream-joiner", (
            "only Flink's pods are missing, because its operator creates them"
        )


def _as_text(selector: dict[str, Any]) -> str:
    parts = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    parts += [f"{e['key']} in ({','.join(e['values'])})" for e in selector.get("matchExpressions", ())]
    return ",".join(parts)


def _check_evictions(server: ApiServer, namespace: str, shards: list[str]) -> None:
    def budget() -> dict[str, Any]:
        return next(
            b for b in server.get("pdb", "-n", namespace) if b["metadata"]["name"] == "roostream-shard"
        )["status"]

    server.until(lambda: budget()["disruptionsAllowed"] == 1, "the budget allows one eviction")
    assert budget()["expectedPods"] == len(shards) == budget()["currentHealthy"]

    def evict(pod: str) -> str:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        url = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        return server.kubectl(
            "create", "--raw", url, "-f", "-", stdin=json.dumps(eviction), check=False
        ).stderr

    answers = [evict(pod) for pod in shards[:2]]
    assert answers[0] == "" and "violate the pod's disruption budget" in answers[1], answers


@pytest.mark.slow
def test_kubectl_commands_of_the_pages_work(server: ApiServer, nodes: SimulatedNodes, tmp_path: Path) -> None:
    """Run all kubectl commands of the pages in order, except those that need a running container."""
    shutil.copytree(ROOT / "infra", tmp_path / "infra")
    for name in ("serving", "features"):
        (tmp_path / f"redis-{name}.txt").write_text("s3cret\n", encoding="utf-8")
    (tmp_path / "keys.json").write_text("{}", encoding="utf-8")
    server.kubectl("create", "namespace", "gateways")
    executed: list[str] = []
    for command in commands():
        if not runs_on_a_server(command):
            continue
        if command == "kubectl create namespace roostream" and command in executed:
            server.kubectl(
                "delete", "namespace", "roostream", "--timeout=900s"
            )  # the page's alternative, which begins with an empty cluster
        if command.startswith("kubectl rollout undo"):
            _roll_out_new_image(server, nodes, tmp_path)
        completed = server.kubectl(*words(command)[1:], check=False, cwd=tmp_path)
        # `kubectl diff` exits with 1 if there are differences
        has_differences = words(command)[1] == "diff" and completed.returncode == 1
        assert completed.returncode == 0 or has_differences, f"{command}: {completed.stderr}"
        executed.append(command)
    assert len(executed) >= 25
    shards = server.get("pods", "-n", "roostream", "-l", "app.kubernetes.io/component=shard")
    server.until(lambda: len(_pods_on(server, "node-1")) == 0, "the drained node has no pod of the namespace")
    assert len(shards) == 4
    samples = find_object(tuple(server.get("kafkatopics", "-n", "roostream")), "KafkaTopic", "samples")
    assert samples["spec"]["config"]["retention.ms"] == 604_800_000


def _pods_on(server: ApiServer, node: str) -> list[dict[str, Any]]:
    pods = server.get("pods", "-n", "roostream", f"--field-selector=spec.nodeName={node}")
    return [p for p in pods if "deletionTimestamp" not in p["metadata"]]


def _roll_out_new_image(server: ApiServer, nodes: SimulatedNodes, folder: Path) -> None:
    """The roll-out that the page describes: change the tag in `values.yaml` and apply. At most one shard is
    unavailable at any time."""
    values = folder / "infra/k8s/overlays/prod/values.yaml"
    values.write_text(
        re.sub(r"(roostream(?:-\w+)?):0\.1\.0", r"\1:0.2.0", values.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    nodes.reset_min_ready()
    server.kubectl("apply", "--server-side", "--force-conflicts", "-k", "infra/k8s/overlays/prod", cwd=folder)
    for program in ("statefulset/roostream-shard", "deployment/roostream-serving"):
        server.kubectl("rollout", "status", "-n", "roostream", program, "--timeout=900s")
    assert nodes.min_ready["roostream", "shard"] == 3 and nodes.min_ready["roostream", "serving"] >= 1
    pods = server.get("pods", "-n", "roostream", "-l", "app.kubernetes.io/component=shard")
    assert {p["spec"]["containers"][0]["image"] for p in pods} == {
        "registry.example.org/roostream-data:0.2.0"
    }

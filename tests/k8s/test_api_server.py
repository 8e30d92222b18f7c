"""A real API server takes every overlay as it is; real controllers and a real scheduler make the pods of it,
and let one shard go at a time. Nodes are only said to be there, and no container runs."""

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

from tests.contract.house import ROOT
from tests.k8s.api_server import ApiServer
from tests.k8s.binaries import PROGRAMS, find, go
from tests.k8s.generate import K8S
from tests.k8s.manifests import OVERLAYS, build, built, named, of_kind, own_folder, workloads
from tests.k8s.network import selects
from tests.k8s.simulated_nodes import SimulatedNodes
from tests.k8s.test_cluster_pages import commands, runs_on_a_server, words

pytestmark = pytest.mark.timeout(3600)
Objects = tuple[dict[str, Any], ...]
# Also where none is said: it is a default
_OF_EVERY_HEADLESS = "spec.SessionAffinity is ignored for headless services"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH")
    missing = [program for program in PROGRAMS if find(program) is None]
    if missing and go() is None:
        pytest.skip("Go is absent and no API server was built before: only test_schemas.py checks schemas")
    if missing and not os.environ.get("BUILD_KUBERNETES"):
        pytest.skip(f"{', '.join(missing)} is not built yet: make k8s builds it once, in minutes")
    with ApiServer(tmp_path_factory.mktemp("server")) as running:
        running.install_definitions()
        yield running


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[SimulatedNodes]:
    """The last tests' own: from here on, what is applied makes pods."""
    server.start_loops()
    with SimulatedNodes(server, 3) as running:
        yield running
        assert running.failures == []


def objects_of(overlay: str, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """In a namespace of the overlay's own, so that they can be there side by side."""
    found = own_folder(tmp_path_factory.mktemp("own")) if overlay == "all" else built(overlay)
    return moved(found, f"{overlay}-stack")


def moved(objects: Objects, namespace: str) -> Objects:
    made = copy.deepcopy(objects)
    for o in made:
        if o["kind"] == "Namespace":
            o["metadata"]["name"] = namespace
        else:
            o["metadata"]["namespace"] = namespace
        for subject in o.get("subjects", ()):
            subject["namespace"] = namespace
    return made


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_server_accepts_overlays_without_warnings(
    overlay: str, server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unknown fields are errors; a pod that the namespace's security level would refuse is a warning. Nothing
    of it is kept: no controller has pods to make."""
    objects = objects_of(overlay, tmp_path_factory)
    assert server.apply(tuple(of_kind(objects, "Namespace"))).returncode == 0
    done = server.apply(objects, "--dry-run=server")
    assert done.returncode == 0, done.stderr
    warnings = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("Warning") and _OF_EVERY_HEADLESS not in line
    ]
    assert warnings == []
    assert len(done.stdout.splitlines()) == len(objects)


@pytest.mark.parametrize("overlay", ["dev", "prod"])
def test_what_may_change_at_any_time_is_accepted_by_a_running_deployment(
    overlay: str, server: ApiServer, tmp_path: Path
) -> None:
    """New images, and every size that values.yaml lists as one that can change."""
    namespace = f"{overlay}-changed"
    before = moved(built(overlay), namespace)
    assert server.apply(tuple(of_kind(before, "Namespace"))).returncode == 0
    done = server.apply(before)
    assert done.returncode == 0, done.stderr
    done = server.apply(moved(_changed(overlay, tmp_path), namespace), "--dry-run=server")
    server.kubectl("delete", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(before), check=False)
    assert done.returncode == 0, done.stderr


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
    ("kind", "name", "change", "told"),
    [
        ("StatefulSet", "roostream-shard", {"replica": 2}, "field not declared in schema"),
        ("FlinkDeployment", "roostream-joiner", {"jobb": {}}, "field not declared in schema"),
        ("FlinkDeployment", "roostream-joiner", {"flinkVersion": "v2_3"}, "Unsupported value"),
        ("KafkaTopic", "samples", {"partitions": "many"}, "expected numeric"),
    ],
)
def test_the_api_server_rejects_wrong_fields(
    kind: str, name: str, change: dict[str, Any], told: str, server: ApiServer
) -> None:
    server.kubectl("create", "namespace", "refused", check=False)
    broken = copy.deepcopy(named(moved(built("prod"), "refused"), kind, name))
    broken["spec"] |= change
    done = server.apply((broken,), "--dry-run=server")
    assert done.returncode != 0 and told in done.stderr and next(iter(change)) in done.stderr, done.stderr


@pytest.mark.slow
def test_policies_and_budgets_select_the_created_pods(server: ApiServer, nodes: SimulatedNodes) -> None:
    namespace = "live"
    objects = moved(built("prod"), namespace)
    assert server.apply(objects).returncode == 0
    wanted = {
        o["metadata"]["name"]: o["spec"].get("replicas", 1)
        for o in of_kind(objects, "StatefulSet", "Deployment")
    }

    def placed() -> bool:
        pods = server.get("pods", "-n", namespace)
        return len(pods) == sum(wanted.values()) and all(p["spec"].get("nodeName") for p in pods)

    server.until(placed, f"{sum(wanted.values())} pods are made and placed")
    pods = {p["metadata"]["name"]: p for p in server.get("pods", "-n", namespace)}
    shards = [f"roostream-shard-{i}" for i in range(wanted["roostream-shard"])]
    assert [pods[s]["metadata"]["labels"]["apps.kubernetes.io/pod-index"] for s in shards] == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert len({pods[s]["spec"]["nodeName"] for s in shards}) == 3, "side by side where there are nodes"
    claims = {
        c["metadata"]["name"]: c["status"]["phase"]
        for c in server.get("persistentvolumeclaims", "-n", namespace)
    }
    assert {f"home-{s}": "Bound" for s in shards}.items() <= claims.items()
    _policies_select(server, namespace, objects)
    _one_at_a_time(server, namespace, shards)
    server.kubectl("delete", "namespace", namespace, "--timeout=900s")


def _policies_select(server: ApiServer, namespace: str, objects: Objects) -> None:
    """The server's own idea of each policy's and budget's pods, beside what test_network.py computes with."""
    made = [w for w in workloads(objects) if w.kind in ("StatefulSet", "Deployment")]
    for o in of_kind(objects, "NetworkPolicy", "PodDisruptionBudget"):
        selector = o["spec"].get("podSelector") or o["spec"]["selector"]
        found = server.get("pods", "-n", namespace, "-l", _as_text(selector))
        components = {p["metadata"]["labels"]["app.kubernetes.io/component"] for p in found}
        expected = {w.labels["app.kubernetes.io/component"] for w in made if selects(selector, w.labels)}
        assert components == expected, o["metadata"]["name"]
        assert expected or o["metadata"]["name"] == "roostream-joiner", (
            "Flink's own pods are made by its operator"
        )


def _as_text(selector: dict[str, Any]) -> str:
    parts = [f"{key}={value}" for key, value in selector.get("matchLabels", {}).items()]
    parts += [f"{e['key']} in ({','.join(e['values'])})" for e in selector.get("matchExpressions", ())]
    return ",".join(parts)


def _one_at_a_time(server: ApiServer, namespace: str, shards: list[str]) -> None:
    def budget() -> dict[str, Any]:
        return next(
            b for b in server.get("pdb", "-n", namespace) if b["metadata"]["name"] == "roostream-shard"
        )["status"]

    server.until(lambda: budget()["disruptionsAllowed"] == 1, "the budget lets one go")
    assert budget()["expectedPods"] == len(shards) == budget()["currentHealthy"]

    def evict(pod: str) -> str:
        asked = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        place = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        return server.kubectl(
            "create", "--raw", place, "-f", "-", stdin=json.dumps(asked), check=False
        ).stderr

    answers = [evict(pod) for pod in shards[:2]]
    assert answers[0] == "" and "violate the pod's disruption budget" in answers[1], answers


@pytest.mark.slow
def test_kubectl_commands_of_the_pages_work(server: ApiServer, nodes: SimulatedNodes, tmp_path: Path) -> None:
    """All of `kubectl`'s, in the pages' order, but for what runs inside of a container."""
    shutil.copytree(ROOT / "infra", tmp_path / "infra")
    for name in ("serving", "features"):
        (tmp_path / f"redis-{name}.txt").write_text("s3cret\n", encoding="utf-8")
    (tmp_path / "keys.json").write_text("{}", encoding="utf-8")
    server.kubectl("create", "namespace", "gateways")
    ran: list[str] = []
    for command in commands():
        if not runs_on_a_server(command):
            continue
        if command == "kubectl create namespace roostream" and command in ran:
            server.kubectl(
                "delete", "namespace", "roostream", "--timeout=900s"
            )  # the page's second way: an empty cluster again
        if command.startswith("kubectl rollout undo"):
            _another_image(server, nodes, tmp_path)
        done = server.kubectl(*words(command)[1:], check=False, cwd=tmp_path)
        differs = words(command)[1] == "diff" and done.returncode == 1  # there is something to tell
        assert done.returncode == 0 or differs, f"{command}: {done.stderr}"
        ran.append(command)
    assert len(ran) >= 25
    shards = server.get("pods", "-n", "roostream", "-l", "app.kubernetes.io/component=shard")
    server.until(lambda: len(_on(server, "node-1")) == 0, "the drained node has no pod of ours")
    assert len(shards) == 4
    samples = named(tuple(server.get("kafkatopics", "-n", "roostream")), "KafkaTopic", "samples")
    assert samples["spec"]["config"]["retention.ms"] == 604_800_000


def _on(server: ApiServer, node: str) -> list[dict[str, Any]]:
    pods = server.get("pods", "-n", "roostream", f"--field-selector=spec.nodeName={node}")
    return [p for p in pods if "deletionTimestamp" not in p["metadata"]]


def _another_image(server: ApiServer, nodes: SimulatedNodes, folder: Path) -> None:
    """The roll-out that the page has before: a new tag in `values.yaml`, and applied. Never are two shards
    away."""
    values = folder / "infra/k8s/overlays/prod/values.yaml"
    values.write_text(
        re.sub(r"(roostream(?:-\w+)?):0\.1\.0", r"\1:0.2.0", values.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    nodes.watch_anew()
    server.kubectl("apply", "--server-side", "--force-conflicts", "-k", "infra/k8s/overlays/prod", cwd=folder)
    for program in ("statefulset/roostream-shard", "deployment/roostream-serving"):
        server.kubectl("rollout", "status", "-n", "roostream", program, "--timeout=900s")
    assert nodes.min_ready["roostream", "shard"] == 3 and nodes.min_ready["roostream", "serving"] >= 1
    pods = server.get("pods", "-n", "roostream", "-l", "app.kubernetes.io/component=shard")
    assert {p["spec"]["containers"][0]["image"] for p in pods} == {
        "registry.example.org/roostream-data:0.2.0"
    }

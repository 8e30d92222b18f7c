"""Every pod follows the rules of policy.py, and every object that another one refers to exists."""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.program_specs import PROGRAM_SPECS
from tests.contract.source_tree import ROOT
from tests.k8s import policy
from tests.k8s.manifests import (
    OVERLAYS,
    Workload,
    build_custom_overlay,
    build_overlay,
    find_object,
    kafka_pods,
    of_kind,
    workloads,
)
from tests.k8s.policy import RULES, Rule

Objects = tuple[dict[str, Any], ...]
CREATED_BY_STRIMZI = {"roostream-cluster-ca-cert"}
CREATED_BY_USERS = {"roostream-redis", "roostream-keys", "roostream-link"}  # docs/operations/deploy.md


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return (
        build_custom_overlay(tmp_path_factory.mktemp("own"))
        if request.param == "all"
        else build_overlay(request.param)
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_pod_obeys_the_rules(rule: Rule, objects: Objects) -> None:
    assert {w.name: violations for w in workloads(objects) if (violations := list(rule(w)))} == {}


@pytest.mark.parametrize("rule", [policy.restricted, policy.with_limits], ids=lambda rule: rule.__name__)
def test_strimzis_pods_are_admitted_and_have_limits(rule: Rule, objects: Objects) -> None:
    pods = list(kafka_pods(objects))
    assert {"broker", "entity-operator"} <= {w.name for w in pods}
    assert {w.name: violations for w in pods if (violations := list(rule(w)))} == {}


def shard(**changes: Any) -> Workload:
    """The shard's workload with changes to its pod."""
    return changed("roostream-shard", **changes)


def changed(name: str, **changes: Any) -> Workload:
    found = next(w for w in workloads(build_overlay("prod")) if w.name == name)
    return dataclasses.replace(found, pod={**copy.deepcopy(found.pod), **changes})


def with_container(**changes: Any) -> Workload:
    first = shard().pod["containers"][0]
    return shard(containers=[{**first, **changes}])


@pytest.mark.parametrize(
    ("rule", "make_violation"),
    [
        (policy.restricted, lambda: with_container(securityContext={})),
        (policy.restricted, lambda: shard(volumes=[{"name": "x", "nfs": {}}])),
        (policy.unprivileged, lambda: shard(securityContext={"runAsUser": 0})),
        (policy.unprivileged, lambda: shard(hostNetwork=True)),
        (policy.without_capabilities, lambda: with_container(securityContext={"privileged": True})),
        (policy.with_limits, lambda: with_container(resources={"requests": {"cpu": "1"}})),
        (policy.with_limits, lambda: shard(volumes=[{"name": "x", "hostPath": {"path": "/"}}])),
        (policy.with_limits, lambda: shard(volumes=[{"name": "x", "emptyDir": {}}])),
        (policy.pinned, lambda: with_container(image="roostream:latest")),
        (policy.pinned, lambda: with_container(image="roostream")),
        (
            policy.probed,
            lambda: (
                with_container(startupProbe=1, livenessProbe=1)
                and _without(with_container(), "readinessProbe")
            ),
        ),
        (
            policy.liveness_ignores_peers,
            lambda: with_container(startupProbe={"httpGet": {"path": "/readyz", "port": "metrics"}}),
        ),
        (policy.termination_message_from_logs, lambda: with_container(terminationMessagePolicy="File")),
        (policy.without_api_token, lambda: shard(automountServiceAccountToken=True)),
        (policy.leaves_a_lost_node, lambda: shard(tolerations=[])),
        (policy.with_grace_period, lambda: shard(terminationGracePeriodSeconds=30)),
        (policy.with_grace_period, lambda: changed("roostream-serving", terminationGracePeriodSeconds=580)),
    ],
)
def test_each_rule_finds_a_violation(rule: Rule, make_violation: Callable[[], Workload]) -> None:
    assert list(rule(make_violation()))


def test_a_serving_pod_has_minutes_to_stop_but_no_more_than_node_autoscalers_allow(
    objects: Objects,
) -> None:
    """Node autoscalers kill a pod 10 minutes after SIGTERM, whatever its grace period is (decision 0121)."""
    (serving,) = (w for w in workloads(objects) if w.name == "roostream-serving")
    settings = tomllib.loads(find_object(objects, "ConfigMap", "roostream-serving")["data"]["serving.toml"])
    assert settings["stop_ms"] >= 300_000 and serving.pod["terminationGracePeriodSeconds"] <= 600


def _without(workload: Workload, key: str) -> Workload:
    first = {name: value for name, value in workload.pod["containers"][0].items() if name != key}
    return dataclasses.replace(workload, pod={**workload.pod, "containers": [first]})


def references(workload: Workload) -> Iterator[tuple[str, str]]:
    """(kind, name) of every ConfigMap, Secret, claim and account that a pod needs."""
    for volume in workload.pod.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume and not volume["secret"].get("optional"):
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in workload.containers:
        sources = [*container.get("envFrom", ()), *(v.get("valueFrom", {}) for v in container.get("env", ()))]
        for source in sources:
            for key, kind in (
                ("configMapRef", "ConfigMap"),
                ("configMapKeyRef", "ConfigMap"),
                ("secretRef", "Secret"),
            ):
                if key in source and not source[key].get("optional"):
                    yield kind, source[key]["name"]
    account = workload.spec.get("serviceAccount") or workload.pod.get("serviceAccountName")
    if account:
        yield "ServiceAccount", account


def test_referenced_objects_exist(objects: Objects) -> None:
    existing = {(o["kind"], o["metadata"]["name"]) for o in objects}
    existing |= {("Secret", name) for name in CREATED_BY_STRIMZI | CREATED_BY_USERS}
    existing |= {("Secret", o["metadata"]["name"]) for o in of_kind(objects, "KafkaUser")}
    existing |= {("Secret", o["spec"]["secretName"]) for o in of_kind(objects, "Certificate")}
    assert {(w.name, *r) for w in workloads(objects) for r in references(w) if r not in existing} == set()


def test_mounts_and_volumes_match(objects: Objects) -> None:
    for w in workloads(objects):
        volumes = {v["name"] for v in w.pod.get("volumes", ())}
        volumes |= {c["metadata"]["name"] for c in w.spec.get("volumeClaimTemplates", ())}
        mounted = {m["name"] for c in w.containers for m in c.get("volumeMounts", ())}
        assert mounted <= volumes, w.name
        assert {v["name"] for v in w.pod.get("volumes", ())} <= mounted, f"{w.name}: a volume without a mount"


def selected(objects: Objects, labels: dict[str, str]) -> list[Workload]:
    return [w for w in workloads(objects) if labels.items() <= w.labels.items()]


def test_services_select_ports_of_pods(objects: Objects) -> None:
    for service in of_kind(objects, "Service"):
        pods = selected(objects, service["spec"]["selector"])
        assert len(pods) == 1, service["metadata"]["name"]
        ports = {p["containerPort"]: p["name"] for p in pods[0].pod["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["port"]] == port["name"], service["metadata"]["name"]


def test_disruption_budgets_allow_one_pod(objects: Objects) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    budgeted = [selected(objects, b["spec"]["selector"]["matchLabels"])[0].name for b in budgets]
    assert sorted(budgeted) == ["roostream-serving", "roostream-shard", "roostream-worker"]
    assert all(b["spec"]["maxUnavailable"] == 1 for b in budgets)
    # Otherwise the drain of a node waits forever for two serving pods that cannot become ready. Shards and
    # workers are not ready during each restore, and still leave one at a time.
    (without_readiness,) = (
        b["metadata"]["name"] for b in budgets if "unhealthyPodEvictionPolicy" in b["spec"]
    )
    assert without_readiness == "roostream-serving"


def test_autoscaled_workloads_set_no_replicas(objects: Objects) -> None:
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in find_object(objects, target["kind"], target["name"])["spec"]
        assert scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"], target["name"]


def test_where_workers_are_autoscaled_the_controller_follows_them(objects: Objects) -> None:
    scaled = {s["metadata"]["name"] for s in of_kind(objects, "HorizontalPodAutoscaler")}
    controller = find_object(objects, "Deployment", "roostream-controller")["spec"]["template"]["spec"]
    follows = {e["name"]: e.get("value") for e in controller["containers"][0]["env"]}.get(
        "ROOSTREAM_CONTROLLER_FOLLOW_WORKERS"
    )
    assert ("roostream-worker" in scaled) == (follows == "true")


def test_external_metrics_are_metrics_that_programs_have(objects: Objects) -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trainer").rglob("*.py"))
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        for metric in (m["external"]["metric"]["name"] for m in scaler["spec"]["metrics"] if "external" in m):
            assert f'"{metric}"' in code, metric


def test_every_program_has_a_workload(objects: Objects, request: pytest.FixtureRequest) -> None:
    """Simulated users exist in the overlay for one node only."""
    started = {c["args"][0] for w in workloads(objects) for c in w.pod["containers"] if "args" in c}
    optional = {"simulate"}
    assert (
        {spec.name for spec in PROGRAM_SPECS} - optional <= started <= {spec.name for spec in PROGRAM_SPECS}
    )
    expected_optional = {"simulate"} if request.node.callspec.params["objects"] == "dev" else set()
    assert started & optional == expected_optional


def test_the_controller_s_pod_creates_the_checkpoint_store_first(objects: Objects) -> None:
    """The init container uses the image, the access and the volume of the program itself."""
    pod = find_object(objects, "Deployment", "roostream-controller")["spec"]["template"]["spec"]
    program = pod["containers"][0]
    (init_container,) = (c for c in pod["initContainers"] if c["name"] == "store")
    assert init_container["args"][:4] == ["checkpoint", "init", "--store", "$(STORE)"]
    assert init_container["args"][4] == "--wait" and float(init_container["args"][5]) >= 300, (
        "the store may be unavailable at first"
    )
    assert init_container["image"] == program["image"]
    settings = {source["configMapRef"]["name"] for source in program["envFrom"] if "configMapRef" in source}
    assert init_container["env"][0]["valueFrom"]["configMapKeyRef"]["name"] in settings
    assert [s for s in init_container["envFrom"] if s not in program["envFrom"]] == []
    # The keys of the object store are also equal: a deployment may give each program its own and have no
    # common ones.
    assert [s for s in program["envFrom"] if "secretRef" in s] == [
        s for s in init_container["envFrom"] if "secretRef" in s
    ]
    mounts = [m for m in program["volumeMounts"] if m["name"] == "store"]
    assert [m for m in init_container["volumeMounts"] if m["name"] == "store"] == mounts


def test_the_memory_of_every_program_is_watched(objects: Objects) -> None:
    rules = [
        rule for o in of_kind(objects, "PrometheusRule") for g in o["spec"]["groups"] for rule in g["rules"]
    ]
    if not rules:
        pytest.skip("the overlay for one node has no monitoring")
    (rule,) = (rule for rule in rules if rule.get("alert") == "RoostreamMemoryNearLimit")
    (names,) = re.findall(r'container=~"([^"]+)"', rule["expr"])
    programs = {
        container["name"]
        for w in workloads(objects)
        for container in w.pod["containers"]
        if w.kind != "FlinkDeployment"  # Java takes as much memory as it may have
    }
    assert set(names.split("|")) == programs


def test_every_metrics_service_has_one_monitor(objects: Objects) -> None:
    if not of_kind(objects, "ServiceMonitor"):
        pytest.skip("the overlay for one node has no monitoring")
    found = [
        (component, m["spec"]["endpoints"][0].get("scheme", "http"))
        for m in of_kind(objects, "ServiceMonitor")
        for component in m["spec"]["selector"]["matchExpressions"][0]["values"]
    ]
    ports = {
        w.labels["app.kubernetes.io/component"]: w.pod["containers"][0]["readinessProbe"]["httpGet"]
        .get("scheme", "HTTP")
        .lower()
        for w in workloads(objects)
        if "readinessProbe" in w.pod["containers"][0]
    }
    with_metrics = {
        s["metadata"]["labels"]["app.kubernetes.io/component"]
        for s in of_kind(objects, "Service")
        if any(p["name"] == "metrics" for p in s["spec"]["ports"])
    }
    assert sorted(found) == sorted((component, ports[component]) for component in with_metrics)
    assert dict(found)["serving"] == "https"

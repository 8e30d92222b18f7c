"""Rules for every pod. Each rule takes a workload and yields a sentence for every violation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

from roostream.runtime.program import STOP_S
from tests.k8s.manifests import K8S, Workload

Rule = Callable[[Workload], Iterator[str]]

_PINNED = re.compile(r"[\w./-]+(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$")
_USES_THE_API = {"FlinkDeployment"}
_PROBED_BY_AN_OPERATOR = {"FlinkDeployment"}  # Flink's operator watches its pods


def unprivileged(workload: Workload) -> Iterator[str]:
    """The pod runs as an unprivileged user, under the runtime's seccomp profile."""
    security = workload.pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or security.get("runAsUser", 0) < 1000:
        yield "expected runAsNonRoot and a runAsUser from 1000 on"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "expected the seccomp profile RuntimeDefault"
    if {"hostNetwork", "hostPID", "hostIPC"} & {key for key, value in workload.pod.items() if value}:
        yield "expected namespaces of its own"


def without_capabilities(workload: Workload) -> Iterator[str]:
    """No container may write to its root file system, gain privileges or have a capability."""
    for container in workload.containers:
        security = container.get("securityContext", {})
        required = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if {key: security.get(key) for key in required} != required or security.get("privileged"):
            yield f"{container['name']}: expected {required}, got {security}"


def restricted(workload: Workload) -> Iterator[str]:
    """The API server admits the pod to a namespace that enforces the Pod Security level `restricted`
    (https://kubernetes.io/docs/concepts/security/pod-security-standards)."""
    pod = workload.pod.get("securityContext", {})
    for container in workload.containers:
        security = pod | container.get("securityContext", {})
        capabilities = security.get("capabilities", {})
        broken = {
            "allowPrivilegeEscalation: false": security.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot: true": security.get("runAsNonRoot") is not True,
            "a runAsUser other than 0": security.get("runAsUser") == 0,
            "seccompProfile: RuntimeDefault or Localhost": security.get("seccompProfile", {}).get("type")
            not in ("RuntimeDefault", "Localhost"),
            "capabilities: drop ALL": "ALL" not in capabilities.get("drop", ()),
            "no added capability but NET_BIND_SERVICE": bool(
                set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}
            ),
        }
        yield from (
            f"{container['name']}: expected {required}" for required, is_so in broken.items() if is_so
        )
    for volume in workload.pod.get("volumes", ()):
        allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
        if not volume.keys() & (allowed | {"projected", "secret"}):
            yield f"volume {volume['name']}: expected a kind that restricted allows"


def with_limits(workload: Workload) -> Iterator[str]:
    """Containers request CPU and memory, and limit their memory and what they write."""
    for container in workload.containers:
        if workload.kind == "FlinkDeployment" and container["name"] == "flink-main-container":
            continue  # the operator sets them from jobManager.resource and taskManager.resource
        resources = container.get("resources", {})
        if not {"cpu", "memory"} <= set(resources.get("requests", {})) or "memory" not in resources.get(
            "limits", {}
        ):
            yield f"{container['name']}: expected requests of cpu and memory, and a limit of memory"
    for volume in workload.pod.get("volumes", ()):
        if "hostPath" in volume:
            yield f"volume {volume['name']}: expected none of the node's folders"
        if volume.get("emptyDir") == {}:
            yield f"volume {volume['name']}: expected a sizeLimit"


def pinned(workload: Workload) -> Iterator[str]:
    """Images have a fixed version."""
    images = {c["image"] for c in workload.containers if "image" in c}
    images |= {workload.spec["image"]} if workload.kind == "FlinkDeployment" else set()
    for image in images:
        if not _PINNED.fullmatch(image):
            yield f"expected an image with a tag other than latest, or a digest, got {image}"


def probed(workload: Workload) -> Iterator[str]:
    """Every container has a startup, a liveness and a readiness probe."""
    if workload.kind not in _PROBED_BY_AN_OPERATOR:
        for container in workload.pod["containers"]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe not in container:
                    yield f"{container['name']}: expected a {probe}"


def liveness_ignores_peers(workload: Workload) -> Iterator[str]:
    """Probes that restart a container do not depend on other programs. Only `/readyz` does."""
    for container in workload.containers:
        for probe in ("startupProbe", "livenessProbe"):
            path = container.get(probe, {}).get("httpGet", {}).get("path", "/livez")
            if path != "/livez":
                yield f"{container['name']}: expected a {probe} of /livez, got {path}"


def termination_message_from_logs(workload: Workload) -> Iterator[str]:
    """`kubectl describe` shows the last log line, which says what is wrong with the settings
    (docs/decisions/0022)."""
    for container in workload.containers:
        if (
            "--config" in container.get("args", ())
            and container.get("terminationMessagePolicy") != "FallbackToLogsOnError"
        ):
            yield f"{container['name']}: expected terminationMessagePolicy: FallbackToLogsOnError"


def without_api_token(workload: Workload) -> Iterator[str]:
    """The pod has no token of the API server and no variables that name the namespace's services."""
    if workload.kind not in _USES_THE_API and workload.pod.get("automountServiceAccountToken") is not False:
        yield "expected automountServiceAccountToken: false"
    if workload.pod.get("enableServiceLinks") is not False:
        yield "expected enableServiceLinks: false"


def leaves_a_lost_node(workload: Workload) -> Iterator[str]:
    """The pod leaves an unreachable node earlier than Kubernetes' default of five minutes."""
    if _is_ours(workload):
        tolerated = {t["key"]: t.get("tolerationSeconds", 300) for t in workload.pod.get("tolerations", ())}
        for reason in ("not-ready", "unreachable"):
            if tolerated.get(f"node.kubernetes.io/{reason}", 300) > 60:
                yield f"expected to tolerate {reason} for at most 60 s"


def with_grace_period(workload: Workload) -> Iterator[str]:
    """The grace period covers the preStop hook and the time that the program may take to stop."""
    if workload.kind != "FlinkDeployment" and _is_ours(workload):
        container = workload.pod["containers"][0]
        needed_s = _before_stop_s(container) + _stop_s(container)
        if workload.pod.get("terminationGracePeriodSeconds", 30) < needed_s:
            yield f"expected terminationGracePeriodSeconds of at least {needed_s:g}"


def _before_stop_s(container: dict[str, Any]) -> float:
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    found = re.search(r"--notice (\d+)|^sleep (\d+)$", " ".join(command))
    return float(found[1] or found[2]) if found else 0.0


def _stop_s(container: dict[str, Any]) -> float:
    """How long the program may take to stop after SIGTERM."""
    if container["name"] != "serving":
        return STOP_S
    settings = tomllib.loads((K8S / "base/config/serving.toml").read_text(encoding="utf-8"))
    return float(settings["stop_ms"]) / 1000  # includes drain_ms


def _is_ours(workload: Workload) -> bool:
    return "roostream" in str(workload.labels.get("app.kubernetes.io/part-of"))


RULES: tuple[Rule, ...] = (
    *(
        restricted,
        unprivileged,
        without_capabilities,
        with_limits,
        pinned,
        probed,
        liveness_ignores_peers,
        termination_message_from_logs,
        without_api_token,
        leaves_a_lost_node,
        with_grace_period,
    ),
)

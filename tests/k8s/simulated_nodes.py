"""Simulated nodes: they report the states of pods as a kubelet would, and run nothing.

assigned pod ─► Running, Ready        deleted pod ─► gone        resource Kafka ─► Ready (Strimzi's part)
"""

from __future__ import annotations

import contextlib
import threading
import urllib.error
from types import TracebackType
from typing import Any, Self

from tests.k8s.api_server import ApiServer

CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "200", "ephemeral-storage": "1Ti"}
DISKS = 40
_READY = [
    {"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "Initialized", "PodScheduled")
]
_EVERY_S = 0.2


class SimulatedNodes:
    """A context manager over a server whose controllers run."""

    def __init__(self, server: ApiServer, count: int) -> None:
        self.server, self.names = server, [f"node-{n}" for n in range(count)]
        self.min_ready: dict[
            tuple[str, str], int
            # (namespace, component) → the smallest number of pods that were ready at once
        ] = {}
        self.failures: list[BaseException] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulated-nodes")

    def __enter__(self) -> Self:
        for name in self.names:
            self.server.call(
                "POST",
                "/api/v1/nodes",
                {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}},
            )
            conditions = [{"type": "Ready", "status": "True", "reason": "Said"}]
            status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": conditions}
            self.server.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})
            self.server.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        for number in range(DISKS):
            spec = {
                "capacity": {"storage": "1Ti"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": f"/none/{number}"},
            }
            self.server.call(
                "POST", "/api/v1/persistentvolumes", {"metadata": {"name": f"disk-{number}"}, "spec": spec}
            )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def reset_min_ready(self) -> None:
        """Count the smallest numbers of ready pods again from now on."""
        self.min_ready = {}

    def _run(self) -> None:
        while not self._end.wait(_EVERY_S):
            try:
                self._turn()
            except Exception as error:
                self.failures.append(error)

    def _turn(self) -> None:
        ready: dict[tuple[str, str], int] = {}
        for pod in self.server.call("GET", "/api/v1/pods")["items"]:
            meta = pod["metadata"]
            group = meta["namespace"], meta["labels"].get("app.kubernetes.io/component", "")
            ready[group] = ready.get(group, 0) + (is_ready(pod) and "deletionTimestamp" not in meta)
            with contextlib.suppress(
                urllib.error.HTTPError
            ):  # somebody else changed or deleted the pod; the next turn sees its new state
                self._report(pod)
        for group in {*ready, *self.min_ready}:
            count = ready.get(group, 0)
            self.min_ready[group] = min(count, self.min_ready.get(group, count))
        self._kafka()

    def _report(self, pod: dict[str, Any]) -> None:
        url = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self.server.call("DELETE", url, {"gracePeriodSeconds": 0})
        elif pod["spec"].get("nodeName") and not is_ready(pod):
            self.server.call("PATCH", f"{url}/status", {"status": {"phase": "Running", "conditions": _READY}})

    def _kafka(self) -> None:
        for kafka in self.server.call("GET", "/apis/kafka.strimzi.io/v1/kafkas")["items"]:
            if "status" not in kafka:
                meta = kafka["metadata"]
                url = f"/apis/kafka.strimzi.io/v1/namespaces/{meta['namespace']}/kafkas/{meta['name']}/status"
                self.server.call(
                    "PATCH", url, {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
                )


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))

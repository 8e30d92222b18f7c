"""Docker builds the images and starts infra/compose.yaml: requests are ranked and trained, killed programs
come back, and a second start continues from the last commit."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from infra.ports import HOST, Ports
from tests.containers.docker import docker
from tests.containers.serving_calls import answers, simulate
from tests.e2e.loop_stack import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
PROGRAMS = {"controller", "shard-0", "shard-1", "worker", "features", "serving", "joiner"}
FLINK = {"flink", "task-manager"}
_START_S, _TRAIN_S = 300.0, 300.0


class ComposeStack:
    """The services of infra/compose.yaml under a project name of their own."""

    def __init__(self, images: dict[str, str], port: int) -> None:
        self.url = f"http://{HOST}:{port}"
        self._project = f"roostream-{uuid.uuid4().hex[:8]}"
        self._variables = {**images, "SERVING_PORT": str(port)}

    def compose(self, *arguments: str) -> str:
        """Run a command of Docker Compose."""
        options = ("compose", "--file", "infra/compose.yaml", "--project-name", self._project)
        return docker(*options, *arguments, **self._variables)

    def container(self, service: str) -> dict[str, Any]:
        """What Docker knows of the service's container."""
        (found,) = json.loads(docker("inspect", self.compose("ps", "--all", "--quiet", service).strip()))
        return dict(found)

    def commits(self) -> list[int]:
        """The numbers of the commits in the store, newest first."""
        store = "/var/lib/roostream/store"
        printed = self.compose(
            "exec", "controller", "roostream", "checkpoint", "list", "--store", store, "--json"
        )
        return [commit["seq"] for commit in json.loads(printed)]


@pytest.fixture
def stack(images: dict[str, str]) -> Iterator[ComposeStack]:
    ports = Ports()
    stack = ComposeStack(images, ports.draw())
    try:
        yield stack
    finally:
        print(stack.compose("logs", "--tail", "40"))
        stack.compose("down", "--volumes", "--timeout", "5")
        ports.release()


def test_the_compose_file_runs_the_whole_loop(stack: ComposeStack) -> None:
    stack.compose("up", "--detach")
    wait_until("serving answers", lambda: answers(stack.url, "/healthz"), _START_S)
    simulate(stack.url, 60)
    wait_until("serving is ready", lambda: answers(stack.url, "/readyz"), _START_S)
    for name in PROGRAMS | FLINK:
        container = stack.container(name)
        assert container["State"]["Running"] and not container["RestartCount"], name
        assert container["HostConfig"]["ReadonlyRootfs"], name
        assert container["Config"]["User"] == "10001:10001", name
    wait_until("training commits", lambda: len(stack.commits()) >= 2, _TRAIN_S)
    assert "compiling kernels" not in stack.compose("logs"), "the images have all kernels"

    for name in ("shard-0", "worker", "task-manager"):
        os.kill(stack.container(name)["State"]["Pid"], signal.SIGKILL)
    committed = max(stack.commits())
    simulate(stack.url, 60)
    wait_until("training goes on after kills", lambda: max(stack.commits()) > committed + 2, _TRAIN_S)

    stack.compose("stop")
    for name in PROGRAMS:
        assert stack.container(name)["State"]["ExitCode"] == 0, name
    stack.compose("start")
    wait_until("serving is ready again", lambda: answers(stack.url, "/readyz"), _START_S)
    committed = max(stack.commits())
    simulate(stack.url, 60)
    wait_until("a second start continues", lambda: max(stack.commits()) > committed + 2, _TRAIN_S)
    audit = stack.compose("run", "--rm", "--no-deps", "topics", "audit", "--kafka", "kafka:9092")
    assert "accounted" in audit and "yes" in audit

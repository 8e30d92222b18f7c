"""Images and nodes for the tests of containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.docker import TARGETS, build_image, docker
from tests.containers.kubernetes_node import KubernetesNode

_TOOLS = ("containerd", "ctr", "iptables", "ip", "kubectl")


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """Variable → image, of each target of the Dockerfile."""
    if shutil.which("docker") is None or "Server Version" not in docker("info", check=False):
        pytest.skip("Docker does not answer: start it, or set DOCKER_HOST")
    return {variable: build_image(variable) for variable in TARGETS}


@pytest.fixture(scope="module")
def node(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesNode]:
    """A node with our images, the definitions of operators, and Kafka."""
    if os.geteuid() or any(shutil.which(tool) is None for tool in _TOOLS):
        pytest.skip(f"a node needs root, and {', '.join(_TOOLS)} on PATH")
    if not Path("/usr/lib/cni/ptp").exists():
        pytest.skip("a node needs /usr/lib/cni, of Debian's package containernetworking-plugins")
    with KubernetesNode(tmp_path_factory.mktemp("node")) as node:
        for variable, target in TARGETS.items():
            node.import_image(images[variable], f"registry.example.org/{target}:0.1.0")
        node.import_image("docker.io/library/redis:7.4", "docker.io/library/redis:7.2.5")
        node.install_definitions()
        node.start_kafka()
        yield node

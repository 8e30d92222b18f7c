"""Images and clusters for the tests of containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.deployment import KAFKA_IMAGE
from tests.containers.docker import TARGETS, build_image, docker
from tests.containers.kubernetes_cluster import KubernetesCluster

_TOOLS = ("containerd", "ctr", "ipset", "iptables", "ip", "kubectl")


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """Variable → image, of each target of the Dockerfile."""
    if shutil.which("docker") is None or "Server Version" not in docker("info", check=False):
        pytest.skip("Docker does not answer: start it, or set DOCKER_HOST")
    return {variable: build_image(variable) for variable in TARGETS}


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubernetesCluster]:
    """A cluster of the module's number of NODES with our images and the definitions of operators."""
    if os.geteuid() or any(shutil.which(tool) is None for tool in _TOOLS):
        pytest.skip(f"nodes need root, and {', '.join(_TOOLS)} on PATH")
    if not Path("/usr/lib/cni/ptp").exists():
        pytest.skip("nodes need /usr/lib/cni, of Debian's package containernetworking-plugins")
    with KubernetesCluster(tmp_path_factory.mktemp("cluster"), request.module.NODES) as cluster:
        for variable, target in TARGETS.items():
            cluster.import_image(images[variable], f"registry.example.org/{target}:0.1.0")
        cluster.import_image("docker.io/library/redis:7.4", "docker.io/library/redis:7.2.5")
        cluster.import_image(KAFKA_IMAGE, KAFKA_IMAGE)
        cluster.install_definitions()
        yield cluster

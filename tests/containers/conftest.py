"""Images for the tests of containers."""

from __future__ import annotations

import shutil

import pytest

from tests.containers.docker import TARGETS, build_image, docker


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    """Variable → image, of each target of the Dockerfile."""
    if shutil.which("docker") is None or "Server Version" not in docker("info", check=False):
        pytest.skip("Docker does not answer: start it, or set DOCKER_HOST")
    return {variable: build_image(variable) for variable in TARGETS}

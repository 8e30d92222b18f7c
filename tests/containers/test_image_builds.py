"""Two builds of a checkout give images with equal digests."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.containers.docker import TARGETS, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("target", TARGETS.values())
def test_two_builds_of_an_image_are_equal(target: str, tmp_path: Path) -> None:
    """Neither uses a layer or a package that the other one built. `BUILDX_BUILDER` names the builder."""
    described = docker("buildx", "inspect", check=False) if shutil.which("docker") else ""
    driver = re.search(r"^Driver: +(\S+)$", described, re.MULTILINE)
    if driver is None or driver[1] == "docker":
        pytest.skip("Docker's own builder cannot set times of files: run docker buildx create --use")
    digests = []
    for build in ("first", "second"):
        options = {
            "--file": "infra/image/Dockerfile",
            "--target": target,
            "--output": "type=image,rewrite-timestamp=true",
            "--metadata-file": str(tmp_path / build),
        }
        arguments = {"SOURCE_DATE_EPOCH": "1700000000", "BUILDKIT_CACHE_MOUNT_NS": build}
        words = [word for option in options.items() for word in option]
        words += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        docker("buildx", "build", "--no-cache", "--provenance=false", *words, ".")
        digests.append(json.loads((tmp_path / build).read_text())["containerimage.digest"])
    assert digests[0] == digests[1]

"""Docker's command line, and images of this checkout."""

from __future__ import annotations

import os
import subprocess
import uuid

from infra.options import ROOT

TARGETS = {"IMAGE": "roostream", "DATA_IMAGE": "roostream-data", "FLINK_IMAGE": "roostream-flink"}
"""Variable of infra/compose.yaml or values.yaml → the target in the Dockerfile."""


def docker(*arguments: str, check: bool = True, **variables: str) -> str:
    """Run a command of Docker in the checkout and return what it printed. With `check`, an error fails the
    test."""
    completed = subprocess.run(
        ("docker", *arguments),
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or completed.returncode == 0, f"{' '.join(arguments)}:\n{completed.stdout[-4000:]}"
    return completed.stdout


def build_image(variable: str) -> str:
    """The image that the variable of the environment names, else a new one that is built from the
    Dockerfile."""
    target = TARGETS[variable]
    image = os.environ.get(variable) or f"{target}:{uuid.uuid4().hex[:8]}"
    if variable not in os.environ:
        docker("build", "--file", "infra/image/Dockerfile", "--target", target, "--tag", image, ".")
    return image

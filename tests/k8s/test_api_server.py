"""A real API server takes every overlay as it is."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.api_server import ApiServer
from tests.k8s.binaries import SERVER, find, go
from tests.k8s.manifests import OVERLAYS, built, own_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Objects = tuple[dict[str, Any], ...]
_OF_EVERY_HEADLESS = "spec.SessionAffinity is ignored for headless services"  # also where none is said: it is a default


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH")
    if go() is None and find(SERVER) is None:
        pytest.skip("Go is not on this machine, and no API server was built before: schemas are checked by test_schemas.py alone")
    with ApiServer(tmp_path_factory.mktemp("server")) as running:
        running.install_definitions()
        yield running


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
def test_the_server_takes_an_overlay_without_a_warning(
    overlay: str, server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unknown fields are errors; a pod that the namespace's security level would refuse is a warning."""
    objects = objects_of(overlay, tmp_path_factory)
    done = server.apply(objects)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("Warning") and _OF_EVERY_HEADLESS not in line]
    assert warnings == []

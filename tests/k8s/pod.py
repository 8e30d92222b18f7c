"""Starts a container's program on this machine as a kubelet would: with its arguments, environment, mounted
files and folders.

Differences: the folders /etc/roostream, /var/lib/roostream and /var/cache/roostream are below a folder of the
test, ports are free ones, and names of services are replaced with addresses that the test gives.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.contract.source_tree import ROOT
from tests.k8s.manifests import Workload, find_object

Objects = tuple[dict[str, Any], ...]
_MOVED = re.compile(r"(?<![\w.-])/(etc/roostream|var/lib/roostream|var/cache/roostream)(?=[/\"'\s]|$)")
_INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "TMPDIR")


@dataclasses.dataclass(frozen=True)
class ContainerCommand:
    """The command line, environment and folder with which to start the container's program."""

    command: list[str]
    environment: dict[str, str]
    arguments: list[str]
    folder: Path


@dataclasses.dataclass(frozen=True)
class Kubelet:
    """`secrets`: name → file → contents. `replacements`: texts of the manifests that differ on this
    machine."""

    objects: Objects
    folder: Path
    secrets: Mapping[str, Mapping[str, bytes]]
    replacements: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def start(self, workload: Workload, container: dict[str, Any], index: int = 0) -> ContainerCommand:
        """Write the container's files and return how to start its program."""
        for mount in container.get("volumeMounts", ()):
            self._mount(workload, mount)
        environment = self._environment(container, index)
        arguments = [self.localize(a) for a in container["args"]]
        command = [
            sys.executable,
            "-m",
            "roostream.cli.main",
            *arguments,
        ]  # the image's entry point
        inherited = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        return ContainerCommand(
            command, {**inherited, "PYTHONPATH": str(ROOT), **environment}, arguments, self.folder
        )

    def localize(self, text: str) -> str:
        """Translate a text of the manifests to this machine."""
        moved = _MOVED.sub(rf"{self.folder}/\1", text)
        for found, put in self.replacements.items():
            moved = moved.replace(found, put)
        return moved

    def _mount(self, workload: Workload, mount: dict[str, Any]) -> None:
        path = Path(self.localize(mount["mountPath"]))
        if not path.is_relative_to(self.folder):
            return  # /tmp is this machine's own
        files = self._files(workload, mount["name"])
        if files is None:
            path.mkdir(parents=True, exist_ok=True)
        elif "subPath" in mount:
            _write(path, files[mount["subPath"]])
        else:
            for name, contents in files.items():
                _write(path / name, contents)

    def _files(self, workload: Workload, volume: str) -> dict[str, bytes] | None:
        """The files of a ConfigMap or a Secret; None for a folder."""
        found = next((v for v in workload.pod.get("volumes", ()) if v["name"] == volume), {})
        if "configMap" in found:
            data = find_object(self.objects, "ConfigMap", found["configMap"]["name"])["data"]
            return {name: self.localize(text).encode() for name, text in data.items()}
        if "secret" not in found:
            return None
        files = self.secrets[found["secret"]["secretName"]]
        items = found["secret"].get("items")
        return {i["path"]: files[i["key"]] for i in items} if items else dict(files)

    def _environment(self, container: dict[str, Any], index: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:
                data = find_object(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"]
                found |= {source.get("prefix", "") + name: value for name, value in data.items()}
        for variable in container.get("env", ()):
            value = variable.get("value")
            if value is None:
                value = self._value(variable["valueFrom"], index)
            found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], value)
        return {name: self.localize(value) for name, value in found.items()}

    def _value(self, source: dict[str, Any], index: int) -> str:
        if "configMapKeyRef" in source:
            return str(
                find_object(self.objects, "ConfigMap", source["configMapKeyRef"]["name"])["data"][
                    source["configMapKeyRef"]["key"]
                ]
            )
        fields = {"metadata.labels['apps.kubernetes.io/pod-index']": str(index), "status.podIP": "127.0.0.1"}
        return fields[source["fieldRef"]["fieldPath"]]


def _write(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)

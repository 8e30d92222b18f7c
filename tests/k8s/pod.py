"""A container as a kubelet starts it, on this machine: arguments, environment, mounted files and folders.

What differs: the three folders that manifests mount below are looked for in a folder of the test
(`/etc/roostream` → `FOLDER/etc/roostream`), ports are drawn, and names of services lead to wherever the test
says.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.contract.house import ROOT
from tests.k8s.manifests import Workload, named

Objects = tuple[dict[str, Any], ...]
_MOVED = re.compile(r"(?<![\w.-])/(etc/roostream|var/lib/roostream|var/cache/roostream)(?=[/\"'\s]|$)")
_KEPT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "TMPDIR")


@dataclasses.dataclass(frozen=True)
class Started:
    """What is to be executed."""

    command: list[str]
    environment: dict[str, str]
    arguments: list[str]
    folder: Path


@dataclasses.dataclass(frozen=True)
class Kubelet:
    """`secrets`: name → file → contents, as operators and people make them; `instead`: texts that are others
    on this machine."""

    objects: Objects
    folder: Path
    secrets: Mapping[str, Mapping[str, bytes]]
    instead: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def start(self, workload: Workload, container: dict[str, Any], index: int = 0) -> Started:
        """Lay the container's files out, and tell how it is executed."""
        for mount in container.get("volumeMounts", ()):
            self._mount(workload, mount)
        environment = self._environment(container, index)
        arguments = [self.here(a) for a in container["args"]]
        command = [
            sys.executable,
            "-m",
            "roostream.cli.main",
            *arguments,
        ]  # the image's entry point, `roostream`
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        return Started(command, {**kept, "PYTHONPATH": str(ROOT), **environment}, arguments, self.folder)

    def here(self, text: str) -> str:
        """A text of the manifests as this machine has it."""
        moved = _MOVED.sub(rf"{self.folder}/\1", text)
        for found, put in self.instead.items():
            moved = moved.replace(found, put)
        return moved

    def _mount(self, workload: Workload, mount: dict[str, Any]) -> None:
        place = Path(self.here(mount["mountPath"]))
        if not place.is_relative_to(self.folder):
            return  # /tmp is this machine's
        files = self._files(workload, mount["name"])
        if files is None:
            place.mkdir(parents=True, exist_ok=True)
        elif "subPath" in mount:
            _write(place, files[mount["subPath"]])
        else:
            for name, contents in files.items():
                _write(place / name, contents)

    def _files(self, workload: Workload, volume: str) -> dict[str, bytes] | None:
        """Of a ConfigMap or a Secret; None for a folder."""
        found = next((v for v in workload.pod.get("volumes", ()) if v["name"] == volume), {})
        if "configMap" in found:
            data = named(self.objects, "ConfigMap", found["configMap"]["name"])["data"]
            return {name: self.here(text).encode() for name, text in data.items()}
        if "secret" not in found:
            return None
        files = self.secrets[found["secret"]["secretName"]]
        items = found["secret"].get("items")
        return {i["path"]: files[i["key"]] for i in items} if items else dict(files)

    def _environment(self, container: dict[str, Any], index: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:
                data = named(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"]
                found |= {source.get("prefix", "") + name: value for name, value in data.items()}
        for variable in container.get("env", ()):
            value = variable.get("value")
            if value is None:
                value = self._value(variable["valueFrom"], index)
            found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], value)
        return {name: self.here(value) for name, value in found.items()}

    def _value(self, source: dict[str, Any], index: int) -> str:
        if "configMapKeyRef" in source:
            return str(
                named(self.objects, "ConfigMap", source["configMapKeyRef"]["name"])["data"][
                    source["configMapKeyRef"]["key"]
                ]
            )
        fields = {"metadata.labels['apps.kubernetes.io/pod-index']": str(index), "status.podIP": "127.0.0.1"}
        return fields[source["fieldRef"]["fieldPath"]]


def _write(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)

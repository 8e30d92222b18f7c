"""Kubernetes' own programs, built once from their Go modules and cached outside the source tree.

go mod download ─► copy of the module ─► go.mod with versions instead of replacements ─► go build ─►
<cache>/<version>/<program>

`python -m tests.k8s.binaries` builds them. The first build takes some minutes and 1 GB. ROOSTREAM_K8S_CACHE
names another folder than ~/.cache/roostream/kubernetes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KUBERNETES, ETCD, COREDNS, KUBE_ROUTER = "1.34.1", "3.6.5", "1.13.1", "2.1.0"
CERT_MANAGER = "1.10.2"
"""The programs of later versions are modules of their own, which have no versions."""
SERVER, CONTROLLERS, SCHEDULER = "kube-apiserver", "kube-controller-manager", "kube-scheduler"
PROGRAMS = (SERVER, "etcd", CONTROLLERS, SCHEDULER)
PROGRAMS_OF_A_NODE = ("kubelet", "kube-proxy", "kube-router", "coredns")
OPERATORS = ("cert-manager",)
_CERT_MANAGER_MODULE = "github.com/cert-manager/cert-manager"
_GO = "/usr/local/go/bin/go"
_STAGED = f"v0.{KUBERNETES.partition('.')[2]}"
"""The version of the modules that Kubernetes' own go.mod refers to by folder."""


def cache() -> Path:
    folder = os.environ.get("ROOSTREAM_K8S_CACHE", "")
    return Path(folder) if folder else Path.home() / ".cache" / "roostream" / "kubernetes"


def go_command() -> str | None:
    """The path of the `go` command, from PATH or Go's default location."""
    return shutil.which("go") or (_GO if os.access(_GO, os.X_OK) else None)


def find(program: str) -> Path | None:
    """The path of a built program; None if it is not built yet."""
    path = _path(program)
    return path if path.exists() else None


def _path(program: str) -> Path:
    versions = {"etcd": ETCD, "coredns": COREDNS, "kube-router": KUBE_ROUTER, "cert-manager": CERT_MANAGER}
    folder = f"{program}-{versions[program]}" if program in versions else f"kubernetes-{KUBERNETES}"
    return cache() / folder / program


def build(programs: tuple[str, ...] = PROGRAMS) -> dict[str, Path]:
    """Build the missing programs and return program → file.

    **If it fails** (CalledProcessError, or RuntimeError without Go), programs that were built before stay.
    """
    missing = [p for p in programs if find(p) is None]
    if "etcd" in missing:
        _build("go.etcd.io/etcd/server/v3", f"v{ETCD}", {".": "etcd"})
    if "coredns" in missing:
        _build("github.com/coredns/coredns", f"v{COREDNS}", {".": "coredns"})
    if "kube-router" in missing:
        packages = {"./cmd/kube-router": "kube-router"}
        _build("github.com/cloudnativelabs/kube-router/v2", f"v{KUBE_ROUTER}", packages)
    if "cert-manager" in missing:
        _build(_CERT_MANAGER_MODULE, f"v{CERT_MANAGER}", {"./cmd/controller": "cert-manager"})
    others = ("etcd", "coredns", "kube-router", *OPERATORS)
    kubernetes_packages = {f"./cmd/{p}": p for p in missing if p not in others}
    if kubernetes_packages:
        _build("k8s.io/kubernetes", f"v{KUBERNETES}", kubernetes_packages)
    return {p: _path(p) for p in programs}


def definitions_of_cert_manager() -> list[Path]:
    """The files of its custom resource definitions. Their labels are templates."""
    folder = _download(_go(), _CERT_MANAGER_MODULE, f"v{CERT_MANAGER}")
    return sorted((folder / "deploy" / "crds").glob("*.yaml"))


def _go() -> str:
    command = go_command()
    if command is None:
        raise RuntimeError("Go is not installed")
    return command


def _download(command: str, module: str, version: str) -> Path:
    """The folder of a module, which is read-only."""
    downloaded = subprocess.run(
        (command, "mod", "download", "-json", f"{module}@{version}"),
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(json.loads(downloaded.stdout)["Dir"])


def _build(module: str, version: str, packages: dict[str, str]) -> None:
    command = _go()
    downloaded = _download(command, module, version)
    with tempfile.TemporaryDirectory(prefix="roostream-go-") as folder:
        source = Path(folder) / "source"
        shutil.copytree(downloaded, source, ignore=shutil.ignore_patterns("vendor", "go.work*"))
        for path in (source, *source.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        file = source / "go.mod"
        file.write_text(standalone(file.read_text(encoding="utf-8")), encoding="utf-8")
        for package, program in packages.items():
            target = _path(program)
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(".new")
            options = ("-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", str(unfinished))
            subprocess.run(
                (command, "build", *options, package),
                cwd=source,
                check=True,
                env={**os.environ, "GOFLAGS": "-buildvcs=false"},
            )
            unfinished.rename(target)


def standalone(go_mod: str) -> str:
    """Replace a `go.mod`'s references to folders with requirements by version."""
    kept = re.sub(r"^(replace )?.* => \.\.?/.*\n", "", go_mod, flags=re.MULTILINE)
    return re.sub(r"^(\s+k8s\.io/[\w-]+) v0\.0\.0$", rf"\1 {_STAGED}", kept, flags=re.MULTILINE)


if __name__ == "__main__":
    for program, path in build(tuple(sys.argv[1:]) or PROGRAMS).items():
        print(f"{program}: {path}")

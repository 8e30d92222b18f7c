"""Kubernetes' own programs, built once from their Go modules and kept outside of the tree. `python -m
tests.k8s.binaries`

    go mod download ─► a copy of it ─► its replaced requirements named by version ─► go build ─►
    <cache>/<version>/<program>

Some minutes and 1 GB for the first time. ROOSTREAM_K8S_CACHE names another folder than
~/.cache/roostream/kubernetes.
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

KUBERNETES, ETCD = "1.34.1", "3.6.5"
SERVER, CONTROLLERS, SCHEDULER = "kube-apiserver", "kube-controller-manager", "kube-scheduler"
PROGRAMS = (SERVER, "etcd", CONTROLLERS, SCHEDULER)
_GO = "/usr/local/go/bin/go"
_STAGED = f"v0.{KUBERNETES.partition('.')[2]}"
"""Version of the modules that Kubernetes' own refers to by folders beside it."""


def cache() -> Path:
    named = os.environ.get("ROOSTREAM_K8S_CACHE", "")
    return Path(named) if named else Path.home() / ".cache" / "roostream" / "kubernetes"


def go() -> str | None:
    """Go's command, on PATH or where its own installer puts it."""
    return shutil.which("go") or (_GO if os.access(_GO, os.X_OK) else None)


def find(program: str) -> Path | None:
    """A program that was built; None if it wasn't."""
    path = _place(program)
    return path if path.exists() else None


def _place(program: str) -> Path:
    return cache() / (f"etcd-{ETCD}" if program == "etcd" else f"kubernetes-{KUBERNETES}") / program


def build(programs: tuple[str, ...] = PROGRAMS) -> dict[str, Path]:
    """Whatever of these isn't there yet; program → file.

    **If it fails** (CalledProcessError, RuntimeError: no Go): what was built before stays.
    """
    missing = [p for p in programs if find(p) is None]
    if "etcd" in missing:
        _build("go.etcd.io/etcd/server/v3", f"v{ETCD}", {".": "etcd"})
    ours = {f"./cmd/{p}": p for p in missing if p != "etcd"}
    if ours:
        _build("k8s.io/kubernetes", f"v{KUBERNETES}", ours)
    return {p: _place(p) for p in programs}


def _build(module: str, version: str, packages: dict[str, str]) -> None:
    command = go()
    if command is None:
        raise RuntimeError("Go is not on this machine")
    told = subprocess.run(
        (command, "mod", "download", "-json", f"{module}@{version}"),
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="roostream-go-") as folder:
        source = Path(folder) / "source"
        shutil.copytree(
            json.loads(told.stdout)["Dir"], source, ignore=shutil.ignore_patterns("vendor", "go.work*")
        )
        for path in (source, *source.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        file = source / "go.mod"
        file.write_text(standalone(file.read_text(encoding="utf-8")), encoding="utf-8")
        for package, program in packages.items():
            target = _place(program)
            target.parent.mkdir(parents=True, exist_ok=True)
            new = target.with_suffix(".new")
            options = ("-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", str(new))
            subprocess.run(
                (command, "build", *options, package),
                cwd=source,
                check=True,
                env={**os.environ, "GOFLAGS": "-buildvcs=false"},
            )
            new.rename(target)


def standalone(go_mod: str) -> str:
    """A `go.mod` without replacements: what they replaced is required by its version."""
    kept = re.sub(r"^replace \((?:\n.*?)*?\n\)|^replace .*$", "", go_mod, flags=re.MULTILINE)
    return re.sub(r"^(\s+k8s\.io/[\w-]+) v0\.0\.0$", rf"\1 {_STAGED}", kept, flags=re.MULTILINE)


if __name__ == "__main__":
    for program, path in build(tuple(sys.argv[1:]) or PROGRAMS).items():
        print(f"{program}: {path}")

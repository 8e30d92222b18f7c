"""A real API server on loopback, with etcd, the controllers and the scheduler behind it; no container is
started anywhere."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from infra.ports import HOST, Ports, responds_ok
from tests.k8s.binaries import CONTROLLERS, SCHEDULER, SERVER, build
from tests.k8s.manifests import CRDS

TOKEN = "only-for-this-test"
_LOOPS = (
    *(
        "statefulset-controller",
        "deployment-controller",
        "replicaset-controller",
        "job-controller",
        "disruption-controller",
    ),
    *(
        "persistentvolume-binder-controller",
        "persistentvolumeclaim-protection-controller",
        "serviceaccount-controller",
    ),
    *("namespace-controller", "garbage-collector-controller", "endpointslice-controller"),
)
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the server has a self-signed certificate
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE


class ApiServer:
    """`kubectl` speaks to it. Used as `with ApiServer(folder) as server`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._children = folder, list[subprocess.Popen[bytes]]()
        self._ports = Ports()
        self.port, self._etcd, self._peer = self._ports.draw(), self._ports.draw(), self._ports.draw()
        self.config = folder / "kubeconfig"

    def __enter__(self) -> Self:
        self.programs = build((SERVER, "etcd"))
        self._write_config()
        self._start_etcd()
        self._start_server()
        self.until(
            lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok",
            "the API server is ready",
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._ports.release()

    def kubectl(
        self, *arguments: str, stdin: str = "", check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One call. With `check`, an error of the server is the test's."""
        command = (shutil.which("kubectl") or "kubectl", "--kubeconfig", str(self.config), *arguments)
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=900, cwd=cwd
        )
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One request without a process for it. A PATCH is a merge. Raises urllib.error.HTTPError: the
        server's own refusals."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{HOST}:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=600, context=_UNVERIFIED) as answer:
            return dict(json.load(answer))

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Objects of a kind."""
        return list(json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)["items"])

    def start_loops(self) -> None:
        """Whatever makes pods of sets, binds claims, counts budgets and places pods on nodes."""
        self.programs |= build((CONTROLLERS, SCHEDULER))
        loops = f"--controllers={','.join(_LOOPS)}"
        self._start(
            CONTROLLERS, f"--kubeconfig={self.config}", loops, "--leader-elect=false", "--secure-port=0"
        )
        self._start(SCHEDULER, f"--kubeconfig={self.config}", "--leader-elect=false", "--secure-port=0")

    def install_definitions(self) -> None:
        """What operators would install before us."""
        self.kubectl(
            "apply", "--server-side", *(a for path in sorted(CRDS.glob("*.json")) for a in ("-f", str(path)))
        )
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=900s")

    def apply(self, objects: tuple[dict[str, Any], ...], *options: str) -> subprocess.CompletedProcess[str]:
        """As a person would, refusing what the server doesn't know."""
        return self.kubectl(
            "apply",
            "--server-side",
            "--validate=strict",
            *options,
            "-f",
            "-",
            stdin=yaml.safe_dump_all(objects),
            check=False,
        )

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 900.0) -> None:
        """Wait for it; the logs' ends are in the error."""
        end_s = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end_s:
                ends = {p.name: p.read_text(errors="replace")[-800:] for p in self.folder.glob("*.log")}
                raise AssertionError(f"expected that {what}, got {ends}")
            time.sleep(0.2)

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            command = (str(self.programs[program]), *arguments)
            self._children.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def _start_etcd(self) -> None:
        url, peer = f"http://{HOST}:{self._etcd}", f"http://{HOST}:{self._peer}"
        told = (f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}")
        first = (
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._start(
            "etcd", f"--data-dir={self.folder / 'etcd'}", *told, *first, "--logger=zap", "--log-level=warn"
        )
        self.until(lambda: responds_ok(f"{url}/health"), "etcd answers")

    def _start_server(self) -> None:
        key = self.folder / "accounts.key"
        openssl = ("openssl", "genrsa", "-out", str(key), "2048")
        subprocess.run(openssl, check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f"{TOKEN},admin,1,system:masters\n", encoding="utf-8")
        accounts = (f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}")
        self._start(
            SERVER,
            f"--etcd-servers=http://{HOST}:{self._etcd}",
            *accounts,
            f"--service-account-issuer=https://{HOST}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--secure-port={self.port}",
            f"--bind-address={HOST}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--request-timeout=10m",  # a machine that is busy is slow, not wrong
        )

    def _write_config(self) -> None:
        cluster = {"server": f"https://{HOST}:{self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.config.touch(mode=0o600)
        self.config.write_text(yaml.safe_dump(config), encoding="utf-8")

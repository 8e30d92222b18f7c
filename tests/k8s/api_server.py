"""A real Kubernetes API server on loopback with etcd, controllers and the scheduler. No container is
started."""

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
_CONTROLLER_NAMES = (
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
    """A context manager; `kubectl` talks to the server."""

    poll_s = 0.2
    """How often `until` looks."""

    def __init__(self, folder: Path, address: str = HOST) -> None:
        self.folder, self.address, self._children = folder, address, list[subprocess.Popen[bytes]]()
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
        """Run one kubectl command. With `check`, an error fails the test."""
        command = (shutil.which("kubectl") or "kubectl", "--kubeconfig", str(self.config), *arguments)
        completed = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=900, cwd=cwd
        )
        assert not check or completed.returncode == 0, f"{' '.join(arguments)}: {completed.stderr}"
        return completed

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Send one request without starting kubectl. A PATCH is a merge patch. Raises urllib.error.HTTPError
        if the server refuses the request."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://{self.address}:{self.port}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=600, context=_UNVERIFIED) as answer:
            return dict(json.load(answer))

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """List the objects of a kind."""
        return list(json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)["items"])

    def start_controllers(self) -> None:
        """Start the controllers and the scheduler, which create pods of sets, bind claims, count budgets and
        assign pods to nodes."""
        self.programs |= build((CONTROLLERS, SCHEDULER))
        controllers = f"--controllers={','.join(_CONTROLLER_NAMES)}"
        self._start(
            CONTROLLERS, f"--kubeconfig={self.config}", controllers, "--leader-elect=false", "--secure-port=0"
        )
        self._start(SCHEDULER, f"--kubeconfig={self.config}", "--leader-elect=false", "--secure-port=0")

    def install_definitions(self) -> None:
        """Install the custom resource definitions, which operators install in a real cluster."""
        self.kubectl(
            "apply", "--server-side", *(a for path in sorted(CRDS.glob("*.json")) for a in ("-f", str(path)))
        )
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=900s")

    def apply(self, objects: tuple[dict[str, Any], ...], *options: str) -> subprocess.CompletedProcess[str]:
        """Apply objects as a user does, and refuse unknown fields."""
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

    def until(self, condition: Callable[[], bool], description: str, seconds: float = 900.0) -> None:
        """Wait until the condition holds. On a timeout the error contains the ends of the logs."""
        end_s = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end_s:
                log_ends = {p.name: p.read_text(errors="replace")[-800:] for p in self.folder.glob("*.log")}
                raise AssertionError(f"expected that {description}, got {log_ends}")
            time.sleep(self.poll_s)

    def start(self, name: str, *command: str) -> None:
        """Start a program that ends with the server. Its output is NAME.log in the folder."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self._children.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def _start(self, program: str, *arguments: str) -> None:
        self.start(program, str(self.programs[program]), *arguments)

    def _start_etcd(self) -> None:
        url, peer = f"http://{HOST}:{self._etcd}", f"http://{HOST}:{self._peer}"
        listen_options = (
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
        )
        cluster_options = (
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._start(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            *listen_options,
            *cluster_options,
            "--logger=zap",
            "--log-level=warn",
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
            f"--bind-address={self.address}",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--request-timeout=10m",  # a busy machine may be slow
        )

    def _write_config(self) -> None:
        cluster = {"server": f"https://{self.address}:{self.port}", "insecure-skip-tls-verify": True}
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

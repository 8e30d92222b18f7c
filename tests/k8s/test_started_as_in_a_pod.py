"""Starts the programs of pods here with their arguments, environment and files. The settings are accepted,
the program is alive, its readiness probe names the peer it waits for, and it stops on request."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis

from infra.ports import Ports
from infra.program_specs import find_spec
from roostream.runtime import redis_client
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.store_identity import init_store
from roostream.schema.settings import check_environment, load
from tests.certificates import Authority
from tests.k8s.manifests import OVERLAYS, Workload, build_custom_overlay, build_overlay, workloads
from tests.k8s.pod import ContainerCommand, Kubelet
from tests.serving.online_features.feature_cases import find_redis

Objects = tuple[dict[str, Any], ...]
LINKED = ("shard", "controller", "worker", "serving")
MAX_WAIT_S = 600.0
"""The time limit for a state that a program reaches by itself, which takes minutes on a busy machine."""
PROGRAMS = (
    "shard",
    "controller",
    "worker",
    "serving",
    "features",
    "auditor",
    "archiver",
    "compactor",
    "reader",
    "joiner",
)


class AnySecrets(dict[str, dict[str, bytes]]):
    """A namespace in which every Secret exists and has the same files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir()
        authority = Authority(folder, "authority")
        certificate, key = (Path(p).read_bytes() for p in authority.issue("user", "link.roostream"))
        ca = authority.pem.read_bytes()
        self.files = {
            "ca.crt": ca,
            "user.crt": certificate,
            "user.key": key,
            "tls.crt": certificate,
            "tls.key": key,
        }
        self.files |= {
            "serving": b"s3rving\n",
            "features": b"f3atures\n",
            "keys.json": b'{"keys": []}',
            "token": b"0123456789abcdef0123456789abcdef",
        }

    def __missing__(self, name: str) -> dict[str, bytes]:
        return self.files


def of_overlay(overlay: str, folder: Path) -> Objects:
    if overlay != "all":
        return build_overlay(overlay)
    (folder / "own").mkdir()
    return build_custom_overlay(folder / "own")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_programs_accept_the_settings_of_their_pods(overlay: str, tmp_path: Path) -> None:
    """The program itself checks keys, variables, ranges and files, also for the last of several pods."""
    objects = of_overlay(overlay, tmp_path)
    checked = set()
    for workload in workloads(objects):
        for container in workload.containers:
            if "--config" not in container.get("args", ()) or workload.kind == "FlinkDeployment":
                continue
            program = container["args"][0]
            for index in {0, workload.spec.get("replicas", 1) - 1}:
                kubelet = Kubelet(
                    objects, tmp_path / f"{program}-{index}", AnySecrets(tmp_path / f"{program}-{index}-keys")
                )
                started = kubelet.start(workload, container, index)
                check_environment([program], (), started.environment)
                config = load(
                    find_spec(program).settings_class(),
                    started.arguments[-1],
                    program=program,
                    environ=started.environment,
                )
                assert getattr(config, "index", index) == index
                # Kubernetes would restart a program that ends with exit code 75 forever.
                assert getattr(config, "wait_on_hold", True)
            checked.add(program)
    assert checked == {*PROGRAMS}


@pytest.mark.skipif(find_redis() is None, reason="redis-server is not installed; run `make setup`")
def test_serving_and_the_updater_are_two_users_of_redis(tmp_path: Path) -> None:
    """Starts the overlay's own Redis server and uses each pod's user and password."""
    objects, ports = build_overlay("dev"), Ports()
    port = ports.draw()
    found = {w.name: w for w in workloads(objects)}
    secrets = AnySecrets(tmp_path / "keys")
    (script,) = found["roostream-redis"].pod["containers"][0]["command"][2:]
    for name in ("serving", "features"):
        (tmp_path / name).write_bytes(secrets.files[name])
    script = script.replace("/etc/redis/", f"{tmp_path}/").replace("redis-server -", f"{find_redis()} -")
    script = script.replace("maxmemory", f"port {port}\nbind 127.0.0.1\nmaxmemory")
    settings = {}
    for program in ("serving", "features"):
        workload = found[f"roostream-{program}"]
        replacements = {"roostream-redis:6379": f"127.0.0.1:{port}"}
        started = Kubelet(objects, tmp_path / f"{program}-root", secrets, replacements).start(
            workload, workload.pod["containers"][0]
        )
        settings[program] = load(
            find_spec(program).settings_class(),
            started.arguments[-1],
            program=program,
            environ=started.environment,
        )
    server = subprocess.Popen(("/bin/sh", "-c", f"exec {script}"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        clients = {
            name: redis_client.client(config.redis_url, timeout_s=5.0)  # type: ignore[attr-defined]
            for name, config in settings.items()
        }
        deadline_s = time.monotonic() + 60
        while True:
            try:
                assert clients["features"].hset("features:at", "x", "1") == 1
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        assert clients["serving"].mget("features:i:1") == [None]
        for name, command in (("serving", ("HSET", "features:at", "x", "2")), ("features", ("FLUSHALL",))):
            with pytest.raises(redis.exceptions.NoPermissionError):
                clients[name].execute_command(*command)
    finally:
        server.kill()
        server.wait()
        ports.release()


def test_every_program_may_have_its_own_keys_of_the_object_store(tmp_path: Path) -> None:
    for workload in workloads(of_overlay("all", tmp_path)):
        for container in workload.pod["containers"]:
            secrets = [s["secretRef"]["name"] for s in container.get("envFrom", ()) if "secretRef" in s]
            if secrets:  # of entries with the same name the last one counts
                program = workload.name.removeprefix("roostream-").removesuffix("-watch")
                assert secrets == ["roostream-objects", f"roostream-objects-{program}"], workload.name


def test_shard_counts_agree(tmp_path: Path) -> None:
    """The set's size, the controller's number and the addresses of clients come from one value, because they
    must be equal."""
    objects = of_overlay("all", tmp_path)
    found = {w.name: w for w in workloads(objects)}
    count = found["roostream-shard"].spec["replicas"]
    environment = {
        name: Kubelet(objects, tmp_path / name, AnySecrets(tmp_path / f"{name}-keys"))
        .start(w, w.pod["containers"][0])
        .environment
        for name, w in found.items()
        if w.kind != "FlinkDeployment"
    }
    assert environment["roostream-shard"]["ROOSTREAM_SHARD_NUM_SHARDS"] == str(count) == "3"
    assert environment["roostream-controller"]["ROOSTREAM_CONTROLLER_NUM_SHARDS"] == str(count)
    expected_shards = f"roostream-shard-{{{count}}}.roostream-shard:7000"
    assert environment["roostream-worker"]["ROOSTREAM_WORKER_SHARDS"] == expected_shards
    assert environment["roostream-serving"]["ROOSTREAM_SERVING_SHARDS"] == expected_shards


@pytest.mark.parametrize(("overlay", "needs_credentials"), [("dev", False), ("prod", True), ("all", True)])
def test_link_tls_requires_credentials(overlay: str, needs_credentials: bool, tmp_path: Path) -> None:
    """References in a mounted TOML file lead to variables of the pod's environment and to files of its
    secrets."""
    objects = of_overlay(overlay, tmp_path)
    checked = {}
    for workload in workloads(objects):
        for container in workload.containers:
            program = container.get("args", [""])[0]
            if program in LINKED and "--config" in container["args"]:
                kubelet = Kubelet(objects, tmp_path / program, AnySecrets(tmp_path / f"{program}-keys"))
                started = kubelet.start(workload, container)
                config = load(
                    find_spec(program).settings_class(),
                    started.arguments[-1],
                    program=program,
                    environ=started.environment,
                )
                keys = LinkCredentials(config.link)
                checked[program] = (keys.security.is_mutual_tls, bool(keys.tokens), keys.security.name)
    assert checked == dict.fromkeys(
        LINKED, (needs_credentials, needs_credentials, "link.roostream" if needs_credentials else "")
    )


class RunningContainer:
    """A container's program on free ports whose peers are all unavailable."""

    def __init__(self, program: str, folder: Path, overlay: str = "dev") -> None:
        self.ports = Ports()
        self.metrics, listen, unavailable_port = self.ports.draw(), self.ports.draw(), self.ports.draw()
        replacements = {
            "0.0.0.0:7000": f"127.0.0.1:{listen}",
            "0.0.0.0:8080": f"127.0.0.1:{listen}",
            "127.0.0.1:7100": "127.0.0.1:0",
        }
        replacements |= {"9090\n": f"{self.metrics}\n", "[]\n": "[]\n"}
        names = (
            "roostream-kafka-bootstrap:9093",
            "roostream-controller:7000",
            "roostream-joiner-rest:8081",
            "roostream-redis:6379",
        )
        replacements |= dict.fromkeys(names, f"127.0.0.1:{unavailable_port}")
        workload, self.container = _find(program, overlay)
        self.kubelet = kubelet = Kubelet(
            build_overlay(overlay), folder / "root", AnySecrets(folder / "keys"), replacements
        )
        self.command: ContainerCommand = kubelet.start(workload, self.container)
        init_store(
            kubelet.localize("/var/lib/roostream/store")
        )  # the controller's pod does this in a cluster
        self.address = f"127.0.0.1:{listen}"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command.command, env=self.command.environment, stdout=log, stderr=log, cwd=folder
            )

    def stop(self) -> int:
        """Send SIGTERM and return the exit code; kill the program if it does not end. Other tests check the
        time limit: here a program that still compiles on a busy machine ends only after the compilation."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.ports.release()

    def probe(self, name: str) -> tuple[int, str]:
        """Status and text of a probe; status 0 while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/{name}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait(self, name: str, text: str) -> tuple[int, str]:
        """Wait until the probe answers with this text or the program ends."""
        end_s = time.monotonic() + MAX_WAIT_S
        while True:
            found = self.probe(name)
            if re.search(text, found[1]) or self.process.poll() is not None or time.monotonic() > end_s:
                return found
            time.sleep(0.1)


def _find(program: str, overlay: str) -> tuple[Workload, dict[str, Any]]:
    for workload in workloads(build_overlay(overlay)):
        for container in workload.containers:
            if container.get("args", [""])[0] == program:
                return workload, container
    raise AssertionError(program)


@pytest.mark.slow
@pytest.mark.timeout(4 * MAX_WAIT_S)
@pytest.mark.parametrize(
    ("program", "waits_for"),
    [
        ("shard", "(waits|waiting) for the controller"),
        ("controller", "starting|waits for"),
        ("worker", "starting|waits for"),
        ("serving", "starting|waits for|rows|model"),
        ("features", "starting|waits for"),
        ("auditor", "starting|waits for"),
        ("archiver", "starting|waits for"),
        ("compactor", "start an archiver, which creates it"),
        ("reader", "starting|waits for"),
        ("joiner", "Flink|starting"),
    ],
)
def test_a_pod_without_its_peers_stays_alive_and_stops_on_request(
    program: str, waits_for: str, tmp_path: Path
) -> None:
    running = RunningContainer(program, tmp_path)
    try:
        alive = running.wait("livez", "ok")
        assert alive == (200, "ok\n"), running.log.read_text()[-2000:]
        status, reason = running.wait("readyz", waits_for)
        assert status == 503 and re.search(waits_for, reason), (status, reason)
    finally:
        code = running.stop()
    assert code == 0, running.log.read_text()[-2000:]
    lines = running.log.read_text().splitlines()
    assert lines and all(line.startswith("{") for line in lines), "every log line must be a JSON object"


@pytest.mark.slow
@pytest.mark.timeout(5 * MAX_WAIT_S)
def test_a_shard_answers_clients_with_certificate_and_token(tmp_path: Path) -> None:
    """Runs the pod's preStop command against the shard's own address. The shard answers that it is no
    controller, which proves that it accepted the client."""
    running = RunningContainer("shard", tmp_path, "prod")
    try:
        assert running.wait("readyz", "(waits|waiting) for the controller")[0] == 503, (
            running.log.read_text()[-2000:]
        )
        pre_stop = running.container["lifecycle"]["preStop"]["exec"]["command"][-1].removeprefix(
            "exec roostream "
        )
        variables = running.command.environment
        words = [
            running.kubelet.localize(w)
            for w in shlex.split(re.sub(r"\$(\w+)", lambda m: variables[m[1]], pre_stop))
        ]
        assert words[:2] == ["drain", "shard-0"] and words[-2] == "--link"
        words[words.index("--controller") + 1] = running.address
        assert "owners, pull, push" in _run_command(words, running)
        without_credentials = _run_command(words[:-2], running)
        assert running.address in without_credentials and "expected" not in without_credentials, (
            without_credentials
        )
    finally:
        running.stop()


def _run_command(words: list[str], running: RunningContainer) -> str:
    command = (sys.executable, "-m", "roostream.cli.main", *words)
    completed = subprocess.run(
        command,
        env=running.command.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAX_WAIT_S,
    )
    return completed.stdout + completed.stderr

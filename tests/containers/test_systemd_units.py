"""The units of infra/systemd under a real systemd, which is process 1 of a container: programs start, are
started again after a kill and not after a wrong setting, and stop in order.

Kafka and Redis are containers beside it. The joiner has its local engine, so there is no Flink.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.options import ROOT
from infra.ports import HOST, Ports
from tests.containers.docker import docker
from tests.containers.serving_calls import answers, simulate
from tests.e2e.loop_stack import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
UNITS = (
    "controller",
    "shard@0",
    "shard@1",
    "worker@0",
    "serving@0",
    "features@0",
    "joiner",
    "auditor@0",
    "archiver",
    "compactor",
)
STORE = "/var/lib/roostream-store"
_START_S, _TRAIN_S = 300.0, 300.0

_COMMON = f"""
bootstrap = "kafka:9092"
schema = "/etc/roostream/schema.toml"
store = "{STORE}"
"""
_CONTROLLER, _REDIS = 'controller = "127.0.0.1:7000"\n', 'redis = "redis://redis:6379/0"\n'
_SHARDS = 'shards = ["127.0.0.1:7010", "127.0.0.1:7011"]\n'
_WAREHOUSE = f'warehouse = "{STORE}/warehouse"\n'
SETTINGS = {
    "controller": _COMMON + 'listen = "127.0.0.1:7000"\nnum_shards = 2\ncommit_interval_ms = 10_000\n',
    "shard": _COMMON + _CONTROLLER + 'num_shards = 2\nlisten = "127.0.0.1:701${INSTANCE}"\n',
    "worker": _COMMON + _CONTROLLER + _SHARDS,
    "serving": _COMMON + _SHARDS + _REDIS + 'listen = "0.0.0.0:8080"\ninsecure = true\njoin_window = "20s"\n',
    "features": _COMMON + _REDIS,
    "joiner": _COMMON + 'engine = "local"\nhome = "/var/lib/roostream/joiner"\nwindow = "20s"\n',
    "auditor": _COMMON + 'home = "/var/lib/roostream/auditor"\n',
    "archiver": _COMMON + _WAREHOUSE,
    "compactor": _WAREHOUSE,
}
_STORE_DROP_IN = f"[Service]\nReadWritePaths={STORE}\n"
DROP_INS = {
    **dict.fromkeys(("controller", "shard@", "worker@", "archiver", "compactor"), _STORE_DROP_IN),
    "joiner": f"{_STORE_DROP_IN}StateDirectory=roostream/joiner\n",
}
"""What docs/operations/deploy.md tells to add, since the store is outside of /var/lib/roostream."""

_DOCKERFILE = """
FROM {image}
USER root
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd
COPY units /etc/systemd/system
COPY settings /etc/roostream
RUN env | grep ^NUMBA_CPU > /etc/roostream/environment \\
 && rmdir /var/cache/roostream && cp -r /opt/roostream/kernels /var/cache/roostream
ENTRYPOINT []
STOPSIGNAL SIGRTMIN+3
CMD ["/lib/systemd/systemd"]
"""


class SystemdHost:
    """A container that runs systemd, with the units and their settings."""

    def __init__(self, image: str, folder: Path, port: int) -> None:
        self.url, self.name = f"http://{HOST}:{port}", f"roostream-{uuid.uuid4().hex[:8]}"
        shutil.copytree(ROOT / "infra" / "systemd", folder / "units")
        for unit, text in DROP_INS.items():
            drop_in = folder / "units" / f"roostream-{unit}.service.d"
            drop_in.mkdir()
            (drop_in / "store.conf").write_text(text, encoding="utf-8")
        settings = folder / "settings"
        settings.mkdir()
        shutil.copy(ROOT / "roostream" / "replay" / "schemas" / "demo.toml", settings / "schema.toml")
        for program, text in SETTINGS.items():
            (settings / f"{program}.toml").write_text(text, encoding="utf-8")
        (folder / "Dockerfile").write_text(_DOCKERFILE.format(image=image), encoding="utf-8")
        docker("build", "--tag", self.name, str(folder))
        docker("network", "create", self.name)
        run = ("run", "--detach", "--network", self.name, "--label", self.name)
        variables = (f"--env={key}={value}" for key, value in _KAFKA.items())
        docker(*run, "--network-alias", "kafka", *variables, "docker.io/apache/kafka:4.2.0")
        docker(*run, "--network-alias", "redis", "docker.io/library/redis:7.4")
        writable = ("--tmpfs", "/run", "--tmpfs", "/run/lock", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup")
        published = ("--publish", f"{HOST}:{port}:8080")
        unconfined = (f"--security-opt={what}=unconfined" for what in ("seccomp", "apparmor", "systempaths"))
        docker(
            *run, "--name", self.name, "--cap-add", "SYS_ADMIN", *unconfined, *writable, *published, self.name
        )

    def close(self) -> None:
        containers = docker("ps", "--all", "--quiet", "--filter", f"label={self.name}").split()
        docker("rm", "--force", "--volumes", *containers)
        docker("network", "rm", self.name)
        docker("image", "rm", self.name)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the container as root, and return what it printed."""
        return docker("exec", self.name, *command, check=check)

    def state(self, unit: str) -> dict[str, str]:
        """What systemd knows of a unit."""
        shown = "ActiveState,SubState,Result,NRestarts,ExecMainStatus"
        printed = self.run("systemctl", "show", f"roostream-{unit}", f"--property={shown}")
        return dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)

    def states(self) -> dict[str, str]:
        """Unit → whether it is active, inactive or failed."""
        return {unit: self.state(unit)["ActiveState"] for unit in UNITS}

    def commits(self) -> int:
        """The newest commit's number; 0 = none."""
        printed = self.run("roostream", "checkpoint", "list", "--store", STORE, "--json")
        return max((commit["seq"] for commit in json.loads(printed)), default=0)


_KAFKA: dict[str, Any] = {
    "KAFKA_NODE_ID": 1,
    "KAFKA_PROCESS_ROLES": "broker,controller",
    "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
    "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://kafka:9092",
    "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
    "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@kafka:9093",
    "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": 1,
    "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": 1,
    "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": 1,
    "KAFKA_MESSAGE_MAX_BYTES": 8388608,
}


@pytest.fixture
def host(images: dict[str, str], tmp_path: Path) -> Iterator[SystemdHost]:
    ports = Ports()
    host = SystemdHost(images["IMAGE"], tmp_path, ports.draw())
    try:
        yield host
    finally:
        print(host.run("journalctl", "--no-pager", "--lines", "200", check=False))
        host.close()
        ports.release()


def test_the_units_run_the_loop_under_systemd(host: SystemdHost) -> None:
    topics = ("roostream", "topics", "create", "--kafka", "kafka:9092")
    wait_until("topics exist", lambda: "exist" in host.run(*topics, check=False), _START_S)
    host.run("install", "-d", "-o", "roostream", "-g", "roostream", STORE)
    host.run(
        "setpriv", "--reuid=roostream", "--clear-groups", "roostream", "checkpoint", "init", "--store", STORE
    )
    host.run("systemctl", "enable", "--now", *(f"roostream-{unit}" for unit in UNITS))
    host.run("systemctl", "enable", "--now", "roostream.target")
    wait_until("serving is ready", lambda: answers(host.url, "/readyz"), _START_S)
    simulate(host.url, 40)
    wait_until("training commits", lambda: host.commits() >= 2, _TRAIN_S)
    assert set(host.states().values()) == {"active"}, host.states()
    assert {unit for unit in UNITS if host.state(unit)["NRestarts"] != "0"} == set()

    assert "compiling kernels" not in host.run("journalctl", "--no-pager"), (
        "`roostream prepare` made all of them"
    )

    host.run("systemctl", "kill", "--signal=KILL", "roostream-shard@0", "roostream-worker@0")
    before = host.commits()
    simulate(host.url, 40)
    wait_until("training goes on after kills", lambda: host.commits() > before + 1, _TRAIN_S)
    assert host.state("shard@0")["NRestarts"] == host.state("worker@0")["NRestarts"] == "1"

    host.run("sed", "-i", "s/^redis =/reddis =/", "/etc/roostream/features.toml")
    host.run("systemctl", "restart", "roostream-features@0")
    wait_until("a wrong setting ends it", lambda: host.state("features@0")["ActiveState"] == "failed", 60)
    assert host.state("features@0")["ExecMainStatus"] == "2"
    host.run("sed", "-i", "s/^reddis =/redis =/", "/etc/roostream/features.toml")
    host.run("systemctl", "restart", "roostream-features@0")

    host.run("systemctl", "stop", "roostream.target")
    wait_until("all programs stop", lambda: set(host.states().values()) == {"inactive"}, 60)
    assert {unit: host.state(unit)["Result"] for unit in UNITS} == dict.fromkeys(UNITS, "success")
    host.run("systemctl", "start", "roostream.target")
    wait_until("serving is ready again", lambda: answers(host.url, "/readyz"), _START_S)
    before = host.commits()
    simulate(host.url, 40)
    wait_until("training goes on after a stop", lambda: host.commits() > before + 1, _TRAIN_S)
    audit = ("roostream", "audit", "--kafka", "kafka:9092", "--window", "20s")
    wait_until("every event is accounted for", lambda: "yes" in host.run(*audit, check=False), _TRAIN_S)

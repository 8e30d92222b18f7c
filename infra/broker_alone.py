"""The broker of a stopped home, started alone and only to be read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from infra import kafka_broker, logs
from infra.home import Home
from infra.jars import find_java, java_home
from infra.options import StackOptions
from infra.ports import HOST, Ports
from infra.supervisor import Supervisor
from roostream.errors import SetupError, UnavailableError

_READY_S = 60.0
_NEVER_MS = 1 << 40
_KEPT = f"log.retention.check.interval.ms={_NEVER_MS}\nlog.initial.task.delay.ms={_NEVER_MS}\n"


@contextlib.contextmanager
def broker_alone(home: Home, java: str = "") -> Iterator[str]:
    """host:port of the broker, which is stopped behind the block. It makes no topics, and deletes no records however old.

    Raises:
        SetupError: a stack runs in this home, or it has no broker of its own.
        UnavailableError: the broker was not ready in time; with the end of its log.
    """
    if not (home.root / "kafka" / "meta.properties").exists():
        raise SetupError(
            f"{home.root} has no Kafka of its own; name the one that it used with --kafka HOST:PORT"
        )
    command, ports, supervisor = find_java(java), Ports(), Supervisor(lambda: None)
    home.make()
    home.lock()
    try:
        home.end_leftovers()
        port = ports.draw()
        env = {**os.environ, "JAVA_HOME": str(java_home(command))}
        whole = kafka_broker.program(home, StackOptions(), env, command, port, ports.draw())

        def prepare() -> None:
            whole.prepare()
            with (home.conf / "kafka.properties").open("a", encoding="utf-8") as file:
                file.write(_KEPT)

        supervisor.open()
        supervisor.want([dataclasses.replace(whole, prepare=prepare, on_ready=lambda: None)])
        if not supervisor.wait(lambda: supervisor.slots[whole.name].state == "ready", _READY_S):
            said = " ".join(logs.last_lines(whole.log, 1)) or "nothing"
            raise UnavailableError(
                f"Kafka of {home.root} was not ready within {_READY_S:.0f} s; its log ends: {said}"
            )
        yield f"{HOST}:{port}"
        supervisor.stop([whole.name])
    finally:
        supervisor.close()
        ports.release()
        home.unlock()

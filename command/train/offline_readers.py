"""`reader` programs beside `roostream train`: the controller in this process tells them what to read, a supervisor keeps as many
running as it wishes for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import tomli_w

from command.train.config import TrainConfig
from infra.child import Program, StopRank
from infra.home import Home
from infra.options import ROOT
from infra.supervisor import Supervisor
from roo.schema import Schema
from runtime.clock import Clock
from runtime.rpc_client import SocketTransport
from runtime.rpc_server import RpcServer
from runtime.transport import InMemoryTransport
from trainer.control.controller import Controller
from trainer.control.read_master import ReadMaster
from warehouse.readers.config import ReadersConfig
from warehouse.readers.remote_rows import ReadByPrograms, ReadersLink

_FOLLOW_S = 1.0
_STOP_S = 10.0


class OfflineReaders:
    """Until `close`, as many as the controller wishes for."""

    def __init__(self, config: TrainConfig, home: Home, controller: Controller, schema: Schema, clock: Clock) -> None:
        self.config, self.home, self.clock = config, home, clock
        self.master = ReadMaster(controller.session_now, schema, clock, config.reader_count)
        self.server = RpcServer(self.master.handle)
        self.supervisor = Supervisor(lambda: None)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="readers", daemon=True)

    def open(self) -> OfflineReaders:
        self.server.start()
        self.supervisor.open()
        self.resize(self.config.reader_count.least)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends them, by force those that don't. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.supervisor.stop(list(self.supervisor.slots))
        self.supervisor.close()
        self.server.stop()

    def reading(self, settings: ReadersConfig, incarnation: Callable[[], int]) -> ReadByPrograms:
        """Who reads for the worker of this process."""
        link = ReadersLink(
            controller=lambda: InMemoryTransport(self.master.handle), dial=SocketTransport, worker=0, incarnation=incarnation
        )
        return ReadByPrograms(link, settings, self.clock)

    def resize(self, count: int) -> None:
        """Have so many run: the first ones."""
        self.supervisor.want([self._program(number) for number in range(count)])
        if over := [name for name, slot in self.supervisor.slots.items() if int(name[7:]) >= count and slot.state != "stopped"]:
            self.supervisor.stop(over)

    def _follow(self) -> None:
        while not self._stop.wait(_FOLLOW_S):
            self.resize(max(self.master.status()["wanted"], self.config.reader_count.least))

    def _program(self, number: int) -> Program:
        name = f"reader-{number}"
        conf = self.home.conf / f"{name}.toml"
        table: dict[str, Any] = {"controller": self.server.address}

        def prepare() -> None:
            conf.parent.mkdir(parents=True, exist_ok=True)
            conf.write_text(tomli_w.dumps(table), encoding="utf-8")

        return Program(
            name=name,
            command=(sys.executable, "-m", "command.main", "reader", "--config", str(conf)),
            log=self.home.log(name),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))},
            prepare=prepare,
            stop_rank=StopRank.FEATURES,
            stop_timeout_s=_STOP_S,
        )
